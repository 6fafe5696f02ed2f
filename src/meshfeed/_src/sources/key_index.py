"""Which record has a key: an index of a source by the values of one leaf, kept in a file if the user wishes."""

from __future__ import annotations

import itertools
import json
import logging
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import xxhash

from meshfeed._src.base import hooks
from meshfeed._src.base.errors import SettingsError, SourceError
from meshfeed._src.base.types import RandomAccessSource, Record
from meshfeed._src.reading.identity import source_identity
from meshfeed._src.sources.documents import in_record, of_each

_log = logging.getLogger("meshfeed.sources.join")
_USUAL_KEYS = ("__key__", "path")  # of WebDataset and Folder
_RECORDS_PER_READ = 1024  # which may be images
_MAGIC = b"meshfeed key index 1\n"


class KeyIndex:
    """Finds records by key, with 16 bytes of memory per record.

    Args:
      digests: uint64 ``[records]``, the digests of the keys, ascending.
      record_ids: int64 ``[records]``, the record of each.
    """

    def __init__(self, digests: np.ndarray, record_ids: np.ndarray) -> None:
        self._digests, self._record_ids = digests, record_ids

    def find(self, keys: Sequence[object]) -> np.ndarray:
        """Returns the record of each key, int64 ``[n]``, -1 if there is none.

        Raises:
          ValueError: a key is neither text, bytes nor an int.
        """
        wanted = np.fromiter(map(_digest, keys), np.uint64, len(keys))
        places = np.minimum(np.searchsorted(self._digests, wanted), len(self._digests) - 1)
        return np.where(self._digests[places] == wanted, self._record_ids[places], -1)

    def digest(self) -> str:
        """Returns a digest of all keys and their records."""
        return _digest_of(self._digests, self._record_ids)


def key_leaf(source: RandomAccessSource, key: str | None) -> str:
    """Returns the leaf that identifies the records of a source: ``key``, or that of a source that has a usual one.

    Raises:
      SettingsError: there is none.
    """
    usual = [name for name in _USUAL_KEYS if knows_keys(source, name)]
    if key is None and not usual:
        raise SettingsError(
            f"other_key=None, and {source!r:.80} has no leaf that identifies its records by itself. Name the leaf that has "
            "the keys: Join(…, other_key=…).",
            setting="other_key",
        )
    return usual[0] if key is None else key


def knows_keys(source: RandomAccessSource, key: str) -> bool:
    """Whether a source knows the keys of its records, which are then not read for them."""
    return _known_keys(source, key) is not None


def _known_keys(source: RandomAccessSource, key: str) -> Iterable[object] | None:
    stored = hooks.find(source, hooks.StoredKeys)
    return None if stored is None else stored.stored_keys(key)


def is_key(value: object) -> bool:
    """Whether a value can be a key: text, bytes or an int."""
    return isinstance(value, str | bytes | int | np.integer) and not isinstance(value, bool)


def same_key(one: object, other: object) -> bool:
    """Whether two keys are the same; raises ValueError if one is neither text, bytes nor an int."""
    return _digest(one) == _digest(other)


def index_of(source: RandomAccessSource, key: str, path: str | os.PathLike[str] | None) -> KeyIndex:
    """Returns the index of a source by its leaf ``key``.

    Args:
      source: a random-access source. It is read once if it does not know its keys.
      key: the leaf.
      path: a file in which the index is kept; it is read if it is that of this source. None to keep none.

    Raises:
      SourceError: two records have the same key, or a record lacks the leaf; names them.
      SettingsError: the file is something else, or has no folder.
    """
    if path is not None and (os.path.isdir(path) or not os.path.isdir(os.path.dirname(path) or ".")):
        raise SettingsError(  # now, and not after all records have been read
            f"index_file={os.fspath(path)!r} is a folder, or in a folder that does not exist. Pass the path of a file in a "
            "folder that exists.",
            setting="index_file",
        )
    identity = None if path is None else json.dumps([key, source_identity(source)], sort_keys=True).encode()
    found = None if path is None or identity is None else _load(path, identity)
    if found is None:
        found = _make(source, key)
        if path is not None and identity is not None:
            _save(found, path, identity)
    return found


def _make(source: RandomAccessSource, key: str) -> KeyIndex:
    keys = _known_keys(source, key)
    values = _read(source, key) if keys is None else keys
    digests = np.fromiter(_digests(source, values), np.uint64, len(source))
    order = np.argsort(digests, kind="stable")
    digests = digests[order]
    same = np.flatnonzero(digests[1:] == digests[:-1])
    if len(same):
        one, other = order[same[0] : same[0] + 2].tolist()
        more = f" {len(same) - 1:,} more keys occur again." if len(same) > 1 else ""
        raise SourceError(
            f"records {one} and {other} of {source!r:.80} have the same key {key!r}: {key_at(source, key, one)!r}.{more} "
            "Keys must be different: leave out records with Subset, or write longer keys.",
            record_id=other,
        )
    return KeyIndex(digests, order.astype(np.int64))


def _digests(source: RandomAccessSource, keys: Iterable[object]) -> Iterator[int]:
    for record_id, key in enumerate(keys):
        try:
            yield _digest(key)
        except ValueError as error:
            raise in_record(source, record_id, error) from error


def _read(source: RandomAccessSource, key: str) -> Iterator[object]:
    """Yields the key of each record."""
    _log.info("reading %d records once for their keys", len(source))
    doing = "Join: reads the records once for their keys"
    yield from of_each(source, lambda record: key_of(record, key), doing, _RECORDS_PER_READ)


def key_at(source: RandomAccessSource, key: str, record_id: int) -> object:
    """Returns the key of a record, for a message."""
    keys = _known_keys(source, key)  # those of decoded records may not have the leaf any more
    return key_of(source[record_id], key) if keys is None else next(itertools.islice(keys, record_id, None))


def key_of(record: Record, key: str) -> Any:
    """Returns the leaf ``key`` of a record; raises ValueError if it has none."""
    if not isinstance(record, dict) or key not in record:
        has = (
            f"the leaves {sorted(map(str, record))}"
            if isinstance(record, dict)
            else f"no leaves ({type(record).__name__})"
        )
        raise ValueError(f"it has {has}, and not the key {key!r}. Name the leaf that has the key.")
    return record[key]


def _digest(key: Any) -> int:
    if isinstance(key, str):  # a file name may hold any bytes
        return xxhash.xxh3_64_intdigest(b"s" + key.encode("utf-8", "surrogateescape"))
    if isinstance(key, bytes):
        return xxhash.xxh3_64_intdigest(b"s" + key)
    if is_key(key):
        return xxhash.xxh3_64_intdigest(b"i" + str(int(key)).encode())
    raise ValueError(f"its key is {key!r:.80}, {type(key).__name__}. Expected text, bytes or an int.")


def _digest_of(*arrays: np.ndarray) -> str:
    digest = xxhash.xxh3_64()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _load(path: str | os.PathLike[str], identity: bytes) -> KeyIndex | None:
    """The index in a file; None if there is none, or one of other records or cut short."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except FileNotFoundError:
        return None
    if not content.startswith(_MAGIC):
        raise SettingsError(
            f"index_file={os.fspath(path)!r} is a file of something else. Pass a path of its own.", setting="index_file"
        )
    head, _, rest = content[len(_MAGIC) :].partition(b"\n")
    digest, _, rest = rest.partition(b"\n")
    if head != identity or len(rest) % 16 or _digest_of(np.frombuffer(rest, np.uint8)).encode() != digest:
        return None
    halves = np.frombuffer(rest, "<u8").reshape(2, -1)
    return KeyIndex(halves[0], halves[1].astype(np.int64))


def _save(index: KeyIndex, path: str | os.PathLike[str], identity: bytes) -> None:
    rest = index._digests.astype("<u8").tobytes() + index._record_ids.astype("<u8").tobytes()
    digest = _digest_of(np.frombuffer(rest, np.uint8)).encode()
    # Several hosts may share the folder: each writes a file of its own, and one of them stays.
    temporary = f"{os.fspath(path)}.{secrets.token_hex(4)}"
    with open(temporary, "wb") as file:
        file.write(_MAGIC + identity + b"\n" + digest + b"\n" + rest)
    os.replace(temporary, path)
