"""A model survives being saved, copied and pickled with its logits unchanged."""

import copy
import io
import pickle

import pytest
import torch
from zoo_helpers import KINDS, digits, train, trained

from kerneq.models import build


@pytest.fixture(scope="module")
def pixels():
    return digits()[0][1000:1016]


@pytest.mark.parametrize("name", KINDS)
def test_a_state_dict_carries_the_model_into_a_fresh_one_even_if_that_has_seen_another_size(name, pixels):
    model = trained(name)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    torch.manual_seed(99)
    fresh = build(name, channels=1)
    with torch.no_grad():
        if name != "geq-dense-tiny":  # which has one size
            fresh(torch.randn(2, 1, 16, 16))
        fresh.load_state_dict(torch.load(file, weights_only=True))
        torch.testing.assert_close(fresh.eval()(pixels), model(pixels), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_a_copy_has_the_same_logits_and_a_life_of_its_own(name, pixels):
    model = trained(name)
    with torch.no_grad():
        wanted = model(pixels)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            torch.testing.assert_close(twin(pixels), wanted, rtol=1e-6, atol=1e-6)
    train(twin, steps=1)
    with torch.no_grad():
        torch.testing.assert_close(model(pixels), wanted, rtol=0, atol=0)
        assert float((twin.eval()(pixels) - wanted).abs().max()) > 1e-3


@pytest.mark.parametrize("name", ["geq-dense-tiny", "geq-tiny"])
def test_training_goes_on_from_a_loaded_state_as_if_it_had_never_stopped(name):
    torch.manual_seed(0)
    model = build(name, channels=1)
    train(model, steps=3)
    resumed = build(name, channels=1)
    resumed.load_state_dict(model.state_dict())
    resumed.train()
    torch.testing.assert_close(train(resumed, steps=3), train(model, steps=3), rtol=1e-5, atol=1e-5)
