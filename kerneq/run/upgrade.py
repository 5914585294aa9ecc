"""Run folders of version 0.1: the flat `[model.settings]` of then as the tables of now."""

import warnings
from collections.abc import Mapping
from typing import Any

from ..kernels import Adaptive, Gaussian
from ..models import MODELS, ClassifierConfig, DenseConfig, MDEQConfig
from ..settings import name_of

# The flat settings that are tables now, with their defaults; `relaxation` was of the solvers forward and backward.
SOLVER = {"solver": "proximal", "memory": 5, "relaxation": 1.0, "forward": "state"}
GRADIENT = {"gradient": "implicit", "backward": "features", "gradient_steps": 20, "gradient_solver": "anderson"}
GRADIENT |= {"gradient_tol": 1e-3, "gradient_relaxation": 0.8, "relaxation": 1.0}
KERNEL = {"kernel": "gaussian", "gamma": 0.2, "adaptive": True, "patch": 2, "split": 8, "hidden": 64}
KERNEL |= {"degree": 2, "offset": 1.0}
MDEQ = {"solver": "anderson", "gradient": "phantom", "backward": "map", "gradient_steps": 5, "gradient_relaxation": 0.5}
FIELDS = {"proximal": ["memory"], "picard": ["relaxation"], "anderson": ["memory", "relaxation"], "broyden": ["memory"]}


def upgrade(name: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of `[model]` that make the model that these flat settings made of the one called `name`.

    `solver = "picard"` becomes `solver = {name = "picard", relaxation = 1.0}`, and so on; a warning says so.
    """
    config = MODELS[name].config if name in MODELS else None
    flat = SOLVER | GRADIENT | KERNEL
    if isinstance(config, MDEQConfig):
        flat |= MDEQ
    if isinstance(config, ClassifierConfig | DenseConfig):
        flat["kernel"] = name_of(type(config.kernel))
        if isinstance(config.kernel, Gaussian):
            flat |= _of_gaussian(config.kernel)
    flat |= settings
    tables = {key: value for key, value in settings.items() if key not in SOLVER | GRADIENT | KERNEL}
    for table, keys, make in (
        ("solver", SOLVER, _solver),
        ("gradient", GRADIENT, _gradient),
        ("kernel", KERNEL, _kernel),
    ):
        if settings.keys() & keys.keys():
            tables[table] = make(flat)
    if settings:
        warnings.warn("[model.settings] is the form of version 0.1; it is read as today's [model.…].", stacklevel=2)
    return tables


def _of_gaussian(kernel: Gaussian) -> dict[str, Any]:
    gamma: Any = kernel.gamma
    if isinstance(gamma, Adaptive):
        gamma = gamma.share
    adaptive = isinstance(kernel.gamma, Adaptive)
    return {"gamma": gamma, "adaptive": adaptive, "patch": kernel.patch, "split": kernel.split, "hidden": kernel.hidden}


def _kernel(flat: Mapping[str, Any]) -> dict[str, Any]:
    table = {"name": flat["kernel"]}
    if flat["kernel"] == "gaussian":
        table |= {key: flat[key] for key in ("gamma", "patch", "split", "hidden")}
        if flat["adaptive"]:
            table["gamma"] = {"name": "adaptive", "share": flat["gamma"]}
    elif flat["kernel"] == "polynomial":
        table |= {"degree": flat["degree"], "offset": flat["offset"]}
    return table


def _solver(flat: Mapping[str, Any]) -> dict[str, Any]:
    table = {"name": flat["solver"]} | {key: flat[key] for key in FIELDS.get(str(flat["solver"]), [])}
    return {"name": "in-features", "solver": table} if flat["forward"] == "features" else table


def _gradient(flat: Mapping[str, Any]) -> dict[str, Any]:
    table, steps = {"name": flat["gradient"]}, flat["gradient_steps"]
    if flat["gradient"] == "unrolled":
        return table | {"steps": steps}
    if flat["gradient"] == "phantom":
        return table | {"steps": steps, "relaxation": flat["gradient_relaxation"]}
    solver: dict[str, Any] = {"name": flat["gradient_solver"], "memory": 3}
    if flat["gradient_solver"] == "picard":
        solver = {"name": "picard", "relaxation": flat["relaxation"]}
    if flat["backward"] == "features":
        solver = {"name": "in-features", "solver": solver}
    elif flat["backward"] == "state":
        solver = {"name": "conjugate-gradient"}
    return table | {"solver": solver, "tol": flat["gradient_tol"], "max_steps": steps, "on_failure": "return"}
