"""The object that runs on the CPU hosts attached to the accelerators.

Every method takes and returns arrays only, catches all exceptions, and reports them in the header. Result shapes depend
on argument shapes only, because Colocated Python compiles a method once per argument shape.
"""

from __future__ import annotations

from typing import Any, Protocol

import cloudpickle
import jax
import numpy as np

from meshfeed._src.base import coordination
from meshfeed._src.base.types import PyTree
from meshfeed._src.remote.wire import (
    END,
    ERROR,
    OK,
    Header,
    address,
    decode_call,
    encode_answer,
    encode_error,
    padded,
    rows_of,
    to_rows,
)


class EndpointTarget(Protocol):
    """What an endpoint creates on each host: an iterator over batches with methods callable by name."""

    calls: dict[str, Any]

    def next(self) -> PyTree:
        """Returns the next batch as global arrays over the CPU mesh; raises StopIteration at the end."""
        ...

    def numbers(self) -> tuple[int, int, int]:
        """Returns the steps and records delivered, and the rows of the next global batch (0 if unknown)."""
        ...

    def spec(self) -> PyTree | None:
        """Returns a pytree of ``jax.ShapeDtypeStruct`` with shardings, or None if this host has no batch."""
        ...


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
        if batch is None:  # the compiled call must return the same structure, also at the end and after an error
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


def _header(endpoint: Any, request: jax.Array, flag: int) -> jax.Array:
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
