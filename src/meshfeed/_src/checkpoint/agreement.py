"""Hosts report read errors to each other before any of them enters a collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from meshfeed._src.base.coordination import next_use, process_count, process_index, require_store
from meshfeed._src.base.errors import CheckpointError, Failure, MeshfeedError, SettingsError
from meshfeed._src.base.reduction import reduce_json
from meshfeed._src.base.types import JsonValue
from meshfeed._src.checkpoint.manifest import DamagedCheckpointError

R = TypeVar("R")


def _failure_of(error: BaseException) -> Failure:
    text = str(error) if isinstance(error, MeshfeedError) else f"{type(error).__name__}: {error}"
    if isinstance(error, SettingsError) and error.setting is not None:
        return Failure("setting", text, process_index(), details={"setting": error.setting})
    return Failure("damaged" if isinstance(error, DamagedCheckpointError) else "unreadable", text, process_index())


def _error_of(failure: Failure, where: str) -> MeshfeedError:
    message = f"{where}: {failure.message}"
    if failure.kind == "setting":
        return SettingsError(message, setting=failure.details["setting"])
    return (DamagedCheckpointError if failure.kind == "damaged" else CheckpointError)(message)


class Agreement:
    """Agreement among all processes of the job about one operation, in numbered rounds.

    Every process must make the same calls in the same order.

    Args:
      doing: the operation, for error messages.
      timeout_seconds: how long to wait for the slowest host.
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
                raise _error_of(failure, self._doing) from error
            return
        report = None if failure is None else failure.to_json()
        first = self._reduce(report, lambda reports: next((one for _, one in sorted(reports.items()) if one), None))
        if first is not None:
            failure = Failure.from_json(first)
            raise _error_of(failure, f"host {failure.host}") from error

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
        reports = self._reduce(value, lambda reports: {str(host): report for host, report in reports.items()})
        return {int(host): report for host, report in reports.items()}
