"""The rules by which hosts stop at the same step: lengths of windows, and the stop that follows from all reports.

Pure functions. Every host computes the same windows, and the reducer alone computes the stop, from the reports on one
window in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from meshfeed._src.agreement.messages import AnnouncedContents, Stop, WindowReport
from meshfeed._src.base.errors import Failure

_MIN_WINDOW = 8
# With 320 hosts or more and 20 ms per step, 2 requests per host and window are 4,000 requests per second. One coordinator
# should get at most 5,000; the rest is left for repeated polls and for the rest of the job.
_HOSTS_PER_STEP = 40
_FIRST_WINDOWS = 4


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


Reduce = Callable[[Mapping[int, WindowReport], int, int], tuple[AnnouncedContents, Failure | None]]
"""Merges the contents of all hosts' reports on a window: (host → report, first step, end of the window) → (contents of
the announcement, failure of all hosts or None). A failure without a step prevents the whole window."""


def reduce_nothing(
    reports: Mapping[int, WindowReport], first: int, end: int
) -> tuple[AnnouncedContents, Failure | None]:
    """Ignores the contents."""
    del reports, first, end
    return {}, None


def conclude(
    reports: Mapping[int, WindowReport], participants: Sequence[int], first: int, end: int, reduce: Reduce
) -> tuple[int, Stop | None, AnnouncedContents]:
    """Returns how far all hosts can deliver in the window ``[first, end)``.

    Args:
      reports: host → its report; hosts may be missing only if some host has failed.
      participants: all hosts.
      first: first step of the window; no host has delivered it.
      end: one past the window's last step.
      reduce: see :data:`Reduce`; called only if no report is missing.

    Returns:
      The step up to which all hosts may deliver (exclusive), the stop at that step or None, and the contents of the
      announcement.
    """
    failed = {host: report.failure for host, report in sorted(reports.items()) if report.failure is not None}
    if len(reports) < len(participants):  # a host failed, and another did not report within the grace period
        return first, Stop(first, tuple(failed.values())), {}
    upto, stop = _stop_of_reports(reports, first, end)
    contents, failure = reduce(reports, first, end)
    if failure is not None and _prevails(failure, upto, stop):
        upto = first if failure.step is None else max(first, failure.step)
        stop = Stop(upto, (failure,))
    return upto, stop, contents


def _stop_of_reports(reports: Mapping[int, WindowReport], first: int, end: int) -> tuple[int, Stop | None]:
    finals = {host: report.final for host, report in sorted(reports.items()) if report.final is not None}
    failing = {host: final for host, final in finals.items() if reports[host].failure is not None}
    ended = _end_of_data({host: final for host, final in finals.items() if host not in failing}, reports)
    failed = min(failing.values(), default=None)
    if failed is not None and failed <= end and (ended is None or failed <= ended):
        failures = (reports[host].failure for host, final in failing.items() if final == failed)
        # Steps before ``first`` may already be delivered.
        return max(first, failed), Stop(
            max(first, failed), tuple(failure for failure in failures if failure is not None)
        )
    if ended is not None and ended <= end:
        return max(first, ended), Stop(max(first, ended))
    return end, None


def _end_of_data(finals: Mapping[int, int], reports: Mapping[int, WindowReport]) -> int | None:
    """Returns the step at which the data of all hosts has ended, or of the first host that does not pad."""
    ended = min((final for host, final in finals.items() if not reports[host].pads), default=None)
    # Padding hosts continue until the host with the most data has ended, so their end is known only from all hosts.
    return max(finals.values()) if ended is None and len(finals) == len(reports) else ended


def _prevails(failure: Failure, upto: int, stop: Stop | None) -> bool:
    """Whether a failure of all hosts replaces the result of the reports.

    With a step, it does if it stops the hosts earlier. Without one, it does unless a host has failed. In particular, it
    replaces a stop at the end of the data.
    """
    if failure.step is None:
        return stop is None or not stop.failures
    return failure.step < upto
