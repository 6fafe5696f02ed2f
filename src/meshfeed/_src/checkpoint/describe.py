"""What is stored, as an abstract tree: the template with which a restore gives everything back as it was saved."""

from __future__ import annotations

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, Sharding

from meshfeed._src.base.coordination import process_count
from meshfeed._src.base.types import PyTree
from meshfeed._src.checkpoint.leaves import Leaf, SavedLeaf, leaf_name, tree_of
from meshfeed._src.checkpoint.stored import StoredArrays


def abstract_tree_of(stored: StoredArrays) -> PyTree:
    """Returns the saved tree with a description at each leaf; passing it to a restore restores everything as it was.

    Arrays become ``jax.ShapeDtypeStruct``, with the saved sharding if this job has as many devices. Numpy values become
    placeholders of the same shape and dtype. Numbers and text are themselves.
    """
    if stored.manifest.skeleton is not None:
        return tree_of(stored.manifest.skeleton, lambda name: stored.saved(name).placeholder())
    # Use Orbax's own description of the tree, to return the same containers as Orbax.
    arrays = ocp.type_handlers.ArrayHandler(metadata_key=stored.metadata_key)
    orbax = ocp.PyTreeCheckpointHandler(type_handler_registry=type_handlers(arrays))
    return jax.tree_util.tree_map_with_path(
        lambda path, described: _placeholder(stored.saved(leaf_name(path)), described),
        orbax.metadata(stored.directory).tree,
    )


def _placeholder(saved: SavedLeaf, described: object) -> Leaf:
    """Returns the placeholder of a leaf of plain Orbax, with the recorded sharding."""
    placeholder = saved.placeholder()
    recorded = _recorded_sharding(described, len(saved.shape))
    if recorded is not None and isinstance(placeholder, jax.ShapeDtypeStruct):
        return placeholder.update(sharding=recorded)
    return placeholder


def _recorded_sharding(described: object, rank: int) -> Sharding | None:
    """Returns the sharding that plain Orbax recorded; None if this job's devices do not allow it on every process."""
    convert = getattr(getattr(described, "sharding", None), "to_jax_sharding", None)
    if convert is None:
        return None
    try:
        sharding: Sharding = convert()
    except Exception:  # it is for a different topology, for which Orbax raises various errors
        return None
    if len({device.process_index for device in sharding.device_set}) < process_count():
        return None
    return cut_to_rank(sharding, rank)


def cut_to_rank(sharding: Sharding, rank: int) -> Sharding:
    """Truncates a spec to ``rank``: Orbax records the sharding of a PRNG key's data, which has more dimensions."""
    if not isinstance(sharding, NamedSharding) or any(sharding.spec[rank:]):
        return sharding
    spec = jax.sharding.PartitionSpec(*sharding.spec[:rank])
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def type_handlers(arrays: ocp.type_handlers.ArrayHandler) -> ocp.type_handlers.TypeHandlerRegistry:
    """Returns an Orbax registry of type handlers that uses ``arrays`` for ``jax.Array``."""
    handlers = ocp.type_handlers
    return handlers.create_type_handler_registry(
        (int, handlers.ScalarHandler()),
        (float, handlers.ScalarHandler()),
        (np.ndarray, handlers.NumpyHandler()),
        (jax.Array, arrays),
        (str, handlers.StringHandler()),
    )
