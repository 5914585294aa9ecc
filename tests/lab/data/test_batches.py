"""Batches: what an epoch holds, and on what its randomness depends."""

import pytest
import torch
from data_files import noise, raw
from helpers import needs_gpu
from torch.nn import functional

from kerneq.lab.data import Augment, Batches, Images

EVERYTHING = Augment(area=0.5, crop=2, flip=True, randaugment=2, cutout=3, mixup=0.4, cutmix=1.0)


def same(first: list[tuple[torch.Tensor, ...]], second: list[tuple[torch.Tensor, ...]]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a, b) for p, q in zip(first, second, strict=True) for a, b in zip(p, q, strict=True)
    )


def test_without_augmentation_an_epoch_is_the_normalised_data_in_order():
    images = noise(53)
    batches = Batches(images, 8, shuffle=False, drop_last=False)
    x, labels = (torch.cat(parts) for parts in zip(*batches.epoch(0), strict=True))
    assert len(batches) == 7 and x.dtype == torch.float32
    torch.testing.assert_close(x, (images.pixels.double().div(255) - 0.5).div(0.5).float())
    assert torch.equal(labels, images.labels)


def test_a_shuffled_epoch_holds_every_picture_once_with_its_label_and_epochs_and_seeds_differ():
    pixels = torch.arange(48, dtype=torch.uint8).view(48, 1, 1, 1)
    images = Images(pixels, torch.arange(48), ("a",) * 48, (0.5,), (0.5,))
    orders = []
    for seed, epoch in ((0, 0), (0, 1), (0, 2), (1, 0)):
        x, labels = (torch.cat(parts) for parts in zip(*Batches(images, 12, seed=seed).epoch(epoch), strict=True))
        assert torch.equal(raw(x).flatten().long(), labels) and torch.equal(labels.sort().values, torch.arange(48))
        orders.append(tuple(labels.tolist()))
    assert len(set(orders)) == 4


@pytest.mark.parametrize("start", [1, 3, 6])
def test_an_epoch_entered_in_the_middle_goes_on_bit_for_bit(start):
    batches = Batches(noise(53), 8, EVERYTHING, seed=5)
    whole = list(batches.epoch(2))
    assert same(whole[start:], list(Batches(noise(53), 8, EVERYTHING, seed=5).epoch(2, start)))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("settings", [{"augment": EVERYTHING}, {"shuffle": False, "drop_last": False}], ids=str)
def test_ranks_together_see_what_one_process_sees_an_incomplete_last_batch_too(settings, world):
    whole = list(Batches(noise(53), 16, seed=1, **settings).epoch(4))
    ranks = [Batches(noise(53), 16, seed=1, rank=r, world=world, **settings).epoch(4) for r in range(world)]
    joined = [tuple(torch.cat(part) for part in zip(*step, strict=True)) for step in zip(*ranks, strict=True)]
    assert same(whole, joined)


def test_the_global_random_state_is_neither_read_nor_changed():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = list(Batches(noise(53), 8, EVERYTHING).epoch(0))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert same(first, list(Batches(noise(53), 8, EVERYTHING).epoch(0)))


def test_the_memory_format_is_as_asked():
    x, _ = next(Batches(noise(53), 8, channels_last=True).epoch(0))
    assert x.dtype == torch.float32 and x.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("padding", ["zero", "reflect"])
def test_a_crop_is_a_window_of_the_padded_picture(padding):
    images = noise(24)
    x, _ = next(Batches(images, 24, Augment(crop=2, padding=padding), shuffle=False).epoch(0))
    padded = functional.pad(images.pixels.float(), (2, 2, 2, 2), mode={"zero": "constant"}.get(padding, padding))
    windows = [padded[:, :, i : i + 8, j : j + 8] for i in range(5) for j in range(5)]
    hits = torch.stack([(raw(x) == window).flatten(1).all(1) for window in windows])
    assert hits.any(0).all()  # every picture is one of its windows
    assert hits.any(1).sum() > 8  # and they differ from picture to picture


def test_a_flip_mirrors_about_half_of_the_pictures():
    images = noise(200)
    x, _ = next(Batches(images, 200, Augment(flip=True), shuffle=False).epoch(0))
    mirrored = (raw(x) == images.pixels.flip(3)).flatten(1).all(1)
    kept = (raw(x) == images.pixels).flatten(1).all(1)
    assert (mirrored ^ kept).all() and 70 < mirrored.sum() < 130


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "`batch_size` must be a whole number, at least 1"),
        ({"batch_size": 100}, "no whole batch"),
        ({"batch_size": 9, "world": 2}, "does not divide among 2 ranks"),
        ({"batch_size": 8, "rank": 2, "world": 2}, "`rank` must lie between 0 and 1"),
        ({"batch_size": 8, "seed": -1}, "`seed` must be a whole number, at least 0"),
        ({"batch_size": 8, "augment": Augment(crop=8)}, "`crop` must be below"),
        ({"batch_size": 6, "world": 2, "augment": Augment(mixup=0.2)}, "even batch on every rank"),
        ({"batch_size": 8, "shuffle": False, "augment": Augment(mixup=0.2)}, "set `shuffle`"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Batches(noise(53), **settings)


def test_a_start_outside_the_epoch_is_refused():
    with pytest.raises(ValueError, match="`start` must lie between 0 and 6, got 7"):
        next(Batches(noise(53), 8).epoch(0, start=7))


@needs_gpu
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
    images = noise(512, 32)
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
