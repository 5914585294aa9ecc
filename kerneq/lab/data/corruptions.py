"""The 19 corruptions of CIFAR-10-C at 5 severities (Hendrycks and Dietterich, 2019), generated or read.

A corruption is a function of pictures x in [0, 1], float32 (n, 3, h, w), of random numbers and of the published
parameters of its severity, made for 32×32 pictures. By hand, since the published program needs OpenCV, scikit-image and
ImageMagick and takes pictures one by one; only what Pillow does, `pixelate` and JPEG, takes them so here.

The published arrays were made without a seed; ours are another draw from the same distributions. Three details differ:
`spatter` uses the rim of the drops in place of Canny's edges, `fog` the four neighbours of a point in its clouds, and
`frost`, where its pictures are missing, an imitation of them.
"""

import dataclasses
import hashlib
import io
import math
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, final

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from .images import FORMATS, DataError
from .operations import fetch, grey, to_device

MARGIN = 1e-3  # of a level: rounding error of float32 that must not lower a value by a level
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


@final
@dataclasses.dataclass(frozen=True)
class Draws:
    """The random numbers of pictures `first`, `first` + 1, …: number j of stream s of picture i hashes (key, i, s, j).

    The hash is SplitMix64 (Steele, Lea and Flood, 2014) in wrapping int64, the same on every device."""

    key: int
    first: int
    count: int
    device: torch.device

    def uniform(self, stream: int, *shape: int) -> Tensor:
        """Numbers in the open interval (0, 1), float32 (count, *shape); no stream may be asked for twice."""
        place = torch.arange(math.prod(shape), device=self.device) + (stream << 24)
        picture = torch.arange(self.first, self.first + self.count, device=self.device) << 32
        bits = (picture[:, None] + place).mul_(-0x61C8864680B583EB).add_(self.key)
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
            bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << 64 - shift) - 1)).mul_(factor)  # >> copies the sign
        bits.bitwise_xor_(bits >> 31)
        return bits.bitwise_and_(0x7FFFFF).to(torch.float32).add_(0.5).div_(2**23).view(self.count, *shape)

    def normal(self, stream: int, *shape: int) -> Tensor:
        """Standard normal numbers, float32 (count, *shape), by the inverse of their distribution."""
        return self.uniform(stream, *shape).mul_(2).sub_(1).erfinv_().mul_(math.sqrt(2))

    def between(self, low: float, high: float, stream: int, *shape: int) -> Tensor:
        """Uniform numbers between two bounds."""
        return low + (high - low) * self.uniform(stream, *shape)


def to_bytes(x: Tensor) -> Tensor:
    """Levels 0 to 255, truncated as in the published program."""
    return x.clamp(0, 1).mul(255).add(MARGIN).to(torch.uint8)


def quantise(x: Tensor) -> Tensor:
    """x rounded down to a level of a byte."""
    return to_bytes(x).to(x) / 255


def round_levels(x: Tensor) -> Tensor:
    """x at the nearest level, halves up."""
    return (x * 255 + 0.5 + MARGIN).floor() / 255


def apply_matrices(x: Tensor, rows: Sequence[np.ndarray], columns: Sequence[np.ndarray]) -> Tensor:
    """Σₖ Aₖ x Bₖᵀ for Aₖ (h′, h), which works along the columns of a picture, and Bₖ (w′, w), in two products."""
    height, width = rows[0].shape[0], columns[0].shape[0]
    right = torch.from_numpy(np.concatenate(columns)).to(x)  # (kw′, w)
    left = torch.from_numpy(np.stack(rows, 2).reshape(height, -1)).to(x)  # (h′, hk)
    return left @ (x @ right.mT).reshape(*x.shape[:2], -1, width)


def blur(x: Tensor, sigma: float, truncate: float = 4.0, border: Literal["nearest", "reflect"] = "nearest") -> Tensor:
    """Gaussian blur, cut off at `truncate` σ; the border pixel is repeated, or the picture mirrored beyond it."""
    radius = int(truncate * sigma + 0.5)
    offsets = np.arange(-radius, radius + 1)
    weights = np.exp(-0.5 * (offsets / sigma) ** 2)
    matrices = []
    for side in x.shape[2:]:
        taps = np.arange(side)[:, None] + offsets
        if border == "reflect":
            taps = taps % (2 * side)
            taps = np.minimum(taps, 2 * side - 1 - taps)
        matrix = np.zeros((side, side))
        np.add.at(matrix, (np.arange(side)[:, None], taps.clip(0, side - 1)), weights / weights.sum())
        matrices.append([matrix])
    return apply_matrices(x, *matrices)


def sum_enlargements(x: Tensor, *factors: float) -> Tensor:
    """The sum of enlargements of the centre, linear, corner pixels on corner pixels, cut to the picture's size."""
    matrices = []
    for side in x.shape[2:]:
        crops = [math.ceil(side / factor) for factor in factors]
        sizes = [round(crop * factor) for crop, factor in zip(crops, factors, strict=True)]
        sources = [
            (np.arange(side) + (size - side) // 2) * ((crop - 1) / (size - 1)) + (side - crop) // 2
            for crop, size in zip(crops, sizes, strict=True)
        ]
        matrices.append([np.maximum(0, 1 - np.abs(source[:, None] - np.arange(side))) for source in sources])
    return apply_matrices(x, *matrices)


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


def draw_trail(x: Tensor, radius: int, sigma: float, degrees: Tensor) -> Tensor:
    """ImageMagick's motion blur: half a Gaussian of 2 · radius + 1 pixels in the direction `degrees` (n), rounded."""
    offsets = np.arange(2 * radius + 1)
    weights = np.exp(-0.5 * (offsets / sigma) ** 2)
    weights /= weights.sum()
    height, width = x.shape[2:]
    angle = torch.deg2rad(degrees.to(torch.float64))
    blurred = torch.zeros_like(x)
    for offset, weight in zip(offsets.tolist(), weights.tolist(), strict=True):
        if weight > 1e-5:  # the others together are less than a hundredth of a level
            down, right = (torch.ceil(offset * part - 0.5).long()[:, None] for part in (angle.sin(), angle.cos()))
            rows = (torch.arange(height, device=x.device) + down).clamp(0, height - 1)
            columns = (torch.arange(width, device=x.device) + right).clamp(0, width - 1)
            blurred += weight * fetch(x, rows[:, :, None], columns[:, None, :])
    return round_levels(blurred)


def motion_blur(x: Tensor, draws: Draws, radius: int, sigma: float) -> Tensor:
    """A trail in a direction between −45° and 45°."""
    return draw_trail(x, radius, sigma, draws.between(-45, 45, 0))


def zoom_blur(x: Tensor, draws: Draws, end: float) -> Tensor:
    """The mean of the picture and its enlargements by 1, 1.01, … `end` about its centre."""
    factors = np.arange(1, end, 0.01).tolist()  # as the published program: `end` itself among them for the first two
    return (x + sum_enlargements(x, *factors)) / (len(factors) + 1)


def gaussian_blur(x: Tensor, draws: Draws, sigma: float) -> Tensor:
    """Gaussian blur; the border pixel is repeated."""
    return blur(x, sigma)


def snow(
    x: Tensor, draws: Draws, loc: float, scale: float, zoom: float, least: float, radius: int, sigma: float, mix: float
) -> Tensor:
    """Bright flakes with a trail between −135° and −45°, and the same upside down, before a whitened picture."""
    layer = sum_enlargements(loc + scale * draws.normal(0, 1, *x.shape[2:]), zoom)
    layer = quantise(torch.where(layer < least, 0.0, layer))
    layer = draw_trail(layer, radius, sigma, draws.between(-135, -45, 1))
    luma = (x * x.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)  # ITU-R 601
    white = torch.maximum(x, 1.5 * luma + 0.5)
    return mix * x + (1 - mix) * white + layer + layer.flip(2, 3)


def draw_clouds(draws: Draws, side: int, decay: float) -> Tensor:
    """Clouds between 0 and 1 on a torus by the diamond-square algorithm, (n, 1, 2ᵏ, 2ᵏ) with 2ᵏ ≥ side.

    A new point is the mean of four, plus w · U(−w, w); w is 100 at first and divided by `decay` at every halving."""
    step = size = max(2, 1 << (side - 1).bit_length())
    height = torch.zeros((draws.count, size, size), device=draws.device)
    wobble, stream = 100.0, 0
    while step >= 2:
        half, points = step // 2, size // step
        noise = [draws.between(-wobble, wobble, stream + i, points, points) * wobble for i in range(3)]
        corners = height[:, ::step, ::step]
        centres = (corners + corners.roll(-1, 1) + corners.roll(-1, 2) + corners.roll((-1, -1), (1, 2))) / 4 + noise[0]
        right = (corners + corners.roll(-1, 2) + centres + centres.roll(1, 1)) / 4 + noise[1]
        below = (corners + corners.roll(-1, 1) + centres + centres.roll(1, 2)) / 4 + noise[2]
        height[:, half::step, half::step] = centres
        height[:, ::step, half::step] = right
        height[:, half::step, ::step] = below
        step, wobble, stream = half, wobble / decay, stream + 3
    height -= height.amin((1, 2), keepdim=True)
    return (height / height.amax((1, 2), keepdim=True))[:, None]


def frost(x: Tensor, draws: Draws, own: float, ice: float, pictures: Sequence[Tensor]) -> Tensor:
    """A part of a frost picture, shrunk to a fifth, laid over the picture: own · x + ice · frost.

    Without pictures the frost is an imitation. The five severities, own and ice, are in corruptions.toml.
    """
    layer = _cut_frost(x, draws, pictures) if pictures else _make_ice(draws, max(x.shape[2:]))
    return own * x + ice * layer[..., : x.shape[2], : x.shape[3]]


def _cut_frost(x: Tensor, draws: Draws, pictures: Sequence[Tensor]) -> Tensor:
    """Return a part of a frost picture, as large as x, for each picture of x."""
    height, width = x.shape[2:]
    small = [_shrink(picture.to(x), height, width) for picture in pictures]
    parts = []
    for which, down, right in draws.uniform(0, 3).tolist():
        chosen = small[int(which * len(small))]
        top, left = int(down * (chosen.shape[1] - height)), int(right * (chosen.shape[2] - width))
        parts.append(chosen[:, top : top + height, left : left + width])
    return torch.stack(parts)


def _shrink(picture: Tensor, height: int, width: int) -> Tensor:
    """A frost picture (3, h, w) in [0, 1] at a fifth of its size, or as much larger as covers height × width."""
    sides = picture.shape[1:]
    scale = max(0.2, (height + 1) / sides[0], (width + 1) / sides[1])
    size = [round(scale * side) for side in sides]
    return functional.interpolate(picture[None], size, mode="bilinear", align_corners=False)[0].round() / 255


def _make_ice(draws: Draws, side: int) -> Tensor:
    """Frost without pictures: ridges of clouds, slightly blue, as bright and as varied as the pictures are."""
    ridges = 1 - (2 * draw_clouds(draws, side, 1.5) - 1).abs()
    light = draws.between(0.75, 1.25, 100, 1, 1, 1)
    return (0.3 + 0.6 * ridges) * light * ridges.new_tensor([0.85, 0.95, 1.0])[:, None, None]


def fog(x: Tensor, draws: Draws, thickness: float, decay: float) -> Tensor:
    """(x + c · clouds) · m/(m + c), where m is the brightest value of the picture."""
    brightest = x.amax((1, 2, 3), keepdim=True)
    clouds = draw_clouds(draws, max(x.shape[2:]), decay)[..., : x.shape[2], : x.shape[3]]
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


def change_by_pillow(x: Tensor, change: Callable[[Image.Image], Image.Image]) -> Tensor:
    """The pictures, each changed by functions of Pillow, in threads."""
    pictures = to_bytes(x).permute(0, 2, 3, 1).contiguous().cpu().numpy()
    with ThreadPoolExecutor() as pool:
        done = np.stack(list(pool.map(lambda picture: np.asarray(change(Image.fromarray(picture))), pictures)))
    return to_device(done, x.device).permute(0, 3, 1, 2).to(x) / 255


def pixelate(x: Tensor, draws: Draws, share: float) -> Tensor:
    """Fewer pixels and back, by Pillow's box filter."""
    height, width = x.shape[2:]
    fewer, box = (int(share * width), int(share * height)), Image.Resampling.BOX
    return change_by_pillow(x, lambda picture: picture.resize(fewer, box).resize((width, height), box))


def jpeg_compression(x: Tensor, draws: Draws, quality: int) -> Tensor:
    """To JPEG and back, by Pillow."""

    def compress(picture: Image.Image) -> Image.Image:
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=quality)
        return Image.open(file, formats=["JPEG"])

    return change_by_pillow(x, compress)


def measure_distance(points: Tensor) -> Tensor:
    """From each pixel to the nearest of some points, bool (n, 1, h, w); about 1000 where there are none.

    Squared distances are separable: the least along the rows, then the least along the columns."""
    squares = torch.where(points, 0.0, 1e6)
    for _ in range(2):
        side = torch.arange(squares.shape[3], device=points.device)
        squares = (squares[..., None, :] + (side[:, None] - side).square()).amin(-1).mT
    return squares.sqrt()


def draw_relief(drops: Tensor) -> Tensor:
    """Drops, bool (n, 1, h, w), as a relief lit from one side: the distance to a rim, levelled and embossed."""
    wet = functional.pad(drops, (1, 1, 1, 1), value=True)
    inside = wet[..., 1:-1, :-2] & wet[..., 1:-1, 2:] & wet[..., :-2, 1:-1] & wet[..., 2:, 1:-1]
    depth = _smooth(measure_distance(drops & ~inside).clamp(max=20)).floor()
    levels = functional.pad(_equalise(depth), (1, 1, 1, 1), mode="reflect")
    light = levels.new_tensor([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]])
    return _smooth(functional.conv2d(levels, light[None, None]).clamp(0, 255))


def _equalise(x: Tensor) -> Tensor:
    """OpenCV's equalisation of a histogram: 255 times the share of the pixels that are no higher, those of the lowest
    level left out. (Pillow's counts in whole steps of n/255 pixels, too coarse for small pictures.)"""
    flat = x.flatten(1)
    up_to = torch.searchsorted(flat.sort(1).values, flat, right=True)
    lowest = up_to.amin(1, keepdim=True)
    return ((up_to - lowest) * 255 / (flat.shape[1] - lowest).clamp(min=1)).round().view_as(x)


def _smooth(x: Tensor) -> Tensor:
    """The mean of 3×3 pixels (n, 1, h, w); the border is mirrored in its last pixel."""
    return functional.avg_pool2d(functional.pad(x, (1, 1, 1, 1), mode="reflect"), 3, stride=1)


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
    water = layer * draw_relief(layer > 0)
    water = strength * water / water.amax((1, 2, 3), keepdim=True).clamp(min=1e-6)
    return x + water * x.new_tensor([175, 238, 238])[:, None, None] / 255


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
