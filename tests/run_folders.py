"""Run folders made by hand, for the tests of reports and of the comparison with the papers."""

import json
from collections.abc import Sequence
from pathlib import Path

from kerneq.lab.run.config import parse, write


def scores(loss: float, steps: float | None) -> dict:
    solver = {"steps": steps, "residual": 1e-4 if steps else None, "unconverged": 0.0 if steps else None}
    return {"images": 10, "loss": loss, "accuracy": 1 - loss / 10, **solver}


def make_run(
    folder: Path,
    accuracy: float | None = None,
    steps: float | None = 5.0,
    settings: Sequence[str] = (),
    checkpoint: bool = True,
    base: str | None = None,
) -> Path:
    """A run folder, evaluated or not: three epochs, or all that its base has."""
    (folder / "checkpoints").mkdir(parents=True)
    config = parse(f'base = "{base}"' if base else "", settings)
    (folder / "config.toml").write_text(write(config))
    (folder / "environment.json").write_text(json.dumps({"device": "cpu", "revision": "abc", "processes": 2}))
    if checkpoint:
        (folder / "checkpoints" / "best.safetensors").touch()
    common = {"step": 1, "rate": 0.1, "seconds": 2.0}
    epochs = range(1, config.training.epochs + 1 if base else 4)
    rows = [{"epoch": e, "train": scores(3 / e, steps), "validation": scores(2 / e, steps)} for e in epochs]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row | common) + "\n" for row in rows))
    if accuracy is not None:
        write_test_scores(folder, scores(0.5, steps) | {"accuracy": accuracy})
    return folder


def write_test_scores(folder: Path, test: dict, unknown: dict | None = None) -> None:
    """Write an evaluation.json with these scores on the test images, and on those of unknown sub-classes."""
    found = {"test": test} | ({"unknown": unknown} if unknown else {})
    (folder / "evaluation.json").write_text(json.dumps({"parameters": 12345, "scores": found}))
