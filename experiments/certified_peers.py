"""Equilibria beside CPL, SLL and AOL as layers of one certified network on MNIST, for equal CPU time on one thread.

    KERNEQ_DATA=FOLDER python experiments/certified_peers.py RUNS     # some 40 minutes of one core

Fixed before the first run:

- One network for all: 28 × 28 pixels folded to 16 channels at 14 × 14, one layer, folded to 64 channels at 7 × 7, one
  layer, mean, unit rows; 39 898 to 39 978 parameters; the same trainer, batches, schedule, margin and gain.
- CPU time: the equilibria are trained for one epoch, CPL for 4, SLL for 5 and AOL for 7, as many as take the same time
  by a measurement of two steps each (1.79, 0.45, 0.40 and 0.28 ms an image), rounded up. The time of the process is
  recorded with each run.
- The rate of Muon is chosen for each layer from the same three, by the certified accuracy at radius 0.5 of 1 000 of
  36 000 held-out images, after training on the other 24 000.
- With it three runs each, seeds 0, 1 and 2, on all 60 000 images. Their last averaged weights meet the test images
  once: the same 1 000 for all.
- One layer is ahead of another if at radius 0.5 each of its seeds is above each of the other's: by chance, 1 in 20.
  The other radii are shown and decide nothing.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import kerneq as kq
from kerneq.lab.evaluate.trained import TrainedRun

EPOCHS = {"resolvent": 1, "potential": 4, "sdp": 5, "almost-orthogonal": 7}
RATES = (0.03, 0.1, 0.3)  # of Muon
SEEDS = (0, 1, 2)
RADII = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.58)  # ℓ2, for pixels in [0, 1]
DECIDES = 0.5
IMAGES = 1000  # certified
RECORD = Path(__file__).parents[1] / "docs/results/certified-peers.json"
NETWORK = ("model.width=4", "model.depths=[0,1,1]", "model.std=[0.3081]")
TRAINING = ("data.name=mnist", "training.batch_size=128", "schedule.warmup=0.1", "training.validate_epochs=1000")


def train(folder: Path, layer: str, rate: float, seed: int, held_out: float) -> tuple[dict[str, Any], TrainedRun]:
    """Train one network in a run folder; return its settings and costs, and the run."""
    changes = [*NETWORK, *TRAINING, f"model.layer={layer}", f"training.epochs={EPOCHS[layer]}", f"seed={seed}"]
    began = time.process_time()
    run = kq.train(
        "certified-tiny-digits", folder, [*changes, f"optimizer.muon={rate}", f"data.validation={held_out}"], quiet=True
    )
    row = {"layer": layer, "muon": rate, "seed": seed, "epochs": EPOCHS[layer]}
    row["cpu_seconds"] = round(time.process_time() - began, 1)
    return row, TrainedRun.open(run.path, checkpoint="last", device="cpu")


def certify(trained: TrainedRun, split: str) -> dict[str, Any]:
    """Return the certified accuracy of a run at each radius, on held-out or test images, and what that cost."""
    images = trained.test if split == "test" else trained.held_out()
    assert images is not None
    chosen = images.sample(IMAGES)
    x, labels = (torch.cat(parts) for parts in zip(*trained.batches(chosen).epoch(0), strict=True))
    began = time.process_time()
    found = kq.certify(trained.model, x, std=chosen.std)
    right, radius = found.prediction == labels, found.pixel_radius
    assert radius is not None
    shares = [
        float((right & (radius > least)).double().mean()) if least else float(right.double().mean()) for least in RADII
    ]
    return {
        "parameters": kq.models.parameters(trained.model),
        "split": split,
        "certified": dict(zip(map(str, RADII), shares, strict=True)),
        "mean_radius": float((radius * right).mean()),
        "error": float(found.error.max()),
        "certify_seconds": round(time.process_time() - began, 1),
    }


def main(runs: Path) -> None:
    """Choose the rates on held-out images, then train the seeds and read the test images; go on where it stopped."""
    torch.set_num_threads(1)
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {"selection": [], "test": []}

    def add(part: str, layer: str, rate: float, seed: int) -> None:
        if any((row["layer"], row["muon"], row["seed"]) == (layer, rate, seed) for row in record[part]):
            return
        row, trained = train(
            runs / f"{part}-{layer}-{rate}-{seed}", layer, rate, seed, 0.6 if part == "selection" else 0.0
        )
        record[part].append(row | certify(trained, "test" if part == "test" else "held out"))
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        print(record[part][-1], flush=True)

    for layer in EPOCHS:
        for rate in RATES:
            add("selection", layer, rate, seed=0)
    best = {}
    for layer in EPOCHS:
        tried = [row for row in record["selection"] if row["layer"] == layer]
        best[layer] = max(tried, key=lambda row: row["certified"][str(DECIDES)])["muon"]
    for seed in SEEDS:
        for layer in EPOCHS:
            add("test", layer, best[layer], seed)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
