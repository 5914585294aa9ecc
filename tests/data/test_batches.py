"""Batches: what an epoch holds, and on what its randomness depends."""

import pytest
import torch
from torch.nn import functional

from kerneq.data import Augment, Batches, Images

EVERYTHING = Augment(area=0.5, crop=2, flip=True, randaugment=2, cutout=3, mixup=0.4, cutmix=1.0)


def pictures(count: int = 53, channels: int = 3, side: int = 8) -> Images:
    rng = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, channels, side, side), dtype=torch.uint8, generator=rng)
    labels = torch.arange(count) % 5
    return Images(pixels, labels, tuple("abcde"), (0.5,) * channels, (0.25,) * channels)


def same(first: list[tuple[torch.Tensor, ...]], second: list[tuple[torch.Tensor, ...]]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a, b) for p, q in zip(first, second, strict=True) for a, b in zip(p, q, strict=True)
    )


def test_without_augmentation_an_epoch_is_the_normalised_data_in_order():
    images = pictures()
    batches = Batches(images, 8, shuffle=False, drop_last=False)
    x, labels = (torch.cat(parts) for parts in zip(*batches.epoch(0), strict=True))
    assert len(batches) == 7 and x.dtype == torch.float32
    torch.testing.assert_close(x, (images.pixels.double().div(255) - 0.5).div(0.25).float())
    assert torch.equal(labels, images.labels)


def test_a_shuffled_epoch_holds_every_picture_once_and_epochs_differ():
    images = Images(
        torch.arange(48, dtype=torch.uint8).view(48, 1, 1, 1), torch.arange(48), ("a",) * 48, (0.0,), (1.0,)
    )
    epochs = [torch.cat([labels for _, labels in Batches(images, 12).epoch(n)]) for n in range(3)]
    assert all(torch.equal(epoch.sort().values, torch.arange(48)) for epoch in epochs)
    assert not torch.equal(epochs[0], epochs[1]) and not torch.equal(epochs[1], epochs[2])


def test_the_label_travels_with_its_picture():
    images = Images(
        torch.arange(50, dtype=torch.uint8).view(50, 1, 1, 1), torch.arange(50), ("a",) * 50, (0.0,), (1.0,)
    )
    for x, labels in Batches(images, 10, seed=3).epoch(1):
        assert torch.equal(x.flatten().mul(255).round().long(), labels)


@pytest.mark.parametrize("start", [1, 3, 6])
def test_an_epoch_entered_in_the_middle_goes_on_bit_for_bit(start):
    batches = Batches(pictures(), 8, EVERYTHING, seed=5)
    whole = list(batches.epoch(2))
    assert same(whole[start:], list(Batches(pictures(), 8, EVERYTHING, seed=5).epoch(2, start)))


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_together_see_what_one_process_sees(world):
    whole = list(Batches(pictures(), 16, EVERYTHING, seed=1).epoch(4))
    ranks = [Batches(pictures(), 16, EVERYTHING, seed=1, rank=r, world=world).epoch(4) for r in range(world)]
    joined = [tuple(torch.cat(part) for part in zip(*step, strict=True)) for step in zip(*ranks, strict=True)]
    assert same(whole, joined)


def test_ranks_share_an_incomplete_last_batch():
    whole = list(Batches(pictures(), 8, shuffle=False, drop_last=False).epoch(0))
    ranks = [Batches(pictures(), 8, shuffle=False, drop_last=False, rank=r, world=2).epoch(0) for r in range(2)]
    joined = [tuple(torch.cat(part) for part in zip(*step, strict=True)) for step in zip(*ranks, strict=True)]
    assert same(whole, joined)


def test_the_global_random_state_is_neither_read_nor_changed():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = list(Batches(pictures(), 8, EVERYTHING).epoch(0))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert same(first, list(Batches(pictures(), 8, EVERYTHING).epoch(0)))


def test_seeds_give_different_epochs():
    first, second = (next(Batches(pictures(), 8, EVERYTHING, seed=s).epoch(0))[0] for s in (0, 1))
    assert not torch.equal(first, second)


def test_the_memory_format_is_as_asked():
    x, _ = next(Batches(pictures(), 8, channels_last=True).epoch(0))
    assert x.dtype == torch.float32 and x.is_contiguous(memory_format=torch.channels_last)


def test_a_zero_padded_crop_is_a_window_of_the_padded_picture():
    images = pictures(24)
    padded = functional.pad(images.pixels.float() + 1, (2, 2, 2, 2))
    windows = [padded[:, :, i : i + 8, j : j + 8] for i in range(5) for j in range(5)]
    _check_windows(images, Augment(crop=2, padding="zero"), [(w - 1).clamp(min=0) for w in windows])


def test_a_reflected_crop_is_a_window_of_the_reflected_picture():
    images = pictures(24)
    padded = functional.pad(images.pixels.float(), (2, 2, 2, 2), mode="reflect")
    windows = [padded[:, :, i : i + 8, j : j + 8] for i in range(5) for j in range(5)]
    _check_windows(images, Augment(crop=2, padding="reflect"), windows)


def test_a_flip_mirrors_about_half_of_the_pictures():
    images = pictures(200)
    x, _ = next(Batches(images, 200, Augment(flip=True), shuffle=False).epoch(0))
    raw = x.mul(0.25).add(0.5).mul(255).round()
    mirrored = (raw == images.pixels.flip(3)).flatten(1).all(1)
    kept = (raw == images.pixels).flatten(1).all(1)
    assert (mirrored ^ kept).all() and 70 < mirrored.sum() < 130


def _check_windows(images: Images, augment: Augment, windows: list[torch.Tensor]) -> None:
    x, _ = next(Batches(images, len(images), augment, shuffle=False).epoch(0))
    raw = x.mul(0.25).add(0.5).mul(255).round()
    hits = torch.stack([(raw == window).flatten(1).all(1) for window in windows])
    assert hits.any(0).all()  # every picture is one of its windows
    assert hits.any(1).sum() > 8  # and they differ from picture to picture


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "`batch_size` must be at least 1"),
        ({"batch_size": 100}, "no whole batch"),
        ({"batch_size": 9, "world": 2}, "does not divide among 2 ranks"),
        ({"batch_size": 8, "rank": 2, "world": 2}, "`rank` must lie between 0 and 1"),
        ({"batch_size": 8, "seed": -1}, "`seed` must not be negative"),
        ({"batch_size": 8, "augment": Augment(crop=8)}, "`crop` must be below"),
        ({"batch_size": 6, "world": 2, "augment": Augment(mixup=0.2)}, "even batch on every rank"),
        ({"batch_size": 8, "shuffle": False, "augment": Augment(mixup=0.2)}, "set `shuffle`"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Batches(pictures(), **settings)


def test_a_start_outside_the_epoch_is_refused():
    with pytest.raises(ValueError, match="`start` must lie between 0 and 6, got 7"):
        next(Batches(pictures(), 8).epoch(0, start=7))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize(
    "augment",
    [
        Augment(crop=4, flip=True, trivial=True, cutout=8),
        Augment(randaugment=2, magnitude=15, mixup=0.2, cutmix=1.0),
    ],
    ids=["trivial", "rand"],
)
def test_the_gpu_gives_the_pictures_of_the_cpu_and_never_waits(augment):
    rng = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (512, 3, 32, 32), dtype=torch.uint8, generator=rng)
    images = Images(pixels, torch.arange(512) % 10, tuple("abcdefghij"), (0.5,) * 3, (0.25,) * 3)
    want = list(Batches(images, 128, augment).epoch(0))
    batches = Batches(images, 128, augment, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = list(batches.epoch(0))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for (x, target), (y, other) in zip(got, want, strict=True):
        torch.testing.assert_close(x.cpu(), y, atol=1e-6, rtol=0)  # the bytes agree; float32 division may round
        torch.testing.assert_close(target.cpu(), other)
