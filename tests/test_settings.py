"""Tables to dataclasses and back, on dataclasses of the tests' own and on the values of the package."""

import abc
import dataclasses
import sys
import tomllib
import types
from typing import Literal

import pytest

from kerneq import gradients, kernels, solvers
from kerneq.models import MODELS
from kerneq.settings import ConfigError, Override, build, choices, convert, name_of, setting, write


class AbstractShape(abc.ABC):
    @abc.abstractmethod
    def area(self) -> float: ...


@dataclasses.dataclass(frozen=True)
class Circle(AbstractShape):
    radius: float = 1.0

    def __post_init__(self) -> None:
        if self.radius <= 0:
            raise ValueError(f"`radius` must be positive, got {self.radius}.")

    def area(self) -> float:
        return 3 * self.radius**2


@dataclasses.dataclass(frozen=True)
class RoundedSquare(AbstractShape):
    side: float
    corner: AbstractShape | None = None

    def area(self) -> float:
        return self.side**2


@dataclasses.dataclass(frozen=True)
class Pen:
    name: str = setting("blue", "its colour")
    width: int = setting(1, "in points", low=1, high=9)


@dataclasses.dataclass(frozen=True)
class Drawing:
    shape: AbstractShape = setting(Circle(2.0), "what is drawn")
    ink: float | AbstractShape = 0.5
    sizes: tuple[int, ...] = setting((1, 2), "", low=1)
    style: Literal["solid", "dashed"] = "solid"
    pen: Pen = dataclasses.field(default_factory=Pen)


@pytest.fixture(autouse=True)
def package(monkeypatch):
    """The shapes as a package that exports them, as kerneq.kernels exports kernels."""
    shapes = types.ModuleType("shapes")
    shapes.__dict__.update(Circle=Circle, RoundedSquare=RoundedSquare, AbstractShape=AbstractShape, Pen=Pen)
    base = types.ModuleType("shapes.base")
    base.__package__ = "shapes"
    monkeypatch.setitem(sys.modules, "shapes", shapes)
    monkeypatch.setitem(sys.modules, "shapes.base", base)
    monkeypatch.setattr(AbstractShape, "__module__", "shapes.base")
    return shapes


def read(text: str, current: Drawing | None = None) -> Drawing:
    return build(Drawing, tomllib.loads(text), current=current)


def test_a_table_without_a_name_changes_what_stands_there_and_another_name_starts_from_its_defaults():
    assert read("shape.radius = 3").shape == Circle(3.0)
    current = Drawing(shape=RoundedSquare(1.0, Circle(0.2)))
    assert read("shape.side = 4", current).shape == RoundedSquare(4.0, Circle(0.2))
    assert read("shape.corner.radius = 0.1", current).shape == RoundedSquare(1.0, Circle(0.1))
    assert read('shape.corner = "none"', current).shape == RoundedSquare(1.0)
    assert read('shape.name = "circle"', current).shape == Circle()
    assert read('[shape]\nname = "rounded-square"\nside = 2\ncorner.name = "circle"').shape.corner == Circle()
    assert read("ink = 1").ink == 1.0 and read('ink.name = "circle"').ink == Circle()


def test_a_new_class_is_known_as_soon_as_its_package_exports_it(package):
    @dataclasses.dataclass(frozen=True)
    class Dot(AbstractShape):
        def area(self) -> float:
            return 0

    with pytest.raises(ConfigError, match="`shape.name` must be one of circle, rounded-square, got 'dot'."):
        read('shape.name = "dot"')
    package.Dot = Dot
    assert read('shape.name = "dot"').shape == Dot()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('shape.name = "circel"', "got 'circel'. Did you mean `circle`?"),
        ("shape.name = 3", "`shape.name` must be a text, got 3."),
        ('shape = "circle"', "`shape` is a section, not a setting; name one of its settings: name, radius."),
        (
            "shape.radios = 2",
            "There is no setting `shape.radios`. Did you mean `shape.radius`? [shape] has: name, radius.",
        ),
        ("shape.radius = -1", "[shape] `radius` must be positive, got -1.0."),
        ('shape.name = "rounded-square"', "`shape.side` has no default: it must be given."),
        ("ink.radius = 1", "[ink] must say its `name`, one of circle, rounded-square."),
        ('ink = "red"', "`ink` must be a number or a table, got 'red'."),
        ("sizes = [3, 0]", "`sizes[1]` must be at least 1, got 0."),
        ("sizes = [3, 1.5]", "`sizes[1]` must be a whole number, got 1.5."),
        ("sizes.x = 1", "`sizes` is a setting, so there is no `sizes.x`."),
        ('style = "dahsed"', "`style` must be one of solid, dashed, got 'dahsed'. Did you mean `dashed`?"),
        ("pen = 3", "`pen` is a section, not a setting; name one of its settings: name, width."),
        ("pen.width = 10", "`pen.width` must be at most 9, got 10."),
        ("pen.width = true", "`pen.width` must be a whole number, got True."),
        (f"ink = 1{'0' * 400}", "`ink` must be"),
    ],
)
def test_a_wrong_value_is_refused_in_one_sentence(text, message):
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert message in str(caught.value) and str(caught.value).endswith((".", "?"))


def test_what_is_written_names_classes_first_and_reads_back_the_same():
    drawing = Drawing(RoundedSquare(2.0), Circle(), (3,), "dashed", Pen("red\x7f", 2))
    text = write(drawing, comments=True)
    assert '[shape]\nname = "rounded-square"  # what is drawn\nside = 2.0\ncorner = "none"\n' in text
    assert '[pen]\nname = "red\\u007f"  # its colour\n' in text
    assert read(text) == drawing
    assert read(write(drawing)) == drawing


def test_a_value_written_on_a_command_line_is_read_as_its_setting_wants_it():
    assert convert("a", Override("12"), str) == "12" and convert("a", Override("'12'"), str) == "12"
    assert convert("a", Override(".5"), float) == 0.5 and convert("a", Override(".5"), float | AbstractShape) == 0.5
    assert convert("a", Override("none"), int | None) is None and convert("a", Override("3"), int | None) == 3
    assert convert("a", Override("[1, 2]"), tuple[int, ...]) == (1, 2)
    assert convert("a", Override('{name = "circle"}'), AbstractShape) == Circle()
    with pytest.raises(ConfigError, match="`a` must be a whole number, got"):
        convert("a", Override("1\nb = 2"), int)


def test_the_classes_of_the_package_go_by_their_names():
    assert {"gaussian", "linear", "polynomial", "sigmoid"} <= choices(kernels.AbstractKernel).keys()
    assert {"proximal", "picard", "anderson", "broyden"} <= choices(solvers.AbstractSolver).keys()
    assert choices(gradients.AbstractGradient).keys() == {
        "implicit",
        "neumann",
        "phantom",
        "reversible",
        "shine",
        "unrolled",
    }
    assert name_of(gradients.ConjugateGradient) == "conjugate-gradient" and name_of(solvers.InFeatures) == "in-features"


@pytest.mark.parametrize("name", MODELS)
def test_the_settings_of_every_model_are_written_and_read_back(name):
    config = MODELS[name].config
    assert build(type(config), tomllib.loads(write(config, comments=True))) == config
