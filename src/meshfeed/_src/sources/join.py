"""Records joined to those of another source by a key."""

from __future__ import annotations

import copy
import functools
import itertools
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex

import numpy as np

from meshfeed._src.base import hooks
from meshfeed._src.base.errors import SettingsError, SourceError, hides_own_frames
from meshfeed._src.base.identities import JOINED
from meshfeed._src.base.types import JsonValue, RandomAccessSource, Record, RecordIds, StreamSource, public
from meshfeed._src.reading.identity import source_identity
from meshfeed._src.reading.records import wants_rng
from meshfeed._src.sources.built import Built, RecordsOfFiles, SameHooks
from meshfeed._src.sources.checks import check_ids
from meshfeed._src.sources.documents import in_record, read_items
from meshfeed._src.sources.host_batches import HostBatches
from meshfeed._src.sources.key_index import (
    KeyIndex,
    index_of,
    is_key,
    key_at,
    key_leaf,
    key_of,
    knows_keys,
    same_key,
)
from meshfeed._src.sources.lists import plain_records, select
from meshfeed._src.sources.map import MappedStream
from meshfeed._src.sources.recognize import as_source, describe_source

Key = str | Callable[[Record], Any]


@public("meshfeed.sources")
@hides_own_frames
def Join(
    source: object,
    others: object,
    *,
    key: Key,
    other_key: str | None = None,
    into: str | None = None,
    index_file: str | os.PathLike[str] | None = None,
) -> Any:
    """Adds to each record the record of another source with the same key, such as the images that a text names.

    The leaf ``key`` of a record is one key, or a list of keys; it is replaced by the record of ``others`` with that key, or
    by a list of them. A key that is None is replaced by None. Put :class:`Map` around it, which makes arrays::

        texts = Parquet("captions-*.parquet")  # {"text": "…", "images": ["a/1.jpg", "a/2.jpg"]}
        joined = Join(texts, Folder("images"), key="images")  # {"text": "…", "images": [{"path": …, "bytes": …}, …]}
        source = Map(joined, to_arrays)

    An index of all keys is made when the source is created. ``Folder``, ``WebDataset`` (by ``"__key__"``) and Parquet files
    know their keys; other records are read once, or not at all if ``index_file`` has their index. It takes 16 bytes of memory
    per record. The keys of a batch are looked up together, and the other records are read with one call.

    Args:
      source: dicts with the leaf ``key``, random access or a stream, or any object that the feed accepts as such.
      others: random-access records, each with a key of its own, or any object that the feed accepts as such.
      key: a leaf of ``source`` with text, bytes or ints, or lists of them; or a function of a record that returns the keys.
      other_key: the leaf of ``others`` with the keys; None for ``"__key__"`` of WebDataset, ``"path"`` of Folder.
      into: the leaf that gets the other records; None for ``key``.
      index_file: a local file in which the index is kept for the next time. It is made again if ``others`` change.

    Returns:
      A random-access source if ``source`` is one, otherwise a stream source.

    Raises:
      SettingsError: a setting is invalid, or records depend on random numbers.
      SourceError: a source is of the wrong kind, or two of ``others`` have the same key. Reads raise it for a record whose
        key is missing in ``others``; names both.

    Examples:
      >>> import numpy as np
      >>> from meshfeed.sources import Join
      >>> texts = [{"text": "a dog", "image": 7}, {"text": "a cat", "image": 5}]
      >>> images = [{"id": 5, "pixels": np.zeros(4)}, {"id": 7, "pixels": np.ones(4)}]
      >>> Join(texts, images, key="image", other_key="id")[0]["image"]["pixels"].tolist()
      [1.0, 1.0, 1.0, 1.0]
    """
    if not callable(key) and not (isinstance(key, str) and key):
        raise SettingsError(f"key={key!r}; it takes the name of a leaf, or a function of a record.", setting="key")
    if into is None and callable(key):
        raise SettingsError("key is a function and into=None. Name the leaf that gets the records.", setting="into")
    for name, value in (("other_key", other_key), ("into", into)):
        if value is not None and not (isinstance(value, str) and value):
            raise SettingsError(f"{name}={value!r}; it takes the name of a leaf, or None.", setting=name)
    records = as_source(source)
    if isinstance(records, HostBatches):
        raise SourceError(
            "Join got batches of this host. Expected a source of records. Join them in your own iterable."
        )
    kept = _stored(plain_records(others, "Join"), "others")
    if not len(kept):
        raise SourceError(f"Join got others with 0 records, a {type(kept).__name__}. Expected at least one.")
    leaf = key_leaf(kept, other_key)
    found = _Lookup(kept, leaf, index_of(kept, leaf, index_file), key, key if into is None else into)
    if hooks.is_stream(records):
        return JoinedStream(hooks.unconverted(records), found)
    return select(records, "Join", lambda listed: JoinedRecords(_stored(listed, "source"), found))


def _stored(records: Any, setting: str) -> Any:
    """Returns records as they are stored; refuses those that need random numbers."""
    if wants_rng(records):
        raise SettingsError(
            f"Join got {setting} whose decoder takes rng=, and reads records before they are decoded at random. Decode "
            "afterwards: Map(Join(…), function).",
            setting=setting,
        )
    return hooks.unconverted(records)


def _decodes(source: Any) -> bool:
    """Whether a source, or one that it is built over, decodes its records."""
    below = source._below() if isinstance(source, Built) else ()
    return hooks.find(source, hooks.Decodes) is not None or any(map(_decodes, below))


class _Lookup:
    """Finds and reads the other records."""

    def __init__(self, others: RandomAccessSource, leaf: str, index: KeyIndex, key: Key, into: Any) -> None:
        self.others, self.leaf, self.index, self.key, self.into = others, leaf, index, key, into
        self._has_keys = not knows_keys(others, leaf)
        self._shows_keys = not _decodes(others)  # a decoder may change the leaf

    def identity(self) -> dict[str, JsonValue]:
        """Returns the identity of the other records, and a digest of all keys."""
        key = self.key if isinstance(self.key, str) else None
        keys = {"key": key, "other_key": self.leaf, "into": self.into, "digest": self.index.digest()}
        return {"others": source_identity(self.others), "keys": keys}

    def join_one(self, record: Record) -> Record:
        """Returns a record joined to those with its keys."""
        return self.join([record], lambda _, reason: SourceError(str(reason)))[0]

    def join(self, records: Sequence[Record], name: Callable[[int, Exception], SourceError]) -> list[Record]:
        """Returns records joined to those with their keys.

        Args:
          records: dicts.
          name: returns the error for a row.

        Raises:
          SourceError: a key is missing.
        """
        ids: list[np.ndarray] = []  # of the other records, for each record
        keys: list[list[Any]] = []
        alone: list[bool] = []  # whether its key was not in a list
        for row, record in enumerate(records):
            try:
                value: Any = self.key(record) if callable(self.key) else key_of(record, self.key)
                several = isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim > 0)
                own = list(value) if several else [] if value is None else [value]
                found = self.index.find(own)
                if (found < 0).any():
                    raise ValueError(self._missing(own[int(np.argmax(found < 0))]))
            except ValueError as error:
                raise name(row, error) from error
            ids.append(found)
            keys.append(own)
            alone.append(not several)
        others = iter(self._read(np.concatenate(ids)) if sum(map(len, ids)) else [])
        joined: list[Record] = []
        for row, (record, own, is_alone) in enumerate(zip(records, keys, alone, strict=True)):
            found = list(itertools.islice(others, len(own)))
            for key, other in zip(own, found, strict=True):
                if self._has_keys or (self._shows_keys and is_key(other.get(self.leaf))):
                    self._check(key, other, functools.partial(name, row))
            joined.append({**record, self.into: (found[0] if found else None) if is_alone else found})
        return joined

    def _read(self, ids: RecordIds) -> Sequence[Record]:
        try:
            return read_items(self.others, ids)
        except Exception as error:
            error.add_note(f"in the records that Join adds, of {self.others!r:.80}")
            raise

    def _check(self, key: object, other: Record, name: Callable[[Exception], SourceError]) -> None:
        """Checks that a record that was read has the key: the index may be of records that have changed since."""
        try:
            has = key_of(other, self.leaf)
            if same_key(has, key):
                return
            raise ValueError(
                f"the record with the key {key!r:.120} of {self.others!r:.120} now has the key {self.leaf!r} {has!r:.120}. "
                "Expected records that do not change. If they were changed before this run, delete the file of index_file=."
            )
        except ValueError as error:
            raise name(error) from error

    def _missing(self, key: object) -> str:
        example = key_at(self.others, self.leaf, 0)
        leaf = "its key" if callable(self.key) else f"its leaf {self.key!r}"
        return (
            f"{leaf} is {key!r:.120}, which is the key {self.leaf!r} of none of the {len(self.others):,} records of "
            f"{self.others!r:.120} (whose keys look like {example!r:.120}). Add the record, leave this one out, or pass a "
            "function as key= that returns the keys in the form of the others."
        )


class JoinedStream(MappedStream):
    """A :func:`Join` of a stream; made by that function."""

    def __init__(self, source: StreamSource, lookup: _Lookup) -> None:
        super().__init__(source, lookup.join_one, False)
        self._lookup = lookup

    def unconverted(self) -> JoinedStream:
        """Returns the stream with its records as they are joined, such as with lists, for functions that make arrays."""
        other = copy.copy(self)
        other._converts = False
        return other

    def fingerprint(self) -> JsonValue:
        """Identity: that of the source, those of the other records, and a digest of all keys."""
        return {"source": source_identity(self._source), JOINED: self._lookup.identity()}

    def _below(self) -> Iterable[Any]:
        return self._source, self._lookup.others


class JoinedRecords(SameHooks, RecordsOfFiles):
    """A :func:`Join` of random-access records; made by that function."""

    kind = "join"
    fresh_arrays = True  # read_items copies memory that a source may reuse
    # What the other records do not change.
    _same_hooks = ("file_of", "shard_lengths", "lengths", "cached_files", "ask_disk")

    def __init__(self, source: RandomAccessSource, lookup: _Lookup) -> None:
        self._source, self._lookup = source, lookup

    def _below(self) -> Iterable[Any]:
        return self._source, self._lookup.others

    def __repr__(self) -> str:
        return f"Join({describe_source(self._source)}, {describe_source(self._lookup.others)})"

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, record_id: SupportsIndex) -> Record:
        """Record ``record_id``, joined."""
        return self.__getitems__([operator.index(record_id)])[0]

    def __getitems__(self, record_ids: Sequence[int]) -> list[Record]:
        """Several records, in the order of ``record_ids``.

        Raises:
          IndexError: an id is not in [0, len).
          SourceError: the key of a record is missing in the other source; names both.
        """
        ids = np.asarray(record_ids, np.int64)
        check_ids(ids, len(self))
        records = read_items(self._source, ids)
        return self._lookup.join(records, lambda row, reason: in_record(self._source, int(ids[row]), reason))

    def stored_lengths(self, key: str) -> np.ndarray | None:
        """The lengths of a leaf of all records, if the source knows them; see ``hooks.StoredLengths``."""
        stored = hooks.find(self._source, hooks.StoredLengths)
        return None if stored is None or key == self._lookup.into else stored.stored_lengths(key)

    def fingerprint(self) -> JsonValue:
        """Identity: those of both sources, and a digest of all keys."""
        return {"source": source_identity(self._source), **self._lookup.identity()}
