"""One place that calls a source again after a transient error."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import TypeVar

import tenacity

from meshfeed._settings import Retry

_log = logging.getLogger("meshfeed.retry")
T = TypeVar("T")

# module → names of its exceptions that pass by themselves; looked up only where the library is loaded anyway
_TRANSIENT = {
    "tensorflow": ("errors.FailedPreconditionError", "errors.UnavailableError"),
    "aiohttp": ("ClientConnectionError", "ClientPayloadError", "ServerTimeoutError"),
    "fsspec.exceptions": ("FSTimeoutError",),
    "requests": ("ConnectionError", "Timeout"),
}


def transient_errors(retry: Retry) -> tuple[type[BaseException], ...]:
    """The types that ``retry`` names, and with OSError among them those of the libraries that are loaded."""
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
    operation: Callable[[], T], retry: Retry, *, doing: str, on_retry: Callable[[], None] | None = None
) -> T:
    """Calls ``operation`` until it succeeds, with exponential back-off and full jitter in between.

    Args:
      operation: made again from the beginning at each try.
      retry: how often and after what.
      doing: for the log, such as "reading 64 records".
      on_retry: called before each further try, to count them.

    Raises:
      What the last try raised; at once where ``retry`` does not name its type. StopIteration is never tried again.
    """
    try:  # the common case costs no set-up
        return operation()
    except transient_errors(retry) as error:
        if retry.attempts < 2 or isinstance(error, StopIteration):
            raise
        first_error = error

    def before_sleep(state: tenacity.RetryCallState) -> None:
        error = first_error if state.outcome is None else state.outcome.exception()
        pause = state.upcoming_sleep
        _log.warning("%s failed (%s: %s); try %d of %d in %.1f s", doing, type(error).__name__, error,
                     state.attempt_number + 1, retry.attempts, pause)  # fmt: skip
        if on_retry is not None:
            on_retry()

    pending: list[BaseException] = [first_error]

    def attempt() -> T:
        if pending:  # the first failure has happened already: count it as this policy's first try
            raise pending.pop()
        return operation()

    return tenacity.Retrying(
        stop=tenacity.stop_after_attempt(retry.attempts),
        wait=tenacity.wait_random_exponential(multiplier=retry.initial_seconds, max=retry.max_seconds),
        retry=tenacity.retry_if_exception(lambda e: isinstance(e, transient_errors(retry))),
        before_sleep=before_sleep,
        reraise=True,
    )(attempt)
