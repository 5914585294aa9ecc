"""Certify a prediction: the radius around a digit within which no change of the pixels changes the class.

A small certified network is trained first. Attacks within one radius must fail, as is proved; the wider ones show how
far the proof is from what an attack can do.
"""

import argparse
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import kerneq as kq
from kerneq.lab.evaluate.attack import InPixels, Threat, pgd
from kerneq.lab.evaluate.trained import TrainedRun
from kerneq.lab.run.config import load
from kerneq.lab.training import train

RADII = (0, 1, 2, 3)  # of the balls that are attacked, in certified radii


def train_model(epochs: int) -> torch.nn.Module:
    with tempfile.TemporaryDirectory() as folder:  # the same as: kerneq train certified-tiny-digits
        train(load("certified-tiny-digits", [f"training.epochs={epochs}"]), Path(folder) / "run")
        return TrainedRun.open(Path(folder) / "run", device="cpu").model


def main(epochs: int) -> None:
    model, images = train_model(epochs), kq.data.load("digits", "test")
    mean, std = (torch.tensor(values)[:, None, None] for values in (images.mean, images.std))
    pixels, labels = images.pixels[::5] / 255, images.labels[::5]
    found = kq.certify(model, (pixels - mean) / std, std=images.std)
    right = found.prediction == labels
    print(f"test accuracy {right.double().mean():.1%}; certified to stay right:")
    for radius in (0.1, 0.25, 0.5):
        share = (right & (found.pixel_radius > radius)).double().mean()
        print(f"  within {radius:<4} of the picture, for pixels in [0, 1]: {share:.1%}")

    some = torch.stack([(right & (labels == digit)).nonzero()[0, 0] for digit in range(0, 10, 3)])
    figure, axes = plt.subplots(len(some), len(RADII), figsize=(6.5, 6.5), layout="constrained")
    attacked = InPixels(model, images.mean, images.std).eval()
    print("digit  radius  class after an attack within " + ", ".join(f"{factor} ×" for factor in RADII[1:]))
    for row, index in zip(axes, some, strict=True):
        x, label, radius = pixels[index][None], labels[index][None], float(found.pixel_radius[index])
        classes = []
        for place, factor in zip(row, RADII, strict=True):
            # No limits for the pixels: the certificate, too, holds for those outside of [0, 1].
            near = (
                pgd(attacked, x, label, Threat("l2", factor * radius, steps=10, restarts=1), box=None).x
                if factor
                else x
            )
            classes.append(int(attacked(near).argmax()))
            place.imshow(near[0, 0].numpy(), cmap="gray_r", vmin=0, vmax=1)
            place.set_title(f"{factor} × {radius:.2f}: {classes[-1]}", color="black" if classes[-1] == label else "C3")
            place.axis("off")
        print(f"{int(label):5d}  {radius:6.3f}  {classes[1:]}")
    figure.savefig("certify_prediction.png", dpi=80)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    main(**vars(parser.parse_args()))
