"""Train on pictures of your own and ask about new ones: a folder for each class is all it takes.

Here the folder is made first: discs, rings and stripes in any colours. A fifth of each class, chosen by the hash of the
names, is for testing, unless there are folders train/CLASS and test/CLASS.
"""

import argparse
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image

import kerneq as kq
from kerneq.lab.evaluate import evaluate
from kerneq.lab.run.config import load
from kerneq.lab.training import train


def paint(kind: str, rng: np.random.Generator, side: int = 48) -> Image.Image:
    y, x = np.mgrid[:side, :side] - rng.uniform(side / 3, 2 * side / 3, (2, 1, 1))
    distance, width = np.hypot(x, y), rng.uniform(5, 9)
    shapes = {"disc": distance < 2 * width, "ring": abs(distance - 14) < 3, "stripes": np.sin(x / width * 3 + y) > 0}
    colours = rng.integers(0, 256, (2, 3))
    return Image.fromarray(np.where(shapes[kind][..., None], *colours).astype(np.uint8))


def main(count: int, epochs: int, output: Path | None) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = output or Path(temporary)
        rng = np.random.default_rng(0)
        for kind in ("disc", "ring", "stripes"):
            (folder / "pictures" / kind).mkdir(parents=True)
            for number in range(count):
                paint(kind, rng).save(folder / "pictures" / kind / f"{number}.png")
            paint(kind, rng).save(folder / f"new-{kind}.png")

        # The same as: kerneq train geq-tiny-cifar10 data.name=folder:PICTURES data.size=32 …
        settings = [f"data.name=folder:{folder / 'pictures'}", "data.size=32", f"training.epochs={epochs}"]
        config = load("geq-tiny-cifar10", [*settings, "training.batch_size=16", "device=cpu"])
        train(config, folder / "run")
        accuracy = evaluate(folder / "run").scores["test"]["accuracy"]
        print(f"test accuracy {accuracy:.1%}")
        answers = kq.predict(folder / "run", sorted(folder.glob("new-*.png")), top=1, device="cpu")
        figure, places = plt.subplots(1, len(answers), figsize=(7, 2.6), layout="constrained")
        for axes, found in zip(places, answers, strict=True):
            print(said := f"{found.path.name}: {found.classes[0]} ({found.probabilities[0]:.0%})")
            axes.imshow(Image.open(found.path))
            axes.set_title(said, fontsize=9)
            axes.axis("off")
    figure.savefig("own_pictures.png", dpi=80)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="pictures of each class")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--output", type=Path, help="a new folder to keep everything in; by default nothing is kept")
    main(**vars(parser.parse_args()))
