"""Conversions of the values of a leaf, once they are restored, to the leaf that was requested."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Sharding
from numpy.typing import NDArray

from meshfeed._src.base.errors import CheckpointError
from meshfeed._src.checkpoint.leaves import Leaf, SavedLeaf, is_key, key_dtype, keys_of
from meshfeed._src.checkpoint.options import short

Placement: TypeAlias = "Sharding | Format"
"""The requested placement of an array: a sharding of any memory kind, or a Format, which also has a layout."""


def as_python(value: Leaf, name: str, kind: Callable[[Leaf], Leaf]) -> Leaf:
    """Returns a Python value as another type of number or text."""
    try:
        return kind(value)
    except Exception as error:  # of a subclass of a Python type, such as an enum
        raise CheckpointError(
            f"leaf {name!r} is {short(value)}, which is not of the requested type: {error}. Request "
            f"{type(value).__name__}."
        ) from error


def from_bytes(data: NDArray[np.generic], saved: SavedLeaf, dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    """Returns the array that is stored as flat bytes, uint8[bytes]."""
    return data.view(saved.dtype).reshape(saved.shape).astype(dtype, copy=False)


def from_host(values: NDArray[np.generic], sharding: Sharding) -> jax.Array:
    """Returns a ``jax.Array`` of values that this process holds."""
    # A copy for each device: if two aliased one buffer, donating one shard would overwrite the other.
    # The dtype is for hosts without a device in the sharding.
    return jax.make_array_from_callback(
        values.shape, sharding, lambda index: np.array(values[index]), dtype=values.dtype
    )


@functools.lru_cache(maxsize=64)
def _key_wrapper(impl: str, sharding: Sharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(functools.partial(jax.random.wrap_key_data, impl=impl), out_shardings=sharding)


def wrap_keys(data: jax.Array, impl: str, sharding: Sharding) -> jax.Array:
    """Returns the PRNG keys of an implementation from their data."""
    if data.addressable_shards:
        return _key_wrapper(impl, sharding)(data)
    # A process without a device of this sharding cannot run the compiled call.
    shape = keys_of(data.shape, impl)
    return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=key_dtype(impl))


def sharding_of(placement: Placement | None) -> Sharding | None:
    """Returns the sharding of a placement."""
    return placement if isinstance(placement, Sharding) else getattr(placement, "sharding", None)


def in_default_memory(sharding: Sharding) -> Sharding:
    """Returns the same sharding in the devices' default memory, where collectives can run."""
    default = next(iter(sharding.device_set)).default_memory().kind
    return sharding if sharding.memory_kind in (None, default) else sharding.with_memory_kind(default)


def with_placement(array: jax.Array, placement: Placement) -> jax.Array:
    """Returns ``array`` with exactly the requested sharding, memory kind and layout."""
    sharding = sharding_of(placement)
    assert sharding is not None
    if sharding is not placement or in_default_memory(sharding) is not sharding:
        return jax.device_put(array, placement)
    if array.sharding == sharding or is_key(array):
        return array
    # The compiler returns PartitionSpec('a') for a requested ('a', None): the same layout, but they compare unequal.
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(
        array.shape, sharding, shards, dtype=None if shards else array.dtype
    )
