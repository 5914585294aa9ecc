# mypy: ignore-errors
# (Triton is optional and its kernels are not Python that mypy can read.)
"""D(g ± Wᵀv), W a 3 × 3 convolution: products, sum and mask in one pass over memory (Hopper and later).

An implicit matrix product: a tile is 128 pixels × 128 channels of the result, and for each of the nine taps the pixels
it needs are one box of v, shifted by the tap. The tensor memory accelerator fetches boxes and fills what lies outside
the picture with zeros, so there is no padding and no index arithmetic.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

PIXELS, CHANNELS, FEATURES = 128, 128, 64  # of a tile; features a step of the sum
WARPS, STAGES = 4, 3


@triton.jit
def conv_masked_adjoint(
    v_box, w_box, out_box, z_box, g_box, row_tiles,
    F: tl.constexpr, S: tl.constexpr, I: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    BS: tl.constexpr, BF: tl.constexpr, ADD: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """One tile: I pictures × H rows × W columns × BS channels of the state."""
    P: tl.constexpr = I * H * W
    K: tl.constexpr = F // BF
    tile = tl.program_id(0)
    s = (tile % (S // BS)) * BS
    tile = tile // (S // BS)
    picture = (tile // row_tiles) * I
    row = (tile % row_tiles) * H
    total = tl.zeros((BS, P), tl.float32)
    for k in tl.range(9 * K):
        tap = k // K
        f = (k % K) * BF
        v = v_box.load([picture, row + 1 - tap // 3, 1 - tap % 3, f]).reshape(P, BF)
        # Channels × pixels: the right-hand factor, which is reshaped, then stays in shared memory. As the left-hand one
        # it would pass through registers, and Triton 3.6 overwrites its buffer before every warp has read it.
        total = tl.dot(tl.trans(w_box.load([f, tap * S + s])), tl.trans(v), total)
    total = SIGN * tl.trans(total)
    if ADD:
        total += g_box.load([picture, row, 0, s]).reshape(P, BS).to(tl.float32)
    z = z_box.load([picture, row, 0, s]).reshape(P, BS)
    total = tl.where(z > 0, total, 0.0)
    out_box.store([picture, row, 0, s], total.to(out_box.dtype).reshape(I, H, W, BS))


def fits(v: Tensor, weight: Tensor) -> bool:
    """Whether the tiles suit these shapes; pictures of other sizes take cuDNN and a pass for the mask."""
    _, features, height, width = v.shape
    tiled = height * width % PIXELS == 0 if width * height >= PIXELS else PIXELS % (height * width) == 0
    return (
        weight.shape[2:] == (3, 3)
        and features % FEATURES == 0
        and weight.shape[1] % CHANNELS == 0
        and width in (4, 8, 16, 32, 64, 128)
        and tiled
        and v.is_contiguous(memory_format=torch.channels_last)
        and weight.is_contiguous(memory_format=torch.channels_last)
        and torch.cuda.get_device_capability(v.device) >= (9, 0)
    )


def masked_adjoint(v: Tensor, weight: Tensor, z: Tensor, g: Tensor | None, sign: int) -> Tensor:
    batch, features, height, width = v.shape
    state = weight.shape[1]
    rows = min(height, PIXELS // width)
    pictures = PIXELS // (rows * width)
    out = torch.empty((batch, state, height, width), dtype=v.dtype, device=v.device, memory_format=torch.channels_last)

    def box(maps: Tensor, channels: int) -> TensorDescriptor:
        last = maps.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)
        return TensorDescriptor.from_tensor(last, [pictures, rows, width, channels])

    taps = weight.permute(0, 2, 3, 1).reshape(features, 9 * state)
    row_tiles = height // rows
    tiles = triton.cdiv(batch, pictures) * row_tiles * (state // CHANNELS)
    with torch.cuda.device_of(v):
        conv_masked_adjoint[(tiles,)](
            box(v, FEATURES), TensorDescriptor.from_tensor(taps, [FEATURES, CHANNELS]), box(out, CHANNELS),
            box(z, CHANNELS), box(out if g is None else g, CHANNELS), row_tiles,
            features, state, pictures, rows, width, CHANNELS, FEATURES, g is not None, sign,
            num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    return out
