"""Protocols and type aliases shared by all packages.

These are not base classes: any object with the methods of a source is a source.

Public module names for classes and functions that are defined in private modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np

T = TypeVar("T", bound=Callable[..., Any])


def public(module: str) -> Callable[[T], T]:
    """Returns a decorator that sets ``__module__``: reprs, tracebacks and pickles then show ``meshfeed.PeerError``.

    Args:
      module: the public module that exports the class or function, such as ``"meshfeed"``.
    """

    def rename(value: T) -> T:
        value.__module__ = module
        return value

    return rename


PyTree: TypeAlias = Any
"""Nested dicts, lists, tuples and registered nodes with arrays as leaves."""

JsonValue: TypeAlias = Any
"""None, bool, int, float, str, and lists and string-keyed dicts of them."""

Record: TypeAlias = Any
"""One example: bytes, or a pytree of numpy arrays and numpy/Python scalars."""

ColumnSlices: TypeAlias = Mapping[str, tuple[slice, ...]]
"""Leaf path (``jax.tree_util.keystr``) → slices of the dimensions after the first."""


@runtime_checkable
class RandomAccessSource(Protocol):
    """Records by integer id: the protocol that Grain, TFDS, Hugging Face and PyTorch share.

    A source may define any of the following read methods; the feed uses the first one defined:

    * ``read_raw(record_ids: int64[n]) -> Sequence[bytes]`` with the attributes ``decode`` and ``decode_batch``
      (either may be None): undecoded records. The feed calls the decoder, with ``rng=`` if it accepts that keyword.
      If the source also defines ``read_rows(record_ids: int64[n]) -> uint8[n, bytes] | None``, and the class of
      ``decode_batch`` defines ``from_rows(rows) -> pytree`` alongside ``__call__``, the feed uses those two instead,
      except when ``read_rows`` returns None.
    * ``read_batch(record_ids: int64[n]) -> pytree`` of arrays ``[n, ...]``: records already stacked. If the source has
      ``reads_columns = True``, the feed calls ``read_batch(record_ids, columns=ColumnSlices)``, and may first call
      ``element_shapes() -> pytree of jax.ShapeDtypeStruct`` (shapes of one record).
    * ``__getitems__(record_ids: list[int]) -> Sequence[Record]``.

    Returned arrays belong to the source: the feed copies them before the next call, unless their memory is ``bytes``.
    Classes of meshfeed whose methods return new memory on each call set ``fresh_arrays = True`` to avoid the copy.

    These methods are also optional:

    * ``fingerprint() -> JsonValue``: a value that must be equal for a saved state to be usable; replaces the default
      probe of four records.
    * ``file_of(record_id: int) -> str | None``: the file that holds a record, for error messages and logs.
    * ``concatenate(others) -> source | None``: one source over the records of this one and of ``others``, or None if
      they do not read and decode alike; a mixture then reads them with one call.
    * ``close() -> None``: releases files and threads.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, record_id: Any, /) -> Record: ...


@runtime_checkable
class LaneIterator(Protocol):
    """One lane's sequential stream of records.

    ``get_state() -> JsonValue`` and ``set_state(state)`` are optional; without them, resuming a lane reads and discards
    the records already delivered. ``get_state`` describes the stream after the last record returned by ``__next__``.
    The state may contain tuples, which are restored as tuples. ``close()`` is optional. If ``state_cost`` is
    ``"expensive"``, the feed takes the state only occasionally, and skips the records since then on resume.

    ``next_batch(num_records: int) -> pytree`` of arrays ``[n, ...]`` is optional and replaces n calls of ``__next__``,
    with 1 <= n <= num_records. Fewer records than requested do not mean the end; StopIteration does. Calls of both may
    be mixed.
    """

    def __next__(self) -> Record: ...


@runtime_checkable
class StreamSource(Protocol):
    """A sequential source that can be split into lanes.

    ``open`` returns the records of lane ``lane_index`` of ``num_lanes`` from the beginning, the same records on every
    host. ``epoch`` is passed by keyword if ``open`` accepts it. ``fingerprint() -> JsonValue`` (optional) returns a
    value that must be equal for a saved state to be usable.
    """

    def open(self, lane_index: int, num_lanes: int) -> LaneIterator: ...


Decode: TypeAlias = Callable[..., Record]
DecodeBatch: TypeAlias = Callable[..., PyTree]
RecordIds: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Rngs: TypeAlias = Sequence[np.random.Generator]
