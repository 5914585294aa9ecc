"""The programs of the patch step against float64, for every formula: values, gradients, Hessian product."""

import contextlib
import itertools
import unittest.mock

import torch
from formulas import Cauchy, Gaussian, Multiquadric, Tangent

from kerneq.fused import radial as fused_radial
from kerneq.fused import radial_triton
from kerneq.kernels import radial
from kerneq.kernels.radial import plain_step, radial_hvp, radial_step


def error(got, exact):
    return (torch.linalg.norm(got.double() - exact) / torch.linalg.norm(exact)).item()


def step_and_gradients(step, formula, leaves, split, patch, value, cotangents):
    """m, S if `value`, and the gradients with respect to the leaves; v may be none of them."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in leaves]
    outputs = step(formula, *leaves, split=split, patch=patch, value=value)
    assert value or outputs[1] is None
    outputs = outputs if value else outputs[:1]
    wanted = [x for x in leaves if x is not None]
    return [*outputs, *torch.autograd.grad(outputs, wanted, cotangents[: len(outputs)])]


def by_triton():
    """As on a card: the interpreter runs what the tests of `device` would refuse."""
    both = contextlib.ExitStack()
    both.enter_context(unittest.mock.patch.object(fused_radial, "runs_triton", lambda a: a.dtype != torch.float64))
    both.enter_context(unittest.mock.patch.object(radial, "_runs_fused", fused_radial.has_programs))
    return both


def problem(dtype, last, split, patch, shape, with_v):
    n = split * patch * patch
    form = torch.channels_last if last else torch.contiguous_format
    a, v, u = (torch.randn(shape).to(dtype).to(memory_format=form) for _ in range(3))
    half = torch.randn(n, n) / n
    Q, gamma, tau = half @ half.T + 0.3 * torch.eye(n), torch.tensor(0.05), torch.randn(shape[0])
    return [a, v if with_v else None, Q, gamma], (u, tau)


def agree_with_float64():
    for formula, dtype, tol, last, split, patch, shape, with_v in [
        (Gaussian, torch.float32, 1e-6, True, 8, 2, (3, 32, 8, 8), True),
        (Gaussian, torch.float16, 2e-3, True, 8, 2, (2, 80, 4, 4), True),
        (Cauchy, torch.float32, 1e-6, True, 4, 4, (2, 12, 8, 12), True),  # 18 patches: a masked tile
        (Cauchy, torch.float32, 1e-6, False, 4, 4, (2, 8, 8, 8), False),
        (Multiquadric, torch.float32, 1e-6, False, 8, 2, (2, 24, 4, 8), True),
        (Multiquadric, torch.float32, 1e-6, True, 16, 1, (2, 32, 3, 3), True),
    ]:
        inputs, cotangents = problem(dtype, last, split, patch, shape, with_v)
        exact = [None if x is None else x.double() for x in inputs]
        for value in (True, False):
            case = (split, patch, value)
            expected = step_and_gradients(plain_step, formula, exact, *case, [x.double() for x in cotangents])
            with by_triton():
                got = step_and_gradients(radial_step, formula, inputs, *case, cotangents)
            errors = [error(x, y) for x, y in zip(got, expected, strict=True)]
            assert len(errors) == 4 + with_v + value and max(errors) < tol, (formula, dtype, *case, last, errors)
            assert got[0].stride() == inputs[0].stride() and got[0].dtype == dtype
        if with_v:
            sizes = {"split": split, "patch": patch}
            expected = radial_hvp(formula, *exact, **sizes)(cotangents[0].double())
            with by_triton():
                got = radial_hvp(formula, *inputs, **sizes)(cotangents[0])
            assert error(got, expected) < tol and got.stride() == inputs[0].stride()


def give_only_the_gradients_asked_for():
    (a, v, Q, gamma), (u, tau) = problem(torch.float32, True, 8, 2, (2, 16, 4, 4), True)
    everything = radial_triton.backward(Gaussian, u, tau, a, v, Q, gamma, 8, 2, [True] * 4)
    for wanted in itertools.product((False, True), repeat=4):
        some = radial_triton.backward(Gaussian, u, tau, a, v, Q, gamma, 8, 2, wanted)
        for grad, whole, want in zip(some, everything, wanted, strict=True):
            assert (grad is not None) == want
            if want:
                torch.testing.assert_close(grad, whole)


def differentiate_twice():
    for with_v, value in itertools.product((False, True), repeat=2):
        inputs, cotangents = problem(torch.float32, True, 8, 2, (2, 16, 4, 4), with_v)
        leaves = [x.requires_grad_() for x in inputs if x is not None]
        arguments = {"split": 8, "patch": 2, "value": value}

        def second_order(step, inputs=inputs, cotangents=cotangents, leaves=leaves, arguments=arguments):
            outputs = step(Cauchy, *inputs, **arguments)
            outputs = outputs if arguments["value"] else outputs[:1]
            first = torch.autograd.grad(outputs, leaves, cotangents[: len(outputs)], create_graph=True)
            return [*first, *torch.autograd.grad(sum(x.square().sum() for x in first), leaves)]

        expected = second_order(plain_step)
        with by_triton():
            torch.testing.assert_close(second_order(radial_step), expected, rtol=1e-4, atol=1e-5)


torch.manual_seed(0)
agree_with_float64()
give_only_the_gradients_asked_for()
differentiate_twice()
assert radial_triton.programs(Tangent) is None
for formula in (Gaussian, Multiquadric, Cauchy):
    assert radial_triton.programs(formula) is not None  # plain PyTorch would be slow
