"""Every family: A, its derivatives, its link and its support agree with one another."""

import math

import mpmath
import pytest
import torch

from kerneq import kglm
from kerneq.kglm.families import FLAT
from kerneq.lab.verify.kglm_propositions import canonical

FAMILIES: list[kglm.AbstractFamily] = [
    kglm.Gaussian(),
    kglm.Gaussian(noise=0.3),
    kglm.Bernoulli(),
    kglm.Binomial(7),
    kglm.Poisson(),
    kglm.Ising(),
    kglm.Ising(temperature=2.0),
    kglm.Rectified(),
    kglm.Rectified(slope=0.0),
    kglm.LeakyReLU(0.2),
    kglm.Custom(lambda eta: torch.log(2 * torch.cosh(eta)), bound=1.0),
]
PRIORS = [FLAT, kglm.Normal(0.7), kglm.Logistic(0.5), kglm.Prior(kglm.Binomial(3), 0.4)]
ETA = torch.linspace(-3.9, 3.9, 14, dtype=torch.float64)


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
def test_mean_and_variance_are_the_derivatives_of_the_log_partition(family):
    eta = ETA.clone().requires_grad_()
    (mean,) = torch.autograd.grad(family.log_partition(eta).sum(), eta, create_graph=True)
    (variance,) = torch.autograd.grad(mean.sum(), eta)
    torch.testing.assert_close(family.mean(ETA), mean.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(family.variance(ETA), variance, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
def test_the_link_inverts_the_mean(family):
    torch.testing.assert_close(canonical(family, family.mean(ETA)), ETA, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("family", "mean"), [(kglm.Bernoulli(), 1.5), (kglm.LeakyReLU(0.0), -2.0)])
def test_a_mean_that_no_canonical_parameter_has_is_refused_in_words(family, mean):
    with pytest.raises(ValueError, match=f"no canonical parameter of mean {mean:g}"):
        canonical(family, torch.tensor([0.5, mean], dtype=torch.float64))


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
def test_the_variance_is_positive_and_below_its_stated_bound(family):
    eta = torch.linspace(-60, 4, 2001, dtype=torch.float64)
    variance = family.variance(eta)
    assert (variance >= 0).all()
    lowest, highest = family.variance_range(below=4.0)
    assert (variance >= lowest * (1 - 1e-12)).all() and (variance <= highest * (1 + 1e-12)).all()


@pytest.mark.parametrize("factor", PRIORS, ids=repr)
def test_the_prior_factors_derivatives_are_right_and_bounded(factor):
    eta = ETA.clone().requires_grad_()
    (slope,) = torch.autograd.grad(factor.penalty(eta).sum() + 0 * eta.sum(), eta, create_graph=True)
    (curve,) = torch.autograd.grad(slope.sum() + 0 * eta.sum(), eta)
    torch.testing.assert_close(factor.slope(ETA), slope.detach())
    torch.testing.assert_close(factor.curvature(ETA), curve)
    assert (curve <= factor.max_curvature() + 1e-12).all()


@pytest.mark.parametrize("slope", [0.0, 0.1, 0.5])
def test_the_rectified_family_is_admissible_because_its_log_partition_is_a_laplace_transform(slope):
    # y = √a g + √(1−a) h, g normal, h half-normal: E e^{ηy} = 2 e^{A(η)}, here by quadrature
    x = torch.linspace(-14, 14, 40001, dtype=torch.float64)
    density = torch.exp(-0.5 * x.square()) / math.sqrt(2 * math.pi)
    for eta in (-2.0, 0.5, 1.5):
        normal = torch.trapezoid(density * torch.exp(eta * math.sqrt(slope) * x), x)
        half = torch.trapezoid(2 * density[20000:] * torch.exp(eta * math.sqrt(1 - slope) * x[20000:]), x[20000:])
        A = kglm.Rectified(slope).log_partition(torch.tensor(eta, dtype=torch.float64))
        torch.testing.assert_close((normal * half).log(), A + math.log(2), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("dtype", "exact"), [(torch.float64, 2e-6), (torch.float32, 2e-2)])
def test_the_rectified_family_keeps_its_digits_far_to_the_left(dtype, exact):
    u = torch.tensor([-1e7, -1e5, -900.0, -100.0, -40.1, -39.9, -8.1, -7.9, 0.0, 3.0], dtype=dtype)
    mpmath.mp.dps = 60
    tilts = [mpmath.mpf(float(value)) for value in u]
    hazards = [mpmath.npdf(tilt) / (mpmath.erfc(-tilt / mpmath.sqrt(2)) / 2) for tilt in tilts]
    mean = torch.tensor([float(tilt + h) for tilt, h in zip(tilts, hazards, strict=True)], dtype=dtype)
    variance = torch.tensor([float(1 - h * (tilt + h)) for tilt, h in zip(tilts, hazards, strict=True)], dtype=dtype)
    family = kglm.Rectified(slope=0.0)
    torch.testing.assert_close(family.mean(u), mean, rtol=exact, atol=0)
    torch.testing.assert_close(family.variance(u), variance, rtol=exact, atol=0)
    (slope,) = torch.autograd.grad(family.mean(u.requires_grad_()).sum(), u)
    torch.testing.assert_close(slope, variance, rtol=5 * exact, atol=1e-12)


def test_softplus_is_the_mean_of_no_lattice_family():
    # A′ = softplus means e^A = exp(−Li₂(−x)), x = e^η; a base measure on 0, 1, 2 … would be its coefficients
    log_coefficients = [0.0] + [(-1) ** (k + 1) / k**2 for k in range(1, 8)]
    mass = [1.0]
    for n in range(1, 8):
        mass.append(sum(k * log_coefficients[k] * mass[n - k] for k in range(1, n + 1)) / n)
    assert min(mass) < -1e-3


def test_the_rectified_mean_tends_to_a_leaky_relu():
    far = torch.tensor([-400.0, 400.0], dtype=torch.float64)
    torch.testing.assert_close(
        kglm.Rectified(0.1).mean(far) / far,
        torch.tensor([0.1, 1.0], dtype=torch.float64),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize(
    ("family", "y", "words"),
    [
        (kglm.Bernoulli(), 3.0, "Binomial targets must be whole numbers from 0 to 1, got 3."),
        (kglm.Poisson(), -1.0, "Poisson targets must be whole numbers from 0, got -1."),
        (kglm.Ising(), 0.5, "Ising targets must be −1 or 1, got 0.5."),
        (kglm.Rectified(0.0), -2.0, "Rectified targets must be at least 0, got -2."),
    ],
)
def test_targets_outside_the_support_are_refused_in_words(family, y, words):
    with pytest.raises(ValueError, match=words.replace(".", r"\.").replace("−", ".")):
        family.statistic(torch.tensor([1.0, y]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: kglm.Gaussian(0.0),
        lambda: kglm.Binomial(0),
        lambda: kglm.Ising(-1.0),
        lambda: kglm.Rectified(1.0),
        lambda: kglm.LeakyReLU(-0.1),
        lambda: kglm.Normal(-1.0),
        lambda: kglm.Logistic(0.0),
        lambda: kglm.Prior(kglm.Gaussian(), -1.0),
        lambda: kglm.White(-1.0),
    ],
)
def test_parameters_out_of_range_are_refused(make):
    with pytest.raises(ValueError, match="must"):
        make()
