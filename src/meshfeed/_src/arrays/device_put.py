"""Puts the rows that this host's devices hold on them: host batch → global ``jax.Array``, following the host's plan.

The fast path is ``batched_device_put``, the function underneath JAX's own transfers. It is 1.5 to 5 times as fast as the
public API because nothing is recomputed per batch. It is private, so it is probed before use (``base/jax_internals.py``)
and, if a call fails, abandoned with one log line. The public path (``jax.make_array_from_callback``) gives the same array
and also makes the first array of each kind: the fast call takes its abstract value from that array, which avoids
constructing JAX's private classes.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Self

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding

from meshfeed._src.arrays.dtypes import narrow, narrowed_dtype, x64_types
from meshfeed._src.base import memory
from meshfeed._src.base.errors import SourceError
from meshfeed._src.base.jax_internals import FastCall, probe_fast_call
from meshfeed._src.base.trees import TreeDef
from meshfeed._src.base.types import MeshDevice, PyTree
from meshfeed._src.plan.plan import (
    HostPlan,
    LeafPlan,
    leaves_with_shardings,
    plan_host,
)

_log = logging.getLogger("meshfeed.put")
_MAX_CACHED_BATCH_KINDS = 64  # batch schedules and ragged widths need several; beyond that, the cache is cleared
_Shapes = tuple[tuple[int, ...], ...]
# Without the *_explicit levels: they also cover explicit transfers, so a user who sets them means these transfers too.
_GUARDS_OF_IMPLICIT_TRANSFERS = ("log", "disallow")
BlockOf = Callable[[tuple[slice, ...] | None], np.ndarray]
"""Index of a block in the global array → the block."""


class HostBatchPut:
    """Puts the batches of one host, of any size, on its devices; each of them has its own rows.

    Args:
      prefix: normalized shardings.
      process_index: this host.

    Attributes:
      assembler: makes global arrays from host batches.
      record_shapes: pytree with the ``.shape`` of each leaf of a record; set if hosts read only some of the columns.
    """

    def __init__(self, prefix: PyTree, process_index: int) -> None:
        self.assembler = Assembler(prefix)
        self.record_shapes: PyTree | None = None
        self._prefix = prefix
        self._process_index = process_index
        self._plans: dict[int, HostPlan] = {}

    def __call__(self, tree: PyTree, global_batch_size: int) -> PyTree:
        """Starts the transfer; see :class:`Assembler`. Any thread."""
        return self.assembler(tree, self.plan(global_batch_size), self._shapes_of(tree))

    def plan(self, global_batch_size: int) -> HostPlan:
        """Returns this host's plan; cached per batch size."""
        plan = self._plans.get(global_batch_size)
        if plan is None:
            plan = self._plans[global_batch_size] = plan_host(self._prefix, global_batch_size, self._process_index)
        return plan

    def _shapes_of(self, tree: PyTree) -> PyTree | None:
        shapes = self.record_shapes
        if shapes is None or (type(tree) is dict is type(shapes) and tree.keys() == shapes.keys()):
            return shapes  # the usual case
        if not isinstance(tree, Mapping) or not isinstance(shapes, Mapping):
            return shapes
        extra = {key: np.empty(()) for key in tree if key not in shapes}  # the mask is one scalar per row
        return {**shapes, **extra} if extra else shapes


class _BatchKind(NamedTuple):
    """The properties that determine how a batch is assembled; equal for most batches."""

    plan: HostPlan
    treedef: TreeDef
    record_shapes: _Shapes | None
    leaves: tuple[tuple[tuple[int, ...], np.dtype], ...]


class Assembler:
    """Assembles the host batches of one feed into global arrays.

    A host with no device in a leaf's sharding gets a ``jax.Array`` of the same global shape, dtype and sharding but
    no addressable shards. It can be passed to a jitted step and holds no values.

    Args:
      prefix: normalized shardings, a pytree prefix of the batch.
      device_put: how arrays are put on devices and whether 64-bit dtypes are kept; see :meth:`DevicePut.default`.

    Attributes:
      x64: whether 64-bit dtypes are kept.
    """

    def __init__(self, prefix: PyTree, *, device_put: DevicePut | None = None) -> None:
        self._prefix = prefix
        self._device_put = device_put or DevicePut.default()
        self.x64 = self._device_put.x64
        self._kinds: dict[_BatchKind, list[LeafDevicePut]] = {}
        self._last: tuple[_BatchKind | None, list[LeafDevicePut]] = (None, [])
        self._last_shapes: tuple[PyTree, _Shapes] = (None, ())

    def __call__(self, host_tree: PyTree, plan: HostPlan, record_shapes: PyTree = None) -> PyTree:
        """Returns a global array for each leaf.

        Args:
          host_tree: arrays ``[plan.num_rows, ...]``, rows in the order of ``plan.rows``. The remaining dimensions are
            those of a record or, if ``record_shapes`` is given, only the plan's columns of it. On CPU the result
            shares memory with arrays whose address is a multiple of 64 bytes: do not write to them afterwards.
          plan: the rows that this host holds.
          record_shapes: pytree of the same structure with the ``.shape`` of each leaf of one record. Required if
            leaves hold only some of the columns.

        Returns:
          The same pytree with global arrays ``[plan.global_batch_size, ...]``.

        Raises:
          SourceError: a leaf has no rows, a different number of rows or columns than planned, or a dtype that JAX
            does not support. The message names the leaf's path.
          PlanError: a leaf's columns are not divisible by the mesh axes of its sharding.
        """
        arrays, treedef = jax.tree.flatten(host_tree)
        leaves = [leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf) for leaf in arrays]
        shapes = None if record_shapes is None else self._flat_shapes(record_shapes)
        kind = _BatchKind(plan, treedef, shapes, tuple([(leaf.shape, leaf.dtype) for leaf in leaves]))
        device_puts = self._last[1] if kind == self._last[0] else self._device_puts_of(kind, host_tree, leaves)
        with self._device_put.transfer():
            return treedef.unflatten([put(leaf) for put, leaf in zip(device_puts, leaves, strict=True)])

    def _flat_shapes(self, record_shapes: PyTree) -> _Shapes:
        if record_shapes is not self._last_shapes[0]:
            shapes = tuple(tuple(spec.shape) for spec in jax.tree.leaves(record_shapes))
            self._last_shapes = record_shapes, shapes
        return self._last_shapes[1]

    def _device_puts_of(self, kind: _BatchKind, host_tree: PyTree, leaves: list[np.ndarray]) -> list[LeafDevicePut]:
        device_puts = self._kinds.get(kind)
        if device_puts is None:
            device_puts = self._device_puts(host_tree, leaves, kind.plan, kind.record_shapes)
            if len(self._kinds) >= _MAX_CACHED_BATCH_KINDS:
                self._kinds.clear()
            self._kinds[kind] = device_puts
        self._last = (kind, device_puts)  # most batches match the last one, and comparing is cheaper than hashing
        return device_puts

    def _device_puts(
        self, host_tree: PyTree, leaves: list[np.ndarray], plan: HostPlan, record_shapes: _Shapes | None
    ) -> list[LeafDevicePut]:
        places = leaves_with_shardings(self._prefix, host_tree)
        widths: Sequence[tuple[int, ...]] = (
            [leaf.shape[1:] for leaf in leaves] if record_shapes is None else record_shapes
        )
        if len(widths) != len(leaves):
            raise SourceError(
                f"the batch has {len(leaves)} leaves {[place[0] for place in places]}, but a record has {len(widths)}"
            )
        device_puts: list[LeafDevicePut] = []
        for (path, _, sharding), leaf, width in zip(places, leaves, widths, strict=True):
            check_leaf(leaf, plan, path, self.x64)
            leaf_plan = plan.leaf(sharding, (plan.global_batch_size, *width), path)
            local = _local_indices(leaf, leaf_plan, path)
            dtype = narrowed_dtype(leaf.dtype, self.x64)
            device_puts.append(LeafDevicePut(self._device_put, leaf_plan, leaf.shape, dtype, local, path))
        return device_puts


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
        # Replicas on this host share one block: a view, or a single copy if its columns are sliced.
        distinct = {_key(index): index for index in local}
        self._distinct = list(distinct.values())
        self._number_of_block = [list(distinct).index(_key(index)) for index in local]
        columns = tuple((0, size) for size in host_shape[1:])
        whole = all(key[1:] == columns for key in distinct)
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


def _key(index: Iterable[slice]) -> tuple[tuple[int, int], ...]:
    return tuple((part.start, part.stop) for part in index)


def contiguous(part: np.ndarray) -> np.ndarray:
    """Returns ``part`` if it is C-contiguous, else a new aligned copy."""
    return part if part.flags.c_contiguous else memory.copy(part)


def check_leaf(leaf: np.ndarray, plan: HostPlan, path: str, x64: bool) -> None:
    """Checks the rows and the dtype of a host array, before any work.

    Raises:
      SourceError: it has a different number of rows than the plan, or a dtype that JAX does not support.
    """
    if leaf.ndim == 0 or leaf.shape[0] != plan.num_rows:
        raise SourceError(
            f"leaf {path or '(the only one)'} has shape {leaf.shape} and dtype {leaf.dtype}; expected {plan.num_rows} rows "
            f"first, the rows that host {plan.process_index} reads of a global batch of {plan.global_batch_size}"
        )
    narrow(leaf[:0], path, x64)


def _local_indices(leaf: np.ndarray, plan: LeafPlan, path: str) -> list[tuple[slice, ...]]:
    if leaf.shape[1:] == plan.global_shape[1:]:
        return [(block.local[0], *block.index[1:]) for block in plan.blocks]
    if leaf.shape[1:] == plan.column_shape:
        return [block.local for block in plan.blocks]
    raise SourceError(
        f"leaf {path or '(the only one)'} has shape {leaf.shape} and dtype {leaf.dtype}; expected rows of shape "
        f"{plan.global_shape[1:]}, as in the first record, or {plan.column_shape}, this host's columns. All records "
        f"must have the same shape: pad or cut them in `decode`."
    )
