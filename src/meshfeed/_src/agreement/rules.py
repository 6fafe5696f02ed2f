"""The rules of the agreement between hosts: how long windows are, what a host says of one, and where all must stop.

Pure: :mod:`meshfeed._src.agreement.windows` carries them over the coordination service.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

_MIN_WINDOW = 8
# 2 requests a host and window: 4,000 a second from 320 hosts on, at 20 ms a step. The rest of the 5,000 that one
# coordinator should bear is left to polls that have to be repeated, and to whatever else the job asks of it.
_HOSTS_PER_STEP = 40
_FIRST_WINDOWS = 4
ALL_HOSTS = -1  # stands for the host in an error that is everybody's
_CLOSED = "closed|"


def full_window(num_participants: int, batch_bytes: int, byte_limit: int) -> int:
    """Steps of a full window: few requests a second on many hosts, and two windows within ``byte_limit`` bytes."""
    wanted = max(_MIN_WINDOW, -(-num_participants // _HOSTS_PER_STEP))
    return max(1, min(wanted, byte_limit // (2 * max(1, batch_bytes))))


def window_ends(first_step: int, size: Callable[[], int]) -> Iterator[int]:
    """Ends (exclusive) of the windows 0, 1, 2, …: one step, a quarter of ``size()``, a half, and then all of it."""
    end = first_step + 1
    yield end
    length = max(1, size() // _FIRST_WINDOWS)
    while True:
        end += min(length, size())
        length *= 2
        yield end


@dataclasses.dataclass(frozen=True)
class Part:
    """What a host publishes of a window.

    Attributes:
      count: steps that it has read, counted from step 0 of the feed.
      final: the first step that it cannot make of itself, or None.
      error: message of the exception that made ``final``, or None for the end of its data.
      info: further JSON for the reducer: bytes a batch, lengths of lanes that ended, counts of bad records, digests.
      pads: whether this host continues with padding after ``final``, until the data of all hosts has ended.
    """

    count: int
    final: int | None = None
    error: str | None = None
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    pads: bool = False


@dataclasses.dataclass(frozen=True)
class Stop:
    """Why and before which step all hosts stop.

    Attributes:
      step: the first step that is not delivered.
      errors: host (or ALL_HOSTS) → message; empty at the end of the data.
    """

    step: int
    errors: Mapping[int, str]


def decide(parts: Mapping[int, Part], participants: Sequence[int], first: int, end: int) -> tuple[int, Stop | None]:
    """The reducer's rule: how far all hosts can go in the window ``[first, end)``.

    Args:
      parts: host → what it published; hosts may be missing only where some host has failed.
      participants: all hosts.
      first: first step of the window; nobody has delivered it.
      end: one past the window's last step.

    Returns:
      The step up to which all may deliver (exclusive), and why they stop there, or None.
    """
    errors = {host: part for host, part in parts.items() if part.error is not None}
    if len(parts) < len(participants):  # a failure, and some host too slow to wait for
        return first, Stop(first, {host: str(part.error) for host, part in errors.items()})
    failed = min((part.final for part in errors.values() if part.final is not None), default=None)
    ends = [(part.final, part.pads) for part in parts.values() if part.final is not None and part.error is None]
    ended = min((final for final, pads in ends if not pads), default=None)
    if ended is None and len(ends) == len(participants):
        ended = max(final for final, _ in ends)
    if failed is not None and (ended is None or failed <= ended) and failed <= end:
        step = max(first, failed)
        return step, Stop(step, {host: str(part.error) for host, part in errors.items() if part.final == failed})
    if ended is not None and ended <= end:
        step = max(first, ended)
        return step, Stop(step, {})
    return end, None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """An error of all hosts, found in what they published.

    Attributes:
      message: of the error.
      step: the first step that is not delivered, or None for the window's first.
    """

    message: str
    step: int | None = None


def overrule(upto: int, stop: Stop | None, verdict: Verdict | None, first: int) -> tuple[int, Stop | None]:
    """What :func:`decide` gave, unless a verdict stops all hosts earlier, or spoils the end of the data."""
    if verdict is None:
        return upto, stop
    step = first if verdict.step is None else max(first, verdict.step)
    if verdict.step is None:
        wins = stop is None or not stop.errors
    else:
        wins = step < upto
    return (step, Stop(step, {ALL_HOSTS: verdict.message})) if wins else (upto, stop)


Judge = Callable[[Mapping[int, Part], int, int], "tuple[dict[str, Any], Verdict | None]"]
"""Reducer's hook: parts of a window, its first step and its end → (JSON for the announcement, a verdict or None)."""


def no_judge(parts: Mapping[int, Part], first: int, end: int) -> tuple[dict[str, Any], Verdict | None]:
    """Finds nothing."""
    del parts, first, end
    return {}, None


def closed_error(message: str) -> str:
    """What a host publishes as its error when it leaves while others may go on."""
    return _CLOSED + message


def closed_message(error: str) -> str | None:
    """The message of :func:`closed_error`; None for an error of another kind."""
    return error.removeprefix(_CLOSED) if error.startswith(_CLOSED) else None
