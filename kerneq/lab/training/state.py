"""The state of a training run (weights, average, momentum, position) and its checkpoints."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, final

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from ...cuda_graphs import capture
from ...gradients import Implicit
from ...loading import FACTS, check_facts, load_weights, read_checkpoint, select
from ...models import AbstractModel
from ...solution import NonfiniteInputError
from ...solvers.loops import CUDA_STRIDE
from ..run import CheckpointError, Run, TrainingError, checkpoint
from ..run.config import Config, write
from .metrics import Accumulator
from .optimizer import list_parameters_and_buffers, make_optimizer
from .process import Process

Write = Callable[[], None]
POSITION = {  # the numbers of a state, as a checkpoint has them
    "epoch": int,
    "batch": int,
    "step": int,
    "rate": int | float,
    "best": int | float | None,
    "seconds": int | float,
    "stale": int,
}


@final
class State:
    """Model, average, momentum, sums of the epoch so far, random states, and the place in the run.

    A run that restores it goes on bit for bit as if it had never stopped.
    """

    def __init__(self, model: AbstractModel, config: Config, process: Process):
        self.model = model
        self.config = config
        self.process = process
        alone = process.device.type == "cuda" and process.world == 1
        self.captured = config.training.graph and alone and takes_fixed_steps(model)
        self.optimizer = make_optimizer(model, config.optimizer, self.captured)
        # The model with the running average of the weights and buffers; None where none is kept.
        self.average = copy.deepcopy(model).eval() if config.training.ema > 0 else None
        # What the run is for, and what is validated; it stays where it is, so that one capture serves all epochs.
        self.candidate = model if self.average is None else self.average
        often = config.training.validate_epochs < config.training.epochs  # a capture for one validation does not pay
        self.evaluated = capture(self.candidate) if self.captured and often else self.candidate
        self.accumulator = Accumulator(process.device)
        self.epoch = 0  # epochs completed
        self.batch = 0  # batches of the present epoch completed
        self.step = 0  # steps of the run completed
        self.rate = 0.0  # learning rate of the last step
        self.best: float | None = None  # validation accuracy of best.safetensors
        self.seconds = 0.0  # spent on the present epoch
        self.stale = 0  # validations since that of the best accuracy

    @property
    def exhausted(self) -> bool:
        """Whether `training.patience` ends the run."""
        return 0 < self.config.training.patience <= self.stale

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor a checkpoint needs. All processes must call it together."""
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        if self.average is not None:
            found |= {f"average.{name}": value for name, value in self.average.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            momentum = self.optimizer.state[parameter].get("momentum_buffer")  # there is none before the first step
            if momentum is not None:
                found[f"momentum.{name}"] = momentum
        found["meter"] = self.process.total(self.accumulator.sums)
        states = {"cpu": torch.get_rng_state()}
        if self.process.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self.process.device)
        for kind, random in states.items():
            parts = self.process.gather(random.to(self.process.device))
            found |= {f"random.{kind}.{rank}": part for rank, part in enumerate(parts)}
        return found

    def facts(self) -> dict[str, Any]:
        """What a checkpoint needs besides tensors, as JSON has it."""
        place = {name: getattr(self, name) for name in POSITION}
        return place | {"meter": list(self.accumulator.entries), "config": write(self.config)}

    def checkpoint(self, run: Run) -> list[Write]:
        """What writes a checkpoint of this moment; refused once the weights are no longer numbers.

        All processes must call it together; the leading one writes.
        """
        self.check_weights()
        tensors = self.tensors()
        return [partial(run.save, checkpoint.copy_tensors(tensors), self.facts())] if self.process.leads else []

    def best_weights(self, run: Run) -> list[Write]:
        """What writes the weights just validated (the average, where there is one), to be evaluated later."""
        self.check_weights()
        if not self.process.leads:
            return []
        weights = {f"model.{name}": value for name, value in self.candidate.state_dict().items()}
        facts = self.facts() | {"epoch": self.epoch + 1}
        return [partial(checkpoint.save, run.checkpoint("best"), checkpoint.copy_tensors(weights), facts)]

    def restore(self, path: Path) -> None:
        """Continue from the checkpoint at `path`: afterwards everything is bit for bit as it was saved."""
        tensors, facts = read_checkpoint(path)
        facts = {"stale": 0} | facts  # earlier versions did not count
        check_facts(path, facts, FACTS | POSITION)
        if self.average is not None:
            load_weights(self.average, select(tensors, "average."), path)
        load_weights(self.model, select(tensors, "model."), path)
        try:
            self._restore_momentum(select(tensors, "momentum."), facts["step"])
            # The sums are those of all processes together: the first one carries them on.
            sums = tensors["meter"] if self.process.leads else torch.zeros_like(tensors["meter"])
            self.accumulator.restore(sums, facts["meter"])
            self._restore_random(tensors)
            for name in POSITION:
                setattr(self, name, facts[name])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{path} belongs to another run or version: {error}.") from None

    def _restore_momentum(self, momenta: Mapping[str, Tensor], step: int) -> None:
        """Take over the momentum of every parameter that is trained, of whose shape it must be."""
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        needed = trained if step and self.config.optimizer.momentum else {}
        if needed.keys() - momenta.keys() or momenta.keys() - trained.keys():
            raise ValueError("its momenta are not those of the parameters that are trained")
        for name, saved in momenta.items():
            parameter = trained[name]
            if saved.shape != parameter.shape or saved.dtype != parameter.dtype or not bool(saved.isfinite().all()):
                raise ValueError(f"`momentum.{name}` is not that of its parameter")
            momentum = torch.empty_like(parameter).copy_(saved)  # in the memory layout of its parameter
            self.optimizer.state[parameter]["momentum_buffer"] = momentum

    def _restore_random(self, tensors: dict[str, Tensor]) -> None:
        rank = self.process.rank
        if f"random.cpu.{rank}" not in tensors:  # saved by fewer processes
            torch.manual_seed(self.config.seed + rank)
            return
        torch.set_rng_state(tensors[f"random.cpu.{rank}"])
        if self.process.device.type == "cuda" and f"random.cuda.{rank}" in tensors:
            torch.cuda.set_rng_state(tensors[f"random.cuda.{rank}"], self.process.device)

    def read_scores(self, sums: Tensor) -> dict[str, float | None]:
        """The scores of the epoch so far, of `sums` as `Accumulator.read` takes them; a loss that is infinite or NaN
        ends the run."""
        scores = self.accumulator.read(sums)
        if scores["loss"] is not None and not math.isfinite(scores["loss"]):
            self.refuse(f"The loss became {scores['loss']}")
        return scores

    def check_weights(self) -> None:
        """Refuse to go on, and above all to save, once a weight is infinite or NaN; waits for the device."""
        found = (*list_parameters_and_buffers(self.model), *list_parameters_and_buffers(self.candidate))
        values = [value for value in found if value.is_floating_point()]
        if not math.isfinite(float(get_total_norm(values))):
            self.refuse("A weight became infinite or NaN")

    def refuse(self, what: str) -> NoReturn:
        """End a run that no longer computes with numbers."""
        raise TrainingError(
            f"{what} by step {self.step} (epoch {self.epoch + 1}). What was saved before is intact. Lower "
            "optimizer.lr (and optimizer.muon), set training.clip (for example 1.0) or a longer schedule.warmup, and "
            "start a new run."
        )


def takes_fixed_steps(model: AbstractModel) -> bool:
    """Whether no solve looks at its residual on the way, forward or backward, so that a CUDA graph can hold a step."""
    solves = [layer.limits for layer in model.layers()]
    solves += [layer.gradient.limits() for layer in model.layers() if isinstance(layer.gradient, Implicit)]
    return all((limits.check_every or CUDA_STRIDE) >= limits.max_steps for limits in solves)


@contextmanager
def explain_errors(state: State) -> Iterator[None]:
    """Say in a sentence what a step may raise that is no bug.

    A layer on a CPU refuses features that are no numbers, when the run has diverged; PyTorch refuses a batch norm of
    one value in each channel, in the middle of the first step.
    """
    try:
        yield
    except NonfiniteInputError:
        state.refuse("The features became infinite or NaN")
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise TrainingError(
            "A batch norm of this model got a single value of each channel, which has no variance: raise "
            "training.batch_size, of which every process has its share."
        ) from None
