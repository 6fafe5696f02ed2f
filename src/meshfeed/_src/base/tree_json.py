"""The structure, shapes and dtypes of a pytree as JSON, for exchange between hosts without pickle."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from meshfeed._src.base.errors import SourceError
from meshfeed._src.base.exact_json import decode_value, encode_value
from meshfeed._src.base.types import PyTree


def tree_to_json(tree: PyTree) -> dict[str, Any]:
    """Describes a pytree whose leaves have a shape and a dtype.

    Supports dicts, lists, tuples and None. For any other node (a namedtuple, a registered class) the result holds an
    error message, which :func:`tree_from_json` raises; most hosts never need the description.
    """
    leaves, structure = jax.tree.flatten(tree)
    numbered = jax.tree.unflatten(structure, range(len(leaves)))
    try:
        containers = encode_value(numbered)
    except TypeError:
        containers = None
    if jax.tree.structure(decode_value(containers)) != structure:  # a namedtuple would become a tuple
        return {
            "unsupported": f"records of the structure {structure} cannot be described to other hosts: only dicts, lists, "
            "tuples and None can. Convert them to dicts, in decode= or in the source."
        }
    return {"tree": containers, "leaves": [[list(leaf.shape), np.dtype(leaf.dtype).name] for leaf in leaves]}


def tree_from_json(value: Any) -> PyTree:
    """Returns a pytree of ``jax.ShapeDtypeStruct`` from the result of :func:`tree_to_json`.

    Raises:
      SourceError: the structure is not supported.
    """
    if "unsupported" in value:
        raise SourceError(value["unsupported"])
    specs = [jax.ShapeDtypeStruct(tuple(shape), np.dtype(name)) for shape, name in value["leaves"]]
    return jax.tree.map(lambda number: specs[number], decode_value(value["tree"]))
