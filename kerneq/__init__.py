"""kerneq: kernel equilibrium models.

    layer = kerneq.Equilibrium(kerneq.cells.ConvCell(kerneq.kernels.Gaussian(), inputs=16, state=64, features=32))
    layer(x).value  # the z* with z* = σ(d(z*; x)), with gradients

`cells` are the equations, made of `kernels` and a `prox` σ; `solvers` find z*, `gradients` differentiate it, and
`fixed_point` does both for a function of your own. `models` are the papers' networks, `train` trains them, `load` and
`predict` use trained ones, `evaluate` measures them. `kglm` has kernel GLMs, `sklearn` estimators, `theory` what is
proved, as functions.

The public names are loaded when first used, so that `kerneq --help` does not wait for torch.
"""

import importlib as _importlib  # with names that completion does not offer
import typing as _typing

if _typing.TYPE_CHECKING:
    from . import cells as cells
    from . import gradients as gradients
    from . import kernels as kernels
    from . import kglm as kglm
    from . import maps as maps
    from . import models as models
    from . import prox as prox
    from . import sklearn as sklearn
    from . import solvers as solvers
    from .cuda_graphs import capture as capture
    from .equilibrium import Equilibrium as Equilibrium
    from .equilibrium import Value as Value
    from .equilibrium import attach as attach
    from .equilibrium import fixed_point as fixed_point
    from .equilibrium import solving as solving
    from .lab import data as data
    from .lab import plot as plot
    from .lab import verify as theory  # noqa: F401
    from .lab.evaluate import evaluate as evaluate
    from .lab.prediction import predict as predict
    from .lab.training import train_experiment as train  # noqa: F401
    from .loading import load as load
    from .randomness import FixedRandomness as FixedRandomness
    from .resolvent import Resolvent as Resolvent
    from .solution import EquilibriumError as EquilibriumError
    from .solution import Solution as Solution
    from .solution import Status as Status
    from .solution import Trace as Trace
    from .solvers import solve as solve
    from .stability import jacobian_norm as jacobian_norm
    from .stability import spectral_radius as spectral_radius

__version__ = "0.2.0"

# Where each public name lives: a module, or a module and a name in it.
_MODULES = ("cells", "gradients", "kernels", "kglm", "maps", "models", "prox", "sklearn", "solvers")
_HOME = {name: name for name in _MODULES} | {
    "Equilibrium": "equilibrium:Equilibrium",
    "EquilibriumError": "solution:EquilibriumError",
    "FixedRandomness": "randomness:FixedRandomness",
    "Resolvent": "resolvent:Resolvent",
    "Solution": "solution:Solution",
    "Status": "solution:Status",
    "Trace": "solution:Trace",
    "Value": "equilibrium:Value",
    "attach": "equilibrium:attach",
    "capture": "cuda_graphs:capture",
    "certify": "certificates:certify",
    "data": "lab.data",
    "evaluate": "lab.evaluate:evaluate",
    "fixed_point": "equilibrium:fixed_point",
    "jacobian_norm": "stability:jacobian_norm",
    "load": "loading:load",
    "plot": "lab.plot",
    "predict": "lab.prediction:predict",
    "solve": "solvers:solve",
    "solving": "equilibrium:solving",
    "spectral_radius": "stability:spectral_radius",
    "theory": "lab.verify",
    "train": "lab.training:train_experiment",
}
__all__ = [*_HOME]  # noqa: PLE0604


def __getattr__(name: str) -> _typing.Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kerneq' has no attribute {name!r}")
    module, _, attribute = _HOME[name].partition(":")
    try:
        found = _importlib.import_module(f".{module}", __name__)
    except ModuleNotFoundError as error:
        if not module.startswith("lab.") or (error.name or "").startswith("kerneq"):
            raise
        raise ModuleNotFoundError(
            f"`kerneq.{name}` is part of the laboratory, which needs {error.name}: install it by "
            "`pip install 'kerneq[lab]'`.",
            name=error.name,
        ) from None
    return getattr(found, attribute) if attribute else found


def __dir__() -> list[str]:
    """The public names, for `dir(kerneq)` and Tab, loaded or not."""
    return sorted([*__all__, "__version__"])
