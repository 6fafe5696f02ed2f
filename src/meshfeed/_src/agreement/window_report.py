"""Fills in a host's window reports from its batches, and merges and compares the reports of all hosts.

What hosts learn from each other: batch sizes in bytes (which set the window's length), the structure of the records,
ended lanes, bad records (``bad_records.py``), and digests of replicated rows. The reducer merges and compares them
(:class:`WindowReports`); every host learns the result from the announcement.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np
import numpy.typing as npt
import xxhash

from meshfeed._src.agreement.bad_records import BadRecords, RecordsAfter
from meshfeed._src.agreement.messages import AnnouncedContents, ReportContents, WindowReport
from meshfeed._src.base.coordination import format_differences
from meshfeed._src.base.errors import AgreementError, Failure, SourceError
from meshfeed._src.base.exact_json import tree_from_json, tree_to_json
from meshfeed._src.base.settings import SkipBad
from meshfeed._src.base.trees import flatten, num_bytes
from meshfeed._src.base.types import JsonValue, PyTree
from meshfeed._src.reading.host_batch import spec_of_batch
from meshfeed._src.streams.protocol import EMPTY_BATCHES, EMPTY_STREAM, HostBatch

_log = logging.getLogger("meshfeed.exchange")
_CHECKED_STEPS = 4  # first steps of a generation whose replicas are compared
BlocksOf = Callable[[PyTree, int], Mapping[str, npt.NDArray[np.generic]]]
"""(host tree, global batch size) → label → block of rows (and columns), for each block on this host's devices."""
V = TypeVar("V")
_Contents = Mapping[int, ReportContents]


class WindowReports:
    """The contents of this host's window reports; on the reducer, also the comparison of all hosts' reports."""

    def __init__(
        self,
        *,
        first_step: int,  # of the feed's current generation
        bad_records: SkipBad | None,
        blocks_of: BlocksOf | None,  # None without ``check_replicas``
        num_rows: Callable[[int], int],  # global batch size → rows of this host
        num_skipped: int = 0,  # in the batches delivered so far
        records_after: RecordsAfter = lambda step, ended: 0,
        compare_records: bool = True,  # requires that hosts read whole records
        compare_sizes: bool = False,  # which can differ if each host derives its own from its rows
        largest_batch: int = 0,  # of the schedule; bounds the window's length to what memory allows
        # Receives a batch of zeros of the announced structure, on a host without a record of its own.
        learn_batch: Callable[[PyTree], None] = lambda tree: None,
    ) -> None:
        self._learn_batch = learn_batch
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
        if digests := self._digests(batches):
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

    def _digests(self, batches: Sequence[HostBatch]) -> dict[str, str]:
        if self._blocks_of is None:
            return {}
        end = self._first_step + _CHECKED_STEPS
        return {
            f"step {batch.step}, {label}": xxhash.xxh3_64_hexdigest(np.ascontiguousarray(block).tobytes())
            for batch in batches
            if batch.step < end and batch.tree is not None
            for label, block in self._blocks_of(batch.tree, batch.global_batch_size).items()
        }

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
        if elements := [one["element"] for one in contents.values() if "element" in one]:
            merged["element"] = elements[0]
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
        tree = jax.tree.map(functools.partial(_zero_rows, rows), tree_from_json(self._element))
        self._learn_batch(tree)
        return tree


def _no_rows(leaf: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    return leaf[:0]


def _zero_rows(rows: int, leaf: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    return np.zeros((rows, *leaf.shape[1:]), leaf.dtype)


def _source_failure(message: str) -> Failure:
    return Failure(SourceError.__name__, message)


def _different_records(contents: _Contents) -> str | None:
    shown = format_differences({host: one["records"] for host, one in contents.items() if "records" in one})
    if shown is None:  # a list instead of a tuple, or a None
        elements = {host: one["element"] for host, one in contents.items() if "records" in one and "element" in one}
        shown = format_differences({host: _containers(element) for host, element in elements.items()})
    if shown is None:
        return None
    return f"hosts read records of different structure ({shown}). Start all hosts with the same source."


def _containers(element: JsonValue) -> str:
    if "unsupported" in element:  # registered classes may have settings whose text differs between processes
        return "a class that is registered as a pytree"
    return str(flatten(tree_from_json(element))[1])


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
