"""Everything that changes while a model trains, and its way into a checkpoint and back."""

import math
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from kerneq.run.config import Config, write
from kerneq.training import checkpoint
from kerneq.training.average import Average
from kerneq.training.errors import CheckpointError, TrainingError
from kerneq.training.meter import Meter
from kerneq.training.optimizer import momentum, restore_momentum, sgd
from kerneq.training.process import Process


@final
class State:
    """Model, average, momentum, sums of the epoch so far, random states, and the place in the run."""

    def __init__(self, model: nn.Module, config: Config, process: Process):
        self.model = model
        self.config = config
        self.process = process
        self.captured = config.training.graph and process.device.type == "cuda" and process.world == 1
        self.optimizer = sgd(model, config.optimizer, self.captured)
        self.average = Average(model, config.training.ema) if config.training.ema > 0 else None
        self.meter = Meter(process.device)
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
            found |= {f"average.{name}": value for name, value in self.average.values.items()}
        found |= {f"momentum.{name}": value for name, value in momentum(self.model, self.optimizer).items()}
        found["meter"] = self.process.total(self.meter.sums)
        for kind, random in self._random_states().items():
            parts = self.process.gather(random.to(self.process.device))
            found |= {f"random.{kind}.{rank}": part for rank, part in enumerate(parts)}
        return found

    def facts(self) -> dict[str, Any]:
        names = ("epoch", "batch", "step", "rate", "best", "seconds")
        return {name: getattr(self, name) for name in names} | {"config": write(self.config)}

    def _random_states(self) -> dict[str, Tensor]:
        states = {"cpu": torch.get_rng_state()}
        if self.process.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self.process.device)
        return states

    def check_finite(self) -> None:
        """Refuse to go on, and above all to save, once a weight is infinite or NaN; waits for the device."""
        values = [value for value in self.model.state_dict().values() if value.is_floating_point()]
        if not math.isfinite(float(get_total_norm(values))):
            raise TrainingError(
                f"A weight became infinite or NaN by step {self.step} (epoch {self.epoch + 1}). {REMEDY}"
            )

    def restore(self, path: Path) -> None:
        """Continue from the checkpoint at `path`: afterwards everything is bit for bit as it was saved."""
        tensors, facts = checkpoint.load(path)
        try:
            load_weights(self.model, part(tensors, "model."))
            if self.average is not None:
                self.average.restore(part(tensors, "average."))
            restore_momentum(self.model, self.optimizer, part(tensors, "momentum."))
            # The sums are those of all processes together: the first one carries them on.
            self.meter.sums.copy_(tensors["meter"] if self.process.leads else torch.zeros_like(tensors["meter"]))
            self._restore_random(tensors)
            self.epoch, self.batch, self.step = (int(facts[name]) for name in ("epoch", "batch", "step"))
            self.rate, self.best, self.seconds = float(facts["rate"]), facts["best"], float(facts["seconds"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise CheckpointError(f"{path} belongs to another run: {error}") from None
            raise CheckpointError(f"{path} belongs to another run or version: it lacks {error}.") from None

    def _restore_random(self, tensors: dict[str, Tensor]) -> None:
        rank = self.process.rank
        if f"random.cpu.{rank}" not in tensors:  # saved by fewer processes
            torch.manual_seed(self.config.seed + rank)
            return
        torch.set_rng_state(tensors[f"random.cpu.{rank}"])
        if self.process.device.type == "cuda" and f"random.cuda.{rank}" in tensors:
            torch.cuda.set_rng_state(tensors[f"random.cuda.{rank}"], self.process.device)


REMEDY = (
    "The last good checkpoint is intact. Lower optimizer.lr, set training.clip (for example 1.0) or a longer "
    "schedule.warmup, and start a new run."
)


def part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors under a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def load_weights(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Put saved weights into a model; other names or shapes than the model's are a `CheckpointError`."""
    try:
        found = model.load_state_dict(values, strict=False)
    except RuntimeError as error:  # PyTorch lists every mismatch on a line of its own
        raise CheckpointError(str(error).splitlines()[-1].strip()) from None
    strange = sorted([*found.missing_keys, *found.unexpected_keys])
    if strange:
        raise CheckpointError(f"only one of the two has `{strange[0]}`.")
