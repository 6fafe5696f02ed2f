"""The object that lives on the hosts beside the accelerators.

Every method takes and gives arrays only, catches whatever is raised, and says so in the header. Shapes of the answers
follow from shapes of the arguments, because Colocated Python compiles a method once for each shape of its arguments.
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
    """What an endpoint makes on each host: gives batches, and answers calls by name."""

    calls: dict[str, Any]

    def next(self) -> PyTree:
        """Global arrays over the CPU mesh; StopIteration at the end."""
        ...

    def numbers(self) -> tuple[int, int, int]:
        """Steps and records delivered, rows of the next global batch (0: not known)."""
        ...

    def spec(self) -> PyTree | None:
        """``jax.ShapeDtypeStruct`` with shardings, or None where this host has no batch to tell from."""
        ...


class Endpoint:
    """See the module.

    Args:
      payload: pickled function, CPU mesh → EndpointTarget.
    """

    def __init__(self, payload: bytes) -> None:
        self._payload = payload  # nothing may fail here: it would be lost
        self._target: Any = None
        self._spec: PyTree | None = None
        self._answer = b""

    def begin(self, request: jax.Array) -> jax.Array:
        """Makes the target over the mesh of ``request``; a header for each device."""
        flag = OK
        try:
            self._target = cloudpickle.loads(self._payload)(request.sharding.mesh)  # pyright: ignore[reportAttributeAccessIssue] # what comes is laid out on a mesh
            self._spec = self._target.spec()
        except Exception as error:
            flag, self._answer = ERROR, encode_error(error)
        return _header(self, request, flag)

    def take(self, request: jax.Array) -> tuple[jax.Array, PyTree]:
        """The next batch and a header.

        Args:
          request: ``[devices, 1]`` where the structure of a batch is not known; there is no batch then. Else
            ``[devices, 1 + n]``, n telling apart the batch sizes that have come up.
        """
        flag, batch = OK, None
        size = 0
        try:
            size = self._target.numbers()[2]
            batch = self._target.next()
        except StopIteration:
            flag = END
        except Exception as error:
            flag, self._answer = ERROR, encode_error(error)
        if request.shape[1] == 1:
            return _header(self, request, flag), ()
        if batch is None:
            batch = jax.tree.map(lambda leaf: _zeros(leaf, size), self._spec)
        return _header(self, request, flag), batch

    def stage(self, request: jax.Array) -> jax.Array:
        """Runs a call and keeps its answer, of which the header gives the length."""
        flag = OK
        try:
            name, args = decode_call(rows_of(request)[0])
            known = name == "knows_spec"
            self._answer = encode_answer(self._spec is not None if known else self._target.calls[name](*args))
        except Exception as error:
            flag, self._answer = ERROR, encode_error(error)
        return _header(self, request, flag)

    def fetch(self, buffer: jax.Array) -> jax.Array:
        """The answer and the host that it comes from, as long as ``buffer``."""
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
