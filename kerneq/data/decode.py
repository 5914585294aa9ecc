"""One picture file to one tensor."""

import warnings
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

Box = tuple[float, float, float, float]  # left, top, right, bottom, as shares of the width and height


def decode(path: Path, size: int, box: Box | None = None) -> Tensor | str:
    """The part of the picture in `box` (by default its largest central square) resized to (3, size, size).

    A picture that cannot be read gives the sentence that says so instead: an exception would come out of
    a worker process wrapped in that process's traceback."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd metadata, say, which do not matter here
            warnings.simplefilter("error", Image.DecompressionBombWarning)  # made to fill the memory
            with Image.open(path) as picture:
                if box is None:  # a JPEG decodes straight to the smallest sufficient size
                    picture.draft("RGB", (size, size))
                pixels = picture.convert("RGB")
                resized = pixels.resize((size, size), Image.Resampling.BILINEAR, _corners(pixels.size, box))
    except Exception as error:  # Pillow's decoders raise errors of every kind on damaged files
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"{path} is not a readable picture ({reason}): replace or remove it."
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1)


def _corners(shape: tuple[int, int], box: Box | None) -> Box:
    width, height = shape
    if box is None:
        side = min(width, height)
        left, top = (width - side) / 2, (height - side) / 2
        return left, top, left + side, top + side
    left, top, right, bottom = box
    return left * width, top * height, right * width, bottom * height
