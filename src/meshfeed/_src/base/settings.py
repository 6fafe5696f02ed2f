"""Validation of the feed's keywords, and the small value classes that some of them take."""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, cast

import numpy as np

from meshfeed._src.base.errors import SettingsError
from meshfeed._src.base.types import public

GC_EVERY = 100
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # one slash: what pathlib leaves of two; "C:/" is a drive
T = TypeVar("T")

Balance: TypeAlias = "Literal['attention', 'tokens'] | Callable[[np.ndarray], float]"
"""The cost by which rows of a global batch are balanced; a function takes one row's segment lengths, int64[segments]."""


def _refused(setting: str, value: object, what: str) -> SettingsError:
    return SettingsError(f"{setting}={value!r}; it takes {what}.", setting=setting)


def _wrong(setting: str, value: object, what: str) -> SettingsError:
    """Like :func:`_refused`, with the type of the value, which may be what is wrong."""
    return SettingsError(f"{setting}={value!r} ({type(value).__name__}); it takes {what}.", setting=setting)


def _integer(setting: str, value: object, minimum: int, what: str) -> int:
    """Returns ``value`` as an int; raises SettingsError for bool, float and values below ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < minimum:
        raise _wrong(setting, value, what)
    return int(value)


def _number(setting: str, value: object, minimum: float, what: str, *, strict: bool = False) -> float:
    number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    if not math.isfinite(number) or number < minimum or (strict and number == minimum):
        raise _wrong(setting, value, what)
    return number


def local_path(setting: str, value: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the path of a local file or folder; ``file://`` URLs are paths too.

    Raises:
      SettingsError: ``value`` is another URL, for which pathlib would create a local folder such as ``s3:``.
    """
    text = os.fspath(value)
    if text.startswith("file:/"):
        text = "/" + text.removeprefix("file:").lstrip("/")
    elif _URL.match(text):
        raise SettingsError(
            f"{setting}={text!r} is a URL. Expected a path on a local or mounted disk: write there, and copy the files to "
            "the store afterwards.",
            setting=setting,
        )
    return pathlib.Path(text).expanduser()


@public("meshfeed")
@dataclasses.dataclass(frozen=True, repr=False)
class BatchSchedule:
    """A global batch size that changes at given steps (batch ramp-up).

    Args:
      stages: ``[(first_step, global_batch_size), …]``, with strictly increasing ``first_step`` starting at 0.

    Raises:
      SettingsError: the stages are empty, do not start at 0 or do not increase, or a size is below 1.

    Examples:
      >>> import meshfeed
      >>> meshfeed.BatchSchedule([(0, 256), (1000, 512)])  # 512 rows from step 1,000 on
      BatchSchedule([(0, 256), (1000, 512)])
    """

    stages: Sequence[tuple[int, int]]

    def __post_init__(self) -> None:
        what = "a list of (first_step, global_batch_size), with steps increasing from 0 and sizes of at least 1"
        refused = SettingsError(f"BatchSchedule({self.stages!r}); it takes {what}.", setting="global_batch_size")
        try:
            pairs = [(first, size) for first, size in self.stages]
        except (TypeError, ValueError):
            raise refused from None
        stages = tuple(
            (_integer("global_batch_size", first, 0, what), _integer("global_batch_size", size, 1, what))
            for first, size in pairs
        )
        firsts = [first for first, _ in stages]
        if firsts[:1] != [0] or any(b <= a for a, b in itertools.pairwise(firsts)):
            raise refused
        object.__setattr__(self, "stages", stages)  # the dataclass is frozen

    def size_at(self, step: int) -> int:
        """Global batch size of ``step``."""
        return next(size for first, size in reversed(self.stages) if first <= step)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The distinct sizes, in order of first use."""
        return tuple(dict.fromkeys(size for _, size in self.stages))

    def __repr__(self) -> str:
        return f"BatchSchedule({list(self.stages)!r})"


_MAX_LANES = 64  # each is an open iterator on a host, and an entry of every state
_SHARDS_PER_LANE = 8  # the shard at the cut between two lanes is read by both: at most one in 8 is read twice


def default_num_lanes(sizes: Sequence[int], num_shards: int | None = None) -> int:
    """Returns the default of ``num_lanes``: the largest common divisor of ``sizes`` that is at most 64.

    Args:
      sizes: global batch sizes.
      num_shards: for ``shuffle="shards"``, the number of shards that have records; each lane gets at least 8.
    """
    limit = _MAX_LANES if num_shards is None else min(_MAX_LANES, num_shards // _SHARDS_PER_LANE)
    common = math.gcd(*sizes)
    return max((lanes for lanes in range(1, limit + 1) if common % lanes == 0), default=1)


@public("meshfeed")
@dataclasses.dataclass(frozen=True)
class ShardShuffle:
    """The order ``shuffle="shards"`` with its settings, for sources over files that are downloaded whole.

    The shards of each epoch, in random order, are divided into ``num_lanes`` lanes of equal length; each lane feeds fixed
    rows of every batch, and shuffles its records in windows of a few shards.

    Attributes:
      window_shards: shards, or parts of shards, that a lane reads at the same time, at least 1. More shuffle better and
        need more files open, or cached, at the same time.
      affinity: whether a lane reads the same shards in every epoch, so a cache that holds a host's share downloads nothing
        after the first epoch. The order of a lane's shards and of the records in its windows still differs per epoch. A
        shard at the border of two lanes belongs to both.

    Raises:
      SettingsError: an attribute is out of range; names it.

    Examples:
      >>> import meshfeed
      >>> shuffle = meshfeed.ShardShuffle(window_shards=4, affinity=True)
    """

    window_shards: int = 2
    affinity: bool = False

    def __post_init__(self) -> None:
        _integer("window_shards", self.window_shards, 1, "a number of shards of at least 1")
        _flag("affinity", self.affinity)


@public("meshfeed")
@dataclasses.dataclass(frozen=True)
class Retry:
    """When and how often to retry reads of a source (exponential backoff with full jitter).

    Attributes:
      attempts: attempts per record, including the first; 1 disables retries. A failed call that reads several records
        counts as an attempt for each of them. They are then read in smaller calls, and the count restarts after each
        record read. The attempts that a source over remote files makes itself, for each request, count here.
      initial_seconds: upper bound of the first pause; doubles with each attempt.
      max_seconds: upper bound of every pause.
      on: exception types to retry. If they include OSError, the transient errors of TensorFlow
        (FailedPreconditionError, UnavailableError), aiohttp, fsspec and requests are added if those libraries are
        imported.

    Examples:
      >>> import meshfeed
      >>> retry = meshfeed.Retry(attempts=10, max_seconds=60, on=(OSError, TimeoutError))
    """

    attempts: int = 5
    initial_seconds: float = 0.5
    max_seconds: float = 30.0
    on: tuple[type[BaseException], ...] = (OSError,)

    def __post_init__(self) -> None:
        _integer("retry.attempts", self.attempts, 1, "an int of at least 1 (1: no retries)")
        _number("retry.initial_seconds", self.initial_seconds, 0, "a number of seconds of at least 0")
        _number("retry.max_seconds", self.max_seconds, 0, "a number of seconds of at least 0")
        given = (self.on,) if isinstance(self.on, type) else self.on
        kinds = tuple(given) if isinstance(given, Iterable) else (given,)
        if not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds):
            raise SettingsError(f"retry.on={self.on!r}; it takes exception types.", setting="retry")
        object.__setattr__(self, "on", kinds)  # the dataclass is frozen


@public("meshfeed")
class Workers(int):
    """A number of worker processes and their garbage collection: ``num_workers=meshfeed.Workers(4, gc_every=50)``.

    Args:
      count (int): number of processes, at least 0. A plain int uses the default ``gc_every``.
      gc_every (int): reads between runs of a worker's garbage collector, which is disabled in between to avoid delaying a
        batch; 0 keeps Python's own schedule.

    Raises:
      SettingsError: a number is out of range.
    """

    gc_every: int

    def __new__(cls, count: int, *, gc_every: int = GC_EVERY) -> Workers:
        """See the class."""
        value = super().__new__(cls, _integer("num_workers", count, 0, "a number of processes of at least 0"))
        value.gc_every = _integer("num_workers.gc_every", gc_every, 0, "a number of reads of at least 0")
        return value

    def __repr__(self) -> str:
        return f"Workers({int(self)}, gc_every={self.gc_every})"


@public("meshfeed")
@dataclasses.dataclass(frozen=True)
class SkipBad:
    """Replaces bad records (those that raise CorruptDataError or ValueError), counts them, and lists them in the state.

    Attributes:
      max_fraction: maximum fraction of bad records among the records read on all hosts, in (0, 1]; above it, the run
        fails. It is checked after the first ``1 / max_fraction`` records.

    Examples:
      >>> import meshfeed
      >>> bad_records = meshfeed.SkipBad(max_fraction=1e-3)  # up to one record of a thousand
    """

    max_fraction: float = 1e-4

    def __post_init__(self) -> None:
        if _number("bad_records.max_fraction", self.max_fraction, 0, "a fraction in (0, 1]", strict=True) > 1:
            raise _refused("bad_records.max_fraction", self.max_fraction, "a fraction in (0, 1]")


@dataclasses.dataclass(frozen=True)
class FeedSettings:
    """The validated keywords of a feed, except source and sharding."""

    schedule: BatchSchedule | None
    shuffle: bool | int | str | ShardShuffle
    seed: int
    num_epochs: int | None
    end: Literal["drop", "pad"]
    mask_key: str | None
    balance: Balance | None
    num_lanes: int | None
    load: Literal["sharded", "once"] | tuple[int, ...]
    prefetch: int
    num_workers: Workers
    num_threads: int | None
    retry: Retry
    bad_records: SkipBad | None
    check_replicas: bool
    timeout_seconds: float
    name: str | None


def _optional_integer(setting: str, value: object, what: str = "an int of at least 1, or None") -> int | None:
    return None if value is None else _integer(setting, value, 1, what)


def _flag(setting: str, value: object) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise _wrong(setting, value, "True or False")
    return bool(value)


def _instance(setting: str, value: object, kind: type[T], what: str) -> T:
    if not isinstance(value, kind):
        raise _wrong(setting, value, what)
    return value


def _schedule(value: object) -> BatchSchedule | None:
    if value is None or isinstance(value, BatchSchedule):
        return value
    what = "an int of at least 1 or a meshfeed.BatchSchedule"
    return BatchSchedule([(0, _integer("global_batch_size", value, 1, what))])


_SHUFFLES = "False, True, 'shards', a meshfeed.ShardShuffle, or a number of records per block of at least 1"


def shard_shuffle(shuffle: object) -> ShardShuffle | None:
    """Returns the settings of an order by shards, or None if ``shuffle`` is a different order."""
    if isinstance(shuffle, ShardShuffle):
        return shuffle
    return ShardShuffle() if isinstance(shuffle, str) and shuffle == "shards" else None


def _shuffle(value: object) -> bool | int | str | ShardShuffle:
    if isinstance(value, ShardShuffle):
        return value
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, str) and value == "shards":
        return value
    return _integer("shuffle", value, 1, _SHUFFLES)


def _seed(value: object) -> int:
    what = "an int from 0 to 2**64 - 1"
    if (seed := _integer("seed", value, 0, what)) >= 2**64:
        raise _refused("seed", seed, what)
    return seed


def _end(value: object) -> Literal["drop", "pad"]:
    if isinstance(value, str) and (value == "drop" or value == "pad"):
        return value
    raise _refused("end", value, "'drop' or 'pad'")


def _mask_key(value: object, end: str) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise _refused("mask_key", value, "the name of the leaf to add, or None")
    if value is not None and end != "pad":
        text = f"mask_key={value!r} with end={end!r}; a mask needs end='pad' (with end='drop' every row is real)."
        raise SettingsError(text, setting="mask_key")
    return value


def _balance(value: object) -> Balance | None:
    if not callable(value) and value not in (None, "attention", "tokens"):
        what = "None, 'attention', 'tokens', or a function of the segment lengths of one row"
        raise _refused("balance", value, what)
    return cast("Balance | None", value)


def _name(value: object) -> str | None:
    if value is not None and (not isinstance(value, str) or not value or "/" in value):
        raise _refused("name", value, "a string without '/', or None")
    return value


def _load(value: object) -> Literal["sharded", "once"] | tuple[int, ...]:
    if isinstance(value, str) and (value == "sharded" or value == "once"):
        return value
    what = "'sharded', 'once', or a list of distinct process indices that read for all"
    refused = _refused("load", value, what)
    if isinstance(value, str) or not isinstance(value, Sequence | set | frozenset) or not value:
        raise refused
    hosts = {_integer("load", host, 0, what) for host in value}
    if len(hosts) != len(value):
        raise refused
    return tuple(sorted(hosts))


def check_settings(
    *,
    global_batch_size: object,
    shuffle: object,
    seed: object,
    num_epochs: object,
    end: object,
    mask_key: object,
    balance: object = None,
    num_lanes: object,
    load: object,
    prefetch: object,
    num_workers: object,
    num_threads: object,
    retry: object,
    bad_records: object,
    check_replicas: object,
    timeout_seconds: object,
    name: object,
) -> FeedSettings:
    """Validates all keywords of a feed except source and sharding; the same names.

    Raises:
      SettingsError: a keyword has an invalid value. Names the first such keyword and the valid values.
    """
    checked_end = _end(end)
    no_retries, seconds = "meshfeed.Retry(attempts=1) disables retries", "a finite number of seconds above 0"
    none_or_skip = "None (raise) or a meshfeed.SkipBad"
    return FeedSettings(
        schedule=_schedule(global_batch_size),
        shuffle=_shuffle(shuffle),
        seed=_seed(seed),
        num_epochs=_optional_integer("num_epochs", num_epochs, "an int of at least 1, or None to repeat forever"),
        end=checked_end,
        mask_key=_mask_key(mask_key, checked_end),
        balance=_balance(balance),
        num_lanes=_optional_integer("num_lanes", num_lanes),
        load=_load(load),
        prefetch=_integer("prefetch", prefetch, 0, "a number of global batches of at least 0"),
        num_workers=num_workers if isinstance(num_workers, Workers) else Workers(num_workers),  # pyright: ignore[reportArgumentType] # checked there
        num_threads=_optional_integer("num_threads", num_threads),
        retry=_instance("retry", retry, Retry, f"a meshfeed.Retry; {no_retries}"),
        bad_records=None if bad_records is None else _instance("bad_records", bad_records, SkipBad, none_or_skip),
        check_replicas=_flag("check_replicas", check_replicas),
        timeout_seconds=_number("timeout_seconds", timeout_seconds, 0, seconds, strict=True),
        name=_name(name),
    )


def balance_json(settings: FeedSettings) -> str | None:
    """Returns ``balance`` for display and for comparison between hosts; a function is represented by its name."""
    balance = settings.balance
    if balance is None or isinstance(balance, str):
        return balance
    return getattr(balance, "__qualname__", type(balance).__name__)


def settings_json(settings: FeedSettings) -> dict[str, Any]:
    """Returns all settings as JSON, keyed by keyword."""
    value = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    schedule = value.pop("schedule")
    stages = None if schedule is None else [list(stage) for stage in schedule.stages]
    retry, bad_records = settings.retry, settings.bad_records
    return {
        **value,
        "global_batch_size": stages[0][1] if stages and len(stages) == 1 else stages,
        "shuffle": dataclasses.asdict(settings.shuffle)
        if isinstance(settings.shuffle, ShardShuffle)
        else settings.shuffle,
        "balance": balance_json(settings),
        "num_workers": int(settings.num_workers),
        "load": settings.load if isinstance(settings.load, str) else list(settings.load),
        "retry": {**dataclasses.asdict(retry), "on": [kind.__name__ for kind in retry.on]},
        "bad_records": None if bad_records is None else dataclasses.asdict(bad_records),
    }
