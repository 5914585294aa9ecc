"""The settings of training-time augmentation; what they do is in geometry, policy and mixing."""

import dataclasses
from typing import Literal, final


@final
@dataclasses.dataclass(frozen=True)
class Augment:
    """Random changes to every training picture, each picture with its own draws, in the order below."""

    area: float = 1.0  # smallest share of the picture that a random resized crop keeps; 1: off
    crop: int = 0  # shift by up to so many pixels each way (pad and crop); 0: off
    padding: Literal["reflect", "zero"] = "reflect"  # what a shift brings in
    flip: bool = False  # mirror left to right, every second picture
    randaugment: int = 0  # RandAugment operations for each picture (Cubuk et al., 2020); 0: off
    magnitude: float = 9.0  # of RandAugment, 0 … 30
    trivial: bool = False  # one TrivialAugmentWide operation (Müller and Hutter, 2021)
    share: float = 1.0  # share of the pictures that get `randaugment` or `trivial`
    cutout: int = 0  # side of a square set to the mean, its centre anywhere (DeVries and Taylor, 2017); 0: off
    mixup: float = 0.0  # α of mixup's Beta(α, α) (Zhang et al., 2018); 0: off
    cutmix: float = 0.0  # α of CutMix's (Yun et al., 2019); with mixup, each for every second picture; 0: off

    def __post_init__(self) -> None:
        for name in ("crop", "randaugment", "cutout", "mixup", "cutmix"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}` must not be negative, got {getattr(self, name)}.")
        if not 0 < self.area <= 1:
            raise ValueError(f"`area` must lie in (0, 1], got {self.area}.")
        if not 0 <= self.share <= 1:
            raise ValueError(f"`share` must lie in [0, 1], got {self.share}.")
        if not 0 <= self.magnitude <= 30:
            raise ValueError(f"`magnitude` must lie in [0, 30], got {self.magnitude}.")
        if self.padding not in ("reflect", "zero"):
            raise ValueError(f"`padding` must be 'reflect' or 'zero', got {self.padding!r}.")
        if self.randaugment and self.trivial:
            raise ValueError("`randaugment` and `trivial` exclude each other: set one of them.")

    @property
    def mixes(self) -> bool:
        """Whether targets become soft: a distribution over the classes for each picture."""
        return self.mixup > 0 or self.cutmix > 0
