"""JAX's functions of pytrees, which import JAX only in a process that needs more of it.

Modules that worker processes load use these instead of ``jax.tree``: a worker is ready in half the time without JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, cast

from meshfeed._src.base.errors import SourceError, shorten
from meshfeed._src.base.jaxlib_internals import tree_functions
from meshfeed._src.base.types import PyTree

if TYPE_CHECKING:
    import jax

_SHOWN_CHARACTERS = 80


class TreeDef(Protocol):
    """The structure of a pytree: a ``jax.tree_util.PyTreeDef``."""

    num_nodes: int

    def unflatten(self, leaves: Iterable[object], /) -> PyTree:
        """Returns the pytree of this structure with these leaves."""

    def flatten_up_to(self, tree: PyTree, /) -> list[Any]:
        """Returns what a pytree that begins with this structure has at each of its leaves."""
        ...


tree_flatten, tree_flatten_with_path = tree_functions()


def flatten(tree: PyTree) -> tuple[list[Any], TreeDef]:
    """Returns the leaves and the structure.

    Raises:
      SourceError: a dict has keys that cannot be sorted, such as strings and numbers.
    """
    try:
        return cast("tuple[list[Any], TreeDef]", tree_flatten(tree))
    except ValueError as error:
        raise _unsorted(tree, error) from error


def flatten_with_paths(
    tree: PyTree, is_leaf: Callable[[PyTree], bool] | None = None
) -> tuple[list[tuple[str, Any]], TreeDef]:
    """Returns ``(path, leaf)`` pairs, with paths as formatted by ``jax.tree_util.keystr``, and the structure.

    Raises:
      SourceError: a dict has keys that cannot be sorted, such as strings and numbers.
    """
    try:
        pairs, treedef = tree_flatten_with_path(tree, is_leaf)
    except ValueError as error:
        raise _unsorted(tree, error) from error
    return [("".join(map(str, path)), leaf) for path, leaf in pairs], cast("TreeDef", treedef)


def leaves(tree: PyTree) -> list[Any]:
    """Returns the leaves, as ``jax.tree.leaves`` does."""
    return tree_flatten(tree)[0]


def map_leaves(function: Callable[..., Any], tree: PyTree, *others: PyTree) -> PyTree:
    """Returns a pytree of ``function(leaf, *parts of the others)``, as ``jax.tree.map`` does."""
    found, treedef = tree_flatten(tree)
    return treedef.unflatten(map(function, found, *(treedef.flatten_up_to(other) for other in others)))


def num_bytes(tree: PyTree) -> int:
    """Total bytes of all leaves."""
    return sum([leaf.nbytes for leaf in leaves(tree)])


def spec(shape: Iterable[int], dtype: Any) -> jax.ShapeDtypeStruct:
    """Returns a ``jax.ShapeDtypeStruct``."""
    import jax

    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def _unsorted(tree: PyTree, error: ValueError) -> SourceError:
    """Returns an error that says more than JAX's, which names neither the dict nor its keys."""
    keys = f" with the keys {shorten(repr(list(tree)), _SHOWN_CHARACTERS)}" if isinstance(tree, dict) else ""
    return SourceError(
        f"a {type(tree).__name__}{keys} is not a pytree: {error} The keys of a dict must be of one type that can be sorted; "
        "use strings."
    )
