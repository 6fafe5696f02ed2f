"""What hosts write to each other about a window of steps, as JSON.

A host's :class:`WindowReport` states how far it has read; the reducer's :class:`Announcement` states how far all hosts
can deliver. Their contents are what hosts compare, count and learn from each other about the batches:
:mod:`meshfeed._src.agreement.window_report` fills them in and merges them, :mod:`meshfeed._src.agreement.windows`
transports them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TypedDict

from meshfeed._src.base.coordination import KeyValueStore, format_hosts
from meshfeed._src.base.errors import LEFT, Failure, PeerError
from meshfeed._src.base.types import JsonValue


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
      element: the structure of a batch, see :func:`meshfeed._src.base.exact_json.tree_to_json`; in the first window only.
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
        end = "" if text.endswith(".") else "."
        if failed:
            message = (
                f"{who} failed in the read of step {self.step}: {text}{end} All hosts delivered the steps before "
                f"{self.step}; see the log of host {hosts[0]}."
            )
        else:
            message = (
                f"{who} {text}{end} This host requests step {self.step}, which needs all hosts: take the same number of "
                f"steps on all of them, or see the log of host {hosts[0]}."
            )
        return PeerError(message, host=hosts[0], peer_message=text)


ASIDE_SECONDS = 2.0
"""How long a host waits for others before it looks whether one of them has left for another sharding."""


def aside_key(prefix: str) -> str:
    """Returns the key in which a host writes that it has left for another sharding.

    It waits for the others there, while they may wait for a host that was lost.

    Args:
      prefix: of the keys of what the others wait in: a generation, or a round of the handshake.
    """
    return f"{prefix}/aside"


def find_aside(store: KeyValueStore, prefix: str) -> Failure | None:
    """Returns the notice of a host that has left for another sharding, if there is one; see :func:`aside_key`."""
    text = store.try_get(aside_key(prefix))
    return None if text is None else Failure.from_json(json.loads(text))


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
