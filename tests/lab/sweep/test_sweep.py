"""Sweeps: the grid, its runs, what happens to those that fail or are killed, the figure, and the command."""

import dataclasses
import json
import shutil
import statistics
from pathlib import Path

import pytest

from kerneq.kernels import Linear
from kerneq.lab.run import Run, Stopped, TrainingError
from kerneq.lab.run.config import ConfigError, load, write
from kerneq.lab.sweep import SWEEPS, GridPoint, Sweep, SweepResult, collect, draw, load_sweep, run_sweep
from kerneq.lab.training import AbstractLogger, train
from kerneq.solvers import Anderson

pytestmark = pytest.mark.usefixtures("empty_folder")
QUICK = ["training.epochs=1", "training.batch_size=256"]


@pytest.fixture
def grid(tmp_path):
    """Write a grid under geq-dense-tiny-digits of one short epoch; returns the sweep."""

    def make(text: str, *changes: str) -> Sweep:
        file = tmp_path / "mine.toml"
        head = 'base = "geq-dense-tiny-digits"\ntraining = {epochs = 1, batch_size = 256}\n[grid]\n'
        file.write_text(head + text)
        return load_sweep(str(file), changes)

    return make


def test_a_grid_is_every_combination_of_its_axes_the_seed_moving_fastest(grid):
    sweep = grid("seed = [0, 1]\nmodel.norm = [0.5, 1]\noptimizer.lr = [0.1]")
    names = [cell.name for cell in sweep.cells()]
    assert names == ["norm=0.5,seed=0", "norm=0.5,seed=1", "norm=1,seed=0", "norm=1,seed=1"]  # lr does not vary
    found = [cell.config for cell in sweep.cells()]
    assert [(config.model.settings.norm, config.seed) for config in found] == [(0.5, 0), (0.5, 1), (1, 0), (1, 1)]
    assert all(config.optimizer.lr == 0.1 and config.training.epochs == 1 for config in found)
    Path("mine").write_bytes(Path("mine.toml").read_bytes())
    for name in ("mine", "mine.toml"):
        assert [cell.config for cell in load_sweep(name).cells()] == found


def test_values_may_be_tables_of_settings_or_other_experiments(grid):
    sweep = grid(
        """
        what = [
            {label = "phantom", model.gradient = {name = "phantom", steps = 2}},
            {label = "opt/eq", base = "opteq-tiny-digits"},
        ]
        """
    )
    first, second = (cell.config for cell in sweep.cells())
    assert write(first).count('name = "phantom"') == 1 and first.model.name == "geq-dense-tiny"
    assert second.model.name == "opteq-tiny" and second.training.epochs == 1
    assert [cell.name for cell in sweep.cells()] == ["what=phantom", "what=opt-eq"]


def test_on_the_command_line_commas_part_values_and_a_single_value_is_a_setting():
    sweep = load_sweep(
        "geq-tiny-digits", ["model.features=[8,8],[8,16]", "seed=3", "model.solver.name=picard,anderson"]
    )
    assert [cell.name for cell in sweep.cells()][::3] == ["features=8,8,solver=picard", "features=8,16,solver=anderson"]
    configs = [cell.config for cell in sweep.cells()]
    assert [config.model.settings.features for config in configs] == [(8, 8)] * 2 + [(8, 16)] * 2
    assert all(config.seed == 3 for config in configs)
    quoted = load_sweep("geq-tiny-digits", ['data.name="folder:a,b", folder:Jill\'s', "seed=0,1"])
    names = [cell.config.data.name for cell in quoted.cells()]
    assert names == ["folder:a,b", "folder:a,b", "folder:Jill's", "folder:Jill's"]
    digits = load_sweep("digits", ["model.norm=0.7", "training.epochs=2"])
    assert {cell.config.model.settings.norm for cell in digits.cells()} == {0.7}


def test_a_table_on_the_command_line_changes_what_stands_there(grid):
    sweep = grid('model.solver.name = ["anderson"]', "model.solver={memory=2},{memory=4}")
    assert [cell.config.model.settings.solver for cell in sweep.cells()] == [Anderson(2), Anderson(4)]


def test_an_axis_of_kernels_drops_what_the_file_says_of_another_kernel(tmp_path):
    (tmp_path / "mine.toml").write_text('base = "geq-tiny-cifar10"\nmodel.kernel.split = 4\n')
    sweep = load_sweep(str(tmp_path / "mine.toml"), ["model.kernel.name=gaussian,linear"])
    gaussian, linear = (cell.config.model.settings.kernel for cell in sweep.cells())
    assert gaussian == dataclasses.replace(load("geq-tiny-cifar10").model.settings.kernel, split=4)
    assert linear == Linear()


@pytest.mark.parametrize(
    ("text", "changes", "sentence"),
    [
        ("model.norm = 1.0", [], "`grid.model.norm` must be a list of values, got 1.0"),
        ("a = [{model.norm = 1.0}]", [], "needs a `label`"),
        ("seed = [1, 1]", [], "has the value 1 twice"),
        ("seed = [0]", [], "say what to vary"),
        ("seed = [0, 1]", ["model.norm"], "key=a,b,c"),
        ('a = [{label = "x y"}, {label = "x-y"}]', [], None),
    ],
)
def test_a_grid_that_is_none_is_refused_in_a_sentence(grid, text, changes, sentence):
    with pytest.raises(ConfigError, match=sentence or "same labels"):
        grid(text, *changes).cells()


@pytest.mark.parametrize("name", sorted(path.stem for path in SWEEPS.glob("*.toml")))
def test_every_sweep_of_the_package_can_be_configured(name):
    """Narrow and for one seed: to build the models at their size takes long."""
    assert "seed" in load_sweep(name).axes
    sweep = load_sweep(name, ["seed=0", "model.width=16", "device=cpu"])
    assert len(sweep.cells()) >= 2
    for cell in sweep.cells():
        assert cell.config.device == "cpu"


def test_the_grids_of_the_papers_hold_the_published_choice():
    for name, choice in (("gamma", "0.5"), ("patch", "2"), ("split", "8")):
        sweep = load_sweep(name)
        assert choice in sweep.axes[f"model.kernel.{name}"]
    cell = next(cell for cell in load_sweep("patch").cells() if cell.name == "base=geq-5m-cifar100,patch=2,seed=0")
    assert cell.config == load("geq-5m-cifar100")


def test_a_failed_cell_says_why_the_others_go_on_and_finished_ones_are_left_alone(grid, tmp_path):
    sweep = grid(
        """
        what = [
            {label = "fine", model.norm = 0.5},
            {label = "refused", model.norm = -1.0},
            {label = "no data", base = "geq-tiny-cifar10"},
            {label = "too"},
        ]
        seed = [0, 1]
        """
    )
    result = run_sweep(sweep, tmp_path / "runs", test=True)
    problems = {cell.name: cell.problem for cell in result.cells}
    assert "`model.norm` must be greater than 0" in problems["what=refused,seed=1"]
    assert "The data set cifar10 is not in" in problems["what=no-data,seed=0"]
    assert problems["what=fine,seed=0"] == problems["what=too,seed=1"] == ""
    assert result.split == "test" and [point.values["what"] for point in result.points] == ["fine", "too"]
    values = [Run(tmp_path / "runs" / f"what=fine,seed={seed}").test()["accuracy"] for seed in (0, 1)]
    assert result.points[0].mean == pytest.approx(statistics.fmean(values))
    assert result.points[0].std == pytest.approx(statistics.stdev(values)) and result.points[0].seeds == 2
    kept = json.loads((tmp_path / "runs" / "sweep.json").read_text())
    assert [cell["name"] for cell in kept["cells"]] == list(problems)
    assert (tmp_path / "runs" / "sweep.svg").read_text().count("<svg") == 1
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("what=*/*.json*")}
    assert len(before) >= 12 and run_sweep(sweep, tmp_path / "runs") == result
    assert {path: path.stat().st_mtime_ns for path in before} == before
    other = grid('what = [{label = "fine", model.norm = 0.6}, {label = "too"}]\nseed = [0, 1]')
    first = run_sweep(other, tmp_path / "runs").cells[0]
    assert "was started with another value of `model.norm`" in first.problem


def test_a_grid_of_which_nothing_can_be_configured_is_refused(grid, tmp_path):
    with pytest.raises(ConfigError, match="There is no setting `model.nrom`"):
        run_sweep(grid("model.nrom = [1, 2]"), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_sweep_under_torchrun_is_refused_at_once(grid, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # the second cell waited for ever, for a process that had gone on
    with pytest.raises(ConfigError, match="runs in one process: start it without torchrun"):
        run_sweep(grid("seed = [0, 1]"), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_run_that_is_damaged_or_of_other_settings_is_a_problem_of_its_cell_alone(grid, tmp_path):
    sweep, folder = grid("seed = [0, 1, 2]"), tmp_path / "runs"
    run_sweep(sweep, folder)
    (folder / "seed=1" / "config.toml").write_text("[")
    (folder / "seed=2" / "evaluation.json").write_text("{")
    shutil.rmtree(folder / "seed=0")
    for result in (run_sweep(sweep, folder), collect(sweep, folder)):
        first, second, third = result.cells
        assert first.problem == "" and result.points[0].mean == first.validation
        assert "not valid TOML" in second.problem and "evaluation.json is damaged" in third.problem
    (folder / "seed=0" / "metrics.jsonl").unlink()  # the run is complete, so nothing is trained again
    assert "has no row of epoch" in run_sweep(sweep, folder).cells[0].problem
    changed = grid("seed = [0, 1]", "optimizer.lr=0.3")
    other, kept = collect(changed, folder), (folder / "sweep.json").read_bytes()
    assert "was started with another value of `optimizer.lr`" in other.cells[0].problem and not other.points
    with pytest.raises(TrainingError, match="was started with another value of `optimizer.lr`"):
        run_sweep(changed, folder)
    assert (folder / "sweep.json").read_bytes() == kept, "the record of other runs is not overwritten"


class Stopping(AbstractLogger):
    """Stops the run after its first epoch, as Ctrl-C would."""

    def log_epoch(self, row):
        raise Stopped("stopped")


def test_a_sweep_that_was_stopped_goes_on_where_it_was(grid, tmp_path):
    sweep = grid("seed = [0, 1]", "training.epochs=2")
    with pytest.raises(Stopped):
        run_sweep(sweep, tmp_path / "runs", loggers=lambda folder: [Stopping()] if "seed=1" in folder.name else [])
    assert [cell.epochs for cell in collect(sweep, tmp_path / "runs").cells] == [2, 1]
    result = run_sweep(sweep, tmp_path / "runs")
    assert [cell.epochs for cell in result.cells] == [2, 2]
    assert [len(Run(tmp_path / "runs" / f"seed={seed}").environment()["resumed"]) for seed in (0, 1)] == [0, 1]
    whole = train(sweep.cells()[1].config, tmp_path / "whole")
    again = Run(tmp_path / "runs" / "seed=1").rows()
    assert [row["validation"] for row in again] == [row["validation"] for row in whole]


def test_a_cell_that_ends_early_by_training_patience_is_finished(grid, tmp_path):
    patience = ["training.epochs=4", "training.patience=1", "optimizer.lr=1e-9"]  # no accuracy is better than the first
    result = run_sweep(grid("seed = [0, 1]", *patience), tmp_path / "runs")
    assert [(cell.epochs, cell.problem) for cell in result.cells] == [(2, ""), (2, "")] and len(result.points) == 1


def test_the_figure_has_a_place_for_each_value_and_a_line_for_each_of_the_rest():
    def point(norm: str, kernel: str) -> GridPoint:
        return GridPoint({"kernel": kernel, "norm": norm}, 3, float(norm) / 20, 0.01)

    axes = {"kernel": ["linear", "cauchy"], "norm": ["8", "0.5", "1"]}
    points = [point(norm, kernel) for kernel in axes["kernel"] for norm in axes["norm"]]
    canvas = draw(SweepResult("s", "test", axes, points, []))
    (plot,) = canvas.axes
    assert plot.get_xscale() == "log" and plot.get_xlabel() == "norm"
    assert plot.get_ylabel() == "test accuracy in %, 3 seeds"
    assert [text.get_text() for text in canvas.figure.legends[0].get_texts()] == ["linear", "cauchy"]
    line = plot.containers[0].lines[0]
    assert list(line.get_xdata()) == [0.5, 1, 8] and list(line.get_ydata()) == pytest.approx([2.5, 5, 40])
    canvas = draw(SweepResult("s", "test", {"kernel": ["a", "b"]}, [GridPoint({"kernel": "b"}, 1, 0.5, None)], []))
    assert [tick.get_text() for tick in canvas.axes[0].get_xticklabels()] == ["a", "b"] and not canvas.figure.legends


def test_the_command_trains_tells_and_draws(kerneq, tmp_path):
    arguments = ["sweep", "digits", *QUICK, "model.norm=0.9", "seed=0", "--name", "mine"]
    code, out, _ = kerneq(*arguments)
    assert code == 0 and "kernel=gaussian" in out and "(validation, seeds: 1)" in out
    assert (tmp_path / "runs" / "mine" / "sweep.svg").exists()
    code, again, _ = kerneq(*arguments, "--list")
    assert code == 0 and out.count("%") >= again.count("%") >= 4 and "epoch   1 |" not in again
    code, _, err = kerneq(*arguments, "data.name=mnist")
    assert code == 1 and "was started with another value of `data.name`" in err
    code, _, err = kerneq("sweep", "digitz", "seed=0,1")
    assert code == 2 and "There is no sweep or experiment 'digitz'. Did you mean `digits`?" in err
    code, _, err = kerneq("sweep", "geq-tiny-digits")
    assert code == 2 and "say what to vary" in err
