"""The 19 corruptions of CIFAR-10-C at 5 severities (Hendrycks and Dietterich, 2019), generated or read.

A corruption is a function of pictures x in [0, 1], float32 (n, 3, h, w), of random numbers and of the published
parameters of its severity, made for 32×32 pictures. By hand, since the published program needs OpenCV, scikit-image and
ImageMagick and takes pictures one by one; only JPEG, by Pillow, does so here.

The published arrays were made without a seed; ours are another draw from the same distributions. Three details differ:
`spatter` uses the rim of the drops in place of Canny's edges, `fog` the four neighbours of a point in its clouds, and
`frost`, where its pictures are missing, an imitation of them.
"""

import hashlib
import io
import math
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from .filters import (
    Draws,
    apply_matrices,
    blur,
    box_matrix,
    plasma,
    quantise,
    relief,
    round_levels,
    to_bytes,
    trail,
    zoom_sum,
)
from .images import FORMATS, DataError
from .operations import fetch, grey, to_device

CHUNK = {"cpu": 2**17, "cuda": 2**20}  # pixels of a channel per step: what fits a CPU's cache, what fills a GPU


def corrupt(
    pixels: Tensor, name: str, severity: int, seed: int = 0, first: int = 0, frost: Sequence[Tensor] = ()
) -> Tensor:
    """The pictures, uint8 (n, 3, h, w) or (n, 1, h, w), after the corruption of that name, severity 1 to 5.

    The result depends on the seed and the number of each picture (`first`, `first` + 1, …) only; CPU and GPU may
    differ by a level. Grey pictures are corrupted in colour and made grey again. `frost` is from `read_frost`."""
    if name not in NAMES:
        raise ValueError(f"There is no corruption {name!r}. There are: {', '.join(NAMES)}.")
    if severity not in range(1, 6):
        raise ValueError(f"`severity` must be a whole number from 1 to 5, got {severity}.")
    if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[1] not in (1, 3):
        got = f"{pixels.dtype} {tuple(pixels.shape)}"
        raise ValueError(f"`pixels` must be uint8 (count, 1 or 3, height, width), got {got}.")
    key = hashlib.sha256(f"{seed} {name} {severity}".encode()).digest()[:8]
    more = (frost,) if name == "frost" else ()
    size = max(1, CHUNK.get(pixels.device.type, 2**20) // math.prod(pixels.shape[2:]))
    done = [pixels[:0]]
    for start in range(0, len(pixels), size):
        some = pixels[start : start + size]
        draws = Draws(int.from_bytes(key, "little", signed=True), first + start, len(some), pixels.device)
        x = some.expand(-1, 3, -1, -1).to(torch.float32) / 255
        changed = to_bytes(FUNCTIONS[name](x, draws, *PARAMETERS[name][severity - 1], *more))
        done.append(changed if pixels.shape[1] == 3 else grey(changed).to(torch.uint8))
    return torch.cat(done)


def gaussian_noise(x: Tensor, draws: Draws, sigma: float) -> Tensor:
    """x + σε."""
    return x + sigma * draws.normal(0, *x.shape[1:])


def shot_noise(x: Tensor, draws: Draws, photons: float) -> Tensor:
    """Poisson(cx)/c: each value counts photons; drawn by a table of the distribution functions of all 256 levels."""
    most = math.ceil(photons + 8 * math.sqrt(photons))
    levels, counts = torch.arange(256, device=x.device)[:, None], torch.arange(most, device=x.device)
    rate = (levels * (photons / 255)).to(torch.float64)
    below = torch.special.gammaincc((counts + 1).to(rate), rate)  # P(Poisson(rate) ≤ count), (256, most)
    ladder = (levels + below).flatten()  # level + probability is increasing: one search finds both
    level = to_bytes(x).to(torch.int64)
    found = torch.searchsorted(ladder, level + draws.uniform(0, *x.shape[1:]).to(torch.float64))
    return (found - level * most).to(torch.float32) / photons


def impulse_noise(x: Tensor, draws: Draws, amount: float) -> Tensor:
    """Salt and pepper: a share of the values become 0 or 1, as often one as the other."""
    u = draws.uniform(0, *x.shape[1:])
    return torch.where(u < amount, (u < amount / 2).to(x), x)


def speckle_noise(x: Tensor, draws: Draws, sigma: float) -> Tensor:
    """x + σxε."""
    return x + sigma * x * draws.normal(0, *x.shape[1:])


def defocus_blur(x: Tensor, draws: Draws, radius: float, sigma: float) -> Tensor:
    """Correlation with a disk that is itself blurred by a 3×3 Gaussian; the border is mirrored in its last pixel."""
    line = torch.arange(-1.0, 2.0)
    disk = (line[:, None].square() + line.square() <= radius**2).to(torch.float32)  # radius < 2
    bell = torch.exp(-0.5 * (line / sigma).square())
    blur = bell[:, None] * bell / bell.sum().square()
    kernel = functional.conv2d(disk[None, None], blur[None, None], padding=2) / disk.sum()  # 5×5, all symmetric
    padded = functional.pad(x, (2, 2, 2, 2), mode="reflect")
    parts = padded.unfold(2, x.shape[2], 1).unfold(3, x.shape[3], 1)  # (n, 3, 5, 5, h, w), all views
    blurred = torch.zeros_like(x)  # summed here: on a GPU a convolution would round to 10 bits
    for row, column in torch.nonzero(kernel[0, 0]).tolist():
        blurred += kernel[0, 0, row, column].item() * parts[:, :, row, column]
    return blurred


def glass_blur(x: Tensor, draws: Draws, sigma: float, passes: int) -> Tensor:
    """Blur; in each pass, replace every pixel by itself or its upper or left neighbour (or both); blur.

    The published program copies from pixels that it visits later, so all pixels of a pass can be replaced at once."""
    height, width = x.shape[2:]
    x = quantise(blur(x, sigma))
    row, column = torch.arange(height, device=x.device)[:, None], torch.arange(width, device=x.device)
    inside = (row >= 2) & (column >= 2)
    for number in range(passes):
        up, left = ((draws.uniform(2 * number + i, height, width) < 0.5) & inside for i in range(2))
        x = fetch(x, row - up.long(), column - left.long())
    return blur(x, sigma)


def motion_blur(x: Tensor, draws: Draws, radius: int, sigma: float) -> Tensor:
    """A trail in a direction between −45° and 45°."""
    return trail(x, radius, sigma, draws.between(-45, 45, 0))


def zoom_blur(x: Tensor, draws: Draws, end: float) -> Tensor:
    """The mean of the picture and its enlargements by 1, 1.01, … `end` about its centre."""
    factors = np.arange(1, end, 0.01).tolist()  # as the published program: `end` itself among them for the first two
    return (x + zoom_sum(x, *factors)) / (len(factors) + 1)


def gaussian_blur(x: Tensor, draws: Draws, sigma: float) -> Tensor:
    """Gaussian blur; the border pixel is repeated."""
    return blur(x, sigma)


def snow(
    x: Tensor, draws: Draws, loc: float, scale: float, zoom: float, least: float, radius: int, sigma: float, mix: float
) -> Tensor:
    """Bright flakes with a trail between −135° and −45°, and the same upside down, before a whitened picture."""
    layer = zoom_sum(loc + scale * draws.normal(0, 1, *x.shape[2:]), zoom)
    layer = quantise(torch.where(layer < least, 0.0, layer))
    layer = trail(layer, radius, sigma, draws.between(-135, -45, 1))
    luma = (x * x.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)  # ITU-R 601
    white = torch.maximum(x, 1.5 * luma + 0.5)
    return mix * x + (1 - mix) * white + layer + layer.flip(2, 3)


def frost(x: Tensor, draws: Draws, own: float, ice: float, pictures: Sequence[Tensor]) -> Tensor:
    """A part of a frost picture, shrunk to a fifth, laid over the picture: own · x + ice · frost."""
    if not pictures:
        return own * x + ice * _make_ice(draws, max(x.shape[2:]))[..., : x.shape[2], : x.shape[3]]
    height, width = x.shape[2:]
    small = [_shrink(picture.to(x), height, width) for picture in pictures]
    parts = []
    for which, down, right in draws.uniform(0, 3).tolist():
        chosen = small[int(which * len(small))]
        top, left = int(down * (chosen.shape[1] - height)), int(right * (chosen.shape[2] - width))
        parts.append(chosen[:, top : top + height, left : left + width])
    return own * x + ice * torch.stack(parts)


def fog(x: Tensor, draws: Draws, thickness: float, decay: float) -> Tensor:
    """(x + c · clouds) · m/(m + c), where m is the brightest value of the picture."""
    brightest = x.amax((1, 2, 3), keepdim=True)
    clouds = plasma(draws, max(x.shape[2:]), decay)[..., : x.shape[2], : x.shape[3]]
    return (x + thickness * clouds) * brightest / (brightest + thickness)


def brightness(x: Tensor, draws: Draws, more: float) -> Tensor:
    """V + c in HSV: hue and saturation stay, so that x is multiplied by V′/V; black becomes grey."""
    value = x.amax(1, keepdim=True)
    brighter = (value + more).clamp(max=1)
    return torch.where(value > 0, x * brighter / value.clamp(min=1e-6), brighter)


def saturate(x: Tensor, draws: Draws, times: float, plus: float) -> Tensor:
    """aS + b in HSV: hue and value stay, x = V(1 − S·share); of a grey, which has no hue, that of red."""
    value, lowest = x.amax(1, keepdim=True), x.amin(1, keepdim=True)
    span = value - lowest
    red = x.new_tensor([0.0, 1.0, 1.0])[:, None, None]
    share = torch.where(span > 0, (value - x) / span.clamp(min=1e-6), red)
    saturation = (span / value.clamp(min=1e-6) * times + plus).clamp(0, 1)
    return value * (1 - saturation * share)


def contrast(x: Tensor, draws: Draws, factor: float) -> Tensor:
    """Towards the mean of each channel of the picture."""
    mean = x.mean((2, 3), keepdim=True)
    return mean + factor * (x - mean)


def elastic_transform(x: Tensor, draws: Draws, alpha: float, sigma: float, affine: float) -> Tensor:
    """An affine map that moves three points by up to `affine`, then displacements by α times noise blurred by σ.

    Lengths are in sides of the picture. Interpolation is bilinear, mirrored first in the last pixel, then beyond it."""
    height, width = x.shape[2:]
    side = min(height, width)
    sides = x.new_tensor([width, height])
    rows, columns = torch.arange(height, device=x.device), torch.arange(width, device=x.device)
    grid = torch.stack([columns.expand(height, -1), rows[:, None].expand(-1, width)], 2).to(x)  # (h, w, 2): x, y
    corners = x.new_tensor([[1, 1], [1, -1], [-1, -1]]) * (side // 3) + torch.floor(sides / 2)
    moved = corners + draws.between(-affine * side, affine * side, 0, 3, 2)
    back = torch.linalg.solve(functional.pad(moved, (0, 1), value=1.0), corners.expand_as(moved))  # (n, 3, 2)
    source = torch.einsum("hwk,nkc->nhwc", functional.pad(grid, (0, 1), value=1.0), back)
    x = functional.grid_sample(x, 2 * source / (sides - 1) - 1, padding_mode="reflection", align_corners=True)
    if alpha == 0:
        return x
    noise = draws.between(-1, 1, 1, 2, height, width)
    field = alpha * side * blur(noise, sigma * side, truncate=3.0, border="reflect")
    source = grid + field.permute(0, 2, 3, 1)
    return functional.grid_sample(x, (2 * source + 1) / sides - 1, padding_mode="reflection", align_corners=False)


def pixelate(x: Tensor, draws: Draws, share: float) -> Tensor:
    """Fewer pixels and back, by Pillow's box filter, which rounds after the rows and after the columns."""
    sides = tuple(x.shape[2:])
    for height, width in (tuple(int(share * side) for side in sides), sides):
        x = round_levels(apply_matrices(x, [np.eye(x.shape[2])], [box_matrix(x.shape[3], width)]))
        x = round_levels(apply_matrices(x, [box_matrix(x.shape[2], height)], [np.eye(width)]))
    return x


def jpeg_compression(x: Tensor, draws: Draws, quality: int) -> Tensor:
    """To JPEG and back by Pillow, in threads."""

    def compress(picture: np.ndarray) -> np.ndarray:
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "JPEG", quality=quality)
        return np.asarray(Image.open(file, formats=["JPEG"]))

    pictures = to_bytes(x).permute(0, 2, 3, 1).contiguous().cpu().numpy()
    with ThreadPoolExecutor() as pool:
        done = np.stack(list(pool.map(compress, pictures)))
    return to_device(done, x.device).permute(0, 3, 1, 2).to(x) / 255


def spatter(
    x: Tensor, draws: Draws, loc: float, scale: float, sigma: float, least: float, strength: float, mud: int
) -> Tensor:
    """Drops where blurred noise is above a threshold: of water, brightest on one side, or of mud, which covers.

    `strength` is what the water adds at most, or the blur of the mud."""
    layer = blur(loc + scale * draws.normal(0, 1, *x.shape[2:]), sigma)
    if mud:
        cover = blur((layer > least).to(x), strength)
        cover = torch.where(cover < 0.8, 0.0, cover)
        return x * (1 - cover) + cover * x.new_tensor([63, 42, 20])[:, None, None] / 255
    layer = quantise(torch.where(layer < least, 0.0, layer))
    water = layer * relief(layer > 0)
    water = strength * water / water.amax((1, 2, 3), keepdim=True).clamp(min=1e-6)
    return x + water * x.new_tensor([175, 238, 238])[:, None, None] / 255


def _shrink(picture: Tensor, height: int, width: int) -> Tensor:
    """A frost picture (3, h, w) in [0, 1] at a fifth of its size, or as much larger as covers height × width."""
    sides = picture.shape[1:]
    scale = max(0.2, (height + 1) / sides[0], (width + 1) / sides[1])
    size = [round(scale * side) for side in sides]
    return functional.interpolate(picture[None], size, mode="bilinear", align_corners=False)[0].round() / 255


def _make_ice(draws: Draws, side: int) -> Tensor:
    """Frost without pictures: ridges of clouds, slightly blue, as bright and as varied as the pictures are."""
    ridges = 1 - (2 * plasma(draws, side, 1.5) - 1).abs()
    light = draws.between(0.75, 1.25, 100, 1, 1, 1)
    return (0.3 + 0.6 * ridges) * light * ridges.new_tensor([0.85, 0.95, 1.0])[:, None, None]


NOISE = (gaussian_noise, shot_noise, impulse_noise, speckle_noise)
BLUR = (defocus_blur, glass_blur, motion_blur, zoom_blur, gaussian_blur)
WEATHER = (snow, frost, fog, spatter)
DIGITAL = (brightness, contrast, elastic_transform, pixelate, jpeg_compression, saturate)
FUNCTIONS: dict[str, Callable[..., Tensor]] = {f.__name__: f for f in (*NOISE, *BLUR, *WEATHER, *DIGITAL)}
PARAMETERS = tomllib.loads(Path(__file__).with_name("corruptions.toml").read_text(encoding="utf-8"))
NAMES = tuple(PARAMETERS)
STANDARD = NAMES[:15]  # those of the mean corruption error; the other four were published beside them


def read_frost(root: Path) -> list[Tensor]:
    """The frost pictures ROOT/frost/frost1 … frost5, .png or .jpg, as uint8 (3, h, w); none if the folder has none.

    They are those of github.com/hendrycks/robustness, which has a sixth that it never uses."""
    paths = sorted(path for path in (root / "frost").glob("frost[1-5].*") if path.suffix in (".png", ".jpg", ".jpeg"))
    try:
        pictures = [np.array(Image.open(path, formats=FORMATS).convert("RGB")) for path in paths]
    except (OSError, ValueError) as error:
        raise DataError(f"{root / 'frost'} holds a picture that cannot be read ({error}): replace it.") from None
    return [torch.from_numpy(picture).permute(2, 0, 1) for picture in pictures]


def read_published(folder: Path, name: str, severity: int, labels: Tensor) -> Tensor:
    """The published pictures of a corruption, uint8 (n, 3, 32, 32), from a folder such as ROOT/CIFAR-10-C.

    `labels` are those of the test images in their order, which the folder's own must match."""
    n = len(labels)
    rows = slice((severity - 1) * n, severity * n)
    try:
        pixels, known = (np.load(folder / f"{file}.npy", mmap_mode="r") for file in (name, "labels"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} has no readable {name}.npy and labels.npy ({error}): unpack it again.") from None
    if pixels.dtype != np.uint8 or pixels.shape != (5 * n, 32, 32, 3) or known.shape != (5 * n,):
        got = f"{pixels.dtype} {pixels.shape}"
        raise DataError(f"{folder / name}.npy should be uint8 {(5 * n, 32, 32, 3)}, got {got}: download it again.")
    if not np.array_equal(known[rows], labels.cpu().numpy()):
        raise DataError(f"{folder / 'labels.npy'} are not the labels of the test images: download it again.")
    return torch.from_numpy(np.array(pixels[rows])).permute(0, 3, 1, 2).contiguous()
