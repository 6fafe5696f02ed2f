"""Moves arrays from one sharding to another without changing a bit.

A plain ``jit(lambda x: x, out_shardings=…)`` is not exact: XLA's CPU backend gathers bfloat16 through float32 and
quiets signaling NaNs in transit (measured on JAX 0.10 and 0.12), and XLA may widen a collective on any float narrower
than 32 bits. Such values therefore travel as unsigned integers holding their bits, between optimization barriers that
keep XLA from folding the two bitcasts into the collective. Wider types already travel exactly and are not bitcast,
which would cost 10–25 % more.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from numpy.typing import DTypeLike

GUARDS_OF_IMPLICIT_TRANSFERS = ("log", "disallow")
_UNSIGNED = {8: np.dtype(np.uint8), 16: np.dtype(np.uint16)}


def bit_width(dtype: DTypeLike) -> int:
    """Bits per value of ``dtype``: 4 for int4, although numpy stores it in a byte."""
    dtype = np.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.integer) and dtype != np.bool_:
        return int(jnp.iinfo(dtype).bits)
    if jnp.issubdtype(dtype, jnp.floating):
        return int(jnp.finfo(dtype).bits)
    return dtype.itemsize * 8


def bits_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Returns the dtype in which values travel: uint8 or uint16 for narrow floats, uint8 for sub-byte types."""
    dtype = np.dtype(dtype)
    width = bit_width(dtype)
    if width < 8:
        return _UNSIGNED[8]
    if jnp.issubdtype(dtype, jnp.floating) and width in _UNSIGNED:
        return _UNSIGNED[width]
    return dtype


def to_bits(x: jax.Array) -> jax.Array:
    """Returns the bits of ``x`` in a dtype that collectives preserve exactly (:func:`bits_dtype`). Use under ``jit``.

    PRNG keys become their key data (uint32, with one more dimension). Apply the collective to the result, then
    :func:`from_bits`.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return lax.optimization_barrier(jax.random.key_data(x))
    carrier = bits_dtype(x.dtype)
    if carrier == x.dtype:
        return x
    width = bit_width(x.dtype)
    if width < 8:
        nibbles = jnp.dtype(f"uint{width}")
        x = x if x.dtype == nibbles else lax.bitcast_convert_type(x, nibbles)
        return lax.optimization_barrier(x.astype(carrier))
    return lax.optimization_barrier(lax.bitcast_convert_type(x, carrier))


def from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    """Inverts :func:`to_bits`, or a view of host values as their bits, after the collective. Use under ``jit``."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(lax.optimization_barrier(bits), impl=key_impl(dtype))
    dtype = np.dtype(dtype)
    if bits.dtype == dtype:
        return bits
    bits = lax.optimization_barrier(bits)
    width = bit_width(dtype)
    if width < 8:
        nibbles = jnp.dtype(f"uint{width}")
        bits = (bits & ((1 << width) - 1)).astype(nibbles)  # numpy sign-extends into the rest of a byte
        return bits if dtype == nibbles else lax.bitcast_convert_type(bits, dtype)
    return lax.bitcast_convert_type(bits, dtype)


@functools.cache
def key_impl(dtype: DTypeLike) -> Any:
    """The implementation of a PRNG key dtype, as ``jax.random.key_impl`` returns it for arrays."""
    found = []
    jax.eval_shape(lambda keys: found.append(jax.random.key_impl(keys)), jax.ShapeDtypeStruct((), dtype))
    return found[0]


def constraint_sharding(sharding: object) -> Any:
    """Returns the same sharding over a mesh of Auto axes, the only kind that ``with_sharding_constraint`` accepts."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    types = (AxisType.Auto,) * len(sharding.mesh.axis_names)
    mesh = Mesh(np.asarray(sharding.mesh.devices), sharding.mesh.axis_names, axis_types=types)
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


@contextlib.contextmanager
def without_callers_settings() -> Iterator[None]:
    """Context that suspends settings of the caller for meshfeed's own compiled calls. Do not use under ``jit``.

    While a mesh is set (``jax.set_mesh``), JAX rejects compiled calls over other devices, and constraints and
    ``shard_map`` over a different mesh. ``jax_debug_nans`` and ``jax_debug_infs`` reject data that holds such values.
    ``jax_disable_jit`` drops ``out_shardings``. Guards against implicit transfers reject those that meshfeed makes on
    purpose; guards against explicit transfers stay, since a user who sets them means these transfers too.
    """
    config: Any = jax.config  # JAX 0.10 does not declare these settings
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.set_mesh(Mesh(np.empty((), object), ())))
        if config.jax_debug_nans:
            stack.enter_context(jax.debug_nans(False))
        if config.jax_debug_infs:
            stack.enter_context(jax.debug_infs(False))
        if config.jax_disable_jit:
            stack.enter_context(jax.disable_jit(False))
        if config.jax_transfer_guard_host_to_device in GUARDS_OF_IMPLICIT_TRANSFERS:
            stack.enter_context(jax.transfer_guard_host_to_device("allow"))
        if config.jax_transfer_guard_device_to_host in GUARDS_OF_IMPLICIT_TRANSFERS:
            stack.enter_context(jax.transfer_guard_device_to_host("allow"))
        yield


@functools.lru_cache(maxsize=256)
def _mover(dtypes: tuple[Any, ...], sources: tuple[Any, ...], targets: tuple[Any, ...]) -> Any:
    def move(values: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        moved = []
        for value, dtype, source, target in zip(values, dtypes, sources, targets, strict=True):
            # Constraining the bits to the old sharding and then to the new one keeps both gather and slice on the
            # bits. Without them, XLA may slice the float8 before the first bitcast, which quiets its NaNs (JAX 0.12),
            # or gather the bfloat16 after the second. Key data has more dimensions than the key's sharding; the extra
            # dimensions stay unsharded.
            bits = lax.with_sharding_constraint(to_bits(value), constraint_sharding(source))
            bits = lax.with_sharding_constraint(lax.optimization_barrier(bits), constraint_sharding(target))
            moved.append(from_bits(bits, dtype))
        return tuple(moved)

    return jax.jit(move, out_shardings=targets)


def reshard(arrays: Sequence[jax.Array], shardings: Sequence[jax.sharding.Sharding]) -> list[jax.Array]:
    """Moves ``arrays`` to ``shardings`` in one compiled call, bit for bit.

    Takes global arrays of any dtype, including PRNG keys, and one sharding for each. Every process with a device in the
    shardings must call it on the thread that runs the step, with the same arrays in the same order. Source and target
    shardings must cover the same set of devices.
    """
    move = _mover(tuple(array.dtype for array in arrays), tuple(array.sharding for array in arrays), tuple(shardings))
    with without_callers_settings():
        return list(move(tuple(arrays)))
