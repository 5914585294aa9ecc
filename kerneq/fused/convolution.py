"""A convolution W, its adjoint, and what follows them done before the result reaches memory where a card can.

σ after Wᵀ costs a third of the convolution when it is a pass of its own: a state has several times as many numbers as
the features. cuDNN has ReLU built in; sums and the mask of the backward pass are ours (`convolution_triton`).
"""

import dataclasses
import functools
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from .device import HALF, capability, needs_graph, runs_triton


@final
@dataclasses.dataclass(frozen=True)
class Convolution:
    """W ∗ z, zero-padded so that pictures keep their size; the weight stays fixed for one solve.

    z is (batch, state, height, width), v = Wz is (batch, features, height, width). `added` and `adjoint_masked` make
    no graph; the others are differentiated like the plain operations they then are.
    """

    weight: Tensor  # (features, state, k, k), k odd

    def __call__(self, z: Tensor) -> Tensor:
        """Wz."""
        fused = self._fused(z)
        return F.conv2d(z, self.weight, padding=self._padding) if fused is None else fused

    def added(self, v: Tensor, z: Tensor, sign: int) -> Tensor:
        """v ± Wz, without a graph."""
        fused = self._fused(z, add=v, sign=sign)
        return torch.add(v, self(z), alpha=sign) if fused is None else fused

    def adjoint(self, v: Tensor) -> Tensor:
        """Wᵀv."""
        return F.conv_transpose2d(v, self.weight, padding=self._padding)

    def adjoint_relu(self, v: Tensor, shift: Tensor | None) -> Tensor:
        """max(Wᵀv + shift, 0), in one pass over memory where nothing has to be differentiated and cuDNN can do it."""
        if self._fuses_relu(v) and (shift is None or not needs_graph(shift)):
            geometry = [1, 1], [self._padding] * 2, [1, 1], 1  # stride, padding, dilation, groups
            if shift is None:
                return torch.ops.aten.cudnn_convolution_relu(v, self._flipped, None, *geometry)
            return torch.ops.aten.cudnn_convolution_add_relu(v, self._flipped, shift, 1.0, None, *geometry)
        drive = self.adjoint(v)
        return torch.relu(drive if shift is None else drive + shift)

    def adjoint_masked(self, v: Tensor, z: Tensor, g: Tensor | None, sign: int) -> Tensor:
        """g ± Wᵀv where z > 0, else 0; without a graph."""
        fused = self._fused(v, adjoint=True, add=g, sign=sign, mask=z)
        if fused is not None:
            return fused
        drive = self.adjoint(v)
        if g is not None:
            drive = torch.add(g, drive, alpha=sign)
        elif sign < 0:
            drive = -drive
        return torch.ops.aten.threshold_backward(drive, z, 0)  # one vectorised pass, where a Boolean mask takes two

    def weight_gradient(self, z: Tensor, v: Tensor) -> Tensor:
        """The gradient of ⟨Wz, v⟩ with respect to the weight; without a graph."""
        return conv2d_weight(z, list(self.weight.shape), v, padding=self._padding)  # type: ignore[no-untyped-call]

    @property
    def _padding(self) -> int:
        return self.weight.shape[-1] // 2

    @functools.cached_property
    def _flipped(self) -> Tensor:
        """The weight of Wᵀ as a convolution of its own."""
        return self.weight.transpose(0, 1).flip(2, 3).contiguous(memory_format=torch.channels_last)

    def _fused(
        self, x: Tensor, *, adjoint: bool = False, add: Tensor | None = None, sign: int = 1, mask: Tensor | None = None
    ) -> Tensor | None:
        """add ± Wx or add ± Wᵀx, zero where `mask` is not positive, in one pass; None where there is no program."""
        if not self._may_fuse(x) or not runs_triton(x, HALF):
            return None
        from .convolution_triton import fits, product

        return product(x, self.weight, adjoint, add, sign, mask) if fits(x, self.weight, adjoint) else None

    def _fuses_relu(self, v: Tensor) -> bool:
        if not self._may_fuse(v) or not torch.backends.cudnn.enabled:
            return False
        return v.dtype in (torch.float32, torch.float16) or (v.dtype == torch.bfloat16 and capability(v) >= (8, 0))

    def _may_fuse(self, x: Tensor) -> bool:
        """On an NVIDIA card, one dtype, nothing to differentiate, no compiler that would fuse by itself."""
        if torch.compiler.is_compiling() or x.dtype != self.weight.dtype:
            return False
        return capability(x) > (0, 0) and not needs_graph(x, self.weight)
