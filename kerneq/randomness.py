"""Functions that draw random numbers, such as dropout, in a solve: the same numbers at each of its evaluations."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor, nn

RANDOM = (
    "f draws random numbers (dropout?), other ones at each evaluation, so it has no fixed point: wrap it, "
    "`kerneq.FixedRandomness(f)`, for the same numbers all through a solve, or call `f.eval()`."
)


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

    def forward(self, z: Any, *inputs: Any, **named: Any) -> Any:
        return self.f(z, *inputs, **named)

    @property
    def draws(self) -> bool:
        """Whether f is to be called with fixed random numbers: not a module in `eval()`."""
        return not isinstance(self.f, nn.Module) or self.f.training

    def fix(self) -> Callable[..., Any]:
        """Return f with random numbers of its own, the same at every call."""
        seed = int(torch.randint(2**62, ()))

        def fixed(z: Any, *inputs: Any, **named: Any) -> Any:
            devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
            with torch.random.fork_rng(devices):
                torch.default_generator.manual_seed(seed)
                for device in devices:
                    torch.cuda.default_generators[device].manual_seed(seed)
                return self.f(z, *inputs, **named)

        return fixed


@contextlib.contextmanager
def warn_of_randomness(z0: Tensor | None) -> Iterator[None]:
    """Warn if random numbers have been drawn inside this context, by the function of a user."""
    capturing = z0 is not None and z0.is_cuda and torch.cuda.is_current_stream_capturing()
    if z0 is None or capturing or torch.compiler.is_compiling():
        yield
        return
    before = _randomness(z0)
    yield
    if not torch.equal(before, _randomness(z0)):
        warnings.warn(RANDOM, RuntimeWarning, stacklevel=6)


def _randomness(like: Tensor) -> Tensor:
    """Return where the random generator of a device is, without waiting for the device."""
    if like.is_cuda:
        return torch.tensor(torch.cuda.default_generators[like.get_device()].get_offset())
    return torch.default_generator.get_state()
