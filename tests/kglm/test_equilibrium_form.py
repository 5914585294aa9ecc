"""The equilibrium model with the closed-form weights is the kernel GLM (Theorem 3, Corollaries 5, 6, 11)."""

import contextlib
import math
import warnings

import pytest
import torch
from glm_data import CASES, targets, uniform

from kerneq import kglm
from kerneq.gradients import Unrolled
from kerneq.kglm.families import FLAT
from kerneq.kglm.kernels import random_lengthscales
from kerneq.solvers import Anderson, Picard

# where A″ has a bound; Poisson has tests of its own
CASES = [case for case in CASES if math.isfinite(case[0].variance_range()[1])]


def draw(family, n=25, batch=3):
    return 6 * uniform(n, 1), targets(family, batch, n)


@pytest.mark.parametrize(("family", "factor"), CASES, ids=repr)
def test_the_equilibrium_is_newtons_solution_where_both_assumptions_hold(family, factor):
    X, Y = draw(family)
    kernel = kglm.SquaredExponential(0.3) + kglm.White(1e-3)
    lam = 2 * family.variance_range()[1] * torch.linalg.matrix_norm(kernel(X, X), 2).item()
    glm = kglm.KernelGLM(kernel, family, lam=lam, prior=factor).fit(X, Y)
    layer = glm.as_equilibrium()
    assert layer.guarantee.assumption1
    if factor.flat:
        assert layer.guarantee.assumption2
    torch.testing.assert_close(layer(Y).detach(), glm.canonical(), rtol=0, atol=1e-8)
    torch.testing.assert_close(layer.embed(Y).detach(), family.mean(glm.canonical()), rtol=0, atol=1e-8)
    X2 = torch.linspace(-1, 7, 11, dtype=torch.float64)
    torch.testing.assert_close(glm.as_equilibrium(X2).mean(Y).detach(), glm.predict(X2), rtol=0, atol=1e-8)


def test_targets_may_be_whole_numbers_or_of_fewer_bits_than_the_weights():
    X, Y = draw(kglm.Bernoulli())
    glm = kglm.KernelGLM(kglm.SquaredExponential(0.3), kglm.Bernoulli(), lam=5.0).fit(X, Y)
    for given in (Y.long(), Y.bool(), Y.float()):
        torch.testing.assert_close(glm.as_equilibrium()(given).detach(), glm.canonical(), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("family", "factor"), CASES, ids=repr)
def test_neither_assumption_is_needed_for_the_equivalence(family, factor):
    X, Y = draw(family)
    kernel = kglm.SquaredExponential(2.0)  # singular to rounding
    lam = family.variance_range()[1] * torch.linalg.matrix_norm(kernel(X, X), 2).item() / 20
    glm = kglm.KernelGLM(kernel, family, lam=lam, prior=factor).fit(X, Y)
    layer = glm.as_equilibrium(torch.linspace(0, 6, 7, dtype=torch.float64))
    assert not layer.guarantee.assumption1 and not layer.guarantee.assumption2
    assert "unique all the same" in str(layer.guarantee)
    expected = glm.canonical(torch.linspace(0, 6, 7, dtype=torch.float64))
    torch.testing.assert_close(layer(Y).detach(), expected, rtol=0, atol=1e-8)


def test_plain_iteration_fails_where_the_guarantee_says_it_may():
    X, Y = draw(kglm.Ising())
    kernel = kglm.SquaredExponential(2.0)
    glm = kglm.KernelGLM(kernel, kglm.Ising(), lam=0.1).fit(X, Y)
    layer = glm.as_equilibrium()
    f = layer.cell.bind(Y)
    eta = torch.zeros_like(Y)
    for _ in range(500):
        eta = f(eta)
    assert (eta - glm.canonical()).abs().max() > 1
    torch.testing.assert_close(layer(Y).detach(), glm.canonical(), rtol=0, atol=1e-8)


def test_relaxed_iteration_contracts_at_the_stated_rate_in_the_kernels_norm():
    X, Y = draw(kglm.Bernoulli())
    kernel = kglm.SquaredExponential(0.5) + kglm.White(1e-2)
    glm = kglm.KernelGLM(kernel, kglm.Bernoulli(), lam=0.05).fit(X, Y)
    layer, K = glm.as_equilibrium(), glm.problem.basis.K
    g = layer.guarantee
    assert g.lipschitz > 5
    rate, f = g.lipschitz / (2 + g.lipschitz), layer.cell.bind(Y)
    inverse = torch.linalg.inv(K)

    def distance(eta):
        gap = eta - glm.canonical()
        return ((gap @ inverse) * gap).sum(-1).sqrt()

    eta = torch.zeros_like(Y)
    for _ in range(20):
        before, eta = distance(eta), torch.lerp(eta, f(eta).detach(), g.relaxation)
        assert (distance(eta) <= rate * before * (1 + 1e-9)).all()


def test_a_poisson_layer_is_certified_by_its_data():
    X, Y = draw(kglm.Poisson())
    kernel = kglm.SquaredExponential(0.3) + kglm.White(1e-3)
    lam = 20 * torch.linalg.matrix_norm(kernel(X, X), 2).item()
    glm = kglm.KernelGLM(kernel, kglm.Poisson(), lam=lam).fit(X, Y)
    assert math.isinf(kglm.check_assumptions(glm.problem.basis.K, lam, kglm.Poisson()).contraction)
    layer = glm.as_equilibrium()
    assert layer.guarantee.assumption2
    torch.testing.assert_close(layer(Y).detach(), glm.canonical(), rtol=0, atol=1e-8)
    # a prior pulls negative η up, past the drive
    pulled = kglm.KernelGLM(kernel, kglm.Poisson(), lam=lam, prior=kglm.Normal(9.0)).fit(X, Y).as_equilibrium()
    assert math.isinf(pulled.guarantee.lipschitz)


def draw_counts(seed, n=25, batch=3):
    """Counts up to 100, many of them small."""
    g = torch.Generator().manual_seed(seed)
    X = torch.rand(n, 1, generator=g, dtype=torch.float64) * 6
    rate = 100 * torch.rand(batch, n, generator=g, dtype=torch.float64) ** 3
    return X, torch.poisson(rate, generator=g).clamp(max=100)


KERNELS = [kglm.SquaredExponential(0.3), kglm.SquaredExponential(2.0), kglm.Matern(0.5) + kglm.Constant()]


@pytest.mark.parametrize("lam", [0.01, 0.1, 0.3, 1.0, 10.0])
@pytest.mark.parametrize("kernel", KERNELS, ids=["short", "long", "rough"])
def test_a_poisson_layer_is_the_kernel_glm_at_every_lambda(kernel, lam):
    X2 = torch.linspace(0, 6, 9, dtype=torch.float64)
    for seed in range(3):
        X, Y = draw_counts(seed)
        glm = kglm.KernelGLM(kernel, kglm.Poisson(), lam=lam).fit(X, Y)
        layer = glm.as_equilibrium()
        torch.testing.assert_close(layer.embed(Y).detach(), glm.predict(), rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(layer.mean(Y).detach(), glm.predict(), rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(glm.as_equilibrium(X2).mean(Y).detach(), glm.predict(X2), rtol=1e-8, atol=1e-8)
        assert "damped Newton finds it for every λ > 0" in str(layer.guarantee)


def test_a_poisson_layer_serves_targets_it_was_not_certified_for():
    X, few = draw(kglm.Poisson())
    _, many = draw_counts(5)
    glm = kglm.KernelGLM(kglm.Matern(0.5), kglm.Poisson(), lam=30.0).fit(X, few)
    layer = glm.as_equilibrium()
    assert layer.guarantee.assumption2 and "for the targets given" in str(layer.guarantee)
    glm = kglm.KernelGLM(kglm.Matern(0.5), kglm.Poisson(), lam=30.0).fit(X, many)
    assert not glm.as_equilibrium().guarantee.assumption2
    torch.testing.assert_close(layer.mean(many).detach(), glm.predict(), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("prior", [kglm.Normal(0.5), kglm.Logistic()], ids=["normal", "logistic"])
def test_a_poisson_layer_takes_priors_offsets_and_whole_numbers(prior):
    X, Y = draw_counts(1)
    offset = lambda x: 1 - 0.5 * x[:, 0]  # noqa: E731
    glm = kglm.KernelGLM(kglm.Matern(0.5), kglm.Poisson(), lam=0.1, prior=prior, offset=offset).fit(X, Y)
    torch.testing.assert_close(glm.as_equilibrium().mean(Y.long()).detach(), glm.predict(), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("lam", [0.1, 1.0, 10.0])
def test_a_float32_poisson_layer_is_as_exact_as_its_weights(lam):
    X, Y = draw_counts(2)
    glm = kglm.KernelGLM(kglm.Matern(0.5), kglm.Poisson(), lam=lam).fit(X, Y)
    mean = glm.as_equilibrium().float().mean(Y.float()).detach()
    assert mean.dtype == torch.float32
    torch.testing.assert_close(mean.double(), glm.predict(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lam", [0.1, 1.0])
def test_a_float32_layer_past_contraction_converges_and_does_not_claim_to_have_failed(lam):
    """Coin flips of which a linear function knows little: η is a small difference of numbers that K/λ makes large."""
    X, Y = 3 * uniform(30, 2), (uniform(3, 30, seed=1) > 0.5).double()
    exact = kglm.KernelGLM(kglm.DotProduct(), kglm.Bernoulli(), lam=lam).fit(X.float().double(), Y).canonical()
    layer = kglm.KernelGLM(kglm.DotProduct(), kglm.Bernoulli(), lam=lam).fit(X.float(), Y.float()).as_equilibrium()
    assert not layer.guarantee.assumption2 and isinstance(layer.layer.solver, Picard)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f = layer(Y.float())
        assert f.dtype == torch.float32
        f.square().sum().backward()
    torch.testing.assert_close(f.detach().double(), exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize("seed", range(6))
def test_the_tolerance_of_a_layer_is_above_what_rounding_leaves(seed):
    """L = 300, just below where Newton's method takes over: the residual ends at some 10⁻¹², not at 10⁻¹³."""
    X, Y = 2 * uniform(7, 2, seed=seed), 3 * uniform(3, 7, seed=seed + 10) - 1
    kernel, family = kglm.DotProduct(), kglm.Gaussian(0.4)
    lam = kglm.spectral_norm(kernel(X, X)).item() * family.variance_range()[1] / 300
    glm = kglm.KernelGLM(kernel, family, lam=lam).fit(X, Y)
    layer = glm.as_equilibrium()
    assert isinstance(layer.layer.solver, Picard) and layer.layer(family.statistic(Y)).converged.all()
    torch.testing.assert_close(layer(Y).detach(), glm.canonical(), rtol=0, atol=1e-8)


@pytest.mark.parametrize("lam", [0.1, 1.0])
def test_gradients_of_a_poisson_layer_are_those_of_differences(lam):
    X, Y = draw_counts(3, n=8)
    layer = kglm.KernelGLM(kglm.Matern(0.5), kglm.Poisson(), lam=lam, prior=kglm.Logistic()).fit(X, Y).as_equilibrium()
    loss = lambda: layer(Y).square().mean()  # noqa: E731
    loss().backward()
    g = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        direction = torch.randn(parameter.shape, generator=g, dtype=torch.float64)
        step = 1e-6 * parameter.detach().norm().clamp_min(0.1) / direction.norm()
        values = []
        for sign in (1, -2, 1):
            with torch.no_grad():
                parameter.add_(sign * step * direction)
                values.append(loss().item())
        expected = (values[0] - values[1]) / (2 * step.item())
        assert (parameter.grad * direction).sum().item() == pytest.approx(expected, rel=2e-4)


def test_an_offset_enters_the_layer_as_a_bias():
    X, Y = draw(kglm.Bernoulli())
    offset = lambda x: 1 - 0.5 * x[:, 0]  # noqa: E731
    glm = kglm.KernelGLM(kglm.Matern(0.5), kglm.Bernoulli(), lam=8.0, offset=offset).fit(X, Y)
    X2 = torch.linspace(0, 6, 7, dtype=torch.float64)
    torch.testing.assert_close(glm.as_equilibrium(X2)(Y).detach(), glm.canonical(X2), rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("family", "definite"),
    [(kglm.Bernoulli(), True), (kglm.Gaussian(), True), (kglm.Poisson(), True), (kglm.Ising(), False)],
    ids=repr,
)
def test_the_convolutional_form_is_the_dense_one(family, definite):
    channels, height, width = 2, 6, 5
    lengths = random_lengthscales(channels, torch.Generator().manual_seed(3)).double()
    kernel = kglm.Truncated(lengths, 2, definite=definite)
    X = kglm.pixels(height, width, channels)
    K = kernel(X, X)
    highest = family.variance_range()[1]
    lam = 1.5 * highest * torch.linalg.matrix_norm(K, 2).item() if math.isfinite(highest) else 0.3
    count = channels * height * width
    _, Y = draw_counts(4, n=count) if isinstance(family, kglm.Poisson) else draw(family, n=count)
    with contextlib.nullcontext() if definite else pytest.warns(RuntimeWarning, match="was not solved"):
        glm = kglm.KernelGLM(kernel, family, lam=lam).fit(X, Y)
    conv, dense = glm.as_equilibrium(convolutional=True), glm.as_equilibrium()
    got = conv(Y.view(-1, channels, height, width)).detach().flatten(1)
    torch.testing.assert_close(got, dense(Y).detach(), rtol=0, atol=1e-8)
    if definite:
        torch.testing.assert_close(got, glm.canonical(), rtol=0, atol=1e-8)
        assert dense.guarantee.semidefinite and conv.guarantee.semidefinite
    # bounds from the symbol hold for the zero-padded convolution
    assert conv.guarantee.smallest <= dense.guarantee.smallest + 1e-12
    assert conv.guarantee.norm >= dense.guarantee.norm - 1e-12


def test_the_published_truncated_kernel_is_not_positive_semi_definite_and_the_guarantee_says_so():
    kernel = kglm.Truncated(torch.full((1, 1), 4.0, dtype=torch.float64), radius=3)
    X = kglm.pixels(12, 12, 1)
    K = kernel(X, X)
    assert torch.linalg.eigvalsh(K).min() < -0.5
    guarantee = kglm.check_assumptions(K, 100.0, kglm.Gaussian())
    assert "not positive semi-definite" in str(guarantee) and guarantee.assumption2
    repaired = kglm.Truncated(torch.full((1, 1), 4.0, dtype=torch.float64), 3, definite=True)
    assert torch.linalg.eigvalsh(repaired(X, X)).min() > 0


def test_channel_pairs_of_different_lengths_are_not_a_kernel_either():
    lengths = torch.tensor([[0.1, 4.0], [4.0, 0.1]], dtype=torch.float64)
    X = kglm.pixels(6, 6, 2)
    assert torch.linalg.eigvalsh(kglm.Truncated(lengths, 8)(X, X)).min() < -0.1
    assert torch.linalg.eigvalsh(kglm.Truncated(lengths, 8, definite=True)(X, X)).min() > -1e-12


def test_gradients_reach_every_weight_and_are_the_unrolled_ones():
    X, Y = draw(kglm.Bernoulli(), n=8)
    glm = kglm.KernelGLM(kglm.Matern(0.5), kglm.Bernoulli(), lam=4.0, prior=kglm.Logistic()).fit(X, Y)
    layer = glm.as_equilibrium()
    (layer(Y).square().sum()).backward()
    got = {name: p.grad.clone() for name, p in layer.named_parameters()}
    layer.zero_grad()
    layer.layer.gradient = Unrolled(steps=120)
    (layer(Y).square().sum()).backward()
    assert set(got) == {
        "layer.cell.W1",
        "layer.cell.W2",
        "layer.cell.W3",
        "layer.cell.bias",
        "V1",
        "V2",
        "bias",
    }
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-7, atol=1e-8)


def test_other_solvers_of_kerneq_serve_too():
    X, Y = draw(kglm.Ising())
    glm = kglm.KernelGLM(kglm.SquaredExponential(1.0), kglm.Ising(), lam=1.0).fit(X, Y)
    layer = glm.as_equilibrium()
    layer.layer.solver = Anderson()
    torch.testing.assert_close(layer(Y).detach(), glm.canonical(), rtol=0, atol=1e-8)


def test_a_users_family_of_one_line_is_fitted_and_becomes_a_layer():
    # three outcomes −1, 0, 1 with equal base masses: A = log(1 + 2cosh η), A″ ≤ ⅔
    family = kglm.Custom(lambda eta: torch.log(1 + 2 * torch.cosh(eta)), bound=2 / 3)
    X, u = draw(kglm.Gaussian())
    Y = u.floor() - 1
    glm = kglm.KernelGLM(kglm.Matern(0.5), family, lam=6.0, prior=kglm.Logistic()).fit(X, Y)
    assert glm.result.converged.all()
    torch.testing.assert_close(glm.as_equilibrium()(Y).detach(), glm.canonical(), rtol=0, atol=1e-8)


def test_misuse_of_the_convolutional_form_is_answered_in_words():
    X, Y = draw(kglm.Gaussian())
    with pytest.raises(ValueError, match="`Truncated` kernel"):
        kglm.KernelGLM(kglm.Matern(), kglm.Gaussian(), lam=1.0).fit(X, Y).as_equilibrium(convolutional=True)
    kernel = kglm.Truncated(torch.ones(1, 1, dtype=torch.float64), 1, definite=True)
    X = kglm.pixels(3, 3, 1).flip(0)
    glm = kglm.KernelGLM(kernel, kglm.Gaussian(), lam=9.0).fit(X, torch.ones(9, dtype=torch.float64))
    with pytest.raises(ValueError, match="every pixel"):
        glm.as_equilibrium(convolutional=True)
    with pytest.raises(ValueError, match="symmetric matrix"):
        kglm.Truncated(torch.tensor([[1.0, 2.0], [3.0, 1.0]]))


FORMS = [(kglm.Bernoulli(), kglm.Logistic()), (kglm.Bernoulli(), FLAT), (kglm.Poisson(), FLAT)]


def layer_of(family, prior) -> tuple[kglm.KernelEquilibrium, torch.Tensor]:
    X, Y = draw(family, n=6, batch=2)
    return kglm.KernelGLM(kglm.SquaredExponential(0.3), family, lam=0.5, prior=prior).fit(X, Y).as_equilibrium(), Y


@pytest.mark.parametrize(("family", "prior"), FORMS, ids=repr)
def test_a_frozen_layer_gives_no_graph(family, prior):
    layer, Y = layer_of(family, prior)
    assert layer(Y).requires_grad
    assert not layer.requires_grad_(False)(Y).requires_grad


@pytest.mark.parametrize(("family", "prior"), FORMS, ids=repr)
def test_second_derivatives_are_the_slope_of_the_gradient(family, prior):
    layer, Y = layer_of(family, prior)
    names = [name for name, _ in layer.named_parameters()]
    at = [p.detach() for p in layer.parameters()]
    torch.manual_seed(0)
    directions = [torch.randn_like(p) for p in at]

    def gradient(weights: list[torch.Tensor], again: bool = False) -> tuple[torch.Tensor, ...]:
        weights = [w.requires_grad_() for w in weights]
        loss = torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (Y,)).square().sum()
        first = torch.autograd.grad(loss, weights, create_graph=again)
        if not again:
            return first
        return torch.autograd.grad(sum((g * d).sum() for g, d in zip(first, directions, strict=True)), weights)

    step = 1e-5
    up, down = (gradient([w + h * d for w, d in zip(at, directions, strict=True)]) for h in (step, -step))
    for got, a, b in zip(gradient([w.clone() for w in at], again=True), up, down, strict=True):
        torch.testing.assert_close(got, (a - b) / (2 * step), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning")  # PyTorch's own, in forward mode
@pytest.mark.parametrize(("family", "prior"), FORMS, ids=repr)
def test_the_transforms_of_torch_func_go_through_it(family, prior):
    layer, Y = layer_of(family, prior)
    layer.eval()
    W = layer.cell.W1.detach()

    def loss(W: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"layer.cell.W1": W}, (Y,)).square().sum()

    expected = torch.autograd.functional.jacobian(loss, W)
    torch.testing.assert_close(torch.func.grad(loss)(W), expected)
    torch.testing.assert_close(torch.func.jvp(loss, (W,), (W,))[1], (expected * W).sum(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(torch.func.vmap(loss)(torch.stack([W, 0.9 * W])), torch.stack([loss(W), loss(0.9 * W)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_poisson_layer_predicts_in_inference_mode(dtype):
    layer, Y = layer_of(kglm.Poisson(), FLAT)
    layer = layer.to(dtype)
    with torch.inference_mode():
        found = layer(Y.to(dtype))
    torch.testing.assert_close(found, layer(Y.to(dtype)).detach())


@pytest.mark.parametrize("lam", [0.1, 0.001])
def test_forward_mode_holds_where_the_map_expands(lam):
    """f = k(X₂, X)(K + λ)⁻¹y: its derivative is known, and v = Jv + h is no contraction."""
    torch.manual_seed(0)
    X, X2, y, d = (torch.randn(*shape, dtype=torch.float64) for shape in ((9, 2), (5, 2), (9,), (9,)))
    kernel = kglm.SquaredExponential(1.0)
    layer = kglm.KernelGLM(kernel, kglm.Gaussian(), lam=lam).fit(X, y).as_equilibrium(X2).eval()
    exact = torch.linalg.solve(kernel(X, X) + lam * torch.eye(9, dtype=X.dtype), kernel(X, X2)).mT @ d
    _, found = torch.func.jvp(lambda y: layer(y[None])[0], (y,), (d,))
    torch.testing.assert_close(found, exact, rtol=1e-7, atol=1e-8)


def test_just_below_contraction_one_the_averaged_step_is_taken():
    X = torch.randn(30, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    kernel = kglm.SquaredExponential(1.0)
    lam = float(torch.linalg.matrix_norm(kernel(X, X), 2)) / 0.9999
    layer = kglm.KernelGLM(kernel, kglm.Gaussian(), lam=lam).fit(X, X[:, 0].sin()).as_equilibrium()
    solution = layer.layer(X[None, :, 0].sin())
    assert solution.converged.all() and solution.steps.max() < 100
