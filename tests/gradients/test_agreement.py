"""Every gradient rule gives the derivative of the equilibrium: finite differences, the closed form, and each other."""

import itertools

import pytest
import torch
from helpers import CELLS, GRADIENTS, KERNELS, PLAIN_SOLVERS, affine, away_from_kinks, cell_of
from torch.func import functional_call

import kerneq
from kerneq.gradients import ConjugateGradient, Implicit, InFeatures, Phantom, Point, Unrolled
from kerneq.kernels import Gaussian
from kerneq.linear_maps import LinearMap
from kerneq.prox import Identity, SoftThreshold
from kerneq.solution import Limits
from kerneq.solvers import Anderson, Broyden, Picard, Proximal
from kerneq.solvers.loops import find_point

pytestmark = pytest.mark.usefixtures("float64")
# Where zero is the equilibrium of every input its drive is zero too: the kink itself.
SMOOTH = {name: kernel for name, kernel in KERNELS.items() if name != "quadratic-published"}
BACKWARD = {name: rule for name, rule in GRADIENTS.items() if isinstance(rule, Implicit)}


def layer_of(form, kernel, rule, **more) -> tuple[kerneq.Equilibrium, torch.Tensor]:
    cell = cell_of(form, KERNELS[kernel], norm=0.8, **more).eval()
    layer = kerneq.Equilibrium(cell, solver=Proximal(), gradient=rule, tol=1e-14, max_steps=400).eval()
    return layer, away_from_kinks(cell, form)


def spread(layer) -> None:
    """W_h starts orthogonal: all its singular values are the largest, and its norm has no derivative there."""
    if layer.cell.similarity is not None:
        with torch.no_grad():
            W_h = layer.cell.similarity.project.weight
            W_h.mul_(torch.linspace(1.0, 1.5, len(W_h)).unsqueeze(1))


def check_by_differences(layer, x) -> None:
    """The gradient with respect to the input and every parameter."""
    named = dict(layer.named_parameters())

    def forward(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        return functional_call(layer, dict(zip(named, values, strict=True)), (x,)).value

    inputs = [t.detach().clone().requires_grad_() for t in (x, *named.values())]
    torch.autograd.gradcheck(forward, inputs, eps=1e-6, atol=1e-6, rtol=1e-4, fast_mode=True)


def gradients(layer, x) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    named = {"x": x, **dict(layer.named_parameters())}
    value = layer(x).value
    weight = torch.linspace(-1, 1, value.numel()).view_as(value)
    return dict(zip(named, torch.autograd.grad((weight * value).sum(), list(named.values())), strict=True))


@pytest.mark.parametrize("form", CELLS)
@pytest.mark.parametrize("kernel", SMOOTH)
def test_implicit_equals_a_long_unrolled_descent_on_every_parameter_and_the_input(kernel, form):
    layer, x = layer_of(form, kernel, Unrolled(300))
    expected = gradients(layer, x)
    assert all(g.abs().max() > 0 for g in expected.values())
    for rule, layer.gradient in BACKWARD.items():
        for name, got in gradients(layer, x).items():
            torch.testing.assert_close(
                got, expected[name], rtol=1e-8, atol=1e-8, msg=lambda m, at=(rule, name): f"{at}: {m}"
            )


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("rule", ["conjugate-gradient", "anderson"])  # the others agree with these, above
@pytest.mark.parametrize("form", CELLS)
def test_gradcheck_passes_on_every_parameter_and_the_input(form, rule, mode):
    layer, _ = layer_of(form, "gaussian", BACKWARD[rule])
    spread(layer)
    x = away_from_kinks(layer.cell, form)[:1]
    check_by_differences(layer.train(mode == "train"), x)


@pytest.mark.parametrize("kernel", ["linear", "quadratic", "cubic", "sigmoid", "gaussian-adaptive"])
def test_gradcheck_passes_for_the_other_kernels(kernel):
    layer, _ = layer_of("dense", kernel, Implicit(tol=1e-12))
    spread(layer)
    check_by_differences(layer, away_from_kinks(layer.cell, "dense"))


@pytest.mark.parametrize("prox", [SoftThreshold(0.05), Identity()], ids=str)
def test_other_proximal_maps_have_the_right_gradient(prox):
    layer, x = layer_of("dense", "gaussian", Unrolled(300), prox=prox)
    expected = gradients(layer, x)
    for layer.gradient in BACKWARD.values():
        for name, got in gradients(layer, x).items():
            torch.testing.assert_close(got, expected[name], rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("solver", PLAIN_SOLVERS)
def test_the_gradient_through_an_affine_function_is_the_closed_form_one(solver):
    A, b, z_star = affine()
    b.requires_grad_()
    z = Implicit(PLAIN_SOLVERS[solver], tol=1e-12, max_steps=500).attach(lambda z: z @ A.mT + b, Point(z_star)).z
    assert torch.equal(z, z_star)
    g = torch.randn(z.shape)
    (got,) = torch.autograd.grad(z, b, g)
    torch.testing.assert_close(got, torch.linalg.solve(torch.eye(6) - A.mT, g.mT).mT, rtol=1e-8, atol=1e-8)


def test_phantom_tends_to_implicit_as_its_steps_grow():
    layer, x = layer_of("conv", "gaussian", Implicit(tol=1e-13, max_steps=300))
    exact = torch.cat([g.flatten() for g in gradients(layer, x).values()])

    def error(rule) -> float:
        layer.gradient = rule
        got = torch.cat([g.flatten() for g in gradients(layer, x).values()])
        return float((got - exact).norm() / exact.norm())

    errors = [error(Phantom(steps)) for steps in (1, 2, 5, 10, 20, 60)]
    assert all(b < 0.9 * a or b < 1e-10 for a, b in itertools.pairwise(errors)), errors
    assert errors[0] > 1e-2 and errors[-1] < 1e-8
    assert error(Phantom()) == errors[2]  # the default is the papers' five steps


def test_phantom_is_exactly_the_papers_five_steps():
    layer, x = layer_of("dense", "gaussian", Phantom())
    f = layer.cell.bind(x)
    with torch.no_grad():
        z = kerneq.solve(f, layer.cell.initial(f), Proximal(), tol=1e-14, max_steps=400).value
    for _ in range(5):
        z = 0.2 * z + 0.8 * f(z)
    torch.testing.assert_close(Phantom().attach(f, Point(layer(x).value)).z, z, rtol=1e-12, atol=1e-12)
    expected = torch.autograd.grad(z.square().sum(), list(layer.parameters()))
    got = torch.autograd.grad(layer(x).value.square().sum(), list(layer.parameters()))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_one_full_phantom_step_is_the_jacobian_free_gradient():
    A, b, z_star = affine()
    A.requires_grad_()
    z = Phantom(steps=1, relaxation=1.0).attach(lambda z: z @ A.mT + b, Point(z_star)).z
    g = torch.randn(z.shape)
    (got,) = torch.autograd.grad(z, A, g)
    torch.testing.assert_close(got, g.mT @ z_star)  # ∂f/∂A at z*, and no Jacobian of f in z


def test_the_backward_system_is_symmetric_on_the_active_set_and_positive_definite():
    """Fact 4: the active part of I − J equals its transpose; with μ > 0 its eigenvalues are at least μ."""
    for seed, (form, kernel) in enumerate([("dense", "gaussian"), ("conv", "gaussian"), ("dense", "sigmoid")]):
        cell = cell_of(form, KERNELS[kernel], norm=1.2 if kernel == "gaussian" else 0.9, seed=seed)
        x = away_from_kinks(cell, form)[:1]
        f = cell.bind(x)
        z = kerneq.solve(f, cell.initial(f), Proximal(), tol=1e-13, max_steps=500).value
        J = torch.autograd.functional.jacobian(f, z).reshape(z.numel(), z.numel())
        active = (f.drive(z) > 0).flatten()
        system = torch.eye(int(active.sum())) - J[active][:, active]
        assert 0 < active.sum() < z.numel()
        torch.testing.assert_close(system, system.mT)
        assert torch.linalg.eigvalsh(system).min() >= f.convexity - 1e-10 > 0


def test_past_contraction_the_gradient_is_still_right():
    """L = 2 < 2.24: no contraction promised, but E is strongly convex and conjugate gradient solves the system."""
    cell = cell_of("dense", KERNELS["gaussian"], norm=2**0.5, stretch=10.0)
    x = away_from_kinks(cell, "dense")
    for rule in (ConjugateGradient(), InFeatures(), Anderson(), Broyden()):
        layer = kerneq.Equilibrium(cell, gradient=Implicit(rule, tol=1e-12), tol=1e-13, max_steps=1000)
        got = gradients(layer.eval(), x)
        layer.gradient = Unrolled(400)
        for name, expected in gradients(layer, x).items():
            torch.testing.assert_close(got[name], expected, rtol=1e-7, atol=1e-7)


def test_train_and_eval_mode_give_the_same_gradient():
    layer, x = layer_of("conv", "gaussian", Implicit(tol=1e-12))
    evaluation, training = gradients(layer.eval(), x), gradients(layer.train(), x)
    for name in evaluation:
        torch.testing.assert_close(training[name], evaluation[name], rtol=1e-6, atol=1e-8)


def test_any_forward_solver_may_go_with_any_gradient():
    for solver in (Picard(), Anderson(), Broyden(), Proximal(memory=0)):
        layer, x = layer_of("dense", "gaussian", Implicit(tol=1e-12))
        expected = gradients(layer, x)
        layer.solver = solver
        for name, got in gradients(layer, x).items():
            torch.testing.assert_close(got, expected[name], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kernel", ["linear", "multiquadric", "gaussian-adaptive"])
@pytest.mark.parametrize("form", CELLS)
def test_a_value_that_mixes_points_does_not_mislead_the_gradient_about_which_entries_are_zero(form, kernel):
    """An entry that goes to 0 is 1e-14, say, in a mixture of iterates, and σ is flat there all the same."""
    for solver in (Picard(relaxation=0.7), Anderson(relaxation=0.5), Broyden()):
        layer, _ = layer_of(form, kernel, Implicit(tol=1e-12, max_steps=500))
        x = away_from_kinks(layer.cell, form, batch=8)
        layer.solver, layer.tol, layer.max_steps = solver, 1e-10, 1000
        got = gradients(layer, x)
        layer.gradient = Unrolled(400)
        for name, expected in gradients(layer, x).items():
            torch.testing.assert_close(got[name], expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("solver", [Proximal(), InFeatures(), Picard()], ids=str)
def test_at_a_loose_tolerance_entries_near_zero_are_judged_by_the_image_of_the_value(solver):
    """A step past z, it is nearer the equilibrium: z itself takes several times as many for active that are not."""
    errors = []
    for seed in range(6):
        torch.manual_seed(seed)
        cell = kerneq.cells.ConvCell(Gaussian(gamma=0.2), inputs=8, state=32, features=16, norm=1.0)
        with torch.no_grad():
            cell.operator.weight.mul_(5)
        layer = kerneq.Equilibrium(cell, solver=solver, gradient=Implicit(tol=1e-10), tol=1e-12, max_steps=500).eval()
        x, found = torch.randn(16, 8, 8, 8), []
        for layer.tol in (1e-12, 1e-3):
            found.append(torch.cat([g.flatten() for g in gradients(layer, x).values()]))
        errors.append(float((found[1] - found[0]).norm() / found[0].norm()))
        layer.gradient = Implicit(ConjugateGradient(), tol=1e-10)  # which looks at f(z) anyway
        torch.testing.assert_close(torch.cat([g.flatten() for g in gradients(layer, x).values()]), found[1])
    assert sum(errors) / len(errors) < 4e-3, errors


def test_what_the_last_evaluation_of_a_solve_has_made_is_not_made_again_for_the_gradient(monkeypatch):
    layer, x = layer_of("conv", "gaussian", Implicit())
    f = layer.cell.bind(x)
    _, at = find_point(f, None, Proximal(), Limits(1e-3, 6, 6))
    products = []
    for name in ("__call__", "adjoint"):
        product = getattr(LinearMap, name)
        counted = lambda self, *args, made=product: products.append(made) or made(self, *args)  # noqa: E731
        monkeypatch.setattr(LinearMap, name, counted)
    layer.gradient.attach(f, at)
    assert not products
    layer.gradient.attach(f, Point(at.z))
    assert len(products) == 2  # Wz and f(z)


@pytest.mark.parametrize("kernel", ["gaussian", "linear", "sigmoid"])
def test_what_a_solve_or_a_gradient_has_made_is_used_for_nothing_else(kernel):
    """Without the graph of an earlier gradient; with one where W needs it."""
    layer, x = layer_of("dense", kernel, Implicit(tol=1e-12), output="features")
    cell, weight = layer.cell, layer.cell.operator.weight

    def gradient(f, at) -> torch.Tensor:
        return torch.autograd.grad(layer.gradient.attach(f, at).z.square().sum(), weight)[0]

    def found() -> tuple[kerneq.cells.Equation, Point]:
        f = cell.bind(x)
        return f, find_point(f, None, Proximal(), Limits(1e-3, 40, 40))[1]

    f, at = found()
    assert at.image is not None
    expected = gradient(cell.bind(x), Point(at.z.clone()))
    torch.testing.assert_close(gradient(f, at), expected)
    f, at = found()
    torch.testing.assert_close(gradient(f, layer.gradient.attach(f, at)), expected)
    f, at = found()
    (got,) = torch.autograd.grad(cell.output(f, at).sum(), weight)
    torch.testing.assert_close(got, torch.autograd.grad(cell.bind(x).operator(at.z).sum(), weight)[0])


@pytest.mark.parametrize("solver", [Proximal(), InFeatures(), Anderson(), Picard()])
def test_the_gradient_of_a_sample_does_not_depend_on_its_batch_mates_even_at_a_loose_tolerance(solver):
    torch.manual_seed(0)
    cell = kerneq.cells.ConvCell(Gaussian(gamma=0.2), inputs=2, state=16, features=8, norm=0.9)
    layer = kerneq.Equilibrium(cell, solver=solver, tol=1e-2).eval()
    x = (torch.randn(8, 2, 8, 8) * torch.logspace(-2, 1, 8).view(-1, 1, 1, 1)).requires_grad_()
    s = layer(x)
    assert len(set(s.steps.tolist())) > 1
    weight = torch.randn_like(s.value[0])
    (together,) = torch.autograd.grad((weight * s.value).sum(), x)
    alone = [torch.autograd.grad((weight * layer(sample).value).sum(), sample)[0] for sample in x.split(1)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-10, atol=1e-14)
