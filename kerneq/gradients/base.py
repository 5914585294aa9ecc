"""How a gradient reaches the parameters behind f."""

import abc

from torch import Tensor

from ..equation import Map


class AbstractGradient(abc.ABC):
    """A rule that ties an equilibrium, found without a graph, to the parameters and inputs of its map; a value."""

    @abc.abstractmethod
    def attach(self, f: Map, z: Tensor) -> Tensor:
        """The equilibrium z (batch, ...) of f, with a gradient path into everything f depends on."""
