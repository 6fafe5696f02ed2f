"""The beginning of a generation of a feed, on a thread of its own: open the data, agree, start the pipeline.

``start`` and the first ``next`` begin it, and ``next`` waits for its end. It never waits without a deadline of its own: for
the data to be opened, as long as that makes progress, and for the other hosts. It runs no collective and no device
computation; the pipeline, which it starts, transfers batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from meshfeed._src.agreement.windows import leave_notice
from meshfeed._src.base import coordination
from meshfeed._src.base.errors import MeshfeedError, StalledError
from meshfeed._src.base.fork import Owner
from meshfeed._src.base.progress import PROGRESS
from meshfeed._src.base.reduction import ProgressReport
from meshfeed._src.base.stacks import feed_stacks, note_stacks
from meshfeed._src.base.threads import SingleCall
from meshfeed._src.base.waits import Reminder, late_seconds
from meshfeed._src.feed.parts import Generation
from meshfeed._src.feed.pipeline import Pipeline
from meshfeed._src.streams.protocol import AnyReader

_log = logging.getLogger("meshfeed.feed")
_JOIN_SECONDS = 5.0
T = TypeVar("T")


def wait_until_open(
    opening: SingleCall[T],
    timeout_seconds: float,
    *,
    name: str,
    hosts_agree: bool,
    check: Callable[[], object] = lambda: None,  # called about twice per second; may raise
) -> T:
    """Waits for the data to be opened, for as long as dropping records makes progress, and publishes that for other hosts.

    Raises:
      StalledError: there was no progress for ``timeout_seconds``.
    """
    host = coordination.process_index()
    report = ProgressReport(coordination.key_value_store() if hosts_agree else None, timeout_seconds)
    reminder = Reminder(late_seconds(timeout_seconds))

    def tick(waited: float) -> None:
        check()
        report.update()
        what = str(PROGRESS) or "opening the data"
        if reminder.due(waited):
            stacks = feed_stacks()
            _log.warning("%s: %s for %.0f s\n%s", name, what, waited, stacks)
            report.tell(f"{what} for {waited:.0f} s\n{stacks}".rstrip())
        if waited >= timeout_seconds <= PROGRESS.idle_seconds():
            error = StalledError(
                f"host {host} itself is late: it is {what}, without progress for "
                f"{min(waited, PROGRESS.idle_seconds()):.0f} s (timeout_seconds={timeout_seconds:g}). Check its storage, or "
                "raise timeout_seconds if that may take longer.",
                hosts=(host,),
                waited_seconds=waited,
            )
            note_stacks(error)
            raise error

    try:
        return opening.result(tick)
    finally:
        report.end()


class Startup:
    """Begins one generation of a feed, once; closes ``opening``, which opens the data at the generation's cursor."""

    def __init__(self, generation: Generation, opening: SingleCall[AnyReader]) -> None:
        self._owner = Owner()
        self._generation, self._opening = generation, opening
        self._handshake = generation.membership.handshake
        self._begun = self._canceled = False
        self._reader: AnyReader | None = None  # while hosts agree
        self._call = SingleCall(self._run, f"meshfeed-start-{generation.name}")

    def start(self) -> None:
        """Starts the thread, once. An interrupted call can be repeated."""
        if not self._begun:
            self._handshake.begin()  # here, in the order of the caller's calls, which is the same on all hosts
            self._begun = True
        # Here, so that a later opening waits for this one: both may use one iterator, and the later one must get it.
        self._opening.start()
        self._call.start()

    def pipeline(self) -> Pipeline:
        """Waits for the end and returns the pipeline. An interrupted call can be repeated.

        Raises:
          PeerError: another host could not begin.
          AgreementError: hosts differ in settings.
          StalledError: a host or the source is late.
          MeshfeedError: :meth:`close` was called.
          Exception: any error of opening the source.
        """
        self._owner.check("this feed")
        return self._call.result()

    def _check(self) -> None:
        if self._canceled:
            raise MeshfeedError("the feed was closed")

    def _run(self) -> Pipeline:
        generation, timeout_seconds = self._generation, self._generation.settings.timeout_seconds
        try:
            reader = wait_until_open(
                self._opening,
                timeout_seconds,
                name=generation.name,
                hosts_agree=self._handshake.needed,
                check=self._check,
            )
            settings = generation.agreed()
        except BaseException as error:  # such as a SystemExit of the source; no interrupt reaches this thread
            if not self._canceled:
                self._handshake.fail(error)
            raise
        self._check()  # do not wait for other hosts
        self._reader = reader
        self._handshake.agree(settings, timeout_seconds, self._check, taken=generation.taken)
        pipeline = generation.make_pipeline(reader)
        pipeline.start()
        return pipeline

    def forget_error(self) -> None:
        """Lets go of the exception of this generation, which the feed keeps and raises again.

        Its traceback refers to the feed, and threads refer to this until the feed is closed, which is when it is collected.
        """
        self._opening.forget_error()
        self._call.forget_error()
        if self._call.succeeded:
            self._call.result().forget_error()

    def close(self, leaving: str | None = None, because: BaseException | None = None) -> None:
        """Ends the startup or, once it has ended, the pipeline. An interrupted call can be repeated.

        Waits for the startup's own thread, but not for a source that is still being opened. Does nothing in a forked
        child.

        Args:
          leaving: what this host did, such as "closed its feed", for hosts that continue; None to leave silently.
          because: the exception that caused it, if any.
        """
        if not self._owner.is_here:
            return
        self._canceled = True
        self._opening.wake()
        if not self._call.join(_JOIN_SECONDS):
            _log.warning(
                "%s: a request of its start has not returned after %.0f s", self._generation.name, _JOIN_SECONDS
            )
        self._call.discard(lambda pipeline: pipeline.close(leaving, because))
        if not self._call.succeeded:
            if self._reader is not None and self._handshake.others_may_have_agreed:
                # Then they find the notice in their windows.
                self._generation.make_pipeline(self._reader).close(leaving, because)
            self._opening.discard(lambda reader: reader.close())
            self._handshake.abandon(
                None if leaving is None else leave_notice(leaving, self._generation.cursor.step, because)
            )
