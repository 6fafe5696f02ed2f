"""Typed forms of JAX's tree functions, which pyright cannot see through; paths as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

import jax

from meshfeed._src.base.types import PyTree


class TreeDef(Protocol):
    """The structure of a pytree: a ``jax.tree_util.PyTreeDef``."""

    def unflatten(self, leaves: Iterable[object], /) -> PyTree:
        """Returns the pytree of this structure with these leaves."""


def flatten(tree: PyTree) -> tuple[list[Any], TreeDef]:
    """Returns the leaves and the structure."""
    return cast("tuple[list[Any], TreeDef]", jax.tree.flatten(tree))


def flatten_with_paths(
    tree: PyTree, is_leaf: Callable[[PyTree], bool] | None = None
) -> tuple[list[tuple[str, Any]], TreeDef]:
    """Returns ``(path, leaf)`` pairs, with paths as formatted by ``jax.tree_util.keystr``, and the structure."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in pairs], cast("TreeDef", treedef)
