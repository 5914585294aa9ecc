"""The rows of the table, the run that fills it, its record, and the page that is made from the record."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..results import Result
from .judge import CARD, Cell

# What a library is called, and the package, the distribution, the column's module and the repository behind it.
LIBRARIES = {
    "torchdeq": ("torchdeq", "torchdeq", "torchdeq", "locuslab/torchdeq"),
    "silva-networks": ("silva_networks", "silva-networks", "silva", "jseluis/silva-networks"),
    "deepinv": ("deepinv", "deepinv", "deepinv", "deepinv/deepinv"),
    "optimistix": ("optimistix", "optimistix", "optimistix", "patrick-kidger/optimistix"),
    "kerneq": ("kerneq", "kerneq", "own", ""),
}
ROWS = {
    "several_tensors": "states of several tensors",
    "several_dtypes": "… of several dtypes",
    "dicts": "… in dicts and dataclasses",
    "any_module": "any module is a layer",
    "named_inputs": "inputs by keyword, tensors or not",
    "start": "start at a given state",
    "limits": "limits apart for training and evaluation",
    "drawn_steps": "a random number of steps in training",
    "status": "status of each sample",
    "steps": "steps of each sample",
    "leaving": "samples that converged leave the batch",
    "apart": "an answer that does not depend on the batch",
    "residuals": "residual of each step and sample",
    "states": "states on the way, with gradients",
    "jacobian": "Jacobian norm as a penalty",
    "radius": "spectral radius, complex pairs too",
    "masks": "dropout with a mask fixed in a solve",
    "any_dropout": "… by any `Dropout` module",
    "norms": "normalised weights once a solve",
    "implicit": "implicit gradient",
    "phantom": "phantom gradient",
    "neumann": "Neumann terms in the memory of one evaluation",
    "shine": "SHINE",
    "reversible": "exact gradient of n steps in constant memory",
    "in_eval": "gradient in `eval()`",
    "second": "second derivatives",
    "transforms": "`vmap`, `jacrev`, `grad`",
    "forward_mode": "forward mode",
    "backward_record": "record of the backward solve",
    "batch_norm": "batch norm in f: what is called converged is",
    "randomness": "a random f is named, or cannot be",
    "forward_failure": "a failed forward solve is loud",
    "backward_failure": "a failed backward solve is loud",
    "settings": "an unknown setting is refused",
    "bounds": "error bounds and certificates",
    "compiled": "a training step compiled as one graph",
    "autocast": "training in bfloat16",
    "ddp": "data-parallel training",
    "checkpointing": "activation checkpointing of f",
    "captured": "CUDA graph capture",
    "tests": "tests in the repository",
    "last_commit": "commits in the last year",
}
SIGNS = {"yes": "✓", "partly": "(✓)", "no": "–", "not run": "·"}
Progress = Callable[[str], None]


def fill_table(repositories: Path | None, progress: Progress) -> Result:
    """Try every cell; libraries that are not installed and repositories that are not in the folder are not run."""
    cells, versions = [], {}
    for library, (package, distribution, module, repository) in LIBRARIES.items():
        installed = importlib.util.find_spec(package) is not None
        if installed:
            versions[library] = importlib.metadata.version(distribution)
        for row in ROWS:
            progress(f"{library}: {ROWS[row]}")
            if row in ("tests", "last_commit"):
                root = Path(__file__).parents[2]
                cell = look_up(root if not repository else find_clone(repositories, repository), row)
            elif row == "captured":
                cell = CARD
            elif not installed:
                cell = Cell("not run", f"{library} is not installed")
            else:
                cell = try_cell(module, row)
            cells.append({"row": row, "library": library, "answer": cell.answer, "found": cell.found})
    notes = tuple(f"{library} {version}" for library, version in versions.items())
    return Result("features", "What libraries for equilibrium models can do", cells, notes, {"versions": versions})


def try_cell(module: str, row: str) -> Cell:
    """Run one check, in float64 and without warnings; a check that breaks is a mistake of ours, and raises."""
    with in_float64(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        check: Callable[[], Cell] = getattr(importlib.import_module(f".{module}", __package__), row)
        return check()


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Make float64 the default dtype inside this context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def find_clone(folder: Path | None, repository: str) -> Path | None:
    """Return where the clone of OWNER/NAME is: FOLDER/NAME; None where there is none."""
    path = None if folder is None else folder / repository.split("/")[1]
    return path if path is not None and path.exists() else None


def look_up(clone: Path | None, row: str) -> Cell:
    """Read a fact about a repository from its clone."""
    if clone is None:
        return Cell("not run", "give a folder with its clone by --repositories")
    if row == "last_commit":
        date = _git(clone, "log", "-1", "--format=%cs").strip()
        last = float(_git(clone, "log", "-1", "--format=%ct"))
        recent = last > float(_git(Path(__file__).parents[2], "log", "-1", "--format=%ct")) - 365 * 24 * 3600
        return Cell("yes" if recent else "no", f"the last one is of {date}")
    lines = _git(clone, "grep", "-c", "-E", "^ *def test_", "HEAD", "--", "*.py").split()
    count = sum(int(line.rsplit(":", 1)[1]) for line in lines)
    return Cell("yes" if count else "no", f"{count} functions `test_…`")


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True)
    return done.stdout


def write_features(record: Path, page: Path) -> None:
    """Make the page of the docs from the record."""
    page.write_text(make_page(json.loads(record.read_text(encoding="utf-8"))), encoding="utf-8")


def make_page(record: dict[str, Any]) -> str:
    """Return the page: a sign for each cell, then what was found for each of them."""
    environment, [result] = record["environment"], record["results"]
    cells = {(cell["row"], cell["library"]): cell for cell in result["rows"]}
    versions = ", ".join(result["notes"])
    lines = [
        "# What libraries for equilibrium models can do",
        "Every cell is what a small run has found: `python -m benchmarks features` tries them again. ✓ yes, (✓) "
        "partly, – no, · not run; what was found stands below, library by library. The checks are in "
        "`benchmarks/features/`, one file a library; each is the shortest call that we found in its documentation and "
        "source, and a better one is welcome. “Its files mention no …” means that there is nothing to call.",
        f"{versions}; PyTorch {environment['torch']}, Python {environment['python']}, "
        f"{environment['device']}, {environment['measured'][:10]}. Made by `python -m benchmarks page`; do not edit.",
    ]
    table = [["", *LIBRARIES], ["---", *[":-:"] * len(LIBRARIES)]]
    table += [[title, *[SIGNS[cells[row, library]["answer"]] for library in LIBRARIES]] for row, title in ROWS.items()]
    lines.append("\n".join(f"| {' | '.join(row)} |" for row in table))
    for library in LIBRARIES:
        rows = [
            f"| {title} | {SIGNS[cells[row, library]['answer']]} | {cells[row, library]['found']} |"
            for row, title in ROWS.items()
        ]
        lines += [f"## {library}", "\n".join(["| | | what was found |", "|---|:-:|---|", *rows])]
    return "\n\n".join(lines) + "\n"
