"""The feed that users iterate over: it runs the stream of their source, one generation after another.

A generation begins when the feed is created and at each ``reset`` and ``set_state``. Its first ``next`` opens the data,
compares settings with the other hosts and builds the pipeline; each later ``next`` only takes a batch from it.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Literal, NamedTuple, NoReturn, cast

import numpy as np

from meshfeed._src.agreement import handshake
from meshfeed._src.agreement.windows import leave_notice
from meshfeed._src.arrays.placer import make_placer
from meshfeed._src.base import coordination
from meshfeed._src.base.coordination import warn_if_forgotten
from meshfeed._src.base.errors import (
    MeshfeedError,
    SettingsError,
    StalledError,
    hide_own_frames,
    hides_own_frames,
    suggests_keywords,
)
from meshfeed._src.base.fork import Finalizer, Owner, finalize
from meshfeed._src.base.reduction import ProgressReport
from meshfeed._src.base.settings import (
    Balance,
    BatchSchedule,
    FeedSettings,
    Retry,
    ShardShuffle,
    SkipBad,
    check_settings,
    local_path,
    settings_json,
)
from meshfeed._src.base.stats import CACHES, PROGRESS, FeedStats, Sample, StatsRecorder, stats_since
from meshfeed._src.base.threads import SingleCall
from meshfeed._src.base.turn import TURN, in_turn, in_use
from meshfeed._src.base.types import JsonValue, PyTree, RecordIds, public
from meshfeed._src.feed.local_iterator import LocalIterator
from meshfeed._src.feed.parts import check_can_follow, make_pipeline, make_stream, replay_step
from meshfeed._src.feed.pipeline import Pipeline, Ready
from meshfeed._src.pictures.plan import MeshPlan, plan_of_batch
from meshfeed._src.pictures.report import HostLog, report_figures, report_page
from meshfeed._src.plan.plan import normalize_sharding, participants
from meshfeed._src.reading.host_batch import spec_with_mask
from meshfeed._src.sources.recognize import describe_source
from meshfeed._src.state import state as feed_state
from meshfeed._src.state.files import Checkpointable
from meshfeed._src.streams.protocol import AnyReader, Cursor

_log = logging.getLogger("meshfeed.feed")


class SecondPass:
    """Warns once, at the first ``iter(feed)`` after the end.

    Args:
      name: name of the feed.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._warned = False

    def begins(self) -> None:
        """Records that ``iter(feed)`` was called on an exhausted feed."""
        if not self._warned:
            self._warned = True
            _log.warning(
                "%s: iterating again after the end of the stream yields no batches, because iter(feed) does not reset "
                "the feed. Pass num_epochs= for several epochs, or call reset() to start over.",
                self._name,
            )


class _Generation(NamedTuple):
    """The parts of a generation that must be closed; ``doing`` and ``because`` explain its end to the other hosts."""

    pipeline: Pipeline | None
    opening: SingleCall[AnyReader] | None
    finalizer: Finalizer | None
    doing: str
    because: BaseException | None


_step_log = logging.getLogger("meshfeed.steps")


def _log_step(
    name: str, host: int, ready: Ready, position: int, wait_seconds: float, contents: Mapping[str, JsonValue]
) -> None:
    """Logs one line for a delivered batch: ids and files of this host's rows, and times in seconds.

    Args:
      name: name of the feed.
      host: process index.
      ready: the batch; its index, counted from 0, is logged as ``step``.
      position: records delivered before it, over all hosts.
      wait_seconds: time that the caller waited for it.
      contents: the stream's description of the batch, such as record ids and files.
    """
    batch = ready.batch
    line: dict[str, JsonValue] = {
        "time": round(time.time(), 3),
        "feed": name,
        "host": host,
        "step": batch.step,
        "position": position,
        "global_batch_size": batch.global_batch_size,
        "wait_seconds": round(wait_seconds, 6),
        "transfer_seconds": round(ready.seconds, 6),
        **{key: round(value, 6) for key, value in batch.times.items()},
        **contents,
    }
    if batch.bad:
        line["bad_records"] = [list(entry) for entry in batch.bad]
    _step_log.debug("%s", json.dumps(line))


@public("meshfeed")
class Feed(Checkpointable):
    """One stream of global batches over a mesh of any number of hosts.

    The global batch of step k depends only on the source, the settings and k, not on the number of hosts, devices,
    workers or threads, or on the read-ahead. ``iter(feed)`` returns the feed itself and does not reset it.

    Args:
      source: a source of :mod:`meshfeed.sources`; a Grain, Hugging Face, TFDS or tf.data object; a sequence, a pytree
        of numpy arrays of equal length, or an iterable of host-local batches.
      sharding: the sharding of the batches: a NamedSharding, a Mesh (rows over all its axes), or a pytree prefix of
        NamedShardings. A single NamedSharding applies to all leaves, with its spec truncated to each leaf's rank.
      global_batch_size: rows per step over all hosts, or a :class:`BatchSchedule`. Optional for HostBatches.
      shuffle: False; True (uniform over the epoch); an int, the records per block of a two-level shuffle of blocks and
        of the records in each block; or ``"shards"``, for sources over files, and ``Map``, ``Padded``, ``Packed``,
        ``Buckets``, views and mixtures over them: shards in random order, divided into ``num_lanes`` lanes, each
        shuffled in windows of two shards, so about one host needs each shard in an epoch. :class:`ShardShuffle` is the
        same with settings.
      seed: 0 to 2**64 - 1.
      num_epochs: passes over the source, with no gap between them; None to repeat forever.
      end: ``"drop"`` the last partial batch or ``"pad"`` it with zeros. All hosts stop at the same step. With ``"drop"`` a
        stream ends before the first step that some lane cannot fill, and what longer lanes still hold is not delivered;
        ``"pad"`` delivers every record. A warning names the shortest lane where the lengths are known.
      mask_key: with ``end="pad"``, the key of an added bool ``[global_batch_size]`` leaf, False on padded rows.
      balance: orders the rows of each global batch so that the shards of the batch cost about the same. The cost of a row
        is ``"attention"``, the sum of the squares of its segment lengths; ``"tokens"``, their sum; or a function of its
        segment lengths, int64[segments]. The set of rows of a step and the state stay the same. Requires ``Packed`` or a
        source with ``lengths()``.
      num_lanes: for streams and ``shuffle="shards"``: number of sequential parts that the rows are divided into.
        Default: the largest common divisor of the batch sizes that is at most 64, and for ``shuffle="shards"`` at most
        an eighth of the number of shards.
      load: ``"sharded"``: each host reads the rows that its devices hold. ``"once"``: each row is read by one host, and
        rows are resharded on device. A list of process indices: like ``"once"``, but only these hosts read. A lane with
        rows on several hosts is read by each of them.
      prefetch: global batches kept ready on device; 0 disables prefetching.
      num_workers: processes that read and decode, or a :class:`Workers`. Does not change the stream.
      num_threads: threads that read and decode; None for one, or 4 for remote files that are read without a cache.
      retry: how to retry failed reads.
      bad_records: None to raise; a :class:`SkipBad` to replace, count and record bad records.
      check_replicas: whether to compare digests of replicated rows between hosts on the first batches.
      timeout_seconds: longest wait for another host or for the source. A resume that reads and drops records may take
        longer, as long as it makes progress.
      name: identifies the feed across hosts and in logs. Default: ``feed-<n>``, in order of creation; of feeds over some
        hosts of the job, ``feed-<n>-of-<hosts>``, counted for each set of hosts.

    Raises:
      SettingsError: an argument is invalid.
      PlanError: a batch size is not divisible over the mesh.
      SourceError: the source cannot be read.
    """

    @hides_own_frames
    @suggests_keywords
    def __init__(
        self,
        source: object,
        sharding: PyTree,
        *,
        global_batch_size: int | BatchSchedule | None = None,
        shuffle: bool | int | str | ShardShuffle = False,
        seed: int = 0,
        num_epochs: int | None = 1,
        end: Literal["drop", "pad"] = "drop",
        mask_key: str | None = None,
        balance: Balance | None = None,
        num_lanes: int | None = None,
        load: Literal["sharded", "once"] | Sequence[int] = "sharded",
        prefetch: int = 2,
        num_workers: int = 0,
        num_threads: int | None = None,
        retry: Retry = Retry(),  # noqa: B008 (a frozen value)
        bad_records: SkipBad | None = None,
        check_replicas: bool = False,
        timeout_seconds: float = 300,
        name: str | None = None,
    ) -> None:
        self._opening: SingleCall[AnyReader] | None = None  # opens the data at the cursor
        self._last_opening: SingleCall[AnyReader] | None = None
        self._pipeline: Pipeline | None = None
        self._finalizer: Finalizer | None = None
        self._ready: Ready | None = None  # the next batch after a peek, or the remains of the last delivered one
        self._previous: Cursor | None = None
        self._left: _Generation | None = None  # replaced by reset or set_state and not yet closed
        self._closed = self._released = False
        self._failed: BaseException | None = None
        self._failed_at: TracebackType | None = None
        self._turn: dict[str, object] = {}
        self._host = coordination.process_index()
        self._owner = Owner()
        self._participants = _participants(sharding)
        # check_settings rejects other types below, once the handshake exists and can report the error to other hosts.
        self.name = name if isinstance(name, str) else coordination.next_name("feed", self._participants)
        self._stats = StatsRecorder(self.name)
        self._second_pass = SecondPass(self.name)
        self._scope = coordination.next_scope(f"feed/{self.name}", self._participants)
        self._handshake = handshake.Handshake(self._scope, self._participants)
        self._hosts_agree = self._handshake.needed
        self._follows = False  # a stream that only other hosts read
        try:
            if self._hosts_agree:
                coordination.require_store()
            warn_if_forgotten()
            self._make(
                source,
                sharding,
                check_settings(
                    global_batch_size=global_batch_size,
                    shuffle=shuffle,
                    seed=seed,
                    num_epochs=num_epochs,
                    end=end,
                    mask_key=mask_key,
                    balance=balance,
                    num_lanes=num_lanes,
                    load=load,
                    prefetch=prefetch,
                    num_workers=num_workers,
                    num_threads=num_threads,
                    retry=retry,
                    bad_records=bad_records,
                    check_replicas=check_replicas,
                    timeout_seconds=timeout_seconds,
                    name=name,
                ),
            )
        except BaseException as error:
            self._handshake.fail(error)  # other hosts wait for this one in the handshake
            self._handshake.leave()
            raise
        if self._hosts_agree:
            # For a feed dropped without close; runs after the pipeline's finalizer, which is registered later.
            finalize(self, self._handshake.leave, "dropped its feed")

    def _make(self, source: object, sharding: PyTree, settings: FeedSettings) -> None:
        self._settings = settings
        self._placer = make_placer(sharding, settings)
        self._stream = make_stream(source, settings, self._placer)
        if not self._stream.length_is_known and self._host not in self._participants:
            check_can_follow(self._stream, self._participants)
            self._follows = True
        self._cursor: Cursor = self._stream.start()
        self._host_rows = self._placer.host_rows(self._stream.record_spec if self._stream.in_columns else None)

    def __repr__(self) -> str:
        known = vars(self)  # the constructor may have failed before setting every attribute
        if "_stream" not in known or "_cursor" not in known:
            return f"<meshfeed.Feed {known.get('name')!r}: not made>"
        parts = [describe_source(self._stream.source)]
        schedule = self._stream.schedule
        if schedule is not None:
            parts.append(f"global_batch_size={schedule.sizes[0] if len(schedule.sizes) == 1 else schedule}")
        parts += [f"step={self._cursor.step}", f"position={self._cursor.position}"]
        if self._closed:
            parts.append("closed")
        if self._failed is not None:
            ended = isinstance(self._failed, StopIteration)
            parts.append("ended" if ended else f"failed: {type(self._failed).__name__}")
        return f"<meshfeed.Feed {self.name!r}: {', '.join(parts)}>"

    # ------------------------------------------------------------------ iteration

    def __iter__(self) -> Feed:
        if isinstance(self._failed, StopIteration):
            self._second_pass.begins()
        return self

    def __next__(self) -> PyTree:
        """Returns the next global batch, a pytree of global ``jax.Array`` ``[global_batch_size, ...]``.

        After an interrupt (Ctrl-C), call it again to continue with the same batch. After an error, each further call
        raises it again until ``reset`` or ``set_state``.

        Call it from one thread at a time: a call during another one raises an error and changes nothing. ``get_state``
        and ``close`` may be called meanwhile.

        Raises:
          StopIteration: the end of the data, on all hosts at the same step.
          PeerError: another host failed.
          AgreementError: hosts differ in settings or data.
          StalledError: a host or the source is late.
          MeshfeedError: the feed is closed, or another call of ``next``, ``set_state`` or ``reset`` is running.
          Exception: any error of the source.
        """
        if self._closed:
            self._raise_closed()
        if self._failed is not None:
            raise self._failed.with_traceback(self._failed_at)  # without it, the traceback would grow with each call
        start = time.perf_counter()
        turn, mine = self._turn, object()
        held = {TURN: mine}
        try:
            if turn.setdefault(TURN, mine) is not mine:
                raise in_use(self.name)
            try:
                pipeline = self._running_pipeline()
                ready = self._ready
                if ready is None or ready.batch.step < self._cursor.step:
                    self._ready = ready = pipeline.peek()
                if self._placer.finish_computes and not ready.finished:
                    self._finish(ready)
            except Exception as error:
                hide_own_frames(error)
                self._fail(error)
                raise
            if not ready.counted:
                self._count(ready, start)
            pipeline.pop(ready)
            cursor, arrays = ready.cursor, ready.arrays
            self._previous = self._cursor  # keeps the old cursor alive: freeing it could run code in the lines below
            # Python handles signals at calls and backward jumps. There is none from here to the return, so after an
            # interrupt the batch is either delivered or still pending.
            ready.arrays, self._cursor = None, cursor
            return arrays
        finally:
            if turn == held:
                del turn[TURN]

    def _raise_closed(self) -> NoReturn:
        raise MeshfeedError(f"{self.name} is closed. To continue, pass its get_state() to set_state of a new feed.")

    def _finish(self, ready: Ready) -> None:
        if ready.finishing and self._hosts_agree:
            raise MeshfeedError(
                f"{self.name}: step {ready.batch.step} was interrupted while its rows moved between hosts; moving them "
                "again would pair them with the other hosts' next step. Call set_state(get_state()) on every host, or "
                "restart the job from its last checkpoint."
            )
        ready.finishing = True
        ready.arrays = self._placer.finish(ready.arrays, ready.batch.global_batch_size)
        ready.finished = True

    def _fail(self, error: Exception) -> None:
        self._stats.publish(self._cursor.step, self._cursor.position)
        if not isinstance(error, StopIteration):
            self._failed, self._failed_at = error, error.__traceback__
            return
        if not self._cursor.step and not self._stream.length_is_known:
            _log.warning(
                "%s: the data ended before one full batch, so there is no batch. With end='drop' a stream ends with its "
                "shortest lane: give each lane data, or use end='pad' or fewer lanes.",
                self.name,
            )
        self._failed, self._failed_at = StopIteration(), None  # a new one: the original's traceback keeps frames alive

    def _count(self, ready: Ready, start: float) -> None:
        batch, position = ready.batch, self._cursor.position
        counts = self._stats.delivered(
            start,
            records=ready.cursor.position - position,
            bytes=batch.num_bytes,
            transfer_seconds=ready.seconds,
            retries=batch.retries,
            skipped_records=len(batch.bad),
            **batch.times,
        )
        self._stats.counts, ready.counted = counts, True  # without a call, so an interrupt cannot split it
        if self._stats.due:
            self._stats.publish(ready.cursor.step, ready.cursor.position)
        if _step_log.isEnabledFor(logging.DEBUG):
            contents = self._stream.describe_batch(batch)
            _log_step(self.name, self._host, ready, position, time.perf_counter() - start, contents)

    def _running_pipeline(self) -> Pipeline:
        """Returns the pipeline of this generation. Each object is stored before it starts threads, for ``close``."""
        if self._left is not None:
            self._close_left()
        if self._pipeline is None:
            self._pipeline = self._make_pipeline()
            if self._closed:  # by another thread, which found no pipeline to close
                self._pipeline.close()
                self._raise_closed()
        if self._finalizer is None:
            # A feed that is dropped without close, or lives until exit, must not leave threads behind.
            self._finalizer = finalize(self, self._pipeline.close, "dropped its feed")
        return self._pipeline

    def _make_pipeline(self) -> Pipeline:
        cursor, settings = self._cursor, self._settings
        try:
            if self._opening is None:
                self._opening = self._open(cursor)
            reader = self._opened(self._opening)
            if self._closed:  # by another thread: do not wait for other hosts below
                reader.close()
                self._raise_closed()
            fingerprint = self._stream.fingerprint(cursor) if self._hosts_agree else {}
        except Exception as error:
            self._handshake.fail(error)
            raise
        self._handshake.agree(
            handshake.agreed_settings(settings, fingerprint, cursor), timeout_seconds=settings.timeout_seconds
        )
        return make_pipeline(
            reader,
            stream=self._stream,
            placer=self._placer,
            cursor=cursor,
            host_rows=self._host_rows,
            settings=settings,
            stats=self._stats,
            name=self.name,
            scope=self._scope,
            round=self._handshake.round,
            hosts_agree=self._hosts_agree,
            follows=self._follows,
        )

    # ------------------------------------------------------------------ state

    def get_state(self) -> dict[str, JsonValue]:
        """Returns the state after the last delivered batch, as JSON. Call at any time; no cross-host communication."""
        return self._stream.state(self._cursor).to_json()

    @hides_own_frames
    @in_turn
    def set_state(self, state: Mapping[str, JsonValue]) -> None:
        """Resumes from ``state``. An interrupt (Ctrl-C) leaves the feed either at its old cursor or at the new one.

        Raises:
          StateMismatchError: the state is damaged, from a newer version, or from a different stream. The feed is
            unchanged.
          MeshfeedError: ``next``, ``set_state`` or ``reset`` is running on another thread or below this call.
        """
        cursor = opening = None
        try:
            parsed = feed_state.parse_state(state)
            if parsed.kind != self._stream.kind:
                raise feed_state.kind_mismatch(parsed.kind, self._stream.kind)
            cursor = self._stream.restore(parsed)
            if self._stream.opens_at_restore:
                opening = self._open(cursor)
                self._opened(opening)
            self._begin(cursor, opening, "set a state in its feed")
        except BaseException as error:
            if self._cursor is cursor:  # interrupted after the switch: the new state is in effect
                raise
            unfinished = isinstance(error, StalledError) or not isinstance(error, Exception)
            if opening is not None and unfinished:
                opening.discard(lambda reader: reader.close())
                if self._stream.moved_by_opening:
                    self._begin(self._cursor, None, "was interrupted in set_state of its feed")
            if isinstance(error, Exception):
                self._handshake.fail(error, refused=True)
            raise

    def _open(self, cursor: Cursor) -> SingleCall[AnyReader]:
        """Opens the data on a separate thread, which no interrupt can stop halfway."""
        stream, host_rows, hosts_agree = self._stream, self._host_rows, self._hosts_agree or self._follows
        previous = self._last_opening

        def open_reader() -> AnyReader:
            if previous is not None:
                previous.wait()  # an interrupt may have left it under way, and both may use one iterator
            return stream.open_reader(cursor, host_rows, hosts_agree=hosts_agree)

        self._last_opening = opening = SingleCall(open_reader, f"meshfeed-open-{self.name}")
        return opening

    def _opened(self, opening: SingleCall[AnyReader]) -> AnyReader:
        """Waits for the data to be opened, for as long as dropping records makes progress.

        Raises:
          StalledError: there was no progress for ``timeout_seconds``.
        """
        seconds = self._settings.timeout_seconds
        report = ProgressReport(coordination.key_value_store() if self._hosts_agree else None, seconds)

        def tick(waited: float) -> None:
            report.update()
            if waited >= seconds <= PROGRESS.idle_seconds():
                raise StalledError(
                    f"host {self._host} itself is late: it is {str(PROGRESS) or 'opening the data'}, without progress for "
                    f"{min(waited, PROGRESS.idle_seconds()):.0f} s (timeout_seconds={seconds:g}). Check its storage, or "
                    "raise timeout_seconds if that may take longer.",
                    hosts=(self._host,),
                    waited_seconds=waited,
                )

        try:
            return opening.result(tick)
        finally:
            report.end()

    @hides_own_frames
    @in_turn
    def reset(self) -> None:
        """Returns to the first batch of the stream; keeps ``num_lanes`` from a restored state."""
        self._begin(self._stream.start(self._cursor), None, "reset its feed")

    def _begin(self, cursor: Cursor, opening: SingleCall[AnyReader] | None, doing: str) -> None:
        """Starts a new generation of the feed at ``cursor``."""
        self._stats.restart()
        self._handshake.withdraw()
        self._leave(cursor, opening, doing)
        if self._closed:  # nothing will read from what was opened to check a state
            self._leave(cursor, None, doing)

    # ------------------------------------------------------------------ inspection

    @property
    def step(self) -> int:
        """Batches delivered so far, which is the index of the next batch."""
        return self._cursor.step

    @property
    def position(self) -> int:
        """Real records delivered so far, over all hosts."""
        return self._cursor.position

    def __bool__(self) -> bool:
        """True for every feed: without it, Python would ask for the length, which a stream does not have."""
        return True

    def __len__(self) -> int:
        """Total number of batches, including delivered ones.

        Raises:
          TypeError: the stream is infinite, or its length is unknown.
        """
        steps = self._stream.num_steps(self._cursor)
        if steps is None:
            raise TypeError(f"{self.name} repeats forever (num_epochs=None) and has no length.")
        return steps

    @property
    def element_spec(self) -> PyTree:
        """Spec of the next batch, a pytree of ``jax.ShapeDtypeStruct`` with shardings. Reads a record if needed."""
        spec = spec_with_mask(self._stream.record_spec(self._cursor), self._settings.mask_key)
        return self._placer.element_spec(spec, self._stream.batch_size_at(self._cursor))

    @hides_own_frames
    def record_ids(self, step: int) -> RecordIds:
        """Returns the record ids of any past or future batch.

        Args:
          step: index of the batch.

        Returns:
          int64 ``[rows]`` in row order, without padding.

        Raises:
          IndexError: the stream has no such step.
          SettingsError: ``step`` is not an integer.
          SourceError: the source is not random-access.
        """
        return self._stream.record_ids(self._cursor, _checked_step(step, "record_ids"))

    @hides_own_frames
    def read(self, record_ids: Sequence[int] | np.ndarray) -> PyTree:
        """Returns decoded records as host-local numpy: a pytree of arrays ``[len(record_ids), ...]``.

        Raises:
          SourceError: an id is not in the source, or the source is not random-access.
          SettingsError: ``record_ids`` is not a sequence of integers.
        """
        return self._stream.read(record_ids)

    @hides_own_frames
    def replay(self, step: int, *, state: Mapping[str, JsonValue] | None = None) -> PyTree:
        """Reads all rows of one global batch again, on this host alone, as host-local numpy. The feed does not move.

        Args:
          step: index of the batch.
          state: a state taken at or before the step, with all lanes of a stream (:func:`meshfeed.merge_states`). None
            reads from the beginning. Ignored for random access.

        Returns:
          A pytree of arrays ``[global_batch_size, ...]``, including padding and mask.

        Raises:
          IndexError: the stream has no such step.
          StateMismatchError: the state is from a different stream, or lacks lanes.
          SettingsError: the state was taken after the step, or ``step`` is not an integer.
          SourceError: host batches cannot be replayed.
        """
        step = _checked_step(step, "replay")
        parsed = None if state is None else feed_state.parse_state(state)
        return replay_step(self._stream, self._stream.replay_from(self._cursor, step, parsed), step)

    @hides_own_frames
    def plan(self) -> MeshPlan:
        """Returns the rows and columns that each host reads and each device holds; a notebook displays it as a picture.

        Describes the leaf that is divided in the most dimensions. Reads the first record if its shape is not known yet.

        Raises:
          SourceError: the first record cannot be read, or the source is empty.
        """
        return plan_of_batch(self.element_spec)

    def config(self) -> dict[str, JsonValue]:
        """Returns all settings and the fingerprint, as JSON."""
        return {
            **settings_json(self._settings),
            "name": self.name,
            "kind": self._stream.kind,
            "num_lanes": self._cursor.num_lanes or None,
            "participants": list(self._participants),
            "fingerprint": self._stream.fingerprint(self._cursor),
        }

    @property
    def local_iterator(self) -> LocalIterator:
        """The feed as the local iterator that MaxText expects, with its state after the last delivered batch."""
        return LocalIterator(self)

    @hides_own_frames
    def stats(self, *, since: FeedStats | None = None) -> FeedStats:
        """Returns this host's counters and times so far.

        Args:
          since: result of an earlier call; the result then covers only the time between the two calls.

        Raises:
          SettingsError: ``since`` belongs to a different feed, or is not earlier.
        """
        return stats_since(self._stats.snapshot(), since)

    @hides_own_frames
    def report(self, path: str | os.PathLike[str]) -> None:
        """Writes this host's figures over time as one HTML page, without external resources.

        For the figures of all hosts, write logs with :func:`meshfeed.monitoring.log` and run ``meshfeed report``.

        Raises:
          OSError: the file cannot be written.
        """
        local_path("path", path).write_text(report_page(report_figures([self._figures()])), encoding="utf-8")

    def _figures(self) -> HostLog:
        now = Sample(time.time(), self.step, self.position, self._stats.snapshot(), CACHES.totals())
        return HostLog(self.name, self._host, [*self._stats.history(), now])

    # ------------------------------------------------------------------ closing

    def _leave(
        self, cursor: Cursor, opening: SingleCall[AnyReader] | None, doing: str, because: BaseException | None = None
    ) -> None:
        """Discards the read-ahead and publishes a leave notice for hosts that continue."""
        if self._left is not None:
            self._close_left()
        left = _Generation(self._pipeline, self._opening, self._finalizer, doing, because)
        # Python handles signals at calls and backward jumps, so an interrupt cannot split these assignments.
        self._left, self._cursor, self._opening = left, cursor, opening
        self._pipeline = self._finalizer = self._ready = self._failed = self._failed_at = None
        self._close_left()

    def _close_left(self) -> None:
        left = self._left
        assert left is not None
        if left.finalizer is not None:
            left.finalizer.detach()
        if left.pipeline is not None:
            left.pipeline.close(left.doing, left.because)
        elif left.opening is not None:
            left.opening.discard(lambda reader: reader.close())
        self._left = None

    def close(self, *, _because: BaseException | None = None) -> None:
        """Stops threads and processes and closes the source. Idempotent; ``get_state`` still works afterwards."""
        if self._released:
            return
        self._closed = True
        if not self._owner.is_here:  # in a forked child: threads, files and keys belong to the parent
            return
        doing, because = "closed its feed", self._failed or _because
        self._leave(self._cursor, None, doing, because)
        self._handshake.leave(leave_notice(doing, self._cursor.step, because))
        self._stream.close()
        self._stats.publish(self._cursor.step, self._cursor.position)
        self._released = True

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(_because=error)


MultiHostDataLoadIterator = Feed
"""The feed under the name of MaxText's loader."""


def _checked_step(step: object, method: str) -> int:
    if isinstance(step, bool) or not isinstance(step, int | np.integer):
        raise SettingsError(f"{method}({step!r}); it takes an int of at least 0.", setting="step")
    return int(cast("int", step))


def _participants(sharding: PyTree) -> Sequence[int]:
    """Hosts with a device in the sharding. All hosts if ``sharding`` is invalid: any may be waiting for this one."""
    try:
        return participants(normalize_sharding(sharding))
    except Exception:  # make_placer raises it again
        return range(coordination.process_count())
