"""Images in memory and in files: what they must be, how files are decoded, and the validation split."""

import numpy as np
import pytest
import torch
from data_files import damaged, picture
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from kerneq.lab.data import Batches, DataError, Images, decode, split_validation
from kerneq.lab.data.batches import crop_and_resize
from kerneq.lab.data.images import ImageFiles
from kerneq.lab.prediction import read_picture


def numbered(labels: list[int]) -> Images:
    """Pictures of one pixel, each its own number."""
    pixels = torch.arange(len(labels), dtype=torch.uint8).view(-1, 1, 1, 1)
    return Images(pixels, torch.tensor(labels), tuple("abcd"), (0.5,), (0.5,))


def numbers(images: Images) -> list[int]:
    return images.pixels.flatten().tolist()


@settings(max_examples=100, deadline=None)
@given(labels=st.lists(st.integers(0, 3), min_size=2, max_size=120), data=st.data())
def test_the_parts_are_disjoint_whole_in_order_and_in_proportion(labels, data):
    count = data.draw(st.integers(1, len(labels) - 1))
    images = numbered(labels)
    train, validation = split_validation(images, count, data.draw(st.integers(0, 2**40)))
    assert len(validation) == count
    assert sorted(numbers(train) + numbers(validation)) == list(range(len(labels)))
    assert numbers(train) == sorted(numbers(train)) and numbers(validation) == sorted(numbers(validation))
    exact = images.labels.bincount(minlength=4) * (count / len(labels))
    assert (validation.labels.bincount(minlength=4) - exact).abs().max() < 1
    assert all(labels[i] == label for i, label in zip(numbers(train), train.labels.tolist(), strict=True))


def test_the_split_depends_on_the_seed_alone():
    images = numbered([0, 1, 2, 3] * 25)
    torch.manual_seed(0)
    first = numbers(split_validation(images, 20, 7)[1])
    before = torch.get_rng_state()
    assert numbers(split_validation(images, 20, 7)[1]) == first
    assert torch.equal(torch.get_rng_state(), before)
    assert numbers(split_validation(images, 20, 8)[1]) != first


@pytest.mark.parametrize("count", [0, 8, -1])
def test_a_count_that_leaves_nothing_is_refused(count):
    with pytest.raises(ValueError, match=f"`count` must lie between 1 and 7 for this data set, got {count}"):
        split_validation(numbered([0, 1] * 4), count, 0)


def test_images_say_in_a_line_what_they_are():
    assert repr(numbered([0, 1, 2])) == "Images(3 of shape (1, 1, 1) in memory, 4 classes)"


def test_images_of_the_wrong_form_are_refused():
    good = numbered([0, 1])
    for pixels, labels, mean, message in (
        (good.pixels.float(), good.labels, (0.5,), "`pixels` must be uint8"),
        (good.pixels, good.labels[:1], (0.5,), "`labels` must be int64"),
        (good.pixels, good.labels, (0.5, 0.5), "`mean` and `std` must have 1 entries"),
    ):
        with pytest.raises(ValueError, match=message):
            Images(pixels, labels, good.classes, mean, (0.5,))


def test_decoding_takes_the_central_square(tmp_path):
    array = np.zeros((10, 30, 3), dtype=np.uint8)
    array[:, 10:20] = 200
    Image.fromarray(array).save(tmp_path / "p.png")
    assert (decode(tmp_path / "p.png", 10) == 200).all()


@pytest.mark.parametrize("shape", [(20, 60), (60, 20)])
def test_a_part_of_a_picture_is_as_undistorted_as_the_whole_and_the_same_in_memory_and_in_files(tmp_path, shape):
    """What is trained on has the proportions of what is tested: a disk in a wide picture does not become an ellipse."""
    row, column = np.ogrid[: shape[0], : shape[1]]
    disk = (row - shape[0] / 2 + 0.5) ** 2 + (column - shape[1] / 2 + 0.5) ** 2 < 16
    Image.fromarray(np.repeat(disk[..., None] * np.uint8(255), 3, axis=2)).save(tmp_path / "p.png")
    box = (0.1, 0.2, 0.9, 1.0)
    part, whole = decode(tmp_path / "p.png", 20, box)[None], decode(tmp_path / "p.png", 20)[None]
    assert (part.int() - crop_and_resize(whole, np.array([box]))).abs().max() <= 1
    assert [int((whole[0, 0] > 127).any(axis).sum()) for axis in (0, 1)] == [8, 8]


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_pictures_of_every_mode_become_colour(tmp_path, mode):
    path = tmp_path / ("p.tif" if mode == "CMYK" else "p.png")
    Image.new("RGB", (9, 9), (255, 255, 255)).convert(mode).save(path)
    assert (decode(path, 4) == 255).all()


def test_a_photo_of_108_megapixels_is_resized_and_a_bomb_is_refused(tmp_path):
    photo, bomb, larger = (tmp_path / name for name in ("photo.jpg", "bomb.png", "larger.jpg"))
    Image.new("L", (12000, 9000), 90).save(photo)
    assert (decode(photo, 8) == 90).all()
    assert (decode(photo, 8, (0.2, 0.1, 0.6, 0.4)) == 90).all()
    Image.new("1", (12000, 9000)).save(bomb)
    assert bomb.stat().st_size < 50_000
    with pytest.raises(
        DataError, match="bomb.png has 108.0 megapixels, and at most 89 are read, of a JPEG 178: save it"
    ):
        decode(bomb, 8)
    content = photo.read_bytes()
    at = content.index(b"\xff\xc0") + 5  # the header's height and width
    larger.write_bytes(content[:at] + b"\xff\xdc\xff\xdc" + content[at + 4 :])
    with pytest.raises(DataError, match="larger.jpg has more than 178 megapixels"):
        decode(larger, 8)


def test_an_animation_gets_the_same_sentence_from_training_and_predict(tmp_path):
    path = tmp_path / "moving.gif"
    first, second = (Image.new("RGB", (9, 9), colour) for colour in ("red", "blue"))
    first.save(path, save_all=True, append_images=[second])
    images = Images(ImageFiles((path, path), 8), torch.zeros(2, dtype=torch.int64), ("a",), (0.5,) * 3, (0.5,) * 3)
    words = "moving.gif holds 2 pictures, an animation or pages: save the one you mean by itself, in its place, or"
    with pytest.raises(DataError, match=words):
        next(Batches(images, 2, workers=0).epoch(0))
    with pytest.raises(DataError, match=words):
        read_picture(path, 3, 8)


@pytest.fixture(scope="module", params=["png", "jpg", "webp", "gif", "bmp", "tif", "ppm"])
def encoded(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures") / f"p.{request.param}"
    picture(path, (200, 30, 90))
    return path, path.read_bytes()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_picture_decodes_or_says_what_is_wrong(encoded, data):
    path, content = encoded
    broken = path.with_name(f"broken{path.suffix}")
    broken.write_bytes(data.draw(damaged(content)))
    try:
        assert decode(broken, 8).shape == (3, 8, 8)
    except DataError as error:
        assert str(error).startswith((f"{broken} is not a readable picture (", f"{broken} has "))
        assert str(error).endswith(("replace or remove it.", "save it smaller."))
