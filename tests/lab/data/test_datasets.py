"""Folders of pictures: which files belong to which split and class, and how they are decoded."""

import dataclasses

import numpy as np
import pytest
import torch
from data_files import picture
from PIL import Image

from kerneq.lab.data import Augment, Batches, DataError, Images, describe, load, split_validation

# From Python 3.12 on, forking a worker beside torch's threads warns.
FORKS = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
COLOURS = {"ant": (250, 10, 10), "bee": (10, 250, 10), "cat": (10, 10, 250)}


@pytest.fixture
def animals(tmp_path):
    for entry, colour in COLOURS.items():
        for i in range(6):
            picture(tmp_path / "train" / entry / f"{i}.png", colour)
        for i in range(2):
            picture(tmp_path / "val" / entry / f"{i}.jpg", colour)
    (tmp_path / "train" / "ant" / "notes.txt").write_text("not a picture")
    return tmp_path


def colours(images: Images) -> list[int]:
    """The channel that dominates each picture: 0 for ants, 1 for bees, 2 for cats."""
    return images.in_memory().float().mean(dim=(2, 3)).argmax(1).tolist()


def test_classes_are_the_sorted_folders_and_labels_follow_them(animals):
    train, test = (load(f"folder:{animals}", split, size=8) for split in ("train", "test"))
    assert train.classes == test.classes == ("ant", "bee", "cat")
    assert (len(train), len(test), train.shape) == (18, 6, (3, 8, 8))
    assert colours(train) == train.labels.tolist() and colours(test) == test.labels.tolist()
    assert all("train" in path.parts for path in train.pixels.paths) and all(
        "val" in p.parts for p in test.pixels.paths
    )


def test_a_test_folder_is_preferred_to_val(animals):
    for entry, colour in COLOURS.items():
        picture(animals / "test" / entry / "only.png", colour)
    test = load(f"folder:{animals}", "test")
    assert [path.name for path in test.pixels.paths] == ["only.png"] * 3 and test.shape == (3, 224, 224)


def test_a_class_list_chooses_names_and_orders_the_classes(animals):
    (animals / "classes.txt").write_text("cat  House cat\n# chosen\nant\n", encoding="utf-8-sig")  # as on Windows
    train = load(f"folder:{animals}", "train", size=8)
    assert train.classes == ("House cat", "ant")
    assert colours(train) == [2] * 6 + [0] * 6 and train.labels.tolist() == [0] * 6 + [1] * 6


def test_a_lone_folder_of_classes_is_split_the_same_way_every_time(tmp_path):
    for entry, colour in COLOURS.items():
        for i in range(10):
            picture(tmp_path / entry / f"{i}.png", colour)
    train, test = (load(f"folder:{tmp_path}", split) for split in ("train", "test"))
    assert len(train) == 24 and test.labels.bincount().tolist() == [2, 2, 2]
    assert set(train.pixels.paths).isdisjoint(test.pixels.paths)
    assert load(f"folder:{tmp_path}", "test").pixels.paths == test.pixels.paths


def test_pictures_may_lie_deeper_and_a_class_without_enough_is_named(tmp_path, monkeypatch):
    for entry, colour in COLOURS.items():
        for i in range(5):
            picture(tmp_path / "all" / entry / "2026" / "may" / f"{i}.{'png' if i < 4 else 'JFIF'}", colour)
    (tmp_path / "all" / "ant" / "back").symlink_to(tmp_path / "all")
    parts = [load(f"folder:{tmp_path}/all", split, size=8) for split in ("train", "test")]
    assert [part.labels.bincount().tolist() for part in parts] == [[4, 4, 4], [1, 1, 1]]
    for i in range(4):
        (tmp_path / "all" / "bee" / "2026" / "may" / f"{i}.png").unlink()
    with pytest.raises(DataError, match="all/bee holds 1 pictures, and a class needs two to split"):
        load(f"folder:{tmp_path}/all", "train")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="no data set 'all'. Did you mean `folder:all`"):
        load("all", "train")


def test_imagenet100_takes_the_listed_classes_of_imagenet(tmp_path):
    for split in ("train", "val"):
        for i in range(101):
            picture(tmp_path / "imagenet" / split / f"n{i:08}" / "a.png", (i, i, i), (4, 4))
    with pytest.raises(DataError, match=r"no list of the 100 classes .*imagenet100.txt"):
        load("imagenet100", "train", root=tmp_path)
    (tmp_path / "imagenet100.txt").write_text("".join(f"n{i:08}\n" for i in range(99)))
    with pytest.raises(DataError, match="names 99 classes, not 100"):
        load("imagenet100", "train", root=tmp_path)
    (tmp_path / "imagenet100.txt").write_text("".join(f"n{i:08}\n" for i in range(1, 101)))
    test = load("imagenet100", "test", root=tmp_path, size=4)
    assert test.in_memory()[:, 0, 0, 0].tolist() == list(range(1, 101))
    assert {row.name: row.found for row in describe(tmp_path)}["imagenet100"]


@pytest.mark.parametrize(
    ("arrange", "split", "message"),
    [
        (lambda p: picture(p / "val" / "dog" / "a.png", (1, 1, 1)), "test", "has a folder dog that train/ has not"),
        (lambda p: (p / "val").rename(p / "later"), "test", "has no test/ nor val/ beside train/"),
        (lambda p: (p / "train").rename(p / "later"), "train", "has no train/ beside val/"),
        (lambda p: (p / "val" / "ant").rename(p / "ant"), "test", "has no folder ant for that class"),
        (lambda p: (p / "train" / "dog").mkdir(), "train", "dog holds no pictures"),
        (lambda p: (p / "classes.txt").write_text("ant\nant\n"), "train", "names a class twice"),
        (lambda p: (p / "classes.txt").write_text("ant\n"), "train", "names 1 classes, not at least two"),
        (lambda p: (p / "classes.txt").write_text("../ant\nbee"), "train", "names folders elsewhere"),
        (lambda p: (p / "classes.txt").write_bytes(b"\xff\xfe\x00"), "train", "not a readable text file"),
    ],
)
def test_a_folder_that_makes_no_sense_is_explained(animals, arrange, split, message):
    arrange(animals)
    with pytest.raises(DataError, match=message):
        load(f"folder:{animals}", split)


@pytest.mark.parametrize(("train", "test"), [("Train", "TEST"), ("Training", "Testing"), ("train", "Validation")])
def test_folders_of_splits_are_no_classes_however_they_are_written(animals, train, test):
    expected = [load(f"folder:{animals}", split).labels.tolist() for split in ("train", "test")]
    (animals / "train").rename(animals / train)
    (animals / "val").rename(animals / test)
    images = [load(f"folder:{animals}", split) for split in ("train", "test")]
    assert [some.labels.tolist() for some in images] == expected
    assert all(some.classes[:2] == ("ant", "bee") for some in images)


def test_a_folder_that_is_not_there_is_explained(tmp_path):
    with pytest.raises(DataError, match=f"There is no folder {tmp_path}/no"):
        load(f"folder:{tmp_path}/no", "train")


@FORKS
@pytest.mark.parametrize("workers", [0, 2])
def test_a_streamed_folder_gives_the_batches_of_its_decoded_images(animals, workers):
    folder = load(f"folder:{animals}", "train", size=8)
    augment = Augment(crop=1, flip=True, trivial=True, cutout=2)
    streamed = list(Batches(folder, 6, augment, seed=2, workers=workers).epoch(1))
    held = list(Batches(dataclasses.replace(folder, pixels=folder.in_memory()), 6, augment, seed=2).epoch(1))
    assert all(torch.equal(a, b) for p, q in zip(streamed, held, strict=True) for a, b in zip(p, q, strict=True))


def test_a_stream_resumes_and_splits_over_ranks_with_random_parts_of_pictures(animals):
    rng = np.random.default_rng(0)
    for path in (animals / "train").rglob("*.png"):
        Image.fromarray(rng.integers(0, 256, (20, 30, 3)).astype(np.uint8)).save(path)
    folder = load(f"folder:{animals}", "train", size=8)
    whole = [x for x, _ in Batches(folder, 6, Augment(area=0.3), workers=0).epoch(0)]
    later = [x for x, _ in Batches(folder, 6, Augment(area=0.3), workers=0).epoch(0, start=2)]
    ranks = [Batches(folder, 6, Augment(area=0.3), workers=0, rank=r, world=2).epoch(0) for r in range(2)]
    joined = [torch.cat([x for x, _ in step]) for step in zip(*ranks, strict=True)]
    plain = next(Batches(folder, 6, workers=0).epoch(0))[0]
    assert torch.equal(whole[2], later[0]) and torch.equal(torch.stack(whole), torch.stack(joined))
    assert not torch.equal(whole[0], plain)


@FORKS
@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_picture_in_a_stream_is_named(animals, workers):
    broken = animals / "train" / "bee" / "3.png"
    broken.write_bytes(broken.read_bytes()[:40])
    batches = Batches(load(f"folder:{animals}", "train", size=8), 6, workers=workers)
    with pytest.raises(DataError, match=r"^\S*bee/3.png is not a readable picture \(.*\): replace or remove it.$"):
        list(batches.epoch(0))


def test_a_stream_leaves_the_global_random_state_alone(animals):
    before = torch.get_rng_state()
    list(Batches(load(f"folder:{animals}", "train", size=8), 6, workers=0).epoch(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_validation_set_can_be_carved_from_a_folder(animals):
    train, validation = split_validation(load(f"folder:{animals}", "train"), 3, seed=0)
    assert len(train) == 15 and validation.labels.tolist() == [0, 1, 2]
    assert set(train.pixels.paths).isdisjoint(validation.pixels.paths)


@FORKS
def test_many_files_are_decoded_by_worker_processes_in_their_order(tmp_path):
    for number in range(150):
        picture(tmp_path / "train" / "ab"[number % 2] / f"{number}.png", (number, 0, 0))
    images = load(f"folder:{tmp_path}", "train", size=4)
    pixels = images.in_memory()
    assert pixels.shape == (150, 3, 4, 4) and (pixels[:, 0] == pixels[:, 0, :1, :1]).all()
    assert pixels[:, 0, 0, 0].tolist() == [int(path.stem) for path in images.pixels.paths]
    (tmp_path / "train" / "b" / "149.png").write_bytes(b"none")
    with pytest.raises(DataError, match=r"149.png is not a readable picture .* replace or remove it\.$"):
        images.in_memory()
    assert images.select(torch.empty(0, dtype=torch.int64)).in_memory().shape == (0, 3, 4, 4)
