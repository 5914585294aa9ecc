"""torch.compile around a model or inside its solves, and torch.export of its inference path."""

import io

import pytest
import torch
from zoo_helpers import digits, trained

from kerneq import Equilibrium, equation, fixed_point
from kerneq.cells import DenseCell
from kerneq.gradients import Implicit, Phantom, Unrolled
from kerneq.kernels import Gaussian
from kerneq.models import build
from kerneq.solvers import Anderson

# What torch says about itself while it compiles, and hides from people but not from pytest.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]
STEPS = 2  # tracing is slow: few steps and a short memory here, and one longer solve below


@pytest.fixture(scope="module")
def pixels():
    return digits()[0][1000:1004]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    equation._compiled.cache_clear()


def fixed(name: str, steps: int = STEPS, memory: int = 1) -> torch.nn.Module:
    """A model in evaluation that always takes the same number of steps, so that both programs do the same."""
    torch.manual_seed(0)
    model = build(name, channels=1, settings={"max_steps": steps, "check_every": steps, "solver": {"memory": memory}})
    model(digits()[0][:32]).square().sum().backward()  # running means of batch norm
    return model.eval()


@pytest.mark.parametrize("name", ["opteq-tiny", "mopteq-sigmoid-tiny"])
def test_an_exported_model_agrees_with_the_eager_one_also_after_save_and_load(name, pixels):
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


def test_export_takes_a_fixed_number_of_steps_whatever_check_every_says(pixels):
    model = fixed("geq-dense-tiny", steps=4, memory=5)
    with torch.no_grad():
        wanted = model(pixels)
        model.equilibrium.check_every = None
        program = torch.export.export(model, (pixels,), strict=False)
    torch.testing.assert_close(program.module()(pixels), wanted, rtol=1e-4, atol=1e-4)


def test_export_before_the_norm_is_known_is_refused_in_one_sentence(pixels):
    model = build("geq-tiny", channels=1).eval()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"call the model once, in `eval\(\)` .* before it is expo"):
        torch.export.export(model, (pixels,), strict=False)
    with torch.no_grad():  # and the model is as good as before
        assert bool(model(pixels).isfinite().all())


def test_a_compiled_model_has_the_logits_and_gradients_of_the_eager_one(pixels):
    model = trained("geq-dense-tiny")
    model(pixels).square().sum().backward()
    wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager")  # the usual backend is that of test_operator_survival
    logits = compiled(pixels)
    torch.testing.assert_close(logits.detach(), model(pixels).detach(), rtol=1e-5, atol=1e-5)
    logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-3, atol=1e-4)


# MDEQ does not reach its tolerance.
@pytest.mark.parametrize(
    ("name", "atol"), [("geq-dense-tiny", 1e-3), ("opteq-tiny", 1e-3), ("mdeq-tiny", 3e-2), ("resnet-tiny", 1e-4)]
)
def test_a_compiled_map_finds_the_same_equilibria(name, atol, pixels, monkeypatch):
    compilations = []

    def compile_traced(*arguments, **keywords):  # and run without code generation, which takes half a minute
        compilations.append(name)
        return compiler(*arguments, backend="aot_eager", **keywords)

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", compile_traced)
    model = trained(name)
    for layer in model.layers():
        layer.solver = Anderson()  # which evaluates the map; `Proximal` solves these in the features, without it
    with torch.no_grad():
        wanted = model(pixels)
        model.compile_map()
        torch.testing.assert_close(model(pixels), wanted, rtol=1e-3, atol=atol)
    assert compilations
    model(pixels).square().sum().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())


def test_a_function_may_be_compiled_inside_fixed_point_or_with_it():
    torch.manual_seed(0)
    convolve, x = torch.nn.Conv2d(3, 3, 1), torch.randn(2, 3, 2, 2)

    def f(z, x):
        return torch.tanh(0.3 * convolve(convolve(z).relu()) + x)

    def around(x):
        return fixed_point(f, torch.zeros_like(x), x, tol=1e-6).value

    found = []
    compiled = torch.compile(f)  # by the usual backend, which gives buffers away
    for solve in (
        around,
        torch.compile(around, backend="aot_eager"),
        lambda x: fixed_point(compiled, x, x, tol=1e-6).value,
    ):
        convolve.zero_grad()
        value = solve(x)
        value.square().sum().backward()
        found.append((value.detach(), convolve.weight.grad.clone()))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-5)


class Tanh(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)

    def forward(self, z, x):
        return torch.tanh(0.5 * self.linear(z) + x)


STEPPED = {"max_steps": 2, "check_every": 2}
FIXED = Implicit(max_steps=4, check_every=4, on_failure="return")


def test_layers_of_other_sizes_compile_one_after_the_other():
    """By then the compiler takes every size for one that changes."""
    for inputs, batch in ((6, 3), (10, 3), (10, 4)):
        layer, x = (
            Equilibrium(DenseCell(Gaussian(), inputs=inputs, state=8, features=4), **STEPPED),
            torch.ones(batch, inputs),
        )
        with torch.no_grad():
            want = layer.eval()(x).value
            torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="eager")(x).value, want)


@pytest.mark.parametrize(
    "of, gradient", [("cell", FIXED), ("cell", Phantom(1)), ("function", Unrolled(2)), ("function", FIXED)], ids=str
)
def test_a_layer_of_fixed_steps_is_one_program(of, gradient):
    torch.manual_seed(0)
    cell = DenseCell(Gaussian(), inputs=6, state=8, features=4) if of == "cell" else Tanh()
    layer, x = Equilibrium(cell, gradient=gradient, **STEPPED).eval(), torch.randn(3, 6)
    want = layer(x).value
    program = torch.compile(lambda x: layer(x).value, fullgraph=True, backend="aot_eager")
    if of == "function" and isinstance(gradient, Implicit):
        with torch.no_grad():
            torch.testing.assert_close(program(x), want)
        return
    got = program(x)
    torch.testing.assert_close(got, want)
    parameters = list(layer.parameters())
    expected = torch.autograd.grad(want.square().sum(), parameters)
    for a, b in zip(torch.autograd.grad(got.square().sum(), parameters), expected, strict=True):
        torch.testing.assert_close(a, b)
