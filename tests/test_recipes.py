"""The recipes of CONTRIBUTING.md are code that works: each block is run, and what it makes is put to use."""

import dataclasses
import json
import re
from pathlib import Path
from typing import ClassVar, final

import pytest
import torch
from helpers import Reference, affine, cell_of, input_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

import kerneq
from kerneq.kernels import AbstractRadialKernel
from kerneq.lab import demo
from kerneq.lab.cli import evaluation, training
from kerneq.lab.evaluate import PARTS, Part, TrainedRun
from kerneq.lab.report import render
from kerneq.lab.run import Run
from kerneq.lab.training import metrics
from kerneq.solvers import AbstractSolver
from kerneq.solvers.base import AbstractSpace, Evaluation

pytestmark = pytest.mark.usefixtures("float64")
TEXT = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
BASES = (AbstractSpace, Evaluation, AbstractRadialKernel, AbstractSolver, TrainedRun)
NAMES = {"dataclasses": dataclasses, "torch": torch, "Tensor": Tensor, "ClassVar": ClassVar, "final": final}
NAMES |= {base.__name__: base for base in BASES}


def block(name: str) -> str:
    found = re.search(rf"```python {name}\n(.*?)```", TEXT, re.DOTALL)
    assert found, name
    return found.group(1)


def made_by(name: str, tmp_path: Path) -> dict:
    """The names a block defines; in a file, since Triton and dataclasses look up the source."""
    space = NAMES | {"__name__": __name__}
    exec(compile(block(name), str(tmp_path / f"{name}.py"), "exec"), space)
    return space


@pytest.mark.parametrize("form", ["dense", "conv"])
def test_a_kernel_is_its_formulas(form, tmp_path):
    assert len(block("kernel").splitlines()) <= 30
    kernel = made_by("kernel", tmp_path)["GemanMcClure"](gamma=0.5, patch=2, split=2, hidden=6)
    cell, x = cell_of(form, kernel, norm=1.5, stretch=50.0), input_of(form)
    f, problem = cell.eval().bind(x), Reference(cell, x)
    z = torch.rand(problem.state)
    torch.testing.assert_close(f.drive(z).detach(), problem.drive(z))
    torch.testing.assert_close(f.energy(z).detach(), problem.energy(z))
    torch.testing.assert_close(f.convexity, 1 - f.bound / 4)
    for solver in (kerneq.solvers.Proximal(), kerneq.solvers.InFeatures()):
        layer = kerneq.Equilibrium(cell, solver=solver, tol=1e-11, max_steps=300)
        assert layer(x).converged.all()
        x = x.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda x, layer=layer: layer(x).value, x, atol=1e-5, fast_mode=True)


def test_a_table_finds_a_new_kernel_by_its_name_in_the_package(monkeypatch, tmp_path):
    kernel = made_by("kernel", tmp_path)["GemanMcClure"]
    monkeypatch.setattr(kerneq.kernels, "GemanMcClure", kernel, raising=False)
    model = kerneq.models.build("geq-tiny", settings={"kernel": {"name": "geman-mc-clure", "gamma": 0.3}})
    assert model.branches[0].equilibrium.cell.kernel == kernel(gamma=0.3)


def test_a_solver_is_two_methods(tmp_path):
    halpern = made_by("solver", tmp_path)["Halpern"]()
    A, b, z_star = affine(rate=0.5)
    found = kerneq.solve(lambda z: z @ A.mT + b, torch.zeros_like(b), halpern, tol=1e-3, max_steps=2000)
    assert found.converged.all()
    torch.testing.assert_close(found.value, z_star, rtol=1e-2, atol=1e-2)


def test_a_metric_is_one_entry_and_so_is_a_kind_of_evidence(tmp_path, monkeypatch, capsys):
    """A demo before it and one after: the number is wherever numbers are, and the old run has a dash."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(demo, "DEMO_MODELS", ("resnet-tiny",))
    torch.set_default_dtype(torch.float32)
    training.demo(tmp_path / "before", epochs=1)
    assert "top" not in capsys.readouterr().out
    entry = eval(block("metric"), {"Metric": metrics.Metric})
    monkeypatch.setattr(metrics, "METRICS", (*metrics.METRICS, entry))
    training.demo(tmp_path / "after", epochs=1)
    run = tmp_path / "after" / "resnet-tiny"
    row = json.loads((run / "metrics.jsonl").read_text())
    value = json.loads((run / "evaluation.json").read_text())["scores"]["test"]["top2"]
    said = capsys.readouterr().out
    assert row["validation"]["accuracy"] <= row["validation"]["top2"] <= 1 and 0.1 < value <= 1
    assert f"top2 {row['validation']['top2']:.2%}" in said, "the line of the epoch"
    assert "test top-2 accuracy" in said and f"{value:.2%}" in said, "the table of the demo"
    [event] = EventAccumulator(str(run / "tensorboard")).Reload().Scalars("train/top2")
    assert event.value == pytest.approx(row["train"]["top2"])
    evaluation.evaluate([run], device="cpu")
    assert f"{value:.2%}" in capsys.readouterr().out
    monkeypatch.setitem(PARTS, "mirror", Part(made_by("part", tmp_path)["measure_mirror"], "in the mirror"))
    evaluation.evaluate([run], part=["mirror"], device="cpu")
    agreement = Run(run).part("mirror")["agreement"]
    assert 0 < agreement < 1 and f"{agreement:.2%}" in capsys.readouterr().out, "a part is one line"
    render([tmp_path / "before" / "resnet-tiny", run], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "test top-2 accuracy" in page and f">{value:.2%}</td>" in page and ">–</td>" in page
    assert "Top-2 accuracy on held-out images" in page
