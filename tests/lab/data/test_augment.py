"""Policies, cutout, zoom and mixing as Batches apply them."""

import dataclasses

import numpy as np
import pytest
import torch
from data_files import noise, raw

from kerneq.lab.data import Augment, Batches, Images
from kerneq.lab.data.batches import BatchRows, crop_and_resize, draw_boxes


def changed(images: Images, augment: Augment) -> torch.Tensor:
    x, _ = next(Batches(images, len(images), augment, shuffle=False).epoch(0))
    return (raw(x) != images.pixels).flatten(1).any(1)


@pytest.mark.parametrize("augment", [Augment(trivial=True), Augment(randaugment=1)], ids=["trivial", "rand"])
def test_share_is_the_share_of_pictures_that_change(augment):
    images = noise(1400, 16)
    # the identity is one operation of fourteen, and autocontrast leaves full-range pictures as they are
    assert 0.75 < changed(images, augment).double().mean() < 13 / 14 + 0.03
    assert 0.37 < changed(images, dataclasses.replace(augment, share=0.5)).double().mean() < 0.5
    assert not changed(images, dataclasses.replace(augment, share=0.0)).any()


def test_more_randaugment_operations_change_more():
    images = noise(600, 16)
    counts = [int(changed(images, Augment(randaugment=n)).sum()) for n in (0, 1, 2, 3)]
    assert counts[0] == 0 and counts == sorted(counts) and counts[3] > counts[1]


def test_cutout_sets_one_square_to_the_mean():
    images = noise(300, 16)
    x, _ = next(Batches(images, 300, Augment(cutout=6), shuffle=False).epoch(0))
    hole = (x == 0).all(1)
    rows, columns = hole.any(2).sum(1), hole.any(1).sum(1)
    assert torch.equal(hole.flatten(1).sum(1), rows * columns)  # a rectangle
    assert rows.max() == columns.max() == 6 and rows.min() >= 3  # clipped by the border, at most by half
    assert torch.equal(raw(x)[~hole.unsqueeze(1).expand_as(x)], images.pixels[~hole.unsqueeze(1).expand_as(x)])


def test_boxes_have_the_asked_area_and_lie_inside():
    left, top, right, bottom = draw_boxes(BatchRows(0, 0, 0, 5000, 0, 5000), 0.3).T
    area = (right - left) * (bottom - top)
    assert min(left.min(), top.min()) >= 0 and max(right.max(), bottom.max()) <= 1
    assert 0.29 < area.min() < 0.33 and 0.95 < area.max() <= 1 and left.std() > 0.05


def test_zooming_on_the_whole_picture_changes_nothing_and_on_a_quarter_shows_that_quarter():
    pixels = noise(4, 16).pixels
    whole = crop_and_resize(pixels, np.tile([0.0, 0.0, 1.0, 1.0], (4, 1)))
    assert torch.equal(whole, pixels)
    flat = torch.zeros(1, 1, 16, 16, dtype=torch.uint8)
    flat[:, :, 8:, :8] = 90
    assert (crop_and_resize(flat, np.array([[0.0, 0.5, 0.5, 1.0]]))[:, :, 1:, :-1] == 90).all()


def mixed(augment: Augment, count: int = 400) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mixed pictures and targets beside what the same batch is without mixing; mixing changes no other draw."""
    images = noise(count, 16)
    x, target = next(Batches(images, count, augment).epoch(0))
    plain, labels = next(Batches(images, count).epoch(0))
    return x, target, plain, labels


def partner(x: torch.Tensor) -> torch.Tensor:
    return x[torch.arange(len(x)) ^ 1]


def test_mixup_blends_neighbours_and_their_labels_in_the_same_proportion():
    x, target, plain, labels = mixed(Augment(mixup=1.0))
    one_hot = torch.nn.functional.one_hot(labels, 5).float()
    other = labels != partner(labels)
    own = target.gather(1, labels[:, None])[:, 0]
    blend = own[:, None, None, None] * plain + (1 - own[:, None, None, None]) * partner(plain)
    torch.testing.assert_close(x[other], blend[other])
    torch.testing.assert_close(target[other], (own[:, None] * one_hot + (1 - own[:, None]) * partner(one_hot))[other])
    assert own[other].std() > 0.2  # Beta(1, 1) is uniform: λ is drawn for every picture


def test_only_the_chosen_share_of_the_pictures_is_mixed():
    for settings in (Augment(cutmix=1.0, mixed=0.0), Augment(mixup=1.0, mixed=0.0)):
        x, target, plain, labels = mixed(settings)
        assert torch.equal(x, plain) and torch.equal(target.argmax(1), labels) and target.max(1).values.eq(1).all()
    x, _, plain, _ = mixed(Augment(mixup=1.0, mixed=0.5))
    whole, _, _, _ = mixed(Augment(mixup=1.0))
    same = (x == plain).flatten(1).all(1)
    assert 0 < same.sum() < len(x) and torch.equal(x[~same], whole[~same])


def test_cutmix_pastes_a_box_of_the_neighbour_and_counts_its_pixels():
    x, target, plain, labels = mixed(Augment(cutmix=1.0))
    mine, theirs = (x == plain).all(1), (x == partner(plain)).all(1)
    assert (mine | theirs).all()
    other = labels != partner(labels)
    share = (~mine).flatten(1).double().mean(1)
    torch.testing.assert_close(1 - target.gather(1, labels[:, None])[other, 0].double(), share[other])
    rows, columns = (~mine).any(2).sum(1), (~mine).any(1).sum(1)
    assert torch.equal((~mine).flatten(1).sum(1), rows * columns) and share.std() > 0.1


def test_with_both_each_picture_gets_one_of_the_two():
    x, target, plain, _ = mixed(Augment(mixup=1.0, cutmix=1.0))
    boxed = ((x == plain).all(1) | (x == partner(plain)).all(1)).flatten(1).all(1)
    assert 0.4 < boxed.double().mean() < 0.6
    torch.testing.assert_close(target.sum(1), torch.ones(400))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"crop": -1}, "`crop` must be at least 0, got -1"),
        ({"mixup": -0.1}, "`mixup` must be at least 0"),
        ({"area": 0.0}, "`area` must be greater than 0"),
        ({"share": 1.5}, "`share` must be at most 1, got 1.5"),
        ({"magnitude": 31}, "`magnitude` must be at most 30"),
        ({"padding": "mirror"}, "`padding` must be one of reflect, zero, got 'mirror'"),
        ({"randaugment": 2, "trivial": True}, "exclude each other"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Augment(**settings)


def test_a_policy_on_pictures_that_are_neither_grey_nor_colour_is_refused():
    with pytest.raises(ValueError, match="need 1 or 3 channels, these pictures have 4"):
        Batches(noise(8, channels=4), 4, Augment(trivial=True))
