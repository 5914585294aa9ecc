"""Every example runs as people run it, says what it should, stays short and leaves nothing behind."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, folder: Path, *arguments: str, leaves: Sequence[str] = ()) -> str:
    """What the example prints, run in an empty folder where every warning is an error.

    Lightning warns about the machine it runs on and imports what warns about itself; the other examples may not.
    """
    warn = "default" if name == "lightning_module" else "error"
    done = subprocess.run(
        [sys.executable, "-W", warn, str(EXAMPLES / f"{name}.py"), *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert [path.name for path in folder.iterdir()] == list(leaves)
    return done.stdout


def test_examples_are_short_and_there_is_a_test_for_each():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    here = Path(__file__).read_text()
    for name in names:
        assert f'run("{name}"' in here, name
        most = 130 if name == "see_an_equilibrium" else 60  # drawing takes lines
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= most, name
    assert names == {
        "choose_a_gradient",
        "layer_in_your_network",
        "lightning_module",
        "own_kernel",
        "own_pictures",
        "see_an_equilibrium",
    }


def test_a_layer_learns_inside_a_network_of_ones_own(tmp_path):
    printed = run("layer_in_your_network", tmp_path, "--epochs", "3")
    accuracies = [float(number) for number in re.findall(r"test accuracy ([\d.]+)%", printed)]
    assert len(accuracies) == 3 and accuracies[-1] > 90
    assert printed.count("297 of 297 samples reached") == 3


def test_a_model_learns_inside_a_lightning_module(tmp_path):
    pytest.importorskip("lightning")
    printed = run("lightning_module", tmp_path, "--epochs", "1")
    (accuracy,) = re.findall(r"validation accuracy ([\d.]+)%", printed)
    assert float(accuracy) > 30  # guessing gives 10


def test_an_equilibrium_is_drawn_that_proximal_finds_and_plain_iteration_does_not(tmp_path):
    output = tmp_path / "pictures"
    printed = run("see_an_equilibrium", tmp_path, "--steps", "5", "--output", str(output), leaves=["pictures"])
    assert "Picard: E rose at some step" in printed and "Proximal: E fell at every step" in printed
    plain, proximal = (float(number) for number in re.findall(r"residual (\S+)", printed))
    assert plain > 0.3 and proximal < 2e-2
    with Image.open(output / "equilibrium.gif") as moving, Image.open(output / "equilibrium.png") as still:
        assert moving.n_frames == 6 and still.width > moving.width


def test_pictures_of_ones_own_are_learnt_and_new_ones_get_the_names_of_the_folders(tmp_path):
    printed = run("own_pictures", tmp_path, "--count", "20", "--epochs", "1")
    assert re.search(r"test accuracy [\d.]+%", printed)
    assert re.findall(r"new-(\w+).png: (?:disc|ring|stripes) \(\d+%\)", printed) == ["disc", "ring", "stripes"]


def test_a_kernel_and_a_prox_of_ones_own_solve_and_differentiate(tmp_path):
    printed = run("own_kernel", tmp_path)
    assert "4 of 4 samples reached tol=1e-10" in printed
    assert "agrees with finite differences: True" in printed
    (zeros,) = re.findall(r"(\d+)% of the state", printed)
    assert 20 < int(zeros) < 90


def test_the_gradients_are_as_far_from_the_truth_as_their_table_says(tmp_path):
    printed = run("choose_a_gradient", tmp_path)
    rows = [line.rsplit(maxsplit=2) for line in printed.splitlines()[2:]]
    errors = [float(error) for _, error, _ in rows]
    assert len(errors) == 7
    exact, loose, one, five, twenty, short, long = errors
    assert exact < 1e-7 and exact < loose < 1e-2
    assert twenty < five < one
    assert long < short
