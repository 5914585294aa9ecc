"""From a batch of unsigned bytes to what a model trains on: augment, normalise, cut out, mix."""

import numpy as np
import torch
from torch import Tensor

from .augment import Augment
from .geometry import crop_and_flip
from .policy import rand_augment, trivial_augment
from .randomness import Place, Purpose
from .transfer import to_device


def augment(pixels: Tensor, settings: Augment, place: Place) -> Tensor:
    """Crop, flip and change the pixels of the batch at `place`, with a policy if there is one."""
    if settings.crop or settings.flip:
        down, right, side = place.uniform(Purpose.CROP, 3)
        down, right = (np.floor(u * (2 * settings.crop + 1)) - settings.crop for u in (down, right))
        flip = (side < 0.5) & settings.flip
        pixels = crop_and_flip(pixels, down, right, flip, reflect=settings.padding == "reflect")
    if settings.randaugment:
        pixels = rand_augment(pixels, settings.randaugment, settings.magnitude, settings.share, place)
    if settings.trivial:
        pixels = trivial_augment(pixels, settings.share, place)
    return pixels


def normalise(pixels: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(pixels / 255 − mean) / std in float32; mean and std are (channels, 1, 1)."""
    return pixels.to(torch.float32).div_(255).sub_(mean).div_(std)


def cut_out(x: Tensor, side: int, place: Place) -> Tensor:
    """Set a square of each normalised picture to the mean; it may hang over the border."""
    height, width = x.shape[2:]
    y, z = place.uniform(Purpose.CUTOUT, 2)
    corners = np.stack([np.floor(y * height), np.floor(z * width)]) - side // 2
    top, left = to_device(corners.astype(np.int64), x.device)[:, :, None]
    rows = torch.arange(height, device=x.device) - top
    columns = torch.arange(width, device=x.device) - left
    hit = ((rows >= 0) & (rows < side))[:, :, None] & ((columns >= 0) & (columns < side))[:, None, :]
    return x.masked_fill_(hit.unsqueeze(1), 0.0)
