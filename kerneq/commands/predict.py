"""`kerneq predict`."""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from kerneq.data import DataError
from kerneq.predict import Prediction, Predictor
from kerneq.run.config import ConfigError

NUMBERED = "The names of the classes are not known without the folder of pictures that the run was trained on."


def run(folder: Path, paths: Sequence[Path], which: str, top: int, device: str, as_json: bool) -> None:
    if which not in ("best", "last"):
        raise ConfigError(f"--which must be best or last, got `{which}`.")
    predictor = Predictor.open(folder, which, device)
    pictures: list[tuple[Path, Tensor]] = []
    failures: list[tuple[Path, str]] = []
    for path in paths:
        try:
            pictures.append((path, predictor.read(path)))
        except DataError as error:
            failures.append((path, str(error)))
    predictions = predictor.predict(pictures, top)
    if as_json:
        facts = {"run": str(folder), "checkpoint": which, "epoch": predictor.epoch, "named": predictor.named}
        print(
            json.dumps(facts | {"predictions": [row(p) for p in predictions], "failures": listed(failures)}, indent=2)
        )
    elif predictions:
        _show(predictions, f"{predictor.config.model.name}, {which} weights of {folder}", predictor.named)
    errors = Console(stderr=True)
    for _, sentence in failures:
        errors.print(Text.assemble(("kerneq: ", "bold red"), printable(sentence)), soft_wrap=True)
    if failures:
        sys.exit(1)


def row(prediction: Prediction) -> dict[str, Any]:
    """A prediction as JSON has it, which knows no infinity."""
    residual, status = prediction.residual, prediction.status
    top = zip(prediction.classes, prediction.probabilities, strict=True)
    return {
        "path": str(prediction.path),
        "top": [{"class": name, "probability": finite(share)} for name, share in top],
        "converged": prediction.converged if status is not None else None,
        "status": status.name.lower() if status is not None else None,
        "steps": prediction.steps,
        "residual": finite(residual) if residual is not None else None,
    }


def listed(failures: Sequence[tuple[Path, str]]) -> list[dict[str, str]]:
    return [{"path": str(path), "problem": sentence} for path, sentence in failures]


def finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _show(predictions: Sequence[Prediction], title: str, named: bool) -> None:
    console = Console()
    console.print(table(predictions, title))
    for status in {p.status: None for p in predictions if not p.converged}:
        missed = sum(p.status is status for p in predictions)
        words = f"{missed} of {len(predictions)} predictions come from an unfinished equilibrium. "
        console.print(words + (status.value if status is not None else ""), style="yellow", soft_wrap=True)
    if not named:
        console.print(NUMBERED, style="yellow", soft_wrap=True)


def table(predictions: Sequence[Prediction], title: str) -> Table:
    table = Table(title=Text(printable(title)), show_lines=True)
    table.add_column("picture", overflow="fold")
    table.add_column("class", overflow="fold")
    for column in ("probability", "solver steps", "residual"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("equilibrium", no_wrap=True)
    for p in predictions:
        shares = "\n".join(f"{share:.2%}" for share in p.probabilities)
        solver = [Text("–")] * 3
        if p.status is not None:
            word = Text("converged", "green") if p.converged else Text("not converged", "bold red")
            solver = [Text(f"{p.steps}"), Text(f"{p.residual:.1e}"), word]
        table.add_row(Text(printable(str(p.path))), Text(printable("\n".join(p.classes))), shares, *solver)
    return table


def printable(text: str) -> str:
    """The text without the halves of characters that stand for undecodable bytes of a file's name."""
    return text.encode(errors="replace").decode()
