"""Random cells and functions, solvers, gradients, dtypes and limits against float64: what is marked converged is, and
every `error_bound` holds. (The campaign behind it took 2 000 seeds; these are a few.)"""

import copy
import random
import warnings

import pytest
import torch
from helpers import CELLS, KERNELS, cell_of, input_of
from torch import nn

import kerneq as kq
from kerneq.gradients import Implicit, Neumann, Phantom, Reversible, Unrolled
from kerneq.solvers import Anderson, Broyden, Newton, Picard, Proximal

SOLVERS = (Picard(), Picard(0.6), Anderson(), Anderson(2, relaxation=0.5), Broyden(), Broyden(3), Newton())
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
ACTIVATIONS = (torch.tanh, torch.sin, nn.functional.softplus, nn.functional.relu, lambda y: y)


def measure(f, z):
    """The residual ‖f(z) − z‖ / ‖f(z)‖ of each sample, and ‖f(z)‖."""
    with torch.no_grad():
        image = f(z)
    size = image.flatten(1).norm(dim=1)
    return (image - z).flatten(1).norm(dim=1) / size.clamp_min(1e-300), size.clamp_min(1e-300)


def draw_limits(draw):
    """Settings of a solve: they may be too tight, or too few steps."""
    return {
        "tol": draw.choice((None, 1e-2, 1e-3, 1e-5)),
        "max_steps": draw.randint(1, 50),
        "check_every": draw.choice((None, None, 1, 3, 50)),
        "on_failure": "return",
    }


@pytest.mark.parametrize("seed", range(40))
def test_a_sample_of_a_function_that_is_marked_converged_is(seed):
    draw, size = random.Random(seed), 6
    torch.manual_seed(seed)
    dtype, batch, sigma = draw.choice(DTYPES), draw.randint(1, 5), draw.choice(ACTIVATIONS)
    linear = nn.Linear(size, size, dtype=torch.float64)
    linear.weight.data *= draw.choice((0.3, 0.9, 2.0)) / torch.linalg.matrix_norm(linear.weight, 2).detach()
    linear, wide = linear.to(dtype), copy.deepcopy(linear.to(dtype)).double()
    x = (draw.choice((1e-6, 1.0, 1e4)) * torch.randn(batch, size, dtype=torch.float64)).to(dtype).requires_grad_()
    rule = draw.choice((Implicit(), Implicit(Picard()), Phantom(), Neumann(2), Unrolled(9), Reversible(9)))
    layer = kq.Equilibrium(
        lambda z, x: sigma(linear(z) + x), solver=draw.choice(SOLVERS), gradient=rule, **draw_limits(draw)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what fails, forward or backward, may say so
        s = layer(x)
        s.value.float().sum().backward()
    inputs = x.detach().double()
    true, image = measure(lambda z: sigma(wide(z) + inputs), s.value.detach().double())
    inside = 1 + inputs.norm(dim=1) + s.value.detach().double().norm(dim=1)
    rounding = 30 * torch.finfo(dtype).eps * (1 + inside / image)
    assert not (s.converged & ~(true <= 1.5 * s.tol + rounding)).any(), (layer, true, s.residual)


@pytest.mark.parametrize("seed", range(40))
def test_a_sample_of_a_cell_that_is_marked_converged_is_and_its_error_bound_holds(seed):
    draw = random.Random(seed)
    form, dtype, batch, norm = (
        draw.choice(CELLS),
        draw.choice(DTYPES[:2]),
        draw.randint(1, 5),
        draw.choice((0.5, 0.9, 1.4)),
    )
    kernel = draw.choice(list(KERNELS.values()))
    cell, x = cell_of(form, kernel, norm=norm, seed=seed).eval().to(dtype), input_of(form, batch, seed).to(dtype)
    solver = draw.choice((*SOLVERS, Proximal(), Proximal(memory=0)))
    layer = kq.Equilibrium(cell, solver=solver, **draw_limits(draw)).eval()
    with torch.no_grad():
        s = layer(x)
        f = copy.deepcopy(cell).double().bind(x.double())
        true, size = measure(f, s.value.double())
        rounding = 60 * torch.finfo(dtype).eps * (1 + f.binding.a.flatten(1).norm(dim=1) / size.clamp_min(1e-12))
        assert not (s.converged & ~(true <= s.tol + rounding)).any(), (layer, true, s.residual)
        known = s.error_bound.isfinite()
        if not known.any():
            return
        exact = kq.solve(f, None, Proximal(), tol=1e-13, max_steps=3000)
        error, slack = (s.value - exact.value).flatten(1).norm(dim=1), rounding * exact.value.flatten(1).norm(dim=1)
        bound = s.error_bound * (1 + 1e-3) + exact.error_bound + slack * f.amplification
        assert (error <= bound)[known].all(), (layer, error, s.error_bound)
