"""Convolutions with what follows them in the same pass, on CUDA."""

from .adjoint import cudnn_fuses as cudnn_fuses
from .adjoint import masked as masked
from .adjoint import relu as relu
from .adjoint import triton_fuses as triton_fuses
