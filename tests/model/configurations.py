"""Configurations drawn over all settings of a feed together, and what the reference model says of each.

A configuration is a flat dict of settings, each with a few values (`OPTIONS`); `valid` tells which go together. `Case`
turns it into a source, the feed's keywords, a script of actions in phases (each phase a new feed, perhaps on another
topology) and the events that every host must see.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import json
import math
import os
import pathlib
import random
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, ClassVar

import jax
import lists
import ml_dtypes
import numpy as np
import reference
from lists import Node
from reference import Batch, HostLists, Lanes, RandomAccess, Record, Steps, shares

Config = dict[str, Any]

FILES = ("array_record", "map_array_record", "tokens", "parquet")
MIXTURES = ("mixture", "mixture_staged", "mixture_nested", "mixture_take", "mixture_stop")
PACKED = ("packed", "packed_mixture")
LIMITED = {
    "packed_aligned": ("split", 8, lists.Limits(align=2, sequence_order=("zigzag", 2))),
    "packed_bos": ("split", 6, lists.Limits(bos_id=9999, sequence_order=("striped", 3))),
    "packed_limits": (
        "fit",
        8,
        lists.Limits(2, 9999, 3, "starts", side={"images": 4}),
    ),
    "packed_limits_split": ("split", 8, lists.Limits(2, None, 2, sequence_order=("zigzag", 1), side={"images": 4})),
}
"""Packed within limits: method, length of sequences, limits."""
DOCUMENTS = (*PACKED, *LIMITED, "mixture_packed", "buckets")
IMAGES = ("image_files", "map_images", "map_videos")
IN_FILES = (*FILES, *MIXTURES, *DOCUMENTS, *IMAGES, "records_batch", "map", "padded", "padded_leaves")
RANDOM = (*IN_FILES, "memory", "records", "records_cached", "map_rng", "grain_map")
TOKENS = ("tokens", *DOCUMENTS)
STREAMS = (
    *("stream", "stream_state", "stream_uneven", "stream_map", "stream_decode", "stream_mixture", "shuffle_buffer"),
    "grain_iter",
)
HOST_BATCHES = ("host_batches", "host_batches_sized", "host_batches_state", "host_batches_once", "host_batches_vary")
UNSIZED = ("host_batches_sized", "host_batches_vary")
"""Host batches whose number of rows says how large the global batch is."""
FAULTY = (
    *("records", "records_batch", "map", "map_rng", "padded", "padded_leaves", *IMAGES[1:], *MIXTURES, *DOCUMENTS),
    *("stream", "stream_state", "stream_uneven", "stream_map", "stream_decode"),
)
ANY_DTYPE = (
    *(
        "memory",
        *("records", "records_batch", "records_cached"),
        "mixture",
        "mixture_staged",
        "mixture_nested",
        "mixture_take",
        "mixture_stop",
    ),
    *("stream", "stream_state", "stream_uneven", *HOST_BATCHES),
)
"""Sources whose leaf ``x`` may be of any dtype, and in trees of any form."""
WINDOWS: dict[Any, lists.Windows] = {"shards": (2, False), "shards 3": (3, False), "affinity": (1, True)}
"""Values of ``shuffle`` for orders by shards: ``window_shards`` and ``affinity``."""

LEAVES = ("leaves", "dies")
"""Faults by which one host closes its feed early: without an error, or after one of its training loop."""
ODD = ("settings", "unopened", "late", "replicas", "structure", "wide", *LEAVES)
"""Faults by which one host of several is not like the others: what they are told of it."""
TOGETHER = ("records_batch", "mixture", "stream", "stream_state", "stream_uneven")
"""Sources with which these faults are played."""
BALANCED = ("records_batch", *PACKED, *LIMITED, "mixture_packed")
"""Sources that know the lengths of their rows."""

OPTIONS: dict[str, list[Any]] = {
    "source": [*RANDOM, *STREAMS, *HOST_BATCHES],
    "view": ["none", "subset", "reversed", "ids", "sample", "concat", "split", "zip"],
    "records": [0, 1, 5, 13, 40],
    "form": ["dict", "nested", "registered"],  # of the tree of a record
    "dtype": ["float32", "int64", "bool", "bfloat16", "complex128", "int4", "float64", ">i4", "float8_e5m2", "uint64"],
    "x64": [False, True],
    "shuffle": [False, True, 4, *WINDOWS],
    "num_lanes": [None, 1, 2, 4],
    "batch": ["unit", "double", "schedule"],
    "num_epochs": [1, 2, None],
    "end": ["drop", "pad"],
    "mask": [False, True],
    "load": ["sharded", "once", "first", "last two"],
    "prefetch": [0, 1, 4, "auto"],
    "start": [False, True],  # on all hosts, at first and after each action that begins anew
    "num_threads": [None, 3, "auto"],
    "balance": [None, "attention", "tokens", "function"],
    "num_workers": [0, 2, "auto"],
    "check_replicas": [False, True],
    "feed": ["local", "remote"],  # beside the accelerators; each host has a controller of its own
    "fault": ["none", "transient", "bad", "too many bad", "fatal", *ODD],
    "hosts": [1, 2, 3, 4, 5, 7],
    "devices": [1, 2],
    "layout": ["rows", "permuted", "data", "minor", "columns", "both", "replicated", "prefix", "mixed"],
    "outside": [0, 1, "late"],  # hosts outside the mesh; the late one waits until the others have taken their batches
    "script": ["run", "resume", "reset", "past", "future", "after end", "resume end", "twice"],
    "taken": [0, 1, 3],
    "resume_hosts": [1, 2, 3, 4],
    "resume_layout": ["rows", "data", "columns"],
    "resume_load": ["sharded", "once", "first"],
    "resume_lanes": ["same", "of state"],  # whether the number of lanes is given again
    "resume_batch": ["same", "other"],
    "resume_prefetch": [0, 2],
    # "ahead": some hosts have taken a batch more; "fails": at first on one host; "all fail": at first on all; "late": one
    # host comes when the others have given up, and all call again; "killed": the hosts that are left out are killed, and
    # only one of the others is told
    "reshard": ["none", "there", "back", "ahead", "lost", "killed", "fails", "all fail", "late"],
    "weights": ["none", "next", "later", "replaced", "twice", "away"],
    "midway": ["last", "first"],  # phase in which the feed is resharded or gets weights
}
DEFAULTS: Config = {
    **{name: values[0] for name, values in OPTIONS.items()},
    "source": "records",
    "records": 13,
    "hosts": 1,
    "layout": "rows",
    "put": "private",
    "caller": "plain",
}
OF_ALL_HOSTS = [fault for fault in OPTIONS["fault"] if fault not in ODD]
IN_TIME = [reshard for reshard in OPTIONS["reshard"] if reshard not in ("late", "killed")]
SIMULATED = OPTIONS
REAL_HOSTS = 4
REAL = {
    **OPTIONS,
    "x64": [False],
    "feed": ["local"],
    "fault": OF_ALL_HOSTS,
    "reshard": IN_TIME,
    "hosts": [1, 2, 3, 4],
    "devices": [2],
    "outside": [0],
}  # hosts beyond `hosts` are outside
ONE_HOST = {  # on real devices
    **SIMULATED,
    "num_workers": [0, "auto"],  # processes are slow to start
    "fault": OF_ALL_HOSTS,
    "reshard": IN_TIME,
    "hosts": [1],
    "devices": [4, 8],
    "outside": [0],
    "resume_hosts": [1],
    "put": ["private", "public", "changed"],  # which call of JAX puts arrays on devices, or that it has changed
    "caller": ["plain", "mesh", "debug_nans", "debug_infs", "disable_jit", "guarded", "logged"],  # settings of JAX
}
WEIGHTED_LANES = {  # with what no mixture of streams has left out
    **{
        name: values if name not in ("view", "form", "dtype", "shuffle", "balance", "fault", "feed") else values[:1]
        for name, values in SIMULATED.items()
    },
    "source": ["stream_mixture"],
    "reshard": IN_TIME,
    "weights": OPTIONS["weights"][1:],
}
WEIGHTED_RECORDS = {  # the same of records by shards: whether weights are refused depends on all that the end depends on
    **{name: values[:1] for name, values in SIMULATED.items()},
    **{name: OPTIONS[name] for name in ("num_lanes", "num_epochs", "batch", "taken", "script", "midway")},
    "source": ["mixture", "mixture_nested", "mixture_take"],
    "records": [1, 5, 13],
    "shuffle": [*WINDOWS],
    "weights": OPTIONS["weights"][1:],
}
BAD_LANES = {  # the counts of bad records that hosts learn from one another, at several steps and later
    **{name: values[:1] for name, values in SIMULATED.items()},
    **{name: OPTIONS[name] for name in ("end", "num_epochs", "outside", "taken", "midway")},
    "source": ["stream_decode"],
    "fault": ["bad"],
    "records": [40],
    "hosts": [2, 3],
    "resume_hosts": [2, 1],
    "num_workers": [0, 2],
    "prefetch": [0, 4],
    "script": ["run", "resume", "past"],
    "reshard": ["none", "there", "lost", "back"],
}
CACHED = {  # what is asked of a cache ahead, which is compared where a feed begins once
    **{name: values[:1] for name, values in SIMULATED.items()},
    **{name: OPTIONS[name] for name in ("batch", "end", "load", "num_epochs")},
    "source": ["records_cached"],
    "records": [13, 40],
    "shuffle": [True],
    "hosts": [1, 3],
    "layout": ["rows", "columns"],
}
PLANNED = {  # for which files lanes ask ahead of their next reads, which is compared where a feed begins once and ends well
    **{name: values[:1] for name, values in SIMULATED.items()},
    **{name: OPTIONS[name] for name in ("batch", "end", "num_epochs")},
    "source": ["stream_state", "stream_uneven"],
    "records": [40],
    "hosts": [2, 1],
    "num_lanes": [2, 4],
    "prefetch": [4, 0],
}
KILLED = {  # what hosts hand over in case they are killed, and what others do until they learn it
    **{name: values[:1] for name, values in SIMULATED.items()},
    **{name: OPTIONS[name] for name in ("outside", "taken", "midway")},
    "source": ["stream_state", "stream_decode", "records_batch"],
    "records": [40],
    "fault": ["none", "bad"],
    "hosts": [3, 2],
    "resume_hosts": [2, 1],
    "prefetch": [4, 0],
    "num_epochs": [None, 1],
    "load": ["sharded", "once"],
    "reshard": ["killed"],
}
LATE = {  # what hosts say of one that hangs, by what it reads; few, since they wait for seconds
    **{name: values[:1] for name, values in SIMULATED.items()},
    "source": ["records_batch", "stream_uneven"],
    "fault": ["late"],
    "records": [40],
    "hosts": [2],
    "taken": [0, 1],
    "outside": [0, 1],
    "prefetch": [0, 4],
}
RESUMING = ("resume", "future", "resume end", "twice")
WEIGHTED = (*MIXTURES, "mixture_packed", "stream_mixture")
"""Sources whose weights can be set."""
OTHER_WEIGHTS = {
    True: ({"m": 1, "c": 3}, {"c": 1}, {"m": 1}),
    False: ({"a": 1, "b": 3}, {"b": 1}, {"a": 1}),
}
"""Of ``set_weights``: whether mixtures are nested → the weights that are set first, next, and after those."""


SEED = 11
BAD = {"bad": 1.0, "too many bad": 0.1}
"""Faults by which every fifth record is bad, and the fraction of bad records that is allowed."""


class Fatal(RuntimeError):
    """What a source raises that no retry mends."""


def is_random(source: str) -> bool:
    return source in RANDOM


def valid(config: Config) -> bool:
    """Whether the settings go together, as far as they are given. What is forbidden here raises, which other tests show."""
    if config.get("mask") and config.get("end") == "drop":
        return False
    if (
        config.get("resume_lanes") == "of state" and config.get("script") == "future"
    ):  # which reads before it has a state
        return False
    if "source" not in config:  # nearly every rule is about the source, so what no source allows is noticed early
        return any(valid({**config, "source": source}) for source in OPTIONS["source"])
    if config.get("feed") == "remote" and _never_remote(config):
        return False
    if config["source"] in HOST_BATCHES:
        return _valid_host_batches(config)
    return not any(_forbidden(config["source"], config))


def valid_on_devices(config: Config) -> bool:
    """As :func:`valid`, for ``ONE_HOST``, where fatal faults of what :func:`_never_remote` makes again are drawn too."""
    again = config.get("feed") == "remote" and config.get("source") in LIMITED and config.get("fault") == "fatal"
    return not again and valid(config)


def valid_in_campaigns(config: Config) -> bool:
    """As :func:`valid`, without what cannot be told of feeds beside the accelerators; CI draws none of it."""
    if config.get("feed") == "remote":
        if config.get("source") in (*LIMITED, *IMAGES) and config.get("fault") == "fatal":
            return False
        # JAX permutes the devices of these in a compiled call, by which NaNs lose their payload.
        if config.get("dtype") in ("bfloat16", "float8_e5m2") and config.get("layout") in ("permuted", "prefix"):
            return False
    return valid(config)


def valid_on_real_hosts(config: Config) -> bool:
    """As :func:`valid_in_campaigns`, for real processes of which some are outside and which wait for one another in JAX."""
    moved = config.get("script") in RESUMING and config.get("resume_load", "sharded") != "sharded"
    if config.get("reshard") == "ahead" and moved:  # rows would move between hosts that are at other steps
        return False
    if config.get("form") == "registered" and config.get("source") in STREAMS and config.get("hosts", 4) != 4:
        return False  # which no host can follow
    return valid_in_campaigns(config)


def _never_remote(config: Config) -> bool:
    """Whether a feed beside the accelerators has no such source, or cannot do what others can."""
    if config["source"] in ("buckets", "records_cached") or config.get("form") == "registered":
        return True
    # To be moved it makes the source again, which counts entries and so reads records outside of any retry.
    if config["source"] in LIMITED and config.get("fault") == "transient":
        return True
    # A controller whose hosts have no rows has no feed. Several controllers cannot move lanes, and do not meet.
    moves = config.get("reshard", "none")
    several = moves == "killed" or config.get("hosts", 1) != 1 or config.get("resume_hosts", 1) != 1
    moved = several and (moves in ("ahead", "fails", "all fail", "late") or config["source"] in STREAMS)
    return config.get("outside", 0) != 0 or (moves != "none" and moved)


def _forbidden(source: str, config: Config) -> Iterator[bool]:
    """Each rule, about settings that are given."""

    def has(name: str, *values: Any) -> bool:
        return any(config.get(name, has) is value for value in values)

    def differs(name: str, value: Any) -> bool:
        return name in config and config[name] is not value

    viewed, by_shards = differs("view", "none"), has("shuffle", *WINDOWS)
    if not is_random(source):
        yield viewed or differs("shuffle", False) or (has("fault", *BAD) and source != "stream_decode")
        yield source == "stream_decode" and has("fault", "transient", "fatal")
    else:
        yield differs("num_lanes", None) and ("shuffle" in config and not by_shards)
        laned = by_shards or differs("num_lanes", None)
        yield laned and (source not in IN_FILES or has("view", "reversed"))
    yield differs("fault", "none") and source not in (TOGETHER if has("fault", *ODD) else FAULTY)
    yield from _odd_host_forbidden(source, has, differs)
    yield from _midway_forbidden(source, has, differs)
    yield differs("balance", None) and (source not in BALANCED or has("view", "zip"))
    yield (differs("dtype", "float32") or differs("form", "dict")) and source not in ANY_DTYPE
    if has("form", "registered") and source in STREAMS:  # which no host can follow
        yield differs("outside", 0) or differs("reshard", "none") or has("script", *RESUMING) or has("fault", *ODD)
    yield has("fault", *BAD) and source in DOCUMENTS  # a sequence may have no other that is readable
    prefix = has("layout", "prefix", "mixed")
    # What is given for them is about their own leaves, which they share with others that have all views.
    yield source in LIMITED and differs("view", "none") and not has("view", "subset")
    yield source in IMAGES and differs("view", "none") and not has("view", "zip")
    yield source == "padded_leaves" and differs("view", "none") and not has("view", "concat")
    yield prefix and (source in (*TOKENS, *IMAGES) or has("view", "zip"))
    if source in (*PACKED, *LIMITED):
        yield has("view", "none") and has("shuffle", 4)
    if source == "mixture_stop":
        yield has("view", "none") and has("num_epochs", None)
    if source in ("mixture_staged", "records_cached"):
        yield viewed
    if source == "buckets":
        yield has("view", "zip") or has("batch", "schedule") or differs("resume_batch", "same")
    yield has("records", 0) and (source in (*MIXTURES, *DOCUMENTS) or viewed)
    yield has("records", 1) and has("view", "split")


def _midway_forbidden(source: str, has: Callable[..., bool], differs: Callable[[str, Any], bool]) -> Iterator[bool]:
    """The rules of what is done to a feed in the middle of a run."""
    if differs("weights", "none"):
        yield source not in WEIGHTED or differs("view", "none")
        yield source == "mixture_stop" and has("num_epochs", None)  # which views allow, as they have an end
    if not differs("reshard", "none"):
        return
    yield has("fault", *ODD)
    if has("reshard", "killed"):
        yield has("hosts", 1) or has("fault", "fatal", "too many bad")
        yield has("midway", "first") and has("script", *RESUMING)  # no host that was killed begins anew
    if has("reshard", "late"):
        yield _waits_too_often(source, has, differs) or differs("fault", "none") or differs("weights", "none")
    yield has("reshard", "ahead") and differs(
        "load", "sharded"
    )  # rows would move between hosts that are at other steps
    # A lane may be read forward from any place before, and so by the host that cannot read a record there.
    yield has("reshard", "back") and has("fault", "fatal") and source in STREAMS


def _waits_too_often(source: str, has: Callable[..., bool], differs: Callable[[str, Any], bool]) -> bool:
    """Whether a configuration whose hosts wait for seconds is one too many."""
    unlike = any(differs(name, OPTIONS[name][0]) for name in ("view", "layout", "balance", "dtype", "form", "shuffle"))
    laned = source == "records_batch" and differs("num_lanes", None)
    return unlike or laned or source not in ("records_batch", "stream_uneven") or has("hosts", 5, 7)


def _odd_host_forbidden(source: str, has: Callable[..., bool], differs: Callable[[str, Any], bool]) -> Iterator[bool]:
    """The rules of faults of one host among several."""
    if not has("fault", *ODD):
        return
    yield has("hosts", 1) or differs("script", "run") or differs("view", "none") or has("records", 0, 1)
    yield has("outside", "late")  # which waits for all others
    yield has("fault", *LEAVES, "replicas", "structure") and differs("load", "sharded")
    yield has("fault", "replicas") and (differs("layout", "replicated") or differs("check_replicas", True))
    yield has("fault", "replicas", "structure") and source != "records_batch"
    yield has("fault", "wide") and (differs("dtype", "int64") or has("x64", True))
    yield has("fault", "wide") and (source == "mixture" or has("check_replicas", True))
    yield has("fault", "late", "dies") and _waits_too_often(source, has, differs)
    yield has("fault", "late") and has("num_workers", 2)  # by which a host notices it itself
    yield has("fault", "late", "unopened") and has("num_epochs", None)


def _valid_host_batches(config: Config) -> bool:
    get = config.get
    plain = {
        "view": "none",
        "balance": None,
        "fault": "none",
        "shuffle": False,
        "num_lanes": None,
        "load": "sharded",
        "num_workers": 0,
        "outside": 0,
        "reshard": "none",
        "weights": "none",
    }
    if any(type(get(name, value)) is not type(value) or get(name, value) != value for name, value in plain.items()):
        return False
    once = config["source"] == "host_batches_once"  # which can be read once only
    if once and (get("script", "run") != "run" or get("num_epochs", 1) != 1):
        return False
    if config["source"] == "host_batches_vary" and (get("batch", "unit") != "unit" or get("num_epochs", 1) != 1):
        return False
    if config["source"] == "host_batches_vary" and get("form", "dict") == "registered":
        return False  # the shape of its padding comes from others at any step
    return get("batch", "unit") != "schedule" and get("layout", "rows") not in ("prefix", "mixed")


# ---------------------------------------------------------------------- topologies


Load = str | tuple[int, ...]
"""A value of ``load``, or the hosts that are left of a list."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """Which hosts are in the mesh, and how rows and columns lie on it."""

    processes: int
    hosts: int
    devices: int
    layout: str
    first: int = 0  # the lowest host in the mesh

    @property
    def members(self) -> range:
        """The hosts in the mesh."""
        return range(self.first, self.first + self.hosts)

    @property
    def grid(self) -> np.ndarray:
        """Numbers of the devices (``host * devices + k``), in the shape of the mesh."""
        count = self.hosts * self.devices
        numbers = np.arange(count) + self.first * self.devices
        if self.layout in ("permuted", "prefix"):  # hosts that hold other columns than others
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
            "mixed": ("model",) if leaf in ("x", "mask_of") else ("data",),
        }[self.layout]

    def row_axes(self, leaf: str) -> tuple[str, ...]:
        spec = self.spec(leaf)
        first = spec[0] if spec else ()
        return first if isinstance(first, tuple) else (first,)

    def _row_shards(self, leaf: str) -> int:
        sizes = dict(zip(self.axes, self.grid.shape, strict=True))
        return math.prod(sizes[axis] for axis in self.row_axes(leaf))

    @property
    def row_shards(self) -> int:
        return math.lcm(self._row_shards("id"), self._row_shards("x"))

    def host_of(self, device: int) -> int:
        return device // self.devices

    def readers(self, load: Load) -> tuple[int, ...]:
        """The hosts of ``load=[...]``."""
        if isinstance(load, tuple):
            return load
        return (self.first,) if load == "first" else tuple(self.members)[-2:]

    def rows_of(self, host: int, size: int, load: Load) -> list[int]:
        """The rows that a host reads. A host outside of the mesh reads none."""
        rows: set[int] = set()
        if load == "sharded":
            sizes = dict(zip(self.axes, self.grid.shape, strict=True))
            for leaf, place in itertools.product(("id", "x"), np.ndindex(*self.grid.shape)):
                if self.host_of(int(self.grid[place])) == host:
                    each, at = size // self._row_shards(leaf), dict(zip(self.axes, place, strict=True))
                    axes = self.row_axes(leaf)
                    shard = functools.reduce(lambda total, axis: total * sizes[axis] + at[axis], axes, 0)
                    rows.update(range(shard * each, (shard + 1) * each))
            return sorted(rows)
        for rank, device in enumerate(self.reading_devices(load)):
            if self.host_of(device) == host:
                rows.update(self.chunk(rank, size, load))
        return sorted(rows)

    def reading_devices(self, load: Load) -> list[int]:
        """The devices whose hosts read with ``load="once"`` or a list, in the order of their rows."""
        hosts = self.members if load == "once" else self.readers(load)
        return [int(device) for device in self.grid.flat if self.host_of(int(device)) in hosts]

    def chunk(self, rank: int, size: int, load: Load) -> range:
        each = -(-size // len(self.reading_devices(load)))
        return range(min(size, rank * each), min(size, (rank + 1) * each))


# ---------------------------------------------------------------------- values


def plain_record(number: int, component: int = 0, dtype: str = "float32") -> Record:
    """Record ``number``; no row of it is zero, so padding is not mistaken for it."""
    first = component * 1000 + number + 1
    return {"id": np.int32(first), "x": leaf_x(first, dtype)}


def leaf_x(first: int, dtype: str) -> np.ndarray:
    """Four values of a dtype, of which no bit may be lost: with a NaN that says more, a negative zero, and limits of JAX."""
    plain = np.float32(first) / 4 + np.arange(4, dtype=np.float32)
    if dtype == "float32":
        return plain
    if dtype == "bool":
        return np.array([first & 1, first & 2, first & 4, 1]) != 0
    if dtype == "bfloat16":
        bits = plain.astype(ml_dtypes.bfloat16).view(np.uint16)
        bits[1:3] = 0x7F81 + first % 64, 0x8000
        return bits.view(ml_dtypes.bfloat16)
    if dtype == "complex128":
        return (plain - 2j * plain).astype(np.complex128)
    if dtype == "int4":
        return ((first + np.arange(4)) % 16 - 8).astype(ml_dtypes.int4)
    if dtype == "float8_e5m2":
        return (first + np.array([0, 0x7D, 0x80, 0xFE])).astype(np.uint8).view(ml_dtypes.float8_e5m2)
    if dtype == "uint64":
        return np.array([first + 2**31, 4 * first, 0, 2**32 - 1], np.uint64)
    if dtype == "int64":
        return np.array([-first, 4 * first, -(2**31), 2**31 - 1])
    return (plain * -4).astype(dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Boxed:
    """A class of the program that JAX knows as a tree."""

    values: Any


def formed(record: Record, form: str) -> Record:
    """A record, or a batch, whose leaf ``x`` is within another tree."""
    return {
        **record,
        "x": {"dict": lambda x: x, "nested": lambda x: (x, [None]), "registered": Boxed}[form](record["x"]),
    }


def unformed(tree: Any, form: str) -> Any:
    """The same as a dict again.

    Raises:
      AssertionError: ``x`` is in a tree of another form.
    """
    if form == "dict":
        return tree
    if "x" not in tree:  # a Zip
        return {name: unformed(part, form) if isinstance(part, dict) else part for name, part in tree.items()}
    x = tree["x"]
    if form == "nested":
        assert (type(x), type(x[1])) == (tuple, list), f"x is {x!r}"
        assert x[1] == [None], f"x is {x!r}"
        return {**tree, "x": x[0]}
    assert type(x) is Boxed, f"x is {x!r}"
    return {**tree, "x": x.values}


PATHS = {"dict": "['x']", "nested": "['x'][0]", "registered": "['x'].values"}
"""The path of leaf ``x`` in records of a form."""


def narrowed(array: np.ndarray, x64: bool = False) -> np.ndarray:
    """What JAX makes of an array, perhaps without 64-bit types."""
    array = array.astype(array.dtype.newbyteorder("="))
    dtypes = {"int64": np.int32, "uint64": np.uint32, "float64": np.float32, "complex128": np.complex64}
    return array.astype(dtypes[array.dtype.name]) if array.dtype.name in dtypes and not x64 else array


def mapped(record: Record) -> Record:
    return {"id": np.int32(record["id"] * 3), "x": -record["x"]}


def kept(record: Record) -> Record | None:
    return None if int(record["id"]) % 3 == 0 else mapped(record)


def with_noise(records: list[Record], rng: list[np.random.Generator]) -> dict[str, np.ndarray]:
    return {
        "id": np.stack([record["id"] for record in records]),
        "x": np.stack([record["x"] + one.random(4, np.float32) for record, one in zip(records, rng, strict=True)]),
    }


def with_noise_of(record: Record, draw: lists.Draw) -> Record:
    """What ``with_noise`` makes of a record of a feed.

    Philox with the key (seed, epoch) and the record id in the highest word of the counter; the function of a Map draws
    from the generator that is one jump ahead of the decoder's.
    """
    return {"id": record["id"], "x": record["x"] + generator_of(draw, 1).random(4, np.float32)}


def generator_of(draw: lists.Draw, number: int) -> np.random.Generator:
    """The generator of a decoder (0) or of the function of a Map over it (1)."""
    seed, epoch, record_id = draw
    philox = np.random.Philox(key=np.array([seed, epoch], np.uint64), counter=[0, 0, 0, record_id])
    return np.random.Generator(philox.jumped(number) if number else philox)


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
    """What a source does wrong on this host. A worker that is a thread has the same, another process a copy."""

    _here: ClassVar = weakref.WeakValueDictionary[tuple[int, int], "Faults"]()
    _numbers = itertools.count()

    def __init__(self, kind: str = "none", fatal: Any = None, late: bool = False, form: str = "dict") -> None:
        self._key = os.getpid(), next(self._numbers)
        self._here[self._key] = self
        self.kind, self.fatal, self._late = kind, fatal, late  # whether passing faults wait for the first batch too
        self.form = form
        self.released = threading.Event()  # ends the wait of a host that is late
        self.armed = False  # a fatal fault waits for the first batch: constructors read records to identify the source
        self._seen: set[Any] = set()
        self.passing = 0  # faults that have passed
        self.planned: list[tuple[int, int]] = []  # lane, records of a read: whose files were asked for ahead

    def __reduce__(self) -> Any:
        return self._unpickled, (self._key, self.kind, self.fatal, self._late, self.form, self.armed)

    @classmethod
    def _unpickled(cls, key: tuple[int, int], kind: str, fatal: Any, late: bool, form: str, armed: bool) -> Faults:
        found = cls._here.get(key)
        if found is None:
            found = cls(kind, fatal, late, form)
            found.armed = armed
        return found

    def strike(self, token: Any) -> None:
        """Called before record ``token`` is read."""
        if self.armed and token == self.fatal and self.kind == "late":
            self.released.wait(60)
        if self.armed and token == self.fatal and self.kind == "fatal":
            raise Fatal(f"record {token} is gone")
        number = token if isinstance(token, int) else sum(token)
        if self.kind == "transient" and (self.armed or not self._late) and number % 3 == 1 and token not in self._seen:
            self._seen.add(token)
            self.passing += 1
            raise OSError("a passing fault")
        if self.kind in BAD and is_bad(number):
            raise ValueError("a bad record")

    def changed(self, token: Any, record: Record) -> Record:
        """Record ``token`` as this host has it."""
        return formed(self._changed(token, record), self.form) if self.form != "dict" else self._changed(token, record)

    def _changed(self, token: Any, record: Record) -> Record:
        if self.kind == "structure":
            return {**record, "x": np.zeros(4, np.float32 if record["x"].dtype == np.float64 else np.float64)}
        if not self.armed or token != self.fatal or self.kind not in ("replicas", "wide"):
            return record
        x = record["x"].copy()
        if self.kind == "replicas":
            x[1] = 0 if x[1] else 1
        else:
            x[2:] = 2**31 - 1, WIDE  # of which the first still fits
        return {**record, "x": x}


WIDE = 2**40 + 1


def is_bad(record_id: int) -> bool:
    return record_id % 5 == 2


class Records:
    """Random access, one record at a time."""

    def __init__(self, count: int, component: int = 0, faults: Faults | None = None, dtype: str = "float32") -> None:
        self._count, self._component, self._faults, self._dtype = count, component, faults or Faults(), dtype

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, record_id: int) -> Record:
        token = self._component << 48 | int(record_id)
        self._faults.strike(token)
        return self._faults.changed(token, self.record(int(record_id)))

    def record(self, record_id: int) -> Record:
        """A record, without faults."""
        return plain_record(record_id, self._component, self._dtype)

    def fingerprint(self) -> Any:
        return {"records": self._count, "component": self._component}


class RecordsInBatches(Records):
    """Random access, several records at a time, in files."""

    def __getitems__(self, record_ids: Sequence[int]) -> list[Record]:
        return [self[record_id] for record_id in record_ids]

    def shard_lengths(self) -> np.ndarray:
        return np.array(lengths_of_files(self._count), np.int64)

    def lengths(self) -> np.ndarray:
        return np.array([length_of(number) for number in range(self._count)])


class CachedRecords(Records):
    """Records in files that are read through a cache; keeps what is asked of it ahead of the reads."""

    def __init__(self, count: int, component: int = 0, faults: Faults | None = None, dtype: str = "float32") -> None:
        super().__init__(count, component, faults, dtype)
        self.asked: list[list[int]] = []  # record ids of each batch

    def cached_files(self, record_ids: np.ndarray) -> list[CachedFile]:
        self.asked.append(record_ids.tolist())
        return [CachedFile(number) for number in dict.fromkeys((record_ids // 4).tolist())]


@dataclasses.dataclass(frozen=True)
class CachedFile:
    """A file of which the copy is always there."""

    number: int
    cache: object = None
    num_bytes: int = 10
    ahead_bytes: int = 1000
    plan_bytes: int = 1000

    def follow(self, next_use: Any) -> None:
        assert next_use(self) >= 0

    def unfollow(self, next_use: Any) -> None:
        pass

    def is_here(self) -> bool:
        return True

    def fetch(self, next_use: float) -> bool:
        return True


def length_of(record_id: int) -> int:
    """How long a record says it is, by which rows are balanced."""
    return (3 * record_id + 1) % 11


def cost_of(lengths: np.ndarray) -> float:
    """The cost of a row by the lengths of its segments."""
    return float(lengths.sum()) + 5 * len(lengths)


def cost_by(balance: str, lengths: Sequence[int]) -> float:
    """The same, and the costs that are built in."""
    if balance == "function":
        return sum(lengths) + 5.0 * len(lengths)
    return float(sum(length ** {"attention": 2, "tokens": 1}[balance] for length in lengths))


class RaggedRecords(RecordsInBatches):
    """Records of several lengths, for Padded."""

    def record(self, record_id: int) -> Record:
        return {"id": np.int32(record_id + 1), "x": np.full(record_id % 5, record_id + 1, np.float32)}


class RaggedLeaves(RecordsInBatches):
    """Records of two ragged leaves, for Padded."""

    def record(self, record_id: int) -> Record:
        x, y = np.full(record_id % 5, record_id + 1, np.float32), np.arange(record_id % 4, dtype=np.int32)
        return {"id": np.int32(record_id + 1), "x": x, "y": y + record_id}


def pixels_of(number: int) -> np.ndarray:
    """An image of its own size, and colors by which it and its pixels are told apart."""
    height, width = 4 + number % 2, 6 + number % 3
    values = np.arange(height * width * 3).reshape(height, width, 3)
    return (values * 7 + 31 * number).astype(np.uint8)


def encoded(number: int) -> bytes:
    """The same as a PNG."""
    import cv2

    return bytes(cv2.imencode(".png", np.ascontiguousarray(pixels_of(number)[..., ::-1]))[1])


class Images(RecordsInBatches):
    """Records with the bytes of an image."""

    def record(self, record_id: int) -> Record:
        return {"id": np.int32(record_id + 1), "image": np.frombuffer(encoded(record_id), np.uint8)}


def cropped(number: int) -> np.ndarray:
    """The middle of an image, 4 by 6 pixels."""
    return resized(in_middle(pixels_of(number)))


def in_middle(pixels: np.ndarray) -> np.ndarray:
    """The middle of an image, as high or as wide as it."""
    height, width = pixels.shape[:2]
    rows, columns = min(height, round(width / 1.5)), min(width, round(height * 1.5))
    top, left = (height - rows) // 2, (width - columns) // 2
    return pixels[top : top + rows, left : left + columns]


def cropped_at_random(number: int, draw: lists.Draw) -> np.ndarray:
    """The crop of Szegedy et al. of an image, half of them mirrored."""
    rng, pixels = generator_of(draw, 0), pixels_of(number)
    found = resized(in_random_box(pixels, rng))
    return found[:, ::-1] if rng.random() < 0.5 else found


def in_random_box(pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A part of an image of about the shape of 4 by 6 pixels."""
    height, width = pixels.shape[:2]
    shares, bends, places = (
        rng.uniform(0.08, 1, 10),
        rng.uniform(math.log(3 / 4), math.log(4 / 3), 10),
        rng.random((10, 2)),
    )
    for share, bend, (down, right) in zip(shares, np.exp(bends) * 1.5, places, strict=True):
        rows, columns = round(math.sqrt(share * height * width / bend)), round(math.sqrt(share * height * width * bend))
        if 0 < rows <= height and 0 < columns <= width:
            top, left = int(down * (height - rows + 1)), int(right * (width - columns + 1))
            return pixels[top : top + rows, left : left + columns]
    return in_middle(pixels)


def resized(pixels: np.ndarray) -> np.ndarray:
    """Pixels resized to 4 by 6, of which they have at most twice as many."""
    import cv2

    return cv2.resize(np.ascontiguousarray(pixels), (6, 4), interpolation=cv2.INTER_LINEAR_EXACT)


def frames_of(number: int) -> tuple[list[int], list[np.ndarray]]:
    """When the frames of a video are shown, in milliseconds, and their pixels; the last one is shown for 100 ms."""
    times = [0, 100, 250, 300, 500, 550, 700][: 5 + number % 3]
    return times, [np.roll(pixels_of(number), place, 1) for place in range(len(times))]


@functools.lru_cache
def video_of(number: int) -> bytes:
    """The same as a file that loses nothing, with frames that refer to others."""
    import av

    times, frames = frames_of(number)
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("libx264rgb", rate=10, options={"qp": "0"})
        stream.height, stream.width, stream.pix_fmt = *frames[0].shape[:2], "rgb24"
        stream.codec_context.time_base, stream.codec_context.thread_count = Fraction(1, 1000), 1
        for time, pixels in zip(times, frames, strict=True):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()


class Videos(RecordsInBatches):
    """Records with the bytes of a video."""

    def record(self, record_id: int) -> Record:
        return {"id": np.int32(record_id + 1), "image": np.frombuffer(video_of(record_id), np.uint8)}


CLIP = 0.4
"""Seconds of a clip of four frames."""


def clip_at_random(number: int, draw: lists.Draw) -> np.ndarray:
    """A clip from anywhere in a video: the frames shown in the middle of its quarters, which have one crop."""
    rng, (times, frames) = generator_of(draw, 1), frames_of(number)
    begin = rng.random() * ((times[-1] + 100) / 1000 - CLIP)
    shown = [begin + (place + 0.5) * CLIP / 4 for place in range(4)]
    found = [frames[max(i for i, time in enumerate(times) if time <= 1000 * at)] for at in shown]
    # All frames side by side in depth, so that they are cropped alike.
    deep = in_random_box(np.concatenate(found, axis=2), rng)
    clip = [resized(deep[:, :, 3 * place : 3 * place + 3]) for place in range(4)]
    return np.stack([pixels[:, ::-1] for pixels in clip] if rng.random() < 0.5 else clip)


class Documents(RecordsInBatches):
    """Documents of several lengths, some of them empty, for Packed and Buckets."""

    def record(self, record_id: int) -> Record:
        first = 1000 * self._component + 10 * record_id + 1
        return {"tokens": np.arange(first, first + (3 * record_id + 2) % 7, dtype=np.int32)}

    def lengths(self) -> np.ndarray:
        return np.array([len(self.record(number)["tokens"]) for number in range(self._count)])


class DocumentsWithImages(Documents):
    """The same of twice the length, with up to two entries of another leaf."""

    def record(self, record_id: int) -> Record:
        tokens = np.repeat(super().record(record_id)["tokens"], 2)
        count = record_id % 3 if len(tokens) else 0
        return {"tokens": tokens, "images": np.arange(count * 2, dtype=np.float32).reshape(count, 2) + record_id}


RECORDS = {"records": Records, "records_batch": RecordsInBatches, "records_cached": CachedRecords}


def lengths_of_files(count: int) -> list[int]:
    """Records of each file."""
    lengths: list[int] = []
    for size in itertools.cycle((3, 1, 0, 4, 2)):
        if not count:
            return lengths or [0]
        lengths.append(min(size, count))
        count -= lengths[-1]
    raise AssertionError


def leaf(
    make: Callable[[Faults], Any],
    count: int,
    record: Callable[[int], Record],
    component: int = 0,
    in_files: bool = True,
) -> Node:
    """A source at the bottom."""
    return Node(
        make,
        count,
        lambda i, draw: record(i),
        lambda i: frozenset({component << 48 | i}),
        lengths_of_files(count) if in_files else None,
        "",
    )


def leaf_of(kind: type[Records], count: int, component: int = 0, dtype: str = "float32") -> Node:
    record = kind(count, component, dtype=dtype).record
    return leaf(
        lambda faults: kind(count, component, faults, dtype),
        count,
        record,
        component,
        kind not in (Records, CachedRecords),
    )


def mixture_of(source: str, count: int, dtype: str = "float32") -> Node:
    """A mixture of records or documents."""
    kind = Documents if source in ("packed_mixture", "mixture_packed") else RecordsInBatches
    counts = (count, 5, 3)
    a, b, c = (leaf_of(kind, number, component, dtype) for component, number in enumerate(counts))
    if source == "mixture_nested":
        inner = lists.mixture({"a": a, "b": b}, {"a": 1, "b": 1}, 8)
        return lists.mixture({"m": inner, "c": c}, {"m": 2, "c": 1}, 8)
    if source == "mixture_packed":
        a, b = lists.packed(a, 4, block=5), lists.packed(b, 4, "fit")
    weights: Any = {"a": 3, "b": 1}
    if source == "mixture_staged":
        weights = [(0, weights), (2, {"a": 1, "b": 1})]
    takes = source == "mixture_take"
    return lists.mixture(
        {"a": a, "b": b},
        weights,
        8,
        "stop" if source == "mixture_stop" else "repeat",
        {"a": max(1, count // 2)} if takes else None,
        {"b": 2} if takes else None,
    )


def node_of(source: str, count: int, folder: str, dtype: str = "float32") -> Node:
    """A random-access source, without a view."""
    if source in FILES:
        record = tokens_record if source == "tokens" else plain_record
        files = leaf(lambda faults: _file_source(source, count, folder), count, record)
        return lists.mapped(files, mapped) if source == "map_array_record" else files
    if source == "map":
        return lists.mapped(leaf_of(RecordsInBatches, count), mapped)
    if source == "map_rng":
        below = leaf_of(Records, count)
        return dataclasses.replace(
            below,
            make=lambda faults: _sources().Map(below.make(faults), with_noise, batched=True),
            read=lambda i, draw: with_noise_of(below.read(i, draw), draw),
        )
    if source == "padded":
        return lists.mapped(
            leaf_of(RaggedRecords, count),
            padded,
            lambda source: _sources().Padded(source, 6, key="x", mask_key="mask_of"),
        )
    if source == "padded_leaves":
        return lists.mapped(
            leaf_of(RaggedLeaves, count), padded_leaves, lambda source: _sources().Padded(source, {"x": 6, "y": 4})
        )
    if source in IMAGES:
        return images_of(source, count, folder)
    if source in (*PACKED, *LIMITED):
        return packed_of(source, count)
    if source == "buckets":
        return lists.buckets(leaf_of(Documents, count), (2, 4, 6))
    if source == "memory":
        records = [plain_record(number, 0, dtype) for number in range(count)]
        make = functools.partial(_memory, records)
        return leaf(make, count, records.__getitem__, in_files=False)
    if source == "grain_map":
        made = leaf(lambda faults: _grain(count).map(mapped), count, plain_record, in_files=False)
        return dataclasses.replace(made, read=lambda i, draw: mapped(plain_record(i)))
    if source in RECORDS:
        return leaf_of(RECORDS[source], count, dtype=dtype)
    return mixture_of(source, count, dtype)


def _memory(records: Sequence[Record], faults: Faults) -> Any:
    return _sources().Memory(formed(_columns(records), faults.form))


def images_of(source: str, count: int, folder: str) -> Node:
    """Decoded images: crops at random of files, or the middle of what another source has; or clips of videos."""
    if source == "image_files":
        below = leaf(lambda faults: _file_source(source, count, folder), count, plain_record)
        return dataclasses.replace(below, read=lambda i, draw: {"image": cropped_at_random(i, draw)})
    if source == "map_videos":
        below = leaf_of(Videos, count)
        decode = functools.partial(
            _sources().DecodeVideo, 4, (4, 6), seconds=CLIP, start="random", crop="random", flip=True, key="image"
        )
        return dataclasses.replace(
            below,
            make=lambda faults: _sources().Map(below.make(faults), decode()),
            read=lambda i, draw: {"id": np.int32(i + 1), "image": clip_at_random(i, draw)},
        )
    return lists.mapped(
        leaf_of(Images, count),
        lambda record: {**record, "image": cropped(int(record["id"]) - 1)},
        lambda source: _sources().Map(source, _sources().DecodeImage((4, 6), key="image")),
    )


def packed_of(source: str, count: int) -> Node:
    """Packed sequences of documents, of a mixture, or within limits."""
    if source == "packed":
        return lists.packed(leaf_of(Documents, count), 4, block=7)
    if source == "packed_mixture":
        return lists.packed(mixture_of(source, count), 4, "fit", block=7)
    method, length, limits = LIMITED[source]
    documents = leaf_of(DocumentsWithImages if limits.side else Documents, count)
    return lists.packed(documents, length, method, 7, limits)


def padded(record: Record) -> Record:
    count = len(record["x"])
    return {**record, "x": np.append(record["x"], np.zeros(6 - count, np.float32)), "mask_of": np.arange(6) < count}


def padded_leaves(record: Record) -> Record:
    found = {"id": record["id"]}
    for name, length in (("x", 6), ("y", 4)):
        leaf = record[name]
        found[name] = np.append(leaf, np.zeros(length - len(leaf), leaf.dtype))
        found[f"{name}_mask"] = np.arange(length) < len(leaf)
    return found


def tokens_record(number: int) -> Record:
    return {"tokens": np.arange(3 * number, 3 * number + 4, dtype=np.int32) + 1}


def view_of(node: Node, view: str) -> Node:
    """A view of a source."""
    if view == "none":
        return node
    if view == "subset":
        return lists.subset(node, slice(node.count // 5, None, 2))
    if view == "reversed":
        return lists.subset(node, slice(None, None, -1))
    if view == "ids":
        return lists.subset(node, sorted(i * 2 // 3 for i in range(node.count)))
    if view == "sample":
        return lists.sample(node, node.count + node.count // 2, seed=3)
    if view == "concat":
        return lists.concat([node, lists.subset(node, slice(0, 3))])
    if view == "zip":
        return lists.zipped(node)
    try:
        return lists.split_by_shards(node, 0.6, seed=3) if node.shards else lists.split(node, 0.6, seed=3)
    except ValueError:  # a part without files
        return lists.split(node, 0.6, seed=3)


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
        record = self._records[self._next - 1]
        return self._faults.changed((self._lane, int(record["id"])), record)


class LaneWithState(LaneOfRecords):
    """The same with a state, in which a tuple must stay one, and files that are read through a cache."""

    def coming_files(self, num_records: int) -> Iterator[list[CachedFile]]:
        self._faults.planned.append((self._lane, num_records))
        reads = range(self._next, len(self._records), num_records)
        return iter([[CachedFile(self._lane << 48 | start)] for start in reads])

    def get_state(self) -> Any:
        return {"at": (self._next,)}

    def set_state(self, state: Any) -> None:
        assert isinstance(state["at"], tuple)
        self._next = state["at"][0]


def lane_records(
    config_source: str,
    count: int,
    lane: int,
    num_lanes: int,
    epoch: int,
    dtype: str = "float32",
) -> list[Record]:
    """The records of a lane in an epoch, before any function."""
    ids = list(range(lane, count, num_lanes))
    if config_source in ("stream_uneven", "stream_decode") and lane % 3 == 1:
        ids = ids[: len(ids) // 2]
    return [plain_record(number + 200 * epoch, 0, dtype) for number in ids]


class OpenLane:
    """``open`` of a Stream."""

    def __init__(self, source: str, count: int, faults: Faults, dtype: str) -> None:
        self._source, self._count, self._faults, self._dtype = source, count, faults, dtype

    def __call__(self, lane_index: int, num_lanes: int, epoch: int = 0) -> Iterator[Record]:
        records = lane_records(self._source, self._count, lane_index, num_lanes, epoch, self._dtype)
        kind = LaneWithState if self._source in ("stream_state", "stream_uneven") else LaneOfRecords
        return kind(records, lane_index, self._faults)


class LanesOverFiles(OpenLane):
    """A stream of its own kind: `Stream` hides what lanes of a user's function say of files."""

    open = OpenLane.__call__

    def fingerprint(self) -> Any:
        return self._count


def bad_places(records: Sequence[Record]) -> list[int]:
    """Bad records of a lane; never all of them."""
    return [place for place, record in enumerate(records) if place and is_bad(int(record["id"]) - 1)]


class DecodedLanes:
    """Lanes of numbers, which are decoded to records."""

    def __init__(self, count: int, bad: bool) -> None:
        self._count, self._bad = count, bad

    def open(self, lane_index: int, num_lanes: int, epoch: int = 0) -> Iterator[int]:
        records = lane_records("stream_decode", self._count, lane_index, num_lanes, epoch)
        bad = bad_places(records) if self._bad else []
        return iter([-1 if place in bad else int(record["id"]) - 1 for place, record in enumerate(records)])

    def lane_lengths(self, num_lanes: int) -> list[int]:
        return [len(lane_records("stream_decode", self._count, lane, num_lanes, 0)) for lane in range(num_lanes)]

    def decode(self, number: int) -> Record:
        if number < 0:
            raise ValueError("a bad record")
        return plain_record(number)

    def fingerprint(self) -> int:
        return self._count


class Batches:
    """Host batches that start again at each ``iter``."""

    def __init__(self, batches: Sequence[dict[str, np.ndarray]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return iter([jax.tree.map(np.copy, batch) for batch in self._batches])


class BatchesOfAnySize(Batches):
    """Host batches of as many rows as each has, as MaxText's are."""

    rows_may_vary = ends_may_differ = True


class BatchesWithState:
    """An iterator over host batches that has a state, in which a tuple must stay one."""

    def __init__(self, batches: Sequence[dict[str, np.ndarray]]) -> None:
        self._batches, self._next = batches, 0

    def __iter__(self) -> BatchesWithState:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        if self._next >= len(self._batches):
            raise StopIteration
        self._next += 1
        return jax.tree.map(np.copy, self._batches[self._next - 1])

    def get_state(self) -> Any:
        return {"at": (self._next,)}

    def set_state(self, state: Any) -> None:
        assert isinstance(state["at"], tuple)
        self._next = state["at"][0]


# ---------------------------------------------------------------------- scripts


@dataclasses.dataclass
class Phase:
    """One feed on one topology, and what is done with it."""

    topology: Topology
    load: Load
    prefetch: Any
    schedule: tuple[tuple[int, int], ...]
    actions: list[tuple[Any, ...]]
    fatal_host: int | None = None
    listed: tuple[int, ...] = ()  # the hosts of ``load``, also those that are left out now


@dataclasses.dataclass
class Event:
    """What must come of an action: batches, then the end or an error or neither."""

    action: tuple[Any, ...]
    batches: list[Batch] = dataclasses.field(default_factory=list)
    end: bool = False
    failing: tuple[int, ...] | None = None  # hosts that raise their own error; others of the mesh a PeerError
    kind: str = ""
    words: tuple[str, ...] = ()  # what the error of every host says
    text: str | None = None  # a pattern of the whole text of the error of every host, if the model knows it
    lanes: frozenset[int] = frozenset()  # lanes without a record, because of which hosts raise an error
    bad: set[tuple[int, int, int]] = dataclasses.field(default_factory=set)  # record id, epoch, step: after the action
    step: int = 0  # after the action
    position: int = 0
    length: int | None = None  # of the feed, where known
    ids: dict[int, list[int] | None] | None = None  # of the records of some steps, where they have ids
    following: Batch | None = None  # the next batch, by whose shapes the feed describes itself
    read: tuple[list[int], Batch] | None = None  # record ids, and their records as of the first epoch
    sizes: tuple[int, ...] = ()  # of the delivered batches
    segments: list[list[int]] = dataclasses.field(
        default_factory=list
    )  # first step, first position, size: as delivered
    replayed: list[Batch] = dataclasses.field(default_factory=list)  # some of the delivered batches
    model: Any = None  # the stream with the weights that it has after the action
    phase: Phase | None = None  # after the action: the feed may be on another sharding
    total: int | None = None  # records of a random-access stream, unless there is no end or it depends on the steps
    refused: tuple[int, ...] = ()  # hosts on which the action raises a SettingsError
    late: int | None = (
        None  # the host that does not come to a meeting, which the others then raise a StalledError about
    )
    unable: tuple[int, ...] = ()  # hosts that cannot do it, which raise a PlanError; the others a PeerError
    gone: tuple[int, ...] = ()  # hosts that then close their feeds for good
    killed: tuple[int, ...] = ()  # those of them that are killed before
    told: tuple[int, ...] = ()  # hosts that learn it; the others take batches until they learn it from these
    present: int = 0  # number of hosts that have the feed
    added: list[Any] = dataclasses.field(default_factory=list)  # stages of ``set_weights``: first step, weights
    stages: list[list[int]] = dataclasses.field(default_factory=list)  # of a mixture: first step, first position


@dataclasses.dataclass(frozen=True)
class _Weighted:
    """What lanes had delivered when weights were set."""

    delivered: int  # records of a lane that had not ended
    ended: tuple[tuple[int, int], ...]  # lane, its records: of those that had


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a feed is in its stream: batches and their sizes, bad records, stages of ``set_weights``."""

    step: int = 0
    position: int = 0
    sizes: tuple[int, ...] = ()
    bad: set[tuple[int, int, int]] = dataclasses.field(default_factory=set)
    added: lists.Stages = ()
    weighted: _Weighted | None = None  # the last of ``set_weights``, since the beginning


@dataclasses.dataclass
class _Run:
    """A feed while its events are found out.

    Attributes:
      phase: with its sharding now.
      present: hosts that have it.
      place: where it is.
      failed: whether it raises an error.
      begins: whether it has delivered nothing since it was made, set, resharded or given weights.
    """

    phase: Phase
    present: set[int]
    place: _Place = dataclasses.field(default_factory=_Place)
    failed: bool = False
    begins: bool = True


MAX_BATCHES = 6  # of an endless stream, in one action


class Case:
    """A configuration, its sources, and what the model says of it.

    Args:
      config: values of `OPTIONS`.
      folder: where files of sources are written.
      processes: of the job; None for as many as the configuration needs.
    """

    def __init__(self, config: Config, folder: str, processes: int | None = None) -> None:
        self.config, self.folder = config, folder
        self._node: Node | None = None
        if is_random(config["source"]) and config["records"]:
            self._node = view_of(node_of(config["source"], config["records"], folder, config["dtype"]), config["view"])
        resuming = config["script"] in RESUMING
        moves = (resuming and config["source"] not in HOST_BATCHES) or config["reshard"] != "none"
        first_left = int(
            config["reshard"] == "killed" and config["taken"] == 1
        )  # so host 0, which reduces, is killed too
        most = max(config["hosts"], config["resume_hosts"] + first_left if moves else 0)
        self.processes = processes or most + bool(config["outside"])
        first = Topology(self.processes, config["hosts"], config["devices"], config["layout"])
        second = Topology(
            self.processes, config["resume_hosts"], config["devices"], config["resume_layout"], first_left
        )
        if config["source"] in HOST_BATCHES:  # which cannot change their topology
            config = self.config = {**config, "resume_load": "sharded", "resume_batch": "same"}
            second = first
        self.topologies = (first, second) if resuming or moves else (first,)
        shards = math.lcm(*(topology.row_shards for topology in self.topologies))
        self.unit = math.lcm(shards, config["num_lanes"] or 1)
        self.unit *= 2 if self.unit == 1 else 1
        self._savers: dict[str, int] = {}
        self._models: dict[Any, Any] = {}
        self.num_lanes = self._num_lanes()
        while self.unit % self.num_lanes:  # the default of a schedule must divide the sizes of another one
            self.unit = math.lcm(self.unit, self.num_lanes)
            self.num_lanes = self._num_lanes()
        self.phases = self._phases(first, second)
        self.fatal_host, self.fatal = self._choose_fatal()

    # -- settings

    def _schedule(self, batch: str) -> tuple[tuple[int, int], ...]:
        unit = self.unit
        if self.config["source"] == "host_batches_vary":
            return tuple((step, unit * (1 + step % 2)) for step in range(2 * MAX_BATCHES * 4))
        return {
            "unit": ((0, unit),),
            "double": ((0, 2 * unit),),
            "schedule": ((0, unit), (2, 2 * unit), (3, unit)),
        }[batch]

    def settings(self, phase: Phase, host: int = 0) -> dict[str, Any]:
        """The feed's keywords, in a phase on a host."""
        config, topology = self.config, phase.topology
        settings: dict[str, Any] = {
            "global_batch_size": None if config["source"] in UNSIZED else phase.schedule,
            "shuffle": config["shuffle"],
            "seed": SEED,
            "num_epochs": config["num_epochs"],
            "end": config["end"],
            "mask_key": "mask" if config["mask"] else None,
            "num_lanes": None if phase is not self.phases[0] and self._lanes_of_state else config["num_lanes"],
            "load": phase.load if phase.load in ("sharded", "once") else list(topology.readers(phase.load)),
            "prefetch": phase.prefetch,
            "num_threads": config["num_threads"],
            "num_workers": config["num_workers"],
            "check_replicas": config["check_replicas"],
            "balance": cost_of if config["balance"] == "function" else config["balance"],
            "bad_records": BAD.get(config["fault"]),
        }
        if config["fault"] == "settings" and host == self.odd_host:
            settings |= self.other_settings
        if config["fault"] == "unopened" and host == self.odd_host:
            settings["end"] = "never"
        return settings

    @property
    def other_settings(self) -> dict[str, Any]:
        """What the odd host has otherwise than the others."""
        end = {"end": "drop" if self.config["end"] == "pad" else "pad"}
        return {0: {"seed": SEED + 1}, 1: {"num_epochs": 3}, 3: {"mask_key": None} if self.config["mask"] else end}[
            self.config["taken"]
        ]

    def _num_lanes(self) -> int:
        return self.config["num_lanes"] or self._default_num_lanes(self._schedule(self.config["batch"]))

    def _default_num_lanes(self, schedule: Sequence[tuple[int, int]]) -> int:
        """The largest common divisor of the sizes up to 64 (an eighth of the shards)."""
        shards = [1] * 8 * 64
        if self.config["shuffle"] in WINDOWS and self._node is not None:
            shards = self._node.shards_for(WINDOWS[self.config["shuffle"]])
        return lists.default_num_lanes([size for _, size in schedule], shards)

    @property
    def _lanes_of_state(self) -> bool:
        """Whether the second feed gets its number of lanes from the state of the first, if that can be made."""
        return self.config["resume_lanes"] == "of state" and self.refused is None

    def num_lanes_before_state(self, phase: Phase) -> int:
        """The number of lanes of a feed of this phase, until a state brings the number of the first phase."""
        return self.settings(phase)["num_lanes"] or self._default_num_lanes(phase.schedule)

    def _phases(self, first: Topology, second: Topology) -> list[Phase]:
        config, taken = self.config, self.config["taken"]
        schedule = self._schedule(config["batch"])
        other = {"unit": "double", "double": "unit", "schedule": "double"}[config["batch"]]
        if config["source"] in HOST_BATCHES or config["script"] == "future":  # it reads before it restores the lanes
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
        look = [("len",), ("ids",), ("read",), ("replay",), ("spec",)]
        if config["fault"] == "settings":  # which says something else on one of the hosts
            look = []
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
        self._put_midway(phases, first, second)
        return phases

    def _put_midway(self, phases: list[Phase], first: Topology, second: Topology) -> None:
        """Puts into a phase that the feed is resharded or gets other weights."""
        config = self.config
        phase = phases[-1 if config["midway"] == "last" else 0]
        weights, others, rest = OTHER_WEIGHTS[config["source"] == "mixture_nested"]
        set_weights: list[tuple[Any, ...]] = {
            "none": [],
            "next": [("weights", weights, None)],
            "later": [("weights", weights, 2)],
            "replaced": [("weights", weights, 1), ("weights", others, 2)],
            "twice": [("weights", weights, None), ("take", 1), ("weights", others, None)],
            "away": [("weights", others, None), ("take", 2), ("weights", rest, None), ("replay",)],
        }[config["weights"]]
        there, back = (second, first) if phase.topology is first else (first, second)
        move: list[tuple[Any, ...]] = {
            "none": [],
            "there": [("reshard", there)],
            "back": [("reshard", there), ("take", 2), ("reshard", back)],
            "ahead": [("ahead",), ("reshard", there)],
            "lost": [("reshard", there, "lost")],
            "killed": [("reshard", there, "killed")],
            "fails": [("reshard", there, "fails"), ("take", 1), ("reshard", there)],
            "all fail": [("reshard", there, "all fail"), ("take", 1), ("reshard", there)],
            "late": [("reshard", there, "late"), ("reshard", there)],
        }[config["reshard"]]
        if not set_weights and not move:
            return
        if config["taken"] == 0 and config["reshard"] != "ahead":  # which is no place to set weights
            midway = [*move[:1], *set_weights, *move[1:]]
        else:
            midway = [*set_weights, *move] if config["taken"] == 1 else [*set_weights, ("take", 1), *move]
        if config["fault"] != "settings":
            midway += [("ids",), ("replay",), ("spec",)]
        takes = [number for number, action in enumerate(phase.actions) if action[0] == "take"]
        if config["midway"] == "last" or len(phases) == len(takes) == 1:
            at = takes[-1] if config["script"] != "after end" else takes[-2]
            midway = midway if config["midway"] == "first" else [("take", 1), *midway]
        else:
            at = takes[0] + (2 if config["script"] == "past" else 1)  # the state of before is kept
        phase.actions[at:at] = midway
        if set_weights and config["fault"] != "settings":
            for one in phases:
                one.actions.append(("replay",))

    # -- the model

    @property
    def model(self) -> Any:
        """The stream of this configuration, by the reference."""
        return self._model_of((), Steps((), self.phases[0].schedule), None)

    def _model_before_state(self, phase: Phase) -> Any:
        """The stream of a feed of this phase until it has a state."""
        num_lanes = self.num_lanes_before_state(phase)
        return self.model if num_lanes == self.num_lanes else self._make_model((), (), None, num_lanes)

    def _model_of(self, added: lists.Stages, steps: Steps, weighted: _Weighted | None) -> Any:
        """The stream with stages that ``set_weights`` has added."""
        starts = tuple(steps.position_of(step) for step, _ in added)
        key = str(added), starts, weighted
        if self.config["source"] != "stream_mixture":
            key = str(added)
        if key not in self._models:
            self._models[key] = self._make_model(added, starts, weighted)
        return self._models[key]

    def _make_model(
        self, added: lists.Stages, starts: Sequence[int], weighted: _Weighted | None, num_lanes: int | None = None
    ) -> Any:
        config, source = self.config, self.config["source"]
        pad = config["end"] == "pad"
        if source in HOST_BATCHES:
            topology = self.topologies[0]
            made = [self._host_lists(host) for host in range(topology.hosts)]
            batches = [functools.partial(self._host_batch, one) for one in made]
            return HostLists(batches, lambda host, size: topology.rows_of(host, size, "sharded"), pad, not any(made))
        if source in STREAMS:
            stages = [(start, weights) for start, (_, weights) in zip(starts, added, strict=True)]
            return Lanes(self.num_lanes, functools.partial(self._lane, stages=stages, weighted=weighted), pad)
        assert self._node is not None
        shuffle, size = config["shuffle"], self._schedule(config["batch"])[0][1]
        settings = lists.Settings(
            WINDOWS.get(shuffle, shuffle), SEED, config["num_epochs"], size, num_lanes or self.num_lanes, added
        )
        found = self._node.ordered(settings)

        def bad(record_id: int) -> bool:
            return config["fault"] in BAD and any(map(is_bad, found.origin(record_id)))

        def cost(record_id: int) -> float | list[int]:
            if source == "records_batch":
                return cost_by(config["balance"], [length_of(number) for number in found.origin(record_id)])
            record = found.value(record_id, 0)
            kind, shards = LIMITED[source][2].sequence_order or ("", 1) if source in LIMITED else ("", 1)
            if kind == "zigzag" and config["balance"] == "attention":  # pairs of tokens that attend to each other
                pairs = np.where(record["segment_ids"] > 0, record["positions"] + 1, 0)
                return pairs.reshape(shards, -1).sum(1).tolist()
            return cost_by(config["balance"], np.bincount(record["segment_ids"])[1:].tolist())

        return RandomAccess(
            found.order, found.value, pad, bad, found.origin, found.first, cost if config["balance"] else None
        )

    def outlasts(self, lane: int, count: int) -> bool:
        """Whether a lane has more than ``count`` records."""
        return any(total > count for total in itertools.accumulate(map(len, self._lane(lane))))

    def _lane(self, lane: int, stages: lists.Stages = (), weighted: _Weighted | None = None) -> Iterator[list[Record]]:
        """The records of a lane, a list per epoch; of a mixture with stages from positions on."""
        config = self.config
        if config["source"] == "stream_mixture":
            yield from self._mixture_lane(lane, stages, weighted or _Weighted(0, ()))
            return
        epochs = itertools.count() if config["num_epochs"] is None else range(config["num_epochs"])
        for epoch in epochs:
            shown = 0 if config["source"] == "grain_iter" else epoch  # which does not know the epoch
            records: list[Any] = lane_records(
                config["source"], config["records"], lane, self.num_lanes, shown, config["dtype"]
            )
            if config["source"] == "stream_decode" and config["fault"] in BAD:
                for place in bad_places(records):
                    records[place] = reference.Bad(lane << 48 | place, epoch)
            if config["source"] == "stream_map":
                records = [new for record in records if (new := kept(record)) is not None]
            if config["source"] == "shuffle_buffer":
                records = in_windows(records, max(2, 8 // self.num_lanes), (SEED, epoch, lane))
            if not records and config["num_epochs"] != 1:
                raise reference.Refused("SourceError", "an epoch without records")
            yield records

    def _mixture_lane(self, lane: int, stages: lists.Stages, weighted: _Weighted) -> Iterator[list[Record]]:
        """A lane of a mixture of the stream a and the records b, which is mixed from that lane of each.

        It ends when each component of the last stage has been read in full and is drawn once more. Weights that are set
        later change neither what it has delivered nor that it has ended.
        """
        delivered, ended = weighted.delivered, dict(weighted.ended).get(lane)
        epochs = self.config["num_epochs"]
        all_stages = sorted({0: {"a": 3, "b": 1}, **{start // self.num_lanes: of for start, of in stages}}.items())
        blocks = reference.Blocks(
            [shares(weights, ["a", "b"], 8) for _, weights in all_stages],
            [start for start, _ in all_stages],
            reference.key_of(SEED, reference.LANE_LAYOUT, lane),
        )
        of_a = functools.partial(lane_records, "stream", self.config["records"], lane, self.num_lanes)
        of_b = [plain_record(number, 1) for number in range(lane, 40, self.num_lanes)]
        read: list[list[Record]] = [[], []]
        begun = [0, 0]  # epochs of each component
        decide = [number for number, name in enumerate("ab") if all_stages[-1][1].get(name)]
        for position in itertools.count():
            if position == ended:
                return
            if epochs is not None and position >= delivered and all(begun[number] > epochs for number in decide):
                return
            component, number = blocks[position]
            while number >= len(read[component]):
                more = of_b if component else of_a(begun[0])
                after = [times + (number == component) for number, times in enumerate(begun)]
                if epochs is not None and position >= delivered and all(after[number] > epochs for number in decide):
                    return
                if not more:
                    raise reference.Refused("SourceError", "a component without records")
                read[component] += more
                begun[component] += 1
            yield [read[component][number]]

    def _host_lists(self, host: int) -> list[list[Record]]:
        """The batches of a host in an epoch: hosts have different numbers of them, the last one short."""
        topology, schedule = self.topologies[0], self.phases[0].schedule
        steps = Steps((), schedule)
        held = [topology.rows_of(number, schedule[0][1], "sharded") for number in range(topology.hosts)]
        part = sorted({tuple(rows) for rows in held}).index(tuple(held[host]))  # the same rows: the same batches
        count = self.config["records"] // topology.hosts + (part % 2) * 2 if self.config["records"] else 0
        if self.config["num_epochs"] != 1 and self.config["records"]:
            count = max(1, count)  # an epoch without a batch cannot be repeated
        if self.config["source"] in UNSIZED and count:
            count = max(len(held[host]), count)  # the first batch says how large the global batch is
        records = [plain_record(number, part, self.config["dtype"]) for number in range(count)]
        found: list[list[Record]] = []
        while records:
            rows = len(topology.rows_of(host, steps.size(len(found)), "sharded"))
            found.append(records[:rows])
            records = records[rows:]
        if self.config["source"] == "host_batches_vary" and found:  # every batch is whole
            last = len(topology.rows_of(host, steps.size(len(found) - 1), "sharded"))
            found[-1] = found[-1] if len(found[-1]) == last else []
        return [batch for batch in found if batch]

    def _host_batch(self, batches: list[list[Record]], step: int) -> list[Record] | None:
        """The batch of a host at a step: its passes one after the other, with ``"drop"`` without the short batches."""
        epochs = self.config["num_epochs"]
        rows = len(self.topologies[0].rows_of(0, self.phases[0].schedule[0][1], "sharded"))  # as many as of any host
        whole = [one for one in batches if self.config["end"] == "pad" or len(one) >= rows]
        if batches and not whole and epochs is None:
            raise reference.Refused("SourceError", "an epoch without a batch that is whole")
        if not whole or (epochs is not None and step >= epochs * len(whole)):
            return None
        return whole[step % len(whole)]

    @property
    def odd_host(self) -> int:
        """The host of a fault that only one has: the one that others follow, or the last."""
        return 0 if self.config["taken"] == 1 and self.config["fault"] in ODD else self.phases[0].topology.hosts - 1

    def _choose_fatal(self) -> tuple[int | None, Any]:
        """The host that fails, and the record at which it does: one that it reads in the first phase, not the first."""
        if self.config["fault"] not in ("fatal", "late", "replicas", "wide") or self.refused:
            return None, None
        phase = self.phases[0]
        host = self.odd_host
        model = self.model
        steps = Steps((), phase.schedule)
        showing: list[Any] | None = None
        for step in (1, 2, 0):
            try:
                batch = model.batch(step, steps)
            except reference.Refused:
                return None, None
            if batch is None:
                continue
            for row in self.phases[0].topology.rows_of(host, steps.size(step), phase.load):
                token = batch.tokens[row] if row < len(batch.tokens) else None
                if isinstance(token, frozenset):  # not of those that show the structure, also to a host without rows
                    showing = self._showing(model, steps) if showing is None else showing
                    token = max(token.difference(*showing), default=None)
                if token is not None:
                    phase.fatal_host = host
                    return host, token
        return None, None

    @staticmethod
    def _showing(model: RandomAccess, steps: Steps) -> list[Any]:
        """What is read of records that show the structure: the first of all, and of the step at which a feed begins."""
        found = [model.origin(model.first)]
        for step in range(4):
            if (batch := model.batch(step, steps)) is not None:
                first, _ = model.order.at(steps.position_of(step), steps)  # its row may be another, in balanced order
                found += [model.origin(first), *batch.tokens[:1]]
        return found

    def faults(self, phase: Phase, host: int) -> Faults:
        """What goes wrong in a phase on a host."""
        fatal = self.fatal if phase.fatal_host == host else None
        if self.config["fault"] in ODD and host != self.odd_host:
            return Faults(form=self.config["form"])
        if fatal is not None and self.config["source"] == "stream_map":
            fatal = fatal[0], fatal[1] // 3  # the record before the function
        late = self.config["source"] in LIMITED  # which reads many records at once to count entries
        return Faults(self.config["fault"], fatal, late, self.config["form"])

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
        tokens = [batch.tokens[row] for row in mine if row < len(batch.tokens)]
        hit = any(self.fatal in token if isinstance(token, frozenset) else token == self.fatal for token in tokens)
        return (host,) if hit else ()

    @functools.cached_property
    def events(self) -> list[list[Event]]:
        """What every host must see, phase by phase."""
        if self.refused is not None:
            return [[] for _ in self.phases]
        saved = dict[str, _Place]()
        result: list[list[Event]] = []
        for phase in self.phases:
            present = set(range(self.processes) if self.can_be_outside(phase) else phase.topology.members)
            run, events = _Run(phase, present), list[Event]()
            for action in phase.actions:
                if action[0] == "set" and action[1] not in saved:
                    break  # the phase before it failed
                if run.failed and action[0] != "reshard":  # which works after an error too
                    continue
                if action[0] == "reshard" and not run.present >= {*action[1].members}:
                    continue  # a host that it needs has no feed
                events.append(self._play(run, action, saved))
                run.failed = run.failed or events[-1].failing is not None
            if events and self.config["fault"] not in ODD:
                events.append(self._play(run, ("merge",), saved))
            result.append(events)
        return result

    def _play(self, run: _Run, action: tuple[Any, ...], saved: dict[str, _Place]) -> Event:
        """What comes of an action."""
        event = Event(action, present=len(run.present))
        if action[0] == "set":
            run.place = saved[action[1]]
        elif action[0] == "reset":
            run.place = _Place(added=run.place.added)
        elif action[0] == "reshard":
            before, run.phase = run.phase, self._reshard(event, run.phase, run.present)
            if event.killed:
                self._find_killed(event, run, before)
            run.failed = run.failed and bool(event.refused or event.unable)
            run.present -= set(event.gone)
        elif action[0] == "weights":
            run.place = self._set_weights(event, run.phase, run.place, run.present)
        elif action[0] == "save":
            saved[action[1]], self._savers[action[1]] = run.place, len(run.present)
        run.begins |= action[0] in ("set", "reset", "reshard", "weights")
        place, phase = run.place, run.phase
        steps = Steps(place.sizes, phase.schedule)
        event.model, event.bad = self._model_of(place.added, steps, place.weighted), place.bad
        if action[0] == "take":
            self._take(event, event.model, phase, place.step, place.position, place.sizes, action[1], run.begins)
            run.begins &= not event.batches
            sizes = tuple(steps.size(number) for number in range(event.step))
            place = dataclasses.replace(place, step=event.step, position=event.position, sizes=sizes, bad=event.bad)
        elif action[0] == "ahead":  # of which nothing remains
            self._take(event, event.model, phase, place.step, place.position, place.sizes, 1, run.begins)
            event.end, event.failing, event.bad = False, None, place.bad
        run.place, steps = place, Steps(place.sizes, phase.schedule)
        event.step, event.position, event.phase = place.step, place.position, phase
        event.sizes, event.segments = place.sizes, segments_of(place.sizes)
        if isinstance(event.model, RandomAccess) and self.config["source"] != "mixture_staged" and not place.added:
            event.total = event.model.order.total_of(steps)
        if self.config["source"] == "host_batches_vary":  # all as large as the first, for the state
            event.segments = event.segments[:1]
        event.added = [[step, dict(weights)] for step, weights in place.added]
        first = {0, *(step for step, _ in place.added), *([2] if self.config["source"] == "mixture_staged" else [])}
        event.stages = [[step, steps.position_of(step)] for step in sorted(first)]
        self._look(event, steps)
        return event

    def _reshard(self, event: Event, phase: Phase, present: set[int]) -> Phase:
        """The feed on another sharding; fills in who is refused, and who leaves."""
        topology, load, listed = event.action[1], phase.load, phase.listed
        if load not in ("sharded", "once"):
            listed = listed or phase.topology.readers(load)
            load = tuple(host for host in listed if host in topology.members)
            if not load:
                event.refused = tuple(present)
                return phase
        left_out = tuple(host for host in present if host not in topology.members)
        # A stream that no host can follow.
        alone = (self.config["source"] in STREAMS and topology.hosts == 1) or self.config["feed"] == "remote"
        if event.action[-1] == "late":
            event.late = 0 if self.config["taken"] == 1 else topology.hosts - 1
            return phase
        if event.action[-1] in ("fails", "all fail"):
            fails = range(topology.hosts)
            event.unable = tuple(fails) if event.action[-1] == "all fail" else (fails[-1],)
            event.refused = left_out if alone else ()
            return phase
        if event.action[-1] == "killed":
            event.killed = tuple(host for host in left_out if host in phase.topology.members)
        if alone:
            event.refused = tuple(host for host in left_out if host not in event.killed)
            event.gone = left_out
        elif event.action[-1] in ("lost", "killed"):
            event.gone = tuple(host for host in left_out if host in phase.topology.members)
        return dataclasses.replace(phase, topology=topology, load=load, listed=listed)

    def _find_killed(self, event: Event, run: _Run, before: Phase) -> None:
        """What hosts do until they learn that others were killed: which they learn from a host that has called reshard."""
        left = [host for host in before.topology.members if host in run.phase.topology.members]
        event.told = tuple(range(self.processes))
        # Or rows would move between hosts that are at other steps, or controllers make feeds at other steps.
        if before.load != "sharded" or self.config["feed"] == "remote":
            return
        place, coming = run.place, Event(event.action)
        model = self._model_of(place.added, Steps(place.sizes, before.schedule), place.weighted)
        self._take(coming, model, before, place.step, place.position, place.sizes, MAX_BATCHES * 4, run.begins)
        if coming.failing is None:
            event.told, event.batches = (left[-1 if self.config["taken"] else 0],), coming.batches

    def _set_weights(self, event: Event, phase: Phase, place: _Place, present: set[int]) -> _Place:
        """Where the stream is with another stage of weights; fills in who is refused."""
        _, weights, later = event.action
        added = (*(stage for stage in place.added if stage[0] < place.step), (place.step + (later or 0), weights))
        steps = Steps(place.sizes, phase.schedule)
        weighted = None
        if self.config["source"] == "stream_mixture":
            before, delivered = self._model_of(place.added, steps, place.weighted), steps.position_of(place.step)
            delivered //= self.num_lanes
            counts = [(lane, len(before.upto(lane, delivered))) for lane in range(self.num_lanes)]
            weighted = _Weighted(delivered, tuple(one for one in counts if one[1] < delivered))
        else:
            total, padded = self._model_of(added, steps, None).order.total_of(steps), steps.position_of(place.step)
            # The end of what has been delivered cannot change.
            if total is not None and (total < place.position or (padded > place.position and total != place.position)):
                event.refused = tuple(present)
                return place
        return dataclasses.replace(place, added=added, weighted=weighted)

    def _look(self, event: Event, steps: Steps) -> None:
        """What is asked about a feed that stands still."""
        model, step, kind = event.model, event.step, event.action[0]
        if kind == "len" and isinstance(model, RandomAccess):
            event.length = model.length(steps)
        if kind == "ids" and isinstance(model, RandomAccess):
            batches = {number: model.batch(number, steps) for number in {0, 1, step, step + 1}}
            event.ids = {number: batch and batch.ids for number, batch in batches.items()}
        readable = self.config["fault"] in ("none", "transient")
        if kind == "spec" and self.config["source"] in HOST_BATCHES:
            # Each host describes its own batches, if it has a further one; once it knows their size, that of every batch.
            lists_of_hosts = [self._host_lists(host) for host in range(self.topologies[0].hosts)]
            if all(map(any, lists_of_hosts)) and step == 0 and self.config["source"] != "host_batches_vary":
                event.following = self._batch_if_any(model, 0, steps)
        if kind == "spec" and self.config["source"] not in HOST_BATCHES and readable:
            # A stream has records of one shape, and may have ended.
            places = (
                (step, 0) if self.config["source"] in STREAMS and not self._refuses(model, step, steps) else (step,)
            )
            event.following = next(filter(None, (self._batch_if_any(model, at, steps) for at in places)), None)
            if event.following is not None and len(event.following.rows) != steps.size(step):
                event.following = None
        if kind == "read" and isinstance(model, RandomAccess) and readable:
            first = model.batch(0, Steps((), steps.schedule)) or model.batch(step, steps)
            if first is not None and first.ids is not None:
                ids = first.ids[:3]
                event.read = ids, Batch(0, [model.value(one, 0) for one in ids], 0)
        may_replay = self.config["source"] not in HOST_BATCHES and self.config["fault"] in ("none", "transient", "bad")
        if kind == "replay" and may_replay:
            every = self.config["weights"] != "none"  # which may end lanes at any step
            some = range(step) if every else sorted({0, step // 2, step - 1} & {*range(step)})
            event.replayed = [model.batch(number, steps) for number in some]

    def _refuses(self, model: Any, step: int, steps: Steps) -> bool:
        try:
            model.batch(step, steps)
        except reference.Refused:
            return True
        return False

    def _batch_if_any(self, model: Any, step: int, steps: Steps) -> Batch | None:
        try:
            return model.batch(step, steps)
        except reference.Refused:
            return None

    def _take(
        self,
        event: Event,
        model: Any,
        phase: Phase,
        step: int,
        position: int,
        sizes: tuple[int, ...],
        count: int,
        begins: bool,
    ) -> None:
        """What comes of taking batches from ``step`` on."""
        steps = Steps(sizes, phase.schedule)
        event.step, event.position = step, position
        if self._begins_with_odd_host(event, phase):
            return
        for _ in range(min(MAX_BATCHES if self.endless else count, count)):
            try:
                batch = model.batch(event.step, steps)
            except reference.Refused as refused:
                event.lanes = self._empty_lanes()
                event.failing, event.kind = self._hosts_of(phase, event.lanes), refused.kind
                return
            if batch is None:
                event.end = True
                return
            if self._of_odd_host(event, phase, batch):
                return
            if self.config["fault"] == "fatal" and (failing := self.failing(phase, batch)):
                # The classes of a source's errors are not known beside the accelerators.
                event.failing, event.kind = failing, "RuntimeError" if self.config["feed"] == "remote" else "Fatal"
                event.words = (f"record {self.faults(phase, failing[0]).fatal} is gone",)
                return
            if (
                self.config["form"] == "registered"
                and begins
                and not event.batches
                and self._lacks_structure(phase, batch)
            ):
                event.failing, event.kind = tuple(phase.topology.members), "SourceError"
                event.words = ("a host has no record of its own", "cannot be described to other hosts", "Boxed")
                return
            found = event.bad | set(batch.bad)
            limit = BAD.get(self.config["fault"], 1.0)
            if batch.position >= 1 / limit and len(found) > limit * batch.position:
                event.failing, event.kind = tuple(phase.topology.members), "SourceError"
                event.text = self._too_many(phase, batch, len(found), limit)
                return
            event.bad = found
            event.batches.append(batch)
            event.step, event.position = event.step + 1, batch.position

    def _too_many(self, phase: Phase, batch: Batch, count: int, limit: float) -> str:
        """A pattern of the error of too many bad records: it names the last one that some host has reported."""
        last = r"host \d+, record \d+" if phase.topology.hosts > 1 else r"record \d+"
        if phase.topology.hosts == 1 and batch.bad:
            last = f"record ({'|'.join(str(one) for one, _, _ in batch.bad)})"
        return (
            f"{count:,} of the {batch.position:,} records up to step {batch.step} are bad, a fraction of "
            rf"{count / batch.position:.2g}; bad_records=SkipBad\(max_fraction={limit:g}\) allows {limit:g}"
            rf"( \(last: {last}: ValueError: a bad record\))?"
            r"\. Check the data; raise max_fraction only if so many bad records are expected\."
        )

    def _begins_with_odd_host(self, event: Event, phase: Phase) -> bool:
        """Whether hosts cannot begin because one of them is not like the others; fills in how."""
        fault, odd, everyone = self.config["fault"], self.odd_host, tuple(phase.topology.members)
        if fault == "settings":
            name, value = next(iter(self.other_settings.items()))
            usual = self.settings(phase, len(everyone))[name]
            event.failing, event.kind = everyone, "AgreementError"
            shown = self._shown(everyone, json.dumps(value), json.dumps(usual))
            event.text = re.escape(f"hosts differ in {name} ({shown}). Start all hosts with the same ") + ".*"
        elif fault == "unopened":
            event.failing, event.kind = (odd,), ""
            event.words = (f"host {odd} failed before its first batch: SettingsError: end='never'",)
        elif fault == "structure" and self._batch_if_any(self.model, 0, Steps((), phase.schedule)) is not None:
            event.failing, event.kind = everyone, "AgreementError"
            x, usual = PATHS[self.config["form"]], leaf_x(1, self.config["dtype"]).dtype
            values = ("float32" if usual == "float64" else "float64", usual.str if usual.str[0] == ">" else usual.name)
            others = "['id'] int32[], " + ("['mask'] bool[], " if self.config["mask"] else "")
            shown = self._shown(everyone, *(f"{others}{x} {value}[4]" for value in values))
            text = f"hosts read records of different structure ({shown}). Start all hosts with the same source."
            event.text = re.escape(text)
        return event.failing is not None

    def _shown(self, everyone: Sequence[int], odd: str, usual: str) -> str:
        """What an error shows of hosts of which one has another value: those with the value of host 0 come first."""
        others = [host for host in everyone if host != self.odd_host]
        shown = [f"{_shown_hosts(others)}: {usual}", f"{_shown_hosts([self.odd_host])}: {odd}"]
        return "; ".join(shown if self.odd_host else reversed(shown))

    def _of_odd_host(self, event: Event, phase: Phase, batch: Batch) -> bool:
        """Whether hosts stop before a batch because one of them is not like the others; fills in how."""
        fault, odd, everyone = self.config["fault"], self.odd_host, tuple(phase.topology.members)
        if fault == "replicas" and (found := self._different_replica(phase, batch.step)) is not None:
            first, second = sorted((odd, 0 if odd else 1))
            event.failing, event.kind = everyone, "AgreementError"
            event.words = (
                f"hosts {first} and {second} hold the same rows but read different bytes ",
                f"(step {found}, leaf {PATHS[self.config['form']]}[0:{Steps((), phase.schedule).size(found)}, 0:4]). ",
            )
        elif fault == "late" and self.failing(phase, batch):
            event.failing, event.kind, event.words = everyone, "StalledError", ()
        elif fault == "wide" and self.failing(phase, batch):
            event.failing, event.kind = (odd,), "SourceError"
            event.words = (
                f"leaf {PATHS[self.config['form']]} of dtype int64 holds {WIDE} at (",
                ", 3), which does not fit",
            )
        return event.failing is not None

    def _different_replica(self, phase: Phase, step: int) -> int | None:
        """The step of the window that begins at ``step`` at which the rows of hosts differ; four steps are compared."""
        windows = {0: range(1), 1: range(1, 3), 3: range(3, 4)}
        for number in windows.get(step, ()):
            batch = self.model.batch(number, Steps((), phase.schedule))
            if batch is not None and self.failing(phase, batch):
                return number
        return None

    def _empty_lanes(self) -> frozenset[int]:
        """The lanes without a record whose epochs would be repeated."""
        if self.config["source"] in HOST_BATCHES or (
            self.config["num_epochs"] == 1 and self.config["source"] != "stream_mixture"
        ):
            return frozenset()
        empty = set()
        for lane in range(self.num_lanes):
            try:
                Lanes(1, lambda _, lane=lane: self._lane(lane), True).batch(0, Steps((), ((0, 1_000),)))
            except reference.Refused:
                empty.add(lane)
        return frozenset(empty)

    def _hosts_of(self, phase: Phase, lanes: frozenset[int]) -> tuple[int, ...]:
        """The hosts that read one of some lanes; all hosts if there are none."""
        if not lanes:
            return tuple(range(self.processes))
        return tuple(host for host in phase.topology.members if self.lanes_of(phase, host) & lanes)

    def warnings_at_first(self, phase: Phase) -> list[tuple[Any, ...]]:
        """What every host warns of when it makes its feed: records that the settings leave out."""
        config, first = self.config, phase.schedule[0][1]
        if is_random(config["source"]):
            model, steps = self._model_before_state(phase), Steps((), phase.schedule)
            return [(model.order.total_of(steps), first)] if model.length(steps) == 0 else []
        if config["source"] != "stream_decode" or config["end"] != "drop" or config["num_epochs"] is None:
            return []
        num_lanes = self.num_lanes_before_state(phase)
        lengths = DecodedLanes(config["records"], False).lane_lengths(num_lanes)
        delivered = min(lengths) * num_lanes
        if max(lengths) <= min(lengths) + 1 or delivered > 0.99 * sum(lengths):
            return []
        lost = 100 * (1 - delivered / sum(lengths))
        return [(lost, lengths.index(min(lengths)), num_lanes, min(lengths), max(lengths))]

    def warning_at_end(self, phase: Phase, host: int, event: Event, first_step: int) -> tuple[Any, ...] | None:
        """What a host warns of at the end of a stream: that its shortest lane has ended before others of its lanes.

        Those are its lanes from ``first_step`` on, where it has last opened them.
        """
        config = self.config
        if config["source"] not in STREAMS or config["end"] != "drop" or config["num_epochs"] is None:
            return None
        if config["source"] == "grain_iter":  # which knows the lengths of its lanes
            return None
        steps = Steps(event.sizes, phase.schedule)
        start, each = steps.position_of(event.step) // self.num_lanes, steps.size(event.step) // self.num_lanes
        mine = sorted(self.lanes_of(phase, host, first_step))
        lengths = {lane: len(event.model.upto(lane, start + each)) for lane in mine}
        longer = [lane for lane in mine if lengths[lane] == start + each]
        if len(longer) == len(mine) or not longer:
            return None
        shortest = min(mine, key=lengths.__getitem__)
        counted = config["source"] == "stream_decode" and DecodedLanes(config["records"], False).lane_lengths(
            self.num_lanes
        )
        if counted and lengths[shortest] >= config["num_epochs"] * counted[shortest]:
            return None
        read = sum(lengths.values()) - steps.position_of(event.step) * len(mine) // self.num_lanes
        lanes = ", ".join(map(str, longer[:8])) + (", …" if len(longer) > 8 else "")
        return shortest, self.num_lanes, f"{lengths[shortest]:,}", lanes, f"{read:,}"

    def asked_ahead(self, phase: Phase, host: int, count: int) -> list[list[int]]:
        """The record ids of a host's first batches, whose files are fetched ahead."""
        found: list[list[int]] = []
        while (
            len(found) < count
            and (batch := self._batch_if_any(self.model, len(found), Steps((), phase.schedule))) is not None
        ):
            assert batch.ids is not None
            rows = self.rows_read(phase, host, len(batch.rows))
            found.append([batch.ids[row] for row in rows if row < len(batch.ids)])
        return found

    def rows_read(self, phase: Phase, host: int, size: int) -> list[int]:
        """The rows of a batch that a host reads."""
        return phase.topology.rows_of(host, size, phase.load)

    def shows_structure(self, phase: Phase, host: int, batch: Batch) -> bool:
        """Whether a host has a record of a batch: one of the lanes of its rows, even if another host holds its row."""
        rows = self.rows_read(phase, host, len(batch.rows))
        if self.config["source"] in STREAMS:
            each = len(batch.rows) // self.num_lanes
            lanes = {row // each for row in rows}
            rows = [row for row in range(len(batch.rows)) if row // each in lanes]
        return is_random(self.config["source"]) or any(batch.rows[row] is not None for row in rows)

    def _lacks_structure(self, phase: Phase, batch: Batch) -> bool:
        """Whether some host would learn from others what a record is, and no host could tell it."""
        return not all(self.shows_structure(phase, host, batch) for host in phase.topology.members)

    def bad_of(self, phase: Phase, host: int, batch: Batch, first_step: int) -> list[int]:
        """The bad records of a batch that a host finds, which has read from a step on."""
        if self.config["source"] in STREAMS:
            lanes = self.lanes_of(phase, host, first_step)
            return [record_id for record_id, _, _ in batch.bad if record_id >> 48 in lanes]
        mine = set(self.rows_read(phase, host, len(batch.rows)))
        return [one[0] for row, one in zip(batch.replaced, batch.bad, strict=True) if row in mine]

    def num_replaced(self, phase: Phase, host: int, batch: Batch, first_step: int) -> int:
        """How many they are."""
        return len(self.bad_of(phase, host, batch, first_step))

    def lanes_of(self, phase: Phase, host: int, first_step: int = 0) -> set[int]:
        """The lanes that a host reads from a step on: those of its rows, in batches of any of the sizes."""
        stages = phase.schedule
        now = max(first for first, _ in stages if first <= first_step)
        sizes = {size for first, size in stages if first >= now}
        return {
            row // (size // self.num_lanes) for size in sizes for row in phase.topology.rows_of(host, size, phase.load)
        }

    def refused_on(self, phase: Phase, host: int) -> str | None:
        """The class of the error of the constructor on a host, or None."""
        if self.config["fault"] == "unopened" and host == self.odd_host:
            return "SettingsError"
        outside = host not in phase.topology.members
        return "SettingsError" if outside and not self.can_be_outside(phase) else self.refused

    def refusal(self, phase: Phase, host: int) -> tuple[str | None, str]:
        """The setting that the error of the constructor names, and some of its words."""
        if self.config["fault"] == "unopened" and host == self.odd_host:
            return "end", "end='never'; it takes 'drop' or 'pad'."
        if host not in phase.topology.members and self.config["feed"] == "remote":
            return "sharding", "no device of the mesh belongs to this process."
        if host not in phase.topology.members and not self.can_be_outside(phase):
            batches = self.config["source"] in HOST_BATCHES
            alone = f": the stream is read by host {phase.topology.first} alone"
            why = ", so the host batches that it makes" if batches else alone
            return "sharding", f"sharding has no device of this host, {host}{why}"
        return (None, "") if self.refused == "SourceError" else ("num_lanes", "")

    def can_be_outside(self, phase: Phase) -> bool:
        """Whether a host outside of the mesh gets the batches of the others."""
        source = self.config["source"]
        if self.config["feed"] == "remote":
            return False
        return is_random(source) or (source not in HOST_BATCHES and phase.topology.hosts > 1)

    def savers(self, key: str) -> int:
        """The number of hosts that save a state: those that have a feed."""
        return self._savers[key]

    @property
    def endless(self) -> bool:
        return self.config["num_epochs"] is None

    @property
    def refused(self) -> str | None:
        """The class of the error of the constructor, or None."""
        config = self.config
        if is_random(config["source"]) and config["records"] == 0:
            return "SourceError"
        fewest = self._node.fewest if self._node is not None else None
        if fewest is not None and config["shuffle"] in WINDOWS and fewest * config["num_epochs"] < self.num_lanes:
            return "SettingsError"
        return None

    # -- the real thing

    def source(self, phase: Phase, host: int, faults: Faults) -> Any:
        """What is passed to the feed."""
        from meshfeed import sources

        source = self.config["source"]
        if self._node is not None:
            return self._node.make(faults)
        if source in HOST_BATCHES:
            lists_of_records = self._host_lists(host) if host < self.topologies[0].hosts else []
            batches = [formed(_columns(records), self.config["form"]) for records in lists_of_records]
            made = {"host_batches_state": BatchesWithState, "host_batches_vary": BatchesOfAnySize}.get(source, Batches)
            return sources.HostBatches(iter(made(batches)) if source == "host_batches_once" else made(batches))
        if is_random(source):
            return Records(0)
        return _SOURCES[source](self.config["records"], faults, self.config["dtype"])


def remote_source(config: Config, folder: str, processes: int, phase: int, host: int, faults: Faults) -> Any:
    """The source of a case, made where the feed is."""
    case = Case(config, folder, processes)
    return case.source(case.phases[phase], host, faults)


def _shown_hosts(hosts: Sequence[int]) -> str:
    return f"host{'s' if len(hosts) > 1 else ''} {', '.join(map(str, hosts))}"


def segments_of(sizes: Sequence[int]) -> list[list[int]]:
    """Runs of steps of one size: first step, first position if no row is padding, size."""
    found: list[list[int]] = []
    for step, size in enumerate(sizes):
        if not found or found[-1][2] != size:
            found.append([step, sum(sizes[:step]), size])
    return found


def _file_source(source: str, count: int, folder: str) -> Any:
    from meshfeed import sources

    paths = write_files("array_record" if "array" in source else source, folder, lengths_of_files(count))
    if source == "image_files":
        decode = sources.DecodeImage((4, 6), crop="random", flip=True, key="image")
        return sources.ArrayRecord(paths, decode=decode)
    if source == "tokens":
        return sources.Tokens(paths, 3)
    if source == "parquet":
        return sources.Parquet(paths)
    return sources.ArrayRecord(paths, decode=decoded)


def _grain(count: int) -> Any:
    import grain

    return grain.MapDataset.source([plain_record(number) for number in range(count)])


def _stream(source: str, count: int, faults: Faults, dtype: str = "float32") -> Any:
    from meshfeed import sources

    return sources.Stream(OpenLane(source, count, faults, dtype), fingerprint=count)


def _stream_mixture(count: int, faults: Faults, dtype: str) -> Any:
    from meshfeed import sources

    parts = {"a": _stream("stream", count, faults), "b": Records(40, 1)}
    return sources.Mixture(parts, {"a": 3, "b": 1}, 8)


_SOURCES: dict[str, Callable[[int, Faults, str], Any]] = {
    "grain_iter": lambda n, faults, dtype: _grain(n).to_iter_dataset(),
    "stream": functools.partial(_stream, "stream"),
    "stream_state": functools.partial(LanesOverFiles, "stream_state"),
    "stream_uneven": functools.partial(LanesOverFiles, "stream_uneven"),
    "stream_map": lambda n, faults, dtype: _sources().Map(_stream("stream_map", n, faults), kept),
    "stream_decode": lambda n, faults, dtype: DecodedLanes(n, faults.kind in BAD),
    "shuffle_buffer": lambda n, faults, dtype: _sources().ShuffleBuffer(_stream("shuffle_buffer", n, faults), 8),
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


def _write_array_record(
    path: pathlib.Path, first: int, length: int, encode: Callable[[int], bytes] = lambda number: str(number).encode()
) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    for number in range(first, first + length):
        writer.write(encode(number))
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


_ENDINGS = {"array_record": "array_record", "image_files": "array_record", "tokens": "npy", "parquet": "parquet"}
_WRITERS = {
    "array_record": _write_array_record,
    "image_files": functools.partial(_write_array_record, encode=encoded),
    "tokens": _write_tokens,
    "parquet": _write_parquet,
}
