"""The illustrations show what is computed, in figures whose words fit; inpainting cuts, learns and agrees both ways."""

import json

import common
import illustrations
import inpaint
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import FancyBboxPatch

SMALL = illustrations.Illustrations(side=9, hole=3, size=14, radius=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the script leaves behind."""
    folder = tmp_path_factory.mktemp("illustrations")
    changes = ["side=9", "hole=3", "size=14", "radius=2"]
    common.main(illustrations.EXPERIMENT, [*changes, "--threads", "1", "--output", str(folder)])
    return folder


@pytest.fixture(scope="module")
def result(folder):
    return json.loads((folder / "result.json").read_text())


def words_and_boxes(figure):
    """Where every word and every box of the figure lies, in dots."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    axis = figure.axes[0]
    words = [text.get_window_extent(renderer) for text in axis.texts if text.get_text()]
    boxes = [patch.get_window_extent(renderer) for patch in axis.patches if isinstance(patch, FancyBboxPatch)]
    return words, boxes, figure.bbox


def check_words_fit(figure):
    words, boxes, sheet = words_and_boxes(figure)
    assert boxes
    for word in words:
        assert sheet.x0 <= word.x0 and word.x1 <= sheet.x1 and sheet.y0 <= word.y0 and word.y1 <= sheet.y1
        for box in boxes:
            apart = word.x1 < box.x0 or box.x1 < word.x0 or word.y1 < box.y0 or box.y1 < word.y0
            within = box.x0 <= word.x0 and word.x1 <= box.x1 and box.y0 <= word.y0 and word.y1 <= box.y1
            assert apart or within


def test_figure_1_fills_the_hole_the_same_way_twice_and_its_words_fit(result):
    shown = result["inpainting"]
    assert shown["difference"] < 1e-10 and shown["pixels"] == [3 * (81 - 9), 27]
    inside, target, filled = (torch.tensor(shown[key]) for key in ("inside", "target", "minimum"))
    assert torch.equal(target[~inside], filled[~inside])
    assert shown["error"] < target[inside].std()
    check_words_fit(illustrations.draw_networks(SMALL, shown))


def test_figure_2_has_the_papers_numbers_of_fixed_points(result):
    found = result["fixed_points"]
    assert [len(points) for points, _ in found] == [1, 1, 1, 3, 0, 0]
    for layer, (points, _) in zip(illustrations.LAYERS, found, strict=True):
        for z in points:
            assert layer.H(torch.tensor(z, dtype=torch.float64)).item() == pytest.approx(z, abs=1e-12)
    assert [interval for _, interval in found[:5]] == [None] * 5
    assert found[5][1] == pytest.approx((0, 1), abs=1e-3)
    titles = [axis.get_title() for axis in illustrations.draw_layers(found).axes]
    assert "uncountably many" in titles[5] and "no fixed points" in titles[4] and "one fixed point" in titles[1]


def test_figure_4_multiplies_and_convolves_to_one_picture(result):
    shown = result["convolution"]
    assert shown["difference"] < 1e-12 and shown["smallest"] < 0
    assert len(illustrations.draw_convolution(SMALL, shown).axes[0].images) == 6


def test_figure_7_keeps_its_words_in_their_boxes():
    figure = illustrations.draw_connections()
    check_words_fit(figure)
    titles = [text.get_text() for text in figure.axes[0].texts if text.get_fontweight() == "bold"]
    assert len(titles) == 4 and "(6)" in titles[0] and "(3)" in titles[3]


def test_the_script_writes_the_four_figures(folder):
    assert {path.stem for path in folder.glob("*.png")} == {"1", "2", "4", "7"}


@pytest.mark.parametrize("moving", [False, True])
def test_a_hole_and_the_rest_make_the_picture(moving):
    images = torch.randint(0, 256, (5, 3, 7, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    data = inpaint.quartets(images, 2, moving, seed=1)
    assert data.Y.shape == (5, 3 * 42 - 12) and data.Y2.shape == (5, 12)
    assert torch.equal(data.filled(data.Y2), images.flatten(1).double() / 255)
    assert data.X.ndim == (3 if moving else 2)
    part = data.rows(torch.tensor([3]))
    X2 = part.X2[0] if moving else part.X2
    row, column, channel = X2.long().unbind(-1)
    assert torch.equal(images[3][channel, row, column].double() / 255, data.Y2[3])
    assert inpaint.center_crop(images, 4).shape == (5, 3, 4, 4)


@pytest.mark.parametrize("moving", ["false", "true"])
def test_inpainting_learns_around_a_kernel_glm_that_is_its_equilibrium(moving, tmp_path):
    changes = ["train=64", "test=30", "epochs=4", "batch=32", "lr=1e-2", "hidden=16", "compare=1", f"moving={moving}"]
    common.main(inpaint.EXPERIMENT, [*changes, "--threads", "1", "--output", str(tmp_path)])
    result = json.loads((tmp_path / "result.json").read_text())
    errors = result["errors"]
    assert result["difference"] < 1e-9 and result["duality_gap"] < 1e-9
    assert errors["kglm"] < errors["mean"] and errors["ddn"] < errors["kglm"] and errors["kernel"] < errors["kglm"]
    assert result["lengths"][0] != 2.0
    if moving == "false":
        assert set(errors) == set(inpaint.NAMES) and errors["deq"] < min(errors["kglm"], errors["random"])
    assert (tmp_path / "pictures.png").exists()


def test_the_names_of_recorded_pictures_say_whether_holes_move():
    assert inpaint.label(inpaint.Inpaint(moving=True)) == "inpaint-digits-moving"
