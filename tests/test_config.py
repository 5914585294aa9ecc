import dataclasses
import string
import typing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kerneq.run.config import (
    Config,
    ConfigError,
    Data,
    Model,
    Optimizer,
    Schedule,
    Training,
    differences,
    load,
    parse,
    write,
)
from kerneq.data import DATA_SETS, Augment
from kerneq.models.zoo import configure

EXPERIMENTS = sorted((Path(__file__).parents[1] / "experiments").glob("*.toml"))


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False)


plain = st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text()
free = st.dictionaries(
    st.text(max_size=8), st.recursive(plain, lambda s: st.lists(s, max_size=3), max_leaves=4), max_size=4
)
milestones = st.lists(st.floats(0.01, 0.99), unique=True, max_size=4).map(lambda values: tuple(sorted(values)))
configs = st.builds(
    Config,
    seed=st.integers(0, 2**31 - 1),
    device=st.text(),
    data=st.builds(Data, name=st.text(), size=st.integers(0, 512), validation=numbers(0, 0.9)),
    augment=st.builds(
        Augment,
        crop=st.integers(0, 8),
        flip=st.booleans(),
        trivial=st.booleans(),
        mixup=numbers(0, 2),
        share=numbers(0, 1),
    ),
    model=st.builds(Model, name=st.text(), settings=free),
    optimizer=st.builds(Optimizer, lr=numbers(1e-300, 1e300), momentum=numbers(0.1, 0.99), weight_decay=numbers(0, 1)),
    schedule=st.builds(Schedule, kind=st.sampled_from(["step", "cosine", "one-cycle"]), milestones=milestones),
    training=st.builds(Training, epochs=st.integers(1, 10**9), amp=st.booleans(), ema=numbers(0, 0.99)),
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
    st.sampled_from([*KEYS, "seed", "device", "model", "model.settings.norm"]) | st.text(max_size=12),
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
        (
            "optimiser.lr=0.1",
            "There is no setting `optimiser.lr`. Did you mean `optimizer`? The configuration has: seed",
        ),
        ("trainng.epochs=3", "Did you mean `training`?"),
        (
            "training=3",
            "`training` is a section, not a setting; name one of its settings: epochs, batch_size",
        ),
        ("seed.x=3", "`seed` is a setting, so there is no `seed.x`."),
        ("training.epochs=0", "`training.epochs` must be at least 1, got 0."),
        ("training.epochs=3.5", "`training.epochs` must be a whole number, got 3.5."),
        ("training.epochs=true", "`training.epochs` must be a whole number, got True."),
        ("training.amp=1", "`training.amp` must be true or false, got 1."),
        ("optimizer.lr=0", "`optimizer.lr` must be greater than 0, got 0.0."),
        ("optimizer.lr=nan", "`optimizer.lr` must be greater than 0, got nan."),
        ("optimizer.lr=inf", "`optimizer.lr` must be a finite number, got inf."),
        ("optimizer.lr=fast", "`optimizer.lr` must be a number, got 'fast'."),
        (
            "schedule.kind=cosin",
            "`schedule.kind` must be one of step, cosine, one-cycle, got 'cosin'. Did you mean `cosine`?",
        ),
        ("schedule.milestones=[0.9, 0.1]", "`schedule.milestones` are shares of the run"),
        ("schedule.milestones=0.5", "`schedule.milestones` must be a list, got 0.5."),
        ("augment.share=2", "[augment] `share` must lie in [0, 1], got 2.0."),
        ("optimizer.momentum=0", "`optimizer.nesterov` needs `optimizer.momentum` above 0"),
        ("model.settings.day=2024-01-01", "`model.settings.day` must be a number, a text"),
        ("lr", "A change of setting is written key=value (for example optimizer.lr=0.2), got `lr`."),
        ("=3", "A change of setting is written key=value"),
    ],
)
def test_a_wrong_override_is_refused_in_words(override, message):
    with pytest.raises(ConfigError) as caught:
        parse("", [override])
    assert message in str(caught.value)


def test_overrides_win_over_the_file_and_need_no_quotes(tmp_path):
    (tmp_path / "a.toml").write_text('seed = 1\n[optimizer]\nlr = 0.3\n[schedule]\nkind = "step"\n')
    config = load(
        tmp_path / "a.toml",
        ["optimizer.lr=.5", "schedule.kind=cosine", "model.settings.norm=8", "data.name='mnist'"],
    )
    assert (config.seed, config.optimizer.lr, config.schedule.kind) == (1, 0.5, "cosine")
    assert (config.model.settings, config.data.name) == ({"norm": 8}, "mnist")


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
    one = parse("", ["seed=1", "model.settings.norm=2.0"])
    assert differences(one, parse("")) == ["seed", "model.settings.norm"]
    assert differences(one, one) == []


def test_every_default_is_shown():
    shown = write(Config(), comments=True)
    for section in dataclasses.fields(Config):
        kind = typing.get_type_hints(Config)[section.name]
        for field in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else [section]:
            assert f"\n{field.name} = " in "\n" + shown or f".{field.name}]" in shown


def test_there_is_a_file_for_every_table_of_the_papers():
    heads = "".join(path.read_text().splitlines()[0] for path in EXPERIMENTS)
    for place in ("Table 1(a)", "Table 1(b)", "Table 2(a)", "Table 2(b)", "Table 3"):
        assert f"GEQ, {place}" in heads and f"KerDEQ, {place}" in heads
    for place in ("GEQ, Table 5", "GEQ, Figure 4(a)", "KerDEQ, Figure 4(b)", "KerDEQ, Figure 3"):
        assert place in heads


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_experiment_file_is_a_valid_configuration(path):
    config = load(path)
    assert config.data.name in DATA_SETS
    assert configure(config.model.name, dict(config.model.settings)) is not None  # refuses what it does not know
    assert path.read_text().startswith("# "), "its first line says what it reproduces"
