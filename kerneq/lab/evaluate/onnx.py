"""A trained model as an ONNX file: every solve is a fixed number of plain steps, so that the graph has no loop."""

import contextlib
import importlib.util
import logging
import warnings
from pathlib import Path

import torch

from ...cells import AbstractKernelCell
from ...equilibrium import layers_of
from ...solvers import Picard, Proximal
from ..run import TrainingError
from .attack import InPixels
from .trained import TrainedRun

NEEDED = ("onnx", "onnxscript")  # packages of `kerneq[onnx]`
TRIED = 7  # pictures of noise on which the steps are compared with the solver; no side of a picture is 7


def check_installed() -> None:
    """Raise a `TrainingError` that names the packages to install, where some are missing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise TrainingError(f"An ONNX file needs {', '.join(missing)}: install them by `pip install 'kerneq[onnx]'`.")


@torch.no_grad()
def write_onnx(trained: TrainedRun, path: Path, steps: int) -> str:
    """Write the model, with `steps` plain steps in every solve, and return how far these are from its own solver.

    The input `pixels` is (batch, channels, side, side) in [0, 1], for any batch; the output `logits` (batch, classes).
    """
    check_installed()
    model, seen = trained.model, trained.seen
    x = torch.rand(TRIED, *seen.shape, generator=torch.Generator().manual_seed(0))
    whole = InPixels(model, seen.mean, seen.std).eval()
    exact = whole(x)
    for layer in layers_of(model):
        layer.solver = Proximal(memory=0) if isinstance(layer.cell, AbstractKernelCell) else Picard()
        layer.max_steps, layer.check_every = steps, None
    with contextlib.ExitStack() as quiet:
        quiet.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # those of PyTorch's exporter are about itself
        quiet.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.WARNING)
        shapes = ({0: torch.export.Dim("batch", min=1)},)
        program = torch.export.export(whole, (x,), strict=False, dynamic_shapes=shapes)
        written = torch.onnx.export(
            program, dynamo=True, verbose=False, input_names=["pixels"], output_names=["logits"]
        )
    assert written is not None
    written.save(path)
    for layer in layers_of(model):
        layer.tol = 1e-12  # as exported, no sample stops earlier
    logits, solutions = model((x - whole.mean) / whole.std, solutions=True)
    left = max((float(solution.residual.max()) for solution in solutions.values()), default=0.0)
    off = float((logits - exact).abs().max())
    return f"on noise {steps} plain steps leave a residual of {left:.1e} and move the logits by {off:.1e} at most"
