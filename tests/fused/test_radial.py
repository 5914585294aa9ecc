"""The patch step of every radial kernel: its definition, its derivatives and its Triton programs."""

import itertools

import pytest
import torch
from formulas import FORMULAS, Cauchy, Gaussian, Multiquadric, Tangent
from helpers import needs_gpu
from interpreter import needs_triton, run_interpreted
from torch import Tensor

from kerneq.kernels.radial import patch_distances, radial_hvp, radial_step
from kerneq.tensors import is_channels_last, working_dtype

CHANNELS_LAST = [False, True]


def problem(
    shape: tuple[int, ...] = (2, 8, 4, 6), n: int = 16, last: bool = False, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """a, v, a symmetric Q and γ, all wanting gradients."""
    torch.manual_seed(0)
    form = torch.channels_last if last else torch.contiguous_format
    a, v = (torch.randn(shape, dtype=torch.float64).to(memory_format=form) for _ in range(2))
    half = torch.randn(n, n, dtype=torch.float64) / n
    Q = half @ half.T + 0.3 * torch.eye(n, dtype=torch.float64)
    gamma = torch.tensor(0.07, dtype=torch.float64)
    a, v = (x.to(dtype).requires_grad_() for x in (a, v))
    Q, gamma = (x.to(working_dtype(dtype)).requires_grad_() for x in (Q, gamma))
    return a, v, Q, gamma


def by_definition(formula, r: Tensor, Q: Tensor, gamma: Tensor, split: int, patch: int) -> tuple[Tensor, Tensor]:
    m, S = torch.empty_like(r), torch.zeros(r.shape[0], dtype=r.dtype)
    starts = (range(0, r.shape[1], split), range(0, r.shape[2], patch), range(0, r.shape[3], patch))
    for b, c, y, x in itertools.product(range(r.shape[0]), *starts):
        where = (b, slice(c, c + split), slice(y, y + patch), slice(x, x + patch))
        piece = r[where].flatten()
        s = gamma * (piece @ Q @ piece)
        m[where] = (formula.weight(s) * (piece @ Q)).reshape(split, patch, patch)
        S[b] += formula.height(s) / gamma
    return m, S


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("last", CHANNELS_LAST)
@pytest.mark.parametrize(
    ("split", "patch", "shape"), [(4, 2, (2, 8, 4, 6)), (3, 2, (2, 6, 2, 4)), (2, 3, (1, 4, 3, 6))]
)
def test_the_step_is_its_definition_patch_by_patch(formula, split, patch, shape, last):
    a, v, Q, gamma = (x.detach() for x in problem(shape, split * patch * patch, last))
    for got, r in (
        (radial_step(formula, a, v, Q, gamma, split=split, patch=patch, value=True), a - v),
        (radial_step(formula, a, None, Q, gamma, split=split, patch=patch, value=True), a),
    ):
        torch.testing.assert_close(got, by_definition(formula, r, Q, gamma, split, patch), rtol=1e-12, atol=1e-12)
        assert got[0].stride() == a.stride()
    assert radial_step(formula, a, v, Q, gamma, split=split, patch=patch, value=False)[1] is None


def test_vectors_are_pictures_of_one_pixel():
    a, v, Q, gamma = (x.detach() for x in problem((3, 8), 4))
    got = radial_step(Cauchy, a, v, Q, gamma, split=4, patch=1, value=True)
    pictures = [x[:, :, None, None] for x in (a, v)]
    m, S = by_definition(Cauchy, (a - v)[:, :, None, None], Q, gamma, 4, 1)
    torch.testing.assert_close(got, (m.flatten(1), S))
    hvp = radial_hvp(Cauchy, *pictures, Q, gamma, split=4, patch=1)(pictures[1])
    torch.testing.assert_close(hvp.flatten(1), radial_hvp(Cauchy, a, v, Q, gamma, split=4, patch=1)(v))


@pytest.mark.parametrize("formula", FORMULAS)
def test_m_is_the_derivative_of_the_similarity_by_v_and_the_hvp_that_of_m(formula):
    a, v, Q, gamma = problem(last=True)
    m, S = radial_step(formula, a, v, Q, gamma, split=4, patch=2, value=True)
    torch.testing.assert_close(torch.autograd.grad(S.sum(), v, retain_graph=True)[0], m, rtol=1e-10, atol=1e-12)
    y = torch.randn_like(m)
    (expected,) = torch.autograd.grad(m, v, y)
    got = radial_hvp(formula, a, v, Q, gamma, split=4, patch=2)(y)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_distances_are_those_of_the_step():
    a, v, _, _ = (x.detach() for x in problem())
    weight = torch.randn(5, 16, dtype=torch.float64)
    r, Q = a - v, weight.mT @ weight
    total = patch_distances(r, weight, split=4, patch=2).sum(1)
    _, S = radial_step(Multiquadric, a, v, Q, torch.tensor(1e-9, dtype=torch.float64), split=4, patch=2, value=True)
    torch.testing.assert_close(S, -0.5 * total, rtol=1e-5, atol=1e-5)  # 1 − √(1 + s) → −s/2


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("last", CHANNELS_LAST)
def test_gradients_are_those_of_finite_differences(formula, last):
    inputs = problem((1, 8, 2, 4), last=last)
    step = {"split": 4, "patch": 2, "value": True}
    assert torch.autograd.gradcheck(lambda *x: radial_step(formula, *x, **step), inputs)


@pytest.mark.parametrize("last", CHANNELS_LAST)
def test_bfloat16_stays_near_float64_and_keeps_dtype_and_layout(last):
    a, v, Q, gamma = problem((2, 16, 8, 8), 32, last, torch.bfloat16)
    step = {"split": 8, "patch": 2, "value": True}
    m, S = radial_step(Gaussian, a, v, Q, gamma, **step)
    exact_m, exact_S = radial_step(Gaussian, *(x.double() for x in (a, v, Q, gamma)), **step)
    assert (m.dtype, S.dtype, m.stride()) == (torch.bfloat16, torch.float32, a.stride())
    assert torch.linalg.norm(m.double() - exact_m) < 1e-2 * torch.linalg.norm(exact_m)
    assert torch.linalg.norm(S.double() - exact_S) < 1e-2 * torch.linalg.norm(exact_S)


def test_float16_knows_lengths_whose_square_it_cannot_hold():
    a, v, Q, gamma = (x.detach() for x in problem(dtype=torch.float16))
    a, y = 1000 * a, v.half()
    sizes = {"split": 4, "patch": 2}
    exact = a.double(), v.double(), Q.double(), gamma.double()
    m, S = radial_step(Multiquadric, a, v, Q, gamma, **sizes, value=True)
    expected = radial_step(Multiquadric, *exact, **sizes, value=True)
    torch.testing.assert_close((m.double(), S.double()), expected, rtol=1e-2, atol=1e-2)
    product = radial_hvp(Multiquadric, a, v, Q, gamma, **sizes)(y)
    torch.testing.assert_close(
        product.double(), radial_hvp(Multiquadric, *exact, **sizes)(y.double()), rtol=0.1, atol=1e-5
    )


def test_torch_compile_takes_it_whole_with_its_gradients():
    inputs = problem(last=True)

    def loss(a, v, Q, gamma):
        m, S = radial_step(Cauchy, a, v, Q, gamma, split=4, patch=2, value=True)
        return m.square().sum() + S.sum()

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got, expected = (torch.autograd.grad(f(*inputs), inputs) for f in (compiled, loss))
    torch.testing.assert_close(got, expected)


def test_the_plain_form_exports():
    class Step(torch.nn.Module):
        def forward(self, a, v, Q):
            return radial_step(
                Multiquadric, a, v, Q, torch.tensor(0.1, dtype=torch.float64), split=4, patch=2, value=False
            )[0]

    inputs = tuple(x.detach() for x in problem()[:3])
    exported = torch.export.export(Step(), inputs).module()
    torch.testing.assert_close(exported(*inputs), Step()(*inputs))


def test_a_v_of_another_shape_is_refused_where_it_would_broadcast():
    a, v, Q, gamma = problem()
    with pytest.raises(ValueError, match=r"`v` must have the shape of `a`, \(2, 8, 4, 6\), got \(1, 8, 4, 6\)"):
        radial_step(Gaussian, a, v[:1], Q, gamma, split=4, patch=2, value=True)


@needs_triton
def test_the_programs_interpreted_agree_with_float64_in_values_and_both_derivatives():
    run_interpreted("interpreted_radial.py")


@needs_gpu
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize("last", CHANNELS_LAST)
@pytest.mark.parametrize("formula", [*FORMULAS, Tangent])
def test_the_programs_on_the_card_agree_with_float64(formula, dtype, tol, last):
    torch.manual_seed(0)
    form = torch.channels_last if last else torch.contiguous_format
    a, v, u = (torch.randn(4, 80, 16, 16, device="cuda").to(dtype).to(memory_format=form) for _ in range(3))
    half = torch.randn(32, 32, device="cuda") / 32
    Q, gamma = half @ half.T + 0.3 * torch.eye(32, device="cuda"), torch.tensor(0.05, device="cuda")

    def run(inputs: list[Tensor]) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        m, S = radial_step(formula, *leaves, split=8, patch=2, value=True)
        hvp = radial_hvp(formula, *leaves, split=8, patch=2)(u)
        return [m, S, hvp, *torch.autograd.grad((m, S), leaves, (u.to(m.dtype), torch.ones_like(S)))]

    got, expected = run([a, v, Q, gamma]), run([x.double() for x in (a, v, Q, gamma)])
    assert is_channels_last(got[0]) == last
    for x, y in zip(got, expected, strict=True):
        assert torch.linalg.norm(x.double() - y) < tol * torch.linalg.norm(y)
