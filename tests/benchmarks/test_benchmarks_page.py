"""The benchmarks page says what the results say."""

import json
import pathlib

import pytest

import benchmarks
from benchmarks.figures import draw
from benchmarks.layer import DEFAULT
from benchmarks.page import MODEL, find_goals, find_time_goals, format_table, write_page
from benchmarks.results import FACTS, NAMES, BenchmarkError, Record, Result, read
from kerneq.lab.run import Run

ROOT = pathlib.Path(benchmarks.__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "benchmarks.md", ROOT / "benchmarks" / "results"
HERE = dict.fromkeys(FACTS, "x") | {"revision": "0123456789+changes", "measured": "2026-01-02T03:04:05Z"}


def residual_row(solver, ratio, captured, memory):
    columns = ("solver", "÷ torchdeq's best", "captured ÷ torchdeq's best", "peak ÷ torchdeq's best")
    return dict(zip(columns, (solver, ratio, captured, memory), strict=True))


STEP = [{"model": MODEL, "time (ms)": 20.0, "images/s": 25_600, "÷ resnet18": 2.5}]
PARTS = [
    {"model": MODEL, "kernels": 700, "card time (ms)": 24.0}
    | {"convolution %": 88.0, "batch norm %": 2.0, "patch step %": 4.0, "other %": 6.0}
]
PRICE = [{"solver": "Picard", "÷ bare f": 1.5, "captured ÷ bare f captured": 1.02}]
WAY = [
    residual_row("Picard", None, None, None),
    residual_row("Anderson(5)", 0.5, 0.1, 0.4),
    residual_row("Proximal", 0.3, 0.2, 0.2),
    residual_row("torchdeq anderson", 1.0, None, 1.0),
]
GROWTH = [{"batch": n, "time (ms)": 1.0 * n, "captured (ms)": 0.5 * n, "peak (MiB)": 3.0 * n} for n in (1, 4, 16)]
CONTENT = {
    "solvers": [
        Result("solvers", "a step", PRICE, (), {"table": "step", "map": "conv", "L": 4.0}),
        Result("solvers", "a way", WAY, ("a note",), {"table": "residual", "map": "conv", "L": 4.0, "tol": 1e-3}),
    ],
    "layer": [
        Result("layer", "a layer", [{"layer": DEFAULT, "÷ torchdeq's best": 0.6}], (), {"table": "layer", "L": 1.0})
    ],
    "train": [
        Result("train", "a step", STEP, (), {"table": "step", "batch": 512}),
        Result("train", "its parts", PARTS, (), {"table": "parts", "batch": 512}),
    ],
    "inference": [
        Result("inference", "b", [{"model": "a", "time (ms)": 2.0}], (), {"table": "prediction", "batch": 1})
    ],
    "scaling": [Result("scaling", "growth", GROWTH, (), {"table": "growth", "by": "batch"})],
    "compiled": [
        Result("compiled", "a", [{"layer": "a", "compiled ÷ eager": 0.3}], (), {"table": "compiled", "batch": 8})
    ],
    "processes": [
        Result(
            "processes",
            "strong",
            [{"processes": n, "images/s": 10.0 * n**0.5} for n in (1, 2, 4)],
            (),
            {"table": "processes", "kind": "strong"},
        )
    ],
}


def record(name):
    return Record(name, "cuda", HERE, tuple(CONTENT[name]))


def save(folder, name, content=None):
    folder.mkdir(exist_ok=True)
    results = [
        {"name": r.name, "title": r.title, "rows": r.rows, "notes": r.notes, "asked": r.asked} for r in CONTENT[name]
    ]
    whole = {"environment": HERE, "results": results} if content is None else content
    (folder / f"{name}-cuda.json").write_text(json.dumps(whole))


@pytest.mark.parametrize("name", NAMES)
def test_every_record_is_drawn_the_same_every_time_and_says_when_it_was_measured(name):
    drawing = draw(record(name))
    assert drawing is not None and drawing == draw(record(name))
    text = drawing.decode()
    assert f"{name}-cuda, measured {HERE['measured']}" in text
    assert len(drawing) < 150_000 and "<text" in text


def test_a_figure_shows_the_numbers_it_is_made_from():
    drawing = draw(record("solvers")).decode()
    for shown in ("0.3", "0.1", "Anderson(5)", "not reached", "torchdeq anderson"):
        assert f">{shown}<" in drawing or f"> {shown}<" in drawing or f">{shown} <" in drawing, shown
    ratios = {"layer": "a", "÷ torchdeq's best": 0.5}
    rows = [ratios | {"spread (%)": spread} for spread in (0.0, 40.0)]
    without, with_spread = (
        draw(Record("layer", "cpu", HERE, (Result("layer", "a", [row], (), {"table": "layer", "L": 1.0}),)))
        for row in rows
    )
    assert with_spread.count(b"<path") > without.count(b"<path")
    assert "24 ms, 700 kernels" in draw(record("train")).decode()


def test_goals_are_judged_by_the_best_of_ours_and_by_its_own_memory():
    found = {goal.what: (goal.measured, goal.met) for goal in find_goals(named("solvers", "train", "layer"))}
    assert found["training step, batch 512, images/s"] == (25_600, True)
    assert found["training step, batch 512, ÷ ResNet-18's"] == (2.5, False)
    assert found["not in convolutions, batch 512, % of card time"] == (12.0, True)
    assert found["a Picard step ÷ bare f, captured, conv map, L = 4"] == (1.02, True)
    what = "to a residual of 1e-3 ÷ torchdeq's best, conv map, L = 4"
    assert found[f"time {what} (Anderson(5), captured)"] == (0.1, True)
    assert found[f"memory {what} (Anderson(5))"] == (0.4, False), "the peak is that of the call without a graph"
    assert found["the default layer, forward + backward, ÷ torchdeq's best, L = 1"] == (0.6, False)


def named(*names):
    return {f"{name}-cuda": record(name) for name in names}


def test_the_page_is_filled_with_what_is_there_and_says_what_is_not(tmp_path):
    save(tmp_path / "results", "solvers")
    page = tmp_path / "page.md"
    empty = [f"<!-- begin {key} -->\n<!-- end {key} -->\n" for key in ("train-cpu", "goals")]
    filled = "<!-- begin solvers-cuda -->\nold\n<!-- end solvers-cuda -->\n"
    page.write_text(f"before\n{filled}between\n{''.join(empty)}after\n")
    skipped = write_page(tmp_path / "results", page)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "between" in text and "old" not in text
    assert "(page/solvers-cuda.svg)" in text and "revision 0123456+changes" in text
    assert "Not measured yet: `python -m benchmarks train --device cpu`" in text
    assert "| time to a residual" in text
    assert "| Anderson(5) | 0.5 | 0.1 | 0.4 |" in (tmp_path / "page" / "solvers-cuda.md").read_text()
    assert (tmp_path / "page" / "solvers-cuda.svg").exists()
    assert "train-cpu: no result yet; measure with: python -m benchmarks train --device cpu" in skipped
    write_page(tmp_path / "results", page)
    assert page.read_text() == text, "a second time changes nothing"


def test_a_block_that_nothing_fills_is_an_error(tmp_path):
    save(tmp_path / "results", "solvers")
    page = tmp_path / "page.md"
    page.write_text("<!-- begin solvres-cuda -->\n<!-- end solvres-cuda -->\n")
    with pytest.raises(BenchmarkError, match="has a block `solvres-cuda`; there are only goals, solvers-cuda"):
        write_page(tmp_path / "results", page)


UNEVEN = {"name": "solvers", "title": "a", "rows": [{"a": 1}, {"b": 2}], "notes": []}
BROKEN = [{}, {"environment": {}, "results": []}, 3, {"environment": HERE, "results": [UNEVEN]}]


@pytest.mark.parametrize("text", ["{", *map(json.dumps, BROKEN)])
def test_a_broken_result_is_named_in_one_sentence(tmp_path, text):
    (tmp_path / "solvers-cuda.json").write_text(text)
    words = r"solvers-cuda.json is not a result .* measure again with `python -m benchmarks"
    with pytest.raises(BenchmarkError, match=words) as e:
        read(tmp_path)
    assert "\n" not in str(e.value)


def test_a_record_of_an_older_kind_has_its_tables_and_no_figure(tmp_path):
    rows = [{"solver": "Picard", "time (ms)": 3.0}]
    old = {"environment": HERE, "results": [{"name": "solvers", "title": "old", "rows": rows, "notes": []}]}
    save(tmp_path / "results", "solvers", old)
    page = tmp_path / "page.md"
    page.write_text("<!-- begin solvers-cuda -->\n<!-- end solvers-cuda -->\n")
    assert any("older kind" in line for line in write_page(tmp_path / "results", page))
    assert "svg" not in page.read_text() and "solvers-cuda.md" in page.read_text()


def test_a_missing_folder_or_page_is_one_sentence(tmp_path):
    with pytest.raises(BenchmarkError, match="is not a folder: give the one"):
        read(tmp_path / "nowhere")
    with pytest.raises(BenchmarkError, match="could not be read .* --page"):
        write_page(tmp_path, tmp_path / "page.md")


def test_a_table_in_markdown():
    assert format_table([["a", None], ["b", 2.0]], ["name", "x"]) == "| name | x |\n| --- | --: |\n| a | – |\n| b | 2 |"


def test_the_committed_page_agrees_with_the_committed_results(tmp_path):
    page = tmp_path / PAGE.name
    page.write_text(PAGE.read_text())
    write_page(RESULTS, page)
    again = "run `python -m benchmarks page`"
    assert page.read_text() == PAGE.read_text(), again
    committed = PAGE.with_suffix("")
    made = page.with_suffix("")
    assert {path.name for path in made.iterdir()} == {path.name for path in committed.iterdir()}, again
    for path in sorted(made.glob("*.md")):
        assert path.read_text() == (committed / path.name).read_text(), again
    for key, found in read(RESULTS).items():  # other versions of matplotlib draw other bytes of the same figure
        if (made / f"{key}.svg").exists():
            stamp = f"{key}, measured {found.environment['measured']}"
            assert stamp in (committed / f"{key}.svg").read_text(), again


def test_time_to_accuracy_is_read_from_the_record_of_a_run(tmp_path):
    run = Run(tmp_path)
    assert not list(find_time_goals(run))
    seconds = {"imports": 3.0, "first steps": 4.0, "training": 40.0, "validation": 1.5}
    (tmp_path / "environment.json").write_text(json.dumps({"seconds": seconds}))
    (tmp_path / "config.toml").touch()
    run.add_row({"epoch": 1, "step": 1, "seconds": 44.0, "train": {}, "validation": {"accuracy": 0.9412}})
    assert [(goal.measured, goal.met) for goal in find_time_goals(run)] == [
        (pytest.approx(94.12), True),
        (48.5, True),
        (8.5, True),
    ]


def test_the_ratios_of_the_showcases_are_those_of_their_record():
    text = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    record = json.loads((ROOT / "benchmarks/results/own-cpu.json").read_text(encoding="utf-8"))
    for result in record["results"]:
        name = result["title"].removeprefix("examples/").removesuffix(".py")
        row = next(row for row in reversed(result["rows"]) if row["layer"].startswith("kerneq"))
        words = name + (", by `Picard()`" if row["layer"] == "kerneq, Picard" else "")
        ratio = row["÷ torchdeq's best"]
        assert f"| {words} | {ratio:.2f} |" in text
