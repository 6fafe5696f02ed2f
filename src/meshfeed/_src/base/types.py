"""Protocols and aliases that the floors above share.

Nothing here is a base class: an object is a source because it has the methods of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

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

    A source may also have any of these, and is read through the first that it has:

    * ``read_raw(record_ids: int64[n]) -> Sequence[bytes]`` with the attributes ``decode`` and ``decode_batch``
      (either may be None): undecoded records. The feed calls the decoder and gives it ``rng=`` if it accepts it.
      Beside it, ``read_rows(record_ids: int64[n]) -> uint8[n, bytes] | None`` is used where the class of ``decode_batch``
      has ``from_rows(rows) -> pytree`` beside its ``__call__``, and where it gives None ``read_raw`` is.
    * ``read_batch(record_ids: int64[n]) -> pytree`` of arrays ``[n, ...]``: records already stacked. A source whose
      ``reads_columns`` is true is called as ``read_batch(record_ids, columns=ColumnSlices)`` and may be asked
      ``element_shapes() -> pytree of jax.ShapeDtypeStruct`` (of one record) before.
    * ``__getitems__(record_ids: list[int]) -> Sequence[Record]``.

    What these return belongs to the source: it is copied before the next call, unless it lies in ``bytes``. Classes of
    meshfeed whose methods return fresh memory at each call say so by ``fresh_arrays = True``, and are not copied.

    And these, all optional:

    * ``fingerprint() -> JsonValue``: what must be equal for a saved state to be continued; replaces the probe of
      four records that the feed makes otherwise.
    * ``file_of(record_id: int) -> str | None``: the file that holds a record, for error messages and logs.
    * ``close() -> None``: release files and threads.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, record_id: Any, /) -> Record: ...


@runtime_checkable
class LaneIterator(Protocol):
    """One lane's sequential stream of records.

    ``get_state() -> JsonValue`` and ``set_state(state)`` are optional; without them a lane is resumed by reading and
    dropping what was delivered. ``get_state`` is of the last record returned by ``__next__`` and may hold tuples,
    which come back as tuples. ``close()`` is optional. ``state_cost`` may be ``"expensive"``: the state is then
    taken now and then, and the records since are skipped on resume.

    ``next_batch(num_records: int) -> pytree`` of arrays ``[n, ...]`` is optional and replaces n calls of ``__next__``,
    with 1 <= n <= num_records: less than asked for does not mean the end, which is StopIteration. Both may be mixed.
    """

    def __next__(self) -> Record: ...


@runtime_checkable
class StreamSource(Protocol):
    """A sequential source that can be cut into lanes.

    ``open`` gives the records of lane ``lane_index`` of ``num_lanes`` from the beginning; the same records whichever
    host asks. ``epoch`` is passed by keyword if ``open`` accepts it. ``fingerprint() -> JsonValue`` (optional) is what
    must be equal for a saved state to be continued.
    """

    def open(self, lane_index: int, num_lanes: int) -> LaneIterator: ...


Decode: TypeAlias = Callable[..., Record]
DecodeBatch: TypeAlias = Callable[..., PyTree]
RecordIds: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Rngs: TypeAlias = Sequence[np.random.Generator]
