"""The benchmarks measure what they say; how fast anything is, is not tested."""

import json

import pytest
import torch
from rich.console import Console

import kerneq
from benchmarks import __main__ as command_line
from benchmarks import models
from benchmarks.calls import record_calls
from benchmarks.measure import (
    Setup,
    Timing,
    classify_kernel,
    compare,
    count_convolution_flops,
    measure_limits,
    measure_peak_memory,
)
from benchmarks.problems import conv, dense
from benchmarks.resolvent import count_evaluations
from benchmarks.results import Result, format_cell, save
from benchmarks.scaling import _add_growth, _layer, count_flops
from benchmarks.solvers import OURS, find_fewest_steps, measure_residual, solve_fixed

CPU = torch.device("cpu")


def test_calls_measured_side_by_side_take_turns():
    order = []
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    said = []
    costs, failures = compare(calls, Setup(CPU, False, said.append), "work")
    assert set(costs) == {"a", "b"} and failures == ()
    assert all(cost.eager.seconds > 0 and cost.captured is None for cost in costs.values())
    turns = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    assert turns == ["a", "b"] * 3 + ["a", "b"], "three rounds, then the memory of each"
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
    assert 2 * million <= measure_peak_memory(work, CPU) < 2.1 * million


@pytest.mark.parametrize("norm", [1.0, 2.0])
def test_the_equations_measured_sit_at_their_bound(norm):
    for problem in (dense(CPU, norm, batch=2), conv(CPU, norm, batch=1, size=8)):
        f, _ = problem.bind()
        assert float(f.bound) == pytest.approx(norm**2, rel=1e-4)


def test_a_result_is_a_table_and_a_file_with_its_environment(tmp_path):
    result = Result("solvers", "a title", [{"solver": "Picard", "time (ms)": 1.5, "evaluations": None}])
    console = Console(record=True, width=100)
    result.show(console)
    assert "Picard" in console.export_text() and format_cell(None) == "–"
    written = json.loads(save([result], tmp_path, CPU).read_text())
    assert written["results"][0]["rows"] == result.rows
    assert written["environment"]["torch"] == torch.__version__


def test_large_numbers_are_written_out_and_small_ones_with_three_digits():
    assert [format_cell(x) for x in (0.012345, 12.345, 5140.4, 22224, "Picard")] == [
        "0.0123",
        "12.3",
        "5140",
        "22224",
        "Picard",
    ]


def test_kernels_are_sorted_by_what_they_do():
    assert classify_kernel("cudnn::bn_fw_tr_1c11") == "batch norm"
    assert classify_kernel("norm_relu_forward") == "batch norm"
    assert classify_kernel("sm90_xmma_fprop_implicit_gemm") == "convolution"
    assert classify_kernel("radial_forward") == "patch step"
    assert classify_kernel("vectorized_elementwise_kernel") == "other"
    assert classify_kernel("reduce_kernel<512, 1, normtwoops>") == "other"


def test_the_operations_of_convolutions_are_counted_forward_and_backward():
    layer = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3, padding=1), torch.nn.Flatten(), torch.nn.Linear(5 * 64, 7))
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    one = 2 * 2 * 64 * 3 * 5 * 9  # a multiplication and an addition, by batch, pixels, channels, window
    assert count_convolution_flops(lambda: layer(x)) == one
    assert count_convolution_flops(lambda: torch.autograd.backward(layer(x).sum())) == 3 * one


def test_operations_counted_by_a_small_twin_are_those_of_the_work_itself():
    sizes = {"batch": 40, "picture": 16, "steps": 3, "width": 32}
    direct = count_convolution_flops(_layer(CPU, 40, 16, 3, 32)[0])
    assert 0.95 * direct < count_flops(sizes) <= direct  # less what is done once, whatever the batch


def test_the_limits_of_the_machine_are_rates():
    limits = measure_limits(Setup(CPU, True, lambda doing: None))
    assert 1e8 < limits.copy < 1e13 and 1e8 < limits.matmul < 1e14
    assert "float32 matrix products" in str(limits)


def test_the_fewest_steps_reach_the_tolerance_and_one_less_does_not():
    f, z0 = dense(CPU, 2.0, batch=4).bind()
    solver = OURS["Anderson(5)"]
    steps = find_fewest_steps(f, z0, solver, most=30, tol=1e-3)
    assert steps is not None and steps > 1
    assert (
        measure_residual(f, solve_fixed(f, z0, solver, steps))
        <= 1e-3
        < measure_residual(f, solve_fixed(f, z0, solver, steps - 1))
    )
    assert find_fewest_steps(f, z0, solver, most=2, tol=1e-6) is None


def test_calls_are_those_of_named_functions_of_the_package_in_order():
    relu, z = kerneq.prox.ReLU(), torch.ones(2, 3)
    found = record_calls(lambda: [relu.penalty(z), relu(z)])
    assert [file.rsplit("/", 1)[-1] for file, _ in found if file.endswith("prox.py")] == ["prox.py"] * 2
    assert found[0] == record_calls(lambda: relu.penalty(z))[0]


def test_growth_is_the_exponent_between_two_rows():
    first = _add_growth({"batch": 2, "time (ms)": 1.0, "captured (ms)": None, "peak (MiB)": 3.0}, None, "batch")
    second = _add_growth({"batch": 4, "time (ms)": 8.0, "captured (ms)": None, "peak (MiB)": 6.0}, first, "batch")
    assert first["time ∝ n^"] is None
    assert second["time ∝ n^"] == pytest.approx(3) and second["peak ∝ n^"] == pytest.approx(1)
    assert second["captured ∝ n^"] is None
    assert list(second)[:3] == ["batch", "time (ms)", "time ∝ n^"]


TABLES = {
    "solvers": (4, {"step", "residual"}, "÷ bare f"),
    "layer": (2, {"layer", "function"}, "÷ torchdeq's best"),
    "train": (1, {"step"}, "÷ resnet18"),
    "inference": (2, {"prediction"}, "÷ resnet18 likewise"),
    "scaling": (4, {"growth"}, "÷ bare f"),
    "calls": (1, {"calls"}, "changes of file"),
    "own": (2, {"graph_chains", "prefix_sums"}, "÷ torchdeq's best"),
    "kglm-scale": (1, {"scale"}, "passes"),
    "kglm-exact": (1, {"exact"}, "ratio"),
    "kglm-growth": (2, {"growth"}, "passes"),
    "kglm-centres": (1, {"centres"}, "over exact (%)"),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_command_prints_ratios_and_writes_its_results(name, tmp_path, capsys):
    if name in ("solvers", "layer", "own"):
        pytest.importorskip("torchdeq", reason="torchdeq is what these are compared with")
    command_line.main([name, "--device", "cpu", "--quick", "--output", str(tmp_path), "--threads", "1"])
    count, tables, ratio = TABLES[name]
    assert ratio in capsys.readouterr().out
    results = json.loads((tmp_path / f"{name}-cpu.json").read_text())["results"]
    assert len(results) == count and {result["asked"]["table"] for result in results} == tables
    for result in results:
        assert all(list(row) == list(result["rows"][0]) for row in result["rows"])


def test_both_models_of_a_ratio_have_the_same_memory_layout():
    seen = set()

    def look(network, inputs):
        if inputs and inputs[0].ndim == 4 and inputs[0].shape[1] == 3:
            convolutions = [module.weight for module in network.modules() if isinstance(module, torch.nn.Conv2d)]
            seen.add(all(t.is_contiguous(memory_format=torch.channels_last) for t in (inputs[0], *convolutions)))

    hook = torch.nn.modules.module.register_module_forward_pre_hook(look)
    try:
        for benchmark in (models.bench_train, models.bench_inference):
            list(benchmark(Setup(CPU, True, lambda doing: None)))
    finally:
        hook.remove()
    assert seen == {True}


def test_only_a_run_told_to_record_replaces_a_tracked_result(tmp_path, monkeypatch):
    def bench_nothing(setup):
        yield Result("solvers", "a title", [{"solver": "Picard", "time (ms)": 1.5}])

    records = tmp_path / "records"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command_line, "RECORDS", records)
    monkeypatch.setitem(command_line.BENCHMARKS, "solvers", bench_nothing)
    command_line.main(["solvers", "--device", "cpu"])
    assert not records.exists()
    assert (tmp_path / "runs" / "bench" / "solvers-cpu.json").exists()
    command_line.main(["solvers", "--device", "cpu", "--record"])
    assert (records / "solvers-cpu.json").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["solvers", "--quick", "--record"], "a --quick run is too short to --record"),
        (["solvers", "--threads", "-1"], "--threads must be 0 or more, got -1"),
        (["page", "--page", "nowhere.md"], "nowhere.md could not be read"),
    ],
)
def test_a_wrong_request_ends_in_one_sentence(arguments, sentence):
    with pytest.raises(SystemExit, match=sentence):
        command_line.main(arguments)


def test_evaluations_of_a_resolvent_are_the_fewest_that_reach_the_error():
    torch.manual_seed(0)
    cell = kerneq.cells.DenseCell(kerneq.kernels.Squared(), inputs=6, state=9, features=6, inject=torch.nn.Identity())
    layer, a = kerneq.Resolvent(cell, tol=1e-6).eval(), torch.randn(4, 6)
    exact = layer(a)
    steps = count_evaluations(layer, kerneq.solvers.Proximal(memory=0), a, exact)
    assert steps is not None and 1 < steps < 20 and layer.equilibrium.max_steps == 50
    fewer = kerneq.Resolvent(cell, solver=kerneq.solvers.Proximal(memory=0), max_steps=steps - 1, check_every=steps)
    assert ((fewer.eval()(a) - exact).norm(dim=1) > 1e-3 * a.norm(dim=1)).any()
