"""Kernel GLMs, their equilibrium form, and equilibrium layers initialised as kernel GLMs.

The names are loaded when first used, so that `kerneq --help` does not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kerneq.kglm import bank as bank
    from kerneq.kglm import convolution as convolution
    from kerneq.kglm import prior as prior
    from kerneq.kglm import propositions as propositions
    from kerneq.kglm import system as system
    from kerneq.kglm.activation import LeakyReLU as LeakyReLU
    from kerneq.kglm.adapter import as_kernel as as_kernel
    from kerneq.kglm.convolution import Truncated as Truncated
    from kerneq.kglm.families import Bernoulli as Bernoulli
    from kerneq.kglm.families import Binomial as Binomial
    from kerneq.kglm.families import Gaussian as Gaussian
    from kerneq.kglm.families import Ising as Ising
    from kerneq.kglm.families import Poisson as Poisson
    from kerneq.kglm.families import Rectified as Rectified
    from kerneq.kglm.family import AbstractFamily as AbstractFamily
    from kerneq.kglm.family import Custom as Custom
    from kerneq.kglm.glm import KernelGLM as KernelGLM
    from kerneq.kglm.guarantee import Guarantee as Guarantee
    from kerneq.kglm.initialisation import initialise as initialise
    from kerneq.kglm.kernels import AbstractKernel as AbstractKernel
    from kerneq.kglm.kernels import Constant as Constant
    from kerneq.kglm.kernels import Linear as Linear
    from kerneq.kglm.kernels import Matern as Matern
    from kerneq.kglm.kernels import Periodic as Periodic
    from kerneq.kglm.kernels import SquaredExponential as SquaredExponential
    from kerneq.kglm.kernels import White as White
    from kerneq.kglm.layer import KernelEquilibrium as KernelEquilibrium
    from kerneq.kglm.spectral import spectral_norm as spectral_norm

_HOME = {
    "activation": ("LeakyReLU",),
    "adapter": ("as_kernel",),
    "convolution": ("Truncated",),
    "families": ("Bernoulli", "Binomial", "Gaussian", "Ising", "Poisson", "Rectified"),
    "family": ("AbstractFamily", "Custom"),
    "glm": ("KernelGLM",),
    "guarantee": ("Guarantee",),
    "initialisation": ("initialise",),
    "kernels": ("AbstractKernel", "Constant", "Linear", "Matern", "Periodic", "SquaredExponential", "White"),
    "layer": ("KernelEquilibrium",),
    "spectral": ("spectral_norm",),
}
_MODULES = ("bank", "convolution", "prior", "propositions", "system")
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"kerneq.kglm.{name}")
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"kerneq.kglm.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'kerneq.kglm' has no attribute {name!r}")
