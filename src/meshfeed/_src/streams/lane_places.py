"""Where the lanes of a host are open, in this process or in workers, and how they change places between two steps.

Lanes with a state move as they resume. They stay open and are read where they are, while another place opens them at their
last known state and catches up. Once it is a step or so behind, it reads them from the next step on. The records do not
depend on the place, nor do the states, so a move changes neither.

A lane without a state would be read again from its beginning, which takes long, and which only a resume may ask for: its
records may come from something that does not repeat them. Such lanes are not moved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshfeed._src.base import hooks
from meshfeed._src.base.errors import SourceError, shorten
from meshfeed._src.base.settings import FeedSettings, Workers
from meshfeed._src.base.threads import Background, Call, Threads
from meshfeed._src.base.types import StreamSource
from meshfeed._src.reading.reads import AutoReads, ReadNumbers, most_worker_bytes
from meshfeed._src.streams.lane import LaneEntry, LaneSettings
from meshfeed._src.streams.lane_group import GroupRows, LaneGroup, WorkerLanes

_CLOSE_SECONDS = 5.0
_SHOWN_CHARACTERS = 300
_CATCHES_UP = 0.75  # a place that comes no nearer than to this share of the steps that it was behind is waited for


class _Coming:
    """Another place, which catches up with the lanes while they are read where they are.

    Args:
      lanes: opened by its first :meth:`is_near`.
      num_workers: number of workers there; 0 in this process.
    """

    def __init__(self, lanes: LaneGroup | WorkerLanes, num_workers: int) -> None:
        self.lanes, self.num_workers = lanes, num_workers
        self.thread = Threads(1, "meshfeed-move-lanes")
        self._going: Call[None] | None = None
        self._step = 0  # where it goes
        self._behind: int | None = None  # steps, when it went there; None while it opens the lanes

    def is_near(self, step: int, entries: Mapping[int, LaneEntry]) -> bool:
        """Whether the lanes are open here and close to ``step``, at which they are at ``entries``; does not wait.

        Raises:
          Exception: the lanes could not be opened.
        """
        if self._going is None:
            if not self.lanes.is_ready():
                return False
        elif not self._going.done():
            return False
        else:
            self._going.result()
            behind, before = step - self._step, self._behind
            # Many readers do their work with the first record, so they are near only after they have dropped some.
            if before is not None and (behind <= 1 or behind > _CATCHES_UP * before):
                return True
            self._behind = behind
        self._step = step
        self._going = self.thread.submit(self.lanes.go_to, dict(entries))
        return False

    def close(self) -> None:
        """Ends the thread, and closes the lanes."""
        self.thread.close()
        self.lanes.close()


class LanePlaces:
    """Reads lanes, step by step, and follows the numbers of a feed with ``"auto"``. Called from one thread at a time.

    Args:
      source: a stream source.
      settings: the feed's settings.
      shared: settings of each lane.
      entries: lane → where to start.
      step: the first step.
      rows_per_lane: step → records of each lane.
    """

    def __init__(
        self,
        source: StreamSource,
        settings: FeedSettings,
        shared: LaneSettings,
        entries: Mapping[int, LaneEntry],
        step: int,
        rows_per_lane: Callable[[int], int],
    ) -> None:
        self._source, self._settings, self._shared = source, settings, shared
        self._entries: Mapping[int, LaneEntry] = dict(entries)  # after the last step that was read
        self._rows_per_lane = rows_per_lane
        self._first = self._asked = step
        self._max_threads = max(1, len(entries))  # a thread reads a whole lane
        self._num_threads = min(settings.threads or hooks.read_threads(source), self._max_threads)
        self._num_workers = int(settings.workers) if entries else 0
        self._auto: AutoReads | None = None
        self._coming: _Coming | None = None
        self._closing: list[Background] = []
        self._stopped = False
        self._lanes: LaneGroup | WorkerLanes = (
            WorkerLanes(source, shared, entries, settings.workers, settings.timeout_seconds)
            if self._num_workers
            else LaneGroup(source, shared, self._num_threads)
        )
        try:
            self._lanes.go_to(entries)
        except BaseException:
            self._lanes.close()
            raise

    def adapt(self, auto: AutoReads) -> None:
        """See :class:`meshfeed._src.streams.protocol.HostReader`."""
        self._auto = auto
        auto.begin(ReadNumbers(self._num_workers, self._num_threads))
        if not self._entries:
            auto.keep("num_workers", "this host reads no lane", for_good=False)
        if self._num_workers:
            auto.keep("num_threads", "worker processes read the lanes, each in one thread", for_good=False)
        elif self._max_threads < 2:
            auto.keep("num_threads", "a thread reads a whole lane, and this host has only one", for_good=False)

    def read(self, step: int) -> GroupRows:
        """Reads the next step."""
        auto = self._auto
        if auto is not None and (self._coming is not None or auto.wanted != auto.in_use):
            self._follow(auto, step)
        try:
            rows = self._read(step)
        except SourceError as error:
            killed = isinstance(self._lanes, WorkerLanes) and self._lanes.killed
            if not self._shared.moves or not killed or auto is None:
                raise
            self._give_up_workers(auto, f"a worker was killed: {error}")
            rows = self._read(step)
        self._entries = {lane: row.entry for lane, row in rows.lanes.items()}
        if self._shared.moves and auto is not None:
            self._keep_lanes_without_state(auto, rows)
        return rows

    def _read(self, step: int) -> GroupRows:
        if isinstance(self._lanes, LaneGroup):
            return self._lanes.read(self._rows_per_lane(step))
        while self._asked <= step + 1:  # queue the next step too, so that workers read while this one is delivered
            self._lanes.submit(self._rows_per_lane(self._asked))
            self._asked += 1
        return self._lanes.result()

    # ------------------------------------------------------------------ moves

    def _keep_lanes_without_state(self, auto: AutoReads, rows: GroupRows) -> None:
        again = [lane for lane, row in rows.lanes.items() if row.reads_again]
        if again and "num_workers" not in auto.unchangeable:
            auto.keep(
                "num_workers",
                f"lane {again[0]} has no state (get_state, set_state), so it would be read again from its beginning to "
                "continue elsewhere",
            )

    def _follow(self, auto: AutoReads, step: int) -> None:
        """Moves towards ``auto.wanted``, without waiting for another place to open the lanes."""
        if self._shared.moves and not self._stopped:
            try:
                self._move(auto.wanted.num_workers, step)
            except Exception as error:  # in a place that might not have been tried: the lanes stay where they are
                if self._stopped:  # which has ended the place: the feed's next reader may open another
                    raise
                self._drop_coming()
                auto.in_use = auto.in_use._replace(num_workers=self._num_workers)
                auto.keep("num_workers", shorten(str(error), _SHOWN_CHARACTERS))
        num_threads = auto.wanted.num_threads
        if isinstance(self._lanes, LaneGroup):
            self._lanes.set_threads(min(num_threads, self._max_threads))
        auto.in_use = ReadNumbers(self._num_workers, num_threads)

    def _move(self, num_workers: int, step: int) -> None:
        if self._coming is not None and self._coming.num_workers != num_workers:
            self._drop_coming()
        # Before the first read, nothing has shown whether the lanes have a state.
        if num_workers == self._num_workers or step == self._first:
            return
        if self._coming is None:
            self._coming = _Coming(self._make(num_workers), num_workers)
        if self._coming.is_near(step, self._entries):
            self._coming.lanes.go_to(self._entries)
            self._change_to(self._coming.lanes, num_workers)
            self._asked = step
            self._coming.thread.shutdown(wait=False)
            self._coming = None

    def _make(self, num_workers: int) -> LaneGroup | WorkerLanes:
        if not num_workers:
            return LaneGroup(self._source, self._shared, self._num_threads)
        # No lane is being read here: a read that changes the source while it is pickled could break either.
        seconds, limit = self._settings.timeout_seconds, most_worker_bytes()
        return WorkerLanes(self._source, self._shared, self._entries, Workers(num_workers), seconds, limit)

    def _change_to(self, lanes: LaneGroup | WorkerLanes, num_workers: int) -> None:
        before, self._lanes, self._num_workers = self._lanes, lanes, num_workers
        self._close_later(before.close)

    def _give_up_workers(self, auto: AutoReads, why: str) -> None:
        self._drop_coming()
        here = LaneGroup(self._source, self._shared, self._num_threads)
        here.go_to(self._entries)
        self._change_to(here, 0)
        auto.give_up_workers(why)

    def _drop_coming(self) -> None:
        """Safe to call again after an interrupt."""
        if self._coming is not None:
            self._coming.lanes.stop()
            self._close_later(self._coming.close)
            self._coming = None

    def _close_later(self, close: Callable[[], None]) -> None:
        """On another thread: iterators and processes may take long to close."""
        self._closing = [closing for closing in self._closing if not closing.ended]
        self._closing.append(closing := Background(close, "meshfeed-close-lanes"))
        closing.start()

    # ------------------------------------------------------------------ end

    def describe(self) -> str:
        """Returns what is being read, for logs."""
        return self._lanes.describe()

    def stop(self) -> None:
        """See :meth:`meshfeed._src.streams.protocol.HostReader.stop`."""
        self._stopped = True
        coming = self._coming  # read before the lanes, to which it may change
        if coming is not None:
            coming.lanes.stop()
        self._lanes.stop()

    def close(self) -> None:
        """Closes lanes, threads and processes."""
        self._stopped = True
        self._drop_coming()
        self._lanes.close()
        for closing in self._closing:
            closing.join(_CLOSE_SECONDS)
