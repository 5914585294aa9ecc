"""What a report says about a run, read from its folder."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from kerneq.run.config import load
from kerneq.training import Folder, TrainingError


@final
@dataclasses.dataclass(frozen=True)
class Run:
    """A run's name, settings and numbers; what was not measured is None."""

    name: str
    model: str
    data: str
    seed: int
    device: str
    revision: str | None
    rows: tuple[dict[str, Any], ...]  # one per epoch, as in metrics.jsonl
    accuracy: float | None  # on the test images
    loss: float | None
    parameters: int | None
    steps: float | None
    residual: float | None
    unconverged: float | None

    @property
    def seconds(self) -> float:
        """Time spent training, validation left out."""
        return float(sum(row["seconds"] for row in self.rows))

    @property
    def validation(self) -> float | None:
        """The best accuracy on held-out images."""
        return max((row["validation"]["accuracy"] for row in self.rows if row["validation"]), default=None)

    def curve(self, group: str, number: str) -> tuple[list[int], list[float]]:
        """The epochs at which a number was measured, and the number."""
        points = [
            (row["epoch"], row[group][number]) for row in self.rows if row[group] and row[group][number] is not None
        ]
        return [epoch for epoch, _ in points], [value for _, value in points]


def gather(folders: Sequence[Path]) -> list[Run]:
    """The runs in some folders, the best on the test images first, those not evaluated last."""
    return sorted(
        (read(folder) for folder in folders), key=lambda run: -(run.accuracy if run.accuracy is not None else -1)
    )


def read(path: Path) -> Run:
    """One run; a folder that is none is a `TrainingError`."""
    folder = Folder(path)
    if not folder.config.exists():
        raise TrainingError(f"{path} is not a run folder: it has no config.toml.")
    config, origin = load(folder.config), _json(folder.environment)
    evaluation = _json(path / "evaluation.json")
    test = evaluation.get("scores", {}).get("test", {})
    return Run(
        name=path.resolve().name,
        model=config.model.name,
        data=config.data.name,
        seed=config.seed,
        device=origin.get("device", "unknown"),
        revision=origin.get("revision"),
        rows=tuple(folder.rows()),
        accuracy=test.get("accuracy"),
        loss=test.get("loss"),
        parameters=evaluation.get("parameters"),
        steps=test.get("steps"),
        residual=test.get("residual"),
        unconverged=test.get("unconverged"),
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TrainingError(f"{path} is damaged: {error}.") from None
    return found if isinstance(found, dict) else {}
