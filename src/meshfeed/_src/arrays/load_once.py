"""``load="once"`` and ``load=[hosts]``: one host reads each row, then the rows are resharded on device.

Rows are assigned in order to the devices of the reading hosts, one chunk per device. The load sharding is flat over
exactly the devices of the target sharding, in the order of its mesh (a compiled call cannot reorder devices). Devices
of other hosts hold placeholders, because a global array has a block on each of its devices; placeholders are masked
out before use. One compiled call then moves the rows to the target sharding::

    host batch ──put──► [devices * chunk, ...] over "load" ──reshard──► [global_batch_size, ...], target sharding
               any thread                               caller's thread

All values are transferred as carriers, integers that hold their bits: XLA alters NaNs of narrow floats in transit, and
a sum turns -0.0 into 0.0. The host views its buffer as the carrier dtype, which is free; the device converts back after
the last collective.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from meshfeed._src.arrays.device_put import BlockDevicePut, DevicePut, check_leaf, contiguous
from meshfeed._src.arrays.dtypes import batch_spec, check_values, leaf_spec, narrow, x64_types
from meshfeed._src.arrays.reshard import constraint_sharding, from_bits, without_callers_settings
from meshfeed._src.base import memory
from meshfeed._src.base.errors import PlanError, SettingsError
from meshfeed._src.base.trees import TreeDef, flatten
from meshfeed._src.base.types import MeshDevice, PyTree, RecordIds
from meshfeed._src.plan.plan import (
    HostPlan,
    HostRows,
    RowRange,
    describe_layout,
    leaves_with_shardings,
    merge_ranges,
    participants,
    sharding_leaves,
)
from meshfeed._src.reading.stacking import RecordSpec

Load: TypeAlias = str | Sequence[int]
"""``"once"``, or the process indices that read."""


class Carrier(NamedTuple):
    """The form in which values of a dtype are transferred: integers."""

    dtype: np.dtype
    extra_shape: tuple[int, ...] = ()  # trailing dimensions: (2,) for the two parts of a complex number


def carrier_of(dtype: npt.DTypeLike) -> Carrier:
    """Returns the carrier for ``dtype``: integers unchanged, all others as unsigned integers of the same size."""
    dtype = np.dtype(dtype)
    if dtype.kind == "c":
        return Carrier(np.dtype(f"uint{dtype.itemsize * 4}"), (2,))
    if dtype.kind in "iu":
        return Carrier(dtype)
    return Carrier(np.dtype(f"uint{dtype.itemsize * 8}"))  # numpy stores sub-byte types in one byte per value


def to_carrier(array: np.ndarray, carrier: Carrier) -> np.ndarray:
    """Views a C-contiguous host array as its carrier."""
    if array.dtype == carrier.dtype:
        return array
    if carrier.extra_shape:
        return array.reshape(*array.shape, 1).view(carrier.dtype)
    return array.view(carrier.dtype)


def _from_carrier(bits: jax.Array, dtype: npt.DTypeLike) -> jax.Array:
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return bits != 0
    if dtype.kind == "c":
        part = np.dtype(f"float{dtype.itemsize * 4}")
        return lax.complex(from_bits(bits[..., 0], part), from_bits(bits[..., 1], part))
    return from_bits(bits, dtype)


Mover: TypeAlias = Callable[[tuple[jax.Array, ...]], tuple[jax.Array, ...]]


def make_mover(
    load_sharding: NamedSharding, ranks: Sequence[int], chunk_rows: int, specs: Sequence[jax.ShapeDtypeStruct]
) -> Mover:
    """Returns a compiled move of all leaves at once: carriers ``[devices * chunk_rows, ...]`` → arrays like ``specs``.

    The first three arguments are those of a :class:`MeshAssignment`; ``specs`` are over the same devices in the same order.
    """

    def move(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(_move(bits, spec) for bits, spec in zip(arrays, specs, strict=True))

    def _move(bits: jax.Array, spec: jax.ShapeDtypeStruct) -> jax.Array:
        if min(ranks) < 0:
            bits = _spread(bits, load_sharding, ranks, chunk_rows)
        bits = lax.with_sharding_constraint(bits, load_sharding)
        rows = lax.with_sharding_constraint(bits[: spec.shape[0]], constraint_sharding(spec.sharding))
        # The barrier keeps XLA from folding the bitcast into the collective; see reshard.py.
        return _from_carrier(lax.optimization_barrier(rows), spec.dtype)

    return jax.jit(move, out_shardings=tuple(spec.sharding for spec in specs))


def _spread(bits: jax.Array, load_sharding: NamedSharding, ranks: Sequence[int], chunk_rows: int) -> jax.Array:
    """Spreads the chunks of some devices evenly over all devices, in order, padded with rows of zeros.

    Implemented as a reduce-scatter of integers in which at most one addend is nonzero. Indexing rows of a sharded
    dimension would make XLA gather the placeholders of all devices too.
    """
    axis = load_sharding.mesh.axis_names[0]
    size = -(-chunk_rows * (max(ranks) + 1) // len(ranks)) * len(ranks)
    wide = bits.dtype if bits.dtype.itemsize >= 4 else jnp.dtype(jnp.uint32)  # some backends cannot sum narrow integers

    def spread(chunk: jax.Array) -> jax.Array:
        rank = jnp.asarray(ranks, jnp.int32)[lax.axis_index(axis)]
        chunk = jnp.where(rank >= 0, chunk.astype(wide), jnp.zeros((), wide))
        whole = jnp.zeros((size, *chunk.shape[1:]), wide)
        starts = (jnp.maximum(rank, 0) * chunk_rows, *(jnp.int32(0),) * (chunk.ndim - 1))
        whole = lax.dynamic_update_slice(whole, chunk, starts)
        return lax.psum_scatter(whole, axis, tiled=True).astype(bits.dtype)

    specs = PartitionSpec(axis)
    return jax.shard_map(spread, mesh=load_sharding.mesh, in_specs=specs, out_specs=specs)(bits)


_AXIS = "load"


def load_participants(prefix: PyTree, load: Load) -> tuple[int, ...]:
    """Returns the participating process indices: all hosts with a device in the shardings, including those that read.

    Raises:
      SettingsError: ``load`` names a host with no device in the shardings, or leaves one of several meshes without a
        reading host.
    """
    everyone = participants(prefix)
    readers = _readers(load, everyone)
    if strangers := [host for host in readers if host not in everyone]:
        raise SettingsError(
            f"load={load!r}: no device of host {', '.join(map(str, strangers))} is in the sharding, but rows reach other "
            f'hosts only from devices in the sharding. Pass some of the hosts {list(everyone)}, or load="once".',
            setting="load",
        )
    for devices in _device_orders(prefix):
        hosts = sorted({device.process_index for device in devices})
        if not any(host in readers for host in hosts):
            raise SettingsError(
                f"load={load!r}: one of the meshes in sharding is only on the hosts {hosts}, none of which reads. "
                f'Add one of them to load, or use load="once".',
                setting="load",
            )
    return everyone


def _readers(load: Load, everyone: tuple[int, ...]) -> tuple[int, ...]:
    return everyone if isinstance(load, str) else tuple(sorted(load))


def _device_orders(prefix: PyTree) -> list[tuple[MeshDevice, ...]]:
    meshes = dict.fromkeys(sharding.mesh for sharding in sharding_leaves(prefix))
    return list(dict.fromkeys(_devices_of(mesh) for mesh in meshes))


def _devices_of(mesh: Mesh | AbstractMesh) -> tuple[MeshDevice, ...]:
    return tuple(cast("Mesh", mesh).devices.flat)


@dataclasses.dataclass(frozen=True)
class MeshAssignment:
    """Which device of one mesh reads which rows of a batch."""

    sharding: NamedSharding  # rows over all devices of the mesh, in mesh order: a flat mesh, one chunk per device
    ranks: tuple[int, ...]  # for each device, its rank among the devices of reading hosts, or -1
    chunk_rows: int  # rows per device
    num_rows: int  # of the batch; the last chunks may have fewer rows, or none

    @classmethod
    def over(cls, devices: tuple[MeshDevice, ...], readers: tuple[int, ...], num_rows: int) -> MeshAssignment:
        """Assigns ``num_rows`` rows to the devices of the hosts ``readers``."""
        places = np.array([device.process_index in readers for device in devices])
        ranks = np.where(places, np.cumsum(places) - 1, -1)
        grid = np.empty(len(devices), object)
        grid[:] = devices
        sharding = NamedSharding(Mesh(grid, (_AXIS,), axis_types=(AxisType.Auto,)), PartitionSpec(_AXIS))
        return cls(sharding, tuple(ranks.tolist()), -(-num_rows // int(places.sum())), num_rows)

    def rows_of(self, rank: int) -> RowRange:
        """Global rows of the device of this rank; an empty range for rank -1."""
        if rank < 0:
            return 0, 0
        return min(rank * self.chunk_rows, self.num_rows), min((rank + 1) * self.chunk_rows, self.num_rows)

    def held_by(self, process_index: int) -> list[tuple[int, MeshDevice, RowRange]]:
        """(index in the mesh, device, global rows) of each device of a host."""
        devices = enumerate(_devices_of(self.sharding.mesh))
        return [(n, d, self.rows_of(self.ranks[n])) for n, d in devices if d.process_index == process_index]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["treedef", "specs"])
@dataclasses.dataclass(frozen=True)
class LoadedBatch:
    """A batch in the load sharding: transferred, not yet resharded."""

    arrays: list[jax.Array]  # one per leaf, integers holding the bits
    treedef: TreeDef
    specs: tuple[jax.ShapeDtypeStruct, ...]  # final shape, dtype and sharding of each leaf


class RowAssignment:
    """The rows that one host reads of each batch of one size, and the move of all rows to the target shardings."""

    def __init__(
        self,
        prefix: PyTree,
        load: Load,
        global_batch_size: int,
        process_index: int,
        device_put: DevicePut | None = None,
    ) -> None:
        self._prefix = prefix
        self._device_put = device_put or DevicePut.default()
        readers = _readers(load, load_participants(prefix, load))
        orders = _device_orders(prefix)
        self._assignments = {devices: MeshAssignment.over(devices, readers, global_batch_size) for devices in orders}
        held = [rows for assignment in self._assignments.values() for _, _, rows in assignment.held_by(process_index)]
        self._rows = HostPlan(process_index, global_batch_size, merge_ranges(held))
        self._kinds: dict[tuple[object, ...], tuple[tuple[jax.ShapeDtypeStruct, ...], list[_LoadedLeaf]]] = {}
        self._mover = functools.cache(lambda rows, specs: make_mover(rows.sharding, rows.ranks, rows.chunk_rows, specs))

    @property
    def row_ranges(self) -> tuple[RowRange, ...]:
        """Global rows that this host reads; empty if it reads none."""
        return self._rows.row_ranges

    @property
    def host_rows(self) -> RecordIds:
        """The same rows, ascending, int64 ``[rows]``."""
        return self._rows.rows

    def put(self, host_tree: PyTree) -> LoadedBatch:
        """Starts the transfer of arrays ``[len(host_rows), ...]`` to this host's devices. Any thread; no device computation.

        On a host that reads no rows, too, trailing shapes and dtypes must match the other hosts. On CPU the result shares
        the arrays' memory: do not write to them afterwards.

        Raises:
          SourceError: a leaf has a different number of rows, or a dtype that JAX does not support.
          PlanError: a dimension of a leaf is not divisible by the mesh axes of its sharding.
        """
        arrays, treedef = flatten(host_tree)
        leaves = [leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf) for leaf in arrays]
        kind = (treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        if kind not in self._kinds:
            self._kinds[kind] = self._plan_leaves(host_tree, leaves)
        specs, device_puts = self._kinds[kind]
        with self._device_put.transfer():
            return LoadedBatch([put(leaf) for put, leaf in zip(device_puts, leaves, strict=True)], treedef, specs)

    def _plan_leaves(
        self, host_tree: PyTree, leaves: list[np.ndarray]
    ) -> tuple[tuple[jax.ShapeDtypeStruct, ...], list[_LoadedLeaf]]:
        plan, x64 = self._rows, self._device_put.x64
        specs, device_puts = [], []
        places = leaves_with_shardings(self._prefix, host_tree)
        for (path, _, sharding), leaf in zip(places, leaves, strict=True):
            check_leaf(leaf, plan, path, x64)
            specs.append(leaf_spec((plan.global_batch_size, *leaf.shape[1:]), leaf.dtype, sharding, path, x64))
            assignment = self._assignments[_devices_of(sharding.mesh)]
            device_puts.append(_LoadedLeaf(self._device_put, plan, assignment, specs[-1], path))
        return tuple(specs), device_puts

    def reshard(self, loaded: LoadedBatch) -> PyTree:
        """Returns the batch in the target shardings. A device computation: call it on the thread that runs the step.

        Every process with a device in the shardings must call it for the same batches in the same order. A process
        without one gets arrays of the right shape and dtype with no addressable shards.
        """
        out: list[Any] = [None] * len(loaded.arrays)
        annotation = jax.profiler.TraceAnnotation("meshfeed.reshard")
        with annotation, x64_types(self._device_put.x64), without_callers_settings():
            for devices, assignment in self._assignments.items():
                numbers = [n for n, spec in enumerate(loaded.specs) if _devices_of(spec.sharding.mesh) == devices]
                specs = tuple(loaded.specs[n] for n in numbers)
                if not assignment.held_by(self._rows.process_index):
                    moved = [self._device_put.without_blocks(spec.shape, spec.sharding, spec.dtype) for spec in specs]
                else:
                    moved = self._mover(assignment, specs)(tuple(loaded.arrays[n] for n in numbers)) if specs else ()
                for n, array in zip(numbers, moved, strict=True):
                    out[n] = array
        return jax.tree.unflatten(loaded.treedef, out)


class _LoadedLeaf:
    """Puts the host arrays of one leaf on devices in the load sharding."""

    def __init__(
        self, device_put: DevicePut, plan: HostPlan, assignment: MeshAssignment, spec: jax.ShapeDtypeStruct, path: str
    ) -> None:
        self._x64 = device_put.x64
        self._path = path
        self._carrier: Carrier = carrier_of(spec.dtype)
        held = assignment.held_by(plan.process_index)
        self._block_shape = (assignment.chunk_rows, *spec.shape[1:], *self._carrier.extra_shape)
        self._local = [None if first == stop else plan.local_rows(first, stop) for _, _, (first, stop) in held]
        shape = (len(assignment.ranks) * assignment.chunk_rows, *self._block_shape[1:])
        whole = tuple(slice(0, size) for size in self._block_shape[1:])
        indices = [(slice(n * assignment.chunk_rows, (n + 1) * assignment.chunk_rows), *whole) for n, _, _ in held]
        devices = [device for _, device, _ in held]
        self._put = BlockDevicePut(device_put, shape, assignment.sharding, self._carrier.dtype, devices, indices)
        # One for all batches and devices: nothing writes to it.
        self._placeholder = memory.zeros(self._block_shape, self._carrier.dtype)
        self._nothing_read: jax.Array | None = None

    def __call__(self, host: np.ndarray) -> jax.Array:
        if all(rows is None for rows in self._local):
            # This host holds only placeholders, which are masked out, so one array serves all batches.
            if self._nothing_read is None:
                self._nothing_read = self._put([self._placeholder] * len(self._local))
            return self._nothing_read
        bits = to_carrier(contiguous(narrow(host, self._path, self._x64)), self._carrier)
        return self._put([self._placeholder if rows is None else self._block(bits[rows]) for rows in self._local])

    def _block(self, rows: np.ndarray) -> np.ndarray:
        if len(rows) == self._block_shape[0]:
            return rows
        block = memory.zeros(self._block_shape, self._carrier.dtype)
        block[: len(rows)] = rows
        return block


class LoadOncePlacer:
    """One host reads each row; rows are resharded on device as integer bits.

    ``plan`` maps a global batch size to its row assignment; cached.

    Raises:
      SettingsError: ``load`` cannot be used with these shardings.
    """

    finish_computes = True

    def __init__(self, prefix: PyTree, load: Load, process_index: int, *, device_put: DevicePut | None = None) -> None:
        self.participants, self.layout = load_participants(prefix, load), describe_layout(prefix)
        self._prefix = prefix
        self._device_put = how = device_put or DevicePut.default()
        self.x64 = how.x64
        self.plan = functools.cache(lambda size: RowAssignment(prefix, load, size, process_index, how))

    def host_rows(self, spec_of: Callable[[], RecordSpec] | None) -> HostRows:
        """See :class:`meshfeed._src.arrays.placer.Placer`; always whole records."""
        del spec_of
        return HostRows(lambda size: self.plan(size).host_rows, lambda size: None)

    def check(self, tree: PyTree) -> None:
        """See :class:`meshfeed._src.arrays.placer.Placer`."""
        check_values(tree, self._device_put.x64)

    def put(self, tree: PyTree, global_batch_size: int) -> PyTree:
        """See :class:`meshfeed._src.arrays.placer.Placer`."""
        return self.plan(global_batch_size).put(tree)

    def finish(self, arrays: PyTree, global_batch_size: int) -> PyTree:
        """Reshards. A device computation, so on the caller's thread only."""
        return self.plan(global_batch_size).reshard(arrays)

    def global_batch_size_of(self, host_rows: int) -> int:
        """Always raises: host batches require ``load="sharded"``."""
        raise PlanError(f"a host batch of {host_rows} rows needs load='sharded'.")

    def smallest_batch_size(self) -> int:
        """Always raises: host batches require ``load="sharded"``."""
        raise PlanError("host batches need load='sharded'.")

    def element_spec(self, spec: RecordSpec, global_batch_size: int) -> PyTree:
        """See :class:`meshfeed._src.arrays.placer.Placer`."""
        return batch_spec(self._prefix, spec.shapes(), global_batch_size, self._device_put.x64)

    def blocks(self, tree: PyTree, global_batch_size: int) -> dict[str, np.ndarray]:
        """Returns nothing: only one host reads each row."""
        del tree, global_batch_size
        return {}
