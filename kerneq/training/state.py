"""Everything that changes while a model trains, how it does, and its checkpoints: weights, average, momentum, place."""

import copy
import inspect
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from ..graphs import capture
from ..models import AbstractModel
from ..run import CheckpointError, Run, TrainingError, checkpoint
from ..run.config import Config, Optimizer, Schedule, write
from ..run.folder import check_belongs
from .metrics import Accumulator
from .process import Process

Write = Callable[[], None]
PLACE = ("epoch", "batch", "step", "rate", "best", "seconds")  # the numbers of a state


@final
class State:
    """Model, average, momentum, sums of the epoch so far, random states, and the place in the run.

    A run that restores it goes on bit for bit as if it had never stopped.
    """

    def __init__(self, model: AbstractModel, config: Config, process: Process):
        self.model = model
        self.config = config
        self.process = process
        self.captured = config.training.graph and process.device.type == "cuda" and process.world == 1
        self.optimizer = sgd(model, config.optimizer, self.captured)
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

    def checkpoint(self, run: Run) -> list[Write]:
        """What writes a checkpoint of this moment; refused once the weights are no longer numbers.

        All processes must call it together; the leading one writes.
        """
        self.check_weights()
        tensors = self.tensors()
        return [partial(run.save, checkpoint.copied(tensors), self.facts())] if self.process.leads else []

    def best_weights(self, run: Run) -> list[Write]:
        """What writes the weights just validated (the average, where there is one), to be evaluated later."""
        self.check_weights()
        if not self.process.leads:
            return []
        weights = {f"model.{name}": value for name, value in self.candidate.state_dict().items()}
        facts = self.facts() | {"epoch": self.epoch + 1}
        return [partial(checkpoint.save, run.checkpoint("best"), checkpoint.copied(weights), facts)]

    def restore(self, path: Path) -> None:
        """Continue from the checkpoint at `path`: afterwards everything is bit for bit as it was saved."""
        tensors, facts = checkpoint.load(path)
        check_belongs(path, facts, self.config)
        if self.average is not None:
            checkpoint.load_weights(self.average, checkpoint.part(tensors, "average."), path)
        checkpoint.load_weights(self.model, checkpoint.part(tensors, "model."), path)
        try:
            for name, parameter in self.model.named_parameters():
                if f"momentum.{name}" in tensors:  # in the memory layout of its parameter
                    momentum = torch.empty_like(parameter).copy_(tensors[f"momentum.{name}"])
                    self.optimizer.state[parameter]["momentum_buffer"] = momentum
            # The sums are those of all processes together: the first one carries them on.
            sums = tensors["meter"] if self.process.leads else torch.zeros_like(tensors["meter"])
            self.accumulator.restore(sums, facts["meter"])
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

    def check_weights(self) -> None:
        """Refuse to go on, and above all to save, once a weight is infinite or NaN; waits for the device."""
        found = (*parameters_and_buffers(self.model), *parameters_and_buffers(self.candidate))
        values = [value for value in found if value.is_floating_point()]
        if not math.isfinite(float(get_total_norm(values))):
            self.refuse("A weight became infinite or NaN")

    def refuse(self, what: str) -> NoReturn:
        """End a run that no longer computes with numbers."""
        raise TrainingError(
            f"{what} by step {self.step} (epoch {self.epoch + 1}). What was saved before is intact. Lower "
            "optimizer.lr, set training.clip (for example 1.0) or a longer schedule.warmup, and start a new run."
        )


@final
class EagerSGD(torch.optim.SGD):
    """PyTorch's, without the wrappers that keep its compiler out of these methods: they import the compiler to do so,
    which takes longer than importing PyTorch itself."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return inspect.unwrap(torch.optim.SGD.step)(self, closure)


def sgd(model: nn.Module, settings: Optimizer, captured: bool = False) -> EagerSGD:
    """Momentum SGD whose weight decay spares biases and norms' scales (all parameters of fewer than two axes).

    Shrinking a scale towards zero fights the norm it belongs to instead of regularising the weights;
    `decay_all = true` decays everything, as plain SGD does. Inside a CUDA graph (`captured`) the rate is a number
    on the device, which only the fused form of SGD takes.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [p for p in parameters if p.dim() > 1 or settings.decay_all]
    spared = [p for p in parameters if p.dim() <= 1 and not settings.decay_all]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": spared, "weight_decay": 0.0}]
    return EagerSGD(
        [group for group in groups if group["params"]],
        lr=torch.tensor(settings.lr, device=parameters[0].device) if captured else settings.lr,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        fused=True if captured else None,
    )


def set_rate(optimizer: torch.optim.SGD, rate: float) -> None:
    """The learning rate of the steps to come; a captured step reads it on the device."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, decay: float, step: int) -> None:
    """ā ← δ ā + (1 − δ) a for every parameter and floating-point buffer a; other buffers are copied.

    The decay starts small, δ = min(decay, (1 + t)/(10 + t)) after step t (from 0), so that the random initial
    weights are forgotten at once.
    """
    averages, currents = [], []
    for value, mean in zip(parameters_and_buffers(model), parameters_and_buffers(average), strict=True):
        if value.is_floating_point():
            averages.append(mean)
            currents.append(value)
        else:
            mean.copy_(value)
    torch._foreach_lerp_(averages, currents, 1 - min(decay, (1 + step) / (10 + step)))


def parameters_and_buffers(model: nn.Module) -> list[Tensor]:
    """The parameters and buffers of a model; unlike a state dict they cost no look at the device."""
    return [*model.parameters(), *model.buffers()]


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
