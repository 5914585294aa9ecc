"""Accuracy, calibration, KL and AUROC: each against a library, or against a case worked out by hand."""

import math

import pytest
import torch
from scipy.optimize import minimize_scalar
from sklearn.metrics import brier_score_loss, confusion_matrix, log_loss, roc_auc_score, top_k_accuracy_score
from statsmodels.stats.proportion import proportion_confint
from torchmetrics.functional.classification import multiclass_calibration_error

from kerneq.lab.evaluate.classification import calibrate, classify, fit_temperature, wilson_interval
from kerneq.lab.evaluate.ood import auroc, kl_q_uniform, kl_uniform_q
from kerneq.lab.evaluate.scores import find_mistakes
from kerneq.lab.run import TrainingError


@pytest.fixture(scope="module")
def predictions():
    """Logits of 700 images in 8 classes that know something; class 7 is never the label."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(7, (700,), generator=generator)
    logits = 2 * torch.randn(700, 8, generator=generator)
    logits[torch.arange(700), labels] += 2.5
    return logits, labels


def test_accuracy_top_5_and_confusion_are_sklearns(predictions):
    logits, labels = predictions
    found = classify(logits, labels)
    matrix = confusion_matrix(labels, logits.argmax(1), labels=range(8))
    assert [list(row) for row in found.confusion] == matrix.tolist() and found.images == 700
    assert [*found.wrong] == [i for i in range(700) if logits[i].argmax() != labels[i]]
    assert found.accuracy == pytest.approx(matrix.trace() / 700)
    assert found.top5 == pytest.approx(top_k_accuracy_score(labels, logits, k=5, labels=range(8)))
    assert found.per_class[:7] == pytest.approx([matrix[k, k] / matrix[k].sum() for k in range(7)])
    assert found.per_class[7] is None
    assert classify(logits[:, :5], labels % 5).top5 is None


@pytest.mark.parametrize("hits, trials", [(0, 7), (7, 7), (340, 355), (1, 10_000), (9458, 10_000)])
def test_the_interval_is_wilsons(hits, trials):
    expected = proportion_confint(hits, trials, method="wilson")
    assert wilson_interval(hits, trials) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 0.4, 3.0])
def test_nll_brier_and_calibration_errors_are_those_of_libraries(predictions, temperature):
    logits, labels = predictions
    found = calibrate(logits, labels, temperature)
    q = (logits.double() / temperature).softmax(1)
    assert found.nll == pytest.approx(log_loss(labels, q, labels=range(8)))
    assert found.brier == pytest.approx(brier_score_loss(labels, q, labels=range(8), scale_by_half=False))
    for norm, value in (("l1", found.ece), ("max", found.mce)):
        assert value == pytest.approx(float(multiclass_calibration_error(q, labels, 8, n_bins=15, norm=norm)), abs=1e-6)
    assert sum(part.count for part in found.bins) == 700 and len(found.bins) == 15
    assert all(part.low < part.confidence <= part.high for part in found.bins if part.count)


def test_calibration_of_four_predictions_by_hand():
    """Confidences 0.6, 0.7, 0.8, 0.9, of which the first and the last are right, in two bins."""
    q = torch.tensor([0.6, 0.7, 0.8, 0.9], dtype=torch.float64)
    logits = torch.stack([q.log(), (1 - q).log()], 1)
    found = calibrate(logits, torch.tensor([0, 1, 1, 0]), bins=2)
    assert found.ece == pytest.approx(0.25) == found.mce  # all lie above ½: |½ − 0.75|
    assert found.adaptive_ece == pytest.approx((2 * abs(0.5 - 0.65) + 2 * abs(0.5 - 0.85)) / 4)
    assert found.brier == pytest.approx(2 * (0.4**2 + 0.7**2 + 0.8**2 + 0.1**2) / 4)
    empty, full = found.bins
    assert (empty.count, empty.accuracy, empty.confidence) == (0, None, None)
    assert (full.low, full.high, full.count) == (0.5, 1.0, 4)


def test_the_temperature_minimises_the_nll_and_undoes_a_scaling(predictions):
    logits, labels = predictions
    best = fit_temperature(logits, labels)
    general = minimize_scalar(lambda t: log_loss(labels, (logits.double() / t).softmax(1), labels=range(8)), (0.5, 2.0))
    assert best == pytest.approx(general.x, rel=1e-5)
    assert fit_temperature(3 * logits, labels) == pytest.approx(3 * best, rel=1e-6)
    assert calibrate(logits, labels, best).nll < calibrate(logits, labels).nll
    right = torch.eye(3).repeat(4, 1)
    assert fit_temperature(right, right.argmax(1)) == pytest.approx(0.05, rel=1e-6), "nothing is wrong: the coldest"


def test_kl_to_the_uniform_distribution_in_both_directions():
    q = torch.tensor([[0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3], [1.0, 1e-9, 1e-9]], dtype=torch.float64)
    q = q / q.sum(1, keepdim=True)
    u = torch.full_like(q, 1 / 3)
    torch.testing.assert_close(kl_uniform_q(q.log()), (u * (u / q).log()).sum(1))
    torch.testing.assert_close(kl_q_uniform(q.log()), (q * (q / u).log()).sum(1))
    assert kl_q_uniform(q.log())[2] == pytest.approx(math.log(3), abs=1e-6), "its largest value"
    assert kl_uniform_q(q.log())[2] > 12, "which has none"


def test_auroc_is_sklearns_with_ties():
    generator = torch.Generator().manual_seed(1)
    known, unknown = (torch.randint(9, (n,), generator=generator).double() + shift for n, shift in ((60, 2), (45, 0)))
    labels = [1] * 60 + [0] * 45
    assert auroc(known, unknown) == pytest.approx(roc_auc_score(labels, torch.cat([known, unknown])))
    assert auroc(known, unknown) + auroc(unknown, known) == pytest.approx(1)


def test_mistakes_are_the_wrong_ones_and_the_most_confident_first(predictions):
    logits, labels = predictions
    found = find_mistakes(logits, labels, count=1000)
    confidence, predicted = logits.double().softmax(1).max(1)
    assert {mistake.index for mistake in found} == set((predicted != labels).nonzero().flatten().tolist())
    assert [mistake.confidence for mistake in found] == sorted((m.confidence for m in found), reverse=True)
    first = found[0]
    assert (first.label, first.predicted) == (int(labels[first.index]), int(predicted[first.index]))
    assert find_mistakes(logits, labels, count=3) == found[:3]


def test_what_has_no_accuracy_is_refused():
    with pytest.raises(ValueError, match="at least one image"):
        classify(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    with pytest.raises(TrainingError, match="infinite or NaN logits"):
        calibrate(torch.full((2, 3), torch.nan), torch.zeros(2, dtype=torch.int64))
