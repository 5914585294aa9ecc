"""Batches on a GPU: the pictures of the CPU, and no waiting for the device."""

import pytest
import torch

from kerneq.data import Augment, Batches, Images

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


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
