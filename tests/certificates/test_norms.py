"""Norms from above, against the singular values of the matrix written out."""

import pytest
import torch
import torch.nn.functional as F
from helpers import dense_matrix

from kerneq.certificates import conv_norm, matrix_norm, norms

pytestmark = pytest.mark.usefixtures("float64")
# outputs, inputs, k, stride, padding, (height, width)
CONVOLUTIONS = [
    (4, 3, 3, 1, 1, (6, 8)),
    (3, 5, 5, 1, 2, (6, 6)),
    (5, 2, 3, 2, 1, (7, 9)),
    (6, 3, 4, 2, 1, (8, 8)),
    (2, 2, 3, 1, 1, (16, 16)),
]


def largest(weight, size, stride, padding) -> float:
    matrix = dense_matrix(lambda x: F.conv2d(x, weight, stride=stride, padding=padding), (weight.shape[1], *size))
    return float(torch.linalg.svdvals(matrix)[0])


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_the_norm_of_a_small_convolution_is_that_of_its_matrix(case):
    outputs, inputs, k, stride, padding, size = case
    weight = torch.randn(outputs, inputs, k, k, generator=torch.Generator().manual_seed(0))
    exact = largest(weight, size, stride, padding)
    assert exact <= conv_norm(weight, size, stride, padding) <= exact * (1 + 1e-8)


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_that_on_a_torus_is_no_smaller_and_near_for_large_pictures(case, monkeypatch):
    monkeypatch.setattr(norms, "DENSE", 0)
    monkeypatch.setattr(norms, "CHUNK", 100)  # a few frequencies at a time
    outputs, inputs, k, stride, padding, size = case
    for seed in range(3):
        weight = torch.randn(outputs, inputs, k, k, generator=torch.Generator().manual_seed(seed))
        exact, found = largest(weight, size, stride, padding), conv_norm(weight, size, stride, padding)
        assert exact <= found <= exact * (1.02 if size == (16, 16) else 1.4)


def test_the_torus_is_not_fooled_by_weights_that_live_at_the_borders(monkeypatch):
    """A shift by a pixel is an isometry inside; a difference of neighbours is largest for the highest frequency."""
    monkeypatch.setattr(norms, "DENSE", 0)
    shift = torch.zeros(1, 1, 3, 3)
    shift[0, 0, 0, 2] = 1.0
    assert conv_norm(shift, (9, 9)) == pytest.approx(1, rel=1e-6)
    difference = torch.zeros(1, 1, 3, 3)
    difference[0, 0, 1] = torch.tensor([1.0, 0.0, -1.0])
    exact = largest(difference, (9, 8), 1, 1)
    assert exact <= conv_norm(difference, (9, 8)) <= 2 * (1 + 1e-6)


def test_the_norm_of_a_matrix_and_of_a_zero_convolution(monkeypatch):
    matrix = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    assert matrix_norm(matrix) == pytest.approx(float(torch.linalg.svdvals(matrix)[0]), rel=1e-8)
    assert conv_norm(torch.zeros(2, 3, 3, 3), (4, 4)) == 0
    monkeypatch.setattr(norms, "DENSE", 0)
    assert conv_norm(torch.zeros(2, 3, 3, 3), (4, 4)) < 1e-100


def test_weights_whose_squares_overflow_or_vanish_are_bounded_and_no_numbers_have_no_bound(monkeypatch):
    weight = torch.randn(3, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    for entries in (norms.DENSE, 0):
        monkeypatch.setattr(norms, "DENSE", entries)
        for scale in (1e-200, 1e200):
            assert conv_norm(scale * weight, (5, 5)) == pytest.approx(scale * conv_norm(weight, (5, 5)), rel=1e-9)
        assert conv_norm(weight * torch.nan, (5, 5)) == torch.inf
