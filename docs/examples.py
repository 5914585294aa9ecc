"""The gallery: copies of examples/ with titles that Sphinx accepts, run in reduced size, and their pictures."""

import ast
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from sphinx_gallery.scrapers import figure_rst

from docs import docstrings
from kerneq.lab import explore
from kerneq.lab.evaluate import TrainedRun

ROOT = Path(__file__).parent.parent
COPIES = ROOT / "build" / "examples"
EXTRA = ROOT / "build" / "extra"

# The gallery in its order, with the arguments that keep an example within seconds while this site is built.
ARGUMENTS: dict[str, list[str]] = {
    "see_an_equilibrium": ["--steps", "10"],
    "layer_in_your_network": ["--epochs", "5"],
    "own_kernel": [],
    "choose_a_gradient": [],
    "text_transformer": ["--steps", "20"],
    "graph_chains": ["--length", "20", "--steps", "60"],
    "implicit_picture": ["--size", "32", "--steps", "40"],
    "flow_two_states": ["--steps", "20"],
    "prefix_sums": ["--length", "8", "--steps", "150"],
    "reuse_starts": ["--epochs", "5"],
    "restore_pictures": ["--steps", "15"],
    "certified_deblurring": ["--steps", "20"],
    "certify_prediction": ["--epochs", "1"],
    "find_unknown_classes": ["--epochs", "4"],
    "own_pictures": ["--count", "30", "--epochs", "4"],
    "kernel_logistic": [],
    "counts_per_exposure": ["--samples", "5000", "--centres", "100"],
    "lightning_module": ["--epochs", "2"],
    "two_processes": ["--steps", "10"],
    "export_model": ["--steps", "1", "2", "4"],
}
SERIAL = ("own_pictures", "two_processes")  # they start processes, which an example that is run beside others cannot
REDUCED = "Run here with ``{}``, to take seconds; what it prints of times was measured in passing."
# What takes a minute by default has a picture of such a run, by ``python examples/NAME.py``.
RECORDED = {file.stem for file in (ROOT / "docs" / "showcases").glob("*.png")}
RECORD = """.. image:: /showcases/{name}.png
   :alt: what the example draws by default"""
BESIDE = "The same layer by torchdeq, in one table: ``python examples/beside_torchdeq.py {}``."
FIRST_CELL = """# Needs kerneq with its laboratory, `pip install '.[lab]'` in its folder, and what is imported below.
import sys

sys.argv = ["notebook"]  # behind it, what one would type behind the program's name"""


def copy_examples() -> None:
    """Write the examples into build/examples: the first sentence becomes the title of the page."""
    shutil.rmtree(COPIES, ignore_errors=True)
    COPIES.mkdir(parents=True)
    for file in sorted((ROOT / "examples").iterdir()):
        if file.suffix == ".py":
            (COPIES / file.name).write_text(retitle(file.read_text(encoding="utf-8"), file.stem), encoding="utf-8")
        elif file.is_file():
            shutil.copy(file, COPIES)


def retitle(source: str, name: str) -> str:
    """Return the source of an example with its docstring as reStructuredText."""
    docstring = ast.get_docstring(ast.parse(source)) or name
    title = re.split(r": |, |\.(?:\s|$)", docstring, maxsplit=1)[0]
    said = [RECORD.format(name=name)] if name in RECORDED else []
    said += [REDUCED.format(" ".join(ARGUMENTS[name]))] if ARGUMENTS.get(name) else []
    said += [BESIDE.format(name)] if "Layer=kq.Equilibrium" in source else []
    settings = [f"# sphinx_gallery_thumbnail_path = 'showcases/{name}.png'"] if name in RECORDED else []
    settings += ["# sphinx_gallery_parallel = False"] if name in SERIAL else []
    text = "\n\n".join([f"{title}\n{'=' * len(title)}", *docstrings.convert(docstring), *said])
    return f'r"""\n{text}\n"""\n' + "".join(f"\n{line}\n" for line in settings) + source.split('"""', 2)[2]


def export_explorer() -> None:
    """Write the page of `kerneq explore` with its stored examples, for docs/learn/watch.md."""
    EXTRA.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        explore.export(TrainedRun.open(explore.choose_run(Path(folder)), device="cpu"), EXTRA / "explore.html")


def arguments_of(gallery: dict[str, Any], script: dict[str, Any]) -> list[str]:
    """Return the arguments with which an example is run."""
    return ARGUMENTS.get(Path(script["src_file"]).stem, [])


def reset_torch(gallery: dict[str, Any], name: str) -> None:
    """Undo what an example may have set for its process."""
    plt.close("all")
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)


def take_pictures(block: Any, variables: dict[str, Any], gallery: dict[str, Any]) -> str:
    """Move the pictures that an example wrote into the gallery, and return the text that shows them."""
    name = Path(variables["src_file"]).stem
    written = [file for file in COPIES.iterdir() if file.suffix in (".png", ".gif") and file.stem in name]
    kept = []
    for file, target in zip(sorted(written, reverse=True), variables["image_path_iterator"], strict=False):
        kept.append(str(Path(target).with_suffix(file.suffix)))
        shutil.move(file, kept[-1])
    return "".join(figure_rst([path], gallery["src_dir"]) for path in kept)  # one below the other, as wide as the page


class Order:
    """Sort the files of the gallery as `ARGUMENTS` has them."""

    def __init__(self, folder: str):
        pass

    def __call__(self, file: str) -> int:
        return list(ARGUMENTS).index(Path(file).stem)
