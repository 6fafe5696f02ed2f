"""Configurations drawn over all settings of a feed together, and what the reference model says of each.

A configuration is a flat dict of settings, each with a few values (`OPTIONS`); `valid` tells which go together. `Case`
turns it into a source, the feed's keywords, a script of actions in phases (each phase a new feed, perhaps on another
topology) and the events that every host must see.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import pathlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import reference
from reference import Batch, HostLists, Lanes, Mixed, Plain, RandomAccess, Record, Shards, Steps, shares

Config = dict[str, Any]

RANDOM = (
    *("memory", "records", "records_batch", "map", "map_rng", "padded", "packed", "grain_map", "tokens", "parquet"),
    *(
        "array_record",
        "map_array_record",
        "mixture",
        "mixture_staged",
        "mixture_nested",
        "mixture_take",
        "mixture_stop",
    ),
)
TOKENS = ("tokens", "packed")
FILES = ("array_record", "map_array_record", "tokens", "parquet")
MIXTURES = ("mixture", "mixture_staged", "mixture_nested", "mixture_take", "mixture_stop")
STREAMS = ("stream", "stream_state", "stream_uneven", "stream_map", "stream_mixture", "shuffle_buffer", "grain_iter")
FAULTY = (
    "records",
    "records_batch",
    "map",
    "map_rng",
    *MIXTURES,
    "stream",
    "stream_state",
    "stream_uneven",
    "stream_map",
)

OPTIONS: dict[str, list[Any]] = {
    "source": [*RANDOM, *STREAMS, "host_batches"],
    "records": [0, 1, 5, 13, 40],
    "shuffle": [False, True, 4, "shards"],
    "num_lanes": [None, 1, 2, 4],
    "batch": ["unit", "double", "schedule"],
    "num_epochs": [1, 2, None],
    "end": ["drop", "pad"],
    "mask": [False, True],
    "load": ["sharded", "once", "first", "last two"],
    "prefetch": [0, 1, 4],
    "num_threads": [None, 3],
    "num_workers": [0, 2],
    "check_replicas": [False, True],
    "fault": ["none", "transient", "bad", "fatal"],
    "hosts": [1, 2, 3, 4, 5, 7],
    "devices": [1, 2],
    "layout": ["rows", "permuted", "data", "minor", "columns", "both", "replicated", "prefix"],
    "outside": [0, 1],
    "script": ["run", "resume", "reset", "past", "future", "after end", "resume end", "twice"],
    "taken": [0, 1, 3],
    "resume_hosts": [1, 2, 3, 4],
    "resume_layout": ["rows", "data", "columns"],
    "resume_load": ["sharded", "once", "first"],
    "resume_batch": ["same", "other"],
    "resume_prefetch": [0, 2],
}
DEFAULTS: Config = {
    **{name: values[0] for name, values in OPTIONS.items()},
    "source": "records",
    "records": 13,
    "hosts": 1,
    "layout": "rows",
}
SIMULATED = {**OPTIONS, "num_workers": [0]}
REAL_HOSTS = 4
REAL = {**OPTIONS, "hosts": [1, 2, 3, 4], "devices": [2], "outside": [0]}  # hosts beyond `hosts` are outside
RESUMING = ("resume", "future", "resume end", "twice")


class Fatal(RuntimeError):
    """What a source raises that no retry mends."""


def is_random(source: str) -> bool:
    return source in RANDOM


def valid(config: Config) -> bool:  # noqa: C901  a table of rules
    """Whether the settings go together, as far as they are given. What is forbidden here raises, which other tests show."""
    get = config.get
    if get("mask") and get("end") == "drop":
        return False
    if "source" not in config:  # nearly every rule is about the source, so what no source allows is noticed early
        return any(valid({**config, "source": source}) for source in OPTIONS["source"])
    source = get("source")
    if source is not None:
        if source in STREAMS and get("shuffle", False) is not False:
            return False
        in_lanes = get("shuffle", "shards") == "shards" and source in FILES
        if is_random(source) and get("num_lanes") is not None and not in_lanes:
            return False
        if get("shuffle") == "shards" and source not in FILES:
            return False
        if get("fault", "none") != "none" and source not in FAULTY:
            return False
        if get("fault") == "bad" and not is_random(source):
            return False
        if source in TOKENS and "prefix" in (get("layout"), get("resume_layout")):
            return False
        if source == "mixture_stop" and get("num_epochs", 1) is None:
            return False
        if source == "host_batches" and not _valid_host_batches(config):
            return False
        if source == "packed" and get("shuffle", False) is not False:
            return False
        if source in MIXTURES and get("records") == 0:
            return False
    return True


def _valid_host_batches(config: Config) -> bool:
    get = config.get
    plain = {"shuffle": False, "num_lanes": None, "load": "sharded", "num_workers": 0, "outside": 0, "num_epochs": 1}
    if any(type(get(name, value)) is not type(value) or get(name, value) != value for name, value in plain.items()):
        return False
    return get("batch", "unit") != "schedule" and get("layout", "rows") in ("rows", "permuted")


# ---------------------------------------------------------------------- topologies


@dataclasses.dataclass(frozen=True)
class Topology:
    """Which hosts are in the mesh, and how rows and columns lie on it."""

    processes: int
    hosts: int
    devices: int
    layout: str

    @property
    def grid(self) -> np.ndarray:
        """Numbers of the devices (``host * devices + k``), in the shape of the mesh."""
        count = self.hosts * self.devices
        numbers = np.arange(count)
        if self.layout == "permuted":
            random.Random(count).shuffle(numbers)  # type: ignore[arg-type]
        if self.layout in ("rows", "permuted"):
            return numbers
        model = 2 if count % 2 == 0 else 1
        return numbers.reshape(count // model, model)

    @property
    def axes(self) -> tuple[str, ...]:
        return ("data", "model")[: self.grid.ndim]

    def spec(self, leaf: str) -> tuple[Any, ...]:
        """The partition of a leaf."""
        return {
            "rows": ("data",),
            "permuted": ("data",),
            "data": ("data",),
            "minor": ("model",),
            "columns": ("data", "model"),
            "both": (("model", "data"),),
            "replicated": (),
            "prefix": ("data", "model") if leaf in ("x", "mask_of") else ("data",),
        }[self.layout]

    @property
    def row_axes(self) -> tuple[str, ...]:
        spec = self.spec("id")
        first = spec[0] if spec else ()
        return first if isinstance(first, tuple) else (first,)

    @property
    def row_shards(self) -> int:
        sizes = dict(zip(self.axes, self.grid.shape, strict=True))
        return math.prod(sizes[axis] for axis in self.row_axes)

    def host_of(self, device: int) -> int:
        return device // self.devices

    def readers(self, load: str) -> tuple[int, ...]:
        """The hosts of ``load=[...]``."""
        return (0,) if load == "first" else tuple(range(self.hosts))[-2:]

    def rows_of(self, host: int, size: int, load: str) -> list[int]:
        """The rows that a host reads. A host outside of the mesh reads none."""
        rows: set[int] = set()
        if load == "sharded":
            sizes = dict(zip(self.axes, self.grid.shape, strict=True))
            each = size // self.row_shards
            for place in np.ndindex(*self.grid.shape):
                if self.host_of(int(self.grid[place])) == host:
                    at = dict(zip(self.axes, place, strict=True))
                    shard = functools.reduce(lambda total, axis: total * sizes[axis] + at[axis], self.row_axes, 0)
                    rows.update(range(shard * each, (shard + 1) * each))
            return sorted(rows)
        for rank, device in enumerate(self.reading_devices(load)):
            if self.host_of(device) == host:
                rows.update(self.chunk(rank, size, load))
        return sorted(rows)

    def reading_devices(self, load: str) -> list[int]:
        """The devices whose hosts read with ``load="once"`` or a list, in the order of their rows."""
        hosts = range(self.hosts) if load == "once" else self.readers(load)
        return [int(device) for device in self.grid.flat if self.host_of(int(device)) in hosts]

    def chunk(self, rank: int, size: int, load: str) -> range:
        each = -(-size // len(self.reading_devices(load)))
        return range(min(size, rank * each), min(size, (rank + 1) * each))


# ---------------------------------------------------------------------- values


def plain_record(number: int, component: int = 0) -> Record:
    """Record ``number``; no row of it is zero, so padding is not mistaken for it."""
    first = component * 1000 + number + 1
    return {"id": np.int32(first), "x": np.float32(first) / 4 + np.arange(4, dtype=np.float32)}


def mapped(record: Record) -> Record:
    return {"id": np.int32(record["id"] * 3), "x": -record["x"]}


def kept(record: Record) -> Record | None:
    return None if int(record["id"]) % 3 == 0 else mapped(record)


def with_noise(records: list[Record], rng: list[np.random.Generator]) -> dict[str, np.ndarray]:
    return {
        "id": np.stack([record["id"] for record in records]),
        "x": np.stack([record["x"] + one.random(4, np.float32) for record, one in zip(records, rng, strict=True)]),
    }


def padded_record(number: int) -> Record:
    length = number % 5
    x = np.zeros(6, np.float32)
    x[:length] = number + 1
    return {"id": np.int32(number + 1), "x": x, "mask_of": np.arange(6) < length}


@functools.cache
def packed(count: int) -> list[Record]:
    """Documents end to end, cut every 4 tokens: tokens, numbers of the pieces in a sequence, and places in the pieces."""
    line = [(number, token) for number in range(count) for token in Documents(count)[number]["tokens"]]
    sequences = []
    for start in range(0, len(line), 4):
        piece, place, before = 0, 0, None
        record = {name: np.zeros(4, np.int32) for name in ("tokens", "segment_ids", "positions")}
        for column, (document, token) in enumerate(line[start : start + 4]):
            piece, place = (piece, place + 1) if document == before else (piece + 1, 0)
            before = document
            for name, value in (("tokens", token), ("segment_ids", piece), ("positions", place)):
                record[name][column] = value
        sequences.append(record)
    return sequences


def in_windows(records: list[Record], size: int, key: tuple[int, ...]) -> list[Record]:
    """Records shuffled within windows: in the order of as many raw numbers of Philox, by (seed, epoch, lane, window)."""
    found: list[Record] = []
    for window, start in enumerate(range(0, len(records), size)):
        part = records[start : start + size]
        raw = np.random.Philox(np.random.SeedSequence([*key, window])).random_raw(len(part))
        found += [part[i] for i in sorted(range(len(part)), key=lambda i, raw=raw: raw[i])]
    return found


def decoded(data: bytes) -> Record:
    return plain_record(int(data))


class Faults:
    """What a source does wrong on this host."""

    def __init__(self, kind: str = "none", fatal: Any = None) -> None:
        self.kind, self.fatal = kind, fatal
        self.armed = False  # a fatal fault waits for the first batch: constructors read records to identify the source
        self._seen: set[Any] = set()

    def strike(self, token: Any) -> None:
        """Called before record ``token`` is read."""
        if self.armed and token == self.fatal:
            raise Fatal(f"record {token} is gone")
        number = token if isinstance(token, int) else sum(token)
        if self.kind == "transient" and number % 3 == 1 and token not in self._seen:
            self._seen.add(token)
            raise OSError("a passing fault")
        if self.kind == "bad" and is_bad(number):
            raise ValueError("a bad record")


def is_bad(record_id: int) -> bool:
    return record_id % 5 == 2


class Records:
    """Random access, one record at a time."""

    def __init__(self, count: int, component: int = 0, faults: Faults | None = None) -> None:
        self._count, self._component, self._faults = count, component, faults or Faults()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, record_id: int) -> Record:
        self._faults.strike(self._component << 48 | int(record_id))
        return plain_record(int(record_id), self._component)

    def fingerprint(self) -> Any:
        return {"records": self._count, "component": self._component}


class RecordsInBatches(Records):
    """Random access, several records at a time."""

    def __getitems__(self, record_ids: Sequence[int]) -> list[Record]:
        return [self[record_id] for record_id in record_ids]


class RaggedRecords(Records):
    """Records of several lengths, for Padded."""

    def __getitem__(self, record_id: int) -> Record:
        return {"id": np.int32(record_id + 1), "x": np.full(int(record_id) % 5, record_id + 1, np.float32)}


class Documents(Records):
    """Documents of several lengths, for Packed."""

    def __getitem__(self, record_id: int) -> Record:
        return {"tokens": np.arange(1 + int(record_id) % 5, dtype=np.int32) + 10 * int(record_id) + 1}


class LaneOfRecords:
    """An iterator over a lane that gives up after an error, as generators do."""

    def __init__(self, records: Sequence[Record], lane: int, faults: Faults) -> None:
        self._records, self._lane, self._faults, self._next, self._broken = records, lane, faults, 0, False

    def __iter__(self) -> LaneOfRecords:
        return self

    def __next__(self) -> Record:
        if self._broken or self._next >= len(self._records):
            raise StopIteration
        try:
            self._faults.strike((self._lane, int(self._records[self._next]["id"])))
        except Exception:
            self._broken = True
            raise
        self._next += 1
        return self._records[self._next - 1]


class LaneWithState(LaneOfRecords):
    """The same with a state, in which a tuple must stay one."""

    def get_state(self) -> Any:
        return {"at": (self._next,)}

    def set_state(self, state: Any) -> None:
        assert isinstance(state["at"], tuple)
        self._next = state["at"][0]


def lane_records(
    config_source: str, count: int, lane: int, num_lanes: int, epoch: int, component: int = 0
) -> list[Record]:
    """The records of a lane in an epoch, before any function."""
    ids = list(range(lane, count, num_lanes))
    if config_source == "stream_uneven" and lane % 3 == 1:
        ids = ids[: len(ids) // 2]
    return [plain_record(number + 200 * epoch, component) for number in ids]


class OpenLane:
    """``open`` of a Stream."""

    def __init__(self, source: str, count: int, faults: Faults, component: int = 0) -> None:
        self._source, self._count, self._faults, self._component = source, count, faults, component

    def __call__(self, lane_index: int, num_lanes: int, epoch: int = 0) -> Iterator[Record]:
        records = lane_records(self._source, self._count, lane_index, num_lanes, epoch, self._component)
        kind = LaneWithState if self._source in ("stream_state", "stream_uneven") else LaneOfRecords
        return kind(records, lane_index, self._faults)


class Batches:
    """Host batches that start again at each ``iter``."""

    def __init__(self, batches: Sequence[dict[str, np.ndarray]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return iter([{name: leaf.copy() for name, leaf in batch.items()} for batch in self._batches])


# ---------------------------------------------------------------------- scripts


@dataclasses.dataclass
class Phase:
    """One feed on one topology, and what is done with it."""

    topology: Topology
    load: str
    prefetch: int
    schedule: tuple[tuple[int, int], ...]
    actions: list[tuple[Any, ...]]
    fatal_host: int | None = None


@dataclasses.dataclass
class Event:
    """What must come of an action: batches, then the end or an error or neither."""

    action: tuple[Any, ...]
    batches: list[Batch] = dataclasses.field(default_factory=list)
    end: bool = False
    failing: tuple[int, ...] | None = None  # hosts that raise their own error; others of the mesh a PeerError
    kind: str = ""
    step: int = 0  # after the action
    position: int = 0
    steps: Steps | None = None


MAX_BATCHES = 6  # of an endless stream, in one action


class Case:
    """A configuration, its sources, and what the model says of it.

    Args:
      config: values of `OPTIONS`.
      folder: where files of sources are written.
      processes: of the job; None for as many as the configuration needs.
    """

    def __init__(self, config: Config, folder: str, processes: int | None = None) -> None:
        self.config, self._folder = config, folder
        resuming = config["script"] in RESUMING
        most = max(config["hosts"], config["resume_hosts"] if resuming and config["source"] != "host_batches" else 0)
        self.processes = processes or most + config["outside"]
        first = Topology(self.processes, config["hosts"], config["devices"], config["layout"])
        second = Topology(self.processes, config["resume_hosts"], config["devices"], config["resume_layout"])
        if config["source"] == "host_batches":  # which cannot change their topology
            config = self.config = {**config, "resume_load": "sharded", "resume_batch": "same"}
            second = first
        self.topologies = (first, second) if resuming else (first,)
        shards = math.lcm(*(topology.row_shards for topology in self.topologies))
        self.unit = math.lcm(shards, config["num_lanes"] or 1)
        self.unit *= 2 if self.unit == 1 else 1
        self.seed = 11
        self._open_states: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.num_lanes = self._num_lanes()
        while self.unit % self.num_lanes:  # the default of a schedule must divide the sizes of another one
            self.unit = math.lcm(self.unit, self.num_lanes)
            self.num_lanes = self._num_lanes()
        self.phases = self._phases(first, second)
        self.fatal_host, self.fatal = self._choose_fatal()

    # -- settings

    def _schedule(self, batch: str) -> tuple[tuple[int, int], ...]:
        unit = self.unit
        return {
            "unit": ((0, unit),),
            "double": ((0, 2 * unit),),
            "schedule": ((0, unit), (2, 2 * unit), (3, unit)),
        }[batch]

    def settings(self, phase: Phase) -> dict[str, Any]:
        """The feed's keywords, in a phase."""
        config, topology = self.config, phase.topology
        settings: dict[str, Any] = {
            "global_batch_size": phase.schedule,
            "shuffle": config["shuffle"],
            "seed": self.seed,
            "num_epochs": config["num_epochs"],
            "end": config["end"],
            "mask_key": "mask" if config["mask"] else None,
            "num_lanes": config["num_lanes"],
            "load": phase.load if phase.load in ("sharded", "once") else list(topology.readers(phase.load)),
            "prefetch": phase.prefetch,
            "num_threads": config["num_threads"],
            "num_workers": config["num_workers"],
            "check_replicas": config["check_replicas"],
            "bad_records": 1.0 if config["fault"] == "bad" else None,
        }
        return settings

    def _num_lanes(self) -> int:
        """``num_lanes``, or its default: the largest common divisor of the sizes up to 64 (an eighth of the shards)."""
        sizes = [size for _, size in self._schedule(self.config["batch"])]
        limit = 64
        if self.config["shuffle"] == "shards":
            limit = max(1, sum(length > 0 for length in self.shard_lengths) // 8)
        common = math.gcd(*sizes)
        return self.config["num_lanes"] or max(d for d in range(1, limit + 1) if common % d == 0)

    def _phases(self, first: Topology, second: Topology) -> list[Phase]:
        config, taken = self.config, self.config["taken"]
        schedule = self._schedule(config["batch"])
        other = {"unit": "double", "double": "unit", "schedule": "double"}[config["batch"]]
        if config["source"] == "host_batches" or config["script"] == "future":  # it reads before it restores the lanes
            other = config["batch"]
        here = Phase(first, config["load"], config["prefetch"], schedule, [])
        there = Phase(
            second,
            config["resume_load"],
            config["resume_prefetch"],
            self._schedule(config["batch"] if config["resume_batch"] == "same" else other),
            [],
        )
        take, rest = ("take", taken), ("take", MAX_BATCHES * 4)
        look = [("len",), ("ids",)]
        scripts: dict[str, list[list[tuple[Any, ...]]]] = {
            "run": [[*look, rest]],
            "resume": [[take, ("save", "a")], [("set", "a"), *look, rest]],
            "reset": [[take, ("reset",), *look, rest]],
            "past": [[take, ("save", "a"), ("take", 2), ("set", "a"), rest]],
            "future": [[("take", taken + 2), ("save", "a")], [take, ("set", "a"), rest, *look]],
            "after end": [[rest, ("save", "a"), ("set", "a"), *look, rest, ("reset",), ("take", 2)]],
            "resume end": [[rest, ("save", "a")], [("set", "a"), rest, ("reset",), ("take", 2)]],
            "twice": [[take, ("save", "a")], [("set", "a"), ("take", 2), ("save", "b")], [("set", "b"), rest]],
        }
        phases = []
        for number, actions in enumerate(scripts[config["script"]]):
            phases.append(dataclasses.replace(there if number == 1 else here, actions=actions))
        return phases

    # -- the model

    @property
    def shard_lengths(self) -> list[int]:
        """Records of each file."""
        count, lengths = self.config["records"], list[int]()
        for size in itertools.cycle((3, 1, 0, 4, 2)):
            if not count:
                return lengths or [0]
            lengths.append(min(size, count))
            count -= lengths[-1]
        raise AssertionError

    @property
    def zero(self) -> Record:
        """A record of the right shapes and dtypes."""
        source = self.config["source"]
        if source == "tokens":
            return {"tokens": np.zeros(4, np.int32)}
        if source == "packed":
            return dict.fromkeys(("tokens", "segment_ids", "positions"), np.zeros(4, np.int32))
        if source == "padded":
            return padded_record(0)
        return plain_record(0)

    def model(self) -> Any:
        """The stream of this configuration, by the reference."""
        config, source = self.config, self.config["source"]
        count, pad = config["records"], config["end"] == "pad"
        if source == "host_batches":
            topology = self.topologies[0]
            rows = functools.partial(topology.rows_of, size=self._schedule(config["batch"])[0][1], load="sharded")
            lists = [self._host_lists(host) for host in range(topology.hosts)]
            return HostLists(lists, rows, pad)
        if source in STREAMS:
            return Lanes(self.num_lanes, self._lane, pad)
        order: Any
        if source in MIXTURES:
            order = self._mixed()
        elif source == "packed":
            order = Plain(len(packed(count)), False, self.seed, config["num_epochs"])
        elif config["shuffle"] == "shards":
            order = Shards(count, False, self.seed, config["num_epochs"], self.shard_lengths, self.num_lanes)
        else:
            order = Plain(count, config["shuffle"], self.seed, config["num_epochs"])
        bad = is_bad if config["fault"] == "bad" else lambda record_id: False
        return RandomAccess(order, self._value, pad, bad)

    def _value(self, record_id: int, epoch: int) -> Record:
        source = self.config["source"]
        if source == "tokens":
            return {"tokens": np.arange(3 * record_id, 3 * record_id + 4, dtype=np.int32) + 1}
        if source == "padded":
            return padded_record(record_id)
        if source == "packed":
            return packed(self.config["records"])[record_id]
        record = plain_record(record_id & (2**48 - 1), record_id >> 48)
        if source in ("map", "map_array_record", "grain_map"):
            return mapped(record)
        if source == "map_rng":
            # Philox with the key (seed, epoch) and the record id in the highest word of the counter; the function of a
            # Map draws from the generator that is one jump ahead of the decoder's.
            philox = np.random.Philox(key=[self.seed, epoch], counter=[0, 0, 0, record_id])
            return {"id": record["id"], "x": record["x"] + np.random.Generator(philox.jumped()).random(4, np.float32)}
        return record

    @property
    def components(self) -> tuple[list[str], list[int], int]:
        """Names and lengths of a mixture's components, and its block."""
        count = self.config["records"]
        if self.config["source"] == "mixture_nested":
            return ["m/a", "m/b", "c"], [count, 5, 3], 8
        return ["a", "b"], [count, 5], 8

    @property
    def stages(self) -> list[tuple[int, dict[str, float]]]:
        return {
            "mixture_staged": [(0, {"a": 3, "b": 1}), (2, {"a": 1, "b": 1})],
            "mixture_nested": [(0, {"m/a": 1, "m/b": 1, "c": 1})],
        }.get(self.config["source"], [(0, {"a": 3, "b": 1})])

    @property
    def take(self) -> dict[str, int]:
        return {"a": max(1, self.config["records"] // 2)} if self.config["source"] == "mixture_take" else {}

    def _mixed(self) -> Mixed:
        config = self.config
        names, counts, block = self.components
        counts = [self.take.get(name, count) for name, count in zip(names, counts, strict=True)]
        stages = [(step, shares(weights, names, block)) for step, weights in self.stages]
        repeat = [2 if config["source"] == "mixture_take" and name == "b" else 1 for name in names]
        on_end = "stop" if config["source"] == "mixture_stop" else "repeat"
        return Mixed(counts, stages, config["shuffle"], self.seed, config["num_epochs"], on_end, repeat)

    def _lane(self, lane: int) -> Iterator[list[Record]]:
        """The records of a lane, a list per epoch."""
        config = self.config
        if config["source"] == "stream_mixture":
            yield from self._mixture_lane(lane)
            return
        epochs = itertools.count() if config["num_epochs"] is None else range(config["num_epochs"])
        for epoch in epochs:
            shown = 0 if config["source"] == "grain_iter" else epoch  # which does not know the epoch
            records = lane_records(config["source"], config["records"], lane, self.num_lanes, shown)
            if config["source"] == "stream_map":
                records = [new for record in records if (new := kept(record)) is not None]
            if config["source"] == "shuffle_buffer":
                records = in_windows(records, max(2, 8 // self.num_lanes), (self.seed, epoch, lane))
            if not records and config["num_epochs"] != 1:
                raise reference.Refused("SourceError", "an epoch without records")
            yield records

    def _mixture_lane(self, lane: int) -> Iterator[list[Record]]:
        """A lane of a mixture of the stream a and the records b, which is mixed from that lane of each."""
        epochs = self.config["num_epochs"]
        blocks = reference.Blocks(
            [shares({"a": 3, "b": 1}, ["a", "b"], 8)], [0], reference.key_of(self.seed, reference.LANE_LAYOUT, lane)
        )
        of_a = functools.partial(lane_records, "stream", self.config["records"], lane, self.num_lanes)
        of_b = [plain_record(number, 1) for number in range(lane, 40, self.num_lanes)]
        read: list[list[Record]] = [[], []]
        begun = [0, 0]  # epochs of each component
        for position in itertools.count():
            component, number = blocks[position]
            while number >= len(read[component]):
                more = of_b if component else of_a(begun[0])
                others = (times for number, times in enumerate(begun) if number != component)
                if epochs is not None and begun[component] == epochs and all(times > epochs for times in others):
                    return  # every component has been read in full, and has been drawn once more
                if not more:
                    raise reference.Refused("SourceError", "a component without records")
                read[component] += more
                begun[component] += 1
            yield [read[component][number]]

    def _host_lists(self, host: int) -> list[list[Record]]:
        """The batches of a host: hosts have different numbers of them, the last one short."""
        rows = len(self.topologies[0].rows_of(host, self._schedule(self.config["batch"])[0][1], "sharded"))
        count = max(0, self.config["records"] // self.topologies[0].hosts + (host % 2) * 2)
        if self.config["records"] == 0:
            count = 0
        records = [plain_record(number, host) for number in range(count)]
        return [records[i : i + rows] for i in range(0, count, rows)]

    def _choose_fatal(self) -> tuple[int | None, Any]:
        """The host that fails, and the record at which it does: one that it reads in the first phase, not the first."""
        if self.config["fault"] != "fatal" or self.refused:
            return None, None
        phase = self.phases[0]
        host = phase.topology.hosts - 1
        model = self.model()
        steps = Steps((), phase.schedule)
        for step in (1, 2, 0):
            try:
                batch = model.batch(step, steps)
            except reference.Refused:
                return None, None
            if batch is None:
                continue
            for row in self.phases[0].topology.rows_of(host, steps.size(step), phase.load):
                token = batch.tokens[row] if row < len(batch.tokens) else None
                if token:
                    phase.fatal_host = host
                    return host, token
        return None, None

    def faults(self, phase: Phase, host: int) -> Faults:
        """What goes wrong in a phase on a host."""
        fatal = self.fatal if phase.fatal_host == host else None
        if fatal is not None and self.config["source"] == "stream_map":
            fatal = fatal[0], fatal[1] // 3  # the record before the function
        return Faults(self.config["fault"], fatal)

    def failing(self, phase: Phase, batch: Batch) -> tuple[int, ...]:
        """The hosts whose part of a batch cannot be read."""
        host = phase.fatal_host
        if host is None:
            return ()
        size = len(batch.rows)
        mine = phase.topology.rows_of(host, size, phase.load)
        if self.config["source"] in STREAMS:
            each, lanes = size // self.num_lanes, self.lanes_of(phase, host)
            mine = [row for row in range(size) if row // each in lanes]
        return (host,) if any(row < len(batch.tokens) and batch.tokens[row] == self.fatal for row in mine) else ()

    def events(self) -> list[list[Event]]:
        """What every host must see, phase by phase."""
        model, saved = self.model(), dict[str, tuple[int, int, tuple[int, ...]]]()
        result: list[list[Event]] = []
        for phase in self.phases:
            step = position = 0
            sizes: tuple[int, ...] = ()
            events: list[Event] = []
            for action in phase.actions:
                event = Event(action)
                if action[0] == "set":
                    if action[1] not in saved:
                        break  # the phase before it failed
                    step, position, sizes = saved[action[1]]
                elif action[0] == "reset":
                    step, position, sizes = 0, 0, ()
                if action[0] == "take":
                    self._take(event, model, phase, step, position, sizes)
                    step, position = event.step, event.position
                    sizes = tuple(Steps(sizes, phase.schedule).size(number) for number in range(step))
                event.step, event.position, event.steps = step, position, Steps(sizes, phase.schedule)
                events.append(event)
                if event.failing is not None:
                    break
                if action[0] == "save":
                    saved[action[1]] = (step, position, sizes)
            result.append(events)
        return result

    def _take(self, event: Event, model: Any, phase: Phase, step: int, position: int, sizes: tuple[int, ...]) -> None:
        """What comes of taking batches from ``step`` on."""
        steps = Steps(sizes, phase.schedule)
        event.step, event.position = step, position
        for _ in range(min(MAX_BATCHES if self.endless else event.action[1], event.action[1])):
            try:
                batch = model.batch(event.step, steps)
            except reference.Refused as refused:
                event.failing, event.kind = self._empty_lanes(phase), refused.kind
                return
            if batch is None:
                event.end = True
                return
            if failing := self.failing(phase, batch):
                event.failing, event.kind = failing, "Fatal"
                return
            event.batches.append(batch)
            event.step, event.position = event.step + 1, batch.position

    def _empty_lanes(self, phase: Phase) -> tuple[int, ...]:
        """The hosts with a lane that has no records; all hosts if no lane has any."""
        if self.config["source"] == "host_batches" or (
            self.config["num_epochs"] == 1 and self.config["source"] != "stream_mixture"
        ):
            return tuple(range(self.processes))
        empty = set()
        for lane in range(self.num_lanes):
            try:
                Lanes(1, lambda _, lane=lane: self._lane(lane), True).batch(0, Steps((), ((0, 10_000),)))
            except reference.Refused:
                empty.add(lane)
        return tuple(host for host in range(phase.topology.hosts) if self.lanes_of(phase, host) & empty)

    def lanes_of(self, phase: Phase, host: int) -> set[int]:
        """The lanes that a host reads: those of its rows, in batches of any of the sizes."""
        sizes = {size for _, size in phase.schedule}
        return {
            row // (size // self.num_lanes) for size in sizes for row in phase.topology.rows_of(host, size, phase.load)
        }

    def refused_on(self, phase: Phase, host: int) -> str | None:
        """The class of the error of the constructor on a host, or None."""
        outside = host >= phase.topology.hosts
        return "SettingsError" if outside and not self.can_be_outside(phase) else self.refused

    def can_be_outside(self, phase: Phase) -> bool:
        """Whether a host outside of the mesh gets the batches of the others."""
        source = self.config["source"]
        return is_random(source) or (source != "host_batches" and phase.topology.hosts > 1)

    def savers(self, key: str) -> int:
        """The number of hosts that save a state: those that have a feed."""
        phase = next(phase for phase in self.phases if ("save", key) in phase.actions)
        return self.processes if self.can_be_outside(phase) else phase.topology.hosts

    @property
    def endless(self) -> bool:
        return self.config["num_epochs"] is None

    @property
    def refused(self) -> str | None:
        """The class of the error of the constructor, or None."""
        config = self.config
        if is_random(config["source"]) and config["records"] == 0:
            return "SourceError"
        return None

    # -- the real thing

    def source(self, phase: Phase, host: int, faults: Faults) -> Any:
        """What is passed to the feed."""
        from meshfeed import sources

        source = self.config["source"]
        if source in FILES:
            return self._file_source()
        if source in MIXTURES:
            return self._mixture(faults)
        if source == "host_batches":
            lists = self._host_lists(host) if host < self.topologies[0].hosts else []
            return sources.HostBatches(Batches([_columns(records) for records in lists]))
        return _SOURCES[source](self.config["records"], faults)

    def _mixture(self, faults: Faults) -> Any:
        from meshfeed import sources

        names, counts, block = self.components
        parts = [RecordsInBatches(count, number, faults) for number, count in enumerate(counts)]
        if self.config["source"] == "mixture_nested":
            inner = sources.Mixture({"a": parts[0], "b": parts[1]}, {"a": 1, "b": 1}, 8)
            return sources.Mixture({"m": inner, "c": parts[2]}, {"m": 2, "c": 1}, block)
        stages = self.stages if len(self.stages) > 1 else self.stages[0][1]
        repeat = {"b": 2} if self.config["source"] == "mixture_take" else None
        on_end = "stop" if self.config["source"] == "mixture_stop" else "repeat"
        components = dict(zip(names, parts, strict=True))
        return sources.Mixture(components, stages, block, on_end=on_end, take=self.take or None, repeat=repeat)

    def _file_source(self) -> Any:
        from meshfeed import sources

        source = self.config["source"]
        paths = write_files("array_record" if "array" in source else source, self._folder, self.shard_lengths)
        if source == "tokens":
            return sources.Tokens(paths, 3)
        if source == "parquet":
            return sources.Parquet(paths)
        files = sources.ArrayRecord(paths, decode=decoded)
        return sources.Map(files, mapped) if source == "map_array_record" else files


def _grain(count: int) -> Any:
    import grain

    return grain.MapDataset.source([plain_record(number) for number in range(count)])


def _stream(source: str, count: int, faults: Faults) -> Any:
    from meshfeed import sources

    return sources.Stream(OpenLane(source, count, faults), fingerprint=count)


def _stream_mixture(count: int, faults: Faults) -> Any:
    from meshfeed import sources

    parts = {"a": _stream("stream", count, faults), "b": Records(40, 1)}
    return sources.Mixture(parts, {"a": 3, "b": 1}, 8)


_SOURCES: dict[str, Callable[[int, Faults], Any]] = {
    "memory": lambda n, faults: _sources().Memory(_columns([plain_record(number) for number in range(n)])),
    "records": lambda n, faults: Records(n, faults=faults),
    "records_batch": lambda n, faults: RecordsInBatches(n, faults=faults),
    "map": lambda n, faults: _sources().Map(RecordsInBatches(n, faults=faults), mapped),
    "map_rng": lambda n, faults: _sources().Map(Records(n, faults=faults), with_noise, batched=True),
    "padded": lambda n, faults: _sources().Padded(RaggedRecords(n), 6, key="x", mask_key="mask_of"),
    "packed": lambda n, faults: _sources().Packed(Documents(n), 4),
    "grain_map": lambda n, faults: _grain(n).map(mapped),
    "grain_iter": lambda n, faults: _grain(n).to_iter_dataset(),
    "stream": functools.partial(_stream, "stream"),
    "stream_state": functools.partial(_stream, "stream_state"),
    "stream_uneven": functools.partial(_stream, "stream_uneven"),
    "stream_map": lambda n, faults: _sources().Map(_stream("stream_map", n, faults), kept),
    "shuffle_buffer": lambda n, faults: _sources().ShuffleBuffer(_stream("shuffle_buffer", n, faults), 8),
    "stream_mixture": _stream_mixture,
}


def _sources() -> Any:
    from meshfeed import sources

    return sources


def _columns(records: Sequence[Record]) -> dict[str, np.ndarray]:
    if not records:
        return {name: np.zeros((0, *leaf.shape), leaf.dtype) for name, leaf in plain_record(0).items()}
    return {name: np.stack([record[name] for record in records]) for name in records[0]}


def write_files(kind: str, folder: str, lengths: Sequence[int]) -> list[str]:
    """Files of the format, one per shard; made once for all configurations and hosts."""
    name = f"{kind}-{'-'.join(map(str, lengths))}"
    target = pathlib.Path(folder, name)
    if not target.exists():
        work = pathlib.Path(folder, f"{name}.{random.getrandbits(64):x}")
        work.mkdir()
        first = 0
        for number, length in enumerate(lengths):
            path = work / f"part-{number:05d}-of-{len(lengths):05d}.{_ENDINGS[kind]}"
            _WRITERS[kind](path, first, length)
            first += length
        try:
            work.rename(target)
        except OSError:  # another host was first
            assert target.exists()
    return sorted(map(str, target.iterdir()))


def _write_array_record(path: pathlib.Path, first: int, length: int) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    for number in range(first, first + length):
        writer.write(str(number).encode())
    writer.close()


def _write_tokens(path: pathlib.Path, first: int, length: int) -> None:
    # Windows of 3 tokens and the next one: a file of n windows has 3 n + 1 tokens.
    np.save(
        path, np.arange(3 * first + 1, 3 * (first + length) + 2, dtype=np.uint16)[: 3 * length + 1 if length else 0]
    )


def _write_parquet(path: pathlib.Path, first: int, length: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = [plain_record(number) for number in range(first, first + length)]
    ids = pa.array([int(record["id"]) for record in records], pa.int32())
    x = pa.array([record["x"].tolist() for record in records], pa.list_(pa.float32(), 4))
    pq.write_table(pa.table({"id": ids, "x": x}), path)


_ENDINGS = {"array_record": "array_record", "tokens": "npy", "parquet": "parquet"}
_WRITERS = {"array_record": _write_array_record, "tokens": _write_tokens, "parquet": _write_parquet}
