"""The controller side of an endpoint: sends calls, receives batches, and re-raises remote errors."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshfeed._src.base.errors import MeshfeedError, PeerError, SettingsError
from meshfeed._src.base.fork import Owner, finalize
from meshfeed._src.base.types import PyTree
from meshfeed._src.remote.endpoint import Endpoint
from meshfeed._src.remote.wire import (
    END,
    ERROR,
    OK,
    Header,
    addressed_length,
    decode_answer,
    encode_call,
    padded,
    padded_length,
    rows_of,
    take_address,
    to_rows,
)


def colocated_mesh(mesh: Mesh) -> Mesh:
    """Returns the mesh of the CPU devices colocated with the devices of ``mesh``.

    Raises:
      SettingsError: if there are not enough CPU devices.
    """
    from jax.experimental import colocated_python

    try:
        return colocated_python.colocated_cpu_devices(mesh)
    except ValueError as error:
        raise SettingsError(
            f"no CPU device beside each device of the mesh: {error}. With several accelerators a host, start it with "
            "jax.config.update('jax_num_cpu_devices', <accelerators of a host>).",
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
      SettingsError: if there are not enough CPU devices.
      Exception: whatever the constructor of the target raises on a host.
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

    def call(self, name: str, *args: Any) -> list[Any]:
        """Returns the answers of the hosts that this process controls, in order of process index.

        Raises:
          MeshfeedError: if this process is a forked child.
          Exception: whatever the call raised on a host.
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
          StopIteration: if the stream has ended on every host.
          MeshfeedError: if it has ended on some hosts only.
          Exception: whatever a host raised.
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
                "some hosts beside the accelerators have ended and others have not; their logs say why."
            )
        return headers

    def close(self) -> None:
        """Stops threads and processes on the hosts; no-op in a forked child."""
        if self._owner.is_here:
            self.call("close")

    # ------------------------------------------------------------------ batches

    def know_spec(self) -> None:
        """Checks whether every host has a batch spec; otherwise ``take`` can only report the end or an error."""
        self._spec_known = all(self.call("knows_spec"))

    def take(self) -> PyTree:
        """Returns the next batch as global arrays over the CPU mesh.

        Raises:
          StopIteration: at the end of the stream.
          Exception: whatever a host raised.
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
