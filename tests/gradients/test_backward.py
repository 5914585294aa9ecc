"""The backward solve: never silent about failure, differentiable again, usable in half precision."""

import copy
import dataclasses
import warnings

import pytest
import torch
from helpers import GRADIENTS, KERNELS, affine, away_from_kinks, cell_of, input_of
from torch.utils.flop_counter import FlopCounterMode

import kerneq
from kerneq.conjugate_gradient import conjugate_gradient
from kerneq.gradients import ConjugateGradient, Implicit, InFeatures, Phantom, Point, Unrolled, implicit
from kerneq.solution import EquilibriumError, Status
from kerneq.solvers import Anderson, Broyden, Newton, Picard, Proximal

pytestmark = pytest.mark.usefixtures("float64")


def layer_of(rule, form="dense", kernel="gaussian", **more) -> tuple[kerneq.Equilibrium, torch.Tensor]:
    cell = cell_of(form, KERNELS[kernel], **more).eval()
    layer = kerneq.Equilibrium(cell, gradient=rule, tol=1e-14, max_steps=400).eval()
    return layer, away_from_kinks(cell, form)


@pytest.mark.parametrize("rule", [None, ConjugateGradient(), InFeatures(), Picard(), Anderson()], ids=str)
def test_a_failed_backward_solve_warns_by_default(rule):
    layer, x = layer_of(Implicit(rule, tol=1e-12, max_steps=1))
    value = layer(x).value.sum()
    with pytest.warns(RuntimeWarning, match="The backward solve failed.*step limit.*max_steps"):
        value.backward()


@pytest.mark.parametrize("rule", [None, InFeatures(), Picard()], ids=str)
def test_a_failed_backward_solve_raises_if_asked(rule):
    layer, x = layer_of(Implicit(rule, tol=1e-12, max_steps=1, on_failure="raise"))
    value = layer(x).value.sum()
    with pytest.raises(EquilibriumError, match="The backward solve failed") as failure:
        value.backward()
    assert failure.value.solution.status is Status.MAX_STEPS


def test_a_failed_backward_solve_is_silent_only_when_told_to_return():
    layer, x = layer_of(Implicit(tol=1e-12, max_steps=1, on_failure="return"))
    layer(x).value.sum().backward()
    assert layer.cell.operator.weight.grad.isfinite().all()


@pytest.mark.parametrize("rule", [None, InFeatures(), Anderson()], ids=str)
def test_a_nan_from_the_loss_is_reported_and_not_turned_into_zeros(rule):
    layer, x = layer_of(Implicit(rule))
    value = layer(x).value
    with pytest.warns(RuntimeWarning, match="infinite or NaN"):
        (value.sum() * torch.nan).backward()


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("solver", [None, InFeatures(), ConjugateGradient(), Anderson()], ids=str)
def test_a_sample_whose_gradient_is_no_number_passes_none_on_and_the_others_do(solver, bad):
    """Where it became 0 below the layer, a scaler of gradients would not notice an overflow."""
    layer, x = layer_of(Implicit(solver, on_failure="return"))
    value = layer(x.requires_grad_()).value
    g = torch.ones_like(value)
    g[1, value[1].argmax()] = bad
    (got,) = torch.autograd.grad(value, x, g)
    assert got.isfinite().all(1).tolist() == [sample != 1 for sample in range(len(x))]


def test_nor_does_such_a_sample_spoil_the_others_of_a_plain_function():
    A, b, z_star = affine()
    b.requires_grad_()
    z = Implicit(on_failure="return").attach(lambda z: z @ A.mT + b, Point(z_star)).z
    g = torch.ones_like(z)
    g[1] = torch.nan
    (got,) = torch.autograd.grad(z, b, g)
    assert got.isfinite().all(1).tolist() == [True, False, True]


@pytest.mark.parametrize("kernel", ["gaussian", "sigmoid"])
@pytest.mark.parametrize("solver", [None, InFeatures(), ConjugateGradient(), Anderson(), Picard(0.5)], ids=str)
def test_the_gradient_in_entries_where_the_slope_of_sigma_is_zero_does_not_matter_whatever_it_is(solver, kernel):
    layer, x = layer_of(Implicit(solver, tol=1e-4), kernel=kernel)
    layer, x = layer.float(), x.float().requires_grad_()
    layer.tol = 1e-5
    value = layer(x).value
    off, g = value == 0, torch.full_like(value, 1e-12)
    assert off.any()
    (expected,) = torch.autograd.grad(value, x, g, retain_graph=True)
    for size in (1e30, torch.inf, torch.nan):
        (got,) = torch.autograd.grad(value, x, torch.where(off, size, g), retain_graph=True)
        torch.testing.assert_close(got, expected, atol=0, rtol=1e-3)


@pytest.mark.parametrize("kernel", ["gaussian", "linear", "sigmoid"])
@pytest.mark.parametrize("form", ["dense", "conv"])
@pytest.mark.parametrize("solver", [None, ConjugateGradient(), InFeatures(), Anderson(), Broyden(), Newton()], ids=str)
def test_a_gradient_too_small_or_too_large_to_be_squared_is_solved_like_any_other(solver, form, kernel):
    """In float32, against float64; a saturated loss gives such ones, and an attack climbs them."""
    layer, _ = layer_of(Implicit(solver, tol=1e-5), form, kernel)
    x, found = input_of(form), []
    for dtype in (torch.float64, torch.float32):
        layer, x = layer.to(dtype), x.to(dtype).requires_grad_()
        layer.tol = 1e-12 if dtype == torch.float64 else 1e-5
        value = layer(x).value
        g = torch.randn(value.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        g = g * torch.tensor([1e-32, 1.0, 1e32, 0.0]).view(-1, *[1] * (g.dim() - 1))
        found.append(torch.autograd.grad(value, x, g.to(dtype))[0].double().flatten(1))
    expected, got = found
    assert not got[3].any()
    torch.testing.assert_close(
        (got - expected).norm(dim=1)[:3] / expected.norm(dim=1)[:3], torch.zeros(3), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("meet", [False, True])
def test_a_function_is_solved_for_a_gradient_of_any_size_even_if_its_samples_meet(meet):
    """Where they do, one sample's share of the gradient may come from another alone."""
    A, b, _ = affine()
    B = torch.full((3, 3), 0.1)

    def gradient(g: torch.Tensor) -> torch.Tensor:
        x, W = b.to(g.dtype).requires_grad_(), A.to(g.dtype)
        if meet:
            z = kerneq.fixed_point(lambda z: B.to(g.dtype) @ z @ W.mT + x, torch.zeros_like(x), tol=1e-5).value
        else:
            z = kerneq.fixed_point(lambda z, x: z @ W.mT + x, torch.zeros_like(x), x, tol=1e-5).value
        return torch.autograd.grad(z, x, g)[0].double()

    ones = torch.ones_like(b)
    for size in (1e-32, 1e32):
        g = ones * (torch.tensor([[1.0], [0.0], [0.0]]) * size if meet else torch.tensor([[1.0], [size], [1 / size]]))
        got, expected = gradient(g.float()), gradient(g)
        torch.testing.assert_close(
            (got - expected).norm(dim=1) / expected.norm(dim=1), torch.zeros(3), atol=1e-4, rtol=0
        )


def test_an_indefinite_system_ends_with_a_breakdown_that_names_the_remedy():
    A = torch.diag(torch.tensor([1.0, -1.0]))
    b = torch.tensor([[1.0, 2.0], [1.0, 0.0]])
    s = conjugate_gradient(lambda p: p @ A, b, 1e-10, 50, 1)
    assert s.codes.tolist() == [Status.BREAKDOWN.code, Status.CONVERGED.code]
    torch.testing.assert_close(s.value[1], b[1])  # its mate is solved all the same
    assert "Implicit(solver=Anderson())" in str(EquilibriumError(s, "backward"))


def test_conjugate_gradient_solves_each_sample_on_its_own_in_at_most_its_dimension():
    torch.manual_seed(0)
    B = torch.randn(3, 6, 6)
    A = B @ B.mT + torch.eye(6)
    A[0] = torch.eye(6)
    b = torch.randn(3, 6)
    b[2] = 0
    s = conjugate_gradient(lambda p: (A @ p.unsqueeze(2)).squeeze(2), b, 1e-10, 20, 1)
    assert s.converged.all() and s.steps[0] == 1 and s.steps[2] == 0 and s.steps[1] <= 8
    torch.testing.assert_close(s.value, torch.linalg.solve(A, b.unsqueeze(2)).squeeze(2))


def test_conjugate_gradient_and_the_feature_form_ask_for_an_equation():
    A, b, z_star = affine()
    b.requires_grad_()
    for solver in (ConjugateGradient(), InFeatures()):
        with pytest.raises(TypeError, match=f"{type(solver).__name__} needs the equation of a cell"):
            Implicit(solver).attach(lambda z: z @ A.mT + b, Point(z_star))


@pytest.mark.parametrize("form", ["dense", "conv"])
@pytest.mark.parametrize("rule", ["conjugate-gradient", "in-features", "anderson", "phantom", "unrolled"])
def test_the_gradient_can_be_differentiated_again(rule, form):
    """With respect to the input and b; the weights follow in the next test."""
    rules = {**GRADIENTS, "phantom": Phantom(25, 1.0), "unrolled": Unrolled(15)}
    layer, x = layer_of(rules[rule], form, norm=0.6 if form == "dense" else 0.5)
    x = x[:1].clone().requires_grad_()

    def forward(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"cell.inject.bias": b}, (x,)).value

    b = layer.cell.inject.bias.detach().clone().requires_grad_()
    torch.autograd.gradgradcheck(forward, (x, b), eps=1e-6, atol=1e-5, rtol=1e-3, fast_mode=True)


def test_the_default_leaves_what_anderson_does_not_solve_to_conjugate_gradient():
    """At L = 16, with few active entries: conjugate gradient ends after as many steps, Anderson does not in four."""
    layer, x = layer_of(Implicit(), kernel="multiquadric", norm=4.0, stretch=10.0)
    g = torch.randn(layer(x).value.shape)
    layer.gradient = Implicit(InFeatures(), tol=1e-10, max_steps=4, on_failure="raise")
    with pytest.raises(EquilibriumError):
        torch.autograd.grad(layer(x).value, layer.cell.operator.weight, g)
    layer.gradient = Implicit(tol=1e-10, max_steps=4, on_failure="raise")
    z = layer(x).value
    (got,) = torch.autograd.grad(z, layer.cell.operator.weight, g, retain_graph=True)
    layer.gradient = Implicit(ConjugateGradient(), tol=1e-12)
    (expected,) = torch.autograd.grad(layer(x).value, layer.cell.operator.weight, g)
    torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-9)


def test_what_anderson_has_solved_is_no_failure_of_conjugate_gradient(monkeypatch):
    def breaking_down_on_the_first(*args):
        s = conjugate_gradient(*args)
        return dataclasses.replace(s, codes=s.codes.index_fill(0, torch.tensor([0]), Status.BREAKDOWN.code))

    monkeypatch.setattr(implicit, "conjugate_gradient", breaking_down_on_the_first)
    rule = Implicit(tol=1e-10, max_steps=4, on_failure="raise")
    layer, x = layer_of(rule, kernel="multiquadric", norm=4.0, stretch=10.0)
    s = layer(x)
    g = torch.randn(s.value.shape)
    g[0] = 0.0  # solved before the first step
    torch.autograd.grad(s.value, layer.cell.operator.weight, g)
    assert s.backward is not None and bool(s.backward[0].converged.all())


def test_a_frozen_layer_attaches_nothing(monkeypatch):
    layer, x = layer_of(Implicit())
    layer.requires_grad_(False)
    with monkeypatch.context() as patch:
        patch.setattr(Implicit, "attach", None)  # which costs an evaluation
        assert not layer(x).value.requires_grad
    assert layer(x.requires_grad_()).value.requires_grad


@pytest.mark.parametrize("stretch", [3.0, 0.1], ids=["the bound binds", "it does not"])
@pytest.mark.parametrize("form", ["dense", "conv"])
@pytest.mark.parametrize("rule", [Implicit(tol=1e-13, max_steps=300), Unrolled(200)], ids=["implicit", "unrolled"])
def test_double_backward_with_respect_to_the_weights_is_the_slope_of_the_gradient(rule, form, stretch):
    """By central differences of first derivatives. (W_h starts orthogonal, where its norm has no slope.)"""
    layer, x = layer_of(rule, form, norm=0.7, stretch=stretch)
    weights = list(layer.parameters())
    layer.cell.similarity.project.weight.data.add_(0.3 * torch.randn(layer.cell.similarity.project.weight.shape))
    assert (layer.cell.bind(x).scaling.scale < 1) == (stretch > 1)
    torch.manual_seed(2)
    directions = [torch.randn_like(w) for w in weights]

    def gradient(step: float) -> tuple[torch.Tensor, ...]:
        moved = copy.deepcopy(layer)
        for w, direction in zip(moved.parameters(), directions, strict=True):
            w.data.add_(direction, alpha=step)
        return torch.autograd.grad(moved(x).value.square().sum(), list(moved.parameters()))

    first = torch.autograd.grad(layer(x).value.square().sum(), weights, create_graph=True)
    along = sum((g * direction).sum() for g, direction in zip(first, directions, strict=True))
    second = torch.autograd.grad(along, weights)
    step = 1e-5
    for got, up, down in zip(second, gradient(step), gradient(-step), strict=True):
        torch.testing.assert_close(got, (up - down) / (2 * step), rtol=1e-5, atol=1e-6)


def test_double_backward_of_a_sample_does_not_depend_on_how_large_the_gradients_of_its_batch_mates_are():
    found = []
    for dtype, tol in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        layer, _ = layer_of(Implicit(tol=tol))
        layer, x = layer.to(dtype), input_of("dense").to(dtype).requires_grad_()
        layer.tol = tol
        size = torch.tensor([1e-25, 1.0, 1.0, 1.0], dtype=dtype).unsqueeze(1)
        (first,) = torch.autograd.grad((layer(x).value.square() * size).sum(), x, create_graph=True)
        found.append(torch.autograd.grad((first / size).sum(), x)[0].double())
    expected, got = found
    torch.testing.assert_close((got - expected).norm(dim=1) / expected.norm(dim=1), torch.zeros(4), atol=1e-4, rtol=0)


@pytest.mark.parametrize("outer", [torch.sum, lambda z: z.square().sum()], ids=["linear loss", "curved loss"])
def test_a_plain_function_is_differentiated_once_and_says_so(outer):
    A, b, z_star = affine()
    A.requires_grad_()
    z = Implicit(Anderson()).attach(lambda z: z @ A.mT + b, Point(z_star)).z
    (first,) = torch.autograd.grad(outer(z), A, create_graph=True)  # asking for a graph alone is no error
    with pytest.raises(RuntimeError, match="For the rest it can be differentiated once.*Phantom.*Unrolled"):
        torch.autograd.grad(first.square().sum(), A)


@pytest.mark.parametrize("rule", ["conjugate-gradient", "in-features", "picard", "anderson", "phantom"])
@pytest.mark.parametrize("form", ["dense", "conv"])
def test_under_cpu_autocast_the_gradient_is_that_of_float32_to_half_precision(form, rule):
    exact = {**GRADIENTS, "phantom": Phantom()}[rule]
    rules = {"conjugate-gradient": ConjugateGradient(), "in-features": InFeatures(), "picard": Picard()}
    half = Phantom() if rule == "phantom" else Implicit(rules.get(rule, Anderson()), tol=2e-2, on_failure="return")
    layer, x = layer_of(exact, form)
    layer, x = layer.float(), x.float()
    layer.tol = 1e-5
    grads = []
    for autocast, gradient in ((False, exact), (True, half)):
        layer.gradient = gradient if autocast or rule == "phantom" else Implicit(tol=1e-5)
        layer.tol = 2e-2 if autocast else 1e-5
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            solution = layer(x)
            assert solution.value.dtype == (torch.bfloat16 if autocast else torch.float32)
            assert solution.converged.all()
            loss = solution.value.float().square().sum()
        loss.backward()
        assert all(p.grad.dtype == torch.float32 for p in layer.parameters())
        grads.append(torch.cat([p.grad.flatten() for p in layer.parameters()]))
    assert (grads[0] - grads[1]).norm() <= 0.1 * grads[0].norm()


@pytest.mark.parametrize("rule", [None, ConjugateGradient(), Anderson()], ids=str)
@pytest.mark.parametrize("kernel", ["gaussian", "linear", "sigmoid"])
def test_under_autocast_an_input_that_stays_in_float32_goes_backward_too(kernel, rule):
    """As one does that is a itself, or comes from a norm."""
    torch.manual_seed(0)
    cell = kerneq.cells.DenseCell(
        KERNELS[kernel], inputs=6, state=6, features=6, norm=0.8, inject=torch.nn.Identity()
    ).float()
    layer = kerneq.Equilibrium(cell, gradient=Implicit(rule, tol=1e-2, on_failure="return"), tol=1e-2).eval()
    x, found = torch.randn(7, 6, dtype=torch.float32).requires_grad_(), []
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            value = layer(x).value
        found.append(torch.autograd.grad(value.float().square().sum(), x)[0])
    assert value.dtype == torch.bfloat16
    assert (found[1] - found[0]).norm() <= 0.05 * found[0].norm()


def test_double_backward_works_under_cpu_autocast():
    layer, x = layer_of(Implicit(tol=2e-2, on_failure="return"))
    layer, x = layer.float(), x.float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        value = layer(x).value
    (first,) = torch.autograd.grad(value.float().square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    assert second.isfinite().all() and second.abs().max() > 0


def test_a_bfloat16_model_trains_on_the_cpu():
    cell, x = cell_of("conv", KERNELS["gaussian"]).to(torch.bfloat16), input_of("conv").to(torch.bfloat16)
    layer = kerneq.Equilibrium(cell, tol=2e-2, gradient=Implicit(tol=2e-2))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    losses = []
    for _ in range(8):
        loss = (layer(x).value.float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_the_memory_of_implicit_does_not_grow_with_the_forward_solve():
    saved = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved.append(t.numel())
        return t

    counts = []
    for steps in (3, 300):
        layer, x = layer_of(Implicit(on_failure="return"))
        layer.tol, layer.max_steps, layer.solver = 1e-15, steps, Proximal(memory=0)
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            layer(x)
        counts.append(sum(saved))
    assert counts[0] == counts[1] > 0


def test_a_second_backward_pass_works_when_the_graph_is_kept():
    layer, x = layer_of(Implicit(tol=1e-12))
    loss = layer(x).value.square().sum()
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in layer.parameters()]
    loss.backward()
    for p, g in zip(layer.parameters(), first, strict=True):
        torch.testing.assert_close(p.grad, 2 * g)


def test_without_gradients_nothing_is_attached(monkeypatch):
    layer, x = layer_of(Implicit())
    with monkeypatch.context() as patch:
        patch.setattr(Implicit, "attach", None)  # which costs an evaluation
        with torch.no_grad():
            assert not layer(x).value.requires_grad
        with torch.inference_mode():
            assert not layer(x).value.requires_grad
    assert layer(x).value.requires_grad


def test_writing_into_the_value_is_either_right_or_an_error():
    layer, x = layer_of(Implicit(tol=1e-12))
    layer(x).value.mul(2).sum().backward()
    expected = layer.cell.operator.weight.grad.clone()
    layer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            layer(x).value.mul_(2).sum().backward()
        except RuntimeError as error:
            assert "inplace" in str(error).replace("-", "")
        else:
            torch.testing.assert_close(layer.cell.operator.weight.grad, expected)


@pytest.mark.parametrize("output", ["state", "features"])
@pytest.mark.parametrize("kernel", ["gaussian", "linear", "sigmoid"])
def test_a_sample_lost_to_nan_that_a_loss_masks_spoils_no_gradient(kernel, output):
    class Losing(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.where(x[:, :1] > 10, torch.nan, super().forward(x))

    inject = Losing(3, 5 if KERNELS[kernel].in_state else 6)
    layer, x = layer_of(Implicit(tol=1e-12), kernel=kernel, output=output, inject=inject)
    weight = layer.cell.operator.weight
    (expected,) = torch.autograd.grad(layer(x).value.square().sum(), weight)
    solution = layer(torch.cat([torch.full((1, 3), 11.0), x]))
    assert solution.codes[0] == Status.NONFINITE.code
    (got,) = torch.autograd.grad(solution.value[1:].square().sum(), weight)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("output", ["state", "features"])
@pytest.mark.parametrize("kernel", ["gaussian", "linear", "sigmoid"])
def test_a_value_changed_behind_the_back_of_autograd_is_an_error_and_not_a_wrong_gradient(kernel, output):
    layer, x = layer_of(Implicit(tol=1e-12), kernel=kernel, output=output)
    value = layer(x).value
    loss = value.sum()
    value.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("rule", [None, ConjugateGradient(), InFeatures()], ids=str)
def test_the_solution_of_a_layer_knows_afterwards_which_samples_converged_on_the_way_back(rule):
    for steps, converged in ((400, True), (1, False)):
        layer, x = layer_of(Implicit(rule, tol=1e-10, max_steps=steps, on_failure="return"))
        solution = layer(x)
        assert solution.backward == []
        solution.value.sum().backward()
        assert [found.converged.all().item() for found in solution.backward] == [converged]


@pytest.mark.parametrize(
    "kernel, solver, backward, forward_products, backward_products",
    [
        # In the features: W at z = σ(a), then Wᵀ and W a step, Wᵀ for the residual; back WDg, then Wᵀ and W a step.
        ("linear", InFeatures(Anderson(4)), InFeatures(Anderson(3)), 2 * 4, 1 + 2 * 2),
        # In the state: nothing at z = 0, then W and Wᵀ a step, the last for the residual; back W and Wᵀ a step.
        ("linear", Anderson(4), Anderson(3), 2 * 3, 2 * 3),
        ("sigmoid", Anderson(4), ConjugateGradient(), 2 * 3, 2 * 3 + 1),  # and Ww
    ],
)
def test_no_product_with_W_is_made_that_is_known(kernel, solver, backward, forward_products, backward_products):
    """4 steps forward, 3 backward, output v = Wz; beside the solves Wᵀ∂L/∂v and two gradients with respect to W."""
    cell = kerneq.cells.ConvCell(
        KERNELS[kernel], inputs=4, state=4, features=6, norm=0.9, inject=torch.nn.BatchNorm2d(4), output="features"
    ).eval()
    rule = Implicit(backward, max_steps=3, check_every=3, on_failure="return")
    layer = kerneq.Equilibrium(cell, solver=solver, gradient=rule, max_steps=4, check_every=4).eval()
    x = torch.randn(16, 4, 8, 8)
    layer(x)  # the norm of W is settled; it costs a product of one sample, and the gradient of that, from now on
    product = 2 * cell.operator.weight.numel() * 8 * 8 * len(x)
    with FlopCounterMode(display=False) as counter:
        value = layer(x).value
        forward = counter.get_total_flops()
        value.sum().backward()
    assert forward // product == forward_products
    assert (counter.get_total_flops() - forward) // product == backward_products + 1 + 2


@pytest.mark.parametrize("solver", [None, ConjugateGradient(), Anderson()], ids=str)
@pytest.mark.parametrize("kernel", ["gaussian", "linear", "sigmoid"])
def test_an_output_in_the_features_has_the_gradient_of_the_product_with_the_state(kernel, solver):
    """Once and twice, with respect to everything: beside the long way, W applied to a state that carries gradients."""
    layer, x = layer_of(Implicit(solver, tol=1e-13, max_steps=300), "conv", kernel, norm=0.6, stretch=0.2)
    layer.cell.gives = "features"
    x = x[:2].clone().requires_grad_()
    inputs = [x, *layer.parameters()]
    results = []
    for rule in (layer.gradient, Unrolled(100)):
        layer.gradient = rule
        first = torch.autograd.grad(layer(x).value.square().sum(), inputs, create_graph=True)
        results.append([*first, *torch.autograd.grad(sum(g.square().sum() for g in first), inputs)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-8)
