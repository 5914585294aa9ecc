"""Find unknown classes: a network that has seen the digits 0 to 4 only should be unsure about 5 to 9.

Three scores are compared: the largest probability, and two that the equilibrium has alone, its energy and the mean
weight of its patches. AUROC is the share of pairs in which the known digit scores higher: 0.5 is guessing, and less
than 0.5 means that the score takes unknown digits for the more familiar ones.
"""

import argparse
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from kerneq.lab.evaluate.ood import TITLES, auroc, score_images, unknown_images
from kerneq.lab.evaluate.trained import TrainedRun
from kerneq.lab.run.config import load
from kerneq.lab.training import train


def main(epochs: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        # The same as: kerneq train geq-tiny-digits data.subset=first-five-classes, then kerneq evaluate RUN --part ood
        settings = ["data.subset=first-five-classes", f"training.epochs={epochs}", "device=cpu"]
        train(load("geq-tiny-digits", settings), Path(folder) / "run")
        run = TrainedRun.open(Path(folder) / "run", device="cpu")
        logits, known = score_images(run, run.test)
        _, unknown = score_images(run, unknown_images(run))
    right = (logits.argmax(1) == run.test.labels).double().mean()
    print(f"{len(logits)} digits of known classes, {right:.1%} right; {len(unknown['confidence'])} of unknown ones")

    figure, axes = plt.subplots(1, len(known), figsize=(10, 3), layout="constrained")
    print(f"{'score':28s} {'known':>8s} {'unknown':>8s} {'AUROC':>7s}")
    for place, name in zip(axes, known, strict=True):
        share = auroc(known[name], unknown[name])
        print(f"{TITLES[name]:28s} {known[name].mean():8.3f} {unknown[name].mean():8.3f} {share:7.3f}")
        both = torch.cat([known[name], unknown[name]])
        bins = torch.linspace(float(both.min()), float(both.max()), 25).tolist()
        place.hist(known[name].numpy(), bins, alpha=0.6, color="#0072B2", label="0 to 4, seen")
        place.hist(unknown[name].numpy(), bins, alpha=0.6, color="#E69F00", label="5 to 9, never seen")
        place.set(title=f"AUROC {share:.3f}", xlabel=TITLES[name], ylabel="test digits")
    axes[0].legend()
    figure.savefig("find_unknown_classes.png", dpi=80)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    main(**vars(parser.parse_args()))
