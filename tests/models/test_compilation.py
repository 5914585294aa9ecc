"""torch.compile around a model or inside its solves, and torch.export of its inference path."""

import io
import warnings

import pytest
import torch
from zoo_helpers import KERNEL_TINY, digits, trained

from kerneq.models import build

STEPS = 3  # a traced step is about a hundred operations, and tracing is slow


@pytest.fixture(scope="module")
def pixels():
    return digits()[0][1000:1004]


@pytest.fixture
def torchs_own_warnings():
    """What torch says of its own insides while it compiles is not about our code."""
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
        yield
    torch.compiler.reset()


def fixed(name: str) -> torch.nn.Module:
    """A model in evaluation that always takes the same number of steps, so that both programs do the same."""
    torch.manual_seed(0)
    model = build(name, channels=1, settings={"max_steps": STEPS, "check_every": STEPS})
    model(digits()[0][:32]).square().sum().backward()  # running means of batch norm
    return model.eval()


@pytest.mark.parametrize("name", KERNEL_TINY)
def test_an_exported_model_agrees_with_the_eager_one_also_after_save_and_load(name, pixels, torchs_own_warnings):
    model = fixed(name)
    with torch.no_grad():
        model(pixels)  # the norm of W is measured in an eager call; the program holds it as a constant
        program = torch.export.export(model, (pixels,), strict=False)
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        for found in (program, torch.export.load(file)):
            run = found.module()
            for x in (pixels, pixels.flip(0) * 0.5):
                torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)


def test_export_takes_a_fixed_number_of_steps_whatever_check_every_says(pixels, torchs_own_warnings):
    model = fixed("geq-dense-tiny")
    with torch.no_grad():
        wanted = model(pixels)
        model.equilibrium.check_every = None
        program = torch.export.export(model, (pixels,), strict=False)
    torch.testing.assert_close(program.module()(pixels), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["geq-tiny", "opteq-tiny"])
def test_export_before_the_norm_is_known_is_refused_in_one_sentence(name, pixels, torchs_own_warnings):
    model = build(name, channels=1).eval()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"call the model once, in `eval\(\)` .* before it is expo"):
        torch.export.export(model, (pixels,), strict=False)
    with torch.no_grad():  # and the model is as good as before
        assert bool(model(pixels).isfinite().all())


def test_a_compiled_model_has_the_logits_and_gradients_of_the_eager_one(pixels, torchs_own_warnings):
    model = trained("geq-dense-tiny")
    model(pixels).square().sum().backward()
    wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    compiled = torch.compile(model)
    logits = compiled(pixels)
    torch.testing.assert_close(logits.detach(), model(pixels).detach(), rtol=1e-5, atol=1e-5)
    logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["geq-tiny", "mdeq-tiny", "resnet-tiny"])
def test_a_compiled_map_finds_the_same_equilibria(name, pixels, torchs_own_warnings):
    model = trained(name)
    with torch.no_grad():
        wanted = model(pixels)
        model.compile_map()
        found, solutions = model(pixels, solutions=True)
    loose = name == "mdeq-tiny"
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=3e-2 if loose else 1e-3)
    assert loose or all(bool(solution.converged.all()) for solution in solutions.values())
    model.train()
    model(pixels).square().sum().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
