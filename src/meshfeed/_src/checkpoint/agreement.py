"""All hosts agree on one operation: each reports its error to the others before any of them enters a collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from meshfeed._src.base.coordination import format_differences, next_use, process_count, process_index, require_store
from meshfeed._src.base.errors import CheckpointError, Failure, MeshfeedError, SettingsError
from meshfeed._src.base.reduction import Rounds
from meshfeed._src.base.types import JsonValue
from meshfeed._src.checkpoint.stored import DamagedCheckpointError, MissingArrayError, StoredShapeError

R = TypeVar("R")


# Errors that keep their class on other hosts, the most specific first.
_ERRORS: dict[str, type[CheckpointError]] = {
    "missing": MissingArrayError,
    "damaged": DamagedCheckpointError,
    "shape": StoredShapeError,
}


def report_of(error: BaseException) -> JsonValue:
    """Returns an error as JSON, for other hosts."""
    text = str(error) if isinstance(error, MeshfeedError) else f"{type(error).__name__}: {error}"
    if isinstance(error, SettingsError) and error.setting is not None:
        return Failure("setting", text, process_index(), details={"setting": error.setting}).to_json()
    kind = next((kind for kind, of_kind in _ERRORS.items() if isinstance(error, of_kind)), "unreadable")
    return Failure(kind, text, process_index(), getattr(error, "step", None)).to_json()


def error_of(report: JsonValue, where: str | None = None) -> MeshfeedError:
    """Returns the error of a report; ``where`` is by default the host that reported it."""
    failure = Failure.from_json(report)
    message = f"{where or f'host {failure.host}'}: {failure.message}"
    if failure.kind == "setting":
        return SettingsError(message, setting=failure.details["setting"])
    return _ERRORS.get(failure.kind, CheckpointError)(message, step=failure.step)


class Agreement(Rounds):
    """Agreement among all processes of the job about one operation: ``doing``, in error messages.

    ``kind`` is what that must have in common on all hosts, without the path, which may differ; by default all of it. ``name``
    is unique, and needed on a background thread; by default operations are counted.
    """

    hint = " (all hosts must call save, restore and close in the same order, not only host 0)"

    def __init__(self, doing: str, timeout_seconds: float, name: str | None = None, *, kind: str | None = None) -> None:
        scope = f"checkpoint/{next_use('checkpoint') if name is None else name}"
        super().__init__(scope, range(process_count()), timeout_seconds=timeout_seconds, doing=doing)
        self._kind = doing if kind is None else kind
        # Fail now rather than at the first read: without a store hosts cannot agree.
        if len(self.participants) > 1:
            require_store()

    def reduce(self, value: JsonValue, reduce: Callable[[dict[int, JsonValue]], JsonValue]) -> JsonValue:
        """See :meth:`Rounds.reduce`.

        Raises:
          CheckpointError: other hosts are in another operation. Operations are counted, so they would take each other's
            values for their own.
        """

        def reduce_alike(values: dict[int, JsonValue]) -> JsonValue:
            differences = format_differences({host: kind for host, (kind, _) in values.items()})
            if differences is not None:
                return [differences, None, self._kind]
            return [None, reduce({host: one for host, (_, one) in values.items()}), self._kind]

        differences, result, kind = super().reduce([self._kind, value], reduce_alike)
        if differences is None and kind != self._kind:  # this host has come to a partial round, after its end
            differences = f"host {min(self.participants)}: {kind}; host {process_index()}: {self._kind}"
        if differences is not None:
            raise CheckpointError(
                f"{self.doing}: hosts do different things at the same time ({differences}). All hosts must call save, "
                "restore and close in the same order, for the same step, and all of them with a feed or without: a host that "
                "leaves the training loop early has to tell the others."
            )
        return result

    def attempt(self, work: Callable[[], R]) -> R:
        """Runs ``work`` and returns its result once every host has succeeded; if any host failed, raises on all.

        Every host raises the error of the lowest-numbered one that failed. In a single-process job, a MeshfeedError is
        raised unchanged.

        Raises:
          DamagedCheckpointError: that host found stored bytes that differ from those written.
          SettingsError: a keyword's value is wrong on that host.
          CheckpointError: that host failed for any other reason.
        """
        alone = len(self.participants) == 1
        try:
            result = work()
        except Exception as error:
            if alone and isinstance(error, MeshfeedError):
                raise
            report = report_of(error)
            raise (error_of(report, self.doing) if alone else error_of(self._first(report))) from error
        if not alone and (report := self._first(None)) is not None:
            raise error_of(report)
        return result

    def _first(self, report: JsonValue) -> JsonValue:
        """Returns the report of the lowest-numbered host that has one, or None."""
        return self.reduce(
            report, lambda reports: next((one for _, one in sorted(reports.items()) if one is not None), None)
        )

    def publish(self, work: Callable[[], JsonValue]) -> JsonValue:
        """Runs ``work`` on host 0 and returns its JSON value on all hosts; an error there is raised on all of them."""
        if len(self.participants) == 1:
            return work()
        value, failed = None, None
        if process_index() == 0:
            try:
                value = work()
            except Exception as error:
                failed = error
        report = None if failed is None else report_of(failed)
        value, report = self.reduce([value, report], lambda reports: reports[0])
        if report is not None:
            raise error_of(report) from failed
        return value

    def collect(self, value: JsonValue) -> dict[int, JsonValue]:
        """Returns every host's JSON value, keyed by host, on all hosts."""
        reports = self.reduce(value, lambda reports: {str(host): report for host, report in reports.items()})
        return {int(host): report for host, report in reports.items()}
