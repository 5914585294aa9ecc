"""Two trained runs."""

import numpy as np
import pytest
from helpers import trained
from PIL import Image


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory):
    """An equilibrium model after an epoch on the embedded digits, 8×8 and grey."""
    return trained(tmp_path_factory.mktemp("runs") / "dense", "model.name=geq-dense-tiny", "training.ema=0.9")


@pytest.fixture(scope="session")
def colour_run(tmp_path_factory):
    """A run on a folder of 40 pictures in two classes, 16×16 and in colour; the folder's path too."""
    home = tmp_path_factory.mktemp("colour")
    rng = np.random.default_rng(0)
    for split, count in (("train", 16), ("test", 4)):
        for name, channel in (("blue sky", 2), ("red wine", 0)):
            (home / "pictures" / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 60, (20, 24, 3), dtype=np.uint8)
                pixels[..., channel] += 180
                Image.fromarray(pixels).save(home / "pictures" / split / name / f"{i}.png")
    settings = [f"data.name=folder:{home / 'pictures'}", "data.size=16", "data.validation=0", "training.batch_size=8"]
    run = trained(home / "run", *settings, "model.name=resnet-tiny", "training.epochs=4", "optimizer.lr=0.05")
    return run, home / "pictures"
