"""Optional hooks: what a source, a lane or an iterator may offer beyond its required methods.

Each hook is a Protocol. There is no base class and no registration: an object has a hook if it defines every member of
the Protocol, which :func:`find` checks.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self, TypedDict, TypeVar, Unpack, cast

import numpy as np

from meshfeed._src.base.errors import MeshfeedError, SettingsError, shorten
from meshfeed._src.base.settings import ShardShuffle
from meshfeed._src.base.threads import note_thread
from meshfeed._src.base.types import (
    Decode,
    DecodeBatch,
    JsonValue,
    LaneIterator,
    PyTree,
    RandomAccessSource,
    Record,
    RecordIds,
    RecordOrder,
    Rngs,
    StreamSource,
)

H = TypeVar("H")

# ---------------------------------------------------------------------- sources of any kind


class Fingerprinted(Protocol):
    """Has an identity of its own, which replaces the default probe of four records."""

    def fingerprint(self) -> JsonValue:
        """Returns a value that must be equal for a saved state to be usable, as JSON, the same on every host.

        Called once per feed, when it is made, on a thread of its own; again only if the call raises what a retry may cure.
        """


class HasKind(Protocol):
    """Names its kind in the fingerprint; the default is the name of its class."""

    kind: str


class FileNames(Protocol):
    """Lists its files, so that an error about a different set of files can name the missing ones."""

    def file_names(self) -> Sequence[str]:
        """Returns paths or URLs."""
        ...


class Closeable(Protocol):
    """Releases files and threads."""

    def close(self) -> None:
        """Releases them; using the object again reopens them."""


class Decodes(Protocol):
    """Decodes records one at a time; with ``rng=`` if the function has that parameter."""

    decode: Decode


# ---------------------------------------------------------------------- random-access sources


class DecodesBatches(Protocol):
    """Decodes a list of undecoded records at once, to arrays ``[n, ...]``."""

    decode_batch: DecodeBatch


class RawReader(Protocol):
    """Reads undecoded records, which the feed then decodes."""

    def read_raw(self, record_ids: RecordIds) -> Sequence[bytes]:
        """Returns the bytes of each record; ``record_ids`` is int64 ``[n]``."""
        ...


class RowsReader(RawReader, Protocol):
    """Reads undecoded records of one size into one array; used only with a decoder that :class:`DecodesRows`."""

    def read_rows(self, record_ids: RecordIds) -> np.ndarray | None:
        """Returns uint8 ``[n, bytes per record]``, or None to have ``read_raw`` called instead."""


class DecodesRows(Protocol):
    """Decodes records that are already in one array."""

    def from_rows(self, rows: np.ndarray) -> PyTree:
        """Returns arrays ``[n, ...]`` from uint8 ``[n, bytes per record]``."""


class BatchReader(Protocol):
    """Reads records that are already stacked.

    ``read_batch(record_ids: int64[n])`` returns a pytree of arrays ``[n, ...]``. If the source sets ``reads_columns =
    True``, feeds that need only part of each leaf pass ``columns=`` (ColumnSlices). If the method has the parameter
    ``rngs``, feeds pass one generator per record.
    """

    read_batch: Callable[..., PyTree]


class ColumnReader(Protocol):
    """Can read part of each leaf; see :class:`BatchReader`."""

    reads_columns: bool


class ItemsReader(Protocol):
    """Reads several records with one call."""

    def __getitems__(self, record_ids: list[int], /) -> Sequence[Record]: ...


class DrawnItemsReader(Protocol):
    """Reads several records whose decoders or functions draw random numbers, and which may differ in shape."""

    def read_drawn(self, record_ids: RecordIds, rngs: Rngs) -> Sequence[Record]:
        """Returns the records in memory that only the caller can write; ``rngs`` are one generator per record."""
        ...


class DeclaresRng(Protocol):
    """States whether its decoder takes one generator per record; by default, the decoder's signature decides."""

    wants_rng: bool


class DrawsNumbers(Protocol):
    """A stream whose records pass functions with ``rng=``; those of functions above must not get the same numbers."""

    num_drawing: int


def num_drawing(source: object) -> int:
    """Returns how many functions with ``rng=`` the records of a stream pass, one after the other."""
    drawing = find(source, DrawsNumbers)
    return 0 if drawing is None else drawing.num_drawing


class LocatesRecords(Protocol):
    """Names the file that holds a record, for error messages and logs."""

    def file_of(self, record_id: int) -> str | None:
        """Returns a path or URL, or None if unknown."""


class Concatenates(Protocol):
    """Joins sources that read and decode alike, so a mixture can read them with one call."""

    def concatenate(self, others: Sequence[RandomAccessSource]) -> RandomAccessSource | None:
        """Returns one source of this source's records followed by those of ``others``; None if they are not alike."""


class ConcatenatesRaw(Protocol):
    """Joins sources that read alike but may have different decoders; a mixture then reads them with one call."""

    def concatenate_raw(self, others: Sequence[RandomAccessSource]) -> RandomAccessSource | None:
        """Returns one source of the undecoded records of this source, then those of ``others``; None if not alike."""


class Sharded(Protocol):
    """Stores its records in files, which ``shuffle="shards"`` reads a few at a time."""

    def shard_lengths(self) -> RecordIds:
        """Returns the number of records of each file, int64 ``[files]``, in the order of their record ids."""
        ...


class CachedFile(Hashable, Protocol):
    """A file that is read through a cache on a local disk. Instances for the same file compare equal."""

    cache: object
    """What holds the copy; files of one cache are followed and unfollowed together."""
    num_bytes: int
    """Size of the copy in bytes; 0 if not known."""

    @property
    def ahead_bytes(self) -> int:
        """How many bytes of files to fetch ahead of the reads."""
        ...

    @property
    def plan_bytes(self) -> int:
        """How many bytes of upcoming files to plan for, so that eviction can compare when they are needed."""
        ...

    def follow(self, next_use: Callable[[CachedFile], float]) -> None:
        """Registers a function that returns when a file is needed next, until its owner is freed or calls ``unfollow``."""

    def unfollow(self, next_use: Callable[[CachedFile], float]) -> None:
        """Ends what :meth:`follow` began, for all files of this file's cache."""

    def is_here(self) -> bool:
        """Whether the copy is known to be complete; sends no request."""
        ...

    def fetch(self, next_use: float) -> bool:
        """Fetches the file, which is needed in ``next_use`` batches.

        Returns False if there is no room without evicting a file that is needed sooner, or if the reads have passed it
        before the fetch could begin.
        """
        ...


class CachesFiles(Protocol):
    """Reads files through a cache, which fetches them ahead of the reads."""

    def cached_files(self, record_ids: RecordIds) -> Sequence[CachedFile] | None:
        """Returns the files that hold these records and are read through a cache. Reads nothing.

        Returns None for any ids if the source reads no file through a cache that fetches ahead.
        """


class ReadsDisk(Protocol):
    """Reads files of this machine, whose disk serves reads faster if it gets those of the next batch early."""

    def ask_disk(self, record_ids: RecordIds) -> bool | None:
        """Has the disk fetch records, int64 ``[n]``, into the page cache for a later read; neither waits nor raises.

        Returns:
          Whether some were not in the page cache, as far as a few samples show. None for any ids if the source reads no
          such file.
        """


class ReadsInThreads(Protocol):
    """Reads faster in several threads: it waits for a store, or decodes without the interpreter's lock."""

    read_threads: int
    """Threads that read if the feed has no ``num_threads=``."""


class ChecksSaved(Protocol):
    """An order or a stream that may change after the saved position: a mixture with stages."""

    def check_saved(self, saved_mixture: JsonValue, position: int, step: int | None = None) -> None:
        """Checks that a stream saved at ``position`` with ``saved_mixture`` can resume with this one.

        Raises:
          StateMismatchError: something that determined the delivered records has changed.
        """


class TakesWeights(Protocol):
    """A mixture to which a feed may add stages of weights. Stages are pairs of first step and {name: weight}."""

    def check_weights(self, weights: object) -> dict[str, float]:
        """Returns the weights of one stage.

        Raises:
          SettingsError: they are invalid.
        """
        ...

    def with_added(self, added: Sequence[tuple[int, dict[str, float]]]) -> Self:
        """Returns a copy with the added stages in place of earlier ones."""
        ...


class OrderSettings(TypedDict):
    """A feed's settings that determine the order of its records.

    ``batch_sizes`` are the sizes of future steps. ``segments`` are the first position and the batch size of each run of
    steps. ``num_lanes`` is given only with an order by shards, to sources that are :class:`Sharded`.
    """

    shuffle: bool | int | ShardShuffle
    seed: int
    num_epochs: int | None
    batch_sizes: Sequence[int]
    position_of_step: Callable[[int], int]
    segments: Sequence[tuple[int, int]]
    num_lanes: int | None


class NumbersRecords(Protocol):
    """Numbers and orders its records itself, as a mixture does; its ids are not ``0 <= id < len(source)``."""

    @property
    def first_record_id(self) -> int:
        """Id of the record from which to infer the structure."""
        ...

    def make_order(self, **settings: Unpack[OrderSettings]) -> RecordOrder:
        """Returns the order for a feed's settings."""
        ...

    def check_record_ids(self, record_ids: RecordIds) -> None:
        """Raises SourceError for an id that does not exist."""

    def replacement_id(self, seed: int, epoch: int, record_id: int, attempt: int) -> int:
        """Returns the id of the record that replaces a bad one."""
        ...


class ListsRecords(NumbersRecords, Protocol):
    """Orders its records itself when a feed reads it, but is a list to what is built over it."""

    def as_list(self) -> RandomAccessSource:
        """Returns one epoch of its records in order, with the ids 0 to n − 1."""
        ...


class GroupsRecords(NumbersRecords, Protocol):
    """Decides which records share a batch, which must come last: what selects among its records selects below it."""

    @property
    def grouping(self) -> object:
        """What determines the groups, apart from the records; compared with that of another source."""

    def ungrouped(self) -> RandomAccessSource:
        """Returns its records, before they are grouped."""
        ...

    def regrouped(self, records: RandomAccessSource) -> RandomAccessSource:
        """Returns other records, grouped in the same way."""
        ...


class Unconverted(Protocol):
    """Converts its records to arrays, and can also give them as they are stored, such as with text."""

    def unconverted(self) -> Any:
        """Returns a source over the same records, of the same kind and identity, for functions that convert them."""


class ChecksRecords(Protocol):
    """Checks from the types of its leaves whether its records can become arrays."""

    def check_records(self) -> None:
        """Raises SourceError if they cannot; reads nothing."""


class SeveralShapes(Protocol):
    """Has records of several shapes; all records of a batch have the same shape."""

    def shape_index(self, record_ids: RecordIds) -> int:
        """Returns a number that identifies the shape of a batch of these records, int64 ``[n]``, n >= 1; reads nothing."""
        ...


class KnowsLengths(Protocol):
    """Has records of unequal length, whose lengths are available without reading them."""

    def lengths(self) -> np.ndarray:
        """Returns the length of every record, integers ``[len(source)]``."""
        ...


class StoredLengths(Protocol):
    """May know the lengths of leaves of its records without reading them, such as from a manifest."""

    def stored_lengths(self, key: str) -> np.ndarray | None:
        """Returns the length of the leaf ``key`` of every record, integers ``[len(source)]``; None if unknown."""


class JoinsLengths(Protocol):
    """Joins sources of which some know the lengths of their records, and others store those of leaves."""

    def joined_lengths(self, key: str) -> np.ndarray | None:
        """Returns the lengths of all records, integers ``[len(source)]``: those of their leaf ``key``; None if unknown."""


class StoredKeys(Protocol):
    """May know a leaf that identifies its records without reading them, such as the names of files."""

    def stored_keys(self, key: str) -> Iterable[object] | None:
        """Returns the leaf ``key`` of all records in order, text, bytes or ints; None if unknown."""
        ...


class SlicesReader(Protocol):
    """Reads parts of records of unequal length."""

    def read_slices(self, record_ids: RecordIds, starts: np.ndarray, lengths: np.ndarray) -> PyTree:
        """Returns the concatenated parts, arrays ``[sum of lengths, ...]``; the arguments are int64 ``[n]``."""


class OrdersParts(Protocol):
    """Shuffles the parts of its records too, as packed sequences shuffle their documents."""

    def with_order(self, *, shuffle: bool | int | str | ShardShuffle, seed: int) -> RandomAccessSource:
        """Returns the source for a feed's settings."""
        ...


class RowLengths(Protocol):
    """Has records made of segments, whose lengths are available without reading the records."""

    def row_lengths(self, record_ids: RecordIds) -> tuple[np.ndarray, np.ndarray]:
        """Returns all segments' lengths, int64 ``[segments]``, and each record's first segment, int64 ``[n + 1]``."""
        ...


class SequenceShards(Protocol):
    """Has rows that shards of the sequence axis divide, with unequal work for each; see ``Packed(sequence_order=)``."""

    num_sequence_shards: int

    def shard_costs(self, record_ids: RecordIds) -> np.ndarray:
        """Returns the pairs of tokens that attend to each other in each shard, int64 ``[n, num_sequence_shards]``."""
        ...


# ---------------------------------------------------------------------- streams and their lanes


class LimitsLanes(Protocol):
    """Cannot be split into any number of lanes."""

    def check_lanes(self, num_lanes: int) -> None:
        """Raises SettingsError for a number of lanes that the source cannot serve."""


class CountsLanes(Protocol):
    """Can count the records of its lanes without reading them."""

    def lane_lengths(self, num_lanes: int) -> Sequence[int] | None:
        """Returns the records of each lane in one epoch, before any filter; None if they are not known."""
        ...


class CutsLanes(Protocol):
    """Divides its records into lanes by a rule that may change between versions; a state continues under its own."""

    def cut_version(self, num_lanes: int) -> int:
        """Returns the version for a new stream; 1 if no later version gives other lanes. May count records."""
        ...

    def with_cut(self, version: int) -> StreamSource:
        """Returns a copy of the source whose lanes are cut by a version; the source itself cuts new streams."""
        ...


class StagedStream(StreamSource, ChecksSaved, Protocol):
    """A stream that may change after the saved position: a mixture with stages. Its lanes cover all epochs.

    ``has_stages`` is whether it changes at a step, so that its records count.
    """

    has_stages: bool

    def bind(
        self,
        *,
        seed: int,
        num_epochs: int | None,
        position_of_step: Callable[[int], int],
        delivered: int = 0,  # pragma: no mutate (a member of a Protocol has no copies)
        ended: Mapping[int, int] | None = None,
    ) -> StagedStream:
        """Returns a copy with a feed's settings, whose stages begin at positions.

        Stages that were added later must not change what has been delivered: no lane ends before ``delivered`` records of
        the stream, except those in ``ended`` (lane → its length in records), which end there.
        """
        ...

    def mixture_config(self) -> JsonValue:
        """Returns stages and components, for the fingerprint."""


class Resumable(Protocol):
    """Resumes from a state of its own, instead of by reading and dropping."""

    def get_state(self) -> JsonValue:
        """Returns the state after the last record or batch returned; tuples in it are restored as tuples."""

    def set_state(self, state: JsonValue, /) -> None:
        """Continues after the record or batch at which ``state`` was taken."""


class ReadsAgain(Protocol):
    """A lane with a state that may lack the state of what it reads."""

    @property
    def reads_again(self) -> bool:
        """Whether ``set_state`` would read records again from the beginning, as it is now."""
        ...


class Startable(Resumable, Protocol):
    """A feed that begins to read ahead before its first batch is requested."""

    def start(self) -> None:
        """Begins in the background and returns at once."""


class PlansFiles(Protocol):
    """Lists the files that it will read through a cache, without reading them."""

    def coming_files(self, num_records: int) -> Iterator[Sequence[CachedFile]] | None:
        """Yields the files of each upcoming read of ``num_records`` records, from the current position to the end.

        Lazy; a different thread may advance it while the lane is read. Returns None if there are no such files.
        """


class StackedLane(Protocol):
    """Returns stacked records. Calls of this method and of ``__next__`` may be mixed."""

    def next_batch(self, num_records: int) -> PyTree:
        """Returns arrays ``[n, ...]`` with 1 <= n <= num_records. Fewer records than requested do not mean the end.

        Raises:
          StopIteration: the lane has ended.
        """


# ---------------------------------------------------------------------- host batches


class UnevenHosts(Protocol):
    """Host batches whose number and size may differ between hosts, as with MaxText."""

    rows_may_vary: bool
    """Whether the number of rows may differ between batches."""
    ends_may_differ: bool
    """Whether a state may resume with a different ``end``."""


class CannotResume(Protocol):
    """A feed or stream of batches that can be read only once, so none of its saved positions can be restored."""

    cannot_resume: str
    """Why not, and what to pass instead; None on a feed that can resume, which :func:`find` then does not find."""


# ---------------------------------------------------------------------- look-up


@functools.cache
def _members(hook: type) -> tuple[tuple[str, bool], ...]:
    """Names of a Protocol's members, and whether each is a method."""
    found: dict[str, bool] = {}
    for base in hook.__mro__:
        if getattr(base, "_is_protocol", False) and base is not Protocol:
            found |= dict.fromkeys(vars(base).get("__annotations__", ()), False)
            for name, value in vars(base).items():
                if isinstance(value, types.FunctionType) and name not in ("__init__", "__subclasshook__"):
                    found[name] = True
                elif isinstance(value, property):
                    found[name] = False
    return tuple(found.items())


def find(thing: object, hook: type[H]) -> H | None:
    """Returns ``thing`` typed as ``hook`` if it has every member of that Protocol, else None.

    A method counts only if it is callable, and an attribute only if it is not None.
    """
    for name, is_method in _members(hook):
        value = getattr(thing, name, None)
        if value is None or (is_method and not callable(value)):
            return None
    return cast("H", thing)


def reads_again(lane: object) -> bool:
    """Returns whether a lane that continues elsewhere would be read again from its beginning."""
    again = find(lane, ReadsAgain)
    return find(lane, Resumable) is None or (again is not None and again.reads_again)


def read_threads(*sources: object) -> int:
    """Returns the threads that read sources if the feed has no ``num_threads=``: the most that one asks for, at least 1."""
    asking = (find(source, ReadsInThreads) for source in sources)
    return max((source.read_threads for source in asking if source is not None), default=1)


def known_lengths(source: object, key: str | None) -> np.ndarray | None:
    """Returns the length of every record, which is that of its leaf ``key``, if the source knows it; otherwise None."""
    if (known := find(source, KnowsLengths)) is not None:
        return known.lengths()
    if key is None:
        return None
    if (joined := find(source, JoinsLengths)) is not None:
        return joined.joined_lengths(key)
    stored = find(source, StoredLengths)
    return None if stored is None else stored.stored_lengths(key)


def on_disk(source: object) -> ReadsDisk | None:
    """Returns the source if it reads files of this machine, otherwise None."""
    found = find(source, ReadsDisk)
    return None if found is None or found.ask_disk(np.empty(0, np.int64)) is None else found


def close(thing: object) -> None:
    """Closes ``thing`` if it has a ``close`` method."""
    closeable = find(thing, Closeable)
    if closeable is not None:
        closeable.close()


def unconverted(source: Any) -> Any:
    """Returns ``source`` with its records as they are stored, if it converts them; otherwise ``source``."""
    converts = find(source, Unconverted)
    return source if converts is None else converts.unconverted()


def is_stream(source: object) -> bool:
    """Whether a source is a stream; a source that also has ``__getitem__`` is read at random."""
    return find(source, StreamSource) is not None and not hasattr(source, "__getitem__")


def accepts_keyword(function: Callable[..., Any] | None, keyword: str, *, in_kwargs: bool = False) -> bool:
    """Whether ``function`` has the parameter ``keyword``, and so gets it: a decoder ``rng=``, a stream ``epoch=``.

    ``**kwargs`` does not count: a wrapper may pass them to a function that does not have the parameter. Only
    ``sources.Stream``, which has always passed ``epoch=`` to such functions, counts them (``in_kwargs``), so that saved
    streams continue with the same records.
    """
    if function is None:
        return False
    try:  # not cached: a cache would keep the function, and so the source that a method is bound to
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some C callables have no signature
        return False
    return any(
        (p.name == keyword and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))
        or (in_kwargs and p.kind is p.VAR_KEYWORD)
        for p in parameters
    )


def check_function(function: object, argument: str, what: str, whose: str, setting: str) -> None:
    """Checks that a function can be called with one argument, and with ``rng=`` if it has that parameter.

    It was passed as the keyword ``setting`` of ``whose``; ``argument`` (``"record"``) and ``what`` (``"one record (bytes)"``)
    describe what it gets.

    Raises:
      SettingsError: it cannot be called like that.
    """
    if not callable(function):
        text = f"{whose} got {setting}={shorten(repr(function), 80)}. Expected a function of {what} that gives arrays."
        raise SettingsError(text, setting=setting)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some C callables have no signature
        return
    try:
        signature.bind(None, **({"rng": None} if accepts_keyword(function, "rng") else {}))
    except TypeError as error:
        raise SettingsError(
            f"{whose} got {setting}={getattr(function, '__qualname__', function)}{signature}, which cannot be called as "
            f"{setting}({argument}): {error}. Give it one parameter, and rng= if it draws random numbers.",
            setting=setting,
        ) from None


def open_lane(
    source: StreamSource, lane_index: int, num_lanes: int, *, epoch: int, seed: int, first_id: int = 0
) -> LaneIterator:
    """Opens a lane; passes ``epoch``, ``seed`` and ``first_id`` only to sources whose ``open`` has these parameters.

    ``first_id`` is added to the numbers of records, of which their random numbers are made: components of a mixture that
    number their records alike draw different ones.

    Errors of the user's code get a note that names the lane.
    """
    given = {"epoch": epoch, "seed": seed, "first_id": first_id}
    extra = {name: value for name, value in given.items() if accepts_keyword(source.open, name)}
    try:
        return source.open(lane_index, num_lanes, **extra)
    except MeshfeedError:
        raise
    except Exception as error:
        note = f"while opening lane {lane_index} of {num_lanes}, epoch {epoch}"
        if note not in getattr(error, "__notes__", ()):  # a source that wraps another opens its lane with this too
            error.add_note(note)
        note_thread(error)
        raise
