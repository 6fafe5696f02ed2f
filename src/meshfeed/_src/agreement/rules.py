"""The rules of the agreement between hosts: window lengths, window reports, and the step at which all must stop.

Pure functions; :mod:`meshfeed._src.agreement.windows` applies them over the coordination service.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

_MIN_WINDOW = 8
# 2 requests per host and window make at most 4,000 requests per second from 320 hosts on, at 20 ms per step. The rest
# of the 5,000 per second that one coordinator should bear is left for repeated polls and for the rest of the job.
_HOSTS_PER_STEP = 40
_FIRST_WINDOWS = 4
ALL_HOSTS = -1  # in place of the host, for an error of all hosts
_CLOSED = "closed|"


def full_window(num_participants: int, batch_bytes: int, byte_limit: int) -> int:
    """Returns the steps of a full window, at least 1.

    Long enough to limit the request rate on many hosts, and short enough for two windows to fit in ``byte_limit``.

    Args:
      num_participants: number of hosts.
      batch_bytes: bytes of one host's part of a batch, the largest over all hosts.
      byte_limit: host memory in bytes for the read-ahead.
    """
    wanted = max(_MIN_WINDOW, -(-num_participants // _HOSTS_PER_STEP))
    return max(1, min(wanted, byte_limit // (2 * max(1, batch_bytes))))


def window_ends(first_step: int, size: Callable[[], int]) -> Iterator[int]:
    """Yields the exclusive ends of windows 0, 1, 2, …: one step, then 1/4, 1/2 and finally all of ``size()`` steps."""
    end = first_step + 1
    yield end  # before size(), which is known only after the first window: batch bytes come with its reports
    length = max(1, size() // _FIRST_WINDOWS)
    while True:
        end += min(length, size())
        length *= 2
        yield end


@dataclasses.dataclass(frozen=True)
class Part:
    """One host's report on a window.

    Attributes:
      count: steps that the host has read, counted from step 0 of the feed.
      final: the first step that the host cannot read or has no data for, or None.
      error: message of the exception that caused ``final``, or None at the end of the data.
      info: further JSON for the reducer: bytes per batch, lengths of ended lanes, bad records, digests.
      pads: whether the host continues with padding after ``final``, until the data of all hosts has ended.
    """

    count: int
    final: int | None = None
    error: str | None = None
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    pads: bool = False


@dataclasses.dataclass(frozen=True)
class Stop:
    """The step before which all hosts stop, and the reason.

    Attributes:
      step: the first step that is not delivered.
      errors: host (or ALL_HOSTS) → message; empty at the end of the data.
    """

    step: int
    errors: Mapping[int, str]


def decide(parts: Mapping[int, Part], participants: Sequence[int], first: int, end: int) -> tuple[int, Stop | None]:
    """The reducer's rule: how far all hosts can deliver in the window ``[first, end)``.

    Args:
      parts: host → its window report; hosts may be missing only if some host has failed.
      participants: all hosts.
      first: first step of the window; no host has delivered it.
      end: one past the window's last step.

    Returns:
      The step up to which all hosts may deliver (exclusive), and the stop at that step, or None.
    """
    errors = {host: part for host, part in parts.items() if part.error is not None}
    if len(parts) < len(participants):  # a host failed, and another was too late to be waited for
        return first, Stop(first, {host: str(part.error) for host, part in errors.items()})
    failed = min((part.final for part in errors.values() if part.final is not None), default=None)
    ends = [(part.final, part.pads) for part in parts.values() if part.final is not None and part.error is None]
    ended = min((final for final, pads in ends if not pads), default=None)
    # Padding hosts continue until the host with the most data has ended, so their end is known only from all hosts.
    if ended is None and len(ends) == len(participants):
        ended = max(final for final, _ in ends)
    if failed is not None and (ended is None or failed <= ended) and failed <= end:
        step = max(first, failed)  # steps before ``first`` may already be delivered
        return step, Stop(step, {host: str(part.error) for host, part in errors.items() if part.final == failed})
    if ended is not None and ended <= end:
        step = max(first, ended)
        return step, Stop(step, {})
    return end, None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A failure that the reducer finds in the window reports; an error of all hosts.

    Attributes:
      message: error message.
      step: the first step that is not delivered, or None for the window's first step.
    """

    message: str
    step: int | None = None


def overrule(upto: int, stop: Stop | None, verdict: Verdict | None, first: int) -> tuple[int, Stop | None]:
    """Merges a failure into the result of :func:`decide`.

    A failure with a step wins if it stops the hosts earlier. One without a step wins unless a host has failed; in
    particular it replaces a stop at the end of the data.
    """
    if verdict is None:
        return upto, stop
    step = first if verdict.step is None else max(first, verdict.step)
    if verdict.step is None:
        wins = stop is None or not stop.errors
    else:
        wins = step < upto
    return (step, Stop(step, {ALL_HOSTS: verdict.message})) if wins else (upto, stop)


Judge = Callable[[Mapping[int, Part], int, int], "tuple[dict[str, Any], Verdict | None]"]
"""Reducer's hook: window reports, first step and end of the window → (JSON for the announcement, failure or None)."""


def no_judge(parts: Mapping[int, Part], first: int, end: int) -> tuple[dict[str, Any], Verdict | None]:
    """The default hook: finds no failure."""
    del parts, first, end
    return {}, None


def closed_error(message: str) -> str:
    """Formats the error of a leave notice: the host leaves while others may continue."""
    return _CLOSED + message


def closed_message(error: str) -> str | None:
    """Returns the message of a leave notice (:func:`closed_error`), or None for a different error."""
    return error.removeprefix(_CLOSED) if error.startswith(_CLOSED) else None
