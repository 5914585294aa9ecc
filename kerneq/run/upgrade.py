"""Run folders of version 0.1: the flat `[model.settings]` of then as the tables of now."""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from ..gradients import AbstractGradient
from ..kernels import AbstractKernel, Adaptive, Gaussian
from ..models import MODELS, KernelConfig, MDEQConfig
from ..settings import choices, name_of, settings_of
from ..solvers import AbstractSolver

# The flat settings that are tables now, with their defaults; `relaxation` was of the solvers forward and backward.
FLAT: dict[str, dict[str, Any]] = {
    "solver": {"solver": "proximal", "memory": 5, "relaxation": 1.0, "forward": "state"},
    "gradient": {"gradient": "implicit", "gradient_steps": 20, "gradient_tol": 1e-3, "gradient_relaxation": 0.8}
    | {"gradient_solver": "anderson", "backward": "features", "relaxation": 1.0},
    "kernel": {"kernel": "gaussian", "gamma": 0.2, "adaptive": True, "patch": 2, "split": 8, "hidden": 64}
    | {"degree": 2, "offset": 1.0},
}
MDEQ = {"solver": "anderson", "gradient": "phantom", "backward": "map", "gradient_steps": 5, "gradient_relaxation": 0.5}


def upgrade(name: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of `[model]` that make the model that these flat settings made of the one called `name`.

    `solver = "picard"` becomes `solver = {name = "picard", relaxation = 1.0}`, and so on; a warning says so.
    """
    if settings:
        warnings.warn("[model.settings] is the form of version 0.1; it is read as today's [model.…].", stacklevel=2)
    flat = FLAT["solver"] | FLAT["gradient"] | FLAT["kernel"]
    kept = {key: value for key, value in settings.items() if key not in flat}
    config = MODELS[name].config if name in MODELS else None
    if isinstance(config, MDEQConfig):
        flat |= MDEQ
    if isinstance(config, KernelConfig):
        flat["kernel"] = name_of(type(config.kernel))
        if isinstance(config.kernel, Gaussian):
            gamma = config.kernel.gamma
            flat |= dataclasses.asdict(config.kernel) | {"adaptive": isinstance(gamma, Adaptive)}
            flat["gamma"] = gamma.share if isinstance(gamma, Adaptive) else gamma
    tables = _tables({**flat, **settings})
    return kept | {place: table for place, table in tables.items() if settings.keys() & FLAT[place].keys()}


def _tables(flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The tables that take the place of all flat settings together."""
    solver = _table(AbstractSolver, flat["solver"], flat)
    if flat["forward"] == "features":
        solver = {"name": "in-features", "solver": solver}
    backward = {"name": flat["gradient_solver"], "memory": 3}
    if flat["gradient_solver"] == "picard":
        backward = {"name": "picard", "relaxation": flat["relaxation"]}
    if flat["backward"] == "features":
        backward = {"name": "in-features", "solver": backward}
    elif flat["backward"] == "state":
        backward = {"name": "conjugate-gradient"}
    values = {"steps": flat["gradient_steps"], "relaxation": flat["gradient_relaxation"], "solver": backward}
    values |= {"tol": flat["gradient_tol"], "max_steps": flat["gradient_steps"], "on_failure": "return"}
    gamma = {"name": "adaptive", "share": flat["gamma"]} if flat["adaptive"] else flat["gamma"]
    return {
        "solver": solver,
        "gradient": _table(AbstractGradient, flat["gradient"], values),
        "kernel": _table(AbstractKernel, flat["kernel"], {**flat, "gamma": gamma}),
    }


def _table(kind: type, name: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The table of the class with this name, with those of the values that are settings of it."""
    known = settings_of(choices(kind).get(str(name)))
    return {"name": name} | {key: value for key, value in values.items() if key in known}
