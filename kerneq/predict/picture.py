"""A picture file as the pixels a model was trained on: upright, opaque, square, in its size and channels."""

import warnings
from pathlib import Path

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from torch import Tensor

from kerneq.data import DataError, decode, grey

_OPAQUE = ("1", "L", "P", "RGB", "CMYK", "YCbCr", "LAB", "HSV")  # modes of 8 bits a channel, without transparency


def read_picture(path: Path, channels: int, side: int) -> Tensor:
    """The largest central square of the picture, resized to uint8 (channels, side, side).

    What the reader of picture folders does, after turning the picture as its EXIF data say and putting a transparent
    one on white. What is not one readable picture is a `DataError`.
    """
    if not path.exists():
        raise DataError(f"There is no file {path}: check its name.")
    if not path.is_file():
        raise DataError(f"{path} is a folder or a device, not a picture: name picture files.")
    found = _upright(path, side)
    if found is None:
        found = decode(path, side)
    if isinstance(found, str):
        raise DataError(found)
    return found if channels == 3 else grey(found[None])[0].to(torch.uint8)


def _upright(path: Path, side: int) -> Tensor | str | None:
    """The pixels of a picture that must first be turned or made opaque, None for a plain one; or what is wrong."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd metadata, say, which do not matter here
            warnings.simplefilter("error", Image.DecompressionBombWarning)  # made to fill the memory
            with Image.open(path) as picture:
                frames = getattr(picture, "n_frames", 1)
                if frames > 1 and picture.format != "MPO":  # a camera's JPEG with a second view behind the first
                    return f"{path} holds {frames} pictures, an animation or pages: save the one you mean by itself."
                if picture.mode in ("I", "F"):
                    return f"{path} has 32 bits a pixel, and none of them says which value is white: save it with 8."
                turned = picture.getexif().get(ExifTags.Base.Orientation, 1) != 1
                if not turned and picture.mode in _OPAQUE and "transparency" not in picture.info:
                    return None
                picture.draft("RGB", (side, side))  # a JPEG decodes straight to the smallest sufficient size
                upright = _opaque(ImageOps.exif_transpose(picture))
                square = ImageOps.fit(upright, (side, side), Image.Resampling.BILINEAR)
    except Exception as error:  # Pillow's decoders raise errors of every kind on damaged files
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"{path} is not a readable picture ({reason}): replace it or leave it out."
    return torch.from_numpy(np.array(square)).permute(2, 0, 1)


def _opaque(picture: Image.Image) -> Image.Image:
    """The picture in 8-bit colours, on white where one could see through it."""
    if picture.mode.startswith("I;16"):  # Pillow would cut off whatever is brighter than 255
        return Image.fromarray((np.array(picture) // 257).astype(np.uint8)).convert("RGB")
    white = Image.new("RGBA", picture.size, "white")
    white.alpha_composite(picture.convert("RGBA"))
    return white.convert("RGB")
