"""Everything that changes while a model trains, and its checkpoints: weights, average, momentum, place in the run."""

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast, final

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from ..cells import AbstractKernelCell
from ..graphs import capture
from ..run import CheckpointError, Run, TrainingError, checkpoint
from ..run.config import Config, write
from ..run.folder import check_belongs
from .build import Trainable
from .metrics import FIRST_ENTRIES, Accumulator
from .optimizer import SGD, tensors
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
        self.optimizer = SGD(model, config.optimizer, self.captured)
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

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor a checkpoint needs. All processes must call it together."""
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        if self.average is not None:
            found |= {f"average.{name}": value for name, value in self.average.state_dict().items()}
        found |= {f"momentum.{name}": value for name, value in self.optimizer.momentum.items()}
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

    def checkpoint(self, run: Run) -> Callable[[], None]:
        """What writes a checkpoint of this moment; refused once the weights are no longer numbers.

        All processes must call it together.
        """
        self.check_weights()
        return partial(run.save, checkpoint.copied(self.tensors()), self.facts())

    def best_weights(self, run: Run) -> Callable[[], None]:
        """What writes the weights just validated (the average, where there is one), to be evaluated later."""
        self.check_weights()
        weights = {f"model.{name}": value for name, value in self.candidate.state_dict().items()}
        facts = self.facts() | {"epoch": self.epoch + 1}
        return partial(checkpoint.save, run.checkpoint("best"), checkpoint.copied(weights), facts)

    def restore(self, path: Path) -> None:
        """Continue from the checkpoint at `path`: afterwards everything is bit for bit as it was saved."""
        tensors, facts = checkpoint.load(path)
        check_belongs(path, facts, self.config)
        if self.average is not None:
            checkpoint.load_weights(self.average, checkpoint.part(tensors, "average."), path)
        checkpoint.load_weights(self.model, checkpoint.part(tensors, "model."), path)
        try:
            for name, momentum in self.optimizer.momentum.items():
                if f"momentum.{name}" in tensors:  # earlier versions had none before the first step
                    momentum.copy_(tensors[f"momentum.{name}"])
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

    def diagnostics(self) -> dict[str, float]:
        """Numbers about the weights that are validated, at the equilibria last seen in training."""
        for theirs, ours in zip(self.candidate.modules(), self.model.modules(), strict=True):
            if isinstance(theirs, AbstractKernelCell) and isinstance(ours, AbstractKernelCell):
                theirs.seen = ours.seen
        return cast(Trainable, self.candidate).diagnostics()

    def check_weights(self) -> None:
        """Refuse to go on, and above all to save, once a weight is infinite or NaN; waits for the device."""
        found = (*tensors(self.model).values(), *tensors(self.candidate).values())
        values = [value for value in found if value.is_floating_point()]
        if not math.isfinite(float(get_total_norm(values))):
            self.refuse("A weight became infinite or NaN")

    def refuse(self, what: str) -> NoReturn:
        """End a run that no longer computes with numbers."""
        raise TrainingError(
            f"{what} by step {self.step} (epoch {self.epoch + 1}). What was saved before is intact. Lower "
            "optimizer.lr, set training.clip (for example 1.0) or a longer schedule.warmup, and start a new run."
        )
