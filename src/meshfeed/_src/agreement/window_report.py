"""The reports of hosts on a window of steps: how far each has read, and what it found in the batches.

A host's :class:`WindowReport` states how far it has read; the reducer's :class:`Announcement` states how far all hosts
can deliver. :mod:`meshfeed._src.agreement.windows` transports both.

Their contents are what hosts compare, count and learn from each other about the batches: batch sizes in bytes (which set
the window's length), the structure of the records, ended lanes, bad records, and digests of replicated rows. The reducer
merges and compares them (:class:`WindowReports`); every host learns the result from the announcement.

The count of bad records (:class:`BadRecords`) is a property of the stream, not of the hosts: records that several hosts
read count once, the count resumes from a state, and the step at which it exceeds the limit depends only on the source
and the settings.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypedDict, TypeVar

import jax
import numpy as np
import numpy.typing as npt
import xxhash

from meshfeed._src.base.coordination import format_hosts
from meshfeed._src.base.errors import LEFT, AgreementError, Failure, PeerError, SourceError
from meshfeed._src.base.settings import SkipBad
from meshfeed._src.base.trees import tree_from_json, tree_to_json
from meshfeed._src.base.types import JsonValue, PyTree
from meshfeed._src.reading.host_batch import spec_of_batch
from meshfeed._src.reading.stacking import num_bytes
from meshfeed._src.streams.protocol import EMPTY_BATCHES, EMPTY_STREAM, HostBatch

RecordsAfter = Callable[[int, Mapping[int, int]], int]
"""(step, ended lanes) → records of the stream up to and including the step."""
_log = logging.getLogger("meshfeed.exchange")
_CHECKED_STEPS = 4  # first steps of a generation whose replicas are compared
BlocksOf = Callable[[PyTree, int], Mapping[str, npt.NDArray[np.generic]]]
"""(host tree, global batch size) → label → block of rows (and columns), for each block on this host's devices."""
V = TypeVar("V")


class Unsized(TypedDict):
    """Padding of a host that cannot derive the size of the global batch.

    Attributes:
      size: the smallest possible global batch size.
      ended: see :attr:`ReportContents.ended`, counted at that size.
    """

    size: int
    ended: dict[str, int]


class ReportContents(TypedDict, total=False):
    """What a host found in the batches of a window.

    Attributes:
      bytes: bytes of this host's part of the largest batch; in the first window only.
      records: structure of the records, in words; in the first window only.
      element: the structure of a batch, see :func:`meshfeed._src.base.trees.tree_to_json`; in the first window only.
      needs_element: the host has no record of its own and needs ``element`` from another.
      ended: see :attr:`meshfeed._src.streams.protocol.HostBatch.ended`.
      unsized: padding of unknown size.
      sizes: step → global batch size.
      bad: step → [record id, epoch] of bad records.
      last_bad: the last of them and its error, in words.
      digests: step and block → digest of replicated rows.
      failed: the failure that kept the host from preparing these contents.
      empty: the host's stream has no record.
    """

    bytes: int
    records: str
    element: JsonValue
    needs_element: bool
    ended: dict[str, int]
    unsized: Unsized
    sizes: dict[str, int]
    bad: dict[str, list[tuple[int, int]]]
    last_bad: str
    digests: dict[str, str]
    failed: JsonValue
    empty: bool


class AnnouncedContents(TypedDict, total=False):
    """The contents of all hosts' reports, merged.

    Attributes:
      element: structure of a batch.
      ended: lane → length in records; with host batches, ``(step + 1) << 32`` → padded rows of the step.
      sizes: step → global batch size, for steps that some host only pads.
      bad: step → number of bad records in the stream up to and including the step, for steps with any.
    """

    element: JsonValue
    ended: dict[str, int]
    sizes: dict[str, int]
    bad: dict[str, int]


@dataclasses.dataclass(frozen=True)
class WindowReport:
    """One host's report on a window.

    Attributes:
      count: steps that the host has read, counted from step 0 of the feed.
      final: the first step that the host cannot read or has no data for, or None.
      failure: the failure that caused ``final``; None at the end of the data.
      pads: whether the host continues with padding after ``final``, until the data of all hosts has ended.
      seen: number of announcements that the host has seen.
      contents: what the host found in the batches.
    """

    count: int
    final: int | None = None
    failure: Failure | None = None
    pads: bool = False
    seen: int = 0
    contents: ReportContents = dataclasses.field(default_factory=ReportContents)

    def to_json(self) -> JsonValue:
        """Returns a JSON array of the fields in order."""
        failure = None if self.failure is None else self.failure.to_json()
        return [self.count, self.final, failure, self.pads, self.seen, self.contents]

    @classmethod
    def from_json(cls, value: JsonValue) -> WindowReport:
        """The inverse of :meth:`to_json`."""
        count, final, failure, pads, seen, contents = value
        return cls(count, final, None if failure is None else Failure.from_json(failure), pads, seen, contents)


@dataclasses.dataclass(frozen=True)
class Stop:
    """The step before which all hosts stop, and the reasons.

    Attributes:
      step: the first step that is not delivered.
      failures: ascending by host; empty at the end of the data.
    """

    step: int
    failures: Sequence[Failure] = ()

    def exception(self) -> Exception:
        """Returns the exception for hosts that did not fail themselves; the same on all of them.

        A failed read takes precedence over a host that left.
        """
        for failure in self.failures:
            if failure.host is None:
                return failure.exception()
        failed = [failure for failure in self.failures if failure.kind != LEFT]
        named = failed or self.failures
        hosts = [failure.host for failure in named if failure.host is not None]
        who, text = format_hosts(hosts), str(named[0])
        if failed:
            end = "" if text.endswith(".") else "."
            message = (
                f"{who} failed in the read of step {self.step}: {text}{end} All hosts delivered the steps before "
                f"{self.step}; see the log of host {hosts[0]}."
            )
        else:
            message = (
                f"{who} {text}. This host requests step {self.step}, which needs all hosts: take the same number of steps "
                f"on all of them, or see the log of host {hosts[0]}."
            )
        return PeerError(message, host=hosts[0], peer_message=text)


@dataclasses.dataclass(frozen=True)
class Announcement:
    """The reducer's conclusion from all reports on a window.

    Attributes:
      upto: the step up to which all hosts may deliver, exclusive.
      window: steps of a full window.
      stop: the stop at ``upto``, or None if the hosts continue.
      contents: the contents of the reports, merged.
    """

    upto: int
    window: int
    stop: Stop | None = None
    contents: AnnouncedContents = dataclasses.field(default_factory=AnnouncedContents)

    def to_json(self) -> JsonValue:
        """Returns a JSON array of the fields in order; the stop as the array of its failures."""
        failures = None if self.stop is None else [failure.to_json() for failure in self.stop.failures]
        return [self.upto, self.window, failures, self.contents]

    @classmethod
    def from_json(cls, value: JsonValue) -> Announcement:
        """The inverse of :meth:`to_json`."""
        upto, window, failures, contents = value
        stop = None if failures is None else Stop(upto, tuple(map(Failure.from_json, failures)))
        return cls(upto, window, stop, contents)


_Contents = Mapping[int, ReportContents]


class WindowReports:
    """The contents of this host's window reports; on the reducer, also the comparison of all hosts' reports.

    Args:
      first_step: first step of the feed's current generation.
      bad_records: the feed's setting.
      blocks_of: cuts a host batch into labelled blocks; None without ``check_replicas``.
      num_rows: global batch size → rows of this host.
      num_skipped: bad records in the batches delivered so far.
      records_after: (step, ended lanes) → records of the stream up to and including the step.
      compare_records: whether to compare the structure of records; requires that hosts read whole records.
      compare_sizes: whether to compare global batch sizes, which can differ if each host derives its own from its rows.
      largest_batch: largest global batch size of the schedule; bounds the window's length to what memory allows.
    """

    def __init__(
        self,
        *,
        first_step: int,
        bad_records: SkipBad | None,
        blocks_of: BlocksOf | None,
        num_rows: Callable[[int], int],
        num_skipped: int = 0,
        records_after: RecordsAfter = lambda step, ended: 0,
        compare_records: bool = True,
        compare_sizes: bool = False,
        largest_batch: int = 0,
    ) -> None:
        self._largest_batch = largest_batch
        self._compare_sizes = compare_sizes
        self._first_step = first_step
        self._bad = BadRecords(bad_records, num_skipped, records_after)
        self._blocks_of = blocks_of
        self._num_rows = num_rows
        self._compare_records = compare_records
        self._element: JsonValue = None  # announced structure, shapes and dtypes of a batch
        self._ended: Mapping[int, int] = {}  # announced
        self._sizes: dict[int, int] = {}  # announced: step → global batch size, for steps that some host only pads
        self._own_ended: dict[int, int] = {}
        self._merged_ended: dict[int, int] = {}  # on the reducer
        self._lock = threading.Lock()  # in a single process the reader thread updates ``_ended`` in ``check_alone``

    # ------------------------------------------------------------------ every host

    def contents(self, batches: Sequence[HostBatch]) -> ReportContents:
        """Returns what this host reports on the batches of a window."""
        contents = self._ends(batches)
        for batch in batches:
            _log_bad(batch)
        contents.update(self._bad.report(batches, self._own_ended))
        if batches and batches[0].step == self._first_step and batches[0].tree is not None:
            contents.update(self._structure(batches[0]))
        if any(batch.tree is None for batch in batches):
            contents["needs_element"] = True
        digests = dict(self._digests(batches))
        if digests:
            contents["digests"] = digests
        return contents

    def _ends(self, batches: Sequence[HostBatch]) -> ReportContents:
        ended: dict[int, int] = {}
        unsized: dict[int, int] = {}
        for batch in batches:
            (unsized if batch.size_from_others else ended).update(batch.ended)
        contents: ReportContents = {}
        if unsized:
            contents["unsized"] = {"size": batches[-1].global_batch_size, "ended": _to_keys(unsized)}
        if ended:
            contents["ended"] = _to_keys(ended)
        if self._compare_sizes:
            contents["sizes"] = {str(one.step): one.global_batch_size for one in batches if not one.size_from_others}
        else:
            self._own_ended.update(ended)
        return contents

    def _structure(self, batch: HostBatch) -> ReportContents:
        rows: int = jax.tree.leaves(batch.tree)[0].shape[0]
        # Scaled to the schedule's largest batch: the window length set by the first report never changes.
        size = batch.global_batch_size
        contents: ReportContents = {"bytes": num_bytes(batch.tree) * max(size, self._largest_batch) // size}
        if self._compare_records and rows:
            spec = spec_of_batch(batch.tree, rows, what="the source")
            contents["records"] = ", ".join(leaf.describe() for leaf in spec.leaves)
            contents["element"] = tree_to_json(jax.tree.map(_no_rows, batch.tree))
        return contents

    def _digests(self, batches: Sequence[HostBatch]) -> Iterator[tuple[str, str]]:
        for batch in batches if self._blocks_of is not None else ():
            if (
                self._blocks_of is not None
                and batch.step < self._first_step + _CHECKED_STEPS
                and batch.tree is not None
            ):
                for label, block in self._blocks_of(batch.tree, batch.global_batch_size).items():
                    digest = xxhash.xxh3_64_hexdigest(np.ascontiguousarray(block).tobytes())
                    yield f"step {batch.step}, {label}", digest

    def check_alone(self, batch: HostBatch) -> None:
        """Applies the reducer's rule on bad records in a single process.

        The pipeline calls it from the first batch with a bad record or an ended lane onwards, so a rule on other batches
        has to change that condition.

        Raises:
          SourceError: too many bad records.
        """
        if not batch.bad and not batch.ended and self._bad.none_so_far:  # fast path for nearly all batches
            return
        _log_bad(batch)
        if batch.ended:
            with self._lock:
                self._ended = {**self._ended, **self._by_step(batch.ended)}
        failure = self._bad.count_alone(batch, self._ended)
        if failure is not None:
            raise failure.exception()

    # ------------------------------------------------------------------ the reducer

    def reduce(
        self, reports: Mapping[int, WindowReport], first: int, end: int
    ) -> tuple[AnnouncedContents, Failure | None]:
        """Merges the reports on a window; see :data:`meshfeed._src.agreement.windows.Reduce`.

        Of several failures, those without a step come first, because they prevent the whole window.
        """
        contents = {host: report.contents for host, report in sorted(reports.items())}
        merged = self._merge(contents)
        counts, too_many = self._bad.reduce(contents, first, end, self._merged_ended)
        merged.update(counts)
        return merged, self._cannot_deliver(contents, merged) or self._difference(contents) or too_many

    def _merge(self, contents: _Contents) -> AnnouncedContents:
        merged: AnnouncedContents = {}
        element = next((one["element"] for one in contents.values() if "element" in one), None)
        if element is not None:
            merged["element"] = element
        sizes, padding = _size_padding(contents)
        if sizes:
            merged["sizes"] = _to_keys(sizes)
        ended: dict[int, int] = {}
        for one in contents.values():
            ended.update(_from_keys(one.get("ended", {})))
        ended.update(padding)
        if ended:
            merged["ended"] = _to_keys(self._by_step(ended))
            if not self._compare_sizes:
                self._merged_ended.update(ended)
        return merged

    def _by_step(self, ended: Mapping[int, int]) -> dict[int, int]:
        """Sums the padding of host batches by step, after rows that several hosts hold are merged; lanes unchanged."""
        if not self._compare_sizes:
            return dict(ended)
        padding: dict[int, int] = {}
        for key, missing in ended.items():
            # keys are (step + 1) << 32 | first row; the sum keeps only the step
            padding[key >> 32 << 32] = padding.get(key >> 32 << 32, 0) + missing
        return padding

    def _cannot_deliver(self, contents: _Contents, merged: AnnouncedContents) -> Failure | None:
        for host, one in contents.items():
            if "failed" in one:
                cause = Failure.from_json(one["failed"])
                return _source_failure(f"host {host} failed while it prepared its batches: {cause}")
        if all(one.get("empty") for one in contents.values()):
            return _source_failure(EMPTY_BATCHES if self._compare_sizes else EMPTY_STREAM)
        unsupported = merged.get("element", {}).get("unsupported")
        if unsupported is not None and any("needs_element" in one for one in contents.values()):
            return _source_failure(f"a host has no record of its own, and {unsupported}")
        return None

    def _difference(self, contents: _Contents) -> Failure | None:
        message = _different_records(contents) or _different_sizes(contents) or _different_replicas(contents)
        return None if message is None else Failure(AgreementError.__name__, message)

    # ------------------------------------------------------------------ announcements

    def learn(self, contents: AnnouncedContents) -> None:
        """Adds the contents of an announcement."""
        if "ended" in contents:
            self._ended = {**self._ended, **_from_keys(contents["ended"])}
        self._sizes.update(_from_keys(contents.get("sizes", {})))
        self._bad.learn(contents)
        if self._element is None:
            self._element = contents.get("element")

    def known_at(self, step: int) -> tuple[Mapping[int, int], int]:
        """Returns ended lanes (or padding by step) and bad records up to ``step``. Call with ascending steps."""
        if self._compare_sizes and self._ended:
            with self._lock:  # the position already accounts for the padding of delivered steps
                self._ended = {key: missing for key, missing in self._ended.items() if key >> 32 > step}
            self._sizes = {at: size for at, size in self._sizes.items() if at > step}
        return self._ended, self._bad.up_to(step)

    def materialize(self, batch: HostBatch) -> PyTree:
        """Returns the batch's tree.

        For a host without a record: rows of zeros, with the size and structure that the other hosts announced.

        Raises:
          SourceError: no host has a record.
        """
        if batch.tree is not None:
            return batch.tree
        if batch.size_from_others:
            batch.global_batch_size = self._sizes.get(batch.step, batch.global_batch_size)
        if self._element is None:
            raise SourceError("no host has a record, so the structure of the padding is unknown. Check the source.")
        rows = self._num_rows(batch.global_batch_size)
        return jax.tree.map(functools.partial(_zero_rows, rows), tree_from_json(self._element))


def _no_rows(leaf: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    return leaf[:0]


def _zero_rows(rows: int, leaf: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    return np.zeros((rows, *leaf.shape[1:]), leaf.dtype)


def _source_failure(message: str) -> Failure:
    return Failure(SourceError.__name__, message)


def _different_records(contents: _Contents) -> str | None:
    groups: dict[str, list[int]] = {}
    for host, one in contents.items():
        if "records" in one:
            groups.setdefault(one["records"], []).append(host)
    if len(groups) < 2:
        return None
    shown = "; ".join(f"{format_hosts(hosts)}: {what}" for what, hosts in groups.items())
    return f"hosts read records of different structure ({shown}). Start all hosts with the same source."


def _different_sizes(contents: _Contents) -> str | None:
    conflict = _conflict({host: one.get("sizes", {}) for host, one in contents.items()})
    if conflict is None:
        return None
    step, (size, host), (other_size, other) = conflict
    return (
        f"the host batches of step {step} do not form one global batch: the rows of host {host} belong to a batch of "
        f"{size}, those of host {other} to a batch of {other_size}. Make batches with the same number of rows per device "
        "on all hosts."
    )


def _different_replicas(contents: _Contents) -> str | None:
    conflict = _conflict({host: one.get("digests", {}) for host, one in contents.items()})
    if conflict is None:
        return None
    label, (_, host), (_, other) = conflict
    return (
        f"hosts {host} and {other} hold the same rows but read different bytes ({label}). Their sources or decoders "
        "differ: compare the files, and look for randomness without rng=."
    )


def _conflict(values: Mapping[int, Mapping[str, V]]) -> tuple[str, tuple[V, int], tuple[V, int]] | None:
    """Returns the first label for which two hosts gave different values: label, (value, host), (value, other host)."""
    seen: dict[str, tuple[V, int]] = {}
    for host, by_label in values.items():
        for label, value in by_label.items():
            first = seen.setdefault(label, (value, host))
            if first[0] != value:
                return label, first, (value, host)
    return None


def _size_padding(contents: _Contents) -> tuple[dict[int, int], dict[int, int]]:
    """Resolves the steps that hosts only pad without knowing the global batch size.

    Returns:
      Step → global batch size, taken from the hosts that have data; and the padding at that size, keyed like ``ended``
      (one past the step in the high 32 bits, first row of the run in the low 32).
    """
    known = {step: size for one in contents.values() for step, size in _from_keys(one.get("sizes", {})).items()}
    sizes: dict[int, int] = {}
    ended: dict[int, int] = {}
    for unsized in (one["unsized"] for one in contents.values() if "unsized" in one):
        for key, count in _from_keys(unsized["ended"]).items():
            end, first_row = key >> 32, key & 0xFFFFFFFF
            # A step without a known size is past the end of all hosts' data and is not delivered.
            if end - 1 in known:
                sizes[end - 1] = known[end - 1]
                times = known[end - 1] // unsized["size"]
                ended[end << 32 | first_row * times] = count * times
    return sizes, ended


def _to_keys(values: Mapping[int, int]) -> dict[str, int]:
    return {str(key): value for key, value in values.items()}


def _from_keys(values: Mapping[str, int]) -> dict[int, int]:
    return {int(key): value for key, value in values.items()}


def _log_bad(batch: HostBatch) -> None:
    if batch.bad:
        record_id, _, reason = batch.bad[-1]
        _log.warning("replaced %d bad records in step %d; record %d: %s", len(batch.bad), batch.step, record_id, reason)


class BadRecords:
    """This host's and the reducer's side of the bad-record count.

    Args:
      setting: the feed's ``bad_records``.
      num_skipped: bad records in the batches delivered so far.
      records_after: see :data:`RecordsAfter`.
    """

    def __init__(self, setting: SkipBad | None, num_skipped: int, records_after: RecordsAfter) -> None:
        self._limit = None if setting is None else setting.max_fraction
        self._records_after = records_after
        self._own = num_skipped  # from this host's reads alone: a lower bound of the stream's count
        self._total = num_skipped  # on the reducer, and in a single process
        self._counted_step = -1
        self._delivered = num_skipped
        self._later: collections.deque[tuple[int, int]] = collections.deque()  # (undelivered step, count up to it)

    # ------------------------------------------------------------------ every host

    def report(self, batches: Iterable[HostBatch], ended: Mapping[int, int]) -> ReportContents:
        """Returns the bad records in the batches of a window.

        Lists them instead of counting them, because other hosts may have read the same rows. The list ends at the step
        at which this host's bad records alone are too many, which bounds it to about ``max_fraction`` of the records.
        """
        bad: dict[str, list[tuple[int, int]]] = {}
        last = ""
        for batch in batches if self._limit is not None else ():
            if batch.bad:
                bad[str(batch.step)] = sorted(_distinct(batch))
                self._own += len(bad[str(batch.step)])
                last = _last_bad(batch)
            if self._too_many(self._own, self._records_after(batch.step, ended)):
                break
        return {"bad": bad, "last_bad": last} if bad else {}

    def _too_many(self, bad: int, records: int) -> bool:
        # Below 1 / limit records, a single bad record would exceed the limit.
        return self._limit is not None and records >= 1 / self._limit and bad > self._limit * records

    # ------------------------------------------------------------------ the reducer

    def reduce(
        self, contents: Mapping[int, ReportContents], first: int, end: int, ended: Mapping[int, int]
    ) -> tuple[AnnouncedContents, Failure | None]:
        """Returns the counts of a window, and a failure at the first step with too many bad records."""
        found: dict[int, set[tuple[int, int]]] = collections.defaultdict(set)
        last = ""
        for host, one in sorted(contents.items()):
            for step, entries in one.get("bad", {}).items():
                found[int(step)].update((record_id, epoch) for record_id, epoch in entries)
            last = f"host {host}, {one['last_bad']}" if "last_bad" in one else last
        counts: dict[str, int] = {}
        failure = None
        for step in range(first, end) if self._limit is not None else ():
            if step in found:
                self._total += len(found[step])
                counts[str(step)] = self._total
            failure = self._failure_at(step, ended, last)
            if failure is not None:
                break
        return {"bad": counts} if counts else {}, failure

    def _failure_at(self, step: int, ended: Mapping[int, int], last: str) -> Failure | None:
        records = 0 if self._limit is None else self._records_after(step, ended)
        if self._limit is None or not self._too_many(self._total, records):
            return None
        message = (
            f"{self._total:,} of the {records:,} records up to step {step} are bad, a fraction of "
            f"{self._total / records:.2g}; bad_records=SkipBad(max_fraction={self._limit:g}) allows {self._limit:g}"
            + (f" (last: {last})" if last else "")
            + ". Check the data; raise max_fraction only if so many bad records are expected."
        )
        return Failure(SourceError.__name__, message, step=step)

    # ------------------------------------------------------------------ a single process

    @property
    def none_so_far(self) -> bool:
        """Whether no record of this stream has been bad so far."""
        return not self._total

    def count_alone(self, batch: HostBatch, ended: Mapping[int, int]) -> Failure | None:
        """The reducer's rule in a single process. A step that is read twice because of an interrupt counts once."""
        if batch.bad and batch.step > self._counted_step:
            total = self._total + len(_distinct(batch))
            self._later.append((batch.step, total))
            self._total, self._counted_step = total, batch.step
        return self._failure_at(batch.step, ended, _last_bad(batch) if batch.bad else "")

    # ------------------------------------------------------------------ announcements

    def learn(self, contents: AnnouncedContents) -> None:
        """Adds the counts of an announcement."""
        self._later.extend((int(step), count) for step, count in contents.get("bad", {}).items())

    def up_to(self, step: int) -> int:
        """Returns the bad records up to and including ``step``. Call with ascending steps."""
        while self._later and self._later[0][0] <= step:
            self._delivered = self._later.popleft()[1]
        return self._delivered


def _distinct(batch: HostBatch) -> set[tuple[int, int]]:
    return {(record_id, epoch) for record_id, epoch, _ in batch.bad}


def _last_bad(batch: HostBatch) -> str:
    record_id, _, reason = batch.bad[-1]
    return f"record {record_id}: {reason}"
