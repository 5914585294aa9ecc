"""The models of the zoo through the loop: what they keep besides parameters must survive a stop, too."""

import numpy as np
import pytest
from PIL import Image

from kerneq import equation
from kerneq.lab.evaluate import evaluate
from kerneq.lab.training.build import build_model

GEQ = ("model.name=geq-tiny", "model.width=16", "model.features=[8, 8]", "model.kernel.hidden=8", "model.scales=[2, 4]")
DENSE = ("model.name=geq-dense-tiny", "model.width=32", "model.features=16")


@pytest.mark.parametrize(
    ("model", "average"),
    [((*GEQ, "optimizer.muon=0.02"), "training.ema=0.9"), (DENSE, "training.ema=0")],
    ids=["geq-tiny", "geq-dense-tiny"],
)
def test_a_stopped_equilibrium_model_goes_on_bit_for_bit(stop_and_resume, model, average):
    stop_and_resume(*model, "training.epochs=2", "training.batch_size=256", average, build=build_model)


def test_an_equilibrium_model_learns_the_digits_and_converges(run):
    rows = run(*DENSE, "training.epochs=6", "training.batch_size=64", build=build_model)
    assert rows[-1]["validation"]["accuracy"] > 0.7
    assert rows[-1]["validation"]["unconverged"] == 0
    assert rows[-1]["validation"]["residual"] < 1e-3
    assert rows[-1]["diagnostics"]["norm"] <= 1 + 1e-3


def test_the_map_is_compiled_when_asked_and_gives_the_same_run(run, monkeypatch):
    asked = []
    products = equation.Equation.products
    monkeypatch.setattr(equation, "_compiled", lambda kind: asked.append(kind) or products)  # no compiler
    settings = (*DENSE, "model.solver.name=anderson", "training.epochs=1", "training.batch_size=256")
    plain = run(*settings, folder="plain", build=build_model)
    compiled = run(*settings, "training.compile=true", folder="compiled", build=build_model)
    assert asked and compiled[0]["train"] == plain[0]["train"]


def test_a_folder_of_pictures_of_ones_own_trains_and_resumes(tmp_path, stop_and_resume):
    draw = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 3)):
        for place, kind in enumerate(("dark", "light")):
            folder = tmp_path / "pictures" / split / kind
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = draw.integers(100 * place, 100 + 100 * place, (20, 20, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    data = (f"data.name=folder:{tmp_path / 'pictures'}", "data.size=16", "data.validation=0.25", "augment.area=0.5")
    settings = (*data, "model.name=resnet-tiny", "training.batch_size=6", "training.epochs=2", "optimizer.lr=0.05")
    rows = stop_and_resume(*settings, build=build_model)
    assert rows[0]["train"]["images"] == 18 and rows[0]["validation"]["images"] == 6
    result = evaluate(tmp_path / "stopped", device="cpu")
    assert result.scores["test"]["images"] == 6 and result.data.startswith("folder:")
