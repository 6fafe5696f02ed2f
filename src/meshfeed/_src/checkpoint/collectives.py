"""What hosts do together in a restore: agree on errors, then move the values that they have read, bit for bit.

Hosts report errors to each other before any of them enters a collective (:class:`Agreement`).

Pieces of large leaves reach the requested sharding by ``shard_map`` and explicit collectives, so the compiler chooses
neither the collective nor the dtype: unsigned bits. Data is only moved, never added. Several leaves are gathered in one
compiled call; a leaf too large for that is gathered a few rows of each piece at a time, to keep little in flight beyond
the result.

Small leaves, host values, and leaves whose stored chunks fit no cut of their sharding are exchanged instead: each unit
is read by one host, with bytes balanced over hosts, and sent to all hosts, packed into a few byte buffers. This costs a
collective in each of a few rounds instead of one storage request per host and leaf.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike
from numpy.typing import NDArray

from meshfeed._src.arrays.reshard import bit_width, bits_dtype, from_bits, reshard
from meshfeed._src.base import memory
from meshfeed._src.base.coordination import next_use, process_count, process_index, require_store
from meshfeed._src.base.errors import CheckpointError, Failure, MeshfeedError, SettingsError
from meshfeed._src.base.reduction import Rounds
from meshfeed._src.base.types import JsonValue
from meshfeed._src.checkpoint.layout import (
    Box,
    Device,
    LoadPlan,
    assign_units,
    box_shape,
    box_size,
    parts_in_window,
    spec_of,
    ways,
    with_rows,
)
from meshfeed._src.checkpoint.leaves import SavedLeaf
from meshfeed._src.checkpoint.stored import (
    DamagedCheckpointError,
    MissingArrayError,
    StoredShapeError,
    Target,
    UnitReader,
    Wanted,
)

R = TypeVar("R")


# Errors that keep their class on other hosts, the most specific first.
_ERRORS: dict[str, type[CheckpointError]] = {
    "missing": MissingArrayError,
    "damaged": DamagedCheckpointError,
    "shape": StoredShapeError,
}


def _failure_of(error: BaseException) -> Failure:
    text = str(error) if isinstance(error, MeshfeedError) else f"{type(error).__name__}: {error}"
    if isinstance(error, SettingsError) and error.setting is not None:
        return Failure("setting", text, process_index(), details={"setting": error.setting})
    kind = next((kind for kind, of_kind in _ERRORS.items() if isinstance(error, of_kind)), "unreadable")
    return Failure(kind, text, process_index(), getattr(error, "step", None))


def _error_of(failure: Failure, where: str) -> MeshfeedError:
    message = f"{where}: {failure.message}"
    if failure.kind == "setting":
        return SettingsError(message, setting=failure.details["setting"])
    return _ERRORS.get(failure.kind, CheckpointError)(message, step=failure.step)


def _report_of(error: BaseException | None) -> JsonValue:
    return None if error is None else _failure_of(error).to_json()


def _raise_reported(report: JsonValue, cause: BaseException | None) -> None:
    if report is not None:
        failure = Failure.from_json(report)
        raise _error_of(failure, f"host {failure.host}") from cause


class Agreement(Rounds):
    """Agreement among all processes of the job about one operation.

    Args:
      doing: the operation, for error messages.
      timeout_seconds: how long to wait for the slowest host.
      name: unique name of the operation, needed on a background thread; by default operations are counted.
    """

    def __init__(self, doing: str, timeout_seconds: float, name: str | None = None) -> None:
        scope = f"checkpoint/{next_use('checkpoint') if name is None else name}"
        super().__init__(scope, range(process_count()), timeout_seconds=timeout_seconds, doing=doing)
        # Fail now rather than at the first read: without a store hosts cannot agree.
        if len(self.participants) > 1:
            require_store()

    def confirm(self, error: BaseException | None) -> None:
        """Raises the same error on every host if any host passes one: the error of the lowest-numbered failed host.

        In a single-process job, a MeshfeedError is raised unchanged.

        Raises:
          DamagedCheckpointError: that host found stored bytes that differ from those written.
          SettingsError: a keyword's value is wrong on that host.
          CheckpointError: that host failed for any other reason.
        """
        if len(self.participants) == 1:
            if isinstance(error, MeshfeedError):
                raise error
            if error is not None:
                raise _error_of(_failure_of(error), self.doing) from error
            return

        def first(reports: dict[int, JsonValue]) -> JsonValue:
            return next((report for _, report in sorted(reports.items()) if report is not None), None)

        _raise_reported(self.reduce(_report_of(error), first), error)

    def attempt(self, work: Callable[[], R]) -> R:
        """Runs ``work`` and returns its result once every host has succeeded; if any host failed, raises on all."""
        try:
            result = work()
        except Exception as error:
            self.confirm(error)
            raise  # not reached: confirm raises
        self.confirm(None)
        return result

    def publish(self, work: Callable[[], JsonValue]) -> JsonValue:
        """Runs ``work`` on host 0 and returns its JSON value on all hosts; an error there is raised on all of them."""
        if len(self.participants) == 1:
            return work()
        value, failed = None, None
        if process_index() == 0:
            try:
                value = work()
            except Exception as error:
                failed = error
        value, report = self.reduce([value, _report_of(failed)], lambda reports: reports[0])
        _raise_reported(report, failed)
        return value

    def collect(self, value: JsonValue) -> dict[int, JsonValue]:
        """Returns every host's JSON value, keyed by host, on all hosts."""
        reports = self.reduce(value, lambda reports: {str(host): report for host, report in reports.items()})
        return {int(host): report for host, report in reports.items()}


Buffers: TypeAlias = Mapping[Device, NDArray[np.generic]]
"""Host buffers by the device that reads them."""


def host_bits_of(values: NDArray[np.generic]) -> NDArray[np.generic]:
    """Converts host values to the transfer dtype; returns a view if possible."""
    carrier, width = bits_dtype(values.dtype), bit_width(values.dtype)
    if carrier == values.dtype:
        return values
    if width < 8 and jnp.issubdtype(values.dtype, jnp.integer):
        # numpy holds int4 and the like as one byte per value; keep only their own bits.
        return values.astype(np.int8).view(np.uint8) & np.uint8((1 << width) - 1)
    return values.view(carrier)


def _receive(block: jax.Array, plan: LoadPlan) -> jax.Array:
    """Runs all collectives of a plan on one device's block; returns rows of ``dimension`` in order, with padding."""
    if plan.broadcast is not None:
        axis, first = plan.broadcast
        count = plan.mesh.shape[axis]
        distance = (lax.axis_index(axis) - first) % count
        reach = 1
        # Not a sum with zeros, which loses -0.0, subnormals and NaN payloads.
        while reach < count:  # devices that have the block forward it, so their number doubles each round
            pairs = [((first + i) % count, (first + i + reach) % count) for i in range(reach) if i + reach < count]
            received = lax.ppermute(block, axis, pairs)
            block = jnp.where((distance >= reach) & (distance < 2 * reach), received, block)
            reach *= 2
    for axis, dimension in plan.moved:
        block = lax.all_to_all(block, axis, split_axis=dimension, concat_axis=plan.dimension, tiled=True)
    if plan.gather:
        block = lax.all_gather(block, plan.gather, axis=plan.dimension, tiled=True)
    return block


def _trim(block: jax.Array, plan: LoadPlan) -> jax.Array:
    """Drops the padding rows of a gathered block."""
    return lax.slice(block, [0] * block.ndim, plan.shard_shape)


@functools.lru_cache(maxsize=256)
def _gatherer(
    plans: tuple[LoadPlan, ...], dtypes: tuple[np.dtype[np.generic], ...]
) -> Callable[..., tuple[jax.Array, ...]]:
    def gather(*blocks: jax.Array) -> tuple[jax.Array, ...]:
        received = (_trim(_receive(block, plan), plan) for block, plan in zip(blocks, plans, strict=True))
        return tuple(from_bits(block, dtype) for block, dtype in zip(received, dtypes, strict=True))

    # Not jit with output shardings: the compiler would choose the collective, and on CPU gather bfloat16 through float32.
    mapped = jax.shard_map(
        gather,
        mesh=plans[0].mesh,
        in_specs=tuple(plan.piece_sharding.spec for plan in plans),
        out_specs=tuple(spec_of(plan.axes) for plan in plans),
        check_vma=False,
    )
    return jax.jit(mapped)


def place(
    buffers: Buffers, shape: Sequence[int], sharding: Sharding, dtype: DTypeLike, placed: Sequence[jax.Array] = ()
) -> jax.Array:
    """Builds a global array from this process's buffers and from shards already on their devices."""
    # Each device needs its own buffer: if two aliased one, donating one shard would overwrite the other.
    shards = [*placed, *(jax.device_put(list(buffers.values()), list(buffers)) if buffers else ())]
    # Without a local shard, JAX cannot infer the dtype.
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, shards, dtype=None if shards else dtype)


def _pieces_array(plan: LoadPlan, buffers: Buffers, dtype: DTypeLike, placed: Sequence[jax.Array] = ()) -> jax.Array:
    """Builds the global array of pieces; ``buffers`` and the shards ``placed`` are in the transfer dtype."""
    local = next(iter(buffers.values())).shape if buffers else placed[0].shape
    shape = [size * ways(plan.mesh, names) for size, names in zip(local, plan.piece_axes, strict=True)]
    return place(buffers, shape, plan.piece_sharding, bits_dtype(dtype), placed)


def gather_group(plans: Sequence[LoadPlan], dtypes: Sequence[DTypeLike], buffers: Sequence[Buffers]) -> list[jax.Array]:
    """Gathers several leaves over one mesh in one compiled call."""
    arrays = [_pieces_array(plan, own, dtype) for plan, own, dtype in zip(plans, buffers, dtypes, strict=True)]
    return list(_gatherer(tuple(plans), tuple(np.dtype(dtype) for dtype in dtypes))(*arrays))


@functools.lru_cache(maxsize=256)
def _block_updater(plan: LoadPlan) -> jax.stages.Wrapped:
    dimension, pieces, wanted = plan.dimension, plan.num_pieces, spec_of(plan.axes)

    def split(array: jax.Array) -> jax.Array:
        rows = array.shape[dimension] // pieces
        return array.reshape(*array.shape[:dimension], pieces, rows, *array.shape[dimension + 1 :])

    def update(out: jax.Array, block: jax.Array, start: jax.Array) -> jax.Array:
        # Reshapes are free, so the donated result is updated in place. It keeps the transfer dtype until the end: with
        # bitcasts around the update, XLA copies the whole result for each block.
        received = split(_receive(block, plan))
        return lax.dynamic_update_slice_in_dim(split(out), received, start, dimension + 1).reshape(out.shape)

    mapped = jax.shard_map(
        update,
        mesh=plan.mesh,
        in_specs=(wanted, plan.piece_sharding.spec, PartitionSpec()),
        out_specs=wanted,
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=0)


@functools.lru_cache(maxsize=256)
def _block_frame(
    plan: LoadPlan, dtype: np.dtype[np.generic]
) -> tuple[Callable[[], jax.Array], Callable[[jax.Array], jax.Array] | None]:
    """Programs that create the empty result (transfer dtype, padded) and that finish one shard (None if not needed)."""
    carrier, local = bits_dtype(dtype), plan.padded_shape
    start = jax.shard_map(
        lambda: jnp.zeros(local, carrier), mesh=plan.mesh, in_specs=(), out_specs=spec_of(plan.axes), check_vma=False
    )
    if local == plan.shard_shape and carrier == dtype:
        return jax.jit(start), None
    return jax.jit(start), jax.jit(lambda shard: from_bits(_trim(shard, plan), dtype))


class BlockGather:
    """Gathers one leaf block by block. Every process with a device in the leaf's mesh must create one.

    Args:
      plan: the leaf's plan; must not be direct.
      dtype: the leaf's final dtype.
      rows: rows of each piece per block.
    """

    def __init__(self, plan: LoadPlan, dtype: DTypeLike, rows: int) -> None:
        start, self._end = _block_frame(plan, np.dtype(dtype))
        self._plan, self._dtype = plan, dtype
        self._update = _block_updater(plan)
        nothing = memory.zeros(
            with_rows(plan.piece_shape, plan.dimension, rows), bits_dtype(dtype)
        )  # shared: neither written nor donated
        idle = [device for device, box in plan.boxes(process_index()).items() if box is None]
        self._idle = jax.device_put([nothing] * len(idle), idle) if idle else []
        self._out = start()

    def add(self, first: int, blocks: Buffers) -> None:
        """Sends the rows of every piece starting at row ``first``."""
        block = _pieces_array(self._plan, blocks, self._dtype, self._idle)
        self._out = self._update(self._out, block, np.int32(first))
        self._out.block_until_ready()  # without it, the blocks of all rounds would be in flight at once

    def finish(self) -> jax.Array:
        """Returns the leaf. Call it only once."""
        if self._end is None:
            return self._out
        shards, sharding = [shard.data for shard in self._out.addressable_shards], self._plan.sharding
        assert sharding is not None
        del self._out
        for index in range(len(shards)):  # one by one, so at most one shard exists twice
            shards[index] = self._end(shards[index]).block_until_ready()
        return jax.make_array_from_single_device_arrays(self._plan.shape, sharding, shards)


def cut_block(buffers: Buffers, dimension: int, first: int, rows: int) -> dict[Device, NDArray[np.generic]]:
    """Cuts rows out of each piece; copies only if they are not contiguous."""
    window = (*[slice(None)] * dimension, slice(first, first + rows))
    parts = {device: buffer[window] for device, buffer in buffers.items()}
    return {device: part if part.flags.c_contiguous else memory.copy(part) for device, part in parts.items()}


_ROUND_BYTES = 256 << 20
_LEAST_ROUND_BYTES = 1 << 16


@functools.lru_cache(maxsize=1)
def _host_mesh(devices: tuple[Device, ...]) -> Mesh:
    return Mesh(np.array(devices), ("host",), axis_types=(jax.sharding.AxisType.Auto,))


def send_rows(row: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Sends this process's row, uint8[length], and returns uint8[processes, length]; rows must have equal length."""
    # One device per process is enough: rows go to hosts, not to devices.
    first: dict[int, Device] = {}
    for device in sorted(jax.devices(), key=lambda device: device.id):
        first.setdefault(device.process_index, device)
    mesh = _host_mesh(tuple(device for _, device in sorted(first.items())))
    spread = NamedSharding(mesh, PartitionSpec("host"))
    own = jax.device_put(row[None], first[process_index()])
    array = jax.make_array_from_single_device_arrays((len(first), row.size), spread, [own])
    (whole,) = reshard([array], [NamedSharding(mesh, PartitionSpec())])
    return np.asarray(whole.addressable_shards[0].data)


class _HostStream:
    """The units that one host reads, one after the other as bytes."""

    def __init__(self, leaves: Sequence[SavedLeaf], units: Sequence[tuple[int, int]]) -> None:
        self._units = [(index, leaves[index], number, leaves[index].units.box(number)) for index, number in units]
        sizes = (box_size(box) * leaf.stored_dtype.itemsize for _, leaf, _, box in self._units)
        self._ends = list(itertools.accumulate(sizes))
        self._values: NDArray[np.generic] = np.empty(0)  # of the unit that a window cuts

    @property
    def size(self) -> int:
        """Bytes of all units."""
        return self._ends[-1] if self._ends else 0

    def fill(self, window: NDArray[np.uint8], start: int, reader: UnitReader) -> None:
        """Reads units into ``window``, whose first byte is byte ``start`` of the stream. Windows follow one another."""
        for item, first, stop in parts_in_window(self._ends, start, start + len(window)):
            if first == 0:
                _, leaf, number, box = self._units[item]
                self._values = np.empty(box_shape(box), leaf.stored_dtype)
                reader.read([Wanted(leaf, number, [Target(box, self._values)])])
            window[: stop - first], window = self._bytes[first:stop], window[stop - first :]

    def parse(self, window: NDArray[np.uint8], start: int) -> Iterator[tuple[int, Box, NDArray[np.generic]]]:
        """Yields (leaf index, box, values) of each unit that ends in a received window. Windows follow one another."""
        for item, first, stop in parts_in_window(self._ends, start, start + len(window)):
            index, leaf, _, box = self._units[item]
            if first == 0:
                self._values = np.empty(box_shape(box), leaf.stored_dtype)
            self._bytes[first:stop], window = window[: stop - first], window[stop - first :]
            if stop == self._values.nbytes:
                yield index, box, self._values

    @property
    def _bytes(self) -> NDArray[np.uint8]:
        return self._values.reshape(-1).view(np.uint8)


def exchange(
    leaves: Sequence[SavedLeaf],
    targets: Sequence[Sequence[Target]],
    loads: Mapping[int, int],
    reader: UnitReader,
    agreement: Agreement,
    limit_bytes: int | None,
) -> None:
    """Reads this host's share of the units, sends them, and fills the targets from all hosts' units.

    Args:
      leaves: leaves to send; the same on every host.
      targets: for each leaf, this host's buffers.
      loads: host → bytes that it reads anyway.
      reader: reads and checks units.
      agreement: confirms each round before its collective.
      limit_bytes: limit on memory in flight, for all rows of a round together.
    """
    owned = assign_units([(leaf.units, leaf.stored_dtype.itemsize) for leaf in leaves], range(process_count()), loads)
    streams = [_HostStream(leaves, units) for _, units in sorted(owned.items())]
    own = _HostStream(leaves, owned[process_index()])
    longest = max(stream.size for stream in streams)
    width = _row_bytes(longest, len(streams), limit_bytes)
    for start in range(0, longest, width):
        row = memory.zeros((width,), np.uint8)
        agreement.attempt(lambda row=row, start=start: own.fill(row, start, reader))
        for stream, received in zip(streams, send_rows(row), strict=True):
            for index, box, values in stream.parse(received, start):
                for target in targets[index]:
                    target.fill(box, values)


def _row_bytes(longest: int, hosts: int, limit_bytes: int | None) -> int:
    """Returns the bytes that each host sends per round: few distinct numbers, so few compiled programs."""
    budget = _ROUND_BYTES if limit_bytes is None else max(1, min(_ROUND_BYTES, limit_bytes // 2))
    width = min(longest, max(_LEAST_ROUND_BYTES, budget // (hosts + 1)))
    return max(1, min(1 << (width - 1).bit_length(), longest))
