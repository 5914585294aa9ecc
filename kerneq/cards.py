"""What the card a tensor lies on can run."""

import importlib.util

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None


def runs_triton(t: Tensor) -> bool:
    """Whether our Triton kernels run on it: an NVIDIA card with bfloat16 and asynchronous copies, and Triton there."""
    return HAS_TRITON and capability(t) >= (8, 0)


def capability(t: Tensor) -> tuple[int, int]:
    """The compute capability of the tensor's card; (0, 0) where there is none."""
    return torch.cuda.get_device_capability(t.device) if t.is_cuda and torch.version.cuda is not None else (0, 0)
