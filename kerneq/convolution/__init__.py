"""Convolutions with what follows them in the same pass, on CUDA."""

from .fused import cudnn_fuses as cudnn_fuses
from .fused import product as product
from .fused import relu as relu
from .fused import triton_fuses as triton_fuses
