"""``load="once"`` and ``load=[hosts]``: each row is read by one host, then resharded on the devices.

Rows are dealt in order to the devices of the hosts that read, a chunk each, in a flat layout over exactly the devices
of the wanted sharding in the order of its mesh (one compiled call cannot change the order of devices). Devices of
other hosts hold placeholders, because a global array has a block on each of its devices; these are masked out before
anything is made of them. One compiled call then moves the rows to where the step wants them::

    host batch ──put──► [devices * chunk, ...] over "load" ──reshard──► [global_batch_size, ...] in the wanted sharding
               any thread                               caller's thread

Everything travels as integers that hold the bits: XLA changes NaNs of narrow floats on the way, and a sum turns -0.0
into 0.0.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshfeed._src.arrays.assemble import leaf_paths, leaf_spec
from meshfeed._src.arrays.device_put import BlockDevicePut, DevicePut, contiguous, probe_fast_call, x64_types
from meshfeed._src.arrays.dtypes import narrow
from meshfeed._src.arrays.move_rows import Carrier, carrier_of, make_mover, to_carrier
from meshfeed._src.arrays.reshard import without_ambient_mesh
from meshfeed._src.base import memory
from meshfeed._src.base.errors import SettingsError, SourceError
from meshfeed._src.base.types import PyTree, RecordIds
from meshfeed._src.plan.plan import HostPlan, RowRange, broadcast_shardings, merge_ranges, participants
from meshfeed._src.plan.shardings import sharding_leaves

_AXIS = "load"


def load_participants(prefix: PyTree, load: Any) -> tuple[int, ...]:
    """Process indices that take part: those with a device in the shardings, which those that read are among.

    Args:
      prefix: normalised shardings.
      load: ``"once"`` or a list of process indices.

    Raises:
      SettingsError: ``load`` is neither, or names a host without a device in the shardings, or leaves one of several
        meshes without a host that reads.
    """
    everyone = participants(prefix)
    readers = _readers(load, everyone)
    if strangers := [host for host in readers if host not in everyone]:
        raise SettingsError(
            f"load={load!r}: no device of host {', '.join(map(str, strangers))} is in the sharding, and rows reach the "
            f"other hosts only from devices of the sharding. Name some of the hosts {list(everyone)}, or use "
            f'load="once".',
            setting="load",
        )
    for devices in _device_orders(prefix):
        hosts = sorted({device.process_index for device in devices})
        if not any(host in readers for host in hosts):
            raise SettingsError(
                f"load={load!r}: one of the meshes in sharding is on the hosts {hosts} only, and none of them reads. "
                f'Add one of them to load, or use load="once".',
                setting="load",
            )
    return everyone


def _readers(load: Any, everyone: tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(load, str) and load == "once":
        return everyone
    hosts = list(load) if isinstance(load, Sequence) and not isinstance(load, str) else []
    if not hosts or any(isinstance(host, bool) or not isinstance(host, int | np.integer) for host in hosts):
        raise SettingsError(
            f'load={load!r}: takes "sharded", "once", or a list of process indices that read for all.', setting="load"
        )
    return tuple(sorted({int(host) for host in hosts}))


def _device_orders(prefix: PyTree) -> list[tuple[Any, ...]]:
    meshes = dict.fromkeys(sharding.mesh for sharding in sharding_leaves(prefix))
    return list(dict.fromkeys(_devices_of(mesh) for mesh in meshes))


def _devices_of(mesh: Any) -> tuple[Any, ...]:
    return tuple(mesh.devices.flat)


@dataclasses.dataclass(frozen=True)
class Deal:
    """How the rows of a batch are dealt to the devices of one mesh.

    Attributes:
      sharding: rows over all devices of the mesh, in its order.
      ranks: for each device its place among those that read, or -1.
      chunk_rows: rows of each device.
      num_rows: rows of the batch; the last chunks may have fewer, or none.
    """

    sharding: NamedSharding
    ranks: tuple[int, ...]
    chunk_rows: int
    num_rows: int

    @classmethod
    def over(cls, devices: tuple[Any, ...], readers: tuple[int, ...], num_rows: int) -> Deal:
        """Deals ``num_rows`` to the devices of the hosts ``readers``."""
        places = np.array([device.process_index in readers for device in devices])
        ranks = np.where(places, np.cumsum(places) - 1, -1)
        grid = np.empty(len(devices), object)
        grid[:] = devices
        sharding = NamedSharding(Mesh(grid, (_AXIS,), axis_types=(AxisType.Auto,)), PartitionSpec(_AXIS))
        return cls(sharding, tuple(ranks.tolist()), -(-num_rows // int(places.sum())), num_rows)

    def rows_of(self, rank: int) -> RowRange:
        """Global rows of a device; an empty range for one that does not read."""
        if rank < 0:
            return 0, 0
        return min(rank * self.chunk_rows, self.num_rows), min((rank + 1) * self.chunk_rows, self.num_rows)

    def held_by(self, process_index: int) -> list[tuple[int, Any, RowRange]]:
        """Place in the mesh, device, and rows, for each device of a host."""
        devices = enumerate(_devices_of(self.sharding.mesh))
        return [(n, d, self.rows_of(self.ranks[n])) for n, d in devices if d.process_index == process_index]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["treedef", "specs"])
@dataclasses.dataclass(frozen=True)
class LoadedBatch:
    """Arrays in the load placer: transferred, not yet where the step wants them.

    Attributes:
      arrays: one for each leaf, integers that hold the bits.
      treedef: structure of the batch.
      specs: shape, dtype and sharding that each leaf will have.
    """

    arrays: list[jax.Array]
    treedef: Any
    specs: tuple[jax.ShapeDtypeStruct, ...]


class RowAssignment:
    """What one host reads of a batch of one size, and how it becomes the wanted arrays.

    Args:
      prefix: normalised shardings.
      load: ``"once"`` or process indices.
      global_batch_size: rows of a batch.
      process_index: this host.
      device_put: how blocks are put on devices.
    """

    def __init__(
        self, prefix: PyTree, load: Any, global_batch_size: int, process_index: int, device_put: DevicePut | None = None
    ) -> None:
        self._prefix = prefix
        self._device_put = device_put or DevicePut(probe_fast_call(), bool(jax.config.jax_enable_x64))  # pyright: ignore[reportAttributeAccessIssue] # JAX 0.10 does not declare it
        readers = _readers(load, load_participants(prefix, load))
        orders = _device_orders(prefix)
        self._deals = {devices: Deal.over(devices, readers, global_batch_size) for devices in orders}
        held = [rows for deal in self._deals.values() for _, _, rows in deal.held_by(process_index)]
        self._rows = HostPlan(process_index, global_batch_size, merge_ranges(held))
        self._kinds: dict[Any, tuple[tuple[jax.ShapeDtypeStruct, ...], list[_LoadedLeaf]]] = {}
        self._movers: dict[Any, Any] = {}

    @property
    def row_ranges(self) -> tuple[RowRange, ...]:
        """Global rows that this host reads; empty on a host that does not."""
        return self._rows.row_ranges

    @property
    def host_rows(self) -> RecordIds:
        """The same rows, ascending, int64[rows]."""
        return self._rows.rows

    def put(self, host_tree: PyTree) -> LoadedBatch:
        """Starts the transfer to this host's devices; any thread, no computation.

        Args:
          host_tree: arrays ``[len(host_rows), ...]``, also on a host that reads nothing: shapes and dtypes must be
            those of the other hosts. On CPU the result shares memory with them: never write to them again.

        Raises:
          SourceError: a leaf of another number of rows, or of a dtype that JAX does not take.
          PlanError: a dimension of a leaf cannot be divided over the axes of its sharding.
        """
        arrays, treedef = jax.tree.flatten(host_tree)
        leaves = [leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf) for leaf in arrays]
        kind = (treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        if kind not in self._kinds:
            self._kinds[kind] = self._plan_leaves(host_tree, leaves)
        specs, device_puts = self._kinds[kind]
        with self._device_put.transfer():
            return LoadedBatch([put(leaf) for put, leaf in zip(device_puts, leaves, strict=True)], treedef, specs)

    def _plan_leaves(
        self, host_tree: PyTree, leaves: list[np.ndarray[Any, Any]]
    ) -> tuple[tuple[jax.ShapeDtypeStruct, ...], list[_LoadedLeaf]]:
        plan, x64 = self._rows, self._device_put.x64
        specs, device_puts = [], []
        for path, leaf, sharding in zip(
            leaf_paths(host_tree), leaves, broadcast_shardings(self._prefix, host_tree), strict=True
        ):
            if leaf.ndim == 0 or leaf.shape[0] != plan.num_rows:
                raise SourceError(
                    f"leaf {path or '(the only one)'} has shape {leaf.shape} and dtype {leaf.dtype}; expected "
                    f"{plan.num_rows} rows first, which is what host {plan.process_index} loads of a global batch of "
                    f"{plan.global_batch_size}"
                )
            narrow(leaf[:0], path, x64)  # refuses a dtype before anything is made of it
            specs.append(leaf_spec((plan.global_batch_size, *leaf.shape[1:]), leaf.dtype, sharding, path, x64))
            deal = self._deals[_devices_of(sharding.mesh)]
            device_puts.append(_LoadedLeaf(self._device_put, plan, deal, specs[-1], path))
        return tuple(specs), device_puts

    def reshard(self, loaded: LoadedBatch) -> PyTree:
        """The batch in the wanted shardings; a device computation, so on the thread that runs the step.

        Every process with a device in the shardings must call it for the same batches in the same order. One without
        gets arrays of the right shape and type that have no addressable shards.
        """
        with jax.profiler.TraceAnnotation("meshfeed.reshard"):
            return self._reshard(loaded)

    def _reshard(self, loaded: LoadedBatch) -> PyTree:
        out: list[Any] = [None] * len(loaded.arrays)
        for devices, deal in self._deals.items():
            numbers = [n for n, spec in enumerate(loaded.specs) if _devices_of(spec.sharding.mesh) == devices]
            specs = tuple(loaded.specs[n] for n in numbers)
            if not deal.held_by(self._rows.process_index):
                moved = [self._device_put.without_blocks(spec.shape, spec.sharding, spec.dtype) for spec in specs]
            else:
                moved = self._move(deal, specs, tuple(loaded.arrays[n] for n in numbers))
            for n, array in zip(numbers, moved, strict=True):
                out[n] = array
        return jax.tree.unflatten(loaded.treedef, out)

    def _move(
        self, deal: Deal, specs: tuple[jax.ShapeDtypeStruct, ...], arrays: tuple[jax.Array, ...]
    ) -> Sequence[jax.Array]:
        if not specs:
            return ()
        key = (deal, tuple((spec.shape, spec.dtype, spec.sharding) for spec in specs))
        mover = self._movers.get(key)
        if mover is None:
            mover = self._movers[key] = make_mover(deal.sharding, deal.ranks, deal.chunk_rows, specs)
        with x64_types(self._device_put.x64), self._device_put.allowed(), without_ambient_mesh():
            return mover(arrays)


class _LoadedLeaf:
    """Puts the host arrays of one leaf into the load placer."""

    def __init__(
        self, device_put: DevicePut, plan: HostPlan, deal: Deal, spec: jax.ShapeDtypeStruct, path: str
    ) -> None:
        self._x64 = device_put.x64
        self._path = path
        self._carrier: Carrier = carrier_of(spec.dtype)
        held = deal.held_by(plan.process_index)
        self._block_shape = (deal.chunk_rows, *spec.shape[1:], *self._carrier.extra_shape)
        self._local = [None if first == stop else plan.local_rows(first, stop) for _, _, (first, stop) in held]
        shape = (len(deal.ranks) * deal.chunk_rows, *self._block_shape[1:])
        whole = tuple(slice(0, size) for size in self._block_shape[1:])
        indices = [(slice(n * deal.chunk_rows, (n + 1) * deal.chunk_rows), *whole) for n, _, _ in held]
        devices = [device for _, device, _ in held]
        self._put = BlockDevicePut(device_put, shape, deal.sharding, self._carrier.dtype, devices, indices)
        self._placeholder = placeholder(self._block_shape, self._carrier.dtype)
        self._nothing_read: jax.Array | None = None

    def __call__(self, host: np.ndarray[Any, Any]) -> jax.Array:
        if all(rows is None for rows in self._local):
            # Nothing of this host is ever looked at, so the same array serves all batches.
            if self._nothing_read is None:
                self._nothing_read = self._put([self._placeholder] * len(self._local))
            return self._nothing_read
        bits = to_carrier(contiguous(narrow(host, self._path, self._x64)), self._carrier)
        return self._put([self._placeholder if rows is None else self._block(bits[rows]) for rows in self._local])

    def _block(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if len(rows) == self._block_shape[0]:
            return rows
        block = memory.empty(self._block_shape, self._carrier.dtype)
        block[: len(rows)] = rows
        block[len(rows) :] = self._placeholder[: len(block) - len(rows)]
        return block


def placeholder(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """What devices hold in place of rows that nobody reads there."""
    block = memory.empty(shape, dtype)
    block[...] = 0
    return block


class Loader:
    """The plans of a feed, one for each batch size.

    Args:
      prefix: normalised shardings.
      load: ``"once"`` or process indices.
      process_index: this host.
      device_put: how blocks are put on devices; default: JAX's private fast call where this JAX has it.

    Raises:
      SettingsError: ``load`` cannot be used with these shardings.
    """

    def __init__(self, prefix: PyTree, load: Any, process_index: int, *, device_put: DevicePut | None = None) -> None:
        self.participants = load_participants(prefix, load)
        self._prefix = prefix
        self._load = load
        self._process_index = process_index
        self._device_put = device_put or DevicePut(probe_fast_call(), bool(jax.config.jax_enable_x64))  # pyright: ignore[reportAttributeAccessIssue] # JAX 0.10 does not declare it
        self._plans: dict[int, RowAssignment] = {}

    def plan(self, global_batch_size: int) -> RowAssignment:
        """The plan for a batch size; made once."""
        plan = self._plans.get(global_batch_size)
        if plan is None:
            plan = RowAssignment(self._prefix, self._load, global_batch_size, self._process_index, self._device_put)
            self._plans[global_batch_size] = plan
        return plan
