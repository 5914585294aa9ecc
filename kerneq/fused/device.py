"""What a card can run: the one place that decides whether a Triton program may take the place of plain PyTorch."""

import importlib.util
from collections.abc import Collection

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None
HALF = (torch.bfloat16, torch.float16)
FLOATS = (*HALF, torch.float32)


def capability(t: Tensor) -> tuple[int, int]:
    """The compute capability of the tensor's card; (0, 0) where there is none, or none by NVIDIA."""
    return torch.cuda.get_device_capability(t.device) if t.is_cuda and torch.version.cuda is not None else (0, 0)


def runs_triton(t: Tensor, dtypes: Collection[torch.dtype] = FLOATS) -> bool:
    """Whether a Triton program may work on `t`.

    It takes Triton, an NVIDIA card with bfloat16 and asynchronous copies, and a known dtype. A program that is
    compiled or exported holds plain operations: the compiler fuses by itself.
    """
    if torch.compiler.is_compiling() or t.dtype not in dtypes:
        return False
    return HAS_TRITON and capability(t) >= (8, 0)


def needs_graph(*tensors: Tensor) -> bool:
    """Whether autograd will differentiate what is made of these: then plain operations, which record themselves."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def processors(t: Tensor) -> int:
    """The number of multiprocessors of the tensor's card; 2 on a CPU, for Triton's interpreter."""
    return torch.cuda.get_device_properties(t.device).multi_processor_count if t.is_cuda else 2
