"""The gallery: copies of examples/ with titles that Sphinx accepts, run in reduced size, and their pictures."""

import ast
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from sphinx_gallery.scrapers import figure_rst

from docs import docstrings
from kerneq.lab import explore
from kerneq.lab.evaluate import TrainedRun

ROOT = Path(__file__).parent.parent
COPIES = ROOT / "build" / "examples"
EXTRA = ROOT / "build" / "extra"

# Arguments that keep each run within seconds; an example that is not named here runs as it is.
ARGUMENTS = {
    "counts_per_exposure": ["--samples", "5000", "--centres", "100"],
    "layer_in_your_network": ["--epochs", "5"],
    "lightning_module": ["--epochs", "2"],
    "own_pictures": ["--count", "30", "--epochs", "4"],
    "see_an_equilibrium": ["--steps", "8"],
}
REDUCED = "Run here with ``{}``, to take seconds; the times that it prints are those of this build, no measurement."
# The showcases train for minutes, and time torchdeq, too, which a build could not: their pictures are recorded.
RECORDED = {file.stem for file in (ROOT / "docs" / "showcases").glob("*.png")}
RUN = rf"/(?!{'|'.join(sorted(RECORDED))})\w+\.py$"  # which of them are run
RECORD = """.. image:: /showcases/{name}.png
   :alt: what the example draws

Not run when this site was built, as it takes minutes: the picture was recorded by ``python examples/{name}.py``."""

SHARED = "It imports ``beside_torchdeq.py`` of the same folder; so does its notebook."


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
    said = [REDUCED.format(" ".join(ARGUMENTS[name]))] if name in ARGUMENTS else []
    said += [RECORD.format(name=name)] if name in RECORDED else []
    said += [SHARED] if "from beside_torchdeq" in source else []
    picture = f"\n# sphinx_gallery_thumbnail_path = 'showcases/{name}.png'\n" if name in RECORDED else ""
    text = "\n\n".join([f"{title}\n{'=' * len(title)}", *docstrings.convert(docstring), *said])
    return f'r"""\n{text}\n"""\n{picture}' + source.split('"""', 2)[2]


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
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)


def take_pictures(block: Any, variables: dict[str, Any], gallery: dict[str, Any]) -> str:
    """Move the pictures that an example wrote into the gallery, and return the text that shows them."""
    written = sorted(COPIES.glob("*.png")) + sorted(COPIES.glob("*.gif"))  # the first is shown in the gallery
    paths = variables["image_path_iterator"]
    kept = []
    for file, target in zip(written, paths, strict=False):
        kept.append(str(Path(target).with_suffix(file.suffix)))
        shutil.move(file, kept[-1])
    return "".join(figure_rst([path], gallery["src_dir"]) for path in kept)  # one below the other, as wide as the page
