"""Writing data files as their publishers did, small or whole, and damaging them."""

import struct
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from PIL import Image


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def python2_pickle(pixels: np.ndarray, labels: list[int], key: bytes = b"labels") -> bytes:
    """The dictionary of a CIFAR file as Python 2 pickled it, opcode by opcode (pickle protocol 2)."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    def whole(value: int) -> bytes:
        return b"K" + bytes([value]) if 0 <= value < 256 else b"J" + struct.pack("<i", value)

    rows, columns = pixels.shape
    array = (
        *(
            b"cnumpy.core.multiarray\n_reconstruct\n",
            b"cnumpy\nndarray\n",
            whole(0),
            b"\x85",
            text(b"b"),
            b"\x87R",
        ),
        *(b"(", whole(1), whole(rows), whole(columns), b"\x86"),
        *(b"cnumpy\ndtype\n", text(b"u1"), whole(0), whole(1), b"\x87R"),
        *(b"(", whole(3), text(b"|"), b"NNN", whole(-1), whole(-1), whole(0), b"tb"),
        *(b"\x89T", struct.pack("<i", pixels.size), pixels.astype(np.uint8).tobytes(), b"tb"),
    )
    return b"".join(
        (
            *(b"\x80\x02}q\x00(", text(key), b"](", *(whole(label) for label in labels), b"e"),
            *(text(b"data"), *array, b"u."),
        )
    )


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
