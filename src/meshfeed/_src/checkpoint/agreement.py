"""Hosts report read errors to each other before any of them enters a collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from meshfeed._src.base.coordination import next_use, process_count, process_index, require_store
from meshfeed._src.base.errors import MeshfeedError, SettingsError
from meshfeed._src.base.failure import Failure
from meshfeed._src.base.reduction import reduce_json
from meshfeed._src.base.types import JsonValue
from meshfeed._src.checkpoint.manifest import DamagedCheckpointError, as_checkpoint_error

R = TypeVar("R")


def _failure_of(error: BaseException) -> Failure:
    text = str(error) if isinstance(error, MeshfeedError) else f"{type(error).__name__}: {error}"
    if isinstance(error, SettingsError) and error.setting is not None:
        return Failure("setting", text, process_index(), details={"setting": error.setting})
    return Failure("damaged" if isinstance(error, DamagedCheckpointError) else "unreadable", text, process_index())


def _error_of(failure: Failure) -> MeshfeedError:
    message = f"host {failure.host}: {failure.message}"
    if failure.kind == "setting":
        return SettingsError(message, setting=failure.details["setting"])
    return as_checkpoint_error(failure.kind, message)


def _first_failure(reports: dict[int, JsonValue]) -> JsonValue:
    return next((report for _, report in sorted(reports.items()) if report is not None), None)


def _all_reports(reports: dict[int, JsonValue]) -> JsonValue:
    # JSON object keys are strings; collect() converts them back.
    return {str(host): report for host, report in reports.items()}


class Agreement:
    """Agreement among all processes of the job about one operation, in numbered rounds.

    Every process must make the same calls in the same order.

    Args:
      doing: the operation, for error messages.
      timeout_seconds: how long to wait for the slowest host.

    Raises:
      MeshfeedError: there are several processes but no key-value store.
    """

    def __init__(self, doing: str, timeout_seconds: float) -> None:
        self._doing = doing
        self._timeout_seconds = timeout_seconds
        self._scope = f"checkpoint/{next_use('checkpoint')}"
        self._round = 0
        self._participants = list(range(process_count()))
        # Fail now rather than at the first read: without a store hosts cannot agree.
        if len(self._participants) > 1:
            require_store()

    def _reduce(self, value: JsonValue, reduce: Callable[[dict[int, JsonValue]], JsonValue]) -> JsonValue:
        number, self._round = self._round, self._round + 1
        return reduce_json(
            self._scope,
            number,
            value,
            reduce,
            participants=self._participants,
            timeout_seconds=self._timeout_seconds,
            doing=self._doing,
        )

    def confirm(self, error: BaseException | None) -> None:
        """Raises the same error on every host if any host passes one: the error of the lowest-numbered failed host.

        In a single-process job, a MeshfeedError is raised unchanged.

        Raises:
          DamagedCheckpointError: that host found stored bytes that differ from those written.
          SettingsError: a keyword's value is wrong on that host.
          CheckpointError: that host could not read for any other reason.
        """
        failure = None if error is None else _failure_of(error)
        if len(self._participants) == 1:
            if isinstance(error, MeshfeedError):
                raise error
            if failure is not None:
                raise as_checkpoint_error(failure.kind, f"{self._doing}: {failure.message}") from error
            return
        first = self._reduce(None if failure is None else failure.to_json(), _first_failure)
        if first is not None:
            raise _error_of(Failure.from_json(first)) from error

    def attempt(self, work: Callable[[], R]) -> R:
        """Runs ``work`` and returns its result once every host has succeeded; if any host failed, raises on all."""
        try:
            result = work()
        except Exception as error:
            self.confirm(error)
            raise  # not reached: confirm raises
        self.confirm(None)
        return result

    def publish(self, work: Callable[[], JsonValue]) -> JsonValue:
        """Runs ``work`` on host 0 and returns its JSON value on all hosts; an error there is raised on all of them."""
        if len(self._participants) == 1:
            return work()
        value = self.attempt(work if process_index() == 0 else lambda: None)
        return self._reduce(value, lambda reports: reports[0])

    def collect(self, value: JsonValue) -> dict[int, JsonValue]:
        """Returns every host's JSON value, keyed by host, on all hosts."""
        return {int(host): report for host, report in self._reduce(value, _all_reports).items()}
