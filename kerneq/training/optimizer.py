"""What a step does with its gradient: momentum, weight decay, the learning rate of the moment, the running average."""

import math
from typing import final

import torch
from torch import Tensor, nn

from ..run.config import Optimizer, Schedule


@final
class SGD:
    """Momentum SGD: m ← μm + g + λw, then w ← w − η(g + λw + μm) with Nesterov's look ahead, w ← w − ηm without.

    Weight decay λ spares biases and norms' scales (all parameters of fewer than two axes): shrinking a scale towards
    zero fights the norm it belongs to instead of regularising the weights; `decay_all = true` decays everything. Inside
    a CUDA graph (`captured`) the rate η is a number on the device. PyTorch's own SGD does the same, but imports its
    compiler, which makes every start seconds longer.
    """

    def __init__(self, model: nn.Module, settings: Optimizer, captured: bool = False):
        self.settings = settings
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.momentum = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        device = next(iter(self.parameters.values())).device
        self.rate: float | Tensor = torch.tensor(settings.lr, device=device) if captured else settings.lr

    def set_rate(self, rate: float) -> None:
        """The learning rate η of the steps to come."""
        if isinstance(self.rate, Tensor):
            self.rate.fill_(rate)
        else:
            self.rate = rate

    def decays(self, name: str) -> bool:
        """Whether weight decay acts on a parameter."""
        return self.settings.decay_all or self.parameters[name].dim() > 1

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter that has a gradient."""
        momentum, nesterov = self.settings.momentum, self.settings.nesterov
        for decayed in (True, False):
            used = {n: p for n, p in self.parameters.items() if p.grad is not None and self.decays(n) == decayed}
            if not used:
                continue
            decay = self.settings.weight_decay if decayed else 0.0
            weights: list[Tensor] = list(used.values())
            grads = [w.grad for w in weights if w.grad is not None]
            means = [self.momentum[name] for name in used]
            if isinstance(self.rate, Tensor):
                torch._fused_sgd_(
                    weights,
                    grads,
                    means,
                    weight_decay=decay,
                    momentum=momentum,
                    lr=self.rate,
                    dampening=0.0,
                    nesterov=nesterov,
                    maximize=False,
                    is_first_step=False,
                )
                continue
            slopes = torch._foreach_add(grads, weights, alpha=decay)
            torch._foreach_mul_(means, momentum)
            torch._foreach_add_(means, slopes)
            ahead = torch._foreach_add(slopes, means, alpha=momentum) if nesterov else means
            torch._foreach_add_(weights, ahead, alpha=-self.rate)


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, decay: float, step: int) -> None:
    """ā ← δ ā + (1 − δ) a for every parameter and floating-point buffer a; other buffers are copied.

    The decay starts small, δ = min(decay, (1 + t)/(10 + t)) after step t (from 0), so that the random initial
    weights are forgotten at once.
    """
    averages, currents = [], []
    for (name, value), mean in zip(tensors(model).items(), tensors(average).values(), strict=True):
        if value.shape != mean.shape:  # a buffer that takes its shape from the first pictures
            average.load_state_dict({name: value}, strict=False)
        elif value.is_floating_point():
            averages.append(mean)
            currents.append(value)
        else:
            mean.copy_(value)
    torch._foreach_lerp_(averages, currents, 1 - min(decay, (1 + step) / (10 + step)))


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a model by name; unlike a state dict they cost no look at the device."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


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
