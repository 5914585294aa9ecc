"""Everything that changes while a model trains, and its checkpoints: weights, average, momentum, place in the run."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from ..run import CheckpointError, Run, TrainingError, checkpoint
from ..run.config import Config, Optimizer, write
from ..run.folder import check_belongs
from .metrics import FIRST_ENTRIES, Accumulator
from .process import Process

PLACE = ("epoch", "batch", "step", "rate", "best", "seconds")  # the numbers of a state


@final
class State:
    """Model, average, momentum, sums of the epoch so far, random states, and the place in the run.

    A run that restores it goes on bit for bit as if it had never stopped.
    """

    def __init__(self, model: nn.Module, config: Config, process: Process):
        self.model = model
        self.config = config
        self.process = process
        self.captured = config.training.graph and process.device.type == "cuda" and process.world == 1
        self.optimizer = sgd(model, config.optimizer, self.captured)
        # The running average of the weights and buffers by name; empty where none is kept.
        self.average = copy_of(model) if config.training.ema > 0 else {}
        self.accumulator = Accumulator(process.device)
        self.epoch = 0  # epochs completed
        self.batch = 0  # batches of the present epoch completed
        self.step = 0  # steps of the run completed
        self.rate = 0.0  # learning rate of the last step
        self.best: float | None = None  # validation accuracy of best.safetensors
        self.seconds = 0.0  # spent on the present epoch

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor a checkpoint needs. All processes must call it together."""
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        found |= {f"average.{name}": value for name, value in self.average.items()}
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
        place = {name: getattr(self, name) for name in PLACE}
        return place | {"meter": list(self.accumulator.entries), "config": write(self.config)}

    def save(self, run: Run) -> None:
        """Write a checkpoint, unless the weights are no longer numbers. All processes must call it together."""
        self.check_weights()
        tensors = self.tensors()
        if self.process.leads:
            run.save(tensors, self.facts())

    def save_best(self, run: Run) -> None:
        """Write the weights just validated (the average, where there is one), to be evaluated later."""
        self.check_weights()
        if self.process.leads:
            weights = {f"model.{name}": value for name, value in self.model.state_dict().items()}
            checkpoint.save(run.checkpoint("best"), weights, self.facts() | {"epoch": self.epoch + 1})

    def restore(self, path: Path) -> None:
        """Continue from the checkpoint at `path`: afterwards everything is bit for bit as it was saved."""
        tensors, facts = checkpoint.load(path)
        check_belongs(path, facts, self.config)
        if self.average:  # by way of the model, which knows the shapes and memory layouts
            checkpoint.load_weights(self.model, checkpoint.part(tensors, "average."), path)
            self.average = copy_of(self.model)
        checkpoint.load_weights(self.model, checkpoint.part(tensors, "model."), path)
        try:
            for name, parameter in self.model.named_parameters():
                if f"momentum.{name}" in tensors:  # in the memory layout of its parameter
                    momentum = torch.empty_like(parameter).copy_(tensors[f"momentum.{name}"])
                    self.optimizer.state[parameter]["momentum_buffer"] = momentum
            # The sums are those of all processes together: the first one carries them on.
            sums = tensors["meter"] if self.process.leads else torch.zeros_like(tensors["meter"])
            self.accumulator.restore(sums, facts.get("meter", FIRST_ENTRIES))
            self._restore_random(tensors)
            for name in PLACE:
                setattr(self, name, facts[name])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{path} belongs to another run or version: it lacks {error}.") from None

    def _restore_random(self, tensors: dict[str, Tensor]) -> None:
        rank = self.process.rank
        if f"random.cpu.{rank}" not in tensors:  # saved by fewer processes
            torch.manual_seed(self.config.seed + rank)
            return
        torch.set_rng_state(tensors[f"random.cpu.{rank}"])
        if self.process.device.type == "cuda" and f"random.cuda.{rank}" in tensors:
            torch.cuda.set_rng_state(tensors[f"random.cuda.{rank}"], self.process.device)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the average, where there is one, into the model for a while; its own weights come back bit for bit.

        What the model has worked out about the average, the norms of its operators, stays with the average.
        """
        if not self.average:
            yield
            return
        own = copy_of(self.model)
        self.model.load_state_dict(self.average)
        try:
            yield
            self.average = copy_of(self.model)
        finally:
            self.model.load_state_dict(own)

    def check_weights(self) -> None:
        """Refuse to go on, and above all to save, once a weight is infinite or NaN; waits for the device."""
        values = [value for value in self.model.state_dict().values() if value.is_floating_point()]
        if not math.isfinite(float(get_total_norm(values))):
            self.refuse("A weight became infinite or NaN")

    def refuse(self, what: str) -> NoReturn:
        """End a run that no longer computes with numbers."""
        raise TrainingError(
            f"{what} by step {self.step} (epoch {self.epoch + 1}). The last good checkpoint is intact. Lower "
            "optimizer.lr, set training.clip (for example 1.0) or a longer schedule.warmup, and start a new run."
        )


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a model by name, as they are now."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def sgd(model: nn.Module, settings: Optimizer, captured: bool = False) -> torch.optim.SGD:
    """Momentum SGD whose weight decay spares biases and norms' scales (all parameters of fewer than two axes).

    Shrinking a scale towards zero fights the norm it belongs to instead of regularising the weights;
    `decay_all = true` decays everything, as plain SGD does. Inside a CUDA graph (`captured`) the rate is a number
    on the device, which only the fused form of SGD takes.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [p for p in parameters if p.dim() > 1 or settings.decay_all]
    spared = [p for p in parameters if p.dim() <= 1 and not settings.decay_all]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": spared, "weight_decay": 0.0}]
    return torch.optim.SGD(
        [group for group in groups if group["params"]],
        lr=torch.tensor(settings.lr, device=parameters[0].device) if captured else settings.lr,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        fused=True if captured else None,
    )
