"""Everything that changes while a model trains: weights, average, momentum, learning rate, and the place in the run."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from ..run import CheckpointError, TrainingError, checkpoint
from ..run.config import Config, Optimizer, Schedule, write
from .metrics import FIRST_ENTRIES, Accumulator
from .process import Process

REMEDY = (
    "The last good checkpoint is intact. Lower optimizer.lr, set training.clip (for example 1.0) or a longer "
    "schedule.warmup, and start a new run."
)


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
        self.average = Average(model, config.training.ema) if config.training.ema > 0 else None
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
            found |= {f"average.{name}": value for name, value in self.average.values.items()}
        found |= {f"momentum.{name}": value for name, value in momentum(self.model, self.optimizer).items()}
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
        names = ("epoch", "batch", "step", "rate", "best", "seconds")
        place = {name: getattr(self, name) for name in names}
        return place | {"meter": list(self.accumulator.entries), "config": write(self.config)}

    def restore(self, path: Path) -> None:
        """Continue from the checkpoint at `path`: afterwards everything is bit for bit as it was saved."""
        tensors, facts = checkpoint.load(path)
        checkpoint.load_weights(self.model, checkpoint.part(tensors, "model."), path)
        try:
            if self.average is not None:
                self.average.restore(checkpoint.part(tensors, "average."))
            restore_momentum(self.model, self.optimizer, checkpoint.part(tensors, "momentum."))
            # The sums are those of all processes together: the first one carries them on.
            sums = tensors["meter"] if self.process.leads else torch.zeros_like(tensors["meter"])
            self.accumulator.restore(sums, facts.get("meter", FIRST_ENTRIES))
            self._restore_random(tensors)
            self.epoch, self.batch, self.step = (int(facts[name]) for name in ("epoch", "batch", "step"))
            self.rate, self.best, self.seconds = float(facts["rate"]), facts["best"], float(facts["seconds"])
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

    def check_loss(self, loss: float | None) -> None:
        """Refuse to go on once the loss is infinite or NaN."""
        if loss is not None and not math.isfinite(loss):
            raise TrainingError(f"The loss became {loss} by step {self.step} (epoch {self.epoch + 1}). {REMEDY}")

    def check_weights(self) -> None:
        """Refuse to go on, and above all to save, once a weight is infinite or NaN; waits for the device."""
        values = [value for value in self.model.state_dict().values() if value.is_floating_point()]
        if not math.isfinite(float(get_total_norm(values))):
            raise TrainingError(
                f"A weight became infinite or NaN by step {self.step} (epoch {self.epoch + 1}). {REMEDY}"
            )


@final
class Average:
    """The exponential moving average: ā ← δ ā + (1 − δ) a for every parameter and floating-point buffer a.

    Other buffers are copied. The decay starts small, δ = min(decay, (1 + t)/(10 + t)) at update t, so that the
    random initial weights are forgotten at once.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.values = {name: value.detach().clone() for name, value in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Take the model's present weights into the average, after step number `step` (from 0)."""
        weight = 1 - min(self.decay, (1 + step) / (10 + step))
        averages, currents = [], []
        for name, value in model.state_dict().items():
            if value.shape != self.values[name].shape:  # a buffer that takes its shape from the first pictures
                self.values[name] = value.clone()
            elif value.is_floating_point():
                averages.append(self.values[name])
                currents.append(value)
            else:
                self.values[name].copy_(value)
        torch._foreach_lerp_(averages, currents, weight)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Put the average into the model for a while; the model's own weights come back bit for bit.

        What the model has worked out about the average, the norms of its operators, stays with the average.
        """
        own = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(self.values)
        try:
            yield
            self.restore(model.state_dict())
        finally:
            model.load_state_dict(own)

    def restore(self, values: dict[str, Tensor]) -> None:
        """Continue from saved values, each in the memory layout of the present ones."""
        for name, value in values.items():
            own = self.values[name]
            if own.shape == value.shape:
                own.copy_(value)
            else:
                self.values[name] = value.to(own)


def sgd(model: nn.Module, settings: Optimizer, captured: bool = False) -> torch.optim.SGD:
    """Momentum SGD whose weight decay spares biases and norms' scales (all parameters of fewer than two axes).

    Shrinking a scale towards zero fights the norm it belongs to instead of regularising the weights;
    `decay_all = true` decays everything, as plain SGD does. Inside a CUDA graph (`captured`) the rate is a number
    on the device, which only the fused form of SGD takes.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [p for p in parameters if p.dim() > 1 or settings.decay_all]
    spared = [p for p in parameters if not (p.dim() > 1 or settings.decay_all)]
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    return torch.optim.SGD(
        [group for group in groups if group["params"]],
        lr=torch.tensor(settings.lr, device=parameters[0].device) if captured else settings.lr,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        fused=True if captured else None,
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use this learning rate in the next step."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def momentum(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The momentum buffers by parameter name; absent before the first step."""
    buffers = {
        name: optimizer.state[p].get("momentum_buffer") for name, p in model.named_parameters() if p in optimizer.state
    }
    return {name: buffer for name, buffer in buffers.items() if buffer is not None}


def restore_momentum(model: nn.Module, optimizer: torch.optim.Optimizer, buffers: dict[str, Tensor]) -> None:
    """Continue with saved momentum buffers, each in the memory layout of its parameter."""
    for name, parameter in model.named_parameters():
        if name in buffers:
            optimizer.state[parameter]["momentum_buffer"] = torch.empty_like(parameter).copy_(buffers[name])


def rate_multiple(schedule: Schedule, step: int, steps: int, steps_per_epoch: int) -> float:
    """The multiple of `optimizer.lr` to use in step number `step` (from 0) of `steps`.

    step       factor^(milestones passed)
    cosine     final + (1 − final)(1 + cos πt)/2,   t: the share of the run after warm-up that is done
    one-cycle  linear from 0 to 1 over the share `rise`, then linear to `final`

    A pure function of the step, so a resumed run needs no other memory than where it is.
    """
    if schedule.kind == "one-cycle":
        peak = schedule.rise * steps
        if step + 1 <= peak:
            return (step + 1) / peak
        return 1 + (schedule.final - 1) * (step + 1 - peak) / max(steps - peak, 1)
    warmup = min(schedule.warmup * steps_per_epoch, steps)
    if step + 1 <= warmup:
        return (step + 1) / warmup
    if schedule.kind == "step":
        return schedule.factor ** sum(step >= share * steps for share in schedule.milestones)
    share = (step - warmup) / max(steps - warmup, 1)
    return schedule.final + (1 - schedule.final) * (1 + math.cos(math.pi * share)) / 2
