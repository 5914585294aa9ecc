"""What kerneq does."""

import copy
import dataclasses
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import kerneq as kq
from kerneq.gradients import Implicit, Neumann, Phantom, Reversible, Shine
from kerneq.solvers import Anderson, Broyden, Picard

from .judge import (
    Block,
    Cell,
    Counting,
    count_kept,
    count_normed,
    find_gradient_error,
    find_warning,
    judge_approximation,
    judge_autocast,
    judge_batch_norm,
    judge_compiled,
    judge_ddp,
    judge_forward_mode,
    judge_gradient,
    judge_loudness,
    judge_masks,
    judge_radius,
    judge_reuse,
    judge_rows,
    judge_second,
    judge_transforms,
    judge_works,
    make_inputs,
    no,
    partly,
    turn,
    unroll,
    yes,
)

TIGHT: dict[str, Any] = {"gradient": Implicit(tol=1e-12, max_steps=300), "tol": 1e-12, "max_steps": 300}


@dataclasses.dataclass
class Pair:
    u: Tensor
    v: Tensor


class Model(nn.Module):
    """A block solved by kerneq."""

    def __init__(self, **settings: Any):
        super().__init__()
        self.layer = kq.Equilibrium(Block(), **(TIGHT | settings))

    @property
    def block(self) -> Block:
        cell = self.layer.cell
        assert isinstance(cell, kq.cells.FunctionCell) and isinstance(cell.f, Block)
        return cell.f

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).value


def make_fixed() -> Model:
    return Model(gradient=Phantom(3), max_steps=5, check_every=5)


def make_loose() -> Model:
    return Model(gradient=Implicit(), tol=None)


def check_error(**settings: Any) -> float:
    model, x = Model(**settings), make_inputs()
    truth = unroll(lambda z: model.block(z, x), torch.zeros_like(x))
    return find_gradient_error(model(x), truth, model.block.linear.weight)


def count_rule(rule: Callable[[int], Any]) -> set[int]:
    """Return the numbers kept with few and with many steps of a rule."""
    x = make_inputs()
    return {count_kept(partial(Model(gradient=rule(k)), x)) for k in (2, 9)}


def several_tensors() -> Cell:
    z0 = (torch.zeros(5, 6), torch.zeros(5, 2))
    found = kq.fixed_point(lambda z: (0.5 * z[0] + 1, 0.5 * z[1] + 1), z0, norm="leaf")
    return (yes if found.converged.all() else no)("a tuple of (5, 6) and (5, 2); the residual joint or of the worst")


def several_dtypes() -> Cell:
    z0 = (torch.zeros(5, 6), torch.zeros(5, 2, dtype=torch.float32))
    found = kq.fixed_point(lambda z: (0.5 * z[0] + 1, 0.5 * z[1] + 1), z0)
    return (yes if found.value[1].dtype == torch.float32 else no)("float64 and float32 stay")


def dicts() -> Cell:
    z0 = torch.zeros(5, 6)
    kq.fixed_point(lambda z: {"u": 0.5 * z["u"] + 1}, {"u": z0})
    kq.fixed_point(lambda z: Pair(0.5 * z.u, 0.5 * z.v + 1), Pair(z0, z0))
    return yes("dicts, lists, named tuples and dataclasses")


def any_module() -> Cell:
    layer, x = kq.Equilibrium(Block()), make_inputs()
    layer(x).value.sum().backward()
    return yes(f"`Equilibrium(f)` holds its {len(list(layer.parameters()))} parameters")


def named_inputs() -> Cell:
    layer, x = kq.Equilibrium(Block()), make_inputs()
    same = torch.equal(layer(x, 0.5).value, layer(x=x, scale=0.5).value)
    return (yes if same else no)("`layer(x, 0.5)` and `layer(x=x, scale=0.5)` are the same")


def start() -> Cell:
    layer, x = kq.Equilibrium(Block()), make_inputs()
    cold = layer(x).detach()
    warm = layer(x, z0=cold.value)
    return yes(f"{int(cold.steps.max())} steps from 0, {int(warm.steps.max())} from the solution")


def limits() -> Cell:
    layer, x = kq.Equilibrium(Block(), tol=(1e-1, 1e-8), max_steps=(5, 50)), make_inputs()
    worst = [float(layer.train(mode)(x).residual.max()) for mode in (True, False)]
    return (yes if worst[1] <= 1e-8 else no)(f"pairs of both: residuals {worst[0]:.0e} and {worst[1]:.0e}")


def drawn_steps() -> Cell:
    layer = kq.Equilibrium(Block(), tol=1e-14, max_steps=range(3, 7), on_failure="return")
    drawn = {int(layer(make_inputs()).steps.max()) for _ in range(40)}
    return (yes if len(drawn) > 1 else no)(f"`max_steps=range(3, 7)` took {sorted(drawn)}")


def status() -> Cell:
    found = kq.solve(Counting(), torch.zeros(16, 2), Picard(), tol=1e-6, max_steps=40)
    return yes(f"`converged` and a sentence: {int(found.converged.sum())} of 16")


def steps() -> Cell:
    found = kq.solve(Counting(), torch.zeros(16, 2), Picard(), tol=1e-6, max_steps=90)
    return yes(f"from {int(found.steps.min())} to {int(found.steps.max())}")


def leaving() -> Cell:
    f, samples = Counting(), 16
    found = kq.solve(kq.maps.Function(f, (f.rates,)), torch.zeros(16, 2), Picard(), tol=1e-6, max_steps=200)
    return judge_rows(f.rows, int(found.steps.max()), samples)


def apart() -> Cell:
    rates = torch.linspace(0.2, 0.9, 8)[:, None]
    both = [kq.fixed_point(lambda z, r: r * z + 1, torch.zeros(len(r), 2), r).value[:1] for r in (rates, rates[:1])]
    far = float((both[0] - both[1]).abs().max())
    return (yes if far == 0 else no)(f"a sample's answer moves by {far:.0e} with its neighbours")


def residuals() -> Cell:
    found = kq.Equilibrium(Block())(make_inputs(), trace=True).trace
    assert found is not None
    return yes(f"`trace.residual` {tuple(found.residual.shape)}")


def states() -> Cell:
    found = kq.Equilibrium(Block())(make_inputs(), trace=(2, 4)).trace
    assert found is not None
    good = all(z.requires_grad for z in found.states.values())
    return (yes if good else no)("`trace=(2, 4)`, with the gradient of the layer's rule")


def jacobian() -> Cell:
    block, x = Block(), make_inputs()
    found = kq.jacobian_norm(block, torch.zeros_like(x), x)
    torch.autograd.grad(found.mean(), block.linear.weight)
    return yes(f"with a graph, {tuple(found.shape)}: a number a sample")


def radius() -> Cell:
    z = torch.ones(2, 2)
    real = kq.spectral_radius(lambda z: z * torch.tensor([0.7, 0.2]), z)
    return judge_radius(real, kq.spectral_radius(turn, z), "a number a sample")


def masks() -> Cell:
    return any_dropout()


def any_dropout() -> Cell:
    block = Block(drop=0.3)
    return judge_masks(block.drop, lambda: kq.Equilibrium(kq.FixedRandomness(block))(make_inputs()))


def norms() -> Cell:
    calls = count_normed(lambda block: kq.Equilibrium(block)(make_inputs()))
    layer = kq.Equilibrium(Block())
    nn.utils.parametrizations.weight_norm(layer.get_submodule("cell.f.linear"))
    layer(make_inputs()).value.sum().backward()
    copy.deepcopy(layer)
    return (yes if calls == 1 else no)(f"a parametrization is computed {calls} time in a solve; copied after use")


def implicit() -> Cell:
    return judge_gradient(check_error())


def phantom() -> Cell:
    return judge_approximation(*(check_error(gradient=Phantom(k, 0.8)) for k in (2, 12)))


def neumann() -> Cell:
    assert len(count_rule(Neumann)) == 1
    return judge_approximation(*(check_error(gradient=Neumann(k)) for k in (2, 12)))


def shine() -> Cell:
    return judge_reuse(check_error(gradient=Shine(), solver=Broyden(memory=60)), check_error(gradient=Neumann(0)))


def reversible() -> Cell:
    assert len(count_rule(Reversible)) == 1
    model, x = Model(gradient=Reversible(9, 0.8)), make_inputs()
    before = z = torch.zeros_like(x)
    for _ in range(9):
        before, z = z, 0.2 * before + 0.8 * model.block(z, x)
    error = find_gradient_error(model(x), z, model.block.linear.weight)
    return (yes if error < 1e-9 else no)(f"off by {error:.0e} from 9 such steps; 2 and 9 steps keep the same")


def in_eval() -> Cell:
    return judge_works(lambda: Model().eval()(make_inputs()).sum().backward(), "the value has its gradient")


def second() -> Cell:
    return judge_second(Model())


def transforms() -> Cell:
    return judge_transforms(Model().eval())


def forward_mode() -> Cell:
    return judge_forward_mode(Model().eval())


def backward_record() -> Cell:
    found = kq.Equilibrium(Block())(make_inputs())
    found.value.sum().backward()
    assert found.backward is not None
    return yes(f"`solution.backward`: residual, steps and status of each of {len(found.backward[0].steps)} samples")


def batch_norm() -> Cell:
    def run(block: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = kq.Equilibrium(block, max_steps=300)(x)
        said = find_warning(lambda: kq.Equilibrium(block, max_steps=300)(x))
        return found.value.detach(), found.converged, "; noticed and said" if said else ""

    return judge_batch_norm(run)


def randomness() -> Cell:
    return judge_loudness(lambda: kq.Equilibrium(Block(drop=0.3), on_failure="return")(make_inputs()))


def forward_failure() -> Cell:
    return judge_loudness(lambda: kq.fixed_point(lambda z: 3 * z + 1, torch.ones(2, 3), solver=Picard()))


def backward_failure() -> Cell:
    return judge_loudness(lambda: Model(gradient=Implicit(max_steps=2))(make_inputs()).sum().backward())


def settings() -> Cell:
    return judge_loudness(lambda: kq.Equilibrium(Block(), max_step=3))  # type: ignore[call-arg]


def bounds() -> Cell:
    cell = kq.cells.DenseCell(kq.kernels.Gaussian(), inputs=6, state=5, features=4)
    found = kq.Equilibrium(cell).eval()(make_inputs())
    assert found.error_bound is not None and found.error_bound.isfinite().all()
    return partly("`error_bound` of the equations of kernels, `kq.certify` of classifiers; none for f")


def compiled() -> Cell:
    return judge_compiled(make_fixed)


def autocast() -> Cell:
    return judge_autocast(make_loose)


def ddp() -> Cell:
    return judge_ddp(Model)


def checkpointing() -> Cell:
    block, x = Block(), make_inputs()
    f = lambda z, x: torch.utils.checkpoint.checkpoint(block, z, x, use_reentrant=False)  # noqa: E731
    value = kq.fixed_point(f, torch.zeros_like(x), x, solver=Anderson(), **TIGHT).value
    truth = unroll(lambda z: block(z, x), torch.zeros_like(x))
    return judge_gradient(find_gradient_error(value, truth, block.linear.weight))
