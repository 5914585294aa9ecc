"""Clean and noisy pictures for the denoising task: CIFAR-10, HSI Road, or the synthetic stand-in."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from kerneq import data
from kerneq.kglm.experiments import hyperspectral

Source = Literal["cifar10", "hsi", "synthetic"]


@dataclasses.dataclass(frozen=True)
class Pictures:
    """Clean pictures as bytes on the device; noise N(0, deviation²) is added and the sum clipped to [0, 1]."""

    train: Tensor  # uint8 (count, c, h, w)
    test: Tensor
    deviation: float
    source: str  # in words, for figures

    def training(self, epoch: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled batches, fresh noise every epoch, the same for every model."""
        g = torch.Generator(self.train.device).manual_seed(epoch)
        order = torch.randperm(len(self.train), generator=g, device=self.train.device)
        for index in order.split(batch):  # type: ignore[no-untyped-call]
            clean = self.train[index].float() / 255
            yield self._noisy(clean, g), clean

    def testing(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The same noise every time."""
        g = torch.Generator(self.test.device).manual_seed(1_000_000)
        for part in self.test.split(batch):  # type: ignore[no-untyped-call]
            clean = part.float() / 255
            yield self._noisy(clean, g), clean

    def _noisy(self, clean: Tensor, g: torch.Generator) -> Tensor:
        noise = torch.randn(clean.shape, generator=g, device=clean.device)
        return (clean + self.deviation * noise).clamp(0, 1)


def pictures(
    source: Source, train: int, test: int, channels: int, size: int, deviation: float, device: torch.device
) -> Pictures:
    """The first `train` and `test` pictures; `size` > 0 cuts out the central square of that side."""
    if source == "cifar10":
        clean = [_cifar("train", train), _cifar("test", test)]
        words = "CIFAR-10"
    else:
        paths = hyperspectral.find() if source == "hsi" else []
        if paths:
            clean = _divide(hyperspectral.read(paths, channels), train, test)
            words = f"HSI Road, first {channels} channels"
        else:  # the reader's absence must not look like its presence
            side = (size, size) if size else (192, 384)
            clean = _divide(hyperspectral.synthetic(train + test, channels, side), train, test)
            words = f"synthetic stand-in for HSI Road, {channels} channels"
    first, second = (_cut(part, size).to(device) for part in clean)
    return Pictures(first, second, deviation, words)


def _cifar(split: Literal["train", "test"], count: int) -> Tensor:
    images = data.load("cifar10", split)
    if not isinstance(images, data.Images):
        raise TypeError("CIFAR-10 is read whole into memory.")
    return images.pixels[:count]


def _divide(scenes: Tensor, train: int, test: int) -> list[Tensor]:
    """A fixed shuffle, six sevenths to train on and one seventh to test on at most, as the paper's scripts
    do.
    """
    order = torch.randperm(len(scenes), generator=torch.Generator().manual_seed(0))
    edge = len(scenes) * 6 // 7 if train + test > len(scenes) else train
    return [scenes[order[:edge][:train]], scenes[order[edge:][:test]]]


def _cut(images: Tensor, size: int) -> Tensor:
    if not size:
        return images
    top, left = ((side - size) // 2 for side in images.shape[-2:])
    return images[..., top : top + size, left : left + size].contiguous()
