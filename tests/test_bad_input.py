"""What people get wrong, and the one sentence they get back."""

import pytest
import torch
from helpers import cell_of, input_of

import kerneq
from kerneq.cells import ConvCell, DenseCell
from kerneq.gradients import Implicit, Phantom, Unrolled
from kerneq.kernels import Adaptive, Gaussian, Linear, Polynomial
from kerneq.prox import SoftThreshold
from kerneq.solvers import Anderson, Broyden, Picard, Proximal

pytestmark = pytest.mark.usefixtures("float64")


def dense(**more) -> DenseCell:
    return DenseCell(**{"kernel": Linear(), "inputs": 3, "state": 5, "features": 6, **more})


def conv(**more) -> ConvCell:
    return ConvCell(**{"kernel": Linear(), "inputs": 2, "state": 3, "features": 4, **more})


def layer(**more) -> kerneq.Equilibrium:
    return kerneq.Equilibrium(dense(), **more)


def solved(z0=None, f=torch.cos, **more) -> kerneq.Solution:
    return kerneq.solve(f, torch.zeros(2, 3) if z0 is None else z0, Picard(), **more)


def given(x: object, cell: kerneq.cells.AbstractKernelCell | None = None) -> kerneq.Solution:
    return kerneq.Equilibrium(cell or dense())(x)


def two_gradients() -> None:
    with kerneq.equilibrium.solving(layer(), gradient=Phantom(), exact=True):
        pass


# What is done, the kind of error, and the words it has.
REFUSED = {
    "norm zero": (lambda: dense(norm=0.0), ValueError, "`norm` must be positive and finite, got 0.0"),
    "norm negative": (lambda: conv(norm=-1), ValueError, "`norm` must be positive and finite, got -1"),
    "norm nan": (lambda: dense(norm=float("nan")), ValueError, "`norm` must be positive and finite, got nan"),
    "norm infinite": (lambda: dense(norm=float("inf")), ValueError, "`norm` must be positive and finite, got inf"),
    "norm text": (lambda: dense(norm="1"), ValueError, "`norm` must be positive and finite, got '1'"),
    "state zero": (lambda: dense(state=0), ValueError, "`state` must be a whole number, at least 1, got 0"),
    "inputs a fraction": (lambda: conv(inputs=2.5), ValueError, "`inputs` must be a whole number, at least 1, got 2.5"),
    "features negative": (lambda: dense(features=-4), ValueError, "`features` must be a whole number"),
    "even convolution": (lambda: conv(size=4), ValueError, "`size` must be odd.*got 4"),
    "kernel by name": (
        lambda: dense(kernel="gaussian"),
        TypeError,
        "`kernel` must come from `kerneq.kernels`, got 'gaussian'",
    ),
    "split does not divide": (
        lambda: conv(kernel=Gaussian(split=3)),
        ValueError,
        "`split` must divide the number of features: 4 is not a multiple of 3",
    ),
    "split of vectors": (lambda: dense(kernel=Gaussian(split=4)), ValueError, "6 is not a multiple of 4"),
    "patch zero": (lambda: Gaussian(patch=0), ValueError, "`patch` must be a whole number, at least 1, got 0"),
    "hidden true": (lambda: Gaussian(hidden=True), ValueError, "`hidden` must be a whole number, at least 1, got True"),
    "gamma zero": (lambda: Gaussian(gamma=0), ValueError, "`gamma` must be positive and finite, got 0"),
    "gamma text": (lambda: Gaussian(gamma="auto"), ValueError, "`gamma` must be positive and finite, got 'auto'"),
    "gamma fixed": (lambda: Gaussian(-1.0), ValueError, "`gamma` must be positive and finite, got -1.0"),
    "share": (lambda: Adaptive(0.0), ValueError, "`share` must be positive and finite, got 0.0"),
    "momentum": (lambda: Adaptive(momentum=2.0), ValueError, r"`momentum` must lie in \(0, 1\], got 2.0"),
    "floor": (lambda: Adaptive(floor=-1.0), ValueError, "`floor` must not be negative, got -1.0"),
    "degree one": (lambda: Polynomial(degree=1), ValueError, "`degree` must be a whole number, at least 2, got 1"),
    "offset": (lambda: Polynomial(offset=-1.0), ValueError, "`offset` must not be negative, got -1.0"),
    "threshold": (lambda: SoftThreshold(-0.1), ValueError, "`threshold` must not be negative, got -0.1"),
    "tol zero": (lambda: layer(tol=0.0), ValueError, "`tol` must be positive and finite, got 0.0"),
    "tol text": (lambda: layer(tol="1e-3"), ValueError, "`tol` must be positive and finite, got '1e-3'"),
    "max_steps zero": (lambda: layer(max_steps=0), ValueError, "`max_steps` must be a whole number, at least 1, got 0"),
    "max_steps a fraction": (lambda: layer(max_steps=2.5), ValueError, "`max_steps` must be a whole number"),
    "check_every zero": (lambda: layer(check_every=0), ValueError, "`check_every` must be a whole number"),
    "on_failure": (lambda: layer(on_failure="ignore"), ValueError, "`on_failure` must be 'raise', 'warn' or 'return'"),
    "solver by name": (lambda: layer(solver="anderson"), TypeError, "`solver` must come from `kerneq.solvers`"),
    "gradient by name": (lambda: layer(gradient="ift"), TypeError, "`gradient` must come from `kerneq.gradients`"),
    "solver as a class": (lambda: layer(solver=Anderson), TypeError, "`solver` must come from `kerneq.solvers`"),
    "no cell": (lambda: kerneq.Equilibrium(3), TypeError, "A layer is made of a cell, a module or a function.*got 3"),
    "relaxation zero": (lambda: Picard(relaxation=0), ValueError, r"`relaxation` must lie in \(0, 1\], got 0"),
    "relaxation two": (lambda: Anderson(relaxation=2), ValueError, r"`relaxation` must lie in \(0, 1\], got 2"),
    "phantom relaxation": (lambda: Phantom(relaxation=0), ValueError, r"`relaxation` must lie in \(0, 1\]"),
    "memory zero": (lambda: Anderson(memory=0), ValueError, "`memory` must be a whole number, at least 1, got 0"),
    "memory a fraction": (lambda: Broyden(memory=2.5), ValueError, "`memory` must be a whole number"),
    "memory negative": (lambda: Proximal(memory=-1), ValueError, "`memory` must be a whole number, at least 0, got -1"),
    "relaxation text": (lambda: Picard("1"), ValueError, r"`relaxation` must lie in \(0, 1\], got '1'"),
    "ridge text": (lambda: Anderson(ridge="0"), ValueError, "`ridge` must not be negative, got '0'"),
    "ridge": (lambda: Anderson(ridge=-1.0), ValueError, "`ridge` must not be negative, got -1.0"),
    "proximal ridge": (lambda: Proximal(ridge=-1.0), ValueError, "`ridge` must not be negative, got -1.0"),
    "fraction": (lambda: Proximal(fraction=0.0), ValueError, r"`fraction` must lie in \(0, 1\], got 0.0"),
    "phantom steps": (lambda: Phantom(steps=0), ValueError, "`steps` must be a whole number, at least 1, got 0"),
    "unrolled steps": (lambda: Unrolled(steps=1.5), ValueError, "`steps` must be a whole number"),
    "backward tol": (lambda: Implicit(tol=-1), ValueError, "`tol` must be positive and finite, got -1"),
    "backward check_every": (lambda: Implicit(check_every=0), ValueError, "`check_every` must be a whole number"),
    "backward on_failure": (lambda: Implicit(on_failure="no"), ValueError, "`on_failure` must be"),
    "backward solver by name": (lambda: Implicit("picard"), TypeError, "`solver` must come from `kerneq.solvers`"),
    "backward solver as a class": (lambda: Implicit(Broyden), TypeError, "`solver` must come from `kerneq.solvers`"),
    "two gradients": (two_gradients, ValueError, "give either it or `gradient`, got both"),
    "integers": (
        lambda: given(torch.zeros(2, 3, dtype=torch.long)),
        TypeError,
        "floating-point tensor, got torch.int64",
    ),
    "a list": (lambda: given([0.0, 1.0]), TypeError, "floating-point tensor, got list"),
    "another width": (lambda: given(torch.zeros(2, 4)), ValueError, r"shape \(any, 3\), got \(2, 4\)"),
    "a vector": (lambda: given(torch.zeros(3)), ValueError, r"shape \(any, 3\), got \(3,\)"),
    "a picture for vectors": (lambda: given(input_of("conv")), ValueError, r"shape \(any, 3\), got \(4, 2, 4, 4\)"),
    "vectors for a convolution": (
        lambda: given(input_of("dense"), conv()),
        ValueError,
        r"shape \(any, 2, any, any\), got \(4, 3\)",
    ),
    "no samples": (lambda: given(torch.zeros(0, 3)), ValueError, r"at least one sample, got shape \(0, 3\)"),
    "another dtype": (lambda: given(torch.zeros(2, 3).float()), TypeError, "float32 but the weights are torch.float64"),
    "NaN": (lambda: given(torch.full((2, 3), torch.nan)), ValueError, "infinite or NaN entries"),
    "infinite": (lambda: given(torch.tensor([[1.0, 2.0, torch.inf]])), ValueError, "infinite or NaN entries"),
    "patches that do not tile": (
        lambda: given(input_of("conv"), conv(kernel=Gaussian(patch=3, split=2))),
        ValueError,
        "`patch` must divide the picture: 4×4 is not a multiple of 3",
    ),
    "a high degree with too large a norm": (
        lambda: given(input_of("dense"), dense(kernel=Polynomial(degree=3), norm=2.0)),
        ValueError,
        "degree 3 needs `norm` below 1.83, got 2",
    ),
    "tol of a solve": (lambda: solved(tol=-1.0), ValueError, "`tol` must be positive"),
    "max_steps of a solve": (lambda: solved(max_steps=0), ValueError, "`max_steps` must be a whole number"),
    "solver of a solve by name": (
        lambda: kerneq.solve(torch.cos, torch.zeros(2, 3), "picard"),
        TypeError,
        "`solver` must come",
    ),
    "gradient of a fixed point by name": (
        lambda: kerneq.fixed_point(torch.cos, torch.zeros(2, 3), gradient="ift"),
        TypeError,
        "`gradient` must come from `kerneq.gradients`, got 'ift'",
    ),
    "check_every of a solve": (lambda: solved(check_every=0), ValueError, "`check_every` must be a whole number"),
    "start no tensor": (lambda: solved(z0=0.5), TypeError, "A state must be a tensor, or a tuple.*got float"),
    "start no tensor, with an input": (
        lambda: kerneq.fixed_point(lambda z, x: x, 0.5, torch.zeros(2, 3)),
        TypeError,
        "A state must be a tensor, or a tuple.*got float",
    ),
    "inject for the features": (
        lambda: given(input_of("dense"), dense(inject=torch.nn.Linear(3, 6))),
        ValueError,
        r"`inject` must give the shape \(any, 5\), that of the state, for this kernel, got \(4, 6\)",
    ),
    "inject for the state": (
        lambda: given(input_of("conv"), conv(kernel=Gaussian(split=4), inject=torch.nn.Conv2d(2, 3, 1))),
        ValueError,
        r"`inject` must give the shape \(any, 4, any, any\), that of the features.*got \(4, 3, 4, 4\)",
    ),
    "inject gives vectors": (
        lambda: given(input_of("conv"), conv(inject=torch.nn.Flatten())),
        ValueError,
        r"`inject` must give the shape \(any, 3, any, any\).*got \(4, 32\)",
    ),
    "start a scalar": (lambda: solved(torch.tensor(0.5)), ValueError, r"first dimension is the batch.*got.*\(\)"),
    "start integers": (lambda: solved(torch.zeros(2, 3, dtype=torch.int)), ValueError, "floating-point.*torch.int32"),
    "start empty": (lambda: solved(torch.zeros(0, 3)), ValueError, r"one sample at least.*\(0, 3\)"),
    "start of another batch": (
        lambda: kerneq.solve(dense().bind(input_of("dense")), torch.zeros(1, 5), Proximal()),
        ValueError,
        r"`z0` must have the shape of the state, \(4, 5\), got \(1, 5\)",
    ),
    "another shape": (lambda: solved(f=lambda z: z[:, :2]), ValueError, r"keep the shape.*\(2, 3\) and gave \(2, 2\)"),
    "changed in place": (lambda: solved(f=lambda z: z.mul_(0.5).add_(1)), ValueError, "f must not change z in place"),
    "no tensor back": (lambda: solved(f=lambda z: (z, z)), ValueError, "keep the shape.*gave tuple"),
    "no start": (lambda: kerneq.solve(torch.cos, None, Picard()), TypeError, "`z0` may be None only for the equation"),
}
UNKNOWN = {
    "solver": lambda: Anderson(m=5),
    "gradient": lambda: Phantom(tau=0.8),
    "kernel": lambda: Gaussian(width=1.0),
    "cell": lambda: dense(bound=1.0),
    "layer": lambda: layer(f_max_iter=3),
    "solve": lambda: solved(max_iter=3),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_means_nothing_is_refused_in_one_sentence(case):
    do, kind, words = REFUSED[case]
    with pytest.raises(kind, match=words) as caught:
        do()
    text = str(caught.value)
    assert text.endswith(".") and "\n" not in text and len(text) < 250, text


@pytest.mark.parametrize("case", UNKNOWN)
def test_an_unknown_argument_is_refused_by_name(case):
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        UNKNOWN[case]()


@pytest.mark.parametrize("gradient", [Implicit(), Phantom(), Unrolled(5)])
@pytest.mark.parametrize("form", ["dense", "conv"])
def test_a_sample_that_overflows_spoils_no_gradient_of_a_loss_that_masks_it(form, gradient):
    layer = kerneq.Equilibrium(cell_of(form, Gaussian(gamma=0.2, split=2)), gradient=gradient).float().eval()
    x = input_of(form).float()
    x[1] = 3e38
    kept = torch.tensor([0, 2, 3])
    grads = []
    for value in (layer(x).value[kept], layer(x[kept]).value):
        layer.zero_grad()
        value.square().sum().backward()
        grads.append([parameter.grad.clone() for parameter in layer.parameters()])
    for masked, without in zip(*grads, strict=True):
        torch.testing.assert_close(masked, without, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("gradient", [Implicit(tol=1e-10), Phantom(), Unrolled(20)])
def test_a_sample_of_a_function_of_inputs_that_turns_nan_spoils_no_gradient_either(gradient):
    linear, x, kept = torch.nn.Linear(4, 4), torch.randn(3, 4), torch.tensor([0, 2])
    x[1] = torch.nan
    grads = []
    for rows in (torch.arange(3), kept):
        s = kerneq.fixed_point(
            lambda z, x: torch.tanh(0.5 * linear(z) + x),
            torch.zeros(len(rows), 4),
            x[rows],
            gradient=gradient,
            on_failure="return",
        )
        grads.append(torch.autograd.grad(s.value[s.converged].square().sum(), linear.weight)[0])
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)
