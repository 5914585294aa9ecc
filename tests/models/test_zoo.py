"""Every name: how large it is, that it runs both ways, and that it refuses what it cannot do in one sentence."""

import dataclasses

import pytest
import torch
from zoo_helpers import TINY, pictures

import kerneq
from kerneq.kernels import AbstractKernel
from kerneq.models import MODELS, Classifier, LipschitzClassifier, build, find, parameters
from kerneq.settings import choices

MILLIONS = {
    "geq-5m": 4.8,
    "kerdeq-5m": 4.8,
    "geq-8m": 7.5,
    "kerdeq-8m": 7.5,
    "geq-6m-imagenet": 6.0,
    "geq-13m-imagenet": 13.0,
    "mopteq-8m": 7.5,
    "mopteq-polynomial-8m": 7.5,
    "mopteq-sigmoid-8m": 7.5,
    "mdeq-10m": 10.0,
    "resnet18": 11.2,
    "resnet50": 23.5,
}


@pytest.mark.parametrize("name", MILLIONS)
def test_the_parameter_count_is_the_published_one_within_five_percent(name):
    assert parameters(build(name)) == pytest.approx(MILLIONS[name] * 1e6, rel=0.05)


def test_the_two_models_of_kerdeqs_table_3_have_the_same_size():
    assert parameters(build("kerdeq-single")) == pytest.approx(parameters(build("opteq")), rel=0.01)


# Other names differ from these in numbers only, and take long.
@pytest.mark.parametrize("name", [*TINY, "geq-5m", "geq-6m-imagenet", "geq-certified", "resnet50", "mdeq-10m-imagenet"])
def test_every_parameter_gets_a_finite_gradient_that_is_not_zero(name):
    model = build(name, classes=7)
    logits = model(pictures(name))
    assert logits.shape == (2, 7) and bool(logits.isfinite().all())
    logits.square().sum().backward()
    for which, parameter in model.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), which
        assert bool(parameter.grad.any()), which


@pytest.mark.parametrize("name", TINY)
def test_solutions_come_by_name_one_for_each_equilibrium_layer(name):
    model = build(name)
    layers = [module for module in model.modules() if isinstance(module, kerneq.Equilibrium)]
    logits, solutions = model(pictures(name, batch=3), solutions=True)
    assert logits.shape == (3, 10)
    assert len(solutions) == len(layers)
    if name == "geq-tiny":
        assert list(solutions) == ["branch0", "branch1"]
    for solution in solutions.values():
        assert isinstance(solution, kerneq.Solution)
        assert len(solution.value) == len(solution.steps) == len(solution.residual) == 3


def test_refinements_start_as_the_means_they_refine_and_then_every_one_of_them_learns():
    model = build("geq-tiny", settings={"scales": [1, 2], "refinements": 2})
    plain, x = build("geq-tiny"), pictures("geq-tiny", batch=4)
    added = {name for name in model.state_dict() if name.startswith("levels.")}
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if name not in added})
    torch.testing.assert_close(model.eval()(x), plain.eval()(x), rtol=0, atol=0)
    width = model.config.width
    square = width**2 // 4
    block = 2 * square + 9 * square // 4 + 2 * (width // 4 + width // 4 + width)  # three convolutions, batch norms
    assert parameters(model) - parameters(plain) == 2 * block
    for block in model.levels.blocks["2"]:
        torch.nn.init.ones_(block.expand[-1].weight)  # as after a first step: before it, they alone have a gradient
    model.train()(x).square().sum().backward()
    assert all(bool(p.grad.any()) for name, p in model.named_parameters() if name in added)
    straight = build("geq-tiny", settings={"scales": [1, 2], "refinements": 2, "rectified": False}).levels.blocks["2"][
        0
    ]
    bent, y = model.eval().levels.blocks["2"][0], torch.rand(4, width, 8, 8)
    straight.eval().load_state_dict(bent.state_dict())
    assert bool((straight(y) < 0).any())
    torch.testing.assert_close(straight(y).relu(), bent(y), rtol=0, atol=0)


def test_the_explicit_control_has_the_weights_of_the_equilibria_but_for_those_of_the_kernel():
    model, control = build("geq-tiny"), build("geq-tiny", settings={"explicit": True})
    kernels = sum(branch.equilibrium.cell.similarity.project.weight.numel() for branch in model.branches)
    assert parameters(model) - parameters(control) == kernels
    x = pictures("geq-tiny", batch=4)
    logits, solutions = control(x, solutions=True)
    assert solutions == {} and control.layers() == [] and control.config.equation == "none: explicit"
    for branch in control.branches:
        torch.nn.init.ones_(branch.expand[-1].weight)  # as after a first step: at the start a block adds nothing
    control(x).square().sum().backward()
    assert all(bool(p.grad.any()) for p in control.parameters()) and logits.shape == (4, 10)


def test_a_resnet_may_keep_what_its_blocks_would_cut_off():
    bent, straight = (build("resnet-tiny", settings={"rectified": value}).eval() for value in (True, False))
    straight.load_state_dict(bent.state_dict())
    x = torch.randn(2, bent.blocks[0].residual[0][0].in_channels, 8, 8)
    assert bool((straight.blocks[0](x) < 0).any())
    torch.testing.assert_close(straight.blocks[0](x).relu(), bent.blocks[0](x), rtol=0, atol=0)


def test_settings_change_the_model_that_is_built():
    settings = {"norm": 2, "features": [16, 32], "solver": {"name": "picard"}, "tol": 1e-2}
    model = build("geq-tiny", settings=settings)
    layers = [branch.equilibrium for branch in model.branches]
    assert [layer.cell.norm for layer in layers] == [2.0, 2.0]  # a whole number passes for a decimal one
    assert [layer.cell.operator.weight.shape[0] for layer in layers] == [16, 32]
    assert isinstance(layers[0].solver, kerneq.solvers.Picard) and layers[0].tol == 1e-2
    assert build("geq-tiny", settings={"solver": kerneq.solvers.Picard()}).config.solver == layers[0].solver
    assert model.config.norm == 2.0 and MODELS["geq-tiny"].config.norm == 1.0


@pytest.mark.parametrize(
    "settings",
    [
        *({"solver": {"name": name}} for name in ("proximal", "picard", "anderson", "broyden")),
        *({"gradient": {"name": name, "steps": 30}} for name in ("phantom", "unrolled")),
    ],
    ids=str,
)
def test_every_solver_and_gradient_can_be_asked_for_by_name(settings):
    model = build("geq-tiny", settings=settings)
    logits, solutions = model(pictures("geq-tiny"), solutions=True)
    logits.square().sum().backward()
    assert all(bool(solution.converged.all()) for solution in solutions.values())
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("backward", ["in-features", "conjugate-gradient", "anderson"])
def test_every_backward_solve_gives_the_same_gradient(backward):
    implicit = {"solver": {"name": backward}, "tol": 1e-6, "max_steps": 200}
    found = []
    for gradient in (implicit, {"name": "unrolled", "steps": 200}):
        torch.manual_seed(0)
        model = build("geq-dense-tiny", settings={"tol": 1e-6, "max_steps": 200, "gradient": gradient})
        model(pictures("geq-dense-tiny", batch=8)).square().sum().backward()
        found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 1e-3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "geq-5n"}, r"no model 'geq-5n'\. Did you mean `geq-5m`\? There are: geq-5m, "),
        ({"settings": {"norms": 1.0}}, r"no setting `norms`\. Did you mean `norm`\? The configuration has: solver, "),
        ({"settings": {"norm": "big"}}, r"`norm` must be a number, got 'big'"),
        ({"settings": {"norm": True}}, r"`norm` must be a number, got True"),
        ({"settings": {"kernel": {"hidden": 1.5}}}, r"`kernel.hidden` must be a whole number, got 1\.5"),
        ({"settings": {"overlap": 1}}, r"`overlap` must be true or false, got 1"),
        ({"settings": {"features": 16}}, r"`features` must be a list, got 16"),
        ({"settings": {"features": [16]}}, r"`features` and `scales` need one entry a branch, got 1 and 2"),
        ({"settings": {"scales": [1, 3]}}, r"`scales` must divide `fusion` or be a multiple .*, got \[1, 3\] and 2"),
        ({"name": "mdeq-tiny", "settings": {"head": [4]}}, r"`widths` and `head` need one entry a scale, got 2 and 1"),
        ({"settings": {"refinements": 1, "width": 2}}, r"`width` must be at least 4.* got 2"),
        ({"settings": {"stem": "deep", "width": 2}}, r"`width` must be at least 4.* got 2"),
        ({"name": "geq-certified-tiny", "settings": {"refinements": 1}}, r"`lipschitz` needs `refinements` = 0"),
        ({"name": "geq-certified-tiny", "settings": {"explicit": True}}, r"`lipschitz` needs `explicit` = false"),
        ({"name": "geq-certified-tiny", "settings": {"join": "concatenate"}}, r"`lipschitz` needs `join` = mean"),
        ({"settings": {"features": [16.5, 16]}}, r"`features\[0\]` must be a whole number, got 16\.5"),
        ({"settings": {"features": [16, 0]}}, r"`features\[1\]` must be at least 1, got 0"),
        ({"settings": {"features": [12, 16]}}, r"`split` must divide the number of features: 12 .* multiple of 8"),
        ({"settings": {"length": 0}}, r"`length` must be greater than 0, got 0\.0"),
        ({"settings": {"output": "both"}}, r"`output` must be one of state, features, got 'both'"),
        ({"settings": {"norm": -1.0}}, r"`norm` must be greater than 0, got -1\.0"),
        ({"settings": {"tol": 0.0}}, r"`tol` must be greater than 0, got 0\.0"),
        ({"settings": {"max_steps": 0}}, r"`max_steps` must be at least 1, got 0"),
        ({"settings": {"solver": {"name": "secant"}}}, r"`solver.name` must be one of .*broyden.*, got 'secant'"),
        ({"settings": {"gradient": {"name": "exact"}}}, r"`gradient.name` must be one of .*phantom.*, got 'exact'"),
        ({"settings": {"gradient": {"solver": {"name": "up"}}}}, r"`gradient.solver.name` must be .*, got 'up'"),
        ({"settings": {"kernel": {"name": "cosine"}}}, r"`kernel.name` must be one of .*gaussian.*, got 'cosine'"),
        ({"settings": {"kernel": "linear"}}, r"`kernel` is a section, .* name one of its settings: name, gamma"),
        (
            {"settings": {"stem": "big"}},
            r"`stem` must be one of cifar, deep, paper, imagenet, folded, plain, got 'big'",
        ),
        ({"classes": 0}, r"`classes` must be a whole number, at least 1, got 0"),
        ({"classes": 2.0}, r"`classes` must be a whole number, at least 1, got 2\.0"),
        ({"channels": -1}, r"`channels` must be a whole number, at least 1, got -1"),
    ],
    ids=str,
)
def test_a_model_that_cannot_be_built_is_refused_in_one_sentence(arguments, words):
    with pytest.raises(ValueError, match=words):
        build(**({"name": "geq-tiny"} | arguments))


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("geq-5m", (2, 3, 24, 24), r"sides that are multiples of 16, got \(2, 3, 24, 24\)"),
        ("geq-tiny", (3, 8, 8), r"pictures \(batch, channels, height, width\) .*, got \(3, 8, 8\)"),
        ("geq-tiny", (2, 3, 0, 0), r"got \(2, 3, 0, 0\)"),
        ("geq-tiny", (2, 1, 8, 8), r"3 channels.*, got \(2, 1, 8, 8\)"),
        ("opteq-tiny", (2, 3, 7, 8), r"sides that are multiples of 2, got \(2, 3, 7, 8\)"),
        ("mdeq-tiny", (2, 3, 7, 8), r"sides that are multiples of 2, got \(2, 3, 7, 8\)"),
        ("mdeq-tiny", (2, 1, 8, 8), r"3 channels.*, got \(2, 1, 8, 8\)"),
        ("geq-dense-tiny", (2, 3, 9, 9), r"3 channels and sides of 8, got \(2, 3, 9, 9\)"),
        (
            "resnet-tiny",
            (2, 8, 8),
            r"must be pictures \(batch, channels, height, width\) with 3 channels, got \(2, 8, 8\)",
        ),
        ("resnet-tiny", (2, 1, 8, 8), r"3 channels.*, got \(2, 1, 8, 8\)"),
    ],
)
def test_pictures_that_do_not_fit_are_refused_in_one_sentence(name, shape, words):
    with pytest.raises(ValueError, match=words):
        build(name)(torch.randn(shape))


def test_pixels_that_are_not_floating_point_are_refused_in_one_sentence():
    with pytest.raises(TypeError, match="floating-point.*uint8"):
        build("geq-tiny")(torch.zeros(2, 3, 8, 8, dtype=torch.uint8))


@pytest.mark.parametrize("kernel", choices(AbstractKernel).values())
def test_an_entry_of_the_zoo_with_any_kernel_has_an_equation(kernel):
    entry = find("geq-tiny")
    changed = dataclasses.replace(entry, config=dataclasses.replace(entry.config, kernel=kernel()))
    assert changed.equation == kernel.equation and changed.equation.startswith("z = relu(")


def test_the_flag_of_the_settings_chooses_the_class_of_the_model():
    assert isinstance(build("geq-certified-tiny"), LipschitzClassifier) and isinstance(build("geq-tiny"), Classifier)
    with pytest.raises(ValueError, match="are those of a `LipschitzClassifier`"):
        Classifier(find("geq-certified-tiny").config, classes=10)


def test_joined_by_concatenation_every_branch_has_its_own_weights_in_the_head():
    model = build("geq-tiny", settings={"join": "concatenate"})
    x = torch.randn(2, 3, 8, 8)
    assert model(x).shape == (2, 10)
    assert model.head.weight.shape == (10, 2 * build("geq-tiny").head.in_features)


def test_scales_that_are_no_powers_of_two_need_sides_that_all_of_them_divide():
    model = build("geq-tiny", settings={"scales": [2, 3], "fusion": 6})
    assert model.multiple == 12 and model(torch.randn(2, 3, 12, 24)).shape == (2, 10)  # patches of 2 pixels
