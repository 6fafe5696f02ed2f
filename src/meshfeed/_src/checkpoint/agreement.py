"""Hosts report read errors to each other before any of them enters a collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshfeed._src.base.coordination import next_use, process_count, process_index, reduce_json, require_store
from meshfeed._src.base.errors import MeshfeedError, SettingsError
from meshfeed._src.checkpoint.manifest import DamagedCheckpointError, as_checkpoint_error


def _first_error(reports: dict[int, Any]) -> Any:
    for host, report in sorted(reports.items()):
        if report is not None:
            return {"host": host, **report}
    return None


def _all_reports(reports: dict[int, Any]) -> Any:
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

    def _reduce(self, value: Any, reduce: Callable[[dict[int, Any]], Any]) -> Any:
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
        """Raises the same error on every host if any host passes one; otherwise returns.

        The error is that of the lowest-numbered host that failed. In a job of one process, a MeshfeedError is raised
        unchanged.

        Raises:
          DamagedCheckpointError: that host found stored bytes that differ from those written.
          SettingsError: a keyword's value is wrong on that host.
          CheckpointError: that host could not read for any other reason.
        """
        report = None
        if error is not None:
            kind = "damaged" if isinstance(error, DamagedCheckpointError) else "unreadable"
            setting = error.setting if isinstance(error, SettingsError) else None
            text = str(error) if isinstance(error, MeshfeedError) else f"{type(error).__name__}: {error}"
            report = {"kind": kind, "text": text, "setting": setting}
        if len(self._participants) == 1:
            if error is not None:
                if isinstance(error, MeshfeedError):
                    raise error
                raise as_checkpoint_error("unreadable", f"{self._doing}: {report and report['text']}") from error
            return
        failed = self._reduce(report, _first_error)
        if failed is not None:
            message = f"host {failed['host']}: {failed['text']}"
            if failed["setting"] is not None:
                raise SettingsError(message, setting=failed["setting"]) from error
            raise as_checkpoint_error(failed["kind"], message) from error

    def attempt(self, work: Callable[[], Any]) -> Any:
        """Runs ``work`` and returns its result once every host has succeeded; otherwise raises on every host."""
        result, error = None, None
        try:
            result = work()
        except Exception as caught:
            error = caught
        self.confirm(error)
        return result

    def publish(self, work: Callable[[], Any]) -> Any:
        """Runs ``work`` on host 0 and returns its JSON value on all hosts; an error there is raised on all of them."""
        if len(self._participants) == 1:
            return work()
        value, error = None, None
        if process_index() == 0:
            try:
                value = work()
            except Exception as caught:
                error = caught
        self.confirm(error)
        return self._reduce(value, lambda reports: reports[0])

    def collect(self, value: Any) -> dict[int, Any]:
        """Returns every host's JSON value, keyed by host, on all hosts."""
        return {int(host): report for host, report in self._reduce(value, _all_reports).items()}
