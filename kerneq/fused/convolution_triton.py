"""D(g + Wz) and D(g + Wᵀv), W a 3 × 3 convolution: products, sum and mask in one pass over memory (Hopper and later).

An implicit matrix product: a tile is 128 channels × 128 pixels of the result, and for each of the nine taps the pixels
it needs are one box of the input, shifted by the tap. The tensor memory accelerator fetches boxes and fills what lies
outside the picture with zeros, so there is no padding and no index arithmetic.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .device import capability

PIXELS, CHANNELS = 128, 128  # of a tile
STEP = 64  # channels of the input a step of the sum
WARPS, STAGES = 4, 3


@triton.jit
def conv_product(
    x_box, w_box, out_box, g_box, mask_box, row_tiles,
    IN: tl.constexpr, OUT: tl.constexpr, N: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    C: tl.constexpr, K: tl.constexpr, ADJOINT: tl.constexpr, ADD: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """One tile: C channels of N pictures × H rows × W columns. The weight lies in memory as (features, tap, state)."""
    P: tl.constexpr = N * H * W
    STEPS: tl.constexpr = IN // K
    tile = tl.program_id(0)
    c = (tile % (OUT // C)) * C
    tile = tile // (OUT // C)
    picture = (tile // row_tiles) * N
    row = (tile % row_tiles) * H
    total = tl.zeros((C, P), tl.float32)
    for step in tl.range(9 * STEPS):
        tap = step // STEPS
        i = (step % STEPS) * K
        down, right = tap // 3 - 1, tap % 3 - 1
        if ADJOINT:
            x = x_box.load([picture, row - down, -right, i])
            w = tl.trans(w_box.load([i, tap * OUT + c]))
        else:
            x = x_box.load([picture, row + down, right, i])
            w = w_box.load([c, tap * IN + i])
        # Channels × pixels: the right-hand factor, which is reshaped, then stays in shared memory. As the left-hand one
        # it would pass through registers, and Triton 3.6 overwrites its buffer before every warp has read it.
        total = tl.dot(w, tl.trans(x.reshape(P, K)), total)
    total = tl.trans(total)
    if ADD:
        total += g_box.load([picture, row, 0, c]).reshape(P, C).to(tl.float32)
    if MASK:
        total = tl.where(mask_box.load([picture, row, 0, c]).reshape(P, C) > 0, total, 0.0)
    out_box.store([picture, row, 0, c], total.to(out_box.dtype).reshape(N, H, W, C))


def fits(x: Tensor, weight: Tensor, adjoint: bool) -> bool:
    """Whether the tiles suit these shapes; others take cuDNN, and further passes for the sum and the mask."""
    height, width = x.shape[2:]
    tiled = height * width % PIXELS == 0 if width * height >= PIXELS else PIXELS % (height * width) == 0
    inputs, outputs = weight.shape[:2] if adjoint else (weight.shape[1], weight.shape[0])
    return (
        weight.shape[2:] == (3, 3)
        and inputs % STEP == 0
        and outputs % CHANNELS == 0
        and width in (4, 8, 16, 32, 64, 128)
        and tiled
        and x.is_contiguous(memory_format=torch.channels_last)
        and weight.is_contiguous(memory_format=torch.channels_last)
        and capability(x) >= (9, 0)
    )


def product(x: Tensor, weight: Tensor, adjoint: bool, add: Tensor | None, mask: Tensor | None) -> Tensor:
    """add + Wx, or with `adjoint` add + Wᵀx; zero where `mask` is not positive."""
    batch, inputs, height, width = x.shape
    features, state = weight.shape[:2]
    outputs = state if adjoint else features
    rows = min(height, PIXELS // width)
    pictures = PIXELS // (rows * width)
    out = torch.empty(
        (batch, outputs, height, width), dtype=x.dtype, device=x.device, memory_format=torch.channels_last
    )

    def box(maps: Tensor | None, channels: int) -> TensorDescriptor:
        maps = out if maps is None else maps.contiguous(memory_format=torch.channels_last)
        return TensorDescriptor.from_tensor(maps.permute(0, 2, 3, 1), [pictures, rows, width, channels])

    taps = weight.permute(0, 2, 3, 1).reshape(features, 9 * state)
    row_tiles = height // rows
    tiles = triton.cdiv(batch, pictures) * row_tiles * (outputs // CHANNELS)
    with torch.cuda.device_of(x):
        conv_product[(tiles,)](
            box(x, STEP), TensorDescriptor.from_tensor(taps, [STEP, CHANNELS] if adjoint else [CHANNELS, STEP]),
            box(out, CHANNELS), box(add, CHANNELS), box(mask, CHANNELS), row_tiles,
            inputs, outputs, pictures, rows, width, CHANNELS, STEP, adjoint, add is not None, mask is not None,
            num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    return out
