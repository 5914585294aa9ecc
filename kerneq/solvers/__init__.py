"""How to reach z = f(z): `Proximal` (the default of a layer), `Picard`, `Anderson`, `Broyden`, `Newton`, `InFeatures`.

`solve` runs any of them, each sample until it has converged; `help(kerneq.solvers.Proximal)` says what one needs.
"""

from .anderson import Anderson as Anderson
from .base import AbstractSolver as AbstractSolver
from .base import solve as solve
from .broyden import Broyden as Broyden
from .features import InFeatures as InFeatures
from .newton import Newton as Newton
from .picard import Picard as Picard
from .proximal import Proximal as Proximal
