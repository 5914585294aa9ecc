"""Run folders of version 0.1: their flat `[model.settings]` as the tables of today.

[model.settings]                        [model]
norm = 1.0                              norm = 1.0
solver = "picard"                       check_every = 4
check_every = 4                         [model.solver]
gradient_steps = 3                      name = "picard"
gradient_solver = "picard"              [model.gradient]
                                        name = "implicit"
                                        max_steps = 3
                                        …
"""

import warnings
from collections.abc import Mapping
from typing import Any

from ..kernels import Adaptive, Fixed, Gaussian
from ..models import MODELS, ClassifierConfig, DenseConfig, MDEQConfig
from ..settings import name_of

# The flat settings with their defaults of then; MDEQ and the kernels of the zoo had others.
_SOLVER = {"solver": "proximal", "memory": 5, "relaxation": 1.0, "forward": "state"}
_GRADIENT = {
    "gradient": "implicit",
    "backward": "features",
    "gradient_steps": 20,
    "gradient_solver": "anderson",
    "gradient_tol": 1e-3,
    "gradient_relaxation": 0.8,
    "relaxation": 1.0,
}
_KERNEL = {
    "kernel": "gaussian",
    "gamma": 0.2,
    "adaptive": True,
    "patch": 2,
    "split": 8,
    "hidden": 64,
    "degree": 2,
    "offset": 1.0,
}
_MDEQ = {
    "solver": "anderson",
    "gradient": "phantom",
    "backward": "map",
    "gradient_steps": 5,
    "gradient_relaxation": 0.5,
}


def upgrade(name: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the model called `name` as tables that make the same model; says so in a warning."""
    config = MODELS[name].config if name in MODELS else None
    flat = _SOLVER | _GRADIENT | _KERNEL
    if isinstance(config, MDEQConfig):
        flat |= _MDEQ
    if isinstance(config, ClassifierConfig | DenseConfig):
        flat |= _flat_kernel(config)
    flat |= settings
    tables = {key: value for key, value in settings.items() if key not in _SOLVER | _GRADIENT | _KERNEL}
    if settings.keys() & _SOLVER.keys():
        tables["solver"] = _solver(flat)
    if settings.keys() & _GRADIENT.keys():
        tables["gradient"] = _gradient(flat)
    if settings.keys() & _KERNEL.keys():
        tables["kernel"] = _kernel(flat)
    if settings:
        warnings.warn("[model.settings] is the form of version 0.1; it is read as today's [model.…].", stacklevel=2)
    return tables


def _flat_kernel(config: ClassifierConfig | DenseConfig) -> dict[str, Any]:
    kernel = config.kernel
    if not isinstance(kernel, Gaussian):
        return {"kernel": name_of(type(kernel))}
    gamma: Any = kernel.gamma
    if isinstance(gamma, Adaptive):
        gamma = gamma.share
    elif isinstance(gamma, Fixed):
        gamma = gamma.gamma
    adaptive = isinstance(kernel.gamma, Adaptive)
    return {"gamma": gamma, "adaptive": adaptive, "patch": kernel.patch, "split": kernel.split, "hidden": kernel.hidden}


def _kernel(flat: Mapping[str, Any]) -> dict[str, Any]:
    match flat["kernel"]:
        case "gaussian":
            gamma = {"name": "adaptive", "share": flat["gamma"]} if flat["adaptive"] else flat["gamma"]
            return {"name": "gaussian", "gamma": gamma} | {key: flat[key] for key in ("patch", "split", "hidden")}
        case "polynomial":
            return {"name": "polynomial", "degree": flat["degree"], "offset": flat["offset"]}
        case name:
            return {"name": name}


def _solver(flat: Mapping[str, Any]) -> dict[str, Any]:
    fields = {
        "proximal": ("memory",),
        "picard": ("relaxation",),
        "anderson": ("memory", "relaxation"),
        "broyden": ("memory",),
    }
    table = {"name": flat["solver"]} | {key: flat[key] for key in fields.get(str(flat["solver"]), ())}
    return {"name": "in-features", "solver": table} if flat["forward"] == "features" else table


def _gradient(flat: Mapping[str, Any]) -> dict[str, Any]:
    steps = flat["gradient_steps"]
    match flat["gradient"]:
        case "implicit":
            table = {"name": "implicit", "solver": _backward(flat), "tol": flat["gradient_tol"], "max_steps": steps}
            return table | {"on_failure": "return"}
        case "phantom":
            return {"name": "phantom", "steps": steps, "relaxation": flat["gradient_relaxation"]}
        case name:
            return {"name": name, "steps": steps}


def _backward(flat: Mapping[str, Any]) -> dict[str, Any]:
    if flat["backward"] == "state":
        return {"name": "conjugate-gradient"}
    table = {"name": "picard", "relaxation": flat["relaxation"]}
    if flat["gradient_solver"] != "picard":
        table = {"name": flat["gradient_solver"], "memory": 3}
    return {"name": "in-features", "solver": table} if flat["backward"] == "features" else table
