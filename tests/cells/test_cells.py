"""Cells: what `bind` computes once, where a comes from, what a cell keeps and what it reports."""

import math

import pytest
import torch
from helpers import CELLS, KERNELS, Reference, cell_of, input_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import kerneq
from kerneq import equation
from kerneq.cells import ConvCell, DenseCell
from kerneq.equation import Equation
from kerneq.equilibrium import hook_solves
from kerneq.kernels import Adaptive, Gaussian, Linear, Polynomial, Sigmoid
from kerneq.solvers import Anderson
from kerneq.solvers.base import StateSpace

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("form", CELLS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_bind_gives_the_equation_with_its_four_names(kernel, form):
    cell, x = cell_of(form, KERNELS[kernel]), input_of(form)
    f = cell.bind(x)
    assert isinstance(f, Equation)
    z = StateSpace(f).start(cell.initial(f)).z
    assert z.shape == Reference(cell, x).state and not z.any()
    assert f(z).shape == f.drive(z).shape == z.shape and f.energy(z).shape == (4,)
    assert f.bound.shape == () and f.bound > 0 and not f.bound.requires_grad


@pytest.mark.parametrize(
    "kernel, in_state", [(Linear(), True), (Sigmoid(), True), (Polynomial(), True), (Gaussian(), False)]
)
def test_a_lives_in_the_state_or_in_the_features_as_the_kernel_asks(kernel, in_state):
    dense = DenseCell(kernel, inputs=3, state=5, features=8)
    conv = ConvCell(kernel, inputs=2, state=3, features=8)
    assert dense.bind(input_of("dense")).binding.a.shape == (4, 5 if in_state else 8)
    assert conv.bind(input_of("conv")).binding.a.shape == (4, 3 if in_state else 8, 4, 4)


def test_a_module_of_ones_own_may_make_a():
    inject = nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6))
    cell = DenseCell(Gaussian(), inputs=3, state=5, features=6, inject=inject)
    x = input_of("dense").requires_grad_()
    assert torch.equal(cell.bind(x).binding.a, inject(x))
    kerneq.Equilibrium(cell)(x).value.sum().backward()
    assert x.grad.abs().max() > 0 and all(p.grad is not None for p in inject.parameters())


def test_what_does_not_depend_on_z_is_computed_once_a_solve():
    calls = []

    class Counted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return super().forward(x)

    cell = DenseCell(Gaussian(), inputs=3, state=5, features=6, inject=Counted(3, 6))
    s = kerneq.Equilibrium(cell, tol=1e-10, max_steps=100)(input_of("dense"))
    assert int(s.steps.max()) > 5 and len(calls) == 1


@pytest.mark.parametrize("kernel", [Polynomial(2), Polynomial(3, 0.5), Sigmoid()], ids=str)
def test_an_inner_kernel_keeps_the_lengths_of_samples_relative_to_each_other_up_to_a_limit(kernel):
    cell = cell_of("conv", kernel)
    longest = kernel.max_length(cell.norm)
    x = input_of("conv") * torch.tensor([1e-4, 1.0, 10.0, 1e3]).view(-1, 1, 1, 1)
    with torch.no_grad():
        cell.inject.bias.zero_()
        a, raw = cell.bind(x).binding.a, cell.inject(x)
    sizes = a.flatten(1).norm(dim=1)
    typical = 1.25 * raw[0].numel() ** 0.5
    torch.testing.assert_close(sizes, longest * (raw.flatten(1).norm(dim=1) / typical).clamp(max=1))
    assert sizes[0] < sizes[1] < longest
    torch.testing.assert_close(sizes[2:], torch.full((2,), longest))
    cosine = torch.nn.functional.cosine_similarity(a.flatten(1), raw.flatten(1))
    torch.testing.assert_close(cosine, torch.ones(4))


@pytest.mark.parametrize("form", CELLS)
@pytest.mark.parametrize("norm", [0.5, 1.0, 3.0])
def test_norm_bounds_the_whole_equation(form, norm):
    # of a polynomial kernel nine tenths of norm² are used; a sigmoid may be steeper, as E is convex all the same
    parts = {Linear(): 1.0, Gaussian(split=2, hidden=6): 1.0, Polynomial(2): 0.9, Sigmoid(): 0.5 + 3**0.5}
    for kernel, part in parts.items():
        f = cell_of(form, kernel, norm=norm, stretch=30.0).eval().bind(input_of(form))
        assert f.bound == pytest.approx(part * norm**2, rel=1e-6)


def test_a_cell_reports_its_norm_before_and_under_the_bound():
    cell, x = cell_of("conv", KERNELS["gaussian"], norm=0.9), input_of("conv")
    assert set(cell.diagnostics()) == {"gamma"}  # nothing to tell before it has seen data
    kerneq.Equilibrium(cell)(x)
    told = cell.diagnostics()
    assert told["norm_raw"] > 0.9 == pytest.approx(told["norm"]) and told["gamma"] == 0.5


@pytest.mark.parametrize("kernel", ["linear", "quadratic", "sigmoid", "gaussian"])
def test_a_cell_reports_the_energy_it_has_seen(kernel):
    """At σ(d(z)): a step of Anderson's may end below zero, where the energy is infinite."""
    cell, found = cell_of("conv", KERNELS[kernel]), []
    layer = kerneq.Equilibrium(cell, solver=Anderson(), tol=1e-10, max_steps=3)
    with hook_solves(layer, lambda layer, f, z: found.append((f.energy(z).mean(), f.energy(f(z)).mean().item()))):
        layer(input_of("conv"))
    ((mixed, energy),) = found
    assert mixed.isinf() == (kernel != "gaussian") and math.isfinite(energy)
    assert cell.diagnostics()["energy"] == pytest.approx(energy, rel=1e-6)


@pytest.mark.parametrize("form", CELLS)
def test_a_batch_of_one_and_a_picture_of_another_size_work(form):
    cell = cell_of(form, KERNELS["gaussian"])
    assert kerneq.Equilibrium(cell)(input_of(form, batch=1)).converged.all()
    if form == "conv":
        assert kerneq.Equilibrium(cell)(torch.randn(2, 2, 6, 8)).value.shape == (2, 3, 6, 8)


def test_the_defaults_of_the_design_page_can_be_built():
    cell = kerneq.cells.ConvCell(
        kerneq.kernels.Gaussian(gamma=kerneq.kernels.Adaptive(0.2), patch=2, split=8, hidden=64),
        inputs=3,
        state=16,
        features=8,
        size=3,
        norm=1.0,
    )
    layer = kerneq.Equilibrium(cell)
    s = layer(torch.randn(2, 3, 8, 8))
    assert s.converged.all() and s.value.shape == (2, 16, 8, 8) and (s.value >= 0).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_compiled_map_gives_the_same_equilibrium_and_gradient():
    # One sample: every batch size that finished samples leave behind is compiled anew.
    cell, x = cell_of("dense", KERNELS["gaussian"]), input_of("dense", batch=1)
    # Picard evaluates the map itself; where `Proximal` solves in the features there is none to compile.
    layer = kerneq.Equilibrium(cell, solver=kerneq.solvers.Picard(), tol=1e-10, max_steps=200).eval()
    expected = layer(x).value
    (before,) = torch.autograd.grad(expected.square().sum(), cell.operator.weight)
    cell.compile_map()
    equation._compiled.cache_clear()
    got = layer(x).value
    assert equation._compiled.cache_info().misses == 1
    layer.train()
    layer(x)
    asked = equation._compiled.cache_info()
    cell.diagnostics()  # its energy is not worth a program of its own
    assert equation._compiled.cache_info() == asked
    (after,) = torch.autograd.grad(got.square().sum(), cell.operator.weight)
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-9)


def test_diagnostics_change_nothing_in_training():
    found = []
    for told in (False, True):
        cell = cell_of("dense", KERNELS["gaussian"], stretch=1.0)
        layer, x = kerneq.Equilibrium(cell), input_of("dense")
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.3)
        for _ in range(20):
            optimizer.zero_grad()
            (layer(x).value - 1).square().mean().backward()
            optimizer.step()
            if told:
                cell.diagnostics()
        found.append(torch.cat([p.detach().flatten() for p in layer.parameters()]))
    assert torch.equal(*found)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_sees_what_the_first_pass_saw_and_moves_statistics_once(reentrant):
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        cell = DenseCell(Gaussian(Adaptive()), inputs=5, state=8, features=6, norm=1.0)
        layer, x = kerneq.Equilibrium(cell, tol=1e-6, max_steps=200).double(), torch.randn(40, 5, dtype=torch.float64)
        x.requires_grad_()
        network = nn.Sequential(layer, kerneq.Value())
        for _ in range(3):  # γ moves most in the first step
            value = checkpoint(network, x, use_reentrant=reentrant) if checkpointed else network(x)
            value.square().sum().backward()
        tensors = [p.grad for p in (x, *layer.parameters())] + [t.double() for t in layer.state_dict().values()]
        found.append(torch.cat([t.flatten() for t in tensors]))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-10)
