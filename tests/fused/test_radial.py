"""The patch step of every radial kernel: its definition, its derivatives, the operator and its Triton programs."""

import itertools

import pytest
import torch
from formulas import FORMULAS, Cauchy, Gaussian, Multiquadric, Tangent
from interpreter import needs_triton, run_interpreted
from torch import Tensor

from kerneq.fused.radial import fused_pullback, fused_step, patch_distances, plain_step, radial_hvp, radial_step
from kerneq.tensors import is_channels_last, working_dtype

CHANNELS_LAST = [False, True]
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="There is no CUDA card here.")


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


def name(formula: type) -> str:
    return f"{formula.__module__}:{formula.__qualname__}"


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
        (radial_step(formula, a, None, Q, float(gamma), split=split, patch=patch, value=True), a),
    ):
        torch.testing.assert_close(got, by_definition(formula, r, Q, gamma, split, patch), rtol=1e-12, atol=1e-12)
        assert got[0].stride() == a.stride()
    assert radial_step(formula, a, v, Q, gamma, split=split, patch=patch, value=False)[1] is None


def test_vectors_are_pictures_of_one_pixel():
    a, v, Q, gamma = (x.detach() for x in problem((3, 8), 4))
    got = radial_step(Cauchy, a, v, Q, gamma, split=4, patch=1, value=True)
    pictures = (x[:, :, None, None] for x in (a, v))
    m, S = by_definition(Cauchy, (a - v)[:, :, None, None], Q, gamma, 4, 1)
    torch.testing.assert_close(got, (m.flatten(1), S))
    hvp = radial_hvp(Cauchy, v, *pictures, Q, gamma, split=4, patch=1)
    torch.testing.assert_close(hvp, radial_hvp(Cauchy, v, a, v, Q, gamma, split=4, patch=1))


@pytest.mark.parametrize("formula", FORMULAS)
def test_m_is_the_derivative_of_the_similarity_by_v_and_the_hvp_that_of_minus_m(formula):
    a, v, Q, gamma = problem(last=True)
    m, S = radial_step(formula, a, v, Q, gamma, split=4, patch=2, value=True)
    torch.testing.assert_close(torch.autograd.grad(S.sum(), v, retain_graph=True)[0], m, rtol=1e-10, atol=1e-12)
    y = torch.randn_like(m)
    (expected,) = torch.autograd.grad(m, v, -y)
    got = radial_hvp(formula, y, *(x.detach() for x in (a, v, Q, gamma)), split=4, patch=2)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_distances_are_those_of_the_step():
    a, v, _, _ = (x.detach() for x in problem())
    weight = torch.randn(5, 16, dtype=torch.float64)
    r, Q = a - v, weight.mT @ weight
    total = patch_distances(r, weight, split=4, patch=2).sum(1)
    _, S = radial_step(Multiquadric, a, v, Q, 1e-9, split=4, patch=2, value=True)
    torch.testing.assert_close(S, -0.5 * total, rtol=1e-5, atol=1e-5)  # 1 − √(1 + s) → −s/2


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("last", CHANNELS_LAST)
def test_gradients_of_both_forms_are_those_of_finite_differences(formula, last):
    inputs = problem((1, 8, 2, 4), last=last)
    step = {"split": 4, "patch": 2, "value": True}
    assert torch.autograd.gradcheck(lambda *x: radial_step(formula, *x, **step), inputs)
    assert torch.autograd.gradcheck(lambda *x: fused_step(name(formula), *x, 4, 2, True), inputs)


@pytest.mark.parametrize("value", [False, True])
def test_the_operator_without_v_has_the_gradients_of_plain_autograd(value):
    a, _, Q, gamma = problem(last=True)
    m, S = fused_step(name(Cauchy), a, None, Q, gamma, 4, 2, value)
    plain = plain_step(Cauchy, a, None, Q, gamma, 4, 2, True)
    u, tau = torch.randn_like(m), torch.randn(2, dtype=torch.float64) * value
    got = torch.autograd.grad((m, S) if value else m, (a, Q, gamma), (u, tau) if value else u)
    torch.testing.assert_close(got, torch.autograd.grad(plain, (a, Q, gamma), (u, tau)), rtol=1e-10, atol=1e-12)


def test_second_derivatives_of_the_operator_are_those_of_finite_differences():
    a, v, Q, gamma = problem((1, 4, 2, 2))
    half = torch.linalg.cholesky(Q.detach()).requires_grad_()  # keeps Q symmetric, as the closed form assumes
    assert torch.autograd.gradgradcheck(
        lambda a, v, L, g: fused_step(name(Multiquadric), a, v, L @ L.T, g, 4, 2, True), (a, v, half, gamma)
    )


def test_only_what_is_asked_for_gets_a_gradient():
    a, v, Q, gamma = (x.detach() for x in problem())
    parts = fused_pullback(name(Gaussian), a, None, a, v, Q, gamma, 4, 2, [False, True, False, False])
    assert [part.numel() for part in parts] == [0, v.numel(), 0, 0]
    torch.testing.assert_close(-parts[1], radial_hvp(Gaussian, a, a, v, Q, gamma, split=4, patch=2))


@pytest.mark.parametrize("value", [False, True])
def test_the_operators_keep_what_they_declare_to_torch(value):
    a, v, Q, gamma = problem(last=True)
    torch.library.opcheck(fused_step, (name(Gaussian), a, v if value else None, Q, gamma, 4, 2, value))
    a, v, Q, gamma = (x.detach() for x in (a, v, Q, gamma))
    tau = torch.randn(2, dtype=torch.float64) if value else None
    torch.library.opcheck(fused_pullback, (name(Gaussian), a, tau, a, v, Q, gamma, 4, 2, [True, value, True, True]))


@pytest.mark.parametrize("last", CHANNELS_LAST)
def test_bfloat16_stays_near_float64_and_keeps_dtype_and_layout(last):
    a, v, Q, gamma = problem((2, 16, 8, 8), 32, last, torch.bfloat16)
    step = {"split": 8, "patch": 2, "value": True}
    m, S = radial_step(Gaussian, a, v, Q, gamma, **step)
    exact_m, exact_S = radial_step(Gaussian, *(x.double() for x in (a, v, Q, gamma)), **step)
    assert (m.dtype, S.dtype, m.stride()) == (torch.bfloat16, torch.float32, a.stride())
    assert torch.linalg.norm(m.double() - exact_m) < 1e-2 * torch.linalg.norm(exact_m)
    assert torch.linalg.norm(S.double() - exact_S) < 1e-2 * torch.linalg.norm(exact_S)


@pytest.mark.parametrize("fused", [False, True])
def test_torch_compile_takes_either_form_whole_with_its_gradients(fused, monkeypatch):
    if fused:
        monkeypatch.setattr("kerneq.fused.radial._fusable", lambda *arguments: True)
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
            return radial_step(Multiquadric, a, v, Q, 0.1, split=4, patch=2, value=False)[0]

    inputs = tuple(x.detach() for x in problem()[:3])
    exported = torch.export.export(Step(), inputs).module()
    torch.testing.assert_close(exported(*inputs), Step()(*inputs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.ones(8)}, r"`a` must have the shape .* got \(8,\)"),
        ({"v": torch.ones(2, 8, 4, 4)}, r"`v` must have the shape of `a`"),
        ({"split": 3}, r"`split` must divide the channels"),
        ({"patch": 4}, r"`patch` the height and the width"),
        ({"patch": 0}, r"at least 1, got 4 and 0"),
        ({"Q": torch.eye(8)}, r"`Q` must be 16 × 16 .* got \(8, 8\)"),
        ({"gamma": torch.ones(2)}, r"`gamma` must be a number .* got shape \(2,\)"),
    ],
)
def test_a_wrong_argument_is_refused_in_words(change, message):
    arguments = {"a": torch.ones(2, 8, 4, 6), "v": None, "Q": torch.eye(16), "gamma": 0.1, "split": 4, "patch": 2}
    with pytest.raises(ValueError, match=message):
        radial_step(Gaussian, **(arguments | change), value=True)


@needs_triton
def test_the_programs_interpreted_agree_with_float64():
    run_interpreted("interpreted_radial.py")


@cuda
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
        hvp = radial_hvp(formula, u, *(x.detach() for x in leaves), split=8, patch=2)
        return [m, S, hvp, *torch.autograd.grad((m, S), leaves, (u.to(m.dtype), torch.ones_like(S)))]

    got, expected = run([a, v, Q, gamma]), run([x.double() for x in (a, v, Q, gamma)])
    assert is_channels_last(got[0]) == last
    for x, y in zip(got, expected, strict=True):
        assert torch.linalg.norm(x.double() - y) < tol * torch.linalg.norm(y)
