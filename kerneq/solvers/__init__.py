"""How to reach z = f(z): `Proximal` (the default of a layer), `Picard`, `Anderson`, `Broyden`, `Newton`, `InFeatures`.

`solve` runs any of them, each sample until it has converged; `help(kerneq.solvers.Proximal)` says what one needs.
"""

from .anderson import Anderson
from .base import AbstractSolver
from .broyden import Broyden
from .features import InFeatures
from .loops import solve
from .newton import Newton
from .picard import Picard
from .proximal import Proximal

__all__ = ["AbstractSolver", "Anderson", "Broyden", "InFeatures", "Newton", "Picard", "Proximal", "solve"]

__dir__ = __all__.copy  # `dir` lists the public names only
