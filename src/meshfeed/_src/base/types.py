"""Protocols and type aliases shared by all packages, and the public module names of private definitions.

The protocols are not base classes: any object with the methods of a source is a source. ``hooks.py`` lists the optional
methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

T = TypeVar("T", bound=Callable[..., Any])


def public(module: str) -> Callable[[T], T]:
    """Returns a decorator that sets ``__module__``: reprs, tracebacks and pickles then show ``meshfeed.PeerError``."""

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


class RandomAccessSource(Protocol):
    """Records by integer id: the protocol that Grain, TFDS, Hugging Face and PyTorch share.

    The feed reads with the first of these hooks that the source has (see :mod:`meshfeed._src.base.hooks`):

    * ``read_raw`` (RawReader), with ``decode`` or ``decode_batch``: undecoded records, which the feed decodes. If the
      source also defines ``read_rows(record_ids: int64[n]) -> uint8[n, bytes] | None``, and the class of
      ``decode_batch`` defines ``from_rows(rows) -> pytree`` alongside ``__call__``, the feed uses those two instead,
      except when ``read_rows`` returns None.
    * ``read_batch`` (BatchReader): records already stacked.
    * ``__getitems__`` (ItemsReader): several records with one call.

    A feed calls it on threads other than the one that constructed it: one takes the fingerprint, one reads ahead (the
    caller's if ``prefetch=0``), and with ``num_threads`` above 1 several read at the same time. Worker processes get a
    pickled copy each. Ids come in any order and more than once. ``close``, if it has one, is called by ``feed.close()``;
    another feed may read the source again afterwards.

    Returned arrays belong to the source: the feed copies them before the next call, unless their memory is ``bytes``.
    Classes of meshfeed whose methods return new memory on each call set ``fresh_arrays = True`` to avoid the copy.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, record_id: Any, /) -> Record: ...


class RecordOrder(Protocol):
    """Which record is at which position of a random-access stream."""

    @property
    def total(self) -> int | None:
        """Number of records in the whole stream; None if it never ends."""

    def config(self) -> dict[str, JsonValue]:
        """Returns the part of the fingerprint that describes the order.

        ``algorithm`` and ``version`` identify how record ids are computed: raise ``version`` if they change. All other
        entries are settings that must be equal for a saved state to be usable.
        """
        ...

    def ids_at(self, positions: RecordIds) -> tuple[RecordIds, RecordIds]:
        """Returns record ids and epochs at ``positions``, int64 ``[n]`` each.

        Raises:
          IndexError: a position is outside the stream.
        """
        ...

    def ids_between(self, start: int, stop: int) -> tuple[RecordIds, RecordIds]:
        """Returns :meth:`ids_at` for positions ``[start, stop)``."""
        ...


class LaneIterator(Protocol):
    """One lane's sequential stream of records.

    The feed also uses ``get_state`` and ``set_state``, ``next_batch``, and ``close`` if the lane has them (Resumable,
    StackedLane and Closeable in :mod:`meshfeed._src.base.hooks`). Without a state, resuming a lane reads and discards
    the records already delivered.
    """

    def __next__(self) -> Record: ...


class StreamSource(Protocol):
    """A sequential source that can be split into lanes.

    ``open(lane_index, num_lanes)`` returns an iterator over the records of lane ``lane_index`` of ``num_lanes`` from the
    beginning, the same on every host. Feeds pass ``epoch=`` and ``seed=`` if it has these parameters.
    """

    open: Callable[..., LaneIterator]


class HostBatchPass(Protocol):
    """One pass over a host's own batches."""

    def __next__(self) -> PyTree: ...

    def next_pass(self) -> HostBatchPass:
        """Returns a new pass from the first batch."""
        ...

    def get_state(self) -> JsonValue:
        """Returns the state after the last batch returned."""

    def close(self) -> None:
        """Closes the pass."""


class HostBatchSource(Protocol):
    """A host's own batches (:class:`meshfeed.sources.HostBatches`)."""

    @property
    def iterable(self) -> object:
        """The iterable of batches that the user passed."""

    @property
    def restartable(self) -> bool:
        """Whether each pass gets a new iterator."""
        ...

    @property
    def resumable(self) -> bool:
        """Whether the batches can resume from a saved state."""
        ...

    def iterator(self, state: JsonValue = None) -> HostBatchPass:
        """Returns an iterator from the first batch, or after the batch at which ``state`` was taken."""
        ...

    def fingerprint(self) -> JsonValue:
        """Returns the identity of the batches."""

    def close(self) -> None:
        """Closes the source."""


class MeshDevice(Protocol):
    """A ``jax.Device``, or a fake one of :mod:`meshfeed.testing`."""

    @property
    def id(self) -> int:
        """Index of the device, unique over all hosts."""
        ...

    @property
    def process_index(self) -> int:
        """The host to which the device belongs."""
        ...

    @property
    def platform(self) -> str:
        """Such as ``"cpu"`` or ``"tpu"``."""
        ...


Decode: TypeAlias = Callable[..., Record]
DecodeBatch: TypeAlias = Callable[..., PyTree]
RecordIds: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
MAX_POSITION = 1 << 62
"""End of an endless stream: the sum of two positions still fits into an int64."""
Rngs: TypeAlias = Sequence[np.random.Generator]
