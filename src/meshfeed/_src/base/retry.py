"""Retries of source reads after transient errors."""

from __future__ import annotations

import logging
import random
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from meshfeed._src.base.errors import text_of, without_signatures
from meshfeed._src.base.settings import Retry

_log = logging.getLogger("meshfeed.retry")
T = TypeVar("T")

# module → names of its transient exceptions; resolved only if the library is already imported
_TRANSIENT = {
    "tensorflow": ("errors.FailedPreconditionError", "errors.UnavailableError"),
    "aiohttp": ("ClientConnectionError", "ClientPayloadError", "ServerTimeoutError"),
    "fsspec.exceptions": ("FSTimeoutError",),
    "requests": ("ConnectionError", "Timeout"),
}


def transient_errors(retry: Retry) -> tuple[type[BaseException], ...]:
    """Returns the types in ``retry.on`` and, if they include OSError, the transient errors of imported libraries."""
    kinds = list(retry.on)
    if OSError in kinds:
        for module, names in _TRANSIENT.items():
            for name in names if module in sys.modules else ():
                value: object = sys.modules[module]
                for part in name.split("."):
                    value = getattr(value, part, None)
                if isinstance(value, type) and issubclass(value, BaseException):
                    kinds.append(value)
    return tuple(kinds)


def call_with_retry(
    operation: Callable[[], T],
    retry: Retry,
    *,
    doing: str | Callable[[], str],
    on_retry: Callable[[], None] | None = None,
    progress: Callable[[], object] | None = None,
    since: float | None = None,
    until: float | None = None,
) -> T:
    """Calls ``operation`` until it succeeds, with exponential backoff and full jitter.

    See Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.

    Args:
      operation: called once per attempt. With ``progress``, it may resume from where it failed.
      retry: number of attempts, pauses and exception types.
      doing: description for the log, such as "reading 64 records".
      on_retry: called before each retry, to count retries.
      progress: returns a value that changes when another record has been read. A change resets the count of attempts:
        the failures of one record must not use up the attempts of the next.
      since: ``time.monotonic()`` at the start of the first attempt, if that was made before this call.
      until: ``time.monotonic()`` from which on no attempt begins; None for no limit.

    Raises:
      The exception of the last attempt, with the number of attempts as ``attempts_made`` and ``time.monotonic()`` as
      ``attempts_ended``. An exception whose type is not in ``retry.on``, or StopIteration, is raised without a retry.
    """
    tries, reached = 0, None if progress is None else progress()
    start = time.monotonic() if since is None else since
    while True:
        try:
            return operation()
        except transient_errors(retry) as error:
            if isinstance(error, StopIteration):  # the end of the source, even if retry.on includes Exception
                raise
            before, reached = reached, None if progress is None else progress()
            # An operation that has itself retried counts as all its attempts: those of the two must not multiply.
            # A count from before this attempt does not apply: the source has raised the same exception object again.
            is_new = getattr(error, "attempts_ended", start) >= start
            made: int = getattr(error, "attempts_made", 1) if is_new else 1
            tries = tries + made if reached == before else made
            is_last = tries >= retry.attempts
            pause = 0.0 if is_last else _pause(retry, tries, error)
            if is_last or (until is not None and time.monotonic() + pause >= until):
                if tries > 1:
                    error.attempts_made = tries  # type: ignore[attr-defined]
                    error.attempts_ended = time.monotonic()  # type: ignore[attr-defined]
                raise
            what = without_signatures(doing if isinstance(doing, str) else doing())
            _log.warning("%s failed (%s: %s); attempt %d of %d in %.1f s", what, type(error).__name__,
                         without_signatures(text_of(error)), tries + 1, retry.attempts, pause)  # fmt: skip
        if on_retry is not None:
            on_retry()
        time.sleep(pause)
        start = time.monotonic()


def count_attempts(error: BaseException, of: BaseException) -> None:
    """Lets the attempts that ended with another error count as those of ``error``, for retries of the caller."""
    for name in ("attempts_made", "attempts_ended"):
        if hasattr(of, name):
            setattr(error, name, getattr(of, name))


def _pause(retry: Retry, tries: int, error: BaseException) -> float:
    # The exponent is bounded because a float overflows at 2.0**1024.
    pause = random.uniform(0, min(retry.max_seconds, retry.initial_seconds * 2.0 ** min(tries - 1, 60)))
    requested: float = getattr(error, "retry_after_seconds", 0.0)  # by a server
    return max(pause, min(requested, retry.max_seconds))
