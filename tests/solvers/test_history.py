"""The history of Anderson and Proximal: its weights, its storage order, and its Triton kernels against float64.

The interpreter of Triton must be chosen before Triton is imported, so it runs in a process of its own.
"""

import dataclasses
import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from kerneq.solvers.history import History, eliminate, inner
from torch import Tensor

import kerneq
from kerneq.equation import Evaluation
from kerneq.solvers import Anderson, Broyden

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed.")

COMPARISON = """
import dataclasses, torch
from kerneq.solvers.history import History
from kerneq.solvers.history_triton import extrapolate

def compare(dtype, memory, numbers, relaxation, masked, alone, device):
    "Seven steps of the kernels beside seven steps of the plain form in float64, on the same rounded numbers."
    generator = torch.Generator(device).manual_seed(0)
    batch, ridge = 3, 1e-4
    z = torch.zeros(batch, numbers, dtype=dtype, device=device)
    got, exact = History.empty(z, memory), History.empty(z.double(), memory)
    worst = 0.0
    for step in range(7):
        z, image = torch.randn(2, batch, numbers, generator=generator, device=device).to(dtype)
        image = torch.where(torch.arange(batch, device=device)[:, None] == 1, image * 4.0**-step, image)
        z[1] *= 4.0**-step  # gaps of very different size
        if step == 2:
            image[2] = z[2]  # a gap of zero
        accepted = torch.rand(batch, generator=generator, device=device) < 0.7 if masked else None
        got, exact = (dataclasses.replace(history, pushed=step + 1) for history in (got, exact))
        mixture = extrapolate(got, z, image, ridge, relaxation, accepted, numbers if alone else 0)
        entry, gap = (stored[:, got.newest].double() for stored in (got.images, got.gaps))
        rounding = {"rtol": torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}  # the interpreter truncates
        torch.testing.assert_close(entry, torch.lerp(z.double(), image.double(), relaxation), **rounding)
        torch.testing.assert_close(gap, image.double() - z.double(), **rounding)
        exact.enter(entry, gap, accepted)
        expected = exact.mix(exact.weights(ridge))
        assert torch.equal(got.valid, exact.valid)
        torch.testing.assert_close(got.gram.double(), exact.gram, rtol=1e-5, atol=1e-5 * float(exact.gram.max()))
        assert mixture.dtype == dtype
        error = torch.linalg.norm(mixture.double() - expected, dim=1) / torch.linalg.norm(expected, dim=1)
        worst = max(worst, float(error.max()))
    return worst

CASES = [
    (torch.float32, 5, 100, 0.7, True, True),
    (torch.float32, 5, 5000, 1.0, True, False),
    (torch.float32, 3, 2048, 0.7, False, False),
    (torch.float32, 1, 17, 1.0, False, True),
    (torch.float32, 16, 300, 1.0, True, False),
    (torch.bfloat16, 5, 2100, 1.0, True, False),
    (torch.float16, 2, 300, 0.5, False, True),
]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}

def compare_all(device):
    for dtype, *case in CASES:
        worst = compare(dtype, *case, device)
        assert worst < TOLERANCE[dtype], (dtype, case, worst)
        print("agreed", dtype, case, worst)
"""
SOLVES = """
import kerneq
from kerneq.solvers import Anderson, Proximal
from kerneq.cells import ConvCell
from kerneq.kernels import Gaussian

torch.manual_seed(0)
cell = ConvCell(Gaussian(gamma=0.5, patch=2, split=2, hidden=6), inputs=2, state=3, features=4, norm=1.6).eval()
x = torch.randn(4, 2, 4, 6).to(memory_format=torch.channels_last)
with torch.no_grad():
    f = cell.bind(x)
    for solver in (Anderson(3, relaxation=0.8), Proximal()):
        found = []
        for on in (False, True):
            History.on_triton = property(lambda self: on)
            found.append(kerneq.solve(f, None, solver, tol=1e-5, max_steps=60))
        plain, fused = found
        assert plain.converged.all() and fused.converged.all()
        assert int((plain.steps - fused.steps).abs().max()) <= 1, (plain.steps, fused.steps)
        torch.testing.assert_close(plain.value, fused.value, rtol=1e-3, atol=1e-4)
        print("solved", fused.steps.tolist())
"""


@needs_triton
def test_the_kernels_interpreted_agree_with_float64_and_solve_as_the_plain_form_does():
    code = f"{COMPARISON}\ntorch.set_num_threads(1)\ncompare_all('cpu')\n{SOLVES}"
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("agreed") == 7 and run.stdout.count("solved") == 2


@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="There is no CUDA card here.")
def test_the_kernels_on_the_card_agree_with_float64():
    names: dict[str, object] = {}
    exec(COMPARISON, names)
    names["compare_all"]("cuda")


def history_of(gaps: Tensor, images: Tensor) -> History:
    """(m, batch, numbers), entered in order."""
    history = History.empty(images[0], len(images))
    for gap, image in zip(gaps, images, strict=True):
        history = dataclasses.replace(history, pushed=history.pushed + 1)
        history.enter(image, gap, None)
    return history


def test_the_weights_minimise_the_gap_of_the_mixture():
    torch.manual_seed(0)
    gaps, images = torch.randn(2, 4, 3, 20, dtype=torch.float64)
    alpha = history_of(gaps, images).weights(0.0)
    torch.testing.assert_close(alpha.sum(1), torch.ones(3, dtype=torch.float64))
    for sample in range(3):  # the same by least squares: eliminate α₀ = 1 − Σ αⱼ
        G = gaps[:, sample].T
        rest = torch.linalg.lstsq(G[:, 1:] - G[:, :1], -G[:, :1]).solution.flatten()
        torch.testing.assert_close(alpha[sample, 1:], rest)


def test_elimination_without_pivoting_solves_positive_definite_systems():
    torch.manual_seed(0)
    half, b = torch.randn(4, 6, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    A = half @ half.mT + 0.1 * torch.eye(6, dtype=torch.float64)
    torch.testing.assert_close(eliminate(A, b), torch.linalg.solve(A, b))


def test_a_sample_that_is_not_accepted_forgets_everything():
    torch.manual_seed(0)
    points = torch.randn(4, 2, 3, 8, dtype=torch.float64)
    history = History.empty(points[0, 0], 3)
    for z, image in points[:3]:
        _, history = history.extrapolate(Evaluation(z, image), 1e-10)
    z, image = points[3]
    mixture, history = history.extrapolate(Evaluation(z, image), 1e-10, accepted=torch.tensor([True, False, True]))
    assert history.valid.tolist() == [[True] * 3, [False] * 3, [True] * 3]
    assert torch.equal(mixture[1], image[1]) and not torch.equal(mixture[0], image[0])
    torch.testing.assert_close(history.square, (image - z).square().sum(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_multiplied_and_summed_in_float32(dtype):
    torch.manual_seed(0)
    many, one = torch.randn(2, 3, 10_000).to(dtype), torch.randn(2, 10_000).to(dtype)
    exact = torch.einsum("bjn,bn->bj", many.double(), one.double())
    torch.testing.assert_close(inner(many, one).double(), exact, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("solver", [Anderson(), Broyden()], ids=str)
@pytest.mark.parametrize("turn", [0, 1, 2])
def test_the_storage_order_of_the_images_does_not_matter(solver, turn):
    """Channels-last images of a contiguous start, and even an order that changes on the way."""
    orders = [torch.contiguous_format, torch.channels_last]
    calls = 0

    def f(z: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        last = calls > 2 if turn == 2 else turn == 1
        return (torch.cos(z) * torch.linspace(0.2, 1, 60, dtype=z.dtype).view(3, 4, 5)).contiguous(
            memory_format=orders[last]
        )

    z0 = torch.linspace(0, 2, 120, dtype=torch.float64).view(2, 3, 4, 5)
    found = kerneq.solve(f, z0, solver, tol=1e-9, max_steps=40)
    expected = kerneq.solve(lambda z: f(z).contiguous(), z0, solver, tol=1e-9, max_steps=40)
    assert found.converged.all() and torch.equal(found.steps, expected.steps)
    torch.testing.assert_close(found.value, expected.value, rtol=1e-12, atol=1e-12)
