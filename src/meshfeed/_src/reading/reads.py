"""Reads of one host's part of each step: in the calling thread, in threads, or in worker processes.

The numbers of workers and threads may change between two steps. A read that is under way ends where it began, and its rows
are the same wherever it runs, so a change neither loses nor changes a batch.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from meshfeed._src.base.errors import SourceError, shorten
from meshfeed._src.base.machine import host_memory_bytes
from meshfeed._src.base.settings import Workers
from meshfeed._src.base.threads import Background, Threads
from meshfeed._src.base.types import ColumnSlices, RecordIds
from meshfeed._src.reading.records import ReadRows, RecordReader
from meshfeed._src.reading.workers import open_pool, pickle_task

_log = logging.getLogger("meshfeed.workers")
_CLOSE_SECONDS = 5.0
_WORKER_SHARE = 1 / 64  # of the host's memory, for the source of one worker
_SHOWN_CHARACTERS = 300
_Read: TypeAlias = tuple[RecordIds, RecordIds, ColumnSlices | None]
"""Record ids, epochs and columns."""


class ReadNumbers(NamedTuple):
    """How many processes read, and how many threads if there are no processes."""

    num_workers: int
    num_threads: int


class AutoReads:
    """The numbers that a feed with ``"auto"`` wants, and those that its reader uses. Any thread may read and set them.

    Attributes:
      wanted: set by the feed; the reader follows between two steps, at once for threads, and once they have started for
        workers.
      in_use: set by the reader.
      unchangeable: keyword → why it stays as it is, set by a reader.
    """

    def __init__(self) -> None:
        self.wanted = self.in_use = ReadNumbers(0, 1)
        self.unchangeable: dict[str, str] = {}
        self._of_this_reader: set[str] = set()
        self._begun = False

    def begin(self, now: ReadNumbers) -> None:
        """Sets the numbers that a new reader uses; those of the first reader are also the first wanted ones."""
        self.in_use = now
        self.unchangeable = {name: why for name, why in self.unchangeable.items() if name not in self._of_this_reader}
        self._of_this_reader.clear()
        if not self._begun:
            self.wanted, self._begun = now, True

    def keep(self, keyword: str, why: str, *, for_good: bool = True) -> None:
        """Records that the reader cannot change the number of ``keyword``, and with ``for_good``, nor can later ones."""
        self.unchangeable[keyword] = why
        (self._of_this_reader.discard if for_good else self._of_this_reader.add)(keyword)
        self.wanted = self.wanted._replace(**{keyword: getattr(self.in_use, keyword)})

    def give_up_workers(self, why: str) -> None:
        """Records, with a warning, that the reader goes on without the worker processes that the feed has chosen."""
        _log.warning("reading without worker processes from now on (num_workers='auto'): %s", why)
        self.in_use = self.in_use._replace(num_workers=0)
        self.keep("num_workers", why)


def most_worker_bytes() -> int:
    """Returns the size up to which a pickled source is sent to workers that ``"auto"`` starts."""
    return int(host_memory_bytes() * _WORKER_SHARE)


class _Group:
    """Workers that were started together, each with a copy of the source.

    Attributes:
      pool: the workers.
      size: their number.
      by_auto: whether the feed chose to start them; if one of those that the user asked for is killed, that is an error.
      num_pending: reads that have not been collected.
    """

    def __init__(self, records: RecordReader, workers: Workers, timeout_seconds: float, *, by_auto: bool) -> None:
        def make_task() -> Callable[[_Read], ReadRows]:
            return lambda request: records.read(*request)

        task = pickle_task(make_task, most_worker_bytes() if by_auto else None, workers)
        self.pool = open_pool(workers, task, name="the feed", describe=_describe)
        self.size, self.by_auto, self.num_pending = int(workers), by_auto, 0
        self._timeout_seconds = timeout_seconds

    def submit(self, worker: int, request: _Read) -> Callable[[], ReadRows]:
        """Queues a read and returns a function that waits for its rows; call both in the order of the steps."""
        self.pool.submit(worker, request)
        return lambda: self.pool.result(worker, self._timeout_seconds)


def _describe(request: _Read) -> str:
    return f"reading {len(request[0])} records (first id {request[0][0]})"


class Reads:
    """Reads steps of a random-access source. Called from one thread at a time, in the order of the steps.

    Without processes, ``num_threads`` read; 1 is the calling thread.

    Attributes:
      num_workers: number of processes that get reads.
      ahead: number of steps to submit at the same time.
    """

    def __init__(
        self, records: RecordReader, num_workers: Workers, num_threads: int, *, timeout_seconds: float
    ) -> None:
        self._records = records
        self._timeout_seconds = timeout_seconds
        self._groups: list[_Group] = []
        self._coming: _Group | None = None  # started, and not ready
        self._leaving: list[_Group] = []  # get no more reads, and have some to be collected
        self._closing: list[Background] = []
        self._auto: AutoReads | None = None
        self._followed: ReadNumbers | None = None
        self._stopped = False
        self._num_threads = num_threads
        self._threads = _make_threads(num_threads)
        self._replaced: list[Threads] = []  # end once they have done what they have
        if num_workers:
            self._groups.append(_Group(records, num_workers, timeout_seconds, by_auto=False))
        self._count()

    def _count(self) -> None:
        self.num_workers = sum(group.size for group in self._groups)
        readers = self.num_workers or self._num_threads
        # Two per reader, so that none waits for the next.
        self.ahead = 2 * readers if self._groups or readers > 1 else 1

    @property
    def numbers(self) -> ReadNumbers:
        """The current numbers."""
        return ReadNumbers(self.num_workers, self._num_threads)

    def submit(
        self, step: int, record_ids: RecordIds, epochs: RecordIds, columns: ColumnSlices | None
    ) -> Callable[[], ReadRows]:
        """Starts a read, and returns a function that waits for its rows; the caller's thread reads in that function."""
        read = functools.partial(self._records.read, record_ids, epochs, columns)
        if not self._groups:
            return read if self._threads is None else self._threads.submit(read).result
        group, worker = self._worker(step % self.num_workers)
        collect = group.submit(worker, (record_ids, epochs, columns))
        if not group.by_auto:
            return collect
        group.num_pending += 1
        return functools.partial(self._collect, group, collect, read)

    def _worker(self, number: int) -> tuple[_Group, int]:
        for group in self._groups[:-1]:
            if number < group.size:
                return group, number
            number -= group.size
        return self._groups[-1], number

    def _collect(self, group: _Group, collect: Callable[[], ReadRows], read: Callable[[], ReadRows]) -> ReadRows:
        try:
            return collect()
        except SourceError as error:
            if not group.pool.killed:
                raise
            self._give_up_workers(f"a worker was killed: {error}")
            return read()  # where it would have been read without "auto"
        finally:
            group.num_pending -= 1

    # ------------------------------------------------------------------ changes

    def follow(self, auto: AutoReads) -> None:
        """Moves towards ``auto.wanted``, without waiting for workers to start. Call it between two steps."""
        wanted = auto.wanted
        if wanted is self._followed:
            return
        self._auto = auto
        num_workers, num_threads = wanted
        try:
            self._follow_workers(num_workers)
        except Exception as error:  # in a process that might not have been started: the feed reads without it
            if self._stopped:  # which has ended the process: the feed's next reader may start some
                raise
            self._give_up_workers(shorten(str(error), _SHOWN_CHARACTERS))
        if num_threads != self._num_threads:
            self._replace_threads(num_threads)
        self._count()
        auto.in_use = self.numbers
        if auto.in_use == wanted and not self._coming and not self._leaving:
            self._followed = wanted

    def _replace_threads(self, number: int) -> None:
        """Safe to call again after an interrupt."""
        self._replaced = [threads for threads in self._replaced if not threads.ended]
        if self._threads is not None:
            self._replaced.append(self._threads)
        threads = _make_threads(number)
        self._threads, self._num_threads = threads, number
        for replaced in self._replaced:  # only now: until then it may get reads
            replaced.shutdown(wait=False)

    def _follow_workers(self, wanted: int) -> None:
        coming = self._coming
        if coming is not None and self.num_workers + coming.size != wanted:
            self._coming = None
            self._leaving.append(coming)
        elif coming is not None and coming.pool.is_ready():
            self._coming = None
            self._groups.append(coming)
        elif coming is None and self.num_workers < wanted:
            self._coming = self._start_workers(wanted - self.num_workers)
        self._count()
        while self.num_workers > wanted:
            self._leaving.append(self._groups.pop())
            self._count()
        for group in [group for group in self._leaving if not group.num_pending]:
            self._leaving.remove(group)
            self._closing.append(closing := Background(group.pool.close, "meshfeed-close-workers"))
            closing.start()

    def _start_workers(self, number: int) -> _Group:
        if self._threads is not None:
            self._threads.shutdown()  # a read that changes the source while it is pickled could break either
            self._replace_threads(self._num_threads)
        return _Group(self._records, Workers(number), self._timeout_seconds, by_auto=True)

    def _give_up_workers(self, why: str) -> None:
        assert self._auto is not None
        if self._groups:
            self._auto.give_up_workers(why)
        else:
            self._auto.keep("num_workers", why)
        self._leaving += self._groups + ([self._coming] if self._coming else [])
        self._groups, self._coming = [], None
        self._count()

    def stop(self) -> None:
        """Ends reads in worker processes and wakes the thread that waits for them. Thread-safe."""
        self._stopped = True
        for group in self._all_groups():
            group.pool.stop()

    def _all_groups(self) -> list[_Group]:
        return [*self._groups, *self._leaving, *([self._coming] if self._coming else [])]

    def close(self) -> None:
        """Stops threads and processes."""
        for threads in [*self._replaced, self._threads]:
            if threads is not None:
                threads.close()
        for group in self._all_groups():
            group.pool.close()
        for closing in self._closing:
            closing.join(_CLOSE_SECONDS)


def _make_threads(number: int) -> Threads | None:
    return Threads(number, "meshfeed-read") if number > 1 else None
