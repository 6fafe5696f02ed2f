"""The private part of jaxlib that meshfeed uses: the registry of pytrees, which is there without the import of JAX.

``import jax`` takes 0.4 s of CPU time more than ``import jaxlib``, and 40 MB. A worker process that reads and decodes records
needs nothing else of it. The registry is that of ``jax.tree_util``, so structures are equal to those of JAX.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import ml_dtypes  # noqa: F401  with it, as with JAX, numpy knows bfloat16 and others by name; decoders rely on that

Flatten = Callable[[Any], tuple[list[Any], Any]]
FlattenWithPath = Callable[..., tuple[list[tuple[Any, Any]], Any]]


def tree_functions() -> tuple[Flatten, FlattenWithPath]:
    """Returns ``tree_flatten`` and ``tree_flatten_with_path`` of ``jax.tree_util``, or the same without the import of JAX."""
    registry = None if "jax" in sys.modules else pytree_registry()
    if registry is None:
        import jax.tree_util

        return jax.tree_util.tree_flatten, cast("FlattenWithPath", jax.tree_util.tree_flatten_with_path)
    return _without_jax(registry)


def pytree_registry() -> Any | None:
    """Returns the registry behind ``jax.tree_util``, or None if this jaxlib has none under the name that is known."""
    try:
        from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

        registry: Any = _jax.pytree.default_registry()
    except (ImportError, AttributeError):
        return None
    return registry if hasattr(registry, "flatten") and hasattr(registry, "flatten_with_path") else None


def _without_jax(registry: Any) -> tuple[Flatten, FlattenWithPath]:
    def flatten(tree: Any) -> tuple[list[Any], Any]:
        leaves, treedef = registry.flatten(tree)
        return _with_jax().tree_flatten(tree) if _has_dict(leaves) else (leaves, treedef)

    def flatten_with_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Any]:
        if is_leaf is None:
            pairs, treedef = registry.flatten_with_path(tree)
            if not _has_dict([leaf for _, leaf in pairs]):
                return pairs, treedef
        return _with_jax().tree_flatten_with_path(tree, is_leaf)

    return flatten, flatten_with_path


def _has_dict(leaves: list[Any]) -> bool:
    """Whether a leaf is a dict, such as an OrderedDict, which becomes a node when JAX is imported."""
    for leaf in leaves:  # noqa: SIM110  a generator takes longer, and this runs for each record
        if isinstance(leaf, dict):
            return True
    return False


def _with_jax() -> Any:
    import jax.tree_util

    return jax.tree_util
