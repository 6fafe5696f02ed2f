"""Several random-access sources one after the other."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex, TypeVar, cast

import numpy as np

from meshfeed._src.base import hooks, trees
from meshfeed._src.base.errors import SourceError, hides_own_frames
from meshfeed._src.base.types import JsonValue, PyTree, Record, RecordIds, public
from meshfeed._src.reading.identity import source_identity
from meshfeed._src.reading.shared_probes import identify_each
from meshfeed._src.sources.built import AllRecords
from meshfeed._src.sources.checks import check_ids
from meshfeed._src.sources.joined import SeveralSources
from meshfeed._src.sources.lists import plain_records, select_all
from meshfeed._src.sources.recognize import as_source, describe_source

R = TypeVar("R")


@public("meshfeed.sources")
@hides_own_frames
def Concat(sources: Sequence[object]) -> Any:
    """Puts sources one after the other: the records of the first, then those of the second, and so on.

    Sources that read and decode alike, such as ArrayRecord files with one decoder, are read with one call.

    Args:
      sources: random-access sources, or objects that the feed accepts as such, with records of equal structure.

    Returns:
      A random-access source of all their records.

    Raises:
      SourceError: there is no record, a source is a stream, or records of two sources differ, which may not be known before
        they are read; names the sources.
      SettingsError: a source is a mixture whose weights change at steps.

    Examples:
      >>> import numpy as np
      >>> from meshfeed.sources import Concat, Memory
      >>> source = Concat([Memory({"x": np.arange(3)}), Memory({"x": np.arange(5)})])
      >>> len(source), int(source[4]["x"])
      (8, 1)
    """
    if not isinstance(sources, Sequence) or isinstance(sources, str | bytes) or not len(sources):
        raise SourceError(f"Concat got {sources!r:.80}. Expected a list of at least one source.")
    return select_all({str(number): as_source(source) for number, source in enumerate(sources)}, "Concat", _concat)


def _concat(sources: dict[str, Any]) -> Any:
    records = [plain_records(source, "Concat") for source in sources.values()]
    if not any(map(len, records)):
        raise SourceError(f"Concat got {len(records)} source(s) with 0 records in all. Expected at least one record.")
    joinable = hooks.find(records[0], hooks.Concatenates)
    joined = None if joinable is None or not records[1:] else joinable.concatenate(records[1:])
    return ConcatenatedRecords(dict(zip(sources, records, strict=True))) if joined is None else joined


class ConcatenatedRecords(SeveralSources, AllRecords):
    """A :func:`Concat` of sources that do not all read alike; made by that function.

    Attributes:
      starts: int64[sources], the id of the first record of each.
    """

    kind = "concat"

    def __init__(self, sources: dict[str, Any], noun: str = "source", whole: str = "Concat") -> None:
        super().__init__(sources, noun, whole)
        self._ends = np.cumsum([len(source) for source in self._sources], dtype=np.int64)
        self.starts = np.concatenate([[0], self._ends[:-1]])

    def __repr__(self) -> str:
        return f"Concat([{', '.join(map(describe_source, self._sources))}])"

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, record_id: SupportsIndex) -> Record:
        """Record ``record_id`` of all."""
        return self.__getitems__([operator.index(record_id)])[0]

    def _located(self, record_ids: RecordIds | Sequence[int]) -> tuple[RecordIds, RecordIds]:
        ids = np.asarray(record_ids, np.int64)
        check_ids(ids, len(self), "source")
        numbers = np.searchsorted(self._ends, ids, side="right")
        return numbers, ids - self.starts[numbers]

    def _all(self, hook: type[R]) -> list[R]:
        """The sources as ``hook``; Concat has a hook that says something of all records only if all sources have it."""
        found = [hooks.find(source, hook) for source in self._sources]
        if None in found:
            raise AttributeError(f"not every source has the hook {hook.__name__}")
        return [source for source in found if source is not None]

    @property
    def shard_lengths(self) -> Callable[[], RecordIds]:
        """Number of records in each file; only if all sources are made of files."""
        sharded = self._all(hooks.Sharded)
        return lambda: np.concatenate([source.shard_lengths() for source in sharded])

    @property
    def lengths(self) -> Callable[[], np.ndarray]:
        """The lengths of all records; only if all sources know their own."""
        known = self._all(hooks.KnowsLengths)
        return lambda: cast("np.ndarray", _joined(source.lengths() for source in known))

    @property
    def stored_lengths(self) -> Callable[[str], np.ndarray | None]:
        """The lengths of a leaf of all records, if manifests or the sources have them."""
        sources = self._all(hooks.StoredLengths)
        return lambda key: _joined(source.stored_lengths(key) for source in sources)

    def joined_lengths(self, key: str) -> np.ndarray | None:
        """The lengths of all records, that of each being that of its leaf ``key``; see ``hooks.JoinsLengths``."""
        return _joined(hooks.known_lengths(source, key) for source in self._sources)

    @property
    def stored_keys(self) -> Callable[[str], Iterable[object] | None]:
        """A leaf that identifies the records, if all sources know theirs; see ``hooks.StoredKeys``."""
        sources = self._all(hooks.StoredKeys)

        def of_all(key: str) -> Iterable[object] | None:
            parts = [source.stored_keys(key) for source in sources]
            return None if None in parts else itertools.chain.from_iterable(part for part in parts if part is not None)

        return of_all

    @property
    def read_slices(self) -> Callable[[RecordIds, np.ndarray, np.ndarray], PyTree]:
        """Reads parts of records; only if all sources do; see :class:`meshfeed._src.base.hooks.SlicesReader`."""
        self._all(hooks.SlicesReader)

        def of_all(record_ids: RecordIds, starts: np.ndarray, lengths: np.ndarray) -> PyTree:
            numbers, ids = self._located(record_ids)

            def read(source: hooks.SlicesReader, rows: RecordIds) -> list[PyTree]:
                flat = source.read_slices(ids[rows], starts[rows], lengths[rows])
                ends = np.cumsum(lengths[rows])
                bounds = zip((ends - lengths[rows]).tolist(), ends.tolist(), strict=True)
                return [trees.map_leaves(lambda leaf, a=a, b=b: leaf[a:b], flat) for a, b in bounds]

            slices = self._in_order(numbers, read)
            self._check_leaves(numbers, slices)
            return trees.map_leaves(lambda *leaves: np.concatenate(leaves), *slices)

        return of_all

    def _check_leaves(self, numbers: RecordIds, slices: Sequence[PyTree]) -> None:
        """Checks that the parts of records have the same leaves."""
        names = [[path for path, _ in trees.flatten_with_paths(part)[0]] for part in slices]
        other = next((row for row, found in enumerate(names) if found != names[0]), None)
        if other is None:
            return
        noun, sources = self._noun, [self._names[numbers[row]] for row in (0, other)]
        raise SourceError(
            f"the records of {noun} {sources[0]!r} of the {self._whole} have the leaves {names[0]}, those of {noun} "
            f"{sources[1]!r} {names[other]}. Give them the same names, as by key= of Tokens.documents."
        )

    def unconverted(self) -> ConcatenatedRecords:
        """The same records as they are stored, if the sources convert them."""
        sources = {name: hooks.unconverted(source) for name, source in self._named.items()}
        return ConcatenatedRecords(sources, self._noun, self._whole)

    def fingerprint(self) -> JsonValue:
        """Identity: those of all sources."""
        return {"sources": list(identify_each(self._named, source_identity).values())}


def _joined(parts: Iterable[np.ndarray | None]) -> np.ndarray | None:
    """The values of all sources, or None if those of one are unknown."""
    found: list[np.ndarray] = []
    for part in parts:
        if part is None:
            return None
        values = np.asarray(part)
        found.append(values.astype(np.int64) if values.dtype == np.uint64 else values)  # float64 beside signed integers
    return np.concatenate(found)
