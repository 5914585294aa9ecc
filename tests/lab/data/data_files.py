"""Images of noise; data files written as their publishers did, small or whole, and damaged."""

import struct
from pathlib import Path

import numpy as np
import torch
from hypothesis import strategies as st
from PIL import Image

from kerneq.lab.data import Images


def noise(count: int, side: int = 8, channels: int = 3) -> Images:
    """Noise in five classes, scaled to [−1, 1]."""
    rng = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, channels, side, side), dtype=torch.uint8, generator=rng)
    return Images(pixels, torch.arange(count) % 5, tuple("abcde"), (0.5,) * channels, (0.5,) * channels)


def raw(x: torch.Tensor) -> torch.Tensor:
    """The bytes of normalised noise."""
    return x.mul(0.5).add(0.5).mul(255).round().to(torch.uint8)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def python2_pickle(pixels: np.ndarray, labels: list[int], key: bytes = b"labels") -> bytes:
    """The dictionary of a CIFAR file as Python 2 pickled it, opcode by opcode (pickle protocol 2)."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    def whole(value: int) -> bytes:
        return b"K" + bytes([value]) if 0 <= value < 256 else b"J" + struct.pack("<i", value)

    rows, columns = pixels.shape
    parts = [b"\x80\x02}q\x00(", text(key), b"](", *map(whole, labels), b"e", text(b"data")]
    parts += [b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n", whole(0), b"\x85", text(b"b"), b"\x87R"]
    parts += [b"(", whole(1), whole(rows), whole(columns), b"\x86"]
    parts += [b"cnumpy\ndtype\n", text(b"u1"), whole(0), whole(1), b"\x87R"]
    parts += [b"(", whole(3), text(b"|"), b"NNN", whole(-1), whole(-1), whole(0), b"tb"]
    parts += [b"\x89T", struct.pack("<i", pixels.size), pixels.astype(np.uint8).tobytes(), b"tb", b"u."]
    return b"".join(parts)


def picture(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (20, 12)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """The content cut short, with flipped bits, with a stretch overwritten, or with something added.

    Positions near the ends are favoured: that is where the structure is, the middle is pixels."""
    near = st.one_of(st.integers(0, min(300, len(content) - 1)), st.integers(0, len(content) - 1))
    at = draw(near)
    match draw(st.sampled_from(["cut", "flip", "overwrite", "append"])):
        case "cut":
            return content[:at]
        case "flip":
            return content[:at] + bytes([content[at] ^ (1 << draw(st.integers(0, 7)))]) + content[at + 1 :]
        case "overwrite":
            patch = draw(st.binary(min_size=1, max_size=40))
            return content[:at] + patch + content[at + len(patch) :]
        case _:
            return content + draw(st.binary(min_size=1, max_size=40))
