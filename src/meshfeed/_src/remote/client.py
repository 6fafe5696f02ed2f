"""Calls from the controller to the CPU hosts attached to the accelerators, through JAX's colocated Python.

:class:`RemoteClient` is the controller's side, :class:`Endpoint` the object that runs on the hosts. Colocated Python
passes only arrays and compiles a method once per argument shape. The endpoint's methods therefore take and return arrays
whose shapes depend only on the shapes of their arguments; they catch all exceptions and report them in the header.

Exceptions do not propagate between hosts either. A call is therefore JSON in a uint8 array, its answer is bytes in a uint8
array, and an error is a kind of answer. Each device has its own row, because every host fills the rows of its own devices.
Answers are JSON, or JSON followed by the bytes of arrays. Only the user's functions are pickled, and only from the
controller to the hosts (:func:`make_payload`).

An interrupt (Ctrl-C) may discard a batch that the hosts have sent. Each request and call therefore says whether the last
batch was received, as in the alternating bit protocol (Bartlett, Scantlebury and Wilkinson, 1969): a bit that changes with
each batch received. If it was not, the host takes it back, and its target is where it was before that batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import numbers
import secrets
import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from meshfeed._src.arrays.dtypes import narrowed_dtype, x64_types
from meshfeed._src.arrays.reshard import without_callers_settings
from meshfeed._src.base import coordination
from meshfeed._src.base.errors import Failure, MeshfeedError, PeerError, SettingsError
from meshfeed._src.base.exact_json import decode_value, encode_value, tree_from_json, tree_to_json
from meshfeed._src.base.fork import Owner, finalize
from meshfeed._src.base.turn import TURN, in_use
from meshfeed._src.base.types import JsonValue, PyTree
from meshfeed._src.remote import served_store

OK, END, ERROR = 0, 1, 2
_HEADER = struct.Struct("<7q")
_JSON, _ARRAYS, _FAILURE = b"J", b"A", b"E"
_MOVE = frozenset(("reset", "set_state", "restore_state", "continue_from"))  # calls after which another batch is next
_LENGTH = struct.Struct("<Q")
_HOST = _NUMBER = struct.Struct("<q")
_BATCHES = 0  # the number of what is not a call: begin() and take()
_UNFETCHED = 16  # answers
_PAD = b" "


@dataclasses.dataclass
class _Sent:
    """The last batch that the target delivered, until the next one is asked for."""

    bit: int  # of the request for it
    batch: PyTree = None
    received: bool = True  # whether the target is behind it


@dataclasses.dataclass(frozen=True)
class Header:
    """Outcome of a call on one host; part of every answer."""

    flag: int  # OK, END (no further batch) or ERROR
    length: int = 0  # of the answer to fetch, in bytes
    step: int = 0  # batches delivered
    position: int = 0  # records delivered across all hosts
    size: int = 0  # rows of the next global batch; 0 if unknown
    host: int = 0  # process index
    endpoint: int = 0  # identifies the object that answers: processes that JAX does not connect share an index

    def to_row(self) -> np.ndarray[Any, Any]:
        """Returns uint8 ``[56]``; as bytes, 64-bit integers survive with ``jax_enable_x64`` off."""
        return np.frombuffer(_HEADER.pack(*dataclasses.astuple(self)), np.uint8)

    @classmethod
    def from_row(cls, row: np.ndarray[Any, Any]) -> Header:
        """The inverse of :meth:`to_row`."""
        return cls(*_HEADER.unpack_from(row.tobytes()))


def to_rows(row: np.ndarray[Any, Any], sharding: Sharding, num_rows: int) -> jax.Array:
    """Returns uint8 ``[num_rows, len(row)]`` with the same row on each device of this process."""
    return jax.make_array_from_callback((num_rows, len(row)), sharding, lambda _: np.ascontiguousarray(row[None]))


def rows_of(array: jax.Array) -> list[np.ndarray[Any, Any]]:
    """Returns the rows on the devices addressable by this process."""
    return [np.asarray(shard.data).reshape(-1) for shard in array.addressable_shards]


def first_row(array: jax.Array) -> np.ndarray[Any, Any]:
    """Returns the row on the first of these devices: requests and calls have the same one on each."""
    return np.asarray(array.addressable_shards[0].data).reshape(-1)


def padded(data: bytes, length: int) -> np.ndarray[Any, Any]:
    """Returns ``data`` padded with spaces, which JSON ignores, as uint8 ``[length]``."""
    return np.frombuffer(data.ljust(length, _PAD), np.uint8)


def padded_length(length: int) -> int:
    """Rounds up to a power of two, because each distinct shape is compiled."""
    return max(256, 1 << (length - 1).bit_length())


def encode_answer(value: PyTree) -> bytes:
    """Encodes a pytree of numpy arrays, or any value that :func:`meshfeed._src.base.exact_json.encode_value` takes."""
    leaves = jax.tree.leaves(value)
    if not leaves or not all(isinstance(leaf, np.ndarray) for leaf in leaves):
        return _JSON + json.dumps(encode_value(value)).encode()
    spec = json.dumps(tree_to_json(value)).encode()
    data = [np.ascontiguousarray(leaf, leaf.dtype.newbyteorder("=")).tobytes() for leaf in leaves]
    return b"".join((_ARRAYS, _LENGTH.pack(len(spec)), spec, *data))


def _decode_arrays(data: bytes) -> PyTree:
    """Decodes a pytree of arrays; raises SourceError if its structure could not be described."""
    (length,) = _LENGTH.unpack_from(data)
    start = _LENGTH.size + length
    leaves, structure = jax.tree.flatten(tree_from_json(json.loads(data[_LENGTH.size : start])))
    arrays = []
    for leaf in leaves:  # copies, because frombuffer returns read-only views
        arrays.append(np.frombuffer(data, leaf.dtype, math.prod(leaf.shape), start).reshape(leaf.shape).copy())
        start += arrays[-1].nbytes
    return jax.tree.unflatten(structure, arrays)


def encode_error(error: BaseException) -> bytes:
    """Encodes the type, arguments, attributes, text and notes of an exception."""
    return _FAILURE + json.dumps(Failure.exact(error).to_json()).encode()


def decode_answer(data: bytes) -> PyTree:
    """Returns the decoded value; an exception is returned, not raised."""
    kind, body = data[:1], data[1:]
    if kind == _FAILURE:
        return Failure.from_json(json.loads(body)).exception()
    return _decode_arrays(body) if kind == _ARRAYS else decode_value(json.loads(body))


def make_payload(value: object, *, setting: str, what: str) -> bytes:
    """Pickles ``value`` for a different interpreter; SettingsError if it cannot be pickled and unpickled."""
    try:
        # Unpickle as well: some objects pickle but do not unpickle.
        payload = cloudpickle.dumps(value)
        cloudpickle.loads(payload)
    except Exception as error:
        raise SettingsError(
            f"{setting} cannot be sent to the hosts beside the accelerators: {type(error).__name__}: {error}. Expected "
            f"{what}. Create files, locks, readers and devices inside it, not outside.",
            setting=setting,
        ) from error
    return payload


class Endpoint:
    """The colocated object; see the module docstring.

    ``payload`` is a pickled function from a CPU mesh to the target, an iterator over batches. The target's ``numbers()``
    are the steps and records delivered, and the rows of the next global batch (0 if unknown); ``spec()`` is a pytree of
    ``jax.ShapeDtypeStruct`` with shardings, or None if this host has no batch; ``set_delivered(batch,
    delivered)`` counts the batch of the last ``next()`` as delivered, or has it come again; ``calls`` has methods by name.
    """

    def __init__(self, payload: bytes) -> None:
        self._payload = payload  # unpickle in begin(): an exception raised here would be lost
        self.identity = secrets.randbits(62)
        self._target: Any = None
        self._spec: PyTree | None = None
        self._sent: _Sent | None = None
        self._settling = threading.Lock()  # other threads may call while one takes a batch
        # Call → its answer: other threads, and signal handlers, may call before it is fetched.
        self._answers: dict[int, bytes] = {}

    def begin(self, request: jax.Array) -> jax.Array:
        """Creates the target over the mesh of ``request``; returns one header per device."""

        def make_target() -> None:
            self._target = cloudpickle.loads(self._payload)(request.sharding.mesh)  # pyright: ignore[reportAttributeAccessIssue] # the request is sharded over a mesh
            self._spec = self._target.spec()

        return _outcome(self, request, make_target)

    def take(self, request: jax.Array) -> tuple[jax.Array, PyTree]:
        """Returns a header and the next batch.

        Args:
          request: ``[devices, 1]`` if the structure of a batch is unknown; then no batch is returned, only its structure
            noted. Otherwise ``[devices, 1 + n]``, with a different n for each batch size seen so far. All elements are the
            bit of the batch.
        """
        size, sent = 0, _Sent(int(first_row(request)[0]))

        def advance() -> None:
            nonlocal size
            self._settle(sent.bit)
            self._sent = None
            size = self._target.numbers()[2]  # before next(), which advances it to the following batch
            sent.batch = self._target.next()
            # No call in between: with one process, an interrupt arrives here, too.
            self._sent = sent
            if self._spec is None:  # what kept this host from reading it at first is over
                self._spec = self._target.spec() or jax.tree.map(
                    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), sent.batch
                )
            if request.shape[1] == 1:
                self._settle(sent.bit)

        header = _outcome(self, request, advance, may_end=True)
        if request.shape[1] == 1:
            return header, ()
        if self._sent is not sent:  # the compiled call must return the same structure at the end and after an error too
            return header, jax.tree.map(lambda leaf: zeros(leaf, size), self._spec)
        return header, sent.batch

    def _settle(self, bit: int) -> None:
        """Puts the target behind the last batch if the controller, which is at ``bit``, has received it, else before it."""
        with self._settling:
            sent = self._sent
            if sent is not None and (received := sent.bit != bit) != sent.received:
                self._target.set_delivered(sent.batch, received)
                sent.received = received

    def stage(self, request: jax.Array) -> jax.Array:
        """Runs a call, and keeps its answer under its number for :meth:`fetch`; the header holds the length."""
        number, bit, name, args = json.loads(first_row(request).tobytes())

        def call() -> bytes:
            self._settle(bit)
            own = {"knows_spec": lambda: self._spec is not None, **served_store.CALLS}
            answer = encode_answer((own.get(name) or self._target.calls[name])(*args))
            if name in _MOVE:
                self._sent = None
            return answer

        return _outcome(self, request, call, number)

    def fetch(self, buffer: jax.Array) -> jax.Array:
        """Returns the answer to the call whose number is in ``buffer``, after the process index, padded to its length."""
        (number,) = _NUMBER.unpack_from(first_row(buffer).tobytes())
        answer = _HOST.pack(coordination.process_index()) + self._answers.pop(number, b"")
        return to_rows(padded(answer, buffer.shape[1]), buffer.sharding, buffer.shape[0])


def _outcome(
    endpoint: Endpoint,
    request: jax.Array,
    function: Callable[[], bytes | None],
    number: int = _BATCHES,
    *,
    may_end: bool = False,
) -> jax.Array:
    """Calls ``function`` and returns one header per device; keeps what it returns or raises as the answer to ``number``.

    StopIteration is the end of the data if ``function`` may reach it, otherwise an error.
    """
    flag, answer = OK, b""
    numbers: tuple[int, int, int] = (0, 0, 0)
    try:
        try:
            answer = function() or b""
        except StopIteration as error:
            if not may_end:
                raise MeshfeedError(
                    "a function of the source or the loader raised StopIteration on a host beside the accelerators, outside "
                    "of next(). Raise a different exception there."
                ) from error
            flag = END
        if endpoint._target is not None:
            numbers = endpoint._target.numbers()
    except Exception as error:
        flag, answer = ERROR, encode_error(error)
    if answer:
        endpoint._answers[number] = answer
        for unfetched in list(endpoint._answers)[:-_UNFETCHED]:  # of callers that were interrupted
            endpoint._answers.pop(unfetched, None)
    header = Header(flag, len(answer), *numbers, coordination.process_index(), endpoint.identity)
    return to_rows(header.to_row(), request.sharding, request.shape[0])


def zeros(spec: jax.ShapeDtypeStruct, size: int = 0) -> jax.Array:
    """Returns a new global array of zeros, with ``size`` rows if given."""
    shape = (size or spec.shape[0], *spec.shape[1:])
    # A view of a single element, so that no host allocates the global batch.
    whole = np.broadcast_to(np.zeros((), spec.dtype), shape)
    assert spec.sharding is not None
    # The feed may have been made in jax.enable_x64(), which this call is outside of.
    wide = narrowed_dtype(spec.dtype, x64=False) != spec.dtype
    with x64_types(True) if wide else contextlib.nullcontext():
        return jax.make_array_from_callback(shape, spec.sharding, lambda index: np.ascontiguousarray(whole[index]))


def colocated_mesh(mesh: Mesh) -> Mesh:
    """Returns the mesh of the CPU devices beside those of ``mesh``; SettingsError if there are not enough of them."""
    from jax.experimental import colocated_python

    try:
        return colocated_python.colocated_cpu_devices(mesh)
    except ValueError as error:
        raise SettingsError(
            f"the devices of the mesh do not each have a CPU device beside them: {error}. With several accelerators per "
            "host, set jax.config.update('jax_num_cpu_devices', <accelerators per host>) before JAX starts.",
            setting="sharding",
        ) from error


def _plain(value: object) -> JsonValue:
    """Returns an argument that a local feed takes, too, as JSON; any other as text, which the host refuses by name."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return float(value) if isinstance(value, numbers.Real) else repr(value)


class RemoteClient:
    """Calls the :class:`Endpoint` on the hosts of ``mesh``, a mesh of accelerators; ``cpu_mesh`` are the CPU devices beside.

    Raises:
      SettingsError: there are not enough CPU devices, or no device of the mesh belongs to this process.
      Exception: any error of the target's constructor on a host.
    """

    def __init__(self, payload: bytes, mesh: Mesh) -> None:
        from jax.experimental import colocated_python

        self.mesh = mesh
        self.cpu_mesh = colocated_mesh(mesh)
        axes = PartitionSpec(self.cpu_mesh.axis_names)
        self._global = NamedSharding(self.cpu_mesh, axes)
        near = self._global.addressable_devices
        devices = [device for device in self.cpu_mesh.devices.flat if device in near]
        if not devices:
            raise SettingsError("no device of the mesh belongs to this process.", setting="sharding")
        self._num_near = len(devices)
        self._near = NamedSharding(
            Mesh(np.array(devices), ("host",), axis_types=(AxisType.Auto,)), PartitionSpec("host")
        )
        make: Any = colocated_python.colocated_python_class(Endpoint)
        with without_callers_settings():  # without jit, device_put leaves an array on the devices in their old order
            self._held = held = {"endpoint": make(payload)}
        # Also at exit: JAX fails to delete a colocated object once its own modules are being torn down.
        self._finalizer = finalize(self, held.clear)
        self._owner = Owner()
        self._numbers = itertools.count(_BATCHES + 1)
        self.turn: dict[str, object] = {}  # taken by take(); see base/turn.py
        everywhere = self._global  # the cache must not keep self alive
        self._request = functools.cache(
            lambda ordinal, bit: to_rows(np.full(1 + ordinal, bit, np.uint8), everywhere, mesh.size)
        )
        self._bit = 0  # changes with each batch received
        self._ordinals: dict[int, int] = {}
        self._spec_known = False
        self.header = Header(0)  # of the last answer
        if self._global.is_fully_addressable:  # the only controller
            self._connect()
        with without_callers_settings():
            self.header = _first(self._check(self._held["endpoint"].begin(self._request(0, 0))))

    def _connect(self) -> None:
        """Has one host serve a key-value store, if JAX does not connect the hosts, and all use it."""
        stores: list[str | None] = self.call("store")
        served = sorted({store for store in stores if store})
        if None not in stores and len(served) < 2:
            return
        if "" in stores or len(served) > 1:
            by_whom = "JAX" if "" in stores else "remote feeds over parts of this mesh"
            raise MeshfeedError(
                f"the hosts beside the accelerators have no common key-value store: only some of them are connected by "
                f"{by_whom}. Create a remote feed over all hosts before those over parts of them, or call "
                "jax.distributed.initialize() on each host before anything else."
            )
        for store in served or self.call("serve", self.header.host):
            if store:
                self.call("join", store)

    # ------------------------------------------------------------------ calls

    def call(self, name: str, *args: JsonValue) -> list[Any]:
        """Returns the answers of the hosts that this process controls, in order of process index."""
        self._owner.check("this remote feed")
        number, bit = next(self._numbers), self._bit
        data = json.dumps([number, bit, name, args], default=_plain).encode()
        # Sent over the devices of this controller only, unlike requests for batches: each controller makes its own calls.
        row = padded(data, padded_length(len(data)))
        with without_callers_settings():
            headers = self._check(self._held["endpoint"].stage(to_rows(row, self._near, self._num_near)), number)
            if bit == self._bit:  # no batch was received meanwhile, by another thread
                self.header = _first(headers)
            return [answers for _, answers in sorted(self._fetch(headers, number).items())]

    def _fetch(self, headers: dict[int, Header], number: int, flag: int = OK) -> dict[int, Any]:
        """Returns the answers of hosts whose header has ``flag``; the buffer has room for the longest of all hosts."""
        length = padded_length(_HOST.size + max(header.length for header in headers.values()))
        buffer = to_rows(padded(_NUMBER.pack(number), length), self._near, self._num_near)
        # Key by the address in the answer, not by device.process_index: a single controller may see the same process
        # index on all devices.
        rows = [row.tobytes() for row in rows_of(self._held["endpoint"].fetch(buffer))]
        answers = {_HOST.unpack_from(row)[0]: row[_HOST.size :] for row in rows}
        wanted = {host: header for host, header in headers.items() if header.flag == flag}
        return {host: decode_answer(answers[host][: header.length]) for host, header in wanted.items()}

    def _check(self, array: jax.Array, number: int = _BATCHES) -> dict[int, Header]:
        """Returns headers by host; raises a host's error, StopIteration if all ended, MeshfeedError if only some."""
        headers: dict[int, Header] = {}
        for header in map(Header.from_row, rows_of(array)):
            if headers.setdefault(header.host, header).endpoint != header.endpoint:
                raise MeshfeedError(
                    f"several hosts beside the accelerators have the process index {header.host}: JAX does not connect "
                    "them, so they cannot agree on batches. Call jax.distributed.initialize() on each of them before "
                    "anything else, or use a meshfeed.Feed on the controller, which reads all rows there."
                )
        flags = {header.flag for header in headers.values()}
        if ERROR in flags:
            errors = [
                error for error in self._fetch(headers, number, ERROR).values() if isinstance(error, BaseException)
            ]
            # A PeerError only reports that a different host failed: prefer the original error.
            own = [error for error in errors if not isinstance(error, PeerError)]
            raise (own or errors or [MeshfeedError("a host beside the accelerators failed without a message")])[0]
        if flags == {END}:
            raise StopIteration
        if END in flags:
            raise MeshfeedError(
                "the data has ended on some hosts beside the accelerators but not on others; see their logs."
            )
        return headers

    def close(self, because: BaseException | None = None) -> None:
        """Stops threads and processes on the hosts, which tell others ``because``; no-op in a forked child.

        A target whose ``close`` takes no reason gets none.
        """
        if self._owner.is_here:
            self.call("close", *([] if because is None else [Failure.exact(because).to_json()]))

    # ------------------------------------------------------------------ batches

    def know_spec(self) -> None:
        """Checks whether every host has a batch spec; without it, ``take`` can only report the end or an error."""
        self._spec_known = all(self.call("knows_spec"))

    def take(self, move: Callable[[PyTree], PyTree] = lambda batch: batch) -> PyTree:
        """Returns what ``move`` makes of the next batch, global arrays over the CPU mesh.

        After an interrupt, call it again to continue with the same batch.
        """
        self._owner.check("this remote feed")
        turn, mine = self.turn, object()
        held = {TURN: mine}
        try:
            if turn.setdefault(TURN, mine) is not mine:
                raise in_use("this remote feed")
            if not self._spec_known:
                # It raises what keeps the hosts from reading, or has them note the structure.
                self.header, _ = self._take(0)
                self.know_spec()
            # The shape of the request encodes the batch size, because a colocated call is compiled once per argument shape.
            header, batch = self._take(self._ordinals.setdefault(self.header.size, len(self._ordinals) + 1))
            batch, bit = move(batch), 1 - self._bit
            # Python handles signals at calls and backward jumps. There is none from here to the return, so an interrupted
            # call has not received the batch.
            self.header, self._bit = header, bit
            return batch
        finally:
            if turn == held:
                del turn[TURN]

    def _take(self, ordinal: int) -> tuple[Header, PyTree]:
        with without_callers_settings():
            header, batch = self._held["endpoint"].take(self._request(ordinal, self._bit))
            return _first(self._check(header)), batch

    def to_accelerators(self, batch: PyTree, memory_kind: str | None = None) -> PyTree:
        """Starts the transfer of a batch from each CPU device to the accelerator colocated with it."""
        if self.cpu_mesh == self.mesh and memory_kind is None:
            return batch
        with without_callers_settings():
            return jax.tree.map(
                lambda leaf: _moved(leaf, NamedSharding(self.mesh, leaf.sharding.spec, memory_kind=memory_kind)), batch
            )


def _first(headers: Mapping[int, Header]) -> Header:
    return next(iter(headers.values()))


def _moved(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
    if leaf.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    # With several controllers, each one can only move its own shards.
    assert isinstance(leaf.sharding, NamedSharding)
    beside = dict(zip(leaf.sharding.mesh.devices.flat, sharding.mesh.devices.flat, strict=True))  # pyright: ignore[reportOptionalMemberAccess] # a mesh of real devices has them
    shards = leaf.addressable_shards
    moved = jax.device_put([shard.data for shard in shards], [beside[shard.device] for shard in shards])
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, moved)
