"""`kerneq evaluate`."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from kerneq.evaluate import Evaluation, evaluate
from kerneq.run.config import ConfigError


def run(folder: Path, checkpoint: str, device: str) -> None:
    if checkpoint not in ("best", "last"):
        raise ConfigError(f"--checkpoint must be best or last, got `{checkpoint}`.")
    result = evaluate(folder, checkpoint, device)
    console = Console()
    console.print(table(result))
    console.print(f"Written to {folder / 'evaluation.json'}", highlight=False, soft_wrap=True)


def table(result: Evaluation) -> Table:
    table = Table(title=f"{result.model} on the test images of {result.data}")
    for column in ("images", "accuracy", "loss", "solver steps", "residual", "not converged"):
        table.add_column(column if column != "images" else "test images", justify="right")
    for name, scores in result.scores.items():
        solver = ["–"] * 3
        if scores.steps is not None:
            solver = [f"{scores.steps:.1f}", f"{scores.residual:.1e}", f"{scores.unconverged:.1%}"]
        label = f"{scores.images}" if name == "test" else f"{scores.images} ({name})"
        table.add_row(label, f"{scores.accuracy:.2%}", f"{scores.loss:.4f}", *solver)
    return table
