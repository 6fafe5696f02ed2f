"""The state of a feed: a small JSON value from which the stream can resume, and its fingerprint.

Layout::

    {"meshfeed": 1, "kind": "random_access", "position": 6400, "segments": [[0, 0, 64]], "fingerprint": {…}}

``kind`` is ``random_access``, ``lanes`` or ``host_batches``. The last two also have ``step``; lanes have ``num_lanes``
and ``lanes`` {lane index: entry}, host batches have ``hosts`` {process index: entry}. After the first replacement of a
bad record, the state has ``skipped`` {process index: ledger} and ``num_skipped``, the count over all hosts; once a
ledger is full, also ``num_unlisted`` {process index: count}. Every lane and host entry contains its own digest, which
detects manual edits. ``before_reset`` is what a feed with stages of weights that it added had delivered before a reset
(:class:`meshfeed._src.streams.lane_reader.Delivered`).

A ledger lists the ids, reasons and steps of the records that one host replaced, and is bounded in size.

``meshfeed`` is the lowest version that can read the state. Version 2 added ``num_unlisted``, and entries with the key
``__meshfeed__`` (see :mod:`meshfeed._src.base.exact_json`); version 3 added ``before_reset``. States without them are
still written as version 1, which an older meshfeed can read after a rollback.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self, cast

from meshfeed._src.base import coordination
from meshfeed._src.base.errors import DAMAGED_STATE, DRAWS, StateMismatchError, shorten
from meshfeed._src.base.exact_json import OTHER
from meshfeed._src.base.identities import FOUR_RECORDS, as_saved
from meshfeed._src.base.types import MAX_POSITION, JsonValue, public

VERSION = 3
_MARKS = {3: ('"before_reset"',), 2: (f'"{OTHER}"', '"num_unlisted"')}  # version → texts of which a state of it has one
_SHOWN_CHARACTERS = 80  # of a value in a message
KINDS = ("random_access", "lanes", "host_batches")

_DAMAGED = (
    "Pass the result of get_state(). If this was read from a file, the file is damaged: use an earlier checkpoint."
)
_OTHER_LOADER = (
    "For a position of Grain or MaxText, see `meshfeed import-position`; other loaders' states cannot be converted."
)
_MERGE = "Merge states that the hosts took after the same step of one feed."
_REQUIRED: dict[str, type] = {"kind": str, "position": int, "segments": list, "fingerprint": dict}
_OPTIONAL: dict[str, type] = {
    "step": int, "num_lanes": int, "lanes": dict, "hosts": dict, "skipped": dict, "num_skipped": int,
    "num_unlisted": dict, "before_reset": dict,
}  # fmt: skip

_REMEDIES = {
    "source": "Pass the source that the state was saved with, or start a new stream without the state.",
    "order": "This version of meshfeed orders records differently; continue with the version that saved the state.",
    **dict.fromkeys(("shuffle", "seed", "end"), "Pass the saved value, or start a new stream without the state."),
    "num_epochs": "Pass the saved value, or start a new stream without the state. To be able to train longer than planned, "
    "start the stream with num_epochs=None and end the loop after a number of steps.",
    **dict.fromkeys(
        ("window_shards", "affinity"),
        "Pass the saved value in shuffle=meshfeed.ShardShuffle(…), or start a new stream without the state.",
    ),
    "num_lanes": "Pass the saved number, or num_lanes=None to take it from the state.",
    "kind": "The state belongs to a different kind of source; pass that source, or start a new stream.",
}


def digest_of(value: JsonValue) -> str:
    """Returns the xxh3-64 of the canonical JSON text of ``value``, in hexadecimal."""
    import xxhash

    return xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def seal(entry: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Returns ``entry`` with its digest added."""
    return {**entry, "digest": digest_of(entry)}


def unseal(entry: JsonValue, field: str) -> dict[str, JsonValue]:
    """Returns the entry without its digest; raises StateMismatchError if it has none, or one that does not match."""
    if not isinstance(entry, dict) or "digest" not in entry:
        raise StateMismatchError(field, entry, "an object with a digest", DAMAGED_STATE)
    bare = {key: value for key, value in cast("dict[str, JsonValue]", entry).items() if key != "digest"}
    if digest_of(bare) != entry["digest"]:
        raise StateMismatchError(f"{field}.digest", entry["digest"], digest_of(bare), DAMAGED_STATE)
    return bare


def check_counts(entry: Mapping[str, JsonValue], names: Iterable[str], field: str) -> None:
    """Raises StateMismatchError unless an entry has a number of at least 0 under each of the names."""
    for name in names:
        if type(value := entry.get(name)) is not int or value < 0:
            raise StateMismatchError(f"{field}.{name}", _shorten(value), "a number of at least 0", DAMAGED_STATE)


def _shorten(value: object) -> object:
    text = repr(value)
    return value if len(text) <= _SHOWN_CHARACTERS else shorten(text, _SHOWN_CHARACTERS)


@dataclasses.dataclass(frozen=True)
class FeedState:
    """A parsed state; see the module docstring for the fields."""

    kind: str
    position: int
    segments: list[list[int]]
    fingerprint: dict[str, JsonValue]
    step: int | None = None
    num_lanes: int | None = None
    lanes: dict[str, JsonValue] | None = None
    hosts: dict[str, JsonValue] | None = None
    skipped: dict[str, JsonValue] | None = None
    num_skipped: int | None = None
    num_unlisted: dict[str, int] | None = None
    before_reset: dict[str, JsonValue] | None = None

    def to_json(self) -> dict[str, JsonValue]:
        """Returns the state as a new JSON value."""
        text = json.dumps({name: value for name, value in vars(self).items() if value is not None})
        return {"meshfeed": _needed_version(text), **json.loads(text)}


def _needed_version(text: str) -> int:
    """The lowest version that can read a state with this JSON text."""
    return next((version for version, marks in _MARKS.items() if any(mark in text for mark in marks)), 1)


def parse_state(state: JsonValue) -> FeedState:
    """Parses the result of ``get_state``, or its JSON text, and checks its form.

    Raises:
      StateMismatchError: the state is not JSON, truncated or from a newer version, or a field is missing, unknown, of
        the wrong type or out of range.
    """
    fields = _parse_object(state)
    version = _pop_version(fields)
    _check_fields(fields)
    for name, (is_entry, wanted) in _ENTRIES.items():
        for key, entry in fields.get(name, {}).items():
            if not isinstance(key, str) or not key.isdecimal():
                raise StateMismatchError(f"{name}.{key}", key, "a number", _DAMAGED)
            if not is_entry(entry):
                raise StateMismatchError(f"{name}.{key}", _shorten(entry), wanted, _DAMAGED)
    if fields["kind"] not in KINDS:
        raise StateMismatchError("kind", fields["kind"], " or ".join(KINDS), _DAMAGED)
    text = json.dumps(fields)
    if version > (needed := _needed_version(text)):
        raise StateMismatchError("meshfeed", version, needed, f"Nothing in the state needs that version. {_DAMAGED}")
    return FeedState(**json.loads(text))  # a deep copy: the caller may change its own


def _parse_object(state: JsonValue) -> dict[str, JsonValue]:
    if isinstance(state, os.PathLike):
        state = os.fspath(cast("os.PathLike[str]", state))
    if isinstance(state, str | bytes | bytearray):
        given = state
        try:
            state = json.loads(given)
        except ValueError as error:
            text = given if isinstance(given, str) else given.decode(errors="replace")
            if text[:1] not in ("", "{", "[") and text.isprintable():  # one line, as a path is
                remedy = (
                    "A state is the value that get_state() returned, or its JSON. If this is the path of a file, pass "
                    f"json.loads(open({_shorten(text)!r}).read()); Checkpointer.restore restores a checkpoint folder."
                )
            else:
                remedy = f"It is truncated or not JSON ({error}). {_DAMAGED}"
            raise StateMismatchError("state", _shorten(given), "JSON", remedy) from None
    if not isinstance(state, Mapping):
        raise StateMismatchError("state", _shorten(state), "a JSON object", _DAMAGED)
    return dict(cast("Mapping[str, JsonValue]", state))


def _pop_version(fields: dict[str, JsonValue]) -> int:
    version = fields.pop("meshfeed", None)
    remedy = ""
    if not isinstance(version, int) or isinstance(version, bool):
        remedy = f"This is not the state of a feed. {_DAMAGED} {_OTHER_LOADER}"
    elif version > VERSION:
        remedy = "A newer version of meshfeed wrote this state; upgrade meshfeed to read it."
    elif version < 1:
        remedy = f"There is no such version. {_DAMAGED}"
    if remedy:
        raise StateMismatchError("meshfeed", version, VERSION, remedy)
    return version


def _check_fields(fields: Mapping[str, JsonValue]) -> None:
    for name, kind in _REQUIRED.items():
        if name not in fields:
            remedy = f"The state has no {name!r}, so it is truncated or damaged. {_DAMAGED}"
            raise StateMismatchError(name, "missing", kind.__name__, remedy)
    for name, value in fields.items():
        kind = _REQUIRED.get(name) or _OPTIONAL.get(name)
        if kind is None:
            raise StateMismatchError(name, _shorten(value), "no such field", _DAMAGED)
        # bool is a subclass of int.
        if not isinstance(value, kind) or isinstance(value, bool) or (kind is int and value < 0):
            raise StateMismatchError(name, _shorten(value), kind.__name__, _DAMAGED)
        if kind is int and value >= MAX_POSITION:
            raise StateMismatchError(name, value, "a number below 2**62, the limit of every stream", _DAMAGED)


def _is_ledger(entries: JsonValue) -> bool:
    kinds = [int, int, str, int]  # compared exactly: isinstance would accept True as an int
    return isinstance(entries, list) and all(
        isinstance(entry, list) and [type(item) for item in cast("list[JsonValue]", entry)] == kinds
        for entry in cast("list[JsonValue]", entries)
    )


# Fields that map lanes or hosts to entries: the check of an entry, and the expected form.
_ENTRIES: dict[str, tuple[Callable[[JsonValue], bool], str]] = {
    "lanes": (lambda entry: True, ""),
    "hosts": (lambda entry: True, ""),
    "skipped": (_is_ledger, "[[record id, epoch, reason, step], …]"),
    "num_unlisted": (lambda entry: type(entry) is int and entry >= 0, "a number of records"),
}


def flatten(value: JsonValue, prefix: str = "") -> dict[str, JsonValue]:
    """Flattens nested dicts into one dict with dotted keys."""
    if isinstance(value, dict) and value:
        flat: dict[str, JsonValue] = {}
        for key, item in cast("dict[str, JsonValue]", value).items():
            flat.update(flatten(item, f"{prefix}.{key}" if prefix else str(key)))
        return flat
    return {prefix: value}


def _text(value: JsonValue) -> str:
    return json.dumps(value, sort_keys=True)  # to compare texts: in Python, True == 1


def _first_difference(first: Mapping[str, JsonValue], second: Mapping[str, JsonValue]) -> str:
    """Returns the first key with a different value, or with a value in only one of them."""
    texts, others = ({name: _text(value) for name, value in flat.items()} for flat in (first, second))
    return next(name for name in (*texts, *others) if texts.get(name) != others.get(name))


def _parts(
    saved: JsonValue, current: JsonValue, field: str
) -> tuple[dict[str, JsonValue], dict[str, JsonValue]] | None:
    """Returns the first two entries that differ of equally long lists of objects, flattened; None for anything else."""
    if not (isinstance(saved, list) and isinstance(current, list)):
        return None
    old, new = cast("list[JsonValue]", saved), cast("list[JsonValue]", current)
    pairs = enumerate(zip(old, new, strict=True)) if len(old) == len(new) else ()
    for number, (first, second) in pairs:
        if _text(first) != _text(second):
            if not (isinstance(first, dict) and isinstance(second, dict)):
                return None
            return flatten(first, f"{field}[{number}]"), flatten(second, f"{field}[{number}]")
    return None


def compare_fingerprints(
    saved: Mapping[str, JsonValue],
    current: Mapping[str, JsonValue],
    file_names: Callable[[], Sequence[str]] | None = None,
) -> None:
    """Checks that a feed with fingerprint ``current`` can resume from a state with fingerprint ``saved``.

    Raises:
      StateMismatchError: the fingerprints differ; names the first field that differs.
    """
    current = json.loads(json.dumps(current))  # saved has passed through JSON, which turns tuples into lists
    # An algorithm of the order follows from the settings, so a setting that differs is the cause and comes first.
    for top in sorted(dict.fromkeys((*current, *saved)), key="order".__eq__):
        old, new = saved.get(top), as_saved(current.get(top), saved.get(top))
        if _text(old) == _text(new) or (top == "num_epochs" and old is None):  # an endless stream may be given an end
            continue
        flat_old, flat_new = flatten(old, top), flatten(new, top)
        if (top in flat_old) != (top in flat_new):  # only one of them is an object
            flat_old, flat_new = {top: old}, {top: new}
        field = _first_difference(flat_new, flat_old)
        while (parts := _parts(flat_old.get(field), flat_new.get(field), field)) is not None:
            flat_old, flat_new = parts
            field = _first_difference(flat_new, flat_old)
        files = ""
        if top == "source":
            files = about_files(flat_old, flat_new, file_names() if file_names else ())
            files = files or about_digest(field, flat_old, flat_new)
        absent = top not in saved or field not in flat_old
        lacks = f"The state has no {field!r}: it is damaged or belongs to a different stream. " if absent else ""
        raise StateMismatchError(
            field,
            flat_old.get(field, "missing"),
            flat_new.get(field, "missing"),
            lacks + files + _REMEDIES.get(top, "Use the saved value, or start a new stream without the state."),
        )


_SHARD = re.compile(r"(?P<before>.*?)(?P<number>\d+)-of-(?P<total>\d+)(?P<after>.*)")


def about_files(saved: Mapping[str, JsonValue], current: Mapping[str, JsonValue], names: Sequence[str]) -> str:
    """Describes a change in the number of files, and missing files, as sentences with a trailing space, or nothing."""
    counts = [
        f"The saved source had {saved[name]} files, the current one has {count}. "
        for name, count in current.items()
        if name.endswith(".count") and name in saved and saved[name] != count
    ]
    missing = missing_shards(names) if counts else []
    listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    return "".join(counts[:1]) + (f"Missing: {listed}. " if missing else "")


def about_digest(field: str, saved: Mapping[str, JsonValue], current: Mapping[str, JsonValue]) -> str:
    """Describes what a digest or size that differs is of, as a sentence with a trailing space, or nothing."""
    before, _, name = field.rpartition(".")
    if field not in saved or field not in current:
        return ""
    if name == "bytes":
        old, new = saved[field], current[field]
        if isinstance(old, int) and isinstance(new, int):
            change = abs(new - old)
            size = f"{change:,} byte{'' if change == 1 else 's'} {'more' if new > old else 'less'}"
            return f"As many files as before, but they have {size} in all. "
    if name == "digest":
        what = "Their number and total size are" if current.get(f"{before}.bytes") is not None else "The rest is"
        return f"Names, sizes or order of files differ. {what} the same: a file was renamed or replaced by another. "
    if name in ("content", FOUR_RECORDS):
        same = [
            what
            for key, what in (("records", "the number of records"), ("files.count", "the names and sizes of the files"))
            if saved.get(f"{before}.{key}", saved.get(f"{before.removesuffix('.content')}.{key}")) is not None
        ]
        also = f" although {' and '.join(same)} are the same" if len(same) > 1 else ""
        also = f" although {same[0]} is the same" if same == ["the number of records"] else also
        return (
            f"The content of records differs{also}: up to four records spread over the source are compared, and one that "
            f"cannot be read, of which the log has a warning, counts as different. {DRAWS} "
        )
    return ""


def missing_shards(names: Iterable[str]) -> list[str]:
    """Files missing from numbered sets: ``a-00001-of-00002`` if ``names`` contains only ``a-00000-of-00002``."""
    sets: dict[tuple[str, str, str], set[str]] = {}
    for name in names:
        found = _SHARD.fullmatch(os.path.basename(name))
        if found:
            sets.setdefault((found["before"], found["total"], found["after"]), set()).add(found["number"])
    missing: list[str] = []
    for (before, total, after), numbers in sets.items():
        # Sets are numbered from 0 or from 1; a file with the number ``total`` implies 1.
        width, first = len(next(iter(numbers))), int(str(int(total)).zfill(len(total)) in numbers)
        wanted = [str(number).zfill(width) for number in range(first, int(total) + first)]
        missing += [f"{before}{number}-of-{total}{after}" for number in wanted if number not in numbers]
    return missing


def kind_mismatch(saved: str, current: str) -> StateMismatchError:
    """Returns the error for a state of a different kind of source."""
    return StateMismatchError("kind", saved, current, _REMEDIES["kind"])


def _join_entries(part: str, left: JsonValue, right: JsonValue) -> JsonValue:
    """Merges two hosts' entries of the same lane, host or ledger; None if they contradict each other."""
    if left == right:
        return left
    if part == "lanes":
        # Hosts that open the same lane may have taken the source's state at different records before the same position.
        # The entry with the smaller skip resumes faster.
        if not isinstance(left, dict) or not isinstance(right, dict):
            return None
        entries = [cast("dict[str, JsonValue]", left), cast("dict[str, JsonValue]", right)]
        alike = all(entries[0].get(name) == entries[1].get(name) for name in ("records", "epoch", "taken", "ended"))
        whole = all(type(entry.get("skip", 0)) is int for entry in entries)  # set_state checks the digest
        return min(entries, key=lambda entry: entry.get("skip", 0)) if alike and whole else None
    if part == "num_unlisted":
        return max(left, right)  # counts only grow, so the larger one is the later
    if part == "skipped":
        # Each host appends only to its own ledger, and keeps the other ledgers as restored.
        shorter, longer = sorted((left, right), key=len)
        return longer if longer[: len(shorter)] == shorter else None
    return None


def _join(part: str, states: Sequence[FeedState]) -> dict[str, JsonValue] | None:
    """Merges the entries of several states, ascending by lane or host; None if no state has the field."""
    found: list[dict[str, JsonValue]] = [entries for state in states if (entries := getattr(state, part)) is not None]
    joined: dict[str, JsonValue] = {}
    for entries in found:
        for key, entry in entries.items():
            merged = _join_entries(part, joined.setdefault(key, entry), entry)
            if merged is None:
                raise StateMismatchError(f"{part}.{key}", _shorten(joined[key]), _shorten(entry), _MERGE)
            joined[key] = merged
    # Keys are text in JSON, where "10" comes before "2".
    return dict(sorted(joined.items(), key=lambda item: int(item[0]))) if found else None


def join_before_reset(states: Iterable[FeedState]) -> dict[str, JsonValue] | None:
    """Merges what hosts had delivered before a reset: each knows at least the ends of its own lanes."""
    found = [unseal(state.before_reset, "before_reset") for state in states if state.before_reset is not None]
    if not found:
        return None
    ended = {lane: length for one in found for lane, length in one["ended"].items()}
    return seal({**max(found, key=lambda one: one["step"]), "ended": ended})


@public("meshfeed")
def merge_states(states: Iterable[Mapping[str, JsonValue]]) -> dict[str, JsonValue]:
    """Merges the states of several hosts, taken after the same step, into one.

    Lanes and host entries of streams are combined, and ledgers and counts of replaced records for every kind of source;
    all other fields must be equal.

    Args:
      states: results of ``get_state`` on the hosts, in any order; a lane may occur in several.

    Returns:
      A state from which any number of hosts can resume (host batches: the same number), as JSON.

    Raises:
      StateMismatchError: the states belong to different streams or steps, or there are none.

    Examples:
      >>> import jax, meshfeed, numpy as np
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> with meshfeed.Feed({"x": np.arange(8)}, mesh, global_batch_size=4) as feed:
      ...     states = [feed.get_state()]  # one of each host
      >>> meshfeed.merge_states(states) == states[0]
      True
    """
    if not isinstance(cast("object", states), Iterable) or isinstance(states, Mapping | str | bytes):
        raise StateMismatchError(
            "states", _shorten(cast("object", states)), "a list of states", "Pass the states of the hosts."
        )
    parsed = [parse_state(state) for state in states]
    if not parsed:
        raise StateMismatchError("states", [], "at least one state", "Pass the states of the hosts.")
    first = parsed[0]
    for state in parsed:
        for name in ("kind", "position", "step", "segments", "num_lanes", "fingerprint"):
            if getattr(state, name) != getattr(first, name):
                raise StateMismatchError(name, getattr(first, name), getattr(state, name), _MERGE)
    # A host outside of the mesh does not learn of replaced records. Counts only grow, so the largest is complete.
    num_skipped = max((state.num_skipped for state in parsed if state.num_skipped is not None), default=None)
    joined = {part: _join(part, parsed) for part in _ENTRIES}
    before_reset = join_before_reset(parsed)
    return dataclasses.replace(first, num_skipped=num_skipped, before_reset=before_reset, **joined).to_json()


MAX_LISTED = 16_384  # over all hosts; keeps a state with all ledgers below 1 MB
MAX_REASONS = 256  # entries with a reason, over all hosts; reasons take most of the space


@dataclasses.dataclass(frozen=True)
class Ledgers:
    """Replaced records in delivered batches.

    A host appends only to its own ledger. Beyond its share of the limit, it counts records instead of listing them.
    """

    # Process index → list of [record id, epoch, reason, step]; reasons beyond MAX_REASONS are empty.
    listed: Mapping[str, Sequence[JsonValue]] = dataclasses.field(default_factory=dict[str, Sequence[JsonValue]])
    # Process index → number of further records that the host replaced.
    num_unlisted: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])

    @classmethod
    def of_state(cls, state: FeedState) -> Self:
        """Returns the ledgers of a state."""
        return cls(state.skipped or {}, state.num_unlisted or {})

    def state_fields(self) -> dict[str, JsonValue]:
        """Returns the ledgers as fields of :class:`~meshfeed._src.state.state.FeedState`."""
        listed = {host: list(entries) for host, entries in self.listed.items()}
        return {"skipped": listed or None, "num_unlisted": dict(self.num_unlisted) or None}

    def after(self, bad: Sequence[tuple[int, int, str]], step: int) -> Ledgers:
        """Returns the ledgers after a batch in which this host replaced ``bad``: (record id, epoch, reason) of each."""
        if not bad:
            return self
        host, num_hosts = str(coordination.process_index()), coordination.process_count()
        mine = self.listed.get(host, ())
        room = max(1, MAX_LISTED // num_hosts) - len(mine)  # equal shares need no communication
        reasons = max(1, MAX_REASONS // num_hosts) - len(mine)
        new = [
            [record_id, epoch, reason if number < reasons else "", step]
            for number, (record_id, epoch, reason) in enumerate(bad[: max(0, room)])
        ]
        left_out = len(bad) - len(new)
        unlisted = {host: self.num_unlisted.get(host, 0) + left_out} if left_out else {}
        return Ledgers({**self.listed, host: [*mine, *new]} if new else self.listed, {**self.num_unlisted, **unlisted})


def count_skipped(state: FeedState) -> int:
    """Number of records replaced on all hosts up to a state; counted from the ledgers if the state has no count."""
    if state.num_skipped is not None:
        return state.num_skipped
    # Hosts that hold the same rows list the same records, so entries are compared without the host and the reason.
    return len({tuple(entry[i] for i in (0, 1, 3)) for entries in (state.skipped or {}).values() for entry in entries})
