"""The page, one file that needs nothing else: what it offers where nothing is chosen, and examples stored in it."""

import base64
import dataclasses
import importlib.resources
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ...loading import SHIPPED, names
from ..console import printable
from ..data import DataError, load
from ..evaluate import TrainedRun
from ..evaluate.sheet import png
from ..prediction import read_picture
from ..run import config, write_atomically
from ..run.config import ConfigError
from ..run.files import to_json
from ..training import train
from .watching import Controls, certify_pictures, describe_model, watch

PHOTOGRAPHS = {  # title and credit: a file of a package that the laboratory needs anyway
    "Temple (danielbuechele, CC BY 2.0)": ("sklearn", "datasets/images/china.jpg"),
    "Flower (vultilion, CC BY 2.0)": ("sklearn", "datasets/images/flower.jpg"),
    "Grace Hopper (U.S. Navy, public domain)": ("matplotlib", "mpl-data/sample_data/grace_hopper.jpg"),
}
EXAMPLES = 3
GENTLE = Controls(solver="picard-relaxed", tol=1e-4, steps=40)  # small steps, to be looked at


def choose_run(folder: Path) -> Path:
    """Return the smallest weights that ship; where none do, train a tiny model on the digits into `folder`."""
    if shipped := [SHIPPED / name for name in names()]:
        return min(shipped, key=lambda run: sum(file.stat().st_size for file in run.glob("checkpoints/*")))
    torch.set_num_threads(1)  # this model is too small to share between threads
    train(config.load("geq-tiny-digits", ["training.epochs=4"]), folder / "geq-tiny-digits")
    return folder / "geq-tiny-digits"


def list_pictures(trained: TrainedRun) -> list[tuple[str, Tensor]]:
    """Return titles and pixels of what is offered: a digit of each class to a model of grey pictures, or photographs.

    The pixels are as `read_pixels` returns them.
    """
    files = {}
    if trained.seen.shape[0] == 1:
        images = load("digits", "test")
        for label, name in enumerate(images.classes):
            first = images.select(torch.nonzero(images.labels == label)[0]).in_memory()
            files[f"Digit {name}"] = png(Image.fromarray(first[0, 0].numpy()))
    for title, (package, name) in {} if files else PHOTOGRAPHS.items():
        path = Path(str(getattr(importlib.util.find_spec(package), "origin", None))).parent / name
        if path.exists():  # some distributions leave such files out
            files[title] = path.read_bytes()
    return [(title, read_pixels(trained, content)) for title, content in files.items()]


def read_pixels(trained: TrainedRun, content: bytes) -> Tensor:
    """Return the pixels of a picture file as the model takes them, uint8 (channels, side, side).

    A `DataError` says in a sentence why there are none.
    """
    channels, side, _ = trained.seen.shape
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "picture"
        path.write_bytes(content)
        try:
            return read_picture(path, channels, side)
        except DataError as error:
            raise DataError(str(error).replace(str(path), "The picture")) from None


def address(pixels: Tensor) -> str:
    """Return a picture, uint8 (channels, h, w), as an address that holds it."""
    picture = Image.fromarray(pixels.expand(3, -1, -1).permute(1, 2, 0).numpy())
    return f"data:image/png;base64,{base64.b64encode(png(picture)).decode()}"


def render(data: dict[str, Any], nonce: str = "") -> bytes:
    """Return the page with this data in it; a browser that is told so runs only what has the nonce."""
    source = importlib.resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return source.replace("{{nonce}}", nonce).replace("{{data}}", to_json(data).replace("<", "\\u003c")).encode()


def export(trained: TrainedRun, file: Path) -> None:
    """Write the page with a few pictures whose solves are stored in it; it works without a server."""
    if file.suffix.lower() != ".html" or file.is_dir():
        raise ConfigError(f"The page is written to a file that ends in .html, got {printable(str(file))!r}.")
    model, chosen, examples = describe_model(trained), list_pictures(trained)[:EXAMPLES], []
    proved = [""] * len(chosen)
    if not model["obstacle"]:
        proved = certify_pictures(trained, [pixels for _, pixels in chosen])
    for (title, pixels), certificate in zip(chosen, proved, strict=True):
        found = {"title": title, "picture": address(pixels), "certificate": certificate}
        examples.append(watch(trained, pixels, GENTLE) | found)
    write_atomically(file, render({"model": model | {"controls": dataclasses.asdict(GENTLE)}, "examples": examples}))
