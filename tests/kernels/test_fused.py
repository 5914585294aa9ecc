import itertools

import pytest
import torch
from torch import Tensor

from kerneq.kernels import fused_reference as reference
from kerneq.kernels.fused import patch_step
from kerneq.kernels.fused_operator import step, step_backward

CHANNELS_LAST = [False, True]


def problem(
    shape: tuple[int, int, int, int] = (2, 8, 4, 6),
    n: int = 16,
    last: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """a, v, a symmetric Q and γ, all wanting gradients."""
    torch.manual_seed(0)
    form = torch.channels_last if last else torch.contiguous_format
    a, v = (torch.randn(shape, dtype=torch.float64).to(memory_format=form) for _ in range(2))
    half = torch.randn(n, n, dtype=torch.float64) / n
    Q = half @ half.T + 0.3 * torch.eye(n, dtype=torch.float64)
    gamma = torch.tensor(0.07, dtype=torch.float64)
    a, v = (x.to(dtype).requires_grad_() for x in (a, v))
    Q, gamma = (x.to(reference.accumulator(a)).requires_grad_() for x in (Q, gamma))
    return a, v, Q, gamma


def by_definition(r: Tensor, Q: Tensor, gamma: Tensor, split: int, patch: int) -> tuple[Tensor, Tensor]:
    m, S = torch.empty_like(r), torch.zeros(r.shape[0], dtype=r.dtype)
    starts = (range(0, r.shape[1], split), range(0, r.shape[2], patch), range(0, r.shape[3], patch))
    for b, c, y, x in itertools.product(range(r.shape[0]), *starts):
        where = (b, slice(c, c + split), slice(y, y + patch), slice(x, x + patch))
        piece = r[where].flatten()
        weight = torch.exp(-gamma * (piece @ Q @ piece))
        m[where] = (weight * (piece @ Q)).reshape(split, patch, patch)
        S[b] += weight / (2 * gamma)
    return m, S


@pytest.mark.parametrize("last", CHANNELS_LAST)
@pytest.mark.parametrize(
    ("split", "patch", "shape"), [(4, 2, (2, 8, 4, 6)), (3, 2, (2, 6, 2, 4)), (2, 3, (1, 4, 3, 6))]
)
def test_the_step_is_its_definition_patch_by_patch(split, patch, shape, last):
    a, v, Q, gamma = (x.detach() for x in problem(shape, split * patch * patch, last))
    for got, r in (
        (patch_step(a, v, Q, gamma, split=split, patch=patch, similarity=True), a - v),
        (patch_step(a, v, Q, gamma, split=split, patch=patch, similarity=True, negated=True), a + v),
        (patch_step(a, None, Q, float(gamma), split=split, patch=patch, similarity=True), a),
    ):
        torch.testing.assert_close(got, by_definition(r, Q, gamma, split, patch), rtol=1e-12, atol=1e-12)
        assert got[0].stride() == a.stride()


def test_m_is_the_derivative_of_the_similarity_by_v():
    a, v, Q, gamma = problem()
    m, S = patch_step(a, v, Q, gamma, split=4, patch=2, similarity=True)
    torch.testing.assert_close(torch.autograd.grad(S.sum(), v)[0], m, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("last", CHANNELS_LAST)
@pytest.mark.parametrize("negated", [False, True])
def test_gradients_of_both_forms_are_those_of_finite_differences(negated, last):
    inputs = problem((1, 8, 2, 4), last=last)

    def plain(a, v, Q, gamma):
        return patch_step(a, v, Q, gamma, split=4, patch=2, similarity=True, negated=negated)

    def operator(a, v, Q, gamma):
        return step(a, v, Q, gamma, 4, 2, negated, True)

    assert torch.autograd.gradcheck(plain, inputs)
    assert torch.autograd.gradcheck(operator, inputs)


@pytest.mark.parametrize("similarity", [False, True])
def test_the_operator_without_v_has_the_gradients_of_plain_autograd(similarity):
    a, _, Q, gamma = problem(last=True)
    m, S = step(a, None, Q, gamma, 4, 2, False, similarity)
    m_plain, S_plain = reference.forward(a, None, Q, gamma, 4, 2, False)
    u, t = torch.randn_like(m), torch.randn_like(S_plain) * similarity
    got = torch.autograd.grad((m, S) if similarity else m, (a, Q, gamma), (u, t) if similarity else u)
    expected = torch.autograd.grad((m_plain, S_plain), (a, Q, gamma), (u, t))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_second_derivatives_of_the_operator_are_those_of_finite_differences():
    a, v, Q, gamma = problem((1, 4, 2, 2))
    half = torch.linalg.cholesky(Q.detach()).requires_grad_()  # keeps Q symmetric, as the closed form assumes
    assert torch.autograd.gradgradcheck(
        lambda a, v, L, g: step(a, v, L @ L.T, g, 4, 2, False, True), (a, v, half, gamma)
    )


def test_only_what_is_asked_for_gets_a_gradient():
    a, v, Q, gamma = problem()
    settings = (4, 2, True, False)
    m, _ = step(a, v, Q.detach(), gamma.detach(), *settings)
    grad_a, grad_v = torch.autograd.grad(m.sum(), (a, v))
    torch.testing.assert_close(grad_a, grad_v, rtol=0, atol=0)
    u = torch.ones_like(m)
    parts = step_backward(
        u, None, a.detach(), v.detach(), Q.detach(), gamma.detach(), 4, 2, True, [False, True, False, False]
    )
    assert [part.numel() for part in parts] == [0, v.numel(), 0, 0]
    torch.testing.assert_close(parts[1], grad_v)


@pytest.mark.parametrize(("negated", "similarity"), [(False, True), (True, False)])
def test_the_operators_keep_what_they_declare_to_torch(negated, similarity):
    a, v, Q, gamma = problem(last=True)
    torch.library.opcheck(step, (a, v, Q, gamma, 4, 2, negated, similarity))
    torch.library.opcheck(step, (a, None, Q, gamma, 4, 2, negated, similarity))
    a, v, Q, gamma = (x.detach() for x in (a, v, Q, gamma))
    t = torch.randn(2, dtype=torch.float64) if similarity else None
    torch.library.opcheck(step_backward, (a, t, a, v, Q, gamma, 4, 2, negated, [True, not negated, True, True]))


@pytest.mark.parametrize("last", CHANNELS_LAST)
def test_bfloat16_stays_near_float64_and_keeps_dtype_and_layout(last):
    a, v, Q, gamma = problem((2, 16, 8, 8), 32, last, torch.bfloat16)
    m, S = patch_step(a, v, Q, gamma, split=8, patch=2, similarity=True)
    exact_m, exact_S = patch_step(a.double(), v.double(), Q.double(), gamma.double(), split=8, patch=2, similarity=True)
    assert (m.dtype, S.dtype, m.stride()) == (torch.bfloat16, torch.float32, a.stride())
    assert torch.linalg.norm(m.double() - exact_m) < 1e-2 * torch.linalg.norm(exact_m)
    assert torch.linalg.norm(S.double() - exact_S) < 1e-2 * torch.linalg.norm(exact_S)


@pytest.mark.parametrize("fused", [False, True])
def test_torch_compile_takes_either_form_whole_with_its_gradients(fused):
    a, v, Q, gamma = problem(last=True)

    def loss(a, v, Q, gamma):
        if fused:
            m, S = step(a, v, Q, gamma, 4, 2, False, True)
        else:
            m, S = patch_step(a, v, Q, gamma, split=4, patch=2, similarity=True)
        return m.square().sum() + S.sum()

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got, expected = (torch.autograd.grad(f(a, v, Q, gamma), (a, v, Q, gamma)) for f in (compiled, loss))
    torch.testing.assert_close(got, expected)


def test_the_plain_form_exports():
    class Step(torch.nn.Module):
        def forward(self, a, v, Q):
            return patch_step(a, v, Q, 0.1, split=4, patch=2)

    inputs = tuple(x.detach() for x in problem()[:3])
    exported = torch.export.export(Step(), inputs).module()
    torch.testing.assert_close(exported(*inputs), Step()(*inputs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.ones(2, 8)}, r"`a` must have the shape .* got \(2, 8\)"),
        ({"v": torch.ones(2, 8, 4, 4)}, r"`v` must have the shape of `a`"),
        ({"split": 3}, r"`split` must divide the channels"),
        ({"patch": 4}, r"`patch` the height and the width"),
        ({"patch": 0}, r"at least 1, got 4 and 0"),
        ({"Q": torch.eye(8)}, r"`Q` must be 16 × 16 .* got \(8, 8\)"),
        ({"gamma": torch.ones(2)}, r"`gamma` must be a number .* got shape \(2,\)"),
    ],
)
def test_a_wrong_argument_is_refused_in_words(change, message):
    arguments = {
        "a": torch.ones(2, 8, 4, 6),
        "v": None,
        "Q": torch.eye(16),
        "gamma": 0.1,
        "split": 4,
        "patch": 2,
    }
    with pytest.raises(ValueError, match=message):
        patch_step(**(arguments | change))
