"""The benchmarks measure what they say; how fast anything is, is not tested."""

import json

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from kerneq.bench.cli import app
from kerneq.bench.memory import peak_memory
from kerneq.bench.problems import conv, dense
from kerneq.bench.table import Result, save, text
from kerneq.bench.timing import alternate, measure
from kerneq.bench.train import _part

CPU = torch.device("cpu")


def test_a_measurement_repeats_the_work_and_takes_its_median():
    calls = []
    timing = measure(lambda: calls.append(1), CPU, budget=0.0, warmup=2)
    assert len(calls) == 4 and timing.seconds > 0


def test_works_measured_side_by_side_take_turns():
    order = []
    works = {name: (lambda name=name: order.append(name)) for name in "ab"}
    assert set(alternate(works, CPU, rounds=2, budget=0.0)) == {"a", "b"}
    turns = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    assert turns == ["a", "b", "a", "b"]


def test_peak_memory_counts_what_is_held_at_once():
    def work():
        first = torch.zeros(1000, 1000)
        second = first + 1
        del first
        return second * 2

    million = 4 * 1000**2
    assert 2 * million <= peak_memory(work, CPU) < 2.1 * million


@pytest.mark.parametrize("norm", [1.0, 2.0])
def test_the_equations_measured_sit_at_their_bound(norm):
    for cell, x in (dense(CPU, norm), conv(CPU, norm, batch=1, size=8)):
        assert float(cell.bind(x).bound) == pytest.approx(norm**2, rel=1e-4)


def test_a_result_is_a_table_and_a_file_with_its_environment(tmp_path):
    result = Result("solvers", "a title", [{"solver": "Picard", "time (ms)": 1.5, "evaluations": None}])
    console = Console(record=True, width=100)
    result.show(console)
    assert "Picard" in console.export_text() and text(None) == "–"
    written = json.loads(save([result], tmp_path, CPU).read_text())
    assert written["results"][0]["rows"] == result.rows
    assert written["environment"]["torch"] == torch.__version__


def test_kernels_are_sorted_by_what_they_do():
    assert _part("cudnn::bn_fw_tr_1c11") == "batch norm"
    assert _part("sm90_xmma_fprop_implicit_gemm") == "convolution"
    assert _part("forward") == "patch step"
    assert _part("vectorized_elementwise_kernel") == "other"


def test_the_command_prints_ratios_and_writes_its_results(tmp_path):
    arguments = ["scaling", "--device", "cpu", "--quick", "--out", str(tmp_path), "--threads", "1"]
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 0, ran.output
    assert "× the first" in ran.output
    assert len(json.loads((tmp_path / "scaling-cpu.json").read_text())["results"]) == 4
