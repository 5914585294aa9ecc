"""kerneq: kernel equilibrium models.

    layer = kerneq.Equilibrium(kerneq.cells.ConvCell(kerneq.kernels.Gaussian(), inputs=16, state=64, features=32))
    layer(x).value  # the z* with z* = σ(d(z*; x)), with gradients

`cells` are the equations, made of `kernels` and a `prox` σ; `solvers` find z*, `gradients` differentiate it, and
`fixed_point` does both for a function of your own. `models` are the papers' networks, `load` and `predict` use trained
ones, `evaluate` measures them. `kglm` has kernel GLMs, `sklearn` estimators, `theory` what is proved, as functions.

The public names are loaded when first used, so that `kerneq --help` does not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import cells as cells
    from . import data as data
    from . import evaluate as evaluate
    from . import gradients as gradients
    from . import kernels as kernels
    from . import kglm as kglm
    from . import models as models
    from . import prox as prox
    from . import sklearn as sklearn
    from . import solvers as solvers
    from . import theory as theory
    from .equilibrium import Equilibrium as Equilibrium
    from .equilibrium import Value as Value
    from .equilibrium import fixed_point as fixed_point
    from .graphs import capture as capture
    from .prediction import load as load
    from .prediction import predict as predict
    from .solution import EquilibriumError as EquilibriumError
    from .solution import Solution as Solution
    from .solution import Status as Status
    from .solvers import solve as solve

__version__ = "0.1.0"

_MODULES = (
    "cells",
    "data",
    "evaluate",
    "gradients",
    "kernels",
    "kglm",
    "models",
    "prox",
    "sklearn",
    "solvers",
    "theory",
)
_HOME = {
    "Equilibrium": "equilibrium",
    "EquilibriumError": "solution",
    "Solution": "solution",
    "Status": "solution",
    "Value": "equilibrium",
    "capture": "graphs",
    "fixed_point": "equilibrium",
    "load": "prediction",
    "predict": "prediction",
    "solve": "solvers",
}
__all__ = [*_HOME, *_MODULES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module 'kerneq' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, for `dir(kerneq)` and Tab, loaded or not."""
    return sorted([*__all__, "__version__"])
