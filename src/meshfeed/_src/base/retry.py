"""One place that calls a source again after a transient error."""

from __future__ import annotations

import logging
import random
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from meshfeed._src.base.settings import Retry

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
    operation: Callable[[], T],
    retry: Retry,
    *,
    doing: str | Callable[[], str],
    on_retry: Callable[[], None] | None = None,
    progress: Callable[[], object] | None = None,
) -> T:
    """Calls ``operation`` until it succeeds, with exponential back-off and full jitter in between.

    Args:
      operation: called again at each try. With ``progress`` it may carry on from what it has done.
      retry: how often and after what.
      doing: for the log, such as "reading 64 records".
      on_retry: called before each further try, to count them.
      progress: a value that differs once another record has been read. Tries are then counted from there, so that a
        failure of one record leaves the others all of theirs.

    Raises:
      What the last try raised; at once if ``retry`` does not name its type. StopIteration is never tried again.
    """
    tries, reached = 0, None if progress is None else progress()
    while True:
        try:
            return operation()
        except transient_errors(retry) as error:
            if isinstance(error, StopIteration):
                raise
            before, reached = reached, None if progress is None else progress()
            tries = tries + 1 if reached == before else 1
            if tries >= retry.attempts:
                raise
            pause = random.uniform(0, min(retry.max_seconds, retry.initial_seconds * 2.0 ** min(tries - 1, 60)))
            _log.warning("%s failed (%s: %s); try %d of %d in %.1f s", doing if isinstance(doing, str) else doing(),
                         type(error).__name__, error, tries + 1, retry.attempts, pause)  # fmt: skip
        if on_retry is not None:
            on_retry()
        time.sleep(pause)
