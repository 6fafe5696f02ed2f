"""Hosts that read batches through caches and step together: which files they download, and how long steps wait.

Discrete events, with the policy of the real cache (``reading/fetch_policy.py``) and a model of the rest:

* A reader takes the files of one batch at a time, a few batches ahead of the loop, as ``feed/pipeline.py`` does; several
  hosts agree on windows of steps (``agreement/windows.py``), and a step starts when the slowest of them has its batch.
* A file is downloaded in blocks of about half a second, the nearest file first, as by ``sources/files/download.py``; one more
  request compares its version. A request starts after the store's latency, and the requests under way share the link.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from meshfeed._src.agreement.windows import full_window, window_ends
from meshfeed._src.reading.fetch_policy import FetchPlan, eviction_order, open_bytes, plan_bytes
from meshfeed._src.sources.files.download import FIRST_BLOCK_BYTES, adapted_block
from meshfeed._src.sources.files.locks import MAX_POLL_SECONDS, POLL_SECONDS, poll_pauses

_SCANNED_AT_ONCE = 1 << 30  # batches
_MAX_BLOCKS = 4  # of a file that are simulated one by one


@dataclasses.dataclass(frozen=True)
class Store:
    """How fast a store answers.

    Attributes:
      bandwidth: bytes per second that each host receives at most.
      shared_bandwidth: bytes per second that all hosts receive together at most.
      latency_seconds: from a request to the first byte of its answer.
      requests_per_second: requests of all hosts together that the store answers; None for any number.
    """

    bandwidth: float
    shared_bandwidth: float = math.inf
    latency_seconds: float = 0.0
    requests_per_second: float | None = None


@dataclasses.dataclass(frozen=True)
class Cache:
    """Sizes of a host's cache, in bytes; see ``ShardCache``."""

    max_bytes: int
    ahead_bytes: int


class SimulatedFile:
    """A file, as ``PlannedFile``."""

    __slots__ = ("ahead_bytes", "num_bytes", "number", "plan_bytes")

    def __init__(self, number: int, num_bytes: int, cache: Cache) -> None:
        self.number, self.num_bytes = number, num_bytes
        self.ahead_bytes = cache.ahead_bytes
        self.plan_bytes = plan_bytes(cache.ahead_bytes, cache.max_bytes)


Uses = Sequence[Sequence[SimulatedFile]]
"""The files that each batch of a host needs."""


class _Download:
    """A file on its way, and the thread that waits for it."""

    __slots__ = ("batch", "file", "in_flight", "is_ahead", "is_waiting", "on_demand", "probing", "requested")

    def __init__(self, file: SimulatedFile, batch: int, *, on_demand: bool) -> None:
        self.file, self.batch, self.on_demand, self.is_ahead = file, batch, on_demand, not on_demand
        self.requested = self.in_flight = 0
        self.probing = self.is_waiting = False

    @property
    def has_blocks(self) -> bool:
        return not self.probing and self.requested < self.file.num_bytes

    @property
    def done(self) -> bool:
        return not self.in_flight and not self.has_blocks


class SimulatedHost:
    """One host: a reader, a cache and the requests under way.

    Args:
      uses: the files that each batch needs.
      cache: its sizes.
      store: the store.
      seconds_per_request: shortest time between two requests of this host.

    Attributes:
      bytes_of_batch: float64[batches], bytes downloaded for files that are needed next in a batch.
      downloads_of_batch: int64[batches], their number.
      requests_of_batch: int64[batches], the requests that they took.
      disk_bytes: most bytes that the cache, downloads under way and evicted files that are still open took.
      num_read: batches that are read.
      limit: how many batches the reader may have read, at most.
    """

    def __init__(self, uses: Uses, cache: Cache, store: Store, seconds_per_request: float = 0.0) -> None:
        self._uses, self._cache, self._store = uses, cache, store
        self._plan = FetchPlan(iter(uses)) if cache.ahead_bytes else None
        self._copies: dict[SimulatedFile, float] = {}  # complete files → last use
        self._held = self._open_bytes = 0
        self._open: dict[SimulatedFile, None] = {}  # the oldest first
        self._downloads: list[_Download] = []
        self._numbers = itertools.count()
        self._timers: list[tuple[float, int, Callable[[float], None]]] = []
        self._transfers: list[tuple[float, int, _Download, _Download, tuple[int, int], float]] = []
        self._virtual = self._now = (
            0.0  # bytes that a connection open since the start would have received, and until when
        )
        self._block_bytes, self._with_ranges = FIRST_BLOCK_BYTES, False
        self._request_at, self._seconds_per_request = 0.0, seconds_per_request
        self._waiting: set[SimulatedFile] | None = None
        self._without_room: list[SimulatedFile] = []  # files that a read waits for, and that wait for others to arrive
        self._since = 0.0
        self.bytes_of_batch = np.zeros(len(uses))
        self.downloads_of_batch = np.zeros(len(uses), np.int64)
        self.requests_of_batch = np.zeros(len(uses), np.int64)
        self.disk_bytes = self.num_read = self.limit = 0

    # ------------------------------------------------------------------ time

    @property
    def is_receiving(self) -> bool:
        """Whether an answer of the store is on its way."""
        return bool(self._transfers)

    def next_event(self, now: float, rate: float) -> float:
        """Returns when something happens next, if ``rate`` bytes per second arrive until then."""
        at = self._timers[0][0] if self._timers else math.inf
        if self._transfers:
            left = max(0.0, self._transfers[0][0] - self._virtual)
            at = min(at, now + left * len(self._transfers) / rate)
        return at

    def receive(self, now: float, rate: float) -> None:
        """Lets ``rate`` bytes per second arrive until ``now``."""
        if self._transfers:
            self._virtual += (now - self._now) * rate / len(self._transfers)
        self._now = now

    def happen(self, now: float, rate: float) -> None:
        """Does what is due."""
        rounding = 1.0 + max(1e-9, 1e-15 * now) * rate  # bytes; a shorter time than that added to "now" is lost
        while self._transfers and self._transfers[0][0] <= self._virtual + rounding:
            _, _, own, download, (size, number), began = heapq.heappop(self._transfers)
            # As if this were one of the requests that it consists of.
            seconds = self._store.latency_seconds + (now - began) / number
            self._arrive(own, download, size // number, seconds, now)
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2](now)

    def _at(self, when: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self._timers, (when, next(self._numbers), what))

    # ------------------------------------------------------------------ the reader

    def read(self, now: float) -> None:
        """Reads batches up to ``limit``, until one has to wait for a file."""
        while self.num_read < self.limit:
            if self._waiting is None:
                self._begin(now)
            if self._waiting:
                return
            self._waiting = None
            self.num_read += 1

    def _begin(self, now: float) -> None:
        batch, plan = self.num_read, self._plan
        files = self._uses[batch]
        self._waiting, self._since = {file for file in files if not self._opens(file, now)}, now
        if plan is not None and batch:  # the first batch is read before anything is fetched ahead
            plan.reached = batch
            for _ in plan.scan(_SCANNED_AT_ONCE):
                pass
        if self._waiting:
            under_way = {download.file for download in self._downloads}
            self._demand([file for file in files if file in self._waiting and file not in under_way], now)
        if batch:
            self._fetch_ahead(now)

    def _opens(self, file: SimulatedFile, now: float) -> bool:
        """Opens a file if it is cached; returns whether it is open."""
        if file in self._open:
            return True
        if file not in self._copies:
            return False
        self._copies[file] = now
        self._open[file] = None
        self._open_bytes += file.num_bytes
        limit = open_bytes(self._cache.max_bytes)
        for oldest in list(self._open):
            if self._open_bytes <= limit or oldest is file:
                break
            del self._open[oldest]
            self._open_bytes -= oldest.num_bytes
        return True

    def _demand(self, files: Sequence[SimulatedFile], now: float) -> None:
        too_large = math.inf
        for file in files:
            # A file without room has evicted all copies, so that none of its size has any now.
            if file.num_bytes >= too_large:
                self._without_room.append(file)
            elif self._reserve(file, None):
                self._start(file, now, on_demand=True)
            else:
                too_large = file.num_bytes
                self._without_room.append(file)

    # ------------------------------------------------------------------ the cache

    def _next_use(self, file: SimulatedFile) -> float:
        return math.inf if self._plan is None else self._plan.next_use(file)

    def _fetch_ahead(self, now: float) -> None:
        plan = self._plan
        if plan is None or not plan.reached:
            return
        for file in plan.to_fetch(lambda file: self._is_here(file, now), now):
            under_way = [download for download in self._downloads if download.file is file]
            if under_way:  # on demand
                under_way[0].is_ahead = True
            elif self._reserve(file, plan.next_use(file)):
                self._start(file, now, on_demand=False)
            else:
                plan.no_room(file, plan.reached, now)

    def _is_here(self, file: SimulatedFile, now: float) -> bool:
        if file not in self._copies:
            return False
        self._copies[file] = now
        return True

    def _reserve(self, file: SimulatedFile, next_use: float | None) -> bool:
        excess = self._held + file.num_bytes - self._cache.max_bytes
        if excess > 0:
            copies = [(self._next_use(copy), used, copy.num_bytes, copy) for copy, used in self._copies.items()]
            for size, copy in eviction_order(copies, next_use):
                if excess <= 0:
                    break
                del self._copies[copy]
                self._held -= size
                excess -= size
            if excess > 0:
                return False
        self._held += file.num_bytes
        evicted = sum(opened.num_bytes for opened in self._open if opened not in self._copies)
        self.disk_bytes = max(self.disk_bytes, self._held + evicted)
        return True

    def _start(self, file: SimulatedFile, now: float, *, on_demand: bool) -> None:
        batch = self.num_read
        if self._plan is not None and not on_demand:
            batch = self._plan.reached + int(self._plan.next_use(file))
        download = _Download(file, batch, on_demand=on_demand)
        self.bytes_of_batch[batch] += file.num_bytes
        self.downloads_of_batch[batch] += 1
        self._downloads.append(download)
        self._work(download, now)

    def _complete(self, download: _Download, now: float) -> None:
        file = download.file
        self._downloads.remove(download)
        self._copies[file] = now
        if self._plan is not None and download.is_ahead:
            self._plan.fetched(file)
        if download.on_demand:
            self._notice(file, now)
        elif self._waiting and file in self._waiting:
            at, pauses = self._since, poll_pauses()
            while at < now:  # a read looks now and then whether another thread has fetched the file
                pause = next(pauses)
                times = (now - at) // pause if pause == MAX_POLL_SECONDS else 1  # of a slow link, millions
                at += pause * max(1, times)
            self._at(at, lambda later: self._notice(file, later))
        if self._without_room:
            self._at(now + POLL_SECONDS / 2, self._retry)  # on average: each looks for room now and then
        self._fetch_ahead(now)

    def _retry(self, now: float) -> None:
        files, self._without_room = self._without_room, []
        self._demand(files, now)

    def _notice(self, file: SimulatedFile, now: float) -> None:
        """Lets the read that waits for a file continue."""
        if not self._waiting or file not in self._waiting:
            return
        if self._opens(file, now):
            self._waiting.discard(file)
        elif not any(download.file is file for download in self._downloads):  # evicted meanwhile
            self._demand([file], now)

    # ------------------------------------------------------------------ downloads

    def _priority(self, download: _Download) -> float:
        return -1.0 if download.on_demand else self._next_use(download.file)

    def _work(self, own: _Download, now: float) -> None:
        """Gives a free thread a block of the nearest file, unless its own file is complete."""
        own.is_waiting = False
        if own.done:
            self._request(own, now, lambda later: self._complete(own, later))  # compares the version
            return
        latest = self._priority(own)
        ready = [
            (self._priority(download), download is not own, number)
            for number, download in enumerate(self._downloads)
            if download.has_blocks
        ]
        priority, _, number = min(ready, default=(math.inf, True, -1))
        if number < 0 or priority > latest:
            own.is_waiting = True
            return
        download = self._downloads[number]
        # Many small blocks are simulated together: what matters is which file they belong to.
        wanted = max(self._block_bytes, download.file.num_bytes // _MAX_BLOCKS)
        size = min(wanted, download.file.num_bytes - download.requested)
        num_requests = -(-size // self._block_bytes)
        download.requested += size
        download.in_flight += 1
        download.probing = size < download.file.num_bytes and not self._with_ranges

        def begin(later: float) -> None:
            transfer = (self._virtual + size, next(self._numbers), own, download, (size, num_requests), later)
            heapq.heappush(self._transfers, transfer)

        self._request(download, now, begin, num_requests)

    def _request(self, download: _Download, now: float, answered: Callable[[float], None], number: int = 1) -> None:
        self.requests_of_batch[download.batch] += number
        start = max(now, self._request_at)
        self._request_at = start + number * self._seconds_per_request
        self._at(start + number * self._store.latency_seconds, answered)

    def _arrive(self, own: _Download, download: _Download, size: int, seconds: float, now: float) -> None:
        self._with_ranges = self._with_ranges or download.probing
        download.probing = False
        download.in_flight -= 1
        self._block_bytes = adapted_block(self._block_bytes, size, seconds)
        if download is not own and download.is_waiting and (download.done or download.has_blocks):
            self._work(download, now)
        self._work(own, now)


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run of the loop showed.

    Attributes:
      waits: float64[batches], the seconds that the loop waited for each batch.
      hosts: the hosts, at the end.
    """

    waits: np.ndarray
    hosts: Sequence[SimulatedHost]


def run_hosts_together(
    uses: Sequence[Uses],
    cache: Cache,
    store: Store,
    *,
    seconds: Sequence[float],
    num_hosts: int | None = None,
    prefetch: int = 2,
    window: int | None = None,
) -> Run:
    """Simulates a training loop on several hosts, of which one step starts when all of them have its batch.

    Args:
      uses: for each simulated host, the files that each batch needs.
      cache: the cache of each host.
      store: the store.
      seconds: how long the loop works on each batch.
      num_hosts: number of hosts of the job, of which those simulated are a sample; by default, there are no others.
      prefetch: batches kept ready on the device.
      window: batches on which hosts agree at once; by default, as a feed does.
    """
    num_hosts = num_hosts or len(uses)
    per_second = store.requests_per_second
    hosts = [SimulatedHost(one, cache, store, num_hosts / per_second if per_second else 0.0) for one in uses]
    loop = _Loop(hosts, store, num_hosts, seconds)
    loop.run(prefetch, 0 if num_hosts == 1 else window or full_window(num_hosts, 1, 1 << 62))
    return Run(loop.waits, hosts)


class _Loop:
    """The loop on all hosts.

    Attributes:
      waits: float64[batches], the seconds that it waited for each batch.
    """

    def __init__(self, hosts: Sequence[SimulatedHost], store: Store, num_hosts: int, seconds: Sequence[float]) -> None:
        self._hosts, self._store, self._seconds = hosts, store, seconds
        self._represented = num_hosts / len(hosts)
        self._num_batches = len(seconds)
        self._now = self._free_at = 0.0
        self._rate = store.bandwidth
        self._due = [0.0] * len(hosts)  # when something happens next on each host
        self._touched: Collection[int] = range(len(hosts))  # hosts that may have batches to read
        self._announced = self._num_delivered = 0
        self._asked = False
        self.waits = np.zeros(self._num_batches)

    def run(self, prefetch: int, window: int) -> None:
        """Delivers all batches; ``window`` is 0 for a job of one host, which agrees with no other."""
        ends = window_ends(0, lambda: window)
        self._end = next(ends)  # of the window that hosts read
        while True:
            self._agree(window, ends)
            self._deliver()
            if self._num_delivered == self._num_batches:
                return
            limit = self._num_delivered + (prefetch or int(self._asked))
            if window:
                limit = min(limit, self._announced) + 2 * (window if self._announced else 1) + 1
            self._read(min(limit, self._num_batches))
            self._agree(window, ends)
            if self._free_at > self._now or not self._is_deliverable:
                self._share_link()
                self._pass_time()

    def _agree(self, window: int, ends: Iterator[int]) -> None:
        """Finds how many batches all hosts can deliver."""
        read = min(host.num_read for host in self._hosts)
        if not window:
            self._announced = read
            return
        while self._announced < self._num_batches and read >= min(self._end, self._num_batches):
            self._announced, self._end = min(self._end, self._num_batches), next(ends)

    @property
    def _is_deliverable(self) -> bool:
        return self._announced > self._num_delivered

    def _deliver(self) -> None:
        while self._now >= self._free_at and self._num_delivered < self._num_batches:
            self._asked = True
            if not self._is_deliverable:
                return
            self.waits[self._num_delivered] = self._now - self._free_at
            self._asked, self._free_at = False, self._now + self._seconds[self._num_delivered]
            self._num_delivered += 1

    def _read(self, limit: int) -> None:
        for number, host in enumerate(self._hosts):
            if number in self._touched or host.limit < limit:
                host.receive(self._now, self._rate)
                host.limit = limit
                host.read(self._now)
                self._due[number] = host.next_event(self._now, self._rate)
        self._touched = ()

    def _share_link(self) -> None:
        if self._store.shared_bandwidth == math.inf:
            return
        receiving = sum(host.is_receiving for host in self._hosts) * self._represented
        rate = min(self._store.bandwidth, self._store.shared_bandwidth / max(1.0, receiving))
        if rate != self._rate:
            for number, host in enumerate(self._hosts):
                host.receive(self._now, self._rate)
                self._due[number] = host.next_event(self._now, rate)
            self._rate = rate

    def _pass_time(self) -> None:
        then = min(self._due)
        if self._free_at > self._now:
            then = min(then, self._free_at)
        assert then < math.inf, "a host waits for nothing"
        self._now = then
        self._touched = [number for number, at in enumerate(self._due) if at <= then]
        for number in self._touched:
            self._hosts[number].receive(then, self._rate)
            self._hosts[number].happen(then, self._rate)
