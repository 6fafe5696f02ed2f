"""Calls from the controller to the CPU hosts attached to the accelerators, through JAX's colocated Python.

:class:`RemoteClient` is the controller's side, :class:`Endpoint` the object that runs on the hosts. Colocated Python
passes only arrays and compiles a method once per argument shape. The endpoint's methods therefore take and return arrays
whose shapes depend only on the shapes of their arguments; they catch all exceptions and report them in the header.
"""

from __future__ import annotations

from typing import Any, Protocol

import cloudpickle
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshfeed._src.base import coordination
from meshfeed._src.base.errors import MeshfeedError, PeerError, SettingsError
from meshfeed._src.base.process import Owner, finalize
from meshfeed._src.base.types import JsonValue, PyTree
from meshfeed._src.remote.wire import (
    END,
    ERROR,
    OK,
    Header,
    address,
    addressed_length,
    decode_answer,
    decode_call,
    encode_answer,
    encode_call,
    encode_error,
    padded,
    padded_length,
    rows_of,
    take_address,
    to_rows,
)


class EndpointTarget(Protocol):
    """The object that an endpoint creates on each host: an iterator over batches with methods callable by name."""

    calls: dict[str, Any]

    def next(self) -> PyTree:
        """Returns the next batch as global arrays over the CPU mesh; raises StopIteration at the end."""

    def numbers(self) -> tuple[int, int, int]:
        """Returns the steps and records delivered, and the rows of the next global batch (0 if unknown)."""
        ...

    def spec(self) -> PyTree | None:
        """Returns a pytree of ``jax.ShapeDtypeStruct`` with shardings, or None if this host has no batch."""


class Endpoint:
    """The colocated object; see the module docstring.

    Args:
      payload: a pickled function that maps a CPU mesh to an EndpointTarget.
    """

    def __init__(self, payload: bytes) -> None:
        self._payload = payload  # unpickle in begin(): an exception raised here would be lost
        self._target: Any = None
        self._spec: PyTree | None = None
        self._answer = b""

    def begin(self, request: jax.Array) -> jax.Array:
        """Creates the target over the mesh of ``request``; returns one header per device."""
        flag = OK
        try:
            self._target = cloudpickle.loads(self._payload)(request.sharding.mesh)  # pyright: ignore[reportAttributeAccessIssue] # the request is sharded over a mesh
            self._spec = self._target.spec()
        except Exception as error:
            flag, self._answer = ERROR, encode_error(error)
        return _header(self, request, flag)

    def take(self, request: jax.Array) -> tuple[jax.Array, PyTree]:
        """Returns a header and the next batch.

        Args:
          request: ``[devices, 1]`` if the structure of a batch is unknown; then no batch is returned. Otherwise
            ``[devices, 1 + n]``, with a different n for each batch size seen so far.
        """
        flag, batch = OK, None
        size = 0
        try:
            size = self._target.numbers()[2]  # before next(), which advances it to the following batch
            batch = self._target.next()
        except StopIteration:
            flag = END
        except Exception as error:
            flag, self._answer = ERROR, encode_error(error)
        if request.shape[1] == 1:
            return _header(self, request, flag), ()
        if batch is None:  # the compiled call must return the same structure at the end and after an error too
            batch = jax.tree.map(lambda leaf: _zeros(leaf, size), self._spec)
        return _header(self, request, flag), batch

    def stage(self, request: jax.Array) -> jax.Array:
        """Runs a call and keeps the answer for :meth:`fetch`; the header holds its length."""
        flag = OK
        try:
            name, args = decode_call(rows_of(request)[0])
            known = name == "knows_spec"
            self._answer = encode_answer(self._spec is not None if known else self._target.calls[name](*args))
        except Exception as error:
            flag, self._answer = ERROR, encode_error(error)
        return _header(self, request, flag)

    def fetch(self, buffer: jax.Array) -> jax.Array:
        """Returns the answer, prefixed with the process index and padded to the length of ``buffer``."""
        answer = address(self._answer, coordination.process_index())
        return to_rows(padded(answer, buffer.shape[1]), buffer.sharding, buffer.shape[0])


def _header(endpoint: Endpoint, request: jax.Array, flag: int) -> jax.Array:
    target = endpoint._target
    step, position, size = 0, 0, 0
    if target is not None:
        try:
            step, position, size = target.numbers()
        except Exception as error:
            if flag != ERROR:
                flag, endpoint._answer = ERROR, encode_error(error)
    header = Header(flag, len(endpoint._answer), step, position, size, coordination.process_index())
    return to_rows(header.to_row(), request.sharding, request.shape[0])


def _zeros(spec: jax.ShapeDtypeStruct, size: int) -> jax.Array:
    shape = (size or spec.shape[0], *spec.shape[1:])
    whole = np.broadcast_to(np.zeros((), spec.dtype), shape)
    assert spec.sharding is not None
    return jax.make_array_from_callback(shape, spec.sharding, lambda index: np.ascontiguousarray(whole[index]))


def colocated_mesh(mesh: Mesh) -> Mesh:
    """Returns the mesh of the CPU devices colocated with the devices of ``mesh``.

    Raises:
      SettingsError: there are not enough CPU devices.
    """
    from jax.experimental import colocated_python

    try:
        return colocated_python.colocated_cpu_devices(mesh)
    except ValueError as error:
        raise SettingsError(
            f"the devices of the mesh do not each have a CPU device beside them: {error}. With several accelerators per "
            "host, set jax.config.update('jax_num_cpu_devices', <accelerators per host>) before JAX starts.",
            setting="sharding",
        ) from error


class RemoteClient:
    """Calls the endpoint on the hosts of ``mesh``.

    Args:
      payload: see :class:`Endpoint`.
      mesh: the mesh of accelerators.

    Attributes:
      mesh: the mesh of accelerators.
      cpu_mesh: the mesh of CPU devices colocated with them.
      header: the header of the last answer.

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
        held = {"endpoint": make(payload)}
        self._held = held
        # Also at exit: JAX fails to delete a colocated object once its own modules are being torn down.
        self._finalizer = finalize(self, held.clear)
        self._owner = Owner()
        self._requests: dict[int, jax.Array] = {}
        self._ordinals: dict[int, int] = {}
        self._spec_known = False
        self.header = Header(0)
        self._check(self._held["endpoint"].begin(self._request(0)))

    def _request(self, ordinal: int) -> jax.Array:
        if ordinal not in self._requests:
            row = np.zeros(1 + ordinal, np.uint8)
            self._requests[ordinal] = to_rows(row, self._global, self.mesh.size)
        return self._requests[ordinal]

    # ------------------------------------------------------------------ calls

    def call(self, name: str, *args: JsonValue) -> list[Any]:
        """Returns the answers of the hosts that this process controls, in order of process index.

        Raises:
          MeshfeedError: this process is a forked child.
          Exception: any error that the call raised on a host.
        """
        self._owner.check("this remote feed")
        data = encode_call(name, args)
        # Sent over the devices of this controller only, unlike requests for batches: each controller makes its own calls.
        row = padded(data, padded_length(len(data)))
        headers = self._check(self._held["endpoint"].stage(to_rows(row, self._near, self._num_near)))
        return [answers for _, answers in sorted(self._fetch(headers).items())]

    def _fetch(self, headers: dict[int, Header], flag: int = OK) -> dict[int, Any]:
        """Returns the answers of hosts whose header has ``flag``; the buffer has room for the longest of all hosts."""
        length = padded_length(addressed_length(max(header.length for header in headers.values())))
        buffer = to_rows(padded(b"", length), self._near, self._num_near)
        # Key by the address in the answer, not by device.process_index: a single controller may see the same process
        # index on all devices.
        answers = dict(map(take_address, rows_of(self._held["endpoint"].fetch(buffer))))
        wanted = {host: header for host, header in headers.items() if header.flag == flag}
        return {host: decode_answer(answers[host][: header.length]) for host, header in wanted.items()}

    def _check(self, array: jax.Array) -> dict[int, Header]:
        """Returns headers by host.

        Raises:
          StopIteration: the stream has ended on every host.
          MeshfeedError: the stream has ended on some hosts only.
          Exception: any error that a host raised.
        """
        headers = {header.host: header for header in map(Header.from_row, rows_of(array))}
        flags = {header.flag for header in headers.values()}
        if ERROR in flags:
            errors = [error for error in self._fetch(headers, ERROR).values() if isinstance(error, BaseException)]
            # A PeerError only reports that a different host failed: prefer the original error.
            own = [error for error in errors if not isinstance(error, PeerError)]
            raise (own or errors or [MeshfeedError("a host beside the accelerators failed without a message")])[0]
        self.header = next(iter(headers.values()))
        if flags == {END}:
            raise StopIteration
        if END in flags:
            raise MeshfeedError(
                "the data has ended on some hosts beside the accelerators but not on others; see their logs."
            )
        return headers

    def close(self) -> None:
        """Stops threads and processes on the hosts; no-op in a forked child."""
        if self._owner.is_here:
            self.call("close")

    # ------------------------------------------------------------------ batches

    def know_spec(self) -> None:
        """Checks whether every host has a batch spec; without it, ``take`` can only report the end or an error."""
        self._spec_known = all(self.call("knows_spec"))

    def take(self) -> PyTree:
        """Returns the next batch as global arrays over the CPU mesh.

        Raises:
          StopIteration: the end of the stream.
          Exception: any error that a host raised.
        """
        self._owner.check("this remote feed")
        # The shape of the request encodes the batch size, because a colocated call is compiled once per argument shape.
        ordinal = 0
        if self._spec_known:
            ordinal = self._ordinals.setdefault(self.header.size, len(self._ordinals) + 1)
        header, batch = self._held["endpoint"].take(self._request(ordinal))
        self._check(header)
        return batch

    def to_accelerators(self, batch: PyTree, memory_kind: str | None = None) -> PyTree:
        """Starts the transfer of a batch from each CPU device to the accelerator colocated with it."""
        if self.cpu_mesh == self.mesh and memory_kind is None:
            return batch
        return jax.tree.map(
            lambda leaf: _moved(leaf, NamedSharding(self.mesh, leaf.sharding.spec, memory_kind=memory_kind)), batch
        )


def _moved(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
    if leaf.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    # With several controllers, each one can only move its own shards.
    assert isinstance(leaf.sharding, NamedSharding)
    beside = dict(zip(leaf.sharding.mesh.devices.flat, sharding.mesh.devices.flat, strict=True))  # pyright: ignore[reportOptionalMemberAccess] # a mesh of real devices has them
    shards = leaf.addressable_shards
    moved = jax.device_put([shard.data for shard in shards], [beside[shard.device] for shard in shards])
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, moved)
