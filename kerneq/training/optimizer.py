"""Momentum SGD over a model's parameters, and its momentum as named tensors."""

import torch
from torch import Tensor, nn

from kerneq.run.config import Optimizer


def sgd(model: nn.Module, settings: Optimizer, captured: bool = False) -> torch.optim.SGD:
    """SGD whose weight decay spares biases and norms' scales (all parameters of fewer than two axes).

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
    for name, parameter in model.named_parameters():
        if name in buffers:
            optimizer.state[parameter]["momentum_buffer"] = torch.empty_like(parameter).copy_(buffers[name])
