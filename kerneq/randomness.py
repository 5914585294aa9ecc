"""Functions that draw random numbers, such as dropout, in a solve: the same numbers at each of its evaluations."""

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn


@final
class FixedRandomness(nn.Module):
    """f, with the same random numbers at every evaluation of one solve, and others in the next.

    A function that draws new numbers at each evaluation has no fixed point. Wrapped, any `nn.Dropout` inside f drops
    the same entries from the start of a solve to its end: variational dropout (Gal and Ghahramani, 2016).

        layer = kq.Equilibrium(kq.FixedRandomness(block))
        s = kq.fixed_point(kq.FixedRandomness(f), z0, x)

    The seed of a solve comes from torch's own generator, which is otherwise left as it was: `torch.manual_seed` repeats
    a run. All samples stay in the computation until the last one has converged, as their numbers depend on their place
    in the batch. A module in `eval()` is called as it is.
    """

    def __init__(self, f: Callable[..., Any]):
        super().__init__()
        self.f = f

    def forward(self, z: Any, *inputs: Any) -> Any:
        return self.f(z, *inputs)

    @property
    def draws(self) -> bool:
        """Whether f is to be called with fixed random numbers: not a module in `eval()`."""
        return not isinstance(self.f, nn.Module) or self.f.training

    def fix(self, *inputs: Any) -> Callable[[Tensor], Tensor]:
        """Return z ↦ f(z, *inputs) with random numbers of its own, the same at every call."""
        seed = int(torch.randint(2**62, ()))

        def fixed(z: Tensor) -> Tensor:
            devices = [z.device] if z.is_cuda else []
            with torch.random.fork_rng(devices):
                torch.default_generator.manual_seed(seed)
                if z.is_cuda:
                    torch.cuda.default_generators[z.get_device()].manual_seed(seed)
                found: Tensor = self.f(z, *inputs)
                return found

        return fixed
