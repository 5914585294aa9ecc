"""Adversarial pictures: the optimum of a linear model, the exact gradient of an equilibrium, and masked gradients."""

import dataclasses

import pytest
import torch
from torch import nn

from kerneq.cells import DenseCell
from kerneq.equilibrium import Equilibrium, solving
from kerneq.gradients import Implicit, Phantom, Unrolled
from kerneq.kernels import Gaussian
from kerneq.lab.evaluate.attack import InPixels, Threat, attack, attack_all, attack_unrolled, pgd


@pytest.fixture(autouse=True, scope="module")
def every_test_here(float64):
    """In float64 and on one thread."""


class Two(nn.Module):
    """Logits 0 and ⟨w, x⟩ of pictures: every attack has its best answer in closed form."""

    def __init__(self, shape=(3, 4, 4), seed=0):
        super().__init__()
        self.w = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))

    def forward(self, x):
        score = (x * self.w).flatten(1).sum(1)
        return torch.stack([torch.zeros_like(score), score], dim=1)


class Net(nn.Module):
    """An equilibrium between pixels and a linear head."""

    def __init__(self, gradient):
        super().__init__()
        torch.manual_seed(0)
        cell = DenseCell(Gaussian(0.3, split=4, hidden=8), inputs=12, state=10, features=8, norm=1.2)
        self.equilibrium = Equilibrium(cell, gradient=gradient, tol=1e-6, max_steps=100)
        self.head = nn.Linear(10, 3)
        with torch.no_grad():  # every class is close to some of the pictures
            self.head.bias -= self(pictures(40, (3, 2, 2))).mean(0)

    def forward(self, x):
        return self.head(self.equilibrium(x.flatten(1)).value)


def pictures(count=6, shape=(3, 4, 4), seed=1):
    return torch.rand((count, *shape), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("norm, dual", [("linf", 1), ("l2", 2)])
def test_the_attack_finds_the_best_point_of_a_linear_model(norm, dual):
    model, x = Two().eval(), pictures()
    labels = model(x).argmax(1)
    found = pgd(model, x, labels, Threat(norm, 0.05, 20, restarts=1), box=None)
    size = 0.05 * torch.linalg.vector_norm(model.w.detach().flatten(), dual)
    gained = (found.margin + model(x)[:, 1].abs()).detach() / size
    assert float(gained.max()) <= 1 + 1e-12
    assert float(gained.min()) > (1 - 1e-9 if norm == "linf" else 0.97)  # on a sphere steps turn the offset slowly
    assert torch.equal(found.fooled, model(found.x).argmax(1) != labels)
    assert found.losses[-1] > found.losses[0] and len(found.losses) == 21


@pytest.mark.parametrize("norm, order", [("linf", torch.inf), ("l2", 2)])
def test_an_attack_stays_in_the_ball_and_in_the_box_and_repeats_itself(norm, order):
    model, x = Two().eval(), pictures()
    labels = model(x).argmax(1)
    first, again, other = (pgd(model, x, labels, Threat(norm, 0.3, 3, 2, seed)) for seed in (0, 0, 1))
    offset = torch.linalg.vector_norm((first.x - x).flatten(1), order, dim=1)
    assert float(offset.max()) <= 0.3 * (1 + 1e-12) and float(first.x.min()) >= 0 and float(first.x.max()) <= 1
    assert torch.equal(first.x, again.x) and first.losses == again.losses != other.losses


def test_the_gradient_of_an_attack_is_exact_whatever_the_layer_was_trained_with():
    model, x = Net(Phantom(1, 1.0)).eval(), pictures(2, (3, 2, 2)).requires_grad_()

    def gradient(rule=None, exact=False):
        with solving(model, gradient=rule, exact=exact):
            return torch.autograd.grad(model(x)[:, 0].sum(), x)[0]

    reference = gradient(Unrolled(100))
    torch.testing.assert_close(gradient(exact=True), reference, rtol=1e-4, atol=1e-6)
    assert (gradient() - reference).norm() > 1e-2 * reference.norm()  # and the phantom's is not
    assert model.equilibrium.gradient == Phantom(1, 1.0)
    rules = []
    model.equilibrium.register_forward_pre_hook(lambda layer, _: rules.append(type(layer.gradient)))
    pgd(model, x, model(x).argmax(1), Threat("l2", 0.1, steps=2, restarts=1))
    assert rules == [Phantom, Phantom, Implicit, Implicit, Implicit]  # the labels, the clean pictures, the steps
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_a_step_has_length_one_however_small_the_gradient_is_and_leaves_out_what_is_no_number(norm):
    g = torch.tensor([[1e-30, 0.0], [torch.nan, -1e30]], dtype=torch.float32)
    step = Threat(norm).steepest(g)
    torch.testing.assert_close(step, torch.tensor([[1.0, 0.0], [0.0, -1.0]], dtype=torch.float32))


def test_what_a_layer_was_is_put_back_even_after_an_error():
    model = Net(Phantom()).eval()
    with pytest.raises(KeyError), solving(model, max_steps=3, tol=0.5):
        assert (model.equilibrium.max_steps, model.equilibrium.tol) == (3, 0.5)
        raise KeyError
    assert (model.equilibrium.max_steps, model.equilibrium.tol) == (100, 1e-6)
    with pytest.raises(ValueError, match="max_steps"), solving(model, max_steps=-1):
        pass
    assert model.equilibrium.max_steps == 100


def test_an_honest_gradient_raises_no_concern_and_the_unrolled_one_finds_no_more():
    model, x = Net(Phantom()).eval(), pictures(20, (3, 2, 2))
    labels = model(x).argmax(1)
    found = attack(model, x, labels, Threat("l2", 0.1, steps=4, restarts=1), 20)
    assert found.accuracy < found.random and found.unrolled == pytest.approx(found.tested, abs=0.05)
    assert [words for words in found.concerns() if "ball" not in words] == []
    assert [radius for radius, _ in found.radii] == pytest.approx([0.0, 0.05, 0.1, 0.2, 0.4, 0.8])


def test_an_unrolled_attack_that_a_card_has_no_memory_for_is_made_in_smaller_parts(monkeypatch):
    model, x = Net(Phantom()).eval(), pictures(10, (3, 2, 2))
    labels, threat, sizes = model(x).argmax(1), Threat("l2", 0.1, steps=2, restarts=1), []

    def out_of_memory(threat, model, x, labels, batch, gradient):
        sizes.append(batch)
        if batch > 4:
            raise torch.OutOfMemoryError
        return attack_all(threat, model, x, labels, batch, gradient)

    monkeypatch.setattr("kerneq.lab.evaluate.attack.attack_all", out_of_memory)
    left = attack_unrolled(threat, model, x, labels, 8)
    assert sizes == [8, 4] and float((left - x).flatten(1).norm(dim=1).max()) <= 0.1 + 1e-9


def test_the_tests_for_a_masked_gradient_look_at_as_many_pictures_whatever_the_batches_are():
    model, x = Two().eval(), pictures(300)
    labels, threat = model(x).argmax(1), Threat("linf", 0.02, steps=2, restarts=1)
    whole, cut = (attack(model, x, labels, threat, n) for n in (300, 7))
    few = attack(model, x[:128], labels[:128], threat, 300)
    assert whole.radii == cut.radii == few.radii and cut.tested == few.accuracy != cut.accuracy


def test_a_gradient_that_is_zero_is_noticed():
    class Rounded(Two):
        def forward(self, x):
            return super().forward((4 * x).round() / 4)

    model, x = Rounded().eval(), pictures(40)
    found = attack(model, x, model(x).argmax(1), Threat("linf", 0.1), 40)
    assert found.unrolled is None and "the loss does not rise along the steps" in found.concerns()
    assert "random points do better" in dataclasses.replace(found, random=0.0).concerns()


def test_random_points_that_fool_more_often_than_the_attack_are_noticed():
    class Speckled(Two):
        """Wrong at a seventh of all points, which no gradient leads to."""

        def forward(self, x):
            logits = super().forward(x)
            wrong = (1e4 * x.flatten(1).sum(1)).long() % 7 == 0
            return torch.where(wrong[:, None], logits.flip(1), logits)

    model, x = Speckled().eval(), pictures(128)
    found = attack(model, x, Two().eval()(x).argmax(1), Threat("linf", 1e-3, restarts=1, steps=60), 128)
    assert found.random < 0.1
    assert "random points do better" in dataclasses.replace(found, tested=found.random + 0.1).concerns()


def test_logits_that_are_no_numbers_are_no_robustness():
    class Lost(Two):
        def forward(self, x):
            return super().forward(x).masked_fill(((x.flatten(1).mean(1) - 0.5).abs() > 1e-4)[:, None], torch.nan)

    model, x = Lost().eval(), 0.5 + 0 * pictures(8)
    found = attack(model, x, model(x).argmax(1), Threat("linf", 0.1, steps=4, restarts=1), 8)
    assert found.random == 0 and found.accuracy == 0


def test_radii_are_in_pixel_units_whatever_the_model_is_given():
    inner = Two()
    model, x = InPixels(inner, (0.1, 0.2, 0.3), (0.5, 0.25, 2.0)).eval(), pictures()
    normalised = (x - model.mean) / model.std
    torch.testing.assert_close(model(x), inner(normalised))
    torch.testing.assert_close(model.pixels(normalised), x)
    labels = model(x).argmax(1)
    found = pgd(model, x, labels, Threat("linf", 0.05, restarts=1), box=None)
    size = 0.05 * (inner.w.detach() / model.std).abs().sum()
    torch.testing.assert_close(found.margin, (margin_of(model, x, labels) + size).detach(), rtol=1e-6, atol=1e-6)


def margin_of(model, x, labels):
    logits = model(x)
    return logits.gather(1, 1 - labels[:, None])[:, 0] - logits.gather(1, labels[:, None])[:, 0]


@pytest.mark.parametrize(
    "wrong, words", [({"norm": "l1"}, "linf or l2"), ({"radius": 0.0}, "radius"), ({"steps": 0}, "steps")]
)
def test_an_attack_that_means_nothing_is_refused(wrong, words):
    x = pictures()
    with pytest.raises(ValueError, match=words):
        pgd(Two().eval(), x, torch.zeros(6, dtype=torch.long), Threat(**({"radius": 0.1} | wrong)))
    with pytest.raises(ValueError, match="eval"):
        pgd(Two().train(), x, torch.zeros(6, dtype=torch.long), Threat(radius=0.1))
