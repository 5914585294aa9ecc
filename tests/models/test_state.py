"""A model survives being saved, copied and pickled with its logits unchanged."""

import copy
import io
import pickle

import pytest
import torch
from zoo_helpers import KERNEL_TINY, TINY, digits, train, trained

from kerneq.models import build


@pytest.fixture(scope="module")
def pixels():
    return digits()[0][1000:1016]


@pytest.mark.parametrize("name", TINY)
def test_a_state_dict_carries_the_model_into_a_fresh_one(name, pixels):
    model = trained(name)
    with torch.no_grad():
        wanted = model(pixels)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    torch.manual_seed(99)
    fresh = build(name, channels=1)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    with torch.no_grad():
        torch.testing.assert_close(fresh.eval()(pixels), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in KERNEL_TINY if name != "geq-dense-tiny"])  # which has one size
def test_a_state_dict_of_one_picture_size_loads_into_a_model_that_has_seen_another(name, pixels):
    model = trained(name)
    with torch.no_grad():
        wanted = model(pixels)
    fresh = build(name, channels=1)
    with torch.no_grad():
        fresh(torch.randn(2, 1, 16, 16))
        fresh.load_state_dict(model.state_dict())
        torch.testing.assert_close(fresh.eval()(pixels), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_has_the_same_logits_and_a_life_of_its_own(name, way, pixels):
    model = trained(name)
    with torch.no_grad():
        wanted = model(pixels)
    twin = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        torch.testing.assert_close(twin(pixels), wanted, rtol=1e-6, atol=1e-6)
    train(twin, steps=2)
    with torch.no_grad():
        torch.testing.assert_close(model(pixels), wanted, rtol=0, atol=0)
        assert float((twin.eval()(pixels) - wanted).abs().max()) > 1e-3


@pytest.mark.parametrize("name", ["geq-dense-tiny", "geq-tiny", "mopteq-tiny"])
def test_training_goes_on_from_a_loaded_state_as_if_it_had_never_stopped(name):
    torch.manual_seed(0)
    model = build(name, channels=1)
    train(model, steps=3)
    resumed = build(name, channels=1)
    resumed.load_state_dict(model.state_dict())
    resumed.train()
    torch.testing.assert_close(train(resumed, steps=3), train(model, steps=3), rtol=1e-5, atol=1e-5)
