"""Clean and noisy pictures for the denoising task: CIFAR-10, HSI Road, or a synthetic stand-in for it.

HSI Road (Lu et al., 2020) has 3799 scenes of 25 near-infrared channels. The published archive unpacks to
hsi_road/images/ with one NAME_nir.tif per scene: 25 pages of 192 × 384 bytes. Put the folder hsi_road under
$KERNEQ_DATA (default ~/.cache/kerneq). Arrays hsi_road/NAME.npy (channels, height, width) of bytes are read too.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image, ImageSequence
from torch import Tensor

from kerneq.lab.data import DataError, data_root, load

Source = Literal["cifar10", "hsi", "synthetic"]
CHANNELS = 25  # of HSI Road


def load_pixels(name: str, split: Literal["train", "test"], count: int) -> Tensor:
    """The first `count` images of a data set as bytes (count, c, h, w)."""
    images = load(name, split).in_memory()
    if count > len(images):
        raise DataError(f"{name} has {len(images)} {split} pictures, not {count}.")
    return images[:count]


@dataclasses.dataclass(frozen=True)
class NoisyPictures:
    """Clean pictures as bytes on the device; noise N(0, deviation²) is added and the sum clipped to [0, 1]."""

    train: Tensor  # uint8 (count, c, h, w)
    test: Tensor
    deviation: float
    source: str  # in words, for figures

    def training(self, epoch: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled batches, fresh noise every epoch, the same for every model."""
        g = torch.Generator(self.train.device).manual_seed(epoch)
        order = torch.randperm(len(self.train), generator=g, device=self.train.device)
        for index in order.split(batch):
            clean = self.train[index].float() / 255
            yield self._noisy(clean, g), clean

    def testing(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The same noise every time."""
        g = torch.Generator(self.test.device).manual_seed(1_000_000)
        for part in self.test.split(batch):
            clean = part.float() / 255
            yield self._noisy(clean, g), clean

    def _noisy(self, clean: Tensor, g: torch.Generator) -> Tensor:
        noise = torch.randn(clean.shape, generator=g, device=clean.device)
        return (clean + self.deviation * noise).clamp(0, 1)


def pictures(
    source: Source, train: int, test: int, channels: int, size: int, deviation: float, device: torch.device
) -> NoisyPictures:
    """The first `train` and `test` pictures; `size` > 0 cuts out the central square of that side."""
    if source == "cifar10":
        if channels != 3:
            raise DataError(f"Pictures of CIFAR-10 have 3 channels, not {channels}.")
        clean = [load_pixels("cifar10", "train", train), load_pixels("cifar10", "test", test)]
        words = "CIFAR-10"
    else:
        paths = find_scenes() if source == "hsi" else []
        if paths:
            clean = _divide(read_scenes(paths, channels), train, test)
            words = f"HSI Road, first {channels} channels"
        else:  # the reader's absence must not look like its presence
            side = (size, size) if size else (192, 384)
            clean = _divide(synthetic_scenes(train + test, channels, side), train, test)
            words = f"synthetic stand-in for HSI Road, {channels} channels"
    first, second = (center_crop(part, size).to(device) for part in clean)
    return NoisyPictures(first, second, deviation, words)


def _divide(scenes: Tensor, train: int, test: int) -> list[Tensor]:
    """A fixed shuffle, six sevenths to train on and one seventh to test on at most, as the paper's scripts do."""
    order = torch.randperm(len(scenes), generator=torch.Generator().manual_seed(0))
    edge = len(scenes) * 6 // 7 if train + test > len(scenes) else train
    return [scenes[order[:edge][:train]], scenes[order[edge:][:test]]]


def center_crop(images: Tensor, size: int) -> Tensor:
    """The central square of side `size`; whole images for 0."""
    if not size:
        return images
    if size > min(images.shape[-2:]):
        raise DataError(f"No square of side {size} lies in pictures of {images.shape[-2]} × {images.shape[-1]} pixels.")
    top, left = ((side - size) // 2 for side in images.shape[-2:])
    return images[..., top : top + size, left : left + size].contiguous()


def find_scenes() -> list[Path]:
    """The files of the scenes in order, none if the data set is absent."""
    folder = data_root() / "hsi_road"
    pages = sorted([*folder.glob("images/*_nir.tif"), *folder.glob("images/*_nir.tiff")])
    return pages or sorted(folder.glob("*.npy"))


def read_scenes(paths: list[Path], channels: int) -> Tensor:
    """The first `channels` channels of each scene, uint8 (count, channels, height, width)."""
    scenes = [_scene(path, channels) for path in paths]
    shapes = {scene.shape for scene in scenes}
    if len(shapes) > 1:
        raise DataError(f"The scenes differ in size ({sorted(shapes)}): keep those of one size.")
    return torch.from_numpy(np.stack(scenes))


def _scene(path: Path, channels: int) -> np.ndarray:
    try:
        if path.suffix == ".npy":
            scene = np.load(path)[:channels]
        else:
            with Image.open(path, formats=("TIFF",)) as image:
                pages = [
                    np.array(page) for page, _ in zip(ImageSequence.Iterator(image), range(channels), strict=False)
                ]
            scene = np.stack(pages)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a hyperspectral scene: {error}.") from None
    if scene.ndim != 3 or len(scene) < channels or scene.dtype != np.uint8:
        got = f"{scene.dtype} {scene.shape}"
        raise DataError(f"{path} should hold {channels} or more channels of bytes (c, h, w), got {got}.")
    return scene


def synthetic_scenes(count: int, channels: int, size: tuple[int, int]) -> Tensor:
    """Not the data set: smooth random scenes with correlated channels, for trying the experiment without it.

    Six smooth random fields per scene, mixed by spectra that are smooth in wavelength; bytes (count, c, h, w).
    """
    g = torch.Generator().manual_seed(0)
    height, width = size
    materials = 6
    frequency = torch.sqrt(torch.fft.fftfreq(height)[:, None].square() + torch.fft.rfftfreq(width)[None, :].square())
    envelope = 1 / (0.02 + frequency) ** 1.6  # the spectrum of natural images, roughly
    noise = torch.randn(count, materials, height, width, generator=g)
    fields = torch.fft.irfft2(torch.fft.rfft2(noise) * envelope, s=size)
    fields = torch.softmax(2 * fields / fields.std((-2, -1), keepdim=True), 1)
    wavelength = torch.linspace(0, 1, CHANNELS)[:channels]
    centre, breadth = torch.rand(materials, 1, generator=g), 0.2 + 0.5 * torch.rand(materials, 1, generator=g)
    spectra = torch.exp(-(((wavelength - centre) / breadth) ** 2))
    scenes = torch.einsum("nmhw,mc->nchw", fields, spectra)
    return (255 * scenes.clamp(0, 1)).to(torch.uint8)
