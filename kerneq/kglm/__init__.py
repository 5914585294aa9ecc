"""Kernel GLMs, their equilibrium form, and equilibrium layers initialised as kernel GLMs (Tsuchida et al., 2022)."""

from .declarative import DeclarativeNode as DeclarativeNode
from .design import Approximation as Approximation
from .equilibrium import FeatureCell as FeatureCell
from .equilibrium import FeatureEquilibrium as FeatureEquilibrium
from .equilibrium import GLMCell as GLMCell
from .equilibrium import KernelEquilibrium as KernelEquilibrium
from .families import AbstractFamily as AbstractFamily
from .families import Bernoulli as Bernoulli
from .families import Binomial as Binomial
from .families import Categorical as Categorical
from .families import Custom as Custom
from .families import Gaussian as Gaussian
from .families import Ising as Ising
from .families import LeakyReLU as LeakyReLU
from .families import Logistic as Logistic
from .families import Normal as Normal
from .families import Poisson as Poisson
from .families import Prior as Prior
from .families import Rectified as Rectified
from .glm import FitPath as FitPath
from .glm import KernelGLM as KernelGLM
from .guarantee import Guarantee as Guarantee
from .guarantee import check_assumptions as check_assumptions
from .guarantee import spectral_norm as spectral_norm
from .initialisation import initialise as initialise
from .kernels import AbstractCovariance as AbstractCovariance
from .kernels import Constant as Constant
from .kernels import DotProduct as DotProduct
from .kernels import Matern as Matern
from .kernels import Periodic as Periodic
from .kernels import Scaled as Scaled
from .kernels import SquaredExponential as SquaredExponential
from .kernels import Truncated as Truncated
from .kernels import White as White
from .kernels import as_kernel as as_kernel
from .kernels import pixels as pixels
from .lowrank import AbstractLowRank as AbstractLowRank
from .lowrank import Nystrom as Nystrom
from .lowrank import RandomFeatures as RandomFeatures
from .newton import FitProgress as FitProgress
from .newton import Posterior as Posterior
from .rows import read_table as read_table
from .rows import save_rows as save_rows


def __dir__() -> list[str]:
    """List the public names, which are those imported above."""
    return [name for name, value in globals().items() if getattr(value, "__module__", "").startswith(f"{__name__}.")]
