"""The identity of a source: kind, number of records, and its own fingerprint or a probe of its content."""

from __future__ import annotations

import contextvars
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import cast

import numpy as np
import xxhash

from meshfeed._src.base import hooks
from meshfeed._src.base.coordination import process_index
from meshfeed._src.base.errors import MeshfeedError, SourceError, StalledError, refuse_stop_iteration
from meshfeed._src.base.hooks import find
from meshfeed._src.base.retry import call_with_retry, count_attempts
from meshfeed._src.base.settings import Retry
from meshfeed._src.base.stores import is_unreachable
from meshfeed._src.base.threads import SingleCall, note_thread
from meshfeed._src.base.trees import flatten_with_paths
from meshfeed._src.base.types import JsonValue, PyTree, RandomAccessSource, StreamSource
from meshfeed._src.reading.records import SourceReader, wants_rng

_log = logging.getLogger("meshfeed.feed")
_PROBES = 4  # part of every fingerprint: a different number would refuse all saved states
_LARGE_CHARACTERS = 1 << 16  # of a fingerprint; states are exchanged between hosts, and written at every save


def probe_ids(num_records: int) -> np.ndarray:
    """Returns up to four record ids spread over a source: the first, the last and two in between."""
    return np.unique(np.linspace(0, num_records - 1, min(_PROBES, num_records)).astype(np.int64))


def digest_tree(tree: PyTree) -> str:
    """Returns the xxh3-64 of all leaves' paths, dtypes, shapes and bytes."""
    hasher = xxhash.xxh3_64()
    for path, leaf in flatten_with_paths(tree)[0]:
        array = np.ascontiguousarray(leaf)
        hasher.update(f"{path}{array.dtype}{array.shape}".encode())
        hasher.update(array.tobytes())
    return hasher.hexdigest()


def probe_digest(
    num_records: int,
    digest: Callable[[np.ndarray], str],
    retry: Retry = Retry(),
    numbers: hooks.NumbersRecords | None = None,
) -> str:
    """Returns a digest of up to four records spread over a source.

    A single unreadable record does not raise: it is marked in the digest, because a feed over it must still have a state. If
    the source numbers its records itself (``numbers``), an id that it does not have is marked as well, silently.

    Raises:
      Exception: that of the first record, if none can be read, or of one in a store that is out of reach or busy. A digest of
        errors alone would be the same for any source that is out of reach, and a state saved before would be refused as one
        of different content; so would a state saved now, once the store answers again.
    """
    ids = probe_ids(num_records)
    try:
        return call_with_retry(lambda: digest(ids), retry, doing="reading four records to identify the source")
    except Exception as together:  # one unreadable record must not hide changes in the others
        try:
            return _digest_one_by_one(ids, digest, numbers)
        except Exception as error:
            count_attempts(error, together)
            raise


def _digest_one_by_one(
    ids: np.ndarray, digest: Callable[[np.ndarray], str], numbers: hooks.NumbersRecords | None
) -> str:
    digests: list[str] = []
    unreadable: list[tuple[int, Exception]] = []
    missing = 0
    for i in range(len(ids)):
        try:
            digests.append(digest(ids[i : i + 1]))
        except Exception as error:
            if is_unreachable(error):  # in passing, and a state that marks the record would be refused afterwards
                raise
            digests.append("bad")
            if _exists(ids[i : i + 1], numbers):
                unreadable.append((int(ids[i]), error))
            else:
                missing += 1
    if unreadable:
        first = unreadable[0][1]
        names = ", ".join(str(record_id) for record_id, _ in unreadable)
        if len(unreadable) == len(ids) - missing:
            count = len(unreadable)
            first.add_note(
                f"in identifying the source by {'one record' if count == 1 else f'{count} records'} ({names}), none of "
                "which can be read on this host"
            )
            note_thread(first)
            raise first
        _log.warning(
            "%s %s cannot be read (%s: %s); the source's fingerprint marks %s as unreadable",
            "record" if len(unreadable) == 1 else "records",
            names,
            type(first).__name__,
            first,
            "it" if len(unreadable) == 1 else "them",
        )
    return digest_tree([np.frombuffer(text.encode(), np.uint8) for text in digests])


def _exists(record_ids: np.ndarray, numbers: hooks.NumbersRecords | None) -> bool:
    try:
        if numbers is not None:
            numbers.check_record_ids(record_ids)
    except SourceError:
        return False
    return True


def content_digest(source: RandomAccessSource, retry: Retry, *, arrays: bool = False) -> str | None:
    """Returns the digest of the probed records, from raw bytes if available; None if decoding needs random numbers.

    ``arrays`` states that the records must be arrays already; otherwise a function above may make arrays of text.
    """
    raw_reader = find(source, hooks.RawReader)
    if raw_reader is not None:
        return probe_digest(len(source), lambda ids: digest_raw(raw_reader.read_raw(ids)), retry)
    if wants_rng(source):
        return None
    numbers = find(source, hooks.NumbersRecords)
    return probe_digest(len(source), lambda ids: _digest_records(source, ids, arrays), retry, numbers)


def _digest_records(source: RandomAccessSource, ids: np.ndarray, arrays: bool) -> str:
    try:
        return digest_tree(SourceReader(source).read(ids))
    except SourceError:
        if arrays or len(ids) > 1:  # several may differ only in shape
            raise
    return digest_raw(encode(source[int(ids[0])]))


def encode(value: object) -> Iterator[bytes]:
    """Yields the parts of a record of any Python objects; of those that are not data, the type."""
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            yield f"key {name!r}".encode("utf-8", "surrogatepass")
            yield from encode(value[name])
    elif isinstance(value, list | tuple):
        yield f"{len(value)} items".encode()
        for item in value:
            yield from encode(item)
    elif isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        array = np.ascontiguousarray(value)
        yield f"{array.dtype}{array.shape}".encode()
        yield array.tobytes()
    elif isinstance(value, bytes | bytearray):
        yield bytes(value)
    elif value is None or isinstance(value, str | int | float | complex):
        yield repr(value).encode("utf-8", "surrogatepass")
    else:
        yield type(value).__qualname__.encode()


def digest_raw(records: Iterable[bytes]) -> str:
    """Returns the xxh3-64 of the lengths and bytes of records."""
    hasher = xxhash.xxh3_64()
    for raw in records:
        hasher.update(len(raw).to_bytes(8, "little"))  # a shifted record boundary changes the digest
        hasher.update(raw)
    return hasher.hexdigest()


def source_identity(
    source: RandomAccessSource | StreamSource, retry: Retry = Retry(), *, arrays: bool = False
) -> dict[str, JsonValue]:
    """Returns the part of the fingerprint that identifies the source, as JSON. May read records.

    ``arrays`` states that its records must be arrays, as those of a feed.

    A source's own ``fingerprint()`` replaces the probe of four records. The kind is always included, and the number of
    records if the source has a length.
    """
    own = find(source, hooks.Fingerprinted)
    identity: dict[str, JsonValue] = {"kind": kind_of(source)}
    if isinstance(source, Sized):
        identity["records"] = len(source)
    if own is not None:
        with refuse_stop_iteration(f"fingerprint() of a {kind_of(source)}"):
            try:
                value = call_with_retry(own.fingerprint, retry, doing="taking the fingerprint of the source")
            except MeshfeedError:
                raise
            except Exception as error:
                error.add_note(f"in fingerprint() of a {identity['kind']}")
                note_thread(error)
                raise
            value = _as_json(value, identity["kind"])
        if not isinstance(value, dict):
            return {**identity, "fingerprint": value}
        # The first field that differs is named: settings that determine the number of records come before it.
        first = identity if "records" in value else {"kind": identity["kind"]}
        return {**first, **value, **{name: identity[name] for name in identity if name not in value}}
    if isinstance(source, Sized):  # streams are not probed: opening may be slow, and the first records identify little
        identity["content"] = content_digest(cast("RandomAccessSource", source), retry, arrays=arrays)
    return identity


def _as_json(value: JsonValue, kind: JsonValue) -> JsonValue:
    """Returns a fingerprint as a state holds it: tuples as lists, and all keys as text.

    Raises:
      SourceError: it is no JSON.
    """
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise SourceError(
            f"fingerprint() of a {kind} returned a {type(value).__name__} that is not JSON ({error}). Expected None, "
            "numbers, strings, and lists and string-keyed dicts of them. Return text, such as a hexdigest of the bytes."
        ) from error
    if len(text) > _LARGE_CHARACTERS:
        _log.warning(
            "fingerprint() of a %s returned %s characters of JSON, which every state holds; return a digest of them instead",
            kind,
            f"{len(text):,}",
        )
    return json.loads(text)


def kind_of(source: object) -> str:
    """Returns the kind of a source: its ``kind``, or the name of its class."""
    named = find(source, hooks.HasKind)
    return type(source).__name__ if named is None or not named.kind else named.kind


def identify_within(
    source: RandomAccessSource | StreamSource, retry: Retry, timeout_seconds: float
) -> dict[str, JsonValue]:
    """Returns :func:`source_identity`, computed on a separate thread because it may hang in a read.

    Raises:
      StalledError: it takes longer than ``timeout_seconds``.
    """
    context = contextvars.copy_context()  # with the division of probes, on the other thread too
    identity = SingleCall(lambda: context.run(source_identity, source, retry, arrays=True), "meshfeed-identify")

    def tick(waited: float) -> None:
        if waited >= timeout_seconds:
            host = process_index()
            doing = "reading four of its records" if find(source, hooks.Fingerprinted) is None else "its fingerprint()"
            raise StalledError(
                f"host {host} cannot identify its source, a {kind_of(source)}: {doing} has not returned after {waited:.0f} s "
                f"(timeout_seconds={timeout_seconds:g}). Check its storage; raise timeout_seconds if it may take longer.",
                hosts=(host,),
                waited_seconds=waited,
            )

    return identity.result(tick)
