"""What a run is: a TOML file and `key=value` changes, read into a tree of frozen dataclasses.

A file says what differs from the defaults, or from another file that it names as its `base`. `[model]` holds the name
of a model of the zoo beside that model's own settings, which another name drops; `kerneq train --show-config` prints
every one.
"""

import dataclasses
import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any, Literal

import torch

from ...loading import DEVICE, config_file, find_folder, read_config, read_small
from ...models import ModelConfig, find, from_config
from ...settings import ConfigError as ConfigError
from ...settings import build, convert, read_override, setting, suggestion, values
from ...settings import write as write
from ..data import DATA_SETS, Augment

EXPERIMENTS = Path(__file__).parents[2] / "experiments"  # the files that come with the package
DEFAULT_MODEL = "geq-tiny"


@dataclasses.dataclass(frozen=True)
class Data:
    """Which images a run trains on."""

    name: str = setting("digits", "which data set; `kerneq data` lists them")
    size: int = setting(0, "side of the pictures in pixels, 0: as the data set has them", low=0)
    memory: bool = setting(False, "decode picture files once, to stay in memory, not again for every batch")
    validation: float = setting(0.1, "share of the training images held out to validate on", low=0, high=0.9)
    folds: int = setting(0, "cross-validation: how many parts; 0: `validation` says what is held out", low=0, high=100)
    fold: int = setting(1, "which of the parts is held out, from 1", low=1, high=100)
    skip_broken: bool = setting(False, "leave out files that are not readable pictures")
    subset: Literal["all", "first-five-classes", "four-of-five-subclasses"] = setting(
        "all",
        "which images are trained on: all, classes 0 to 4, or the first four sub-classes of a super-class",
    )

    def __post_init__(self) -> None:
        try:
            self.name.encode()
        except UnicodeEncodeError:  # the path of a folder may be any bytes, config.toml may not
            raise ConfigError(f"`data.name` must be valid UTF-8, got {self.name!a}: rename the folder.") from None
        if self.folds == 1 or 0 < self.folds < self.fold:
            raise ConfigError(f"`data.folds` must be 0, or 2 and more and not below `data.fold`, got {self.folds}.")

    @property
    def pictures(self) -> str:
        """The data set, with the side of its pictures where that is not the data set's own."""
        own = DATA_SETS[self.name].size if self.name in DATA_SETS else 0
        return self.name if self.size in (0, own) else f"{self.name} at {self.size} px"

    @property
    def described(self) -> str:
        """The pictures, and which of them where they are not all."""
        return self.pictures + ("" if self.subset == "all" else f" ({self.subset.replace('-', ' ')})")


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of the zoo and all its settings; in a file they stand beside its name in `[model]`."""

    name: str = setting(DEFAULT_MODEL, "which model; `kerneq models` lists them")
    settings: ModelConfig = dataclasses.field(default=find(DEFAULT_MODEL).config, metadata={"flat": True})


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Stochastic gradient descent with momentum; for convolutions, if it has a rate, Muon."""

    lr: float = setting(0.1, "the highest learning rate of the schedule", above=0)
    momentum: float = setting(0.9, "", low=0, high=0.999999)
    nesterov: bool = setting(True, "")
    weight_decay: float = setting(5e-4, "", low=0)
    decay_all: bool = setting(False, "whether weight decay also acts on norms' scales and on biases")
    muon: float = setting(0.0, "the highest rate of Muon's steps, which convolutions then take; 0: SGD for all", low=0)
    muon_decay: float = setting(0.1, "weight decay of those convolutions", low=0)

    def __post_init__(self) -> None:
        if self.nesterov and self.momentum == 0:
            raise ConfigError("`optimizer.nesterov` needs `optimizer.momentum` above 0; set nesterov = false.")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How the learning rate moves from step to step, as a multiple of the highest."""

    kind: Literal["step", "cosine", "one-cycle"] = setting("cosine", "step, cosine or one-cycle")
    warmup: float = setting(0.0, "epochs of linear rise before a step or cosine schedule", low=0)
    milestones: tuple[float, ...] = setting((0.5, 0.75), "step: shares of the run after which the rate drops")
    factor: float = setting(0.1, "step: what the rate is multiplied by at a milestone", above=0, high=1)
    rise: float = setting(0.3, "one-cycle: share of the run in which the rate rises", above=0, high=0.99)
    final: float = setting(0.0, "cosine and one-cycle: the last rate, as a share of the highest", low=0, high=1)

    def __post_init__(self) -> None:
        shares = self.milestones
        if any(not 0 < share < 1 for share in shares) or list(shares) != sorted(set(shares)):
            raise ConfigError(
                "`schedule.milestones` are shares of the run: they must rise and lie between 0 and 1, "
                f"got {list(shares)}."
            )


@dataclasses.dataclass(frozen=True)
class Start:
    """Trained weights to begin from: all but the head, which is fitted to what they make of the training images."""

    run: str = setting("", "a run folder, or the name of weights that ship; empty: random weights")
    frozen: bool = setting(False, "train the head alone, and leave the weights as they are")

    def __post_init__(self) -> None:
        if self.frozen and not self.run:
            raise ConfigError("`start.frozen` needs `start.run`: random weights are nothing to keep.")


@dataclasses.dataclass(frozen=True)
class Training:
    """How long a run trains, and how its steps are computed and saved."""

    epochs: int = setting(20, "", low=1)
    batch_size: int = setting(128, "images per step, over all processes", low=1)
    label_smoothing: float = setting(0.0, "", low=0, high=0.99)
    margin: float = setting(0.0, "taken from the logit of the true class in the loss, so that it learns to lead", low=0)
    ema: float = setting(0.0, "decay of the running average of the weights per step, 0: none", low=0, high=0.999999)
    amp: bool = setting(False, "bfloat16 autocast, on a GPU")
    clip: float = setting(0.0, "largest norm of the gradient, 0: unlimited", low=0)
    channels_last: bool = setting(True, "store images as NHWC")
    compile: bool = setting(False, "torch.compile of a ResNet, or of the map where z, not v = Wz, is iterated")
    graph: bool = setting(
        False, "on a GPU, capture the step as one CUDA graph, if no solve looks at its residual on the way"
    )
    deterministic: bool = setting(False, "only algorithms that give the same bits every time")
    patience: int = setting(0, "end after so many validations without a better accuracy, 0: never", low=0)
    validate_epochs: int = setting(1, "epochs between validations; the last epoch always has one", low=1)
    checkpoint_epochs: int = setting(1, "epochs between checkpoints", low=1)
    checkpoint_steps: int = setting(0, "steps between checkpoints within an epoch, 0: none", low=0)


@dataclasses.dataclass(frozen=True)
class Config:
    """Every setting of a training run, with its default."""

    seed: int = setting(0, "start of every random sequence", low=0, high=2**31 - 1)
    device: str = setting("auto", "auto, cpu, cuda or cuda:N; auto takes a GPU if there is one")
    data: Data = dataclasses.field(default_factory=Data)
    augment: Augment = dataclasses.field(default_factory=Augment)
    model: Model = dataclasses.field(default_factory=Model)
    start: Start = dataclasses.field(default_factory=Start)
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    schedule: Schedule = dataclasses.field(default_factory=Schedule)
    training: Training = dataclasses.field(default_factory=Training)

    def __post_init__(self) -> None:
        if not DEVICE.fullmatch(self.device):
            raise ConfigError(f"`device` must be auto, cpu, cuda or cuda:N, got `{self.device}`.")
        if self.training.patience and not self.data.validation and not self.data.folds:
            raise ConfigError("`training.patience` waits for held-out images: set data.validation above 0.")


def load(path: Path | str | None, overrides: Iterable[str] = (), start: Path | str = "") -> Config:
    """The configuration in a file or an experiment of the package (none: the defaults), changed by `key=value`.

    With `start`, a run or weights that ship, the model is that one's, and the training begins from its weights.
    """
    layers = [] if path is None else _read_layers(_find_experiment(str(path), Path(path)), ())
    if start:
        layers.append({"start": {"run": str(start)}, "model": read_config(config_file(find_folder(start)))["model"]})
    try:
        return _config([*layers, _changes(overrides)])
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}" if path else str(error)) from None


def parse(text: str, overrides: Iterable[str] = ()) -> Config:
    """The configuration in a text, changed by `key=value` overrides; a `base` is relative to the working directory."""
    return resolve([_parse_toml(text), _changes(overrides)], Path())


def resolve(tables: Sequence[Mapping[str, Any]], folder: Path) -> Config:
    """The configuration of tables as files have them, each laid over the last; a `base` is relative to `folder`."""
    return _config(_layers(tables, folder, ()))


def read_toml(path: Path) -> dict[str, Any]:
    """The table in a file, without that of its `base`."""
    try:
        return _parse_toml(read_small(path).decode("utf-8-sig"))  # Windows' editors begin a file with a mark
    except FileNotFoundError:
        raise ConfigError(f"There is no file {path}; ready ones are known by name, as geq-tiny-digits.") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a configuration file: {error}.") from None


def differences(first: Config, second: Config) -> list[str]:
    """The dotted keys in which two configurations differ."""
    a, b = values(first), values(second)
    return [key for key in {**a, **b} if key not in a or key not in b or a[key] != b[key]]


def check(config: Config) -> None:
    """Refuse a model that cannot be built, as training would."""
    try:
        with torch.random.fork_rng(devices=[]):  # leaves the random numbers of the run alone
            from_config(config.model.settings, classes=10)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"[model] {error}") from None


def _changes(overrides: Iterable[str]) -> dict[str, Any]:
    """The table of some `key=value` overrides."""
    changes: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            raise ConfigError(
                f"A change of setting is written key=value (for example optimizer.lr=0.2), got `{override}`."
            )
        change: dict[str, Any] = {}
        put(change, key.strip(), read_override(text))
        changes = overlay(changes, change)
    return changes


def _config(layers: Sequence[Mapping[str, Any]]) -> Config:
    """The configuration of tables, each laid over the last."""
    nothing: dict[str, Any] = {}
    table = reduce(overlay, layers, nothing)
    table.pop("model", None)
    model = [layer["model"] for layer in layers if "model" in layer]
    return dataclasses.replace(build(Config, table), model=_model(model))


def put(table: dict[str, Any], key: str, value: Any) -> None:
    """Set the entry of a dotted key in a tree of tables, which grows as it must."""
    *path, name = key.split(".")
    for part in path:
        if not isinstance(table.get(part), dict):
            table[part] = {}
        table = table[part]
    table[name] = value


def _model(tables: Sequence[Any]) -> Model:
    """The model that the last `[model]` with a name names, changed as the tables say in turn.

    Another name drops the tables before it; those before the first name are about whichever model comes.
    """
    if not all(isinstance(table, Mapping) for table in tables):
        raise ConfigError("`model` is a section, not a setting; name one of its settings, for example model.name.")
    name: Any = None
    said: list[Mapping[str, Any]] = []
    for table in tables:
        if name is not None and table.get("name", name) != name:
            said = []
        name = table.get("name", name)
        said.append(table)
    name = convert("model.name", DEFAULT_MODEL if name is None else name, str)
    config = find(name).config
    own: dict[str, Any] = {}  # a table without a name is of the class that the model itself has there
    for key, value in values(config).items():
        if key.endswith(".name"):
            put(own, key, value)
    table = reduce(partial(overlay, depth=1), said, own)
    table.pop("name", None)
    return Model(name, build(type(config), table, "model.", config, named=True))


def overlay(under: Mapping[str, Any], over: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """`over` laid on `under`, table by table; below the sections a table of another `name` replaces the one under it.

    For there a name chooses a class, and the settings of one class are not those of another.
    """
    if depth > 1 and "name" in over and "name" in under and over["name"] != under["name"]:
        return dict(over)
    merged = dict(under)
    for key, value in over.items():
        below = under.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            value = overlay(below, value, depth + 1)
        merged[key] = value
    return merged


def _find_experiment(name: str, path: Path) -> Path:
    """The experiment of the package with this bare name, or the file at `path`."""
    if "/" in name or name.endswith(".toml"):
        return path
    found = EXPERIMENTS / f"{name}.toml"
    if os.path.isfile(found):
        return found
    if os.path.exists(path):
        return path
    known = [file.stem for file in EXPERIMENTS.glob("*.toml")]
    near = ", ".join(difflib.get_close_matches(name, known, n=5, cutoff=0.0))
    raise ConfigError(f"There is no experiment {name!r}.{suggestion(name, known)} The nearest names are: {near}.")


def _read_layers(path: Path, chain: tuple[str, ...]) -> list[dict[str, Any]]:
    """The table in a file, after those of its base; `chain` are the files that this one is a base of."""
    table = read_toml(path)
    try:
        return _layers([table], path.parent, (*chain, os.path.abspath(path)))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _parse_toml(text: str) -> dict[str, Any]:
    """The table in a text."""
    try:
        return tomllib.loads(text)
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"This is not valid TOML: {error}.") from None


def _layers(tables: Sequence[Mapping[str, Any]], folder: Path, chain: tuple[str, ...]) -> list[dict[str, Any]]:
    """The tables, after those of the last `base` in them; the ones that were given stay as they are."""
    layers = [dict(table) for table in tables]
    bases = [table.pop("base") for table in layers if "base" in table]
    if not bases:
        return layers
    base = convert("base", bases[-1], str)
    path = _find_experiment(base, folder / base)
    if os.path.abspath(path) in chain:
        raise ConfigError(f"`base` leads back to {path}: a file cannot be its own base.")
    return [*_read_layers(path, chain), *layers]
