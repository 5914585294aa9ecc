"""Every step of a solve as numbers: those of the library's own equation, state by state."""

import base64
import dataclasses

import numpy as np
import pytest
import torch

from kerneq.equilibrium import hook_solves, layers_of, solving
from kerneq.lab.evaluate import NotApplicableError
from kerneq.lab.explore.page import list_pictures
from kerneq.lab.explore.watching import OWN, SOLVERS, Controls, certify_pictures, describe_model, encode, watch
from kerneq.lab.run.config import parse
from kerneq.models import build


def decoded(found: dict) -> np.ndarray:
    shares = np.frombuffer(base64.b64decode(found["data"]), np.uint8).reshape(-1, found["rows"], found["columns"]) / 255
    return found["low"] + shares * (found["high"] - found["low"])


@pytest.fixture
def pixels(run):
    return list_pictures(run)[3][1]


def as_model(run, name: str):
    """The run with another model, untrained."""
    torch.manual_seed(0)
    model = build(name, channels=1).eval()
    return dataclasses.replace(run, model=model, config=parse("", [f"model.name={name}"]))


@torch.no_grad()
def test_curves_maps_and_classes_are_those_of_the_states_that_the_library_finds(run, pixels):
    found = watch(run, pixels, Controls(tol=1e-4, steps=40))
    x = (pixels[None] / 255 - run.seen.mean[0]) / run.seen.std[0]
    equations = {}
    with (
        solving(run.model, tol=1e-4, max_steps=40),
        hook_solves(run.model, lambda layer, f, z: equations.update({layer: (f, z)})),
    ):
        expected = run.model(x).softmax(1)[0]
    for share in (entry["share"] for entry in found["classes"]):
        assert min(abs(expected - share)) < 1e-6
    assert found["classes"][0]["name"] == run.classes[int(expected.argmax())]
    for entry in found["classes"]:  # the last step is the answer
        assert len(entry["steps"]) == found["steps"] and entry["steps"][-1] == pytest.approx(entry["share"], abs=1e-4)
    for layer, told in zip(layers_of(run.model), found["layers"], strict=True):
        f, z = equations[layer]
        assert told["converged"] and told["residual"][-1] <= 1e-4 < told["residual"][-2]
        assert told["reached"] == told["residual"][-1]
        assert told["energy"][-1] == pytest.approx(float(f.energy(z)), rel=1e-5)
        assert told["L"] == pytest.approx(float(f.bound)) and told["gamma"] == pytest.approx(float(f.binding.gamma))
        mean = decoded(told["maps"]["mean of 32 channels"])
        assert len(mean) == found["steps"] and np.abs(mean[-1] - z.mean(1)[0].numpy()).max() < 0.01 * mean.max()
        assert len(told["maps"]) == 5 and told["size"] == " × ".join(map(str, z.shape[1:]))
        weights = decoded(told["weights"])[-1]
        assert np.abs(weights - f.weights(z).mean(1)[0].numpy()).max() < 0.01


def test_a_wider_kernel_is_another_equation_and_the_model_stays_as_it_was(run, pixels):
    before = [(layer.tol, layer.max_steps, layer.check_every, layer.solver) for layer in layers_of(run.model)]
    narrow, wide = (watch(run, pixels, Controls(width=width)) for width in (1.0, 4.0))
    assert [told["gamma"] for told in wide["layers"]] == pytest.approx([4 * told["gamma"] for told in narrow["layers"]])
    assert [told["L"] for told in wide["layers"]] == pytest.approx([told["L"] for told in narrow["layers"]])
    assert decoded(wide["layers"][0]["weights"]).mean() < decoded(narrow["layers"][0]["weights"]).mean()
    assert before == [(layer.tol, layer.max_steps, layer.check_every, layer.solver) for layer in layers_of(run.model)]
    assert watch(run, pixels, Controls()) == narrow


def test_fewer_steps_end_out_of_steps_and_say_so(run, pixels):
    found = watch(run, pixels, Controls(solver="picard-relaxed", tol=1e-6, steps=3))
    assert found["steps"] == 3
    assert {(told["steps"], told["status"], told["converged"]) for told in found["layers"]} == {(3, "max steps", False)}


@pytest.mark.parametrize(
    "name",
    ["geq-dense-tiny", "mopteq-tiny", "mopteq-polynomial-tiny", "mdeq-tiny", "geq-certified-tiny", "certified-tiny"],
)
def test_every_kind_of_model_is_watched_with_every_solver_that_fits_it(run, pixels, name):
    other = as_model(run, name)
    about = describe_model(other)
    assert ("proximal" in about["solvers"]) == (name != "mdeq-tiny") and about["solvers"][0] == OWN
    for solver in about["solvers"]:
        found = watch(other, pixels, Controls(solver=solver, steps=4))
        assert found["steps"] <= 4 and all(len(c["steps"]) == found["steps"] for c in found["classes"])
        for told in found["layers"]:
            assert told["maps"] and (told["energy"] is None) == (name == "mdeq-tiny")
            assert (told["weights"] is None) == (name != "geq-certified-tiny")


def test_what_cannot_be_watched_or_certified_is_said_in_a_sentence(run, pixels):
    with pytest.raises(NotApplicableError, match="resnet-tiny has no equilibrium layer"):
        describe_model(as_model(run, "resnet-tiny"))
    assert "Nothing is certified about mdeq-tiny" in describe_model(as_model(run, "mdeq-tiny"))["obstacle"]
    with pytest.raises(NotApplicableError, match="Nothing is certified"):
        certify_pictures(as_model(run, "mdeq-tiny"), [pixels])
    assert set(SOLVERS) | {OWN} == set(describe_model(run)["solvers"])


def test_a_prediction_is_certified_with_its_radius(run, pixels):
    (said,) = certify_pictures(as_model(run, "geq-dense-tiny"), [pixels])
    assert said.startswith("Radius 0.") and "the class is" in said and "Its logit leads by" in said


def test_maps_are_bytes_in_one_scale_and_what_is_not_finite_is_the_lowest():
    maps = torch.linspace(-1, 3, 2 * 5 * 4).view(2, 5, 4)
    found = encode(maps)
    assert (found["low"], found["high"]) == (-1, 3) and np.abs(decoded(found) - maps.numpy()).max() <= 4 / 255
    assert encode(torch.ones(3, 200, 100))["columns"] == 64
    broken = torch.tensor([[[torch.nan, torch.inf], [0.0, 2.0]]])
    assert decoded(encode(broken)).tolist() == [[[0, 0], [0, 2]]]
    assert decoded(encode(torch.full((1, 2, 2), torch.nan))).tolist() == [[[0, 0], [0, 0]]]
