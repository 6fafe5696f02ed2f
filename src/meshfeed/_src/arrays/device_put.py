"""Puts one leaf's host array on devices as one global ``jax.Array``.

The fast path is ``batched_device_put``, the function underneath JAX's own transfers. It is 1.5 to 5 times as fast as the
public API because nothing is recomputed per batch. It is private, so it is probed before use (``base/jax_internals.py``)
and, if a call fails, abandoned with one log line. The public path (``jax.make_array_from_callback``) gives the same array
and also makes the first array of each kind: the fast call takes its abstract value from that array, which avoids
constructing JAX's private classes.

Host arrays are first converted to dtypes that JAX supports: native byte order, and 32 bits if x64 is off.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Self

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding

from meshfeed._src.base import memory
from meshfeed._src.base.errors import SourceError
from meshfeed._src.base.jax_internals import FastCall, probe_fast_call
from meshfeed._src.base.trees import flatten_with_paths
from meshfeed._src.base.types import MeshDevice, PyTree
from meshfeed._src.plan.plan import LeafPlan, broadcast_shardings, check_divisible, cut_spec, sharded_dimensions

_NARROWED: dict[np.dtype, np.dtype] = {
    np.dtype(wide): np.dtype(narrow)
    for wide, narrow in (
        (np.int64, np.int32),
        (np.uint64, np.uint32),
        (np.float64, np.float32),
        (np.complex128, np.complex64),
    )
}

_AS_THEY_ARE = frozenset(
    np.dtype(name) for name in ("int32", "float32", "uint8", "bool", "int8", "uint32")
)  # these need no conversion in any mode and skip the checks


def narrowed_dtype(dtype: npt.DTypeLike, x64: bool) -> np.dtype:
    """Returns the dtype that values of ``dtype`` have on device.

    Args:
      dtype: dtype of the host array.
      x64: whether 64-bit dtypes are kept (``jax_enable_x64``).
    """
    native: np.dtype = np.dtype(dtype).newbyteorder("=")
    return native if x64 else _NARROWED.get(native, native)


def _is_numeric(dtype: np.dtype) -> bool:
    if dtype.names is None and dtype.type.__module__.split(".")[0] == "ml_dtypes":
        return True
    return dtype.kind in "biu" or (dtype.kind in "fc" and dtype.itemsize <= (8 if dtype.kind == "f" else 16))


def narrow(leaf: npt.ArrayLike, path: str, x64: bool) -> np.ndarray:
    """Returns the leaf as an array of a dtype that JAX supports.

    Args:
      leaf: array ``[rows, ...]``. Returned unchanged if its dtype needs no conversion, else as a new aligned copy.
      path: the leaf's path, for messages.
      x64: whether 64-bit dtypes are kept. If not, int64 and uint64 become 32 bits wide if every value fits, and
        float64 and complex128 are rounded to 32 bits per component.

    Raises:
      SourceError: an integer does not fit in 32 bits, or the dtype is not numeric (strings, objects, times).
    """
    array = leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf)
    if array.dtype in _AS_THEY_ARE:
        return array
    if not _is_numeric(array.dtype):
        raise SourceError(
            f"leaf {path or '(the only one)'} has dtype {array.dtype} and shape {array.shape}, but a jax.Array holds "
            f"only bools, integers, floats and complex numbers. Turn it into numbers in `decode`, or drop it there."
        )
    dtype = narrowed_dtype(array.dtype, x64)
    if dtype == array.dtype and array.dtype.isnative:
        return array
    if dtype.kind in "iu" and dtype.itemsize < array.dtype.itemsize:
        _check_fits(array, dtype, path)
    with np.errstate(over="ignore"):  # an out-of-range float becomes inf, as in jax.device_put
        return memory.copy(array, dtype)


def _check_fits(array: np.ndarray, dtype: np.dtype, path: str) -> None:
    if not array.size:
        return
    limits = np.iinfo(dtype)
    smallest, largest = array.min(), array.max()
    if smallest >= limits.min and largest <= limits.max:
        return
    bad = (array < limits.min) | (array > limits.max)
    place = tuple(int(i[0]) for i in np.nonzero(bad))
    raise SourceError(
        f"leaf {path or '(the only one)'} of dtype {array.dtype} holds {int(array[place])} at {place}, which does not "
        f"fit in {dtype} ({limits.min}..{limits.max}), and jax_enable_x64 is off. Map the values to a smaller range "
        f"in `decode`, or enable 64-bit types with jax.config.update('jax_enable_x64', True)."
    )


_log = logging.getLogger("meshfeed.put")

BlockOf = Callable[[tuple[slice, ...] | None], np.ndarray]
"""Index of a block in the global array → the block."""

# Without the *_explicit levels: they also cover explicit transfers, so a user who sets them means these transfers too.
_GUARDS_OF_IMPLICIT_TRANSFERS = ("log", "disallow")


class DevicePut:
    """The transfer path (private or public) shared by all leaves of one feed.

    Args:
      fast_call: the private call (``jax_internals.probe_fast_call``), or None to use only the public API.
      x64: whether 64-bit dtypes are enabled. Passed explicitly because the ``jax.enable_x64`` context is
        thread-local.
    """

    def __init__(self, fast_call: FastCall | None, x64: bool) -> None:
        self.fast_call = fast_call
        self.x64 = x64

    @classmethod
    def default(cls) -> Self:
        """JAX's private fast call if available, and the current value of ``jax_enable_x64`` on this thread."""
        return cls(probe_fast_call(), bool(jax.config.jax_enable_x64))  # pyright: ignore[reportAttributeAccessIssue] # JAX 0.10 does not declare it

    def give_up(self, error: Exception) -> None:
        """Switches to the public API for the rest of the feed's life."""
        if self.fast_call is not None:
            self.fast_call = None
            _log.warning(
                "batched_device_put of JAX %s no longer accepts the expected arguments (%s: %s); from now on, arrays are "
                "assembled by the public make_array_from_callback, which gives the same result more slowly",
                jax.__version__,
                type(error).__name__,
                error,
            )

    def transfer(self) -> contextlib.AbstractContextManager[object]:
        """Context for a transfer: :meth:`allowed`, annotated for the profiler."""
        annotation = jax.profiler.TraceAnnotation("meshfeed.transfer")
        return _both(self.allowed(), annotation) if _is_guarded() else annotation

    def allowed(self) -> contextlib.AbstractContextManager[object]:
        """Context in which a guard against implicit transfers permits these transfers, which are intended."""
        return jax.transfer_guard_host_to_device("allow") if _is_guarded() else contextlib.nullcontext()

    def public_call(
        self,
        global_shape: tuple[int, ...],
        sharding: NamedSharding,
        dtype: np.dtype,
        block_of: BlockOf,
    ) -> jax.Array:
        """``jax.make_array_from_callback`` under the feed's own x64 setting."""
        with x64_types(self.x64):
            return jax.make_array_from_callback(global_shape, sharding, block_of, dtype=dtype)

    def without_blocks(self, global_shape: tuple[int, ...], sharding: NamedSharding, dtype: np.dtype) -> jax.Array:
        """Returns the array of a host with no device in the sharding: no addressable shards."""
        with x64_types(self.x64):  # make_array_from_callback calls for a block even here if the array is replicated
            return jax.make_array_from_single_device_arrays(global_shape, sharding, [], dtype=dtype)


def _is_guarded() -> bool:
    return jax.config.jax_transfer_guard_host_to_device in _GUARDS_OF_IMPLICIT_TRANSFERS  # pyright: ignore[reportAttributeAccessIssue] # JAX 0.10 does not declare it


@contextlib.contextmanager
def _both(
    first: contextlib.AbstractContextManager[object], second: contextlib.AbstractContextManager[object]
) -> Iterator[None]:
    with first, second:
        yield


@contextlib.contextmanager
def x64_types(wanted: bool) -> Iterator[None]:
    """Enables or disables 64-bit dtypes on this thread; does nothing if already so."""
    if jax.config.jax_enable_x64 == wanted:  # pyright: ignore[reportAttributeAccessIssue] # JAX 0.10 does not declare it
        yield
        return
    with jax.enable_x64(wanted):
        yield


class BlockDevicePut:
    """Puts blocks on this host's devices, for arrays of one shape, dtype and sharding.

    Args:
      device_put: shared by all leaves.
      global_shape: shape of the global arrays.
      sharding: sharding of the global arrays.
      dtype: dtype of the blocks, already narrowed.
      devices: this host's devices in the sharding's order; empty on a host outside the sharding's mesh.
      indices: for each of ``devices``, the index of its block in the global array.
    """

    def __init__(
        self,
        device_put: DevicePut,
        global_shape: tuple[int, ...],
        sharding: NamedSharding,
        dtype: npt.DTypeLike,
        devices: Sequence[MeshDevice],
        indices: Sequence[tuple[slice, ...]],
    ) -> None:
        self._device_put = device_put
        self._shape = global_shape
        self._sharding = sharding
        self._dtype = np.dtype(dtype)
        self._devices = list(devices)
        self._number_of_index = {_key(index): number for number, index in enumerate(indices)}
        self._aval: object = None

    def __call__(self, blocks: list[np.ndarray]) -> jax.Array:
        """Returns the global array.

        Args:
          blocks: one C-contiguous array of ``dtype`` per device; several may be the same array. On CPU the result
            shares their memory: do not write to them afterwards.
        """
        if not self._devices:
            return self._device_put.without_blocks(self._shape, self._sharding, self._dtype)
        fast_call = self._device_put.fast_call
        if fast_call is not None and self._aval is not None:
            try:
                return fast_call(
                    self._aval, self._sharding, blocks, self._devices, True, enable_x64=self._device_put.x64
                )
            except (TypeError, AttributeError) as error:
                self._device_put.give_up(error)
        array = self._device_put.public_call(
            self._shape, self._sharding, self._dtype, lambda i: blocks[self._number(i)]
        )
        self._aval = getattr(array, "aval", None)
        return array

    def _number(self, index: tuple[slice, ...] | None) -> int:
        assert index is not None  # None is for dtypes without an index, such as PRNG keys
        whole = (slice(*part.indices(size)[:2]) for part, size in zip(index, self._shape, strict=True))
        return self._number_of_index[_key(whole)]


class LeafDevicePut:
    """Puts the host arrays of one leaf, all of one shape and dtype, on the devices of its plan.

    Args:
      device_put: shared by all leaves.
      plan: which device holds which block.
      host_shape: shape of the host arrays.
      dtype: dtype of the global arrays; host arrays of other dtypes are narrowed to it.
      local: for each block of the plan, its index in the host array.
      path: the leaf's path, for messages.
    """

    def __init__(
        self,
        device_put: DevicePut,
        plan: LeafPlan,
        host_shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        local: Sequence[tuple[slice, ...]],
        path: str,
    ) -> None:
        self._device_put, self._path, self._dtype = device_put, path, np.dtype(dtype)
        devices = [block.device for block in plan.blocks]
        indices = [block.index for block in plan.blocks]
        self._put = BlockDevicePut(device_put, plan.global_shape, plan.sharding, dtype, devices, indices)
        keys = [_key(index) for index in local]
        distinct = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        # Replicas on this host share one block: a view, or a single copy if its columns are sliced.
        self._distinct = [local[keys.index(key)] for key in distinct]
        self._number_of_block = [distinct[key] for key in keys]
        whole = all(key[1:] == tuple((0, size) for size in host_shape[1:]) for key in keys)
        # The usual case: whole rows need no column indices and no contiguity check per block.
        self._rows = [index[0] for index in local] if whole else None
        row_bytes = math.prod(host_shape[1:]) * np.dtype(dtype).itemsize
        # On CPU, JAX shares aligned host memory instead of copying it. Aligning the host array is only useful if every
        # block's byte offset keeps the alignment.
        self._align = all(device.platform == "cpu" for device in devices) and all(
            index[0].start * row_bytes % memory.ALIGNMENT == 0 for index in local
        )

    def __call__(self, host: np.ndarray) -> jax.Array:
        """Returns the global array.

        Args:
          host: this host's rows and columns. On CPU the result shares its memory: do not write to it afterwards.

        Raises:
          SourceError: an integer does not fit in the dtype.
        """
        if host.dtype != self._dtype:
            host = narrow(host, self._path, self._device_put.x64)
        if self._rows is not None and host.flags.c_contiguous:
            if self._align and not memory.is_aligned(host):
                # JAX would copy each unaligned block, which is up to twice as slow as one aligned copy that it can alias.
                host = memory.copy(host)
            return self._put([host[rows] for rows in self._rows])
        parts = [contiguous(host[index]) for index in self._distinct]
        return self._put([parts[number] for number in self._number_of_block])


def _key(index: Iterable[slice]) -> tuple[tuple[int, int], ...]:
    return tuple((part.start, part.stop) for part in index)


def contiguous(part: np.ndarray) -> np.ndarray:
    """Returns ``part`` if it is C-contiguous, else a new aligned copy."""
    return part if part.flags.c_contiguous else memory.copy(part)


def leaf_spec(
    global_shape: tuple[int, ...], dtype: npt.DTypeLike, sharding: NamedSharding, path: str, x64: bool
) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype and sharding of one leaf of a batch.

    Args:
      global_shape: ``(global_batch_size, ...)``.
      dtype: dtype of the host array.
      sharding: its spec is truncated to the leaf's rank.
      path: the leaf's path, for messages.
      x64: whether 64-bit dtypes are kept.

    Raises:
      PlanError: a dimension is not divisible by the mesh axes of its sharding.
    """
    sharding = cut_spec(sharding, len(global_shape))
    for dimension, axes in sharded_dimensions(sharding, len(global_shape)):
        what = f"dimension {dimension} of leaf {path or '(the only one)'}" if dimension else "the global batch"
        check_divisible(what, global_shape[dimension], axes, sharding.mesh.shape)
    return jax.ShapeDtypeStruct(global_shape, narrowed_dtype(dtype, x64), sharding=sharding)


def batch_spec(prefix: PyTree, record_shapes: PyTree, global_batch_size: int, x64: bool) -> PyTree:
    """Returns the spec of a batch: a pytree of ``jax.ShapeDtypeStruct`` with shardings.

    Args:
      prefix: normalized shardings, a pytree prefix of the batch.
      record_shapes: pytree with the ``.shape`` and ``.dtype`` of each leaf of one record.
      global_batch_size: rows of a global batch.
      x64: whether 64-bit dtypes are kept.

    Raises:
      PlanError: a dimension is not divisible by the mesh axes of its sharding.
      SourceError: ``prefix`` does not match the structure of the record.
    """
    specs, treedef = flatten_with_paths(record_shapes)
    shardings = broadcast_shardings(prefix, record_shapes)
    return treedef.unflatten(
        leaf_spec((global_batch_size, *spec.shape), spec.dtype, sharding, path, x64)
        for (path, spec), sharding in zip(specs, shardings, strict=True)
    )
