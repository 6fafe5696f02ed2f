"""Where the hosts of one save wait for each other in the background, and learn which of them failed.

Orbax's own barriers do not say why a host is missing: it failed earlier, and the others wait for it until their timeout,
30 minutes by default. A barrier that timed out also fails at once for the next Checkpointer that saves a step of that number.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from meshfeed._src.base.errors import CheckpointError
from meshfeed._src.base.types import JsonValue
from meshfeed._src.checkpoint.agreement import Agreement, error_of, report_of

_MOST_ROUNDS = 8  # hosts that failed wait for the others, which then raise, in one round or two


class SavePoints:
    """One host's side of the points of one save, which all hosts reach in the same order.

    A host that fails leaves out the points up to the barrier at which Orbax ends every save. There it reports its error,
    and the hosts that wait for it elsewhere raise the same.

    Args:
      save_id: unique in the job, and the same on all hosts.
      step: the step, for error messages.
      timeout_seconds: how long hosts wait for each other at each point.
    """

    def __init__(self, save_id: object, step: int, timeout_seconds: float) -> None:
        doing = f"waiting for the other hosts of step {step}"
        self._agreement = Agreement(doing, timeout_seconds, f"save-{save_id}", kind="saving a step")
        self._caller = threading.get_ident()
        self._closed = False

    def attempt(self, point: str, work: Callable[[], object]) -> None:
        """Runs ``work``; returns once it has succeeded on every host, or raises the same error on all."""
        failed: Exception | None = None
        try:
            work()
        except Exception as error:
            failed = error
        _, first = self._meet(point, failed)
        if first is not None:
            raise error_of(first) from failed

    def barrier(self, point: str) -> None:
        """Waits for the other hosts, as Orbax asks for it; raises the error of a host that has failed before this point.

        Orbax calls it on its threads also while it handles an error of this host, which is then reported.
        """
        # Around a call of save(), the caller may handle an error of its own.
        failed = None if threading.get_ident() == self._caller else sys.exception()
        for _ in range(_MOST_ROUNDS):
            together, first = self._meet(point, failed)
            if together:
                return
            if failed is None:
                break  # otherwise the others raise now, and arrive here next
        else:
            first = None
        if first is not None:
            raise error_of(first)
        raise CheckpointError(
            f"{self._agreement.doing}: hosts are at different points of the save ({point} on this one)."
        )

    def _meet(self, point: str, failed: BaseException | None) -> tuple[bool, JsonValue]:
        """Returns whether all hosts are at this point, and the report of the lowest-numbered host that failed, or None."""

        def reduce(found: dict[int, JsonValue]) -> JsonValue:
            first = next((report for _, (_, report) in sorted(found.items()) if report is not None), None)
            return [len({point for point, _ in found.values()}) == 1, first]

        together, first = self._agreement.reduce([point, None if failed is None else report_of(failed)], reduce)
        return together, first

    def close(self) -> None:
        """Ends the points, once the save has ended on this host. Idempotent."""
        if not self._closed:
            self._closed = True
            self._agreement.close()


class OrbaxBarrier:
    """The barrier for Orbax's ``AsyncOptions``. ``points`` are those of the save in progress."""

    def __init__(self) -> None:
        self.points: SavePoints | None = None

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Waits for the other hosts."""
        if self.points is None:  # not in the background of a save
            with Agreement(key, timeout_ms / 1000) as agreement:
                agreement.collect(None)
        else:
            self.points.barrier(key)
