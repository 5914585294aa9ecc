"""The experiments at toy size: what the paper claims, their readers, tables, figures and scripts."""

import dataclasses
import json
import re
import subprocess
import sys

import common
import cost
import denoise
import features
import inpaint
import mnist
import mnist_train
import numpy as np
import pictures
import pytest
import smooth
import torch
from PIL import Image

from kerneq import kglm
from kerneq.kglm import exact as kernel_matrices
from kerneq.kglm.exact import Gram
from kerneq.kglm.newton import Problem
from kerneq.lab import data
from kerneq.lab.run.config import ConfigError

CPU = torch.device("cpu")
SMALL = denoise.Denoise(
    source="synthetic", channels=3, size=10, train=30, test=20, norms=2, seeds=2, smallest=0.1, largest=1.0,
    epochs=1, max_steps=20,
)  # fmt: skip


def has(name):
    return any(row.name == name and row.found for row in data.describe())


needs_mnist = pytest.mark.skipif(not has("mnist"), reason="MNIST is not under KERNEQ_DATA")


def test_equilibrium_and_newton_agree_within_their_stated_errors_and_a_tie_is_seen_as_one(monkeypatch):
    options = mnist.Mnist()
    K = mnist.kernel_matrix(options)
    norm = torch.linalg.matrix_norm(K, 2).item()
    images = (torch.rand(6, 784, generator=torch.Generator().manual_seed(0)) < 0.3).double()
    problem = Problem(Gram(K), images, kglm.Bernoulli(), 2 * norm)
    deq = mnist.equilibrium(problem, norm)
    exact = mnist.kernel_logistic_regression(problem, norm)
    monkeypatch.setattr(kernel_matrices, "FACTORS", 0)
    klr = mnist.kernel_logistic_regression(problem, norm)
    for first, second in ((deq, klr), (deq, exact)):
        gap = (first.eta - second.eta).abs().amax(-1)
        assert (gap <= first.error + second.error).all() and gap.max() < 1e-12
    # targets of exactly ½ have f = 0: a tie, and the error bound is not smaller than what was computed there
    tie = mnist.equilibrium(dataclasses.replace(problem, t=torch.full((1, 784), 0.5).double()), norm)
    assert tie.eta.abs().max() <= tie.error


@needs_mnist
def test_on_mnist_no_pixel_disagrees():
    result = mnist.run(mnist.Mnist(images=60, exact=4, chunk=40), common.Job())
    assert result["pixels"] == 60 * 784
    assert result["disagreements"] == result["beyond_bound"] == 0
    assert result["cholesky_gap"] < 1e-12 and len(result["closest"]) == 11


def test_corruption_flips_the_share_it_is_told_to():
    flipped = mnist.corrupt(torch.zeros(200, 784), 0.3, seed=0)
    assert flipped.mean().item() == pytest.approx(0.3, abs=0.005)


@needs_mnist
def test_the_kernel_start_beats_the_random_one_on_mnist_before_training_and_after():
    options = mnist_train.MnistTrain(images=300, test=50, steps=3, batch=20)
    result = mnist_train.run(options, common.Job())
    for kernel, random in result["test"]:
        assert kernel < random
    assert torch.tensor(result["residuals"]).max() <= options.tol


def test_the_informed_start_beats_the_random_one_on_the_smooth_task():
    options = smooth.Smooth(seeds=2, train=80, test=40, points=30, epochs=12)
    errors = torch.tensor(smooth.run(options, common.Job())["errors"])
    informed, naive, random = errors.mean(1).unbind(-1)
    assert (informed < random).all() and (informed < naive).all()
    assert informed[-1] < informed[0] and random[-1] < random[0]


def test_with_the_scripts_choices_random_models_have_no_skip_and_naive_ones_move_at_once():
    options = smooth.Smooth(seeds=1, train=60, test=30, points=20, epochs=12, skip="zero", freeze=0)
    bank = smooth.start(options, range(1))
    assert not bank.V2[1:].any() and bank.V2[0].any()
    released, text = (
        torch.tensor(smooth.run(one, common.Job())["errors"])
        for one in (options, dataclasses.replace(options, skip="drawn", freeze=10))
    )
    torch.testing.assert_close(released[..., 0], text[..., 0])  # informed is the same in both
    assert (released[6:, :, 1] < text[6:, :, 1]).all()  # nobody held naive back
    assert "as released" in smooth.variant(options)


def test_a_seed_is_the_same_model_whatever_the_others_and_more_seeds_go_on_from_fewer(tmp_path):
    two = denoise.starts(SMALL, (10, 10), range(2), CPU)
    one = denoise.starts(SMALL, (10, 10), range(1, 2), CPU)
    for both, alone in zip(two, one, strict=True):
        torch.testing.assert_close(both.view(2, 2, 2, 3, 3, 5, 5)[:, :, 1:], alone.view(2, 2, 1, 3, 3, 5, 5))
    fewer = dataclasses.replace(SMALL, seeds=1, models_together=4, train=10, test=5, max_steps=5)
    saved = common.Checkpoints(tmp_path, "same")
    first = denoise.run(fewer, common.Job(saved=saved))
    kept = (tmp_path / "seeds-0-1.pt").stat().st_mtime_ns
    both = denoise.run(dataclasses.replace(fewer, seeds=2), common.Job(saved=saved))
    assert (tmp_path / "seeds-0-1.pt").stat().st_mtime_ns == kept and not list(tmp_path.glob("bank*"))
    got, wanted = torch.tensor(both["errors"]), torch.tensor(first["errors"])
    assert got.shape[-1] == 2 and torch.equal(got[..., :1], wanted)


@pytest.mark.parametrize(("channels", "count"), [(4, 1600), (8, 6400), (10, 10000), (13, 16900)])
def test_parameters_are_as_many_as_table_1_counts(channels, count, request):
    file = request.config.rootpath / "experiments" / "kglm" / f"hsi-{channels}.toml"
    assert denoise.parameters(common.read(denoise.Denoise, [str(file)])) == count


@pytest.mark.parametrize(("points", "sizes"), [(0, [10, 20]), (50, [50, 50])])
def test_a_dense_kernel_has_as_many_points_as_its_width_or_as_the_scripts_fifty(points, sizes, monkeypatch):
    seen = []
    monkeypatch.setattr(cost, "initialise", lambda layer, kernel, size=None: seen.append(layer.weight.shape[1]))
    cost.run(cost.Cost(widths=(10, 20), channels=(1,), points=points, runs=1), common.Job())
    assert seen == [*sizes, 1]


def test_models_trained_in_parts_are_the_same_models():
    options = smooth.Smooth(seeds=2, train=40, test=20, points=20, epochs=2)
    whole = torch.tensor(smooth.run(options, common.Job())["errors"])
    parts = torch.tensor(smooth.run(dataclasses.replace(options, models_together=3), common.Job())["errors"])
    torch.testing.assert_close(whole, parts, rtol=1e-5, atol=1e-6)


def test_the_process_has_the_papers_mean_and_covariance():
    X, X2 = smooth.coordinates(10)
    first, second = smooth.sample(40000, 10, torch.Generator().manual_seed(0))
    torch.testing.assert_close(first.mean(0).double(), smooth.mean(X[:, 0]), rtol=0, atol=0.01)
    cross = (first - first.mean(0)).mT @ (second - second.mean(0)) / len(first)
    torch.testing.assert_close(cross.double(), smooth.TRUE(X, X2), rtol=0, atol=0.005)


@pytest.mark.parametrize("kernel", ["paper", "scripts", "definite"])
def test_the_kernel_start_beats_the_random_one_on_denoising(kernel):
    result = denoise.run(dataclasses.replace(SMALL, kernel=kernel), common.Job())
    errors = torch.tensor(result["errors"])
    best = errors.mean(-1).amin(-1)  # (epoch, scheme)
    assert (best[:, 0] < best[:, 1]).all()
    norms = torch.tensor(result["norms"])
    torch.testing.assert_close(norms[0], SMALL.grid()[:, None].expand(2, 2), rtol=1e-4, atol=0)
    assert norms[1].mean(-1) == pytest.approx(SMALL.grid().tolist(), rel=0.2)
    assert "stand-in" in result["source"]


def test_the_table_counts_failures_and_reads_the_best_norm():
    result = {
        "schemes": ["kernel", "random"],
        "norms": [[[0.1, 0.1], [1.0, 1.0]]] * 2,
        "errors": [[[[0.5, 0.5], [0.1, 0.1]], [[0.5, 0.6], [None, 0.4]]]],
    }
    kernel, random = denoise.table(result, [0])
    assert kernel["mean"] == pytest.approx(np.log(0.1)) and kernel["norm"] == 1.0 and kernel["failed"] == 0
    assert random["failed"] == 1 and random["norm"] == pytest.approx(1.0)
    assert random["mean"] == pytest.approx(np.log([0.6, 0.4]).mean())
    low, high = denoise.failures(result, 0)
    assert low == (0.1, 0.1, [0, 0], 2) and high == (1.0, 1.0, [0, 1], 2)


def test_the_best_linear_filter_is_the_identity_without_noise_and_better_than_it_with():
    assert denoise.linear_filter(dataclasses.replace(SMALL, noise=0)) < 1e-9
    noisy, clean = next(pictures.pictures("synthetic", 30, 20, 3, 10, 0.2, CPU).testing(20))
    assert 0 < denoise.linear_filter(SMALL) < 0.5 * (noisy - clean).square().mean()


def test_the_best_linear_filter_is_tested_on_the_pictures_of_the_run(monkeypatch):
    tested = []
    monkeypatch.setattr(pictures.NoisyPictures, "testing", lambda self, batch: iter(tested.append(self.test) or ()))
    denoise.linear_filter(SMALL, count=5)
    assert torch.equal(tested[0], SMALL.pictures(SMALL.train, SMALL.test).test)


def test_hyperspectral_scenes_are_read_from_their_pages(tmp_path, monkeypatch):
    monkeypatch.setenv("KERNEQ_DATA", str(tmp_path))
    scenes = torch.randint(0, 256, (3, 5, 6, 8), dtype=torch.uint8).numpy()
    folder = tmp_path / "hsi_road" / "images"
    folder.mkdir(parents=True)
    for number, scene in enumerate(scenes):
        pages = [Image.fromarray(page) for page in scene]
        pages[0].save(folder / f"{number}_nir.tif", save_all=True, append_images=pages[1:])
    paths = pictures.find_scenes()
    np.testing.assert_array_equal(pictures.read_scenes(paths, 4).numpy(), scenes[:, :4])
    with pytest.raises(data.DataError, match="9 or more channels"):
        pictures.read_scenes(paths, 9)
    (folder / "9_nir.tif").write_bytes(b"no picture")
    with pytest.raises(data.DataError, match="cannot be read as a hyperspectral scene"):
        pictures.read_scenes(pictures.find_scenes(), 4)


def test_hyperspectral_arrays_are_read_and_absence_falls_back_to_a_labelled_stand_in(tmp_path, monkeypatch):
    folder = tmp_path / "hsi_road"
    folder.mkdir()
    np.save(folder / "a.npy", np.full((25, 8, 8), 7, np.uint8))
    np.save(folder / "b.npy", np.full((25, 8, 8), 9, np.uint8))
    monkeypatch.setenv("KERNEQ_DATA", str(tmp_path))
    found = pictures.pictures("hsi", 1, 1, 4, 0, 0.2, CPU)
    assert found.source == "HSI Road, first 4 channels" and found.train.shape == (1, 4, 8, 8)
    monkeypatch.setenv("KERNEQ_DATA", str(tmp_path / "elsewhere"))
    absent = pictures.pictures("hsi", 2, 1, 4, 16, 0.2, CPU)
    assert "synthetic stand-in" in absent.source and absent.train.shape == (2, 4, 16, 16)


def test_noise_is_clipped_fresh_in_training_and_fixed_in_testing():
    data_set = pictures.pictures("synthetic", 6, 4, 3, 12, 0.2, CPU)
    (noisy, clean), *_ = data_set.training(0, batch=6)
    (other, _), *_ = data_set.training(1, batch=6)
    assert 0 <= noisy.min() and noisy.max() <= 1 and not torch.equal(noisy.sum(), other.sum())
    assert (noisy - clean).std().item() == pytest.approx(0.2, abs=0.05)
    assert torch.equal(next(data_set.testing(4))[0], next(data_set.testing(4))[0])


def test_settings_come_from_a_file_and_changes_and_mistakes_are_answered_in_words(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("seeds = 3\nlr = 0.5\n")
    options = common.read(smooth.Smooth, [str(file), "epochs=7", "device=cpu"])
    assert (options.seeds, options.lr, options.epochs, options.device) == (3, 0.5, 7, "cpu")
    with pytest.raises(ConfigError, match="Did you mean `seeds`"):
        common.read(smooth.Smooth, ["seed=3"])
    with pytest.raises(ConfigError, match="must be at least 1"):
        common.read(smooth.Smooth, ["seeds=0"])
    with pytest.raises(ConfigError, match="There is no file"):
        common.read(smooth.Smooth, [str(tmp_path / "none.toml")])
    with pytest.raises(ConfigError, match="key=value"):
        common.read(smooth.Smooth, ["seeds"])


def test_every_experiment_file_is_read(request):
    kinds = {
        "mnist-train": mnist_train.MnistTrain, "mnist": mnist.Mnist, "smooth": smooth.Smooth, "cost": cost.Cost,
        "cifar10": denoise.Denoise, "hsi": denoise.Denoise, "inpaint": inpaint.Inpaint,
        "features": features.Features,
    }  # fmt: skip
    files = sorted((request.config.rootpath / "experiments" / "kglm").glob("*.toml"))
    assert len(files) >= 10
    for file in files:
        kind = next(value for key, value in kinds.items() if file.stem.startswith(key))
        common.read(kind, [str(file)])


TINY = ["widths=[10, 20]", "channels=[1, 2]", "runs=2", "size=8"]  # for the cost of initialisation


@pytest.mark.parametrize(
    ("module", "changes", "figures"),
    [
        (smooth, ["seeds=2", "train=20", "test=10", "points=15", "epochs=1"], {"errors", "samples"}),
        (
            denoise,
            ["source=synthetic", "size=8", "train=20", "test=10", "norms=2", "seeds=2", "epochs=1", "max_steps=5"],
            {"norms", "pictures"},
        ),
        (cost, TINY, {"cost"}),
    ],
)
def test_a_script_writes_its_numbers_its_settings_and_its_figures(module, changes, figures, tmp_path):
    common.main(module.EXPERIMENT, [*changes, "--threads", "1", "--output", str(tmp_path)])
    content = json.loads((tmp_path / "result.json").read_text())
    assert content["machine"]["torch"] == torch.__version__
    assert common.read(module.EXPERIMENT.settings, [str(tmp_path / "settings.toml")])
    assert {path.stem for path in tmp_path.glob("*.png")} == figures
    record = str(tmp_path / "result.json")
    common.main(module.EXPERIMENT, ["--draw", record, record, "--output", str(tmp_path / "again")])
    assert {path.stem for path in (tmp_path / "again").glob("*.png")} == figures


def test_the_pages_figures_are_replaced_only_when_told_to(tmp_path, monkeypatch, capsys):
    page = tmp_path / "docs"
    page.mkdir()
    monkeypatch.setattr(common, "DOCS", page)
    with pytest.raises(SystemExit):
        common.main(cost.EXPERIMENT, [*TINY, "--output", str(page / "sub")])
    assert "--record" in capsys.readouterr().err and not list(page.iterdir())
    common.main(cost.EXPERIMENT, [*TINY, "--output", str(tmp_path / "run"), "--record"])
    assert sorted(path.name for path in page.iterdir()) == ["cost.png", "records"]
    assert [path.name for path in (page / "records").iterdir()] == ["cost.json"]
    assert denoise.label(SMALL) == "hsi-stand-in"
    assert denoise.label(denoise.Denoise(kernel="definite")) == "cifar10-definite"


@pytest.mark.parametrize(("device", "words"), [("gpu", "must be auto, cpu, cuda or"), ("cuda:77", "cuda:77|GPU 77")])
def test_a_device_that_is_none_is_answered_in_words(device, words, tmp_path, capsys):
    with pytest.raises(SystemExit):
        common.main(cost.EXPERIMENT, [*TINY, "--device", device, "--output", str(tmp_path / "out")])
    assert re.search(words, capsys.readouterr().err)


def test_a_record_that_is_none_is_answered_in_words(tmp_path, capsys):
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "b.json").write_text("[1]")
    for files in ([], [str(tmp_path / "none.json")], [str(tmp_path / "a.json")], [str(tmp_path / "b.json")]):
        with pytest.raises(SystemExit):
            common.main(cost.EXPERIMENT, ["--draw", *files, "--output", str(tmp_path / "out")])
        assert "record" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "changes", "words"),
    [
        (cost, ["widths=[]"], "need an entry each"),
        (cost, ["widths=[-3]"], "must be at least 1"),
        (cost, [*TINY, "--threads", "-1"], "--threads must be 0 or more, got -1"),
        (inpaint, ["hole=8"], "A hole of side 8 leaves nothing of pictures of 8 × 8 pixels"),
        (inpaint, ["size=9"], "No square of side 9 lies in pictures of 8 × 8 pixels"),
        (inpaint, ["train=9999"], r"digits has \d+ train pictures, not 9999"),
        (denoise, ["channels=4"], "Pictures of CIFAR-10 have 3 channels, not 4"),
    ],
)
def test_what_cannot_be_computed_is_answered_in_words(module, changes, words, tmp_path, capsys):
    with pytest.raises(SystemExit):
        common.main(module.EXPERIMENT, [*changes, "--output", str(tmp_path / "out")])
    assert re.search(words, capsys.readouterr().err)


def test_a_single_seed_and_a_model_that_failed_are_put_into_words():
    found = smooth.summarise(smooth.Smooth(seeds=1), {"errors": [[[0.5, 0.5, 0.5]], [[None, 0.1, 0.1]]]})
    assert "0.5000 ± 0.0000 before training, nan ± nan" in found[1] and "0.1000 ± 0.0000 after" in found[2]


@needs_mnist
def test_the_mnist_scripts_write_their_numbers_and_figures(tmp_path, capsys):
    common.main(mnist.EXPERIMENT, ["images=12", "exact=2", "--output", str(tmp_path / "a")])
    assert "disagree on 0 pixels" in capsys.readouterr().out.replace("\n", " ")
    assert (tmp_path / "a" / "closest.png").exists()
    changes = ["images=30", "test=10", "steps=1", "batch=5"]
    common.main(mnist_train.EXPERIMENT, [*changes, "--output", str(tmp_path / "b")])
    assert (tmp_path / "b" / "training.png").exists()


def test_a_script_runs_by_itself_and_ends_a_wrong_request_in_one_sentence(request, tmp_path):
    script = request.config.rootpath / "experiments" / "kglm" / "cost.py"
    done = subprocess.run(
        [sys.executable, str(script), "run=2"], cwd=tmp_path, check=False, capture_output=True, text=True
    )
    assert done.returncode == 2 and not done.stdout
    assert (
        done.stderr.startswith("cost: There is no setting `run`. Did you mean `runs`?") and done.stderr.count("\n") == 1
    )


def test_the_records_say_what_the_documentation_page_says(request):
    folder = request.config.rootpath / "docs" / "kglm" / "records"

    def read(experiment, name):
        return common.read_record(experiment, folder / f"{name}.json")

    for name, best, failed in (("cifar10", [-5.31, -5.27], [0, 13]), ("cifar10-scripts", [-5.25, -4.42], [16, 38])):
        record = read(denoise.EXPERIMENT, name)
        rows = denoise.table(record.result, [5])
        assert [round(row["mean"], 2) for row in rows] == best and [row["failed"] for row in rows] == failed
        counts = [row[2] for row in denoise.failures(record.result, 5)]
        assert np.sum(counts, 0).tolist() == failed and not any(kernel for kernel, _ in counts[:3])
    last = [np.mean(read(smooth.EXPERIMENT, name).result["errors"][-1], 0) for name in ("smooth", "smooth-scripts")]
    assert np.round(last, 4).tolist() == [[0.011, 0.0111, 0.0113], [0.011, 0.0113, 0.0119]]
    counts = read(mnist.EXPERIMENT, "mnist").result
    assert [counts[name] for name in mnist.COUNTS] == [0, 0, 0, 1, 48, 48] and counts["pixels"] == 47_040_000
    trained = read(mnist_train.EXPERIMENT, "mnist-train")
    kernel, *random = trained.result["test"][-1]
    assert (round(kernel, 4), round(np.mean(random), 4)) == (0.068, 0.0607)
    assert 6e-3 < np.max(trained.result["residuals"]) < 7e-3


def test_the_code_on_the_documentation_page_runs(request):
    page = (request.config.rootpath / "docs" / "kglm" / "index.md").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    blocks = [part.split("```")[0] for part in page.split("```python\n")[1:]]
    assert len(blocks) >= 2
    for block in blocks:
        exec(block, names)
