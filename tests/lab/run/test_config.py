"""A run's configuration: files and their bases, overrides, run folders of old, and what training would refuse."""

import dataclasses
import string
import typing
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kerneq.gradients import Implicit, InFeatures, Phantom
from kerneq.kernels import AbstractKernel, AbstractRadialKernel, Gaussian, Polynomial
from kerneq.lab.data import DATA_SETS, Augment
from kerneq.lab.run.config import (
    EXPERIMENTS,
    Config,
    ConfigError,
    Data,
    Model,
    Optimizer,
    Schedule,
    Training,
    check,
    differences,
    load,
    parse,
    write,
)
from kerneq.lab.training.state import takes_fixed_steps
from kerneq.models import MODELS, from_config
from kerneq.settings import choices, values
from kerneq.solvers import Anderson, Picard

FILES = sorted(EXPERIMENTS.glob("*.toml"))
RECIPES = sorted((Path(__file__).parents[3] / "docs" / "recipe").glob("*.toml"))


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False)


milestones = st.lists(st.floats(0.01, 0.99), unique=True, max_size=4).map(lambda values: tuple(sorted(values)))
configs = st.builds(
    Config,
    seed=st.integers(0, 2**31 - 1),
    device=st.sampled_from(["auto", "cpu", "cuda", "cuda:3"]),
    data=st.builds(Data, name=st.text(), size=st.integers(0, 512), validation=numbers(0, 0.9)),
    augment=st.builds(
        Augment,
        crop=st.integers(0, 8),
        flip=st.booleans(),
        trivial=st.booleans(),
        mixup=numbers(0, 2),
        share=numbers(0, 1),
    ),
    model=st.sampled_from([Model(name, entry.config) for name, entry in MODELS.items()]),
    optimizer=st.builds(Optimizer, lr=numbers(1e-300, 1e6), momentum=numbers(0.1, 0.99), weight_decay=numbers(0, 1)),
    schedule=st.builds(Schedule, kind=st.sampled_from(["step", "cosine", "one-cycle"]), milestones=milestones),
    training=st.builds(Training, epochs=st.integers(1, 10**6), amp=st.booleans(), ema=numbers(0, 0.99)),
)


@settings(max_examples=150, deadline=None)
@given(configs, st.booleans())
def test_a_configuration_written_as_toml_reads_back_the_same(config, comments):
    assert parse(write(config, comments=comments)) == config


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=string.printable) | st.text())
def test_any_text_is_a_configuration_or_one_clear_sentence(text):
    try:
        parse(text)
    except ConfigError as error:
        assert str(error).endswith(".")


KEYS = [
    f"{s.name}.{f.name}"
    for s in dataclasses.fields(Config)
    if dataclasses.is_dataclass(s.type)
    for f in dataclasses.fields(s.type)
]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([*KEYS, "seed", "device", "model", "model.norm", "model.kernel.gamma", "model.solver.name"])
    | st.text(max_size=12),
    st.text(max_size=12),
)
def test_any_override_is_applied_or_refused_in_one_sentence(key, value):
    try:
        parse("", [f"{key}={value}"])
    except ConfigError as error:
        assert str(error).endswith(".")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "optimizer.lrr=0.1",
            "There is no setting `optimizer.lrr`. Did you mean `optimizer.lr`? [optimizer] has: lr, momentum",
        ),
        ("optimiser.lr=0.1", "There is no setting `optimiser`. Did you mean `optimizer`? The configuration has: seed"),
        ("training.epochs=0", "`training.epochs` must be at least 1, got 0."),
        ("training.amp=1", "`training.amp` must be true or false, got 1."),
        ("optimizer.lr=0", "`optimizer.lr` must be greater than 0, got 0.0."),
        ("optimizer.lr=nan", "`optimizer.lr` must be a finite number, got nan."),
        ("optimizer.lr=inf", "`optimizer.lr` must be a finite number, got inf."),
        ("optimizer.lr=fast", "`optimizer.lr` must be a number, got 'fast'."),
        ("schedule.milestones=[0.9, 0.1]", "`schedule.milestones` are shares of the run"),
        ("schedule.milestones=0.5", "`schedule.milestones` must be a list, got 0.5."),
        ("optimizer.momentum=0", "`optimizer.nesterov` needs `optimizer.momentum` above 0"),
        ("model.norm=2024-01-01", "`model.norm` must be a number, got"),
        ("model=3", "`model` is a section, not a setting"),
        ("model.name=geq-tyni", "There is no model 'geq-tyni'. Did you mean `geq-tiny`? There are: geq-5m"),
        ("model.nrom=2", "There is no setting `model.nrom`. Did you mean `model.norm`? [model] has: name, solver"),
        ("model.solver.memory=-1", "[model.solver] `memory` must be a whole number, at least 0, got -1."),
        ("lr", "A change of setting is written key=value (for example optimizer.lr=0.2), got `lr`."),
        ("=3", "A change of setting is written key=value"),
    ],
)
def test_a_wrong_override_is_refused_in_words(override, message):
    with pytest.raises(ConfigError) as caught:
        parse("", [override])
    assert message in str(caught.value)


def test_overrides_win_over_the_file_and_need_no_quotes(tmp_path):
    text = 'seed = 1\n[optimizer]\nlr = 0.3\n[schedule]\nkind = "step"\n'
    (tmp_path / "a.toml").write_text(text, encoding="utf-8-sig", newline="\r\n")  # as on Windows
    config = load(
        tmp_path / "a.toml",
        ["optimizer.lr=.5", "schedule.kind=cosine", "model.norm=8", "data.name='mnist'"],
    )
    assert (config.seed, config.optimizer.lr, config.schedule.kind) == (1, 0.5, "cosine")
    assert (config.model.settings.norm, config.data.name) == (8.0, "mnist")


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        (['model.solver.name="anderson"'], Anderson(memory=3)),
        (["model.solver.name='picard'"], Picard()),
        (["model.solver={memory=2}"], Anderson(memory=2)),
        (["model.solver={memory=2}", "model.solver.relaxation=.5"], Anderson(memory=2, relaxation=0.5)),
        (["model.solver.relaxation=.5", "model.solver={memory=2}"], Anderson(memory=2, relaxation=0.5)),
        (['model.solver={name="picard"}'], Picard()),
    ],
)
def test_a_table_or_a_name_in_quotes_is_laid_over_the_file_as_a_file_would_be(tmp_path, changes, wanted):
    (tmp_path / "a.toml").write_text('[model.solver]\nname = "anderson"\nmemory = 3\n')
    assert load(tmp_path / "a.toml", changes).model.settings.solver == wanted


def test_a_misspelt_key_in_a_file_names_the_file(tmp_path):
    (tmp_path / "a.toml").write_text("[training]\nepoch = 3\n")
    with pytest.raises(
        ConfigError, match=r"a.toml: There is no setting `training.epoch`. Did you mean `training.epochs`\?"
    ):
        load(tmp_path / "a.toml")


@pytest.mark.parametrize(("content", "message"), [(b"\xff\xfe", "cannot be read"), (b"a = = 1", "not valid TOML")])
def test_a_file_that_is_no_configuration_is_refused(tmp_path, content, message):
    (tmp_path / "a.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "a.toml")


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="There is no file"):
        load(tmp_path / "a.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)


def test_differences_names_the_keys_that_differ():
    one = parse("", ["seed=1", "model.norm=2.0", "model.solver.name=picard"])
    changed = differences(one, parse(""))
    assert changed[:3] == ["seed", "model.norm", "model.solver.name"] and "model.solver.relaxation" in changed
    assert differences(one, one) == []


def test_every_default_is_shown():
    shown = write(Config(), comments=True)
    for section in dataclasses.fields(Config):
        kind = typing.get_type_hints(Config)[section.name]
        fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else (section,)
        for field in (*dataclasses.fields(Config().model.settings), *fields):
            assert f"\n{field.name} = " in "\n" + shown or f".{field.name}]" in shown or field.name == "settings"


def test_there_is_a_file_for_every_table_of_the_papers():
    heads = "".join(path.read_text().splitlines()[0] for path in FILES)
    for place in ("Table 1(a)", "Table 1(b)", "Table 2(a)", "Table 2(b)", "Table 3"):
        assert f"GEQ, {place}" in heads and f"KerDEQ, {place}" in heads
    for place in ("GEQ, Table 5", "GEQ, Figure 4(a)", "KerDEQ, Figure 4(b)", "KerDEQ, Figure 3"):
        assert place in heads


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_experiment_file_is_a_valid_configuration(path):
    config = load(path)
    assert config == load(path.stem) == parse(write(config))
    assert config.data.name in DATA_SETS or path.stem == "own-pictures"
    assert path.read_text().startswith("# "), "its first line says what it reproduces"


def test_an_experiment_is_found_by_its_name_and_a_wrong_name_suggests():
    assert load("geq-5m-cifar10").model.settings.kernel == Gaussian(0.2, patch=2, split=8, hidden=64)
    assert load("kerdeq-5m-cifar10-gamma0.1", ["seed=3"]).seed == 3
    with pytest.raises(ConfigError, match="There is no experiment 'geq-5m-cifar1'. Did you mean `geq-5m-cifar10`?"):
        load("geq-5m-cifar1")


def test_every_experiment_takes_every_kernel_and_none_keeps_what_was_said_of_another():
    for path in FILES:
        model = load(path).model
        if not hasattr(model.settings, "kernel"):
            continue
        own = MODELS[model.name].config.kernel
        for name, kind in choices(AbstractKernel).items():
            if getattr(model.settings, "lipschitz", False) and not issubclass(kind, AbstractRadialKernel):
                continue  # which has no such constant
            wanted = next((kernel for kernel in (model.settings.kernel, own) if isinstance(kernel, kind)), kind())
            changed = load(path, [f"model.kernel.name={name}"]).model
            assert changed == Model(model.name, dataclasses.replace(model.settings, kernel=wanted)), (path.stem, name)
    beside = load("geq-5m-cifar10", ["model.kernel.name=polynomial", "model.kernel.degree=3"]).model.settings
    assert beside.kernel == Polynomial(3)
    assert load("geq-certified-cifar10", ["model.gradient.name=phantom"]).model.settings.gradient == Phantom()


@pytest.mark.parametrize("name", ["resnet18", "mdeq-10m", "geq-certified", "geq-dense-tiny", "mopteq-8m"])
def test_another_model_drops_the_settings_of_the_model_of_the_base(name, tmp_path):
    base, wanted = load("geq-5m-cifar10"), Model(name, MODELS[name].config)
    changed = load("geq-5m-cifar10", [f"model.name={name}"])
    assert changed == dataclasses.replace(base, model=wanted)
    check(changed)
    (tmp_path / "a.toml").write_text(f'base = "geq-5m-cifar10"\n[model]\nname = "{name}"\n')
    assert load(tmp_path / "a.toml").model == wanted


def test_another_model_takes_nothing_that_was_said_of_the_one_before(tmp_path):
    of_a_run = write(load("geq-tiny-digits", ["model.norm=0.5"]))  # every setting beside the name
    (tmp_path / "a.toml").write_text(of_a_run)
    another = load(tmp_path / "a.toml", ["model.name=mopteq-tiny"]).model
    assert another == Model("mopteq-tiny", MODELS["mopteq-tiny"].config)
    assert load(tmp_path / "a.toml", ["model.name=geq-tiny"]).model.settings.norm == 0.5
    (tmp_path / "b.toml").write_text('base = "a.toml"\n[model]\nname = "kerdeq-tiny"\ntol = 0.1\n')
    model = load(tmp_path / "b.toml", ["model.width=8"]).model
    assert model == Model("kerdeq-tiny", dataclasses.replace(MODELS["kerdeq-tiny"].config, tol=0.1, width=8))


@pytest.mark.parametrize(
    ("changes", "fixed"),
    [
        ([], False),
        (["model.check_every=30"], True),
        (["model.check_every=30", "model.gradient.max_steps=40"], False),
        (["model.max_steps=4", "model.gradient.max_steps=4"], True),  # one look, at the end
        (["model.name=resnet-tiny"], True),
    ],
)
def test_a_step_is_captured_where_no_solve_looks_at_its_residual(changes, fixed):
    assert takes_fixed_steps(from_config(parse("", changes).model.settings, classes=10)) is fixed


def test_overrides_reach_every_setting_of_the_model():
    changes = ["model.kernel.gamma=0.1", "model.solver.memory=3", "model.norm=2", "model.gradient.max_steps=3"]
    config = parse("", [*changes, "model.gradient.solver.solver.name=picard", "model.kernel.split=none"]).model.settings
    before = MODELS["geq-tiny"].config
    assert config.kernel == dataclasses.replace(before.kernel, gamma=0.1, split=None)
    assert config.solver == dataclasses.replace(before.solver, memory=3) and config.norm == 2.0
    assert config.gradient == dataclasses.replace(before.gradient, max_steps=3, solver=InFeatures(Picard()))
    swept = parse("", ["model.kernel.gamma.share=0.3"]).model.settings
    assert swept.kernel.gamma == dataclasses.replace(before.kernel.gamma, share=0.3)


def test_a_file_is_laid_over_its_base(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.toml").write_text(
        'base = "cifar10"\n[data]\nsize = 16\n[model]\nnorm = 0.5\n'
        '[model.solver]\nmemory = 3\n[model.gradient]\nname = "phantom"\nsteps = 7\n'
    )
    (tmp_path / "deep" / "b.toml").write_text(
        'base = "../a.toml"\n[data]\nname = "cifar100"\n[model]\nname = "kerdeq-tiny"\n'
        '[model.gradient]\nname = "implicit"\nmax_steps = 2\n'
    )
    config = load(tmp_path / "deep" / "b.toml", ["model.kernel.hidden=8"])
    assert config.optimizer == load("cifar10").optimizer
    assert (config.data.name, config.data.size) == ("cifar100", 16)  # a section is merged, whatever its name
    model = config.model.settings
    assert (config.model.name, model.norm, model.solver.memory, model.kernel.hidden) == ("kerdeq-tiny", 0.5, 3, 8)
    # Another class has other settings: its table replaces the one below, over what the model itself has there.
    assert isinstance(model.gradient, Implicit) and model.gradient.max_steps == 2
    assert parse('base = "cifar10"').data.name == "cifar10"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('base = "cifar11"', "There is no experiment 'cifar11'. Did you mean `cifar10`?"),
        ('base = "nope"', "There is no experiment 'nope'. The nearest names are: .*opteq-tiny-digits"),
        ('base = "gone.toml"', "There is no file .*gone.toml"),
        ('base = "a.toml"', "`base` leads back to .*a.toml: a file cannot be its own base."),
        ('base = "b.toml"', "`base` leads back to .*a.toml: a file cannot be its own base."),
        ("base = 3", "`base` must be a text, got 3."),
    ],
)
def test_a_base_that_cannot_be_is_refused_in_one_sentence(tmp_path, text, message):
    (tmp_path / "a.toml").write_text(text)
    (tmp_path / "b.toml").write_text('base = "a.toml"')
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "a.toml")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_settings_that_the_recipe_says_repeat_its_first_runs_are_those(path):
    model = load(path).model.settings
    assert (model.solver, model.norm, model.max_steps, model.kernel.gamma) == (Picard(), 1.0, 4, 0.2)
    assert (model.gradient.solver, model.gradient.max_steps) == (InFeatures(Picard()), 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["training.patience=3", "data.validation=0"], "`training.patience` waits for held-out images"),
        (["model.kernel.split=5"], r"\[model\] `split` must divide the number of features: 16 is not a multiple of 5."),
        (["model.gradient.solver.name=proximal"], r"\[model.gradient\] `Implicit` solves a linear system"),
        (["model.name=mdeq-tiny", "model.solver.name=proximal"], r"\[model\] MDEQ has no kernel, which Proximal"),
    ],
)
def test_what_training_would_refuse_is_refused_before(changes, message):
    state = torch.get_rng_state()
    with pytest.raises(ConfigError, match=message):
        check(parse("", changes))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "change",
    [
        *(
            f"{key}={value}"
            for key in ("model.norm", "model.kernel.gamma", "optimizer.lr")
            for value in ("1e39", "1e308")
        ),
        *(f"model.{key}=2147483648" for key in ("width", "max_steps", "check_every", "kernel.hidden", "solver.memory")),
        "model.refinements=1000000000",
        "model.tol=1.0",
        "model.solver.ridge=inf",
        "schedule.warmup=1e308",
        "training.epochs=1e9",
        "data.size=2000000000",
        "device=anything",
        "device=cuda:9999999999",
    ],
)
def test_every_setting_has_a_range(change):
    with pytest.raises(ConfigError, match=r"must be|must have"):
        check(parse("", ["model.solver.name=anderson", change]))


def test_every_number_of_every_experiment_is_in_the_range_of_its_setting():
    for path in FILES:
        assert all(abs(v) <= 1e6 for k, v in values(load(path)).items() if isinstance(v, int | float) and k != "seed")
