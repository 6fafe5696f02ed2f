"""The keywords of a feed, each declared once in :class:`FeedSettings`, and the small value classes that some of them take.

To add a keyword, add a field to :class:`FeedSettings` and run ``scripts/check --fix``, which writes the constructors of
``Feed`` and ``RemoteFeed`` and the docstring. The check, ``config()`` and the comparison between hosts follow from the field.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np

from meshfeed._src.base.errors import SettingsError, shorten
from meshfeed._src.base.types import public

GC_EVERY = 100
_SHOWN_VALUE = 200  # characters: a tree of arrays is long
# One slash: what pathlib leaves of two. A colon: chained as in a::s3://. Two letters: "C:/" is a drive.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+:/")
Check: TypeAlias = Callable[[Any], Any]
"""Value → the same value, normalized; raises TypeError, ValueError or OverflowError for a value that it does not take."""

Balance: TypeAlias = "Literal['attention', 'tokens'] | Callable[[np.ndarray], float]"
"""The cost by which rows of a global batch are balanced; a function takes one row's segment lengths, int64[segments]."""


def checked(setting: str, value: object, check: Check, takes: str) -> Any:
    """Returns ``value``, normalized by ``check``.

    Raises:
      SettingsError: ``check`` refused it. Names the setting, the value, its type if that is not plain, and ``takes``.
    """
    try:
        return check(value)
    except SettingsError:  # of a value class, which names its own attribute
        raise
    except (TypeError, ValueError, OverflowError):
        kind = "" if value is None or isinstance(value, str | bool) else f" ({type(value).__name__})"
        shown = shorten(repr(value), _SHOWN_VALUE)
        raise SettingsError(f"{setting}={shown}{kind}; it takes {takes}.", setting=setting) from None


def integer(minimum: float, maximum: float = math.inf) -> Check:
    """Takes integers of any type in ``[minimum, maximum]`` except bool; returns int."""

    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not minimum <= int(value) <= maximum:
            raise ValueError
        return int(value)

    return check


def number(minimum: float, maximum: float = math.inf, *, above: bool = False) -> Check:
    """Takes finite real numbers in ``[minimum, maximum]``, without the minimum if ``above``; returns float."""

    def check(value: Any) -> float:
        result = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
        if not math.isfinite(result) or not minimum <= result <= maximum or (above and result == minimum):
            raise ValueError
        return result

    return check


def flag(value: Any) -> bool:
    """Takes True and False, also of numpy."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError
    return bool(value)


def instance(kind: type) -> Check:
    """Takes instances of a class."""

    def check(value: Any) -> Any:
        if not isinstance(value, kind):
            raise TypeError
        return value

    return check


def one_of(*choices: str) -> Check:
    """Takes one of some strings."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise ValueError
        return value

    return check


def optional(check: Check) -> Check:
    """Takes None too."""
    return lambda value: None if value is None else check(value)


def or_auto(check: Check) -> Check:
    """Takes ``"auto"`` too."""
    return lambda value: "auto" if isinstance(value, str) and value == "auto" else check(value)


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
            (
                checked("global_batch_size", first, integer(0), what),
                checked("global_batch_size", size, integer(1), what),
            )
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
    """Returns the default of ``num_lanes``: the largest common divisor of the batch sizes that is at most 64.

    With ``shuffle="shards"``, ``num_shards`` have records, and each lane gets at least 8.
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
        checked("window_shards", self.window_shards, integer(1), "a number of shards of at least 1")
        checked("affinity", self.affinity, flag, "True or False")


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
        checked("retry.attempts", self.attempts, integer(1), "an int of at least 1 (1: no retries)")
        for name in ("initial_seconds", "max_seconds"):
            checked(f"retry.{name}", getattr(self, name), number(0), "a number of seconds of at least 0")
        given = (self.on,) if isinstance(self.on, type) else self.on
        kinds = tuple(given) if isinstance(given, Iterable) else (given,)
        if not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds):
            raise SettingsError(f"retry.on={self.on!r}; it takes exception types.", setting="retry")
        object.__setattr__(self, "on", kinds)  # the dataclass is frozen


_RAY_OPTIONS = (
    "accelerator_type",
    "label_selector",
    "memory",
    "num_cpus",
    "num_gpus",
    "resources",
    "runtime_env",
    "scheduling_strategy",
)


def _ray_options(value: Any) -> dict[str, Any]:
    options = dict(value)
    if not options.keys() <= set(_RAY_OPTIONS):
        raise ValueError
    return options


@public("meshfeed")
class Workers(int):
    """A number of workers and their settings: ``num_workers=meshfeed.Workers(16, engine="ray")``.

    Args:
      count (int): number of workers of this host, at least 0. A plain int is a number of processes with the defaults.
      engine (str): ``"process"``: processes on this host. ``"ray"``: actors on the machines of the Ray cluster that this
        host is connected to (extra ``ray``). The stream is the same; a lost actor is replaced. If this process has not
        called ``ray.init``, it connects to the cluster of ``RAY_ADDRESS``, or else to the one that runs on this machine.
      gc_every (int): reads between runs of a worker's garbage collector, which is disabled in between to avoid delaying a
        batch; 0 keeps Python's own schedule.
      ray_options (dict): where Ray places the actors and what it reserves for each: ``num_cpus`` (default 1),
        ``num_gpus``, ``memory`` (bytes), ``resources``, ``accelerator_type``, ``label_selector``,
        ``scheduling_strategy`` (default ``"SPREAD"``) and ``runtime_env``, as in Ray's ``actor.options``.

    Raises:
      SettingsError: a value is out of range or unknown; names it.

    Examples:
      >>> import meshfeed
      >>> workers = meshfeed.Workers(16, engine="ray", ray_options={"num_cpus": 2})
    """

    engine: Literal["process", "ray"]
    gc_every: int
    ray_options: Mapping[str, Any]

    def __new__(
        cls,
        count: int,
        *,
        engine: Literal["process", "ray"] = "process",
        gc_every: int = GC_EVERY,
        ray_options: Mapping[str, Any] | None = None,
    ) -> Workers:
        """See the class."""
        value = super().__new__(cls, checked("num_workers", count, integer(0), "a number of processes of at least 0"))
        value.engine = checked("num_workers.engine", engine, one_of("process", "ray"), "'process' or 'ray'")
        value.gc_every = checked("num_workers.gc_every", gc_every, integer(0), "a number of reads of at least 0")
        takes = f"a dict with some of the keys {', '.join(_RAY_OPTIONS)}"
        value.ray_options = checked("num_workers.ray_options", ray_options or {}, _ray_options, takes)
        if value.ray_options and value.engine != "ray":
            raise SettingsError(
                f"num_workers.ray_options={ray_options!r} with engine={engine!r}; they need engine='ray'.",
                setting="num_workers",
            )
        return value

    def __repr__(self) -> str:
        engine = "" if self.engine == "process" else f"engine={self.engine!r}, "
        options = f", ray_options={self.ray_options!r}" if self.ray_options else ""
        return f"Workers({int(self)}, {engine}gc_every={self.gc_every}{options})"


def at_most(workers: Workers, count: int) -> Workers:
    """Returns at most ``count`` workers with the same settings."""
    count = min(workers, count)
    return Workers(count, engine=workers.engine, gc_every=workers.gc_every, ray_options=workers.ray_options)


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
        checked("bad_records.max_fraction", self.max_fraction, number(0, 1, above=True), "a fraction in (0, 1]")


def shard_shuffle(shuffle: object) -> ShardShuffle | None:
    """Returns the settings of an order by shards, or None if ``shuffle`` is a different order."""
    if isinstance(shuffle, ShardShuffle):
        return shuffle
    return ShardShuffle() if isinstance(shuffle, str) and shuffle == "shards" else None


def _batch_schedule(value: Any) -> BatchSchedule:
    return value if isinstance(value, BatchSchedule) else BatchSchedule([(0, integer(1)(value))])


def _shuffle(value: Any) -> bool | int | str | ShardShuffle:
    if shard_shuffle(value) is not None:
        return value
    return bool(value) if isinstance(value, bool | np.bool_) else integer(1)(value)


def _balance(value: Any) -> Any:
    return value if callable(value) else one_of("attention", "tokens")(value)


def _load(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return one_of("sharded", "once")(value)
    if not isinstance(value, Sequence | Set) or isinstance(value, bytes | bytearray):
        raise TypeError
    hosts = tuple(sorted(map(integer(0), value)))
    if not hosts or len(set(hosts)) != len(hosts):
        raise ValueError
    return hosts


def _workers(value: Any) -> Workers:
    return value if isinstance(value, Workers) else Workers(integer(0)(value))


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


def _name(value: Any) -> str:
    if "/" in _text(value):
        raise ValueError
    return value


class Setting(NamedTuple):
    """What the declaration of a keyword holds beside its name, type, default and description.

    Attributes:
      check: takes and normalizes a value; holds the bounds.
      takes: the values that it takes, for the error.
      hosts: ``"stream"``: determines the stream, so it is in the fingerprint, which hosts compare, and so does a resume.
        ``"agree"``: hosts compare it, and it may change on resume. ``"free"``: hosts may differ.
    """

    check: Check
    takes: str
    hosts: Literal["stream", "agree", "free"]


def setting(default: object, check: Check, takes: str, *, hosts: Literal["stream", "agree", "free"] = "free") -> Any:
    """Declares a keyword of a feed; see :class:`Setting`."""
    return dataclasses.field(default=default, metadata={"setting": Setting(check, takes, hosts)})  # pyright: ignore[reportUnknownVariableType]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeedSettings:
    """The validated keywords of a feed, except source and sharding, with the descriptions that users read.

    Raises:
      SettingsError: a keyword has an invalid value. Names the first such keyword and the valid values.
    """

    global_batch_size: int | BatchSchedule | None = setting(
        None, optional(_batch_schedule), "an int of at least 1 or a meshfeed.BatchSchedule", hosts="agree"
    )
    """rows per step over all hosts, or a :class:`BatchSchedule`. Optional for HostBatches."""

    shuffle: bool | int | str | ShardShuffle = setting(
        False,
        _shuffle,
        "False, True, 'shards', a meshfeed.ShardShuffle, or a number of records per block of at least 1",
        hosts="stream",
    )
    """False; True (uniform over the epoch); an int, the records per block of a two-level shuffle of blocks and of the
    records in each block; or ``"shards"``, for sources over files, and ``Map``, ``Padded``, ``Packed``, ``Buckets``, views
    and mixtures over them: shards in random order, divided into ``num_lanes`` lanes, each shuffled in windows of two
    shards, so about one host needs each shard in an epoch. :class:`ShardShuffle` is the same with settings."""

    seed: int = setting(0, integer(0, 2**64 - 1), "an int from 0 to 2**64 - 1", hosts="stream")
    """0 to 2**64 - 1."""

    num_epochs: int | None = setting(
        1, optional(integer(1)), "an int of at least 1, or None to repeat forever", hosts="stream"
    )
    """passes over the source, with no gap between them; None to repeat forever."""

    end: Literal["drop", "pad"] = setting("drop", one_of("drop", "pad"), "'drop' or 'pad'", hosts="stream")
    """``"drop"`` the last partial batch or ``"pad"`` it with zeros. All hosts stop at the same step. With ``"drop"`` a
    stream ends before the first step that some lane cannot fill, and what longer lanes still hold is not delivered;
    ``"pad"`` delivers every record. A warning names the shortest lane where the lengths are known."""

    mask_key: str | None = setting(None, optional(_text), "the name of the leaf to add, or None", hosts="agree")
    """with ``end="pad"``, the key of an added bool ``[global_batch_size]`` leaf, False on padded rows."""

    balance: Balance | None = setting(
        None,
        optional(_balance),
        "None, 'attention', 'tokens', or a function of the segment lengths of one row",
        hosts="agree",
    )
    """orders the rows of each global batch so that the shards of the batch cost about the same. The cost of a row is
    ``"attention"``, the sum of the squares of its segment lengths, or with ``Packed(sequence_order=("zigzag", n))`` the work
    of each of its n shards; ``"tokens"``, the sum of the lengths; or a function of its segment lengths, int64[segments]. The
    set of rows of a step and the state stay the same. Requires ``Packed`` or a source with ``lengths()``."""

    num_lanes: int | None = setting(None, optional(integer(1)), "an int of at least 1, or None", hosts="stream")
    """for streams and ``shuffle="shards"``: number of sequential parts that the rows are divided into. Default: the largest
    common divisor of the batch sizes that is at most 64, and for ``shuffle="shards"`` at most an eighth of the number of
    shards."""

    load: Literal["sharded", "once"] | Sequence[int] = setting(
        "sharded",
        _load,
        "'sharded', 'once', or a list of distinct process indices that read for all",
        hosts="agree",
    )
    """``"sharded"``: each host reads the rows that its devices hold. ``"once"``: each row is read by one host, and rows are
    resharded on device. A list of process indices: like ``"once"``, but only these hosts read. A lane with rows on several
    hosts is read by each of them."""

    prefetch: int | Literal["auto"] = setting(
        2, or_auto(integer(0)), "a number of global batches of at least 0, or 'auto'"
    )
    """global batches kept ready on device; 0 disables prefetching. Batches whose parts on this host would take more than a
    quarter of its memory (or of its container's limit) are not kept ready, except for two; a warning gives the number.
    ``"auto"`` starts with 2 and keeps more if reads are uneven and the step waits."""

    num_workers: int | Literal["auto"] = setting(0, or_auto(_workers), "a number of processes of at least 0, or 'auto'")
    """processes that read and decode, or a :class:`Workers`, also on the machines of a Ray cluster. Does not change the
    stream. ``"auto"`` starts with none and measures, while the step waits for data, whether more are faster;
    ``feed.stats().tuned`` has the result."""

    num_threads: int | Literal["auto"] | None = setting(
        None, or_auto(optional(integer(1))), "an int of at least 1, None, or 'auto'"
    )
    """threads that read and decode. None: one; 4 for remote files that are read without a cache; half as many as there are
    CPUs, but 2 to 4, for Hugging Face streams whose files pyarrow decodes. ``"auto"`` starts with that and measures, as for
    ``num_workers``."""

    retry: Retry = setting(Retry(), instance(Retry), "a meshfeed.Retry; meshfeed.Retry(attempts=1) disables retries")
    """how to retry failed reads."""

    bad_records: SkipBad | None = setting(
        None, optional(instance(SkipBad)), "None (raise) or a meshfeed.SkipBad", hosts="agree"
    )
    """None to raise; a :class:`SkipBad` to replace, count and record bad records."""

    check_replicas: bool = setting(False, flag, "True or False", hosts="agree")
    """whether to compare digests of replicated rows between hosts on the first batches."""

    timeout_seconds: float = setting(300, number(0, above=True), "a finite number of seconds above 0")
    """longest wait for another host or for the source. A resume that reads and drops records may take longer, as long as it
    makes progress."""

    name: str | None = setting(None, optional(_name), "a string without '/', or None")
    """identifies the feed across hosts and in logs. Default: ``feed-<n>``, in order of creation; of feeds over some hosts of
    the job, ``feed-<n>-of-<hosts>``, counted for each set of hosts."""

    def __post_init__(self) -> None:
        for name, declared in SETTINGS.items():
            value = checked(name, getattr(self, name), declared.check, declared.takes)
            object.__setattr__(self, name, value)  # the dataclass is frozen
        if self.mask_key is not None and self.end != "pad":
            raise SettingsError(
                f"mask_key={self.mask_key!r} with end={self.end!r}; a mask needs end='pad' (with end='drop' every row is "
                "real).",
                setting="mask_key",
            )

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> FeedSettings:
        """Returns the settings among the arguments of a constructor."""
        return cls(**{name: arguments[name] for name in SETTINGS})

    @property
    def schedule(self) -> BatchSchedule | None:
        """``global_batch_size`` as a schedule."""
        return cast("BatchSchedule | None", self.global_batch_size)  # checked

    @property
    def workers(self) -> Workers:
        """``num_workers`` with its settings; none to start with if it is ``"auto"``."""
        return Workers(0) if self.num_workers == "auto" else cast("Workers", self.num_workers)  # checked

    @property
    def threads(self) -> int | None:
        """``num_threads``; None to start with if it is ``"auto"``."""
        return None if self.num_threads == "auto" else cast("int | None", self.num_threads)  # checked

    @property
    def auto(self) -> frozenset[str]:
        """The keywords that are ``"auto"``."""
        return frozenset(name for name in ("num_workers", "num_threads", "prefetch") if getattr(self, name) == "auto")

    def to_json(self) -> dict[str, Any]:
        """Returns all settings as JSON, keyed by keyword."""
        return {name: _to_json(getattr(self, name)) for name in SETTINGS}

    def agreed(self) -> dict[str, Any]:
        """Returns as JSON what hosts compare beside the fingerprint."""
        return {name: value for name, value in self.to_json().items() if SETTINGS[name].hosts == "agree"}


SETTINGS: Mapping[str, Setting] = {field.name: field.metadata["setting"] for field in dataclasses.fields(FeedSettings)}
"""The declaration of each keyword, in the order of the constructor."""


def _to_json(value: Any) -> Any:
    if value is None or isinstance(value, bool | str | float):
        return value
    if isinstance(value, int):
        return int(value)  # Workers too
    if isinstance(value, BatchSchedule):
        return value.sizes[0] if len(value.sizes) == 1 else [list(stage) for stage in value.stages]
    if dataclasses.is_dataclass(value):
        return {field.name: _to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Sequence):
        return [_to_json(item) for item in value]
    return getattr(value, "__qualname__", type(value).__name__)  # a function or a class
