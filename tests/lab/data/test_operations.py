"""RandAugment's operations against Pillow's, on the same pictures."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from kerneq.lab.data.operations import RANDAUGMENT, TRIVIAL_WIDE, Operation, operate

SIDE = (24, 32)  # height and width differ, so that a mix-up of the two would show


def pictures(channels: int, count: int = 12) -> torch.Tensor:
    """Noise, ramps, low contrast, one level only, and a few levels: what the operations treat differently."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[: SIDE[0], : SIDE[1]]
    out = rng.integers(0, 256, (count, channels, *SIDE))
    out[1] = (x * 7 + y * 3) % 256
    out[2] = rng.integers(100, 140, (channels, *SIDE))
    out[3] = 77
    out[4] = rng.choice([0, 128, 255], (channels, *SIDE))
    out[5] = (128 + 90 * np.sin(x / 5) * np.cos(y / 4)).astype(int)
    out[6] = rng.integers(0, 2, (channels, *SIDE)) * 255
    out[7] = rng.integers(0, 30, (channels, *SIDE)) ** 2 % 256
    return torch.from_numpy(out.astype(np.uint8))


def pillow(picture: torch.Tensor, operation: Operation, v: float) -> np.ndarray:
    array = picture.permute(1, 2, 0).numpy()
    image = Image.fromarray(array.squeeze(2) if array.shape[2] == 1 else array)
    nearest, affine = Image.Resampling.NEAREST, Image.Transform.AFFINE
    match operation:
        case Operation.IDENTITY:
            done = image
        case Operation.SHEAR_X:
            done = image.transform(image.size, affine, (1, v, 0, 0, 1, 0), nearest)
        case Operation.SHEAR_Y:
            done = image.transform(image.size, affine, (1, 0, 0, v, 1, 0), nearest)
        case Operation.TRANSLATE_X:
            done = image.transform(image.size, affine, (1, 0, v, 0, 1, 0), nearest)
        case Operation.TRANSLATE_Y:
            done = image.transform(image.size, affine, (1, 0, 0, 0, 1, v), nearest)
        case Operation.ROTATE:
            done = image.rotate(v, nearest)
        case Operation.BRIGHTNESS:
            done = ImageEnhance.Brightness(image).enhance(v)
        case Operation.COLOUR:
            done = ImageEnhance.Color(image).enhance(v)
        case Operation.CONTRAST:
            done = ImageEnhance.Contrast(image).enhance(v)
        case Operation.SHARPNESS:
            done = ImageEnhance.Sharpness(image).enhance(v)
        case Operation.POSTERIZE:
            done = ImageOps.posterize(image, int(v))
        case Operation.SOLARIZE:
            done = ImageOps.solarize(image, v)
        case Operation.AUTOCONTRAST:
            done = ImageOps.autocontrast(image)
        case Operation.EQUALIZE:
            done = ImageOps.equalize(image)
    out = np.asarray(done)
    return (out[:, :, None] if out.ndim == 2 else out).transpose(2, 0, 1).astype(int)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("operation", list(Operation), ids=lambda o: o.name.lower())
def test_an_operation_is_pillows_at_any_level_and_level_zero_changes_nothing(operation, channels):
    batch = pictures(channels)
    count = len(batch)
    rng = np.random.default_rng(operation)
    kinds, signs = np.full(count, int(operation)), rng.choice([-1.0, 1.0], count)
    for ranges in (RANDAUGMENT, TRIVIAL_WIDE):
        for levels in (rng.random(count), np.ones(count), np.zeros(count)):
            amount = ranges.amounts(kinds, levels, signs, SIDE)
            got = operate(batch, kinds, amount).numpy().astype(int)
            want = np.stack([pillow(p, operation, v) for p, v in zip(batch, amount.tolist(), strict=True)])
            error = np.abs(got - want)
            # autocontrast: Pillow truncates a rounded quotient, we the exact one
            assert error.max() <= (1 if operation == Operation.AUTOCONTRAST else 0)
            assert (error > 0).mean() < 0.02
        assert np.array_equal(got, batch.numpy()) or operation >= Operation.AUTOCONTRAST  # the last level was 0


def test_each_picture_of_a_batch_gets_its_own_operation():
    batch = pictures(3, count=14)
    kinds = np.random.default_rng(1).permutation(14)
    amount = RANDAUGMENT.amounts(kinds, np.full(14, 0.6), np.ones(14), SIDE)
    got = operate(batch, kinds, amount)
    for i in range(14):
        alone = operate(batch[i : i + 1], kinds[i : i + 1], amount[i : i + 1])
        assert torch.equal(got[i : i + 1], alone)


def test_the_ranges_are_the_published_ones_at_full_level():
    every = np.arange(14)
    one = np.ones(14)
    assert RANDAUGMENT.amounts(every, one, one, (331, 331)).tolist() == (
        [0, 0.3, 0.3, 150, 150, 30, 1.9, 1.9, 1.9, 1.9, 4, 0, 0, 0]
    )
    assert TRIVIAL_WIDE.amounts(every, one, -one, (32, 32)).round(2).tolist() == (
        [0, -0.99, -0.99, -32, -32, -135, 0.01, 0.01, 0.01, 0.01, 2, 0, 0, 0]
    )
