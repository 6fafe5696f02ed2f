"""Puts the rows that this host's devices hold on them: host batch → global ``jax.Array``, following the host's plan.

The fast path is ``batched_device_put``, the function underneath JAX's own transfers. It is 1.5 to 5 times as fast as the
public API because nothing is recomputed per batch. It is private, so it is probed before use (``base/jax_internals.py``)
and, if a call fails, abandoned with one log line. The public path (``jax.make_array_from_callback``) gives the same array
and also makes the first array of each kind: the fast call takes its abstract value from that array, which avoids
constructing JAX's private classes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding

from meshfeed._src.arrays.dtypes import narrow, narrowed_dtype, x64_types
from meshfeed._src.arrays.reshard import GUARDS_OF_IMPLICIT_TRANSFERS
from meshfeed._src.base import memory
from meshfeed._src.base.errors import SourceError
from meshfeed._src.base.jax_internals import FastCall, probe_fast_call
from meshfeed._src.base.trees import TreeDef
from meshfeed._src.base.types import MeshDevice, PyTree
from meshfeed._src.plan.plan import HostPlan, LeafPlan, leaves_with_shardings

_log = logging.getLogger("meshfeed.put")
BlockOf = Callable[[tuple[slice, ...] | None], np.ndarray]
"""Index of a block in the global array → the block."""


_MAX_KINDS = 64  # batch schedules and ragged widths need several


class _BatchKind(NamedTuple):
    """What determines how a batch is put; equal for most batches."""

    global_batch_size: int
    treedef: TreeDef
    leaves: list[tuple[tuple[int, ...], np.dtype]]


class _Leaf(NamedTuple):
    """How one leaf of the batches of one kind is put."""

    path: str  # for messages
    dtype: np.dtype  # of the global array; host arrays of other dtypes are narrowed to it
    put: BlockDevicePut
    rows: list[slice] | None  # the rows of each block, if blocks are whole rows of the host array
    # The distinct blocks; replicas on this host share one: a view, or a single copy if its columns are sliced.
    parts: list[tuple[slice, ...]]
    part_of_block: list[int]  # for each block, its index in ``parts``
    align: bool  # whether an unaligned host array is copied first


class Assembler:
    """Assembles this host's batches into global arrays; plans each kind of batch once.

    A host with no device in a leaf's sharding gets a ``jax.Array`` of the same global shape, dtype and sharding but no
    addressable shards. It can be passed to a jitted step and holds no values.

    ``prefix`` is a pytree prefix of the batch with normalized shardings; ``plan`` maps a global batch size to the rows that
    this host holds.
    """

    def __init__(self, prefix: PyTree, plan: Callable[[int], HostPlan], *, device_put: DevicePut | None = None) -> None:
        self._prefix = prefix
        self._plan = plan
        self._how = device_put or DevicePut.default()
        self.x64 = self._how.x64  # whether 64-bit dtypes are kept
        # Leaf path → shape of a record's leaf; set if hosts read only some of the columns.
        self.record_shapes: Mapping[str, tuple[int, ...]] | None = None
        self._kinds: list[tuple[_BatchKind, list[_Leaf]]] = []  # the last used first

    def __call__(self, tree: PyTree, global_batch_size: int) -> PyTree:
        """Starts the transfer of a host batch and returns the same pytree of global arrays ``[global_batch_size, ...]``.

        Any thread. ``tree`` has arrays ``[host rows, ...]``, rows in the order of the plan. The remaining dimensions are
        those of a record or, with ``record_shapes``, only the plan's columns of it. On CPU the result shares memory with
        arrays whose address is a multiple of 64 bytes: do not write to them afterwards.

        Raises:
          SourceError: a leaf has no rows, a different number of rows or columns than planned, or a dtype that JAX does
            not support. The message names the leaf's path.
          PlanError: a leaf's columns are not divisible by the mesh axes of its sharding.
        """
        arrays, treedef = jax.tree.flatten(tree)
        hosts = [array if isinstance(array, np.ndarray) else np.asarray(array) for array in arrays]
        kind = _BatchKind(global_batch_size, treedef, [(host.shape, host.dtype) for host in hosts])
        known, leaves = self._kinds[0] if self._kinds else (None, [])
        if known != kind:  # comparing with the last is cheaper than hashing
            leaves = self._leaves_of(kind, tree, hosts)
        with self._how.transfer():
            x64 = self._how.x64
            return treedef.unflatten([_put_leaf(leaf, host, x64) for leaf, host in zip(leaves, hosts, strict=True)])

    def _leaves_of(self, kind: _BatchKind, tree: PyTree, hosts: list[np.ndarray]) -> list[_Leaf]:
        number = next((number for number, (known, _) in enumerate(self._kinds) if known == kind), None)
        found = (kind, self._plan_leaves(tree, hosts, kind)) if number is None else self._kinds.pop(number)
        self._kinds.insert(0, found)
        del self._kinds[_MAX_KINDS:]
        return found[1]

    def _plan_leaves(self, tree: PyTree, hosts: list[np.ndarray], kind: _BatchKind) -> list[_Leaf]:
        plan = self._plan(kind.global_batch_size)
        places = leaves_with_shardings(self._prefix, tree)
        shapes = self.record_shapes or {}
        if missing := shapes.keys() - {path for path, _, _ in places}:
            raise SourceError(
                f"the batch has the leaves {[path for path, _, _ in places]}, but a record has {sorted(missing)} too"
            )
        leaves: list[_Leaf] = []
        for (path, _, sharding), host in zip(places, hosts, strict=True):
            check_leaf(host, plan, path, self._how.x64)
            width = shapes.get(path, host.shape[1:])  # the mask is no leaf of a record
            leaf_plan = plan.leaf(sharding, (plan.global_batch_size, *width), path)
            leaves.append(_plan_leaf(self._how, leaf_plan, host, path))
        return leaves


def _put_leaf(leaf: _Leaf, host: np.ndarray, x64: bool) -> jax.Array:
    """Returns the global array of a leaf, from this host's rows and columns of it."""
    if host.dtype != leaf.dtype:
        host = narrow(host, leaf.path, x64)
    if leaf.rows is not None and host.flags.c_contiguous:
        if leaf.align and not memory.is_aligned(host):
            # JAX would copy each unaligned block, which is up to twice as slow as one aligned copy that it can alias.
            host = memory.copy(host)
        return leaf.put([host[rows] for rows in leaf.rows])
    parts = [contiguous(host[index]) for index in leaf.parts]
    return leaf.put([parts[number] for number in leaf.part_of_block])


def _plan_leaf(how: DevicePut, plan: LeafPlan, host: np.ndarray, path: str) -> _Leaf:
    """Returns how host arrays like ``host`` are put on the devices of their plan."""
    dtype = narrowed_dtype(host.dtype, how.x64)
    local = local_indices(host, plan, path)
    devices = [block.device for block in plan.blocks]
    parts = {_key(index): index for index in local}
    columns = tuple((0, size) for size in host.shape[1:])
    whole = all(key[1:] == columns for key in parts)  # the usual case, without column indices
    row_bytes = math.prod(host.shape[1:]) * dtype.itemsize
    # On CPU, JAX shares aligned host memory instead of copying it. Aligning the host array is only useful if every block's
    # byte offset keeps the alignment.
    align = all(device.platform == "cpu" for device in devices) and all(
        index[0].start * row_bytes % memory.ALIGNMENT == 0 for index in local
    )
    return _Leaf(
        path,
        dtype,
        BlockDevicePut(how, plan.global_shape, plan.sharding, dtype, devices, [block.index for block in plan.blocks]),
        [index[0] for index in local] if whole else None,
        list(parts.values()),
        [list(parts).index(_key(index)) for index in local],
        align,
    )


def local_indices(leaf: np.ndarray, plan: LeafPlan, path: str) -> list[tuple[slice, ...]]:
    """For each block of the plan, its index in the host array, which has all columns of a record or only the plan's."""
    if leaf.shape[1:] == plan.global_shape[1:]:
        return [(block.local[0], *block.index[1:]) for block in plan.blocks]
    if leaf.shape[1:] == plan.column_shape:
        return [block.local for block in plan.blocks]
    raise SourceError(
        f"leaf {path or '(the only one)'} has shape {leaf.shape} and dtype {leaf.dtype}; expected rows of shape "
        f"{plan.global_shape[1:]}, as in the first record, or {plan.column_shape}, this host's columns. All records "
        f"must have the same shape: pad or cut them in `decode`."
    )


class BlockDevicePut:
    """Puts blocks on this host's devices, for global arrays of one shape, sharding and dtype, which is already narrowed.

    ``devices`` are this host's in the sharding's order, none on a host outside its mesh; ``indices`` has for each the index
    of its block in the global array.
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
        """Returns the global array of C-contiguous blocks of ``dtype``, one per device; several may be the same array.

        On CPU the result shares their memory: do not write to them afterwards.
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


@dataclasses.dataclass(eq=False)
class DevicePut:
    """The transfer path (private or public) shared by all leaves of one feed."""

    fast_call: FastCall | None  # the private call (``jax_internals.probe_fast_call``); None uses only the public API
    x64: bool  # whether 64-bit dtypes are enabled; here because the ``jax.enable_x64`` context is thread-local

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
        """Context for a transfer, annotated for the profiler. A guard against implicit transfers permits it."""
        annotation = jax.profiler.TraceAnnotation("meshfeed.transfer")
        config: Any = jax.config  # JAX 0.10 does not declare the setting
        if config.jax_transfer_guard_host_to_device not in GUARDS_OF_IMPLICIT_TRANSFERS:
            return annotation
        stack = contextlib.ExitStack()
        stack.enter_context(jax.transfer_guard_host_to_device("allow"))
        stack.enter_context(annotation)
        return stack

    def public_call(
        self, global_shape: tuple[int, ...], sharding: NamedSharding, dtype: np.dtype, block_of: BlockOf
    ) -> jax.Array:
        """``jax.make_array_from_callback`` under the feed's own x64 setting."""
        with x64_types(self.x64):
            return jax.make_array_from_callback(global_shape, sharding, block_of, dtype=dtype)

    def without_blocks(self, global_shape: tuple[int, ...], sharding: NamedSharding, dtype: np.dtype) -> jax.Array:
        """Returns the array of a host with no device in the sharding: no addressable shards."""
        with x64_types(self.x64):  # make_array_from_callback calls for a block even here if the array is replicated
            return jax.make_array_from_single_device_arrays(global_shape, sharding, [], dtype=dtype)


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
