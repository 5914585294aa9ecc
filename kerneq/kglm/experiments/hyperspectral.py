"""HSI Road (Lu et al., 2020), 3799 scenes of 25 near-infrared channels, and a synthetic stand-in.

The published archive unpacks to hsi_road/images/ with one NAME_nir.tif per scene: 25 pages of 192 × 384
bytes. Put the folder hsi_road under $KERNEQ_DATA (default ~/.cache/kerneq). Arrays hsi_road/NAME.npy
(channels, height, width) of bytes are read too.
"""

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageSequence
from torch import Tensor

from kerneq.data import DataError, data_root

CHANNELS = 25


def find(root: Path | None = None) -> list[Path]:
    """The files of the scenes in order, none if the data set is absent."""
    folder = (data_root(None) if root is None else root) / "hsi_road"
    pages = sorted([*folder.glob("images/*_nir.tif"), *folder.glob("images/*_nir.tiff")])
    return pages or sorted(folder.glob("*.npy"))


def read(paths: list[Path], channels: int) -> Tensor:
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
            with Image.open(path) as image:
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


def synthetic(count: int, channels: int, size: tuple[int, int], seed: int = 0) -> Tensor:
    """Not the data set: smooth random scenes with correlated channels, for trying the experiment without it.

    Six smooth random fields per scene, mixed by spectra that are smooth in wavelength; bytes (count, c, h,
    w).
    """
    g = torch.Generator().manual_seed(seed)
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
