"""What a gradient rule is: how ∂L/∂z* reaches the parameters behind f."""

import abc

from torch import Tensor

from ..solvers.base import Map


class AbstractGradient(abc.ABC):
    """A rule that ties an equilibrium, found without a graph, to the parameters and inputs of its map."""

    @abc.abstractmethod
    def attach(self, f: Map, z: Tensor) -> Tensor:
        """The equilibrium z of f, with a gradient path into everything f depends on."""
