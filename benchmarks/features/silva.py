"""What silva-networks does, by its `SILVADEQEngine` and `solve_equilibrium`."""

from functools import partial
from typing import Any

import silva_networks as silva
import torch
from torch import Tensor, nn

from .judge import (
    Block,
    Cell,
    Counting,
    count_kept,
    count_normed,
    find_absent,
    find_error,
    find_gradient_error,
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

PACKAGE = "silva_networks"
TIGHT = {"tol": 1e-12, "backward_tol": 1e-12, "max_iter": 300, "backward_max_iter": 300, "anderson_batch_dims": 1}


class Model(nn.Module):
    """A block solved by silva-networks."""

    def __init__(self, **settings: Any):
        super().__init__()
        self.block = Block()
        self.config = silva.SolverConfig(**({"solver": "anderson", "backward_mode": "implicit", **TIGHT} | settings))

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.solve(x).z
        return value

    def solve(self, x: Tensor) -> Any:
        inputs = (x,) if x.requires_grad else ()
        parameters = self.block.parameters()
        f = lambda z: self.block(z, x)  # noqa: E731
        return silva.solve_equilibrium(f, torch.zeros_like(x), self.config, params=parameters, tensors=inputs)


def make_fixed() -> Model:
    return Model(solver="picard", max_iter=5, backward_mode="phantom", phantom_steps=3, track_residuals=False)


def make_loose() -> Model:
    return Model(tol=1e-2, backward_tol=3e-2)


def solve(f: Any, z0: Any, **settings: Any) -> Any:
    default = {"max_iter": 90, "tol": 1e-3, "stop_mode": "relative", "anderson_batch_dims": 1}
    return silva.solve_equilibrium(f, z0, silva.SolverConfig(**(default | settings)))


def check_error(**settings: Any) -> float:
    model, x = Model(**settings), make_inputs()
    truth = unroll(lambda z: model.block(z, x), torch.zeros_like(x))
    return find_gradient_error(model(x), truth, model.block.linear.weight)


def several_tensors() -> Cell:
    def run() -> None:
        z = silva.silva_deq(lambda z: (0.5 * z[0] + 1, 0.5 * z[1] + 1), (torch.zeros(5, 6), torch.zeros(5, 2)))
        assert z[1].shape == (5, 2) and (z[0] - 2).abs().max() < 1e-2

    cell = judge_works(run, "")
    return partly("a tuple of (5, 6) and (5, 2), solved as one sample") if cell.answer == "yes" else cell


def several_dtypes() -> Cell:
    start = (torch.zeros(5, 6), torch.zeros(5, 2, dtype=torch.float32))
    return judge_works(lambda: silva.silva_deq(lambda z: (0.5 * z[0] + 1, 0.5 * z[1] + 1), start), "a tuple")


def dicts() -> Cell:
    return judge_works(lambda: silva.silva_deq(lambda z: {"u": 0.5 * z["u"]}, {"u": torch.ones(2, 3)}), "a dict")


def any_module() -> Cell:
    engine = silva.SILVADEQEngine()
    engine(lambda z: torch.tanh(0.5 * z), torch.ones(5, 6))
    return partly(f"f is given at the call; the engine holds {len(list(engine.parameters()))} parameters")


def named_inputs() -> Cell:
    block, x = Block(), make_inputs()
    error = find_error(lambda: silva.SILVADEQEngine()(block, torch.zeros_like(x), x=x, scale=0.5))
    return partly(f"by a closure, tensors named once more in `tensors=`; to the engine: {error}")


def start() -> Cell:
    block, x = Block(), make_inputs()
    cold = solve(lambda z: block(z, x), torch.zeros_like(x))
    warm = solve(lambda z: block(z, x), cold.z.detach())
    return yes(f"{cold.iterations} steps from 0, {warm.iterations} from the solution")


def limits() -> Cell:
    config = silva.SILVADEQConfig(forward_max_iter=10, eval_factor=3.0)
    assert config.solver_config(training=False).max_iter == 30
    error = find_error(lambda: silva.SILVADEQConfig(eval_tol=1e-9))
    return partly(f"steps, by `eval_factor`; a tolerance: {error}")


def drawn_steps() -> Cell:
    return judge_works(lambda: solve(torch.cos, torch.zeros(2, 3), max_iter=range(3, 6)), "a range")


def status() -> Cell:
    found = solve(torch.cos, torch.zeros(2, 3))
    return no(f"`converged` is {found.converged} for the whole batch")


def steps() -> Cell:
    return no(f"`iterations` is {solve(Counting(), torch.zeros(16, 2)).iterations} for the whole batch")


def leaving() -> Cell:
    f = Counting()
    found = solve(f, torch.zeros(16, 2), max_iter=200, tol=1e-6)
    return judge_rows(f.rows, found.iterations)


def apart() -> Cell:
    rates = torch.linspace(0.2, 0.9, 8)[:, None]
    both = [solve(lambda z, r=r: r * z + 1, torch.zeros(len(r), 2)).z[:1] for r in (rates, rates[:1])]
    far = float((both[0] - both[1]).abs().max())
    return (yes if far == 0 else no)(f"a sample's answer moves by {far:.0e} with its neighbours")


def residuals() -> Cell:
    found = solve(Counting(), torch.zeros(16, 2))
    return partly(f"{len(found.residuals)} numbers, each the worst of the batch")


def states() -> Cell:
    plain, anderson, implicit = (
        Model(indexing=(2, 4), max_iter=20, **more).solve(make_inputs()).states
        for more in ({"solver": "picard", "backward_mode": "unrolled"}, {"backward_mode": "unrolled"}, {})
    )
    assert all(t.requires_grad for t in plain) and not any(t.requires_grad for t in (*anderson, *implicit))
    return partly("by `indexing`; with a gradient for unrolled Picard only, not for Anderson or the implicit gradient")


def jacobian() -> Cell:
    block, x = Block(), make_inputs()
    penalty = silva.hutchinson_jacobian_norm(lambda z: block(z, x), torch.zeros_like(x))
    torch.autograd.grad(penalty, block.linear.weight)
    return yes(f"with a graph, {penalty.numel()} number for the batch")


def radius() -> Cell:
    z = torch.ones(1, 2)
    real = silva.spectral_radius(lambda z: z * torch.tensor([0.7, 0.2]), z)
    return judge_radius(torch.tensor(real), torch.tensor(silva.spectral_radius(turn, z)), "one number for the batch")


def masks() -> Cell:
    drop, x = silva.SILVAVariationalDropout(0.5), make_inputs()
    return judge_masks(drop, lambda: solve(lambda z: torch.tanh(0.5 * drop(z) + x), torch.ones_like(x), tol=1e-9))


def any_dropout() -> Cell:
    drop, x = nn.Dropout(0.5), make_inputs()
    return judge_masks(drop, lambda: solve(lambda z: torch.tanh(0.5 * drop(z) + x), torch.ones_like(x)))


def norms() -> Cell:
    x = make_inputs()
    calls = count_normed(lambda block: solve(lambda z: block(z, x), torch.zeros_like(x)))
    return no(f"PyTorch's parametrization is computed {calls} times in a solve")


def implicit() -> Cell:
    return judge_gradient(check_error())


def phantom() -> Cell:
    few, many = (check_error(backward_mode="phantom", phantom_steps=k, phantom_tau=0.8) for k in (2, 12))
    return judge_approximation(few, many)


def neumann() -> Cell:
    few, many = (check_error(backward_mode="neumann", neumann_terms=k) for k in (2, 12))
    x = make_inputs()
    kept = {count_kept(partial(Model(backward_mode="neumann", neumann_terms=k), x)) for k in (2, 12)}
    assert len(kept) == 1
    return judge_approximation(few, many)


def shine() -> Cell:
    learnt = check_error(solver="broyden", backward_mode="shine", history=60, anderson_batch_dims=0)
    return judge_reuse(learnt, check_error(backward_mode="jfb"))


def reversible() -> Cell:
    return find_absent(PACKAGE, "reversible gradient", "reversible adjoint", "reversible step", "RevDEQ")


def in_eval() -> Cell:
    return judge_works(lambda: Model().eval()(make_inputs()).sum().backward(), "the value has its gradient")


def second() -> Cell:
    return judge_second(Model())


def transforms() -> Cell:
    return judge_transforms(Model())


def forward_mode() -> Cell:
    return judge_forward_mode(Model())


def backward_record() -> Cell:
    model = Model()
    found = model.solve(make_inputs())
    found.z.sum().backward()
    return yes(f"`info` has {', '.join(sorted(k for k in found.info if k.startswith('backward_')))}")


def batch_norm() -> Cell:
    def run(block: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, str]:
        found = solve(lambda z: block(z, x), torch.zeros_like(x), solver="anderson", max_iter=300)
        everyone = torch.full((len(x),), found.converged)
        return found.z.detach(), everyone, f"; the batch is{'' if found.converged else ' not'} called converged"

    return judge_batch_norm(run)


def randomness() -> Cell:
    block, x = Block(drop=0.3), make_inputs()
    return judge_loudness(lambda: solve(lambda z: block(z, x), torch.zeros_like(x)))


def forward_failure() -> Cell:
    return judge_loudness(lambda: solve(lambda z: 3 * z + 1, torch.ones(2, 3)))


def backward_failure() -> Cell:
    return judge_loudness(lambda: Model(backward_max_iter=2)(make_inputs()).sum().backward())


def settings() -> Cell:
    return judge_loudness(lambda: silva.SolverConfig(max_iters=3))


def bounds() -> Cell:
    model = silva.SILVALipschitzRobustEquilibrium(6, 4, 3)
    radius = model(make_inputs(), return_result=True).certified_radius
    return partly(f"radii {tuple(radius.shape)} of a layer of its own, `SILVALipschitzRobustEquilibrium`; none for f")


def compiled() -> Cell:
    return judge_compiled(make_fixed)


def autocast() -> Cell:
    return judge_autocast(make_loose)


def ddp() -> Cell:
    return judge_ddp(Model)


def checkpointing() -> Cell:
    model, x = Model(), make_inputs()
    f = lambda z: torch.utils.checkpoint.checkpoint(model.block, z, x, use_reentrant=False)  # noqa: E731
    value = silva.solve_equilibrium(f, torch.zeros_like(x), model.config, params=model.block.parameters()).z
    truth = unroll(lambda z: model.block(z, x), torch.zeros_like(x))
    return judge_gradient(find_gradient_error(value, truth, model.block.linear.weight))
