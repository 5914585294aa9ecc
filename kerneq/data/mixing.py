"""mixup (Zhang et al., 2018) and CutMix (Yun et al., 2019), picture by picture.

Picture 2k is mixed with picture 2k + 1 of the batch and the other way round. In a shuffled batch the
neighbour is as random as any other picture, and it is on the same rank.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .augment import Augment
from .randomness import Place, Purpose
from .transfer import to_device


def mix(x: Tensor, labels: Tensor, classes: int, settings: Augment, place: Place) -> tuple[Tensor, Tensor]:
    """λx + (1 − λ)x′ or x with a box of x′, and the labels' one-hot rows in the same proportion."""
    height, width = x.shape[2:]
    kind, y, z = place.uniform(Purpose.MIX, 3)
    boxes = kind < 0.5 if settings.mixup and settings.cutmix else np.full(len(kind), settings.cutmix > 0)
    keep = np.ones(len(kind))  # λ of mixup
    if settings.mixup:
        keep = np.where(boxes, 1.0, place.beta(Purpose.MIXUP, settings.mixup))
    top, bottom, left, right = np.zeros((4, len(kind)), dtype=np.int64)
    if settings.cutmix:
        side = np.where(boxes, np.sqrt(1 - place.beta(Purpose.CUTMIX, settings.cutmix)), 0.0)
        top, bottom = _span(y, side, height)
        left, right = _span(z, side, width)
    own = keep * (1 - (bottom - top) * (right - left) / (height * width))  # share of the picture itself
    edges = to_device(np.stack([top, bottom, left, right]), x.device)[:, :, None]
    keep_, own_ = to_device(np.stack([keep, own]).astype(np.float32), x.device)
    rows = torch.arange(height, device=x.device)
    columns = torch.arange(width, device=x.device)
    box = ((rows >= edges[0]) & (rows < edges[1]))[:, :, None] & ((columns >= edges[2]) & (columns < edges[3]))[
        :, None, :
    ]
    weight = torch.where(box, 0.0, keep_[:, None, None])[:, None]  # of the picture itself, pixel by pixel
    target = functional.one_hot(labels, classes).to(torch.float32)
    return x * weight + _neighbour(x) * (1 - weight), _blend(target, own_)


def _neighbour(x: Tensor) -> Tensor:
    return x.view(len(x) // 2, 2, *x.shape[1:]).flip(1).view_as(x)


def _blend(target: Tensor, own: Tensor) -> Tensor:
    return target * own[:, None] + _neighbour(target) * (1 - own[:, None])


def _span(centre: np.ndarray, share: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The pixels of an interval of `share` of the side around a uniform centre, clipped to the picture."""
    middle, half = np.floor(centre * size), np.floor(share * size) // 2
    low, high = (np.clip(edge, 0, size).astype(np.int64) for edge in (middle - half, middle + half))
    return low, high
