"""The benchmarks measure what they say; how fast anything is, is not tested."""

import json

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from kerneq.bench.cli import app
from kerneq.bench.limits import convolution_flops, limits
from kerneq.bench.memory import peak_memory
from kerneq.bench.peers import OURS, fewest, ours, residual_of
from kerneq.bench.problems import conv, dense
from kerneq.bench.profile import part_of
from kerneq.bench.scaling import _flops, _grown, _works
from kerneq.bench.table import Result, save, text
from kerneq.bench.timing import Bench, Timing, alternate, measure

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


def test_a_measurement_repeats_the_work_and_takes_its_median():
    calls = []
    timing = measure(lambda: calls.append(1), CPU, budget=0.0, warmup=2)
    assert len(calls) == 4 and timing.seconds > 0


def test_works_measured_side_by_side_take_turns():
    order = []
    works = {name: (lambda name=name: order.append(name)) for name in "ab"}
    said = []
    assert set(alternate(works, Bench(CPU, False, said.append), "work")) == {"a", "b"}
    turns = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    assert turns == ["a", "b"] * 3
    assert said[:2] == ["work: a, round 1 of 3", "work: b, round 1 of 3"]


def test_a_timing_has_the_median_the_middle_half_and_the_late_calls():
    timing = Timing.of([float(n) for n in range(101)])
    assert timing == Timing(50.0, 1.0, 90.0)
    assert Timing.of([2.0]) == Timing(2.0, 0.0, 2.0)


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
    for cell, x in (dense(CPU, norm, batch=2), conv(CPU, norm, batch=1, size=8)):
        assert float(cell.bind(x).bound) == pytest.approx(norm**2, rel=1e-4)


def test_a_result_is_a_table_and_a_file_with_its_environment(tmp_path):
    result = Result("solvers", "a title", [{"solver": "Picard", "time (ms)": 1.5, "evaluations": None}])
    console = Console(record=True, width=100)
    result.show(console)
    assert "Picard" in console.export_text() and text(None) == "–"
    written = json.loads(save([result], tmp_path, CPU).read_text())
    assert written["results"][0]["rows"] == result.rows
    assert written["environment"]["torch"] == torch.__version__


def test_large_numbers_are_written_out_and_small_ones_with_three_digits():
    assert [text(x) for x in (0.012345, 12.345, 5140.4, 22224, "Picard")] == [
        "0.0123",
        "12.3",
        "5140",
        "22224",
        "Picard",
    ]


def test_kernels_are_sorted_by_what_they_do():
    assert part_of("cudnn::bn_fw_tr_1c11") == "batch norm"
    assert part_of("norm_relu_forward") == "batch norm"
    assert part_of("sm90_xmma_fprop_implicit_gemm") == "convolution"
    assert part_of("radial_forward") == "patch step"
    assert part_of("vectorized_elementwise_kernel") == "other"
    assert part_of("reduce_kernel<512, 1, normtwoops>") == "other"


def test_the_operations_of_convolutions_are_counted_forward_and_backward():
    layer = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3, padding=1), torch.nn.Flatten(), torch.nn.Linear(5 * 64, 7))
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    one = 2 * 2 * 64 * 3 * 5 * 9  # a multiplication and an addition, by batch, pixels, channels, window
    assert convolution_flops(lambda: layer(x)) == one
    assert convolution_flops(lambda: torch.autograd.backward(layer(x).sum())) == 3 * one


def test_operations_counted_by_a_small_twin_are_those_of_the_work_itself():
    sizes = {"batch": 40, "picture": 16, "steps": 3, "width": 32}
    direct = convolution_flops(_works(CPU, 40, 16, 3, 32)[0])
    assert 0.95 * direct < _flops(sizes) <= direct  # less what is done once, whatever the batch


def test_the_limits_of_the_machine_are_rates():
    best = limits(CPU, quick=True)
    assert 1e8 < best["copy"] < 1e13 and 1e8 < best["matmul"] < 1e14


def test_the_fewest_steps_reach_the_tolerance_and_one_less_does_not():
    cell, x = dense(CPU, 2.0, batch=4)
    with torch.no_grad():
        f = cell.bind(x)
    z0, solver = cell.initial(f), OURS["Anderson(5)"]
    steps = fewest(f, z0, solver, most=30, tol=1e-3)
    assert steps is not None and steps > 1
    assert residual_of(f, ours(f, z0, solver, steps)) <= 1e-3 < residual_of(f, ours(f, z0, solver, steps - 1))
    assert fewest(f, z0, solver, most=2, tol=1e-6) is None


def test_growth_is_the_exponent_between_two_rows():
    first = _grown({"batch": 2, "time (ms)": 1.0, "captured (ms)": None, "peak (MiB)": 3.0}, None, "batch")
    second = _grown({"batch": 4, "time (ms)": 8.0, "captured (ms)": None, "peak (MiB)": 6.0}, first, "batch")
    assert first["time ∝ n^"] is None
    assert second["time ∝ n^"] == pytest.approx(3) and second["peak ∝ n^"] == pytest.approx(1)
    assert second["captured ∝ n^"] is None
    assert list(second)[:3] == ["batch", "time (ms)", "time ∝ n^"]


TABLES = {
    "solvers": (4, {"step", "residual"}, "÷ bare f"),
    "layer": (1, {"layer"}, "÷ torchdeq's best"),
    "train": (1, {"step"}, "÷ resnet18"),
    "inference": (2, {"prediction"}, "÷ resnet18 likewise"),
    "scaling": (4, {"growth"}, "÷ bare f"),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_command_prints_ratios_and_writes_its_results(name, tmp_path):
    if name in ("solvers", "layer"):
        pytest.importorskip("torchdeq", reason="torchdeq is what these are compared with")
    arguments = [name, "--device", "cpu", "--quick", "--out", str(tmp_path), "--threads", "1"]
    ran = CliRunner().invoke(app, arguments)
    count, tables, ratio = TABLES[name]
    assert ran.exit_code == 0, ran.output
    assert ratio in ran.output
    results = json.loads((tmp_path / f"{name}-cpu.json").read_text())["results"]
    assert len(results) == count and {result["asked"]["table"] for result in results} == tables
    for result in results:
        assert all(list(row) == list(result["rows"][0]) for row in result["rows"])
