"""The structure, shapes and dtypes of a pytree as JSON, so that hosts can send them without pickle."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from meshfeed._src.base.errors import SourceError
from meshfeed._src.base.exact_json import decode_value, encode_value
from meshfeed._src.base.types import PyTree


def tree_to_json(tree: PyTree) -> dict[str, Any]:
    """Describes a pytree whose leaves have a shape and a dtype.

    Dicts, lists, tuples and None can be described. For any other node (a namedtuple, a registered class) the result
    carries an error instead, which :func:`tree_from_json` raises: most hosts never need the description.
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
    """A pytree of ``jax.ShapeDtypeStruct``, from what :func:`tree_to_json` gave.

    Raises:
      SourceError: the structure could not be described.
    """
    if "unsupported" in value:
        raise SourceError(value["unsupported"])
    specs = [jax.ShapeDtypeStruct(tuple(shape), np.dtype(name)) for shape, name in value["leaves"]]
    return jax.tree.map(lambda number: specs[number], decode_value(value["tree"]))
