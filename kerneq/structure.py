"""States of several tensors: a tuple, list, dict, named tuple or dataclass of them as one tensor, for the solvers."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal, Self, final

import torch
from torch import Tensor

from .maps import AbstractMap, Function

Norm = Literal["joint", "leaf"]  # the residual of a state of several tensors: of all together, or of the worst
Tree = Any  # a tensor, or a tuple, list, dict, named tuple or dataclass of trees


@final
@dataclasses.dataclass(frozen=True)
class Structure:
    """The layout of a state as one tensor (batch, n), n the numbers of a sample in all its leaves together.

    `template` is the state without its numbers. Leaves keep their shapes and dtypes; the tensor has the widest dtype.
    """

    template: Tree
    shapes: tuple[torch.Size, ...]  # of a sample of each leaf
    dtypes: tuple[torch.dtype, ...]
    batched: bool  # whether dimension 0 of every leaf is the batch; if not, the state is one sample

    @classmethod
    def of(cls, state: Tree, batched: bool = True) -> Self:
        """Return the layout of this state."""
        leaves = list(_leaves(state, "the state"))
        if not leaves:
            raise ValueError(f"The state must hold a tensor, got {state!r}.")
        for where, leaf in leaves:
            if not leaf.is_floating_point() or (batched and leaf.dim() == 0) or leaf.numel() == 0:
                raise ValueError(
                    f"Every tensor of a state must be of floating-point numbers, not empty, "
                    f"{'and have the batch as its first dimension, ' if batched else ''}"
                    f"got dtype {leaf.dtype} and shape {tuple(leaf.shape)} for {where}."
                )
        batches = {len(leaf) for _, leaf in leaves} if batched else {1}
        if len(batches) > 1:
            raise ValueError(
                f"All tensors of a state must have the same batch in dimension 0, got {sorted(batches)}; "
                "give `batched=False` for a state without a batch."
            )
        shapes = tuple(leaf.shape[1:] if batched else leaf.shape for _, leaf in leaves)
        return cls(_blank(state), shapes, tuple(leaf.dtype for _, leaf in leaves), batched)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the one tensor."""
        widest = self.dtypes[0]
        for dtype in self.dtypes[1:]:
            widest = torch.promote_types(widest, dtype)
        return widest

    @property
    def sizes(self) -> list[int]:
        """The numbers of a sample in each leaf."""
        return [math.prod(shape) for shape in self.shapes]

    def pack(self, state: Tree) -> Tensor:
        """Return the state as one tensor (batch, n); refuse another structure, or other shapes."""
        leaves = list(_matched(self.template, state, "the state"))
        batch = len(leaves[0][1]) if self.batched else 1
        for (where, leaf), shape in zip(leaves, self.shapes, strict=True):
            if leaf.shape != ((batch, *shape) if self.batched else shape):
                sample = tuple(leaf.shape[1:] if self.batched else leaf.shape)
                raise ValueError(
                    f"f must keep the shapes of the state: it got {tuple(shape)} and gave {sample} for {where}"
                    f"{', a sample' if self.batched else ''}."
                )
        return torch.cat([leaf.reshape(batch, -1).to(self.dtype) for _, leaf in leaves], dim=1)

    def unpack(self, z: Tensor) -> Tree:
        """Return the state that stands in z (batch, n)."""
        parts = zip(torch.split(z, self.sizes, dim=1), self.shapes, self.dtypes, strict=True)
        leading = (len(z),) if self.batched else ()
        return _filled(self.template, iter([part.reshape(*leading, *shape).to(dtype) for part, shape, dtype in parts]))


@final
@dataclasses.dataclass(frozen=True)
class Packed(AbstractMap):
    """A map of structured states as a map of tensors (batch, n)."""

    f: AbstractMap  # of structured states, whatever its annotations say
    structure: Structure
    leafwise: bool = False  # whether the residual is that of the worst tensor of a state, not of all together

    def __call__(self, z: Tensor) -> Tensor:
        return self.structure.pack(self.f(self.structure.unpack(z)))

    def rows(self, index: Tensor) -> Self | None:
        rest = self.f.rows(index) if self.structure.batched else None
        return None if rest is None else dataclasses.replace(self, f=rest)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.f.tensors()

    def on(self, *tensors: Tensor) -> Self:
        return dataclasses.replace(self, f=self.f.on(*tensors))


def pack_state(f: AbstractMap, z0: Tree, batched: bool, norm: Norm) -> tuple[AbstractMap, Tensor | None]:
    """Return map and start as a solver takes them: on one tensor (batch, ...), as they are where z0 is one."""
    if norm not in ("joint", "leaf"):
        raise ValueError(f"`norm` must be 'joint' or 'leaf', got {norm!r}.")
    structure = None if z0 is None or (batched and isinstance(z0, Tensor)) else Structure.of(z0, batched)
    z = z0 if structure is None else structure.pack(z0)
    if isinstance(f, Function) and isinstance(z, Tensor) and z.dim() > 0:
        f = f.of_batch(len(z))
    return f if structure is None else Packed(f, structure, norm == "leaf"), z


def unpack_state(f: AbstractMap, z: Tensor) -> Tree:
    """Return a state of the map that `pack_state` has made as its user knows it."""
    return f.structure.unpack(z) if isinstance(f, Packed) else z


def keep_samples(f: AbstractMap) -> AbstractMap:
    """Return the map of a function such that no sample leaves a solve before the others."""
    if isinstance(f, Packed):
        return dataclasses.replace(f, f=keep_samples(f.f))
    if not isinstance(f, Function):
        raise TypeError(f"The gradient `Shine` is for functions, got {type(f).__name__}: use `Implicit`.")
    return dataclasses.replace(f, restrictable=False)


def _children(tree: Tree) -> dict[str, Tree] | None:
    """Return what is inside of a node by its name; None for what is no node."""
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {f".{field.name}": getattr(tree, field.name) for field in dataclasses.fields(tree)}
    if isinstance(tree, dict):
        return {f"[{key!r}]": value for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return {f"[{index}]": value for index, value in enumerate(tree)}
    return None


def _leaves(tree: Tree, where: str) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor with its place; anything that is neither a tensor nor a node is refused."""
    if isinstance(tree, Tensor):
        yield where, tree
        return
    children = _children(tree)
    if children is None:
        raise TypeError(
            f"A state must be a tensor, or a tuple, list, dict, named tuple or dataclass of tensors, "
            f"got {type(tree).__name__} for {where}."
        )
    for name, child in children.items():
        yield from _leaves(child, where + name)


def _matched(template: Tree, tree: Tree, where: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the tree in the order of the template, whose structure it must have."""
    names, children = _children(template), _children(tree)
    if names is None:
        if not isinstance(tree, Tensor):
            raise TypeError(f"f must return the structure of the state: a tensor for {where}, got {_word(tree)}.")
        yield where, tree
        return
    if isinstance(tree, Tensor) or children is None or set(children) != set(names):
        raise TypeError(f"f must return the structure of the state: {_word(template)} for {where}, got {_word(tree)}.")
    for name in names:
        yield from _matched(_children(template)[name], children[name], where + name)  # type: ignore[index]


def _word(tree: Tree) -> str:
    """Return what a tree is, in words: `dict with ['u'], ['v']`."""
    children = None if isinstance(tree, Tensor) else _children(tree)
    if children is None:
        return f"a {type(tree).__name__}"
    return f"a {type(tree).__name__} with {', '.join(children) or 'nothing'}"


def _blank(tree: Tree) -> Tree:
    """Return the tree with None for every tensor: what is kept of a state is not its memory."""
    return _filled(tree, iter(lambda: None, 0))


def _filled(tree: Tree, leaves: Iterator[Any]) -> Tree:
    """Return the tree with the next of `leaves` for every leaf."""
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {field.name: _filled(getattr(tree, field.name), leaves) for field in dataclasses.fields(tree)}
        return dataclasses.replace(tree, **fields)
    if isinstance(tree, dict):
        return {key: _filled(value, leaves) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_filled(item, leaves) for item in tree]
    if isinstance(tree, tuple):
        items = tuple(_filled(item, leaves) for item in tree)
        return items if type(tree) is tuple else type(tree)(*items)  # a named tuple takes them one by one
    return next(leaves)
