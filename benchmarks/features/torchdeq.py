"""What torchdeq does."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torchdeq
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

PACKAGE = "torchdeq"
TIGHT = {
    "f_tol": 1e-12,
    "b_tol": 1e-12,
    "f_stop_mode": "rel",
    "b_stop_mode": "rel",
    "f_max_iter": 300,
    "b_max_iter": 300,
}


class Model(nn.Module):
    """A block solved by torchdeq."""

    def __init__(self, **settings: Any):
        super().__init__()
        self.block, self.deq = Block(), torchdeq.get_deq(**({"ift": True, **TIGHT} | settings))

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.deq(lambda z, tau=1.0: self.block(z, x), torch.zeros_like(x))
        value: Tensor = states[-1]
        return value


def make_fixed() -> Model:
    return Model(f_solver="simple_fixed_point_iter", f_max_iter=5, ift=False, grad=3)


def make_loose() -> Model:
    return Model(f_tol=1e-2, b_tol=3e-2)


def solve(f: Any, z0: Any, train: bool = True, **settings: Any) -> Any:
    return torchdeq.get_deq(**({"f_max_iter": 90, "f_stop_mode": "rel"} | settings)).train(train)(f, z0)


def check_error(**settings: Any) -> float:
    model, x = Model(**settings), make_inputs()
    truth = unroll(lambda z: model.block(z, x), torch.zeros_like(x))
    return find_gradient_error(model(x), truth, model.block.linear.weight)


def several_tensors() -> Cell:
    def run() -> None:
        z, _ = solve(lambda u, v: (0.5 * u + 1, 0.5 * v + 1), (torch.zeros(5, 6), torch.zeros(5, 2)))
        assert [tuple(t.shape) for t in z[-1]] == [(5, 6), (5, 2)] and (z[-1][0] - 2).abs().max() < 1e-2

    return judge_works(run, "a tuple of (5, 6) and (5, 2)")


def several_dtypes() -> Cell:
    z, _ = solve(lambda u, v: (0.5 * u + 1, 0.5 * v + 1), (torch.zeros(5, 6), torch.zeros(5, 2, dtype=torch.float32)))
    kept = z[-1][1].dtype == torch.float32
    return yes("float64 and float32 stay") if kept else partly(f"float32 comes back as {z[-1][1].dtype}")


def dicts() -> Cell:
    return judge_works(lambda: solve(lambda z: {"u": 0.5 * z["u"]}, {"u": torch.ones(2, 3)}), "a dict")


def named_inputs() -> Cell:
    deq, block, x = torchdeq.get_deq(), Block(), make_inputs()
    error = find_error(lambda: deq(block, torch.zeros_like(x), x=x, scale=0.5))
    return partly(f"by a closure; given to the layer: {error}")


def any_module() -> Cell:
    deq = torchdeq.get_deq()
    solve(lambda z: Block()(z, make_inputs()), torch.zeros(5, 6))
    return partly(f"f is given at the call; the layer holds {len(list(deq.parameters()))} parameters")


def start() -> Cell:
    block, x = Block(), make_inputs()
    z, cold = solve(lambda z: block(z, x), torch.zeros_like(x))
    _, warm = solve(lambda z: block(z, x), z[-1].detach())
    return yes(f"{int(cold['nstep'].max())} steps from 0, {int(warm['nstep'].max())} from the solution")


def limits() -> Cell:
    assert torchdeq.get_deq(eval_f_max_iter=7).eval_f_max_iter == 7
    known = hasattr(torchdeq.get_deq(eval_f_tol=1e-9), "eval_f_tol")
    assert not known
    return partly("steps, by `eval_f_max_iter`; `eval_f_tol=1e-9` is swallowed")


def drawn_steps() -> Cell:
    error = find_error(lambda: solve(torch.cos, torch.zeros(2, 3), f_max_iter=range(3, 6)))
    return no(f"f_max_iter=range(3, 6): {error}")


def status() -> Cell:
    _, info = solve(torch.cos, torch.zeros(2, 3))
    return partly(f"a residual for each sample, {tuple(info['rel_lowest'].shape)}; none says whether it converged")


def steps() -> Cell:
    f = Counting()
    _, info = solve(f, torch.zeros(16, 2), f_tol=1e-6)
    few, many = int(info["nstep"].min()), int(info["nstep"].max())
    return (yes if few < many else no)(f"from {few} to {many}")


def leaving() -> Cell:
    f = Counting()
    _, info = solve(f, torch.zeros(16, 2), False, f_max_iter=200, f_tol=1e-6)
    return judge_rows(f.rows, int(info["nstep"].max()))


def apart() -> Cell:
    rates = torch.linspace(0.2, 0.9, 8)[:, None]
    both = [solve(lambda z, r=r: r * z + 1, torch.zeros(len(r), 2), False)[0][-1][:1] for r in (rates, rates[:1])]
    far = float((both[0] - both[1]).abs().max())
    return (yes if far == 0 else no)(f"a sample's answer moves by {far:.0e} with its neighbours")


def residuals() -> Cell:
    _, info = solve(Counting(), torch.zeros(16, 2))
    return yes(f"`rel_trace` {tuple(info['rel_trace'].shape)}")


def states() -> Cell:
    block, x = Block(), make_inputs()
    z, _ = solve(lambda z: block(z, x), torch.zeros_like(x), n_states=3)
    return (yes if len(z) == 3 and all(t.requires_grad for t in z) else no)(f"{len(z)} states with gradients")


def jacobian() -> Cell:
    block, x = Block(), make_inputs()
    z = torch.zeros_like(x).requires_grad_()
    penalty = torchdeq.jac_reg(block(z, x), z)
    torch.autograd.grad(penalty, block.linear.weight)
    return yes(f"with a graph, {penalty.numel()} number for the batch")


def radius() -> Cell:
    def find(f: Callable[[Tensor], Tensor]) -> Tensor:
        z = torch.ones(1, 2).requires_grad_()
        return torch.as_tensor(torchdeq.power_method(f(z), z)[1])

    return judge_radius(find(lambda z: z * torch.tensor([0.7, 0.2])), find(turn), "a number a sample")


def masks() -> Cell:
    drop, x = torchdeq.VariationalDropout(0.5), make_inputs()
    return judge_masks(drop, lambda: solve(lambda z: torch.tanh(0.5 * drop(z) + x), torch.ones_like(x), f_tol=1e-9))


def any_dropout() -> Cell:
    drop, x = nn.Dropout(0.5), make_inputs()
    return judge_masks(drop, lambda: solve(lambda z: torch.tanh(0.5 * drop(z) + x), torch.ones_like(x)))


def norms() -> Cell:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in ("weight_norm", "spectral_norm"):
            torchdeq.apply_norm(nn.Sequential(nn.Linear(3, 3)), kind)
    x = make_inputs()
    calls = count_normed(lambda block: solve(lambda z: block(z, x), torch.zeros_like(x)))
    return yes(f"by `apply_norm`, and `reset_norm` at each call; PyTorch's own parametrization: {calls} times")


def implicit() -> Cell:
    return judge_gradient(check_error())


def phantom() -> Cell:
    few, many = (check_error(ift=False, grad=k, tau=0.8) for k in (2, 12))
    return judge_approximation(few, many)


def neumann() -> Cell:
    model, x = Model(ift=False, grad=2), make_inputs()
    kept = [count_kept(partial(m, x)) for m in (model, Model(ift=False, grad=8))]
    return no(f"`grad=k` keeps k evaluations: {kept[0]} numbers for 2, {kept[1]} for 8")


def shine() -> Cell:
    return find_absent(PACKAGE, "shine")


def reversible() -> Cell:
    return find_absent(PACKAGE, "reversible")


def in_eval() -> Cell:
    return (yes if Model().eval()(make_inputs()).requires_grad else no)("the value in eval() has no gradient")


def second() -> Cell:
    return judge_second(Model())


def transforms() -> Cell:
    return judge_transforms(Model())


def forward_mode() -> Cell:
    return judge_forward_mode(Model())


def backward_record() -> Cell:
    written: list[object] = []
    block, x = Block(), make_inputs()
    deq = torchdeq.get_deq(ift=True).train()
    deq(lambda z: block(z, x), torch.zeros_like(x), backward_writer=written.append)[0][-1].sum().backward()
    return (yes if written else no)("`backward_writer` is called with it")


def batch_norm() -> Cell:
    def run(block: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, str]:
        z, info = solve(lambda z: block(z, x), torch.zeros_like(x), f_solver="anderson", f_max_iter=300)
        return z[-1].detach(), info["rel_lowest"] <= 1e-3, "; samples never leave the batch"

    return judge_batch_norm(run)


def randomness() -> Cell:
    block, x = Block(drop=0.3), make_inputs()
    return judge_loudness(lambda: solve(lambda z: block(z, x), torch.zeros_like(x)))


def forward_failure() -> Cell:
    return judge_loudness(lambda: solve(lambda z: 3 * z + 1, torch.ones(2, 3)))


def backward_failure() -> Cell:
    return judge_loudness(lambda: Model(b_max_iter=2)(make_inputs()).sum().backward())


def settings() -> Cell:
    return judge_loudness(lambda: torchdeq.get_deq(f_maxiter=3))


def autocast() -> Cell:
    plain = judge_autocast(make_loose)
    error = find_error(lambda: solve(torch.cos, torch.zeros(2, 8, dtype=torch.bfloat16), f_solver="anderson"))
    return partly(f"plain iteration; Anderson in bfloat16: {error}") if plain.answer == "yes" and error else plain


def bounds() -> Cell:
    return find_absent(PACKAGE, "error bound", "certif")


def compiled() -> Cell:
    return judge_compiled(make_fixed)


def ddp() -> Cell:
    return judge_ddp(Model)


def checkpointing() -> Cell:
    model, x = Model(), make_inputs()
    value = model.deq(lambda z: torchdeq.mem_gc(model.block, (z, x)), torch.zeros_like(x))[0][-1]
    truth = unroll(lambda z: model.block(z, x), torch.zeros_like(x))
    return judge_gradient(find_gradient_error(value, truth, model.block.linear.weight))
