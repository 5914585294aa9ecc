"""States of several tensors: packing, unpacking, and what is refused."""

import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kerneq.structure import Structure


class Pair(NamedTuple):
    u: Tensor
    v: Tensor


@dataclasses.dataclass
class Fields:
    height: Tensor
    flow: dict[str, Tensor]


U, V, W = torch.randn(3, 2), torch.randn(3, 4, 5), torch.randn(3, 1).double()
STATES = [U, (U, V), [U, (V, W)], {"v": V, "u": U}, Pair(U, V), Fields(U, {"x": V, "y": W})]


def tensors_of(tree):
    if isinstance(tree, Tensor):
        return [tree]
    if dataclasses.is_dataclass(tree):
        return [t for f in dataclasses.fields(tree) for t in tensors_of(getattr(tree, f.name))]
    return [t for item in (tree.values() if isinstance(tree, dict) else tree) for t in tensors_of(item)]


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("state", STATES, ids=lambda s: type(s).__name__)
def test_unpacking_undoes_packing_in_structure_shapes_and_dtypes(state, batched):
    structure = Structure.of(state, batched)
    z = structure.pack(state)
    assert z.shape[0] == (3 if batched else 1)
    assert z.dtype == (torch.float64 if any(t.dtype == torch.float64 for t in tensors_of(state)) else torch.float32)
    again = structure.unpack(z)
    assert type(again) is type(state)
    for got, want in zip(tensors_of(again), tensors_of(state), strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)


def test_a_dict_is_matched_by_its_keys_not_by_their_order():
    u, v = torch.randn(3, 2), torch.randn(3, 2)
    structure = Structure.of({"u": u, "v": v})
    assert torch.equal(structure.pack({"v": v, "u": u}), torch.cat([u, v], 1))


def test_gradients_go_through():
    state = (torch.randn(3, 2, requires_grad=True), torch.randn(3, 4, requires_grad=True))
    structure = Structure.of(state)
    u, v = structure.unpack(2 * structure.pack(state))
    gu, gv = torch.autograd.grad((u.sum() + 3 * v.sum()), state)
    assert gu.eq(2).all() and gv.eq(6).all()


@pytest.mark.parametrize(
    "state, words",
    [
        ((torch.zeros(3, 2), torch.zeros(4, 2)), r"same batch in dimension 0, got \[3, 4\]"),
        ((torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64)), r"got dtype torch.int64 .* for the state\[1\]"),
        ({"u": torch.zeros(3), "v": 1.0}, r"got float for the state\['v'\]"),
        ((), "must hold a tensor"),
    ],
)
def test_what_is_no_state_is_refused_in_words(state, words):
    with pytest.raises((TypeError, ValueError), match=words):
        Structure.of(state)


@pytest.mark.parametrize(
    "gives, words",
    [
        ((torch.zeros(3, 2),), r"a tuple with \[0\], \[1\] for the state, got a tuple with \[0\]"),
        ((torch.zeros(3, 2), None), r"a tensor for the state\[1\], got a NoneType"),
        ((torch.zeros(3, 2), torch.zeros(3, 5)), r"got \(4,\) and gave \(5,\) for the state\[1\]"),
        (torch.zeros(3, 6), "got a Tensor"),
    ],
)
def test_another_structure_is_refused_in_words(gives, words):
    structure = Structure.of((torch.zeros(3, 2), torch.zeros(3, 4)))
    with pytest.raises((TypeError, ValueError), match=words):
        structure.pack(gives)
