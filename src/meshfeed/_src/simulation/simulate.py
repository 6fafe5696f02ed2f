"""``meshfeed.testing.simulate``: what an order and a cache cost, and which order to choose."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from meshfeed._src.agreement.windows import full_window
from meshfeed._src.base import hooks
from meshfeed._src.base.errors import SettingsError, hides_own_frames
from meshfeed._src.base.settings import FeedSettings, ShardShuffle, shard_shuffle
from meshfeed._src.base.types import JsonValue, RecordIds, RecordOrder, public
from meshfeed._src.reading.fetch_policy import default_ahead_bytes
from meshfeed._src.simulation.dataset import Rows, SimulatedData, read_manifests, uses_of_batches
from meshfeed._src.simulation.hosts import Cache, Run, SimulatedFile, Store, run_hosts_together
from meshfeed._src.simulation.quality import ShuffleQuality, shuffle_quality
from meshfeed._src.simulation.units import parse_bytes, parse_rate
from meshfeed._src.streams.random_access import RandomAccessStream

_MAX_HOSTS, _FEW_HOSTS = 8, 4  # that are simulated; the second if only a part of each epoch is
# Files of a host and epoch that no recent batch needed; the rest of the epoch is extrapolated.
_NEW_USES, _MAX_NEW_USES = 3_000, 30_000
_PROBED, _RECENT = 64, 8  # batches
_GROUPS = 512  # of batches in an epoch, at least
_ROWS_PER_HOST, _BATCHES = 64, 32  # default of global_batch_size
_BLOCK_SHARDS = 4
_STALLED = 0.02
_POINTS = 96
Shuffle = bool | int | str | ShardShuffle


@dataclasses.dataclass(frozen=True)
class HostDownloads:
    """The downloads of a host, in each epoch.

    Attributes:
      uses: files that batches need, counted once per batch.
      downloads: files downloaded.
      num_bytes: their bytes.
    """

    uses: Sequence[int]
    downloads: Sequence[int]
    num_bytes: Sequence[int]


@public("meshfeed.testing")
@dataclasses.dataclass(frozen=True)
class SimulatedOrder:
    """What one order needs. Downloads count for the epoch whose batches need the file.

    Attributes:
      shuffle: the feed's ``shuffle=``.
      num_lanes: its lanes; None for orders without lanes.
      first_batch_seconds: from the start to the first batch, with an empty cache.
      stall_seconds: per epoch, how long the loop waits for batches, without the first one.
      stall_fraction: per epoch, the share of the time that this takes, from 0 to 1.
      total_stall_fraction: the same for all epochs.
      bytes_per_epoch: per epoch, bytes that all hosts download.
      max_host_bytes: per epoch, bytes that the host with most of them downloads.
      requests: per epoch, requests of all hosts.
      cost: per epoch, the price of requests and bytes; 0 without prices.
      disk_bytes: most bytes on the disk of a host, with evicted files that are still open.
      share_bytes: most bytes of different files that a host needs in the first epoch.
      quality: how well the order shuffles.
      extrapolated: whether a part of each epoch was simulated, and the rest extrapolated.
      hosts: host → its downloads, of the hosts that were simulated.
      over_time: "stall_fraction", and "host_bytes" (bytes that a host has downloaded, on average), at equal distances.
    """

    shuffle: Shuffle
    num_lanes: int | None
    first_batch_seconds: float
    stall_seconds: Sequence[float]
    stall_fraction: Sequence[float]
    total_stall_fraction: float
    bytes_per_epoch: Sequence[int]
    max_host_bytes: Sequence[int]
    requests: Sequence[int]
    cost: Sequence[float]
    disk_bytes: int
    share_bytes: int
    quality: ShuffleQuality
    extrapolated: bool
    hosts: Mapping[int, HostDownloads] = dataclasses.field(repr=False)
    over_time: Mapping[str, Sequence[float]] = dataclasses.field(repr=False)

    @property
    def name(self) -> str:
        """The setting of the feed, such as ``shuffle="shards"``."""
        return f"shuffle={shuffle_text(self.shuffle)}"

    def to_json(self) -> dict[str, JsonValue]:
        """Returns all figures as JSON."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return found | {
            "shuffle": shuffle_text(self.shuffle),
            "quality": dataclasses.asdict(self.quality),
            "hosts": [{"host": host, **dataclasses.asdict(one)} for host, one in self.hosts.items()],
            "over_time": dict(self.over_time),
        }


@public("meshfeed.testing")
@dataclasses.dataclass(frozen=True)
class Simulation:
    """The result of :func:`simulate`.

    Attributes:
      name: what the data set is called.
      total_bytes: size of the data set, as stored.
      settings: what was simulated, as JSON.
      orders: one entry per order.
      recommended: the one to choose.
      reason: why, in one sentence.
    """

    name: str
    total_bytes: int
    settings: Mapping[str, JsonValue]
    orders: Sequence[SimulatedOrder]
    recommended: SimulatedOrder
    reason: str

    def to_json(self) -> dict[str, JsonValue]:
        """Returns all figures as JSON."""
        return {
            "name": self.name,
            "total_bytes": self.total_bytes,
            "settings": dict(self.settings),
            "orders": [order.to_json() for order in self.orders],
            "recommended": shuffle_text(self.recommended.shuffle),
            "reason": self.reason,
        }


def shuffle_text(shuffle: Shuffle) -> str:
    """Returns ``shuffle`` as it is written in a program, without the module."""
    if isinstance(shuffle, ShardShuffle):
        usual = ShardShuffle()
        changed = {name: value for name, value in vars(shuffle).items() if value != getattr(usual, name)}
        return f"ShardShuffle({', '.join(f'{name}={value!r}' for name, value in changed.items())})"
    return f'"{shuffle}"' if isinstance(shuffle, str) else repr(shuffle)


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is simulated, apart from the data set and the order.

    Attributes:
      rows: the rows of the global batch that each host reads.
      batch_size: rows of the global batch.
      cache: the cache of each host.
      store: the store.
      step_seconds: seconds per step.
      num_epochs: number of epochs.
      seed: as for the feed.
      num_lanes: as for the feed.
      prefetch: as for the feed.
      prices: price of 1,000 requests, and of 10**9 bytes.
    """

    rows: Sequence[Rows]
    batch_size: int
    cache: Cache
    store: Store
    step_seconds: float
    num_epochs: int = 2
    seed: int = 0
    num_lanes: int | None = None
    prefetch: int = 2
    prices: tuple[float, float] = (0.0, 0.0)


@public("meshfeed.testing")
@hides_own_frames
def simulate(
    source: Any,
    *,
    hosts: int,
    bandwidth: float | str,
    step_seconds: float,
    cache: int | str,
    global_batch_size: int | None = None,
    shuffle: Shuffle | None = None,
    num_lanes: int | None = None,
    weights: Sequence[float] | None = None,
    ahead_bytes: int | str | None = None,
    shared_bandwidth: float | str | None = None,
    latency_seconds: float = 0.05,
    requests_per_second: float | None = None,
    price_per_1000_requests: float = 0.0,
    price_per_gb: float = 0.0,
    num_epochs: int = 2,
    seed: int = 0,
    prefetch: int | Literal["auto"] = 2,
) -> Simulation:
    """Simulates a training loop whose hosts read remote files through a :class:`meshfeed.ShardCache` each.

    The order of the records and the policy of the cache are those of a feed; the store and its network are a model, and
    reading, decoding and transfers take no time. Of many hosts, 8 are simulated. Reads manifests, and no data.

    Args:
      source: path or URL of a manifest (``meshfeed manifest``) or a list of them; or a random-access source with a
        ``ShardCache``, of any kind, from which four records are read as by a feed.
      hosts: number of hosts, which read equal parts of each batch.
      bandwidth: bytes per second that each host can download; ``"500MB/s"``, or a number.
      step_seconds: time of a training step, in seconds.
      cache: ``max_bytes`` of each host's cache; ``"100GB"``, ``"1TiB"``, or a number.
      global_batch_size: as for the feed; by default 64 rows per host, or fewer if an epoch had less than 32 batches.
      shuffle: as for the feed; None compares orders: uniform, blocks of 4 files, ``"shards"``, and with affinity.
      num_lanes: as for the feed, for orders by shards.
      weights: with several manifests, weights of a mixture of them. By default, they are one data set.
      ahead_bytes: as for the cache.
      shared_bandwidth: bytes per second of a link that all hosts share, if there is one.
      latency_seconds: from a request to the first byte of its answer.
      requests_per_second: requests of all hosts that the store answers at most.
      price_per_1000_requests: price of 1,000 requests, in any currency.
      price_per_gb: price of 10**9 bytes that leave the store.
      num_epochs: number of epochs, at least 1.
      seed: as for the feed.
      prefetch: as for the feed.

    Returns:
      What each order needs, and the one to choose: of those that hardly wait longer than the best and download hardly more in
      the last epoch, the one that shuffles best.

    Raises:
      SettingsError: a setting is out of range, such as a cache that is smaller than a file.
      SourceError: a manifest does not exist, or has no records.
      CorruptDataError: a file is not a manifest.
    """
    return simulate_data(
        dataset_of(source, weights),
        None,
        hosts=hosts,
        bandwidth=bandwidth,
        step_seconds=step_seconds,
        cache=cache,
        global_batch_size=global_batch_size,
        shuffle=shuffle,
        num_lanes=num_lanes,
        ahead_bytes=ahead_bytes,
        shared_bandwidth=shared_bandwidth,
        latency_seconds=latency_seconds,
        requests_per_second=requests_per_second,
        price_per_1000_requests=price_per_1000_requests,
        price_per_gb=price_per_gb,
        num_epochs=num_epochs,
        seed=seed,
        prefetch=prefetch,
    )


def simulate_data(
    dataset: SimulatedData,
    rows: Sequence[Rows] | None,
    *,
    hosts: int,
    bandwidth: float | str,
    step_seconds: float,
    cache: int | str,
    global_batch_size: int | None = None,
    shuffle: Shuffle | None = None,
    num_lanes: int | None = None,
    ahead_bytes: int | str | None = None,
    shared_bandwidth: float | str | None = None,
    latency_seconds: float = 0.05,
    requests_per_second: float | None = None,
    price_per_1000_requests: float = 0.0,
    price_per_gb: float = 0.0,
    num_epochs: int = 2,
    seed: int = 0,
    prefetch: int | Literal["auto"] = 2,
) -> Simulation:
    """Does the same as :func:`simulate` for a data set; ``rows`` are those of each host, by default equal parts."""
    hosts = _count("hosts", hosts)
    if global_batch_size is None:
        of_host = min(_ROWS_PER_HOST, max(1, len(dataset.source) // (_BATCHES * hosts)))
        global_batch_size = hosts << (of_host.bit_length() - 1)
    batch_size = _count("global_batch_size", global_batch_size)
    if rows is None:
        if batch_size % hosts:
            raise SettingsError(
                f"global_batch_size={batch_size} is not divisible by hosts={hosts}. Pass a multiple of {hosts}.",
                setting="global_batch_size",
            )
        part = batch_size // hosts
        rows = [[(host * part, (host + 1) * part)] for host in range(hosts)]
    max_bytes = parse_bytes("cache", cache)
    ahead = default_ahead_bytes(max_bytes) if ahead_bytes is None else ahead_bytes
    setup = Setup(
        rows=rows,
        batch_size=batch_size,
        cache=Cache(max_bytes, 0 if ahead in (0, "0") else parse_bytes("ahead_bytes", ahead)),
        store=Store(
            parse_rate("bandwidth", bandwidth),
            math.inf if shared_bandwidth is None else parse_rate("shared_bandwidth", shared_bandwidth),
            _number("latency_seconds", latency_seconds),
            None if requests_per_second is None else _number("requests_per_second", requests_per_second, above=0),
        ),
        step_seconds=_number("step_seconds", step_seconds, above=0),
        num_epochs=_count("num_epochs", num_epochs),
        seed=seed,
        num_lanes=num_lanes,
        prefetch=2 if prefetch == "auto" else prefetch,  # with which a feed begins
        prices=(_number("price_per_1000_requests", price_per_1000_requests), _number("price_per_gb", price_per_gb)),
    )
    return compare(dataset, candidates(dataset) if shuffle is None else [shuffle], setup)


def dataset_of(source: Any, weights: Sequence[float] | None) -> SimulatedData:
    """Returns the data set of manifests, of which weights make a mixture, or of a source."""
    paths = [source] if isinstance(source, str | os.PathLike) else source
    if isinstance(paths, list | tuple) and paths and all(isinstance(path, str | os.PathLike) for path in paths):
        found = read_manifests(paths)
        name = ", ".join(manifest.path for manifest, _ in found)
        return SimulatedData.of_files([files for _, files in found], weights, name)
    if weights is not None:
        raise SettingsError(
            "weights= is for several manifests. Pass a meshfeed.sources.Mixture of sources, or manifests.",
            setting="weights",
        )
    return SimulatedData.of_source(source)


def _count(setting: str, value: object) -> int:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
        raise SettingsError(f"{setting}={value!r}. Expected an int of at least 1.", setting=setting)
    return int(value)


def _number(setting: str, value: object, above: float = -math.inf) -> float:
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not (0 <= number < math.inf and number > above):
        wanted = "a number of at least 0" if above < 0 else f"a number above {above}"
        raise SettingsError(f"{setting}={value!r}. Expected {wanted}.", setting=setting)
    return number


def candidates(dataset: SimulatedData) -> list[Shuffle]:
    """Returns the orders to compare."""
    sharded = hooks.find(dataset.source, hooks.Sharded)
    if sharded is None:
        return [True]
    lengths = sharded.shard_lengths()
    block = _BLOCK_SHARDS * max(1, int(lengths.sum()) // max(1, int(np.count_nonzero(lengths))))
    blocks: list[Shuffle] = [block] if block < int(lengths.sum()) else []
    return [True, *blocks, "shards", ShardShuffle(affinity=True)]


def compare(dataset: SimulatedData, shuffles: Sequence[Shuffle], setup: Setup) -> Simulation:
    """Simulates orders, and recommends one of them."""
    orders = [simulate_order(dataset, shuffle, setup) for shuffle in shuffles]
    total = int(sum(dataset.file_bytes()))
    recommended, reason = _recommend(orders, total)
    store = setup.store
    settings: dict[str, JsonValue] = {
        "hosts": len(setup.rows),
        "global_batch_size": setup.batch_size,
        "records": len(dataset.source),
        "files": len(dataset.file_bytes()),
        "cache": setup.cache.max_bytes,
        "ahead_bytes": setup.cache.ahead_bytes,
        "bandwidth": store.bandwidth,
        "shared_bandwidth": store.shared_bandwidth if store.shared_bandwidth < math.inf else None,
        "latency_seconds": store.latency_seconds,
        "requests_per_second": store.requests_per_second,
        "step_seconds": setup.step_seconds,
        "num_epochs": setup.num_epochs,
        "steps_per_epoch": len(dataset.source) // setup.batch_size,
        "seed": setup.seed,
        "prices": list(setup.prices),
    }
    return Simulation(dataset.name, total, settings, orders, recommended, reason)


def _recommend(orders: Sequence[SimulatedOrder], total: int) -> tuple[SimulatedOrder, str]:
    least = min(order.total_stall_fraction for order in orders)
    fast = [order for order in orders if order.total_stall_fraction <= max(_STALLED, least + _STALLED)]
    fewest = min(order.bytes_per_epoch[-1] for order in fast)
    good = [order for order in fast if order.bytes_per_epoch[-1] <= 1.1 * fewest + 0.01 * total]
    best = max(good, key=lambda order: (round(order.quality.mean_distance, 2), -sum(order.bytes_per_epoch)))
    reason = f"{best.name} {_figures(best, total)}"
    better = [order for order in orders if order.quality.mean_distance > best.quality.mean_distance + 0.005]
    if len(orders) == 1:
        return best, f"{reason}."
    if not better:
        return best, f"{reason}, and no order shuffles better."
    rival = max(better, key=lambda order: order.quality.mean_distance)
    return best, f"{reason}; {rival.name} shuffles better, but {_figures(rival, total)}."


def _figures(order: SimulatedOrder, total: int) -> str:
    sets = order.bytes_per_epoch[-1] / max(1, total)
    epoch = len(order.bytes_per_epoch)
    return (
        f"waits {order.total_stall_fraction:.1%} of the time and downloads {sets:.3g} × the data set in epoch {epoch}"
    )


@dataclasses.dataclass(frozen=True)
class _Part:
    """The groups of batches of an epoch: ``num_groups`` from ``first`` on in the run, which stand for ``whole``."""

    first: int
    num_groups: int
    whole: int

    def sum(self, values: np.ndarray) -> float:
        """Returns the sum of a figure of each group over the epoch; extrapolates from the second half."""
        mine = values[self.first : self.first + self.num_groups]
        late = mine[self.num_groups // 2 :]
        return float(mine.sum() + (self.whole - self.num_groups) * late.mean())


@dataclasses.dataclass(frozen=True)
class _Groups:
    """How many batches of each epoch are simulated, and how many of them as one.

    Attributes:
      limit: batches of each epoch.
      size: consecutive batches that need almost the same files, read together.
    """

    limit: int
    size: int


def simulate_order(dataset: SimulatedData, shuffle: Shuffle, setup: Setup) -> SimulatedOrder:
    """Simulates one order.

    Raises:
      SettingsError: an epoch has no batch, the cache is smaller than a file, or a setting does not fit the data set.
    """
    stream = _stream(dataset, shuffle, setup)
    cursor = stream.start()
    num_batches = stream.num_steps(cursor) or 0
    if num_batches < setup.num_epochs:
        raise SettingsError(
            f"an epoch of {len(dataset.source):,} records has no batch of {setup.batch_size}. Pass a smaller "
            "global_batch_size.",
            setting="global_batch_size",
        )
    order = cursor.order
    ends = [num_batches * epoch // setup.num_epochs for epoch in range(setup.num_epochs + 1)]
    reading = [host for host, rows in enumerate(setup.rows) if rows]
    groups = _groups(dataset, order, setup, reading[0], ends[1])
    extrapolated = groups.limit < ends[1]
    chosen = _spread(reading, _FEW_HOSTS if extrapolated else _MAX_HOSTS)
    parts, starts, sizes = _parts(ends, groups)
    batches = np.concatenate([np.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)])
    of_batches = [uses_of_batches(dataset, order, setup.rows[host], batches * setup.batch_size) for host in chosen]
    file_bytes = dataset.file_bytes()
    _check_cache(file_bytes, setup.cache)
    numbers = [_together(of_host, sizes) for of_host in of_batches]
    files = [SimulatedFile(number, num_bytes, setup.cache) for number, num_bytes in enumerate(file_bytes)]
    num_hosts = len(reading)  # the participants of a feed: hosts without rows neither download nor agree on windows
    run = run_hosts_together(
        [[[files[number] for number in group] for group in of_host] for of_host in numbers],
        setup.cache,
        setup.store,
        seconds=(sizes * setup.step_seconds).tolist(),
        num_hosts=num_hosts,
        prefetch=-(-setup.prefetch // groups.size),
        window=-(-full_window(num_hosts, 1, 1 << 62) // groups.size),
    )
    share = max(sum(file_bytes[n] for n in set().union(*of_host[: parts[0].num_groups])) for of_host in numbers)
    num_uses = [np.add.reduceat([batch.size for batch in of_host], np.cumsum(sizes) - sizes) for of_host in of_batches]
    lanes = order.config().get("num_lanes")
    return SimulatedOrder(
        shuffle=shuffle,
        num_lanes=lanes if isinstance(lanes, int) else None,
        share_bytes=int(sum(file_bytes)) if extrapolated else share,
        quality=shuffle_quality(dataset, order, ends[1] * setup.batch_size, setup.batch_size),
        extrapolated=extrapolated,
        hosts=dict(zip(chosen, _hosts_of(run, num_uses, parts), strict=True)),
        over_time=_over_time(run, parts, sizes, setup.step_seconds),
        **_figures_of(run, parts, np.diff(ends) * setup.step_seconds, len(reading), setup),
    )


def _parts(ends: Sequence[int], groups: _Groups) -> tuple[list[_Part], RecordIds, RecordIds]:
    """Returns the simulated part of each epoch, and the first batch and the number of batches of each group."""
    parts: list[_Part] = []
    starts: list[int] = []
    sizes: list[int] = []
    for start, stop in itertools.pairwise(ends):
        first = len(starts)
        # Epochs may differ by a batch; the limit is the length of the first one if all of it is simulated.
        last = stop if groups.limit >= ends[1] else min(stop, start + groups.limit)
        while start < last:
            # The first batches wait for an empty cache: one by one, and then more and more of them.
            size = min(groups.size, last - start, max(1, start // 4))
            starts.append(start)
            sizes.append(size)
            start += size
        whole = len(starts) - first if last == stop else stop - ends[len(parts)]
        parts.append(_Part(first, len(starts) - first, whole))
    return parts, np.array(starts, np.int64), np.array(sizes, np.int64)


def _together(batches: Sequence[RecordIds], sizes: RecordIds) -> list[list[int]]:
    """Returns the files of each group of batches."""
    found: list[list[int]] = []
    start = 0
    for size in sizes.tolist():
        group = batches[start : start + size]
        found.append((group[0] if size == 1 else np.unique(np.concatenate(group))).tolist())
        start += size
    return found


def _stream(dataset: SimulatedData, shuffle: Shuffle, setup: Setup) -> RandomAccessStream:
    settings = FeedSettings(
        global_batch_size=setup.batch_size,
        shuffle=shuffle,
        seed=setup.seed,
        num_epochs=setup.num_epochs,
        num_lanes=setup.num_lanes if shard_shuffle(shuffle) is not None else None,
        prefetch=setup.prefetch,
    )
    return RandomAccessStream(dataset.source, settings)


def _spread(values: Sequence[int], number: int) -> list[int]:
    return [values[i] for i in np.unique(np.linspace(0, len(values) - 1, number).astype(int)).tolist()]


def _groups(dataset: SimulatedData, order: RecordOrder, setup: Setup, host: int, num_batches: int) -> _Groups:
    """Chooses what to simulate: a part of the epoch if every batch needs other files, groups if they need the same."""
    probed = uses_of_batches(
        dataset, order, setup.rows[host], np.arange(min(_PROBED, num_batches), dtype=np.int64) * setup.batch_size
    )
    recent = [np.concatenate(probed[max(0, number - _RECENT) : number]) for number in range(1, len(probed))]
    new = sum(np.setdiff1d(now, before).size for before, now in zip(recent, probed[1:], strict=True))
    per_batch = new / max(1, len(recent))
    file_bytes = dataset.file_bytes()
    mean_bytes = max(1, sum(file_bytes) // len(file_bytes))
    wanted = min(_MAX_NEW_USES, max(_NEW_USES, 4 * setup.cache.max_bytes // mean_bytes))
    if per_batch * num_batches > wanted:
        return _Groups(min(num_batches, max(_PROBED, int(wanted / per_batch))), 1)
    files = sum(batch.size for batch in probed) / len(probed)
    alike = int(max(1.0, files / 4) / per_batch) if per_batch else num_batches
    return _Groups(num_batches, max(1, min(alike, num_batches // _GROUPS)))


def _check_cache(file_bytes: Sequence[int], cache: Cache) -> None:
    largest = max(file_bytes)
    if largest > cache.max_bytes:
        raise SettingsError(
            f"cache={cache.max_bytes:,} bytes is smaller than a file, the largest of which has {largest:,}. Pass at least a "
            "few times that size.",
            setting="cache",
        )


def _figures_of(run: Run, parts: Sequence[_Part], worked: np.ndarray, num_hosts: int, setup: Setup) -> dict[str, Any]:
    waits = run.waits.copy()
    waits[0] = 0.0
    stalls = [part.sum(waits) for part in parts]
    times = num_hosts / len(run.hosts)
    of_hosts = [[part.sum(host.bytes_of_batch) for host in run.hosts] for part in parts]
    requests = [times * sum(part.sum(host.requests_of_batch) for host in run.hosts) for part in parts]
    downloaded = [times * sum(each) for each in of_hosts]
    per_thousand, per_gb = setup.prices
    return {
        "first_batch_seconds": float(run.waits[0]),
        "stall_seconds": stalls,
        "stall_fraction": [stall / (stall + work) for stall, work in zip(stalls, worked.tolist(), strict=True)],
        "total_stall_fraction": sum(stalls) / (sum(stalls) + float(worked.sum())),
        "bytes_per_epoch": [round(value) for value in downloaded],
        "max_host_bytes": [round(max(each)) for each in of_hosts],
        "requests": [round(value) for value in requests],
        "cost": [
            number / 1000 * per_thousand + num_bytes / 1e9 * per_gb
            for number, num_bytes in zip(requests, downloaded, strict=True)
        ],
        "disk_bytes": max(host.disk_bytes for host in run.hosts),
    }


def _hosts_of(run: Run, num_uses: Sequence[np.ndarray], parts: Sequence[_Part]) -> Iterator[HostDownloads]:
    for host, uses in zip(run.hosts, num_uses, strict=True):
        figures = (uses, host.downloads_of_batch, host.bytes_of_batch)
        yield HostDownloads(*([round(part.sum(figure)) for part in parts] for figure in figures))


def _over_time(run: Run, parts: Sequence[_Part], sizes: RecordIds, step_seconds: float) -> dict[str, list[float]]:
    waits = run.waits.copy()
    waits[0] = 0.0
    ends = np.cumsum(sizes)  # batches up to the end of each group
    edges = np.unique(np.searchsorted(ends, np.linspace(0, ends[-1], _POINTS + 1)[:-1], side="right"))
    stalled = np.add.reduceat(waits, edges)
    worked = np.add.reduceat(sizes * step_seconds, edges)
    arrived = np.sum([host.bytes_of_batch for host in run.hosts], axis=0) / len(run.hosts)
    for part in parts:  # the simulated part of an epoch stands for the whole
        mine = arrived[part.first : part.first + part.num_groups]
        mine *= part.sum(arrived) / max(mine.sum(), 1.0)
    downloaded = np.cumsum(arrived)
    last = np.append(edges[1:], waits.size) - 1
    return {"stall_fraction": (stalled / (stalled + worked)).tolist(), "host_bytes": downloaded[last].tolist()}
