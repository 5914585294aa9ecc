"""How the weights move: SGD, or Muon for convolutions; the learning rate from step to step; the running average."""

import inspect
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from ...tensors import magnitude
from ..run.config import ConfigError, Optimizer, Schedule

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan's: steep at 0, so that five steps lift small singular values
NEWTON_SCHULZ_STEPS = 5


@final
class Descent(torch.optim.SGD):
    """PyTorch's SGD; the groups with a `muon` momentum go along Muon's direction instead of their gradient.

    Muon (Jordan et al., 2024) takes the momentum of a convolution as a matrix M = UΣVᵀ (outputs, inputs · size²) and
    goes along UVᵀ: of all steps of bounded operator norm, the norm that an equation bounds too, the steepest one.

        b ← μb + g,   w ← (1 − ηδ)w − η √max(1, outputs / (inputs · size²)) UVᵀ   of M = b, or g + μb (Nesterov)

    By hand: torch.optim.Muon is newer than the oldest PyTorch that kerneq supports, and takes matrices only, singly.
    PyTorch's methods are unwrapped, since their wrappers import its compiler: longer than importing PyTorch itself.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()  # now: it makes the gradients that Muon replaces
        for group in self.param_groups:
            if "muon" in group:
                self._set_directions(group)
        inspect.unwrap(torch.optim.SGD.step)(self)
        return loss

    def _set_directions(self, group: dict[str, Any]) -> None:
        """Replace the gradients of a group by Muon's directions: without momentum SGD then takes Muon's step."""
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not parameters:
            return
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        momenta = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_mul_(momenta, group["muon"])
        torch._foreach_add_(momenta, gradients)
        if group["along_nesterov"]:
            torch._foreach_add_(gradients, momenta, alpha=group["muon"])
        else:
            torch._foreach_copy_(gradients, momenta)
        for gradient, direction in zip(gradients, find_directions(gradients), strict=True):
            gradient.copy_(direction)


def find_directions(gradients: Sequence[Tensor]) -> list[Tensor]:
    """√max(1, outputs / (inputs · size²)) UVᵀ of each gradient of a convolution, in its shape.

    Matrices of one shape, or its transpose, share their products.
    """
    matrices = [gradient.flatten(1) for gradient in gradients]
    wide = [m if len(m) <= m.shape[1] else m.mT for m in matrices]
    alike = defaultdict(list)
    for index, m in enumerate(wide):
        alike[m.shape].append(index)
    directions = [*gradients]
    for indices in alike.values():
        products = orthogonalise(torch.stack([wide[index] for index in indices]))
        for index, direction in zip(indices, products, strict=True):
            tallness = len(matrices[index]) / matrices[index].shape[1]
            scaled = direction if tallness <= 1 else tallness**0.5 * direction.mT
            directions[index] = scaled.reshape(gradients[index].shape)
    return directions


def orthogonalise(m: Tensor) -> Tensor:
    """UVᵀ of every M = UΣVᵀ of m (count, rows, columns), rows ≤ columns, with singular values of 0.7 to 1.2 for 1.

    By an odd polynomial of M, x ← ax + b(xxᵀ)x + c(xxᵀ)²x, which moves the singular values alone: matrix products, on a
    GPU in bfloat16, whose rounding is smaller than what is left to 1.
    """
    a, b, c = NEWTON_SCHULZ
    x = m / magnitude(m)  # a momentum that fades away is at some step too small to be squared
    x = x / x.flatten(1).norm(dim=1).clamp_min(torch.finfo(x.dtype).tiny)[:, None, None]
    if x.is_cuda:
        x = x.bfloat16()
    for _ in range(NEWTON_SCHULZ_STEPS):
        s = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(s, s, s, beta=b, alpha=c), x, beta=a)
    return x


def make_optimizer(model: nn.Module, settings: Optimizer, captured: bool = False) -> Descent:
    """Momentum SGD whose weight decay spares biases and norms' scales (all parameters of fewer than two axes).

    `decay_all = true` decays everything, as plain SGD does. Convolutions are Muon's where it has a rate. Inside a CUDA
    graph (`captured`) a rate is a number on the device, which only the fused form of SGD takes.
    """
    convolutions, decayed, spared = [], [], []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if settings.muon > 0 and parameter.dim() == 4:
            convolutions.append(parameter)
        elif settings.decay_all or parameter.dim() > 1:
            decayed.append(parameter)
        else:
            spared.append(parameter)
    if settings.muon > 0 and not convolutions:
        raise ConfigError("`optimizer.muon` is for convolutions, and this model has none: set it to 0.")
    muon = {"muon": settings.momentum, "along_nesterov": settings.nesterov, "momentum": 0.0, "nesterov": False}
    groups: list[dict[str, Any]] = [
        {"params": decayed, "peak": settings.lr, "weight_decay": settings.weight_decay},
        {"params": spared, "peak": settings.lr, "weight_decay": 0.0},
        {"params": convolutions, "peak": settings.muon, "weight_decay": settings.muon_decay} | muon,
    ]
    groups = [group for group in groups if group["params"]]
    for group in groups:
        device = group["params"][0].device
        group["lr"] = torch.tensor(group["peak"], device=device) if captured else group["peak"]
    fused = True if captured else None
    return Descent(groups, momentum=settings.momentum, nesterov=settings.nesterov, fused=fused)


def set_rate(optimizer: Descent, multiple: float) -> None:
    """The learning rates of the steps to come, as a multiple of the highest; a captured step reads it on the device."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(multiple * group["peak"])
        else:
            group["lr"] = multiple * group["peak"]


def rate_multiple(schedule: Schedule, step: int, steps: int, steps_per_epoch: int) -> float:
    """The multiple of the highest learning rate to use in step number `step` (from 0) of `steps`.

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


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, decay: float, step: int) -> None:
    """ā ← δ ā + (1 − δ) a for every parameter and floating-point buffer a; other buffers are copied.

    The decay starts small, δ = min(decay, (1 + t)/(10 + t)) after step t (from 0), so that the random initial
    weights are forgotten at once.
    """
    averages, currents = [], []
    for value, mean in zip(list_parameters_and_buffers(model), list_parameters_and_buffers(average), strict=True):
        if value.is_floating_point():
            averages.append(mean)
            currents.append(value)
        else:
            mean.copy_(value)
    torch._foreach_lerp_(averages, currents, 1 - min(decay, (1 + step) / (10 + step)))


def list_parameters_and_buffers(model: nn.Module) -> list[Tensor]:
    """The parameters and buffers of a model; unlike a state dict, they do not make the host wait for the device."""
    return [*model.parameters(), *model.buffers()]
