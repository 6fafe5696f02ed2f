"""The feed that users iterate over: it runs the stream of their source, one generation after another.

A generation begins when the feed is created and at each ``reset``, ``set_state`` and ``set_weights``. Its startup opens the
data, compares settings with the other hosts and starts the pipeline, in the background; ``start`` or the first ``next``
begins it. Each later ``next`` only takes a batch from the pipeline.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Literal, NamedTuple, NoReturn

from jax.sharding import Mesh, NamedSharding

from meshfeed._src.agreement.handshake import Handshake
from meshfeed._src.agreement.meeting import Meetings
from meshfeed._src.agreement.windows import leave_notice
from meshfeed._src.arrays.placer import make_placer
from meshfeed._src.base import coordination
from meshfeed._src.base.compiled import refuse_compiled, trace_state_clean
from meshfeed._src.base.coordination import warn_if_forgotten
from meshfeed._src.base.errors import (
    MeshfeedError,
    PeerError,
    SettingsError,
    StalledError,
    hide_own_frames,
    hides_own_frames,
)
from meshfeed._src.base.fork import Finalizer, NotCopied, Owner, finalize
from meshfeed._src.base.read_ahead import Closed
from meshfeed._src.base.settings import (
    Balance,
    BatchSchedule,
    FeedSettings,
    Retry,
    ShardShuffle,
    SkipBad,
)
from meshfeed._src.base.stats import StatsRecorder
from meshfeed._src.base.threads import SingleCall
from meshfeed._src.base.turn import TURN, in_turn, in_use
from meshfeed._src.base.types import JsonValue, PyTree, public
from meshfeed._src.feed.inspection import Inspection
from meshfeed._src.feed.local_iterator import LocalIterator
from meshfeed._src.feed.membership import Membership
from meshfeed._src.feed.parts import FeedPlace, Generation, make_stream, take_place
from meshfeed._src.feed.pipeline import Pipeline, PrefetchDepth, Ready
from meshfeed._src.feed.resharding import conclude, make_offer, make_place, warn_of_going_back
from meshfeed._src.feed.sizing import Sizer
from meshfeed._src.feed.startup import Startup, wait_until_open
from meshfeed._src.feed.step_log import STEP_LOG, log_step
from meshfeed._src.plan.plan import normalize_sharding, participants
from meshfeed._src.reading import shared_probes
from meshfeed._src.sources.recognize import describe_source
from meshfeed._src.state import state as feed_state
from meshfeed._src.state.files import Checkpointable
from meshfeed._src.streams.protocol import AnyReader, Cursor

_log = logging.getLogger("meshfeed.feed")
_CLOSE_SECONDS = 5.0
_INTERRUPTED = (
    "%s: step %d was interrupted by %s while its rows moved between hosts. The other hosts may wait for it until their "
    "runtime ends the collective. Then call set_state(get_state()) on every host, or restart the job from its last "
    "checkpoint."
)
_RESHARDED = "called reshard of its feed"


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
                "the feed. Pass num_epochs= for several epochs, each in its own order, or call reset() to repeat the same "
                "batches.",
                self._name,
            )


class _Left(NamedTuple):
    """The parts of a generation that must be closed; ``doing`` and ``because`` explain its end to the other hosts.

    ``membership`` is that in the hosts of the feed, if this host leaves them too.
    """

    startup: Startup | None
    opening: SingleCall[AnyReader] | None
    finalizer: Finalizer | None
    doing: str
    because: BaseException | None
    membership: Membership | None = None


@public("meshfeed")
class Feed(Inspection, Checkpointable, NotCopied):
    """One stream of global batches over a mesh of any number of hosts.

    The global batch of step k depends only on the source, the settings and k, not on the number of hosts, devices,
    workers or threads, or on the read-ahead. ``iter(feed)`` returns the feed itself and does not reset it.

    ``meshfeed.MultiHostDataLoadIterator`` is this class under a second name, which users of MaxText look for.
    :class:`meshfeed.maxtext.MultiHostDataLoadIterator` is a different class, with MaxText's signature, for host batches.

    Args:
      source: a source of :mod:`meshfeed.sources`; a Grain, Hugging Face, TFDS or tf.data object; a sequence, a pytree
        of numpy arrays of equal length, or an iterable of host-local batches.
      sharding: the sharding of the batches: a NamedSharding, a Mesh (rows over all its axes), or a pytree prefix of
        NamedShardings. A single NamedSharding applies to all leaves, each of which takes as many entries of its spec as it
        has dimensions and is replicated over the mesh axes of the others, even if no leaf has that many dimensions.
      global_batch_size: rows per step over all hosts, or a :class:`BatchSchedule`. Optional for HostBatches.
      shuffle: False; True (uniform over the epoch); an int, the records per block of a two-level shuffle of blocks and of
        the records in each block; or ``"shards"``, for sources over files, and ``Map``, ``Padded``, ``Packed``, ``Buckets``,
        views and mixtures over them: shards in random order, divided into ``num_lanes`` lanes, each shuffled in windows of
        two shards, so about one host needs each shard in an epoch. :class:`ShardShuffle` is the same with settings.
      seed: 0 to 2**64 - 1.
      num_epochs: passes over the source, with no gap between them; None to repeat forever.
      end: ``"drop"`` the last partial batch or ``"pad"`` it with zeros. All hosts stop at the same step. With ``"drop"`` a
        stream ends before the first step that some lane cannot fill, and what longer lanes still hold is not delivered;
        ``"pad"`` delivers every record. A warning names the shortest lane where the lengths are known.
      mask_key: with ``end="pad"``, the key of an added bool ``[global_batch_size]`` leaf, False on padded rows.
      balance: orders the rows of each global batch so that the shards of the batch cost about the same. The cost of a row is
        ``"attention"``, the sum of the squares of its segment lengths, or with ``Packed(sequence_order=("zigzag", n))`` the
        work of each of its n shards; ``"tokens"``, the sum of the lengths; or a function of its segment lengths,
        int64[segments]. The set of rows of a step and the state stay the same. Requires ``Packed`` or a source with
        ``lengths()``.
      num_lanes: for streams and ``shuffle="shards"``: number of sequential parts that the rows are divided into. Default:
        the largest common divisor of the batch sizes that is at most 64, and for ``shuffle="shards"`` at most an eighth of
        the number of shards.
      load: ``"sharded"``: each host reads the rows that its devices hold. ``"once"``: each row is read by one host, and rows
        are resharded on device. A list of process indices: like ``"once"``, but only these hosts read. A lane with rows on
        several hosts is read by each of them.
      prefetch: global batches kept ready on device; 0 disables prefetching. Batches whose parts on this host would take more
        than a quarter of its memory (or of its container's limit) are not kept ready, except for two; a warning gives the
        number. ``"auto"`` starts with 2 and keeps more if reads are uneven and the step waits.
      num_workers: processes that read and decode, or a :class:`Workers`, also on the machines of a Ray cluster. Does not
        change the stream. ``"auto"`` starts with none and measures, while the step waits for data, whether more are faster;
        ``feed.stats().tuned`` has the result.
      num_threads: threads that read and decode. None: one; 4 for remote files that are read without a cache; half as many as
        there are CPUs, but 2 to 4, for Hugging Face streams whose files pyarrow decodes. ``"auto"`` starts with that and
        measures, as for ``num_workers``.
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

    Examples:
      >>> import jax, meshfeed, numpy as np
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> feed = meshfeed.Feed({"x": np.arange(10)}, mesh, global_batch_size=4)
      >>> next(feed)["x"].tolist()
      [0, 1, 2, 3]
      >>> state = feed.get_state()  # JSON
      >>> next(feed)["x"].tolist()
      [4, 5, 6, 7]
      >>> feed.set_state(state)
      >>> next(feed)["x"].tolist()
      [4, 5, 6, 7]
      >>> feed.close()
    """

    @hides_own_frames
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
        prefetch: int | Literal["auto"] = 2,
        num_workers: int | Literal["auto"] = 0,
        num_threads: int | Literal["auto"] | None = None,
        retry: Retry = Retry(),
        bad_records: SkipBad | None = None,
        check_replicas: bool = False,
        timeout_seconds: float = 300,
        name: str | None = None,
    ) -> None:
        arguments = locals()  # must be first: only the arguments are defined
        self._opening: SingleCall[AnyReader] | None = None  # opens the data at the cursor, for the startup to come
        self._last_opening: SingleCall[AnyReader] | None = None
        self._startup: Startup | None = None
        self._pipeline: Pipeline | None = None  # of the startup, once a ``next`` has waited for it
        self._finalizer: Finalizer | None = None
        self._ready: Ready | None = None  # the next batch after a peek, or the remains of the last delivered one
        self._previous: Cursor | None = None
        self._left: _Left | None = None  # replaced by reset or set_state and not yet closed
        self._closed = self._released = False
        self._failed: BaseException | None = None
        self._failed_at: TracebackType | None = None
        self._turn: dict[str, object] = {}
        self._host = coordination.process_index()
        self._owner = Owner()
        if isinstance(source, Mesh | NamedSharding):
            raise SettingsError(
                "Feed got its arguments in the other order. Expected Feed(source, sharding, global_batch_size=…).",
                setting="sharding",
            )
        participants = _participants(sharding)
        # FeedSettings rejects other types below, once the handshake exists and can report the error to other hosts.
        self.name = name if isinstance(name, str) else coordination.next_name("feed", participants)
        self._stats = StatsRecorder(self.name)
        self._second_pass = SecondPass(self.name)
        scope = coordination.next_scope(f"feed/{self.name}", participants)
        self._meetings = Meetings(scope)
        self._membership = Membership(scope, participants)
        self._origin = 0  # step of the state that the feed was last set to
        self._taken: int | None = None  # batches before a reset, which hosts compare when they begin anew
        try:
            if self._handshake.needed:
                coordination.require_store()
            warn_if_forgotten()
            with shared_probes.divided(f"meshfeed/{scope}/probes", participants):
                self._make(source, sharding, FeedSettings.of(arguments))
        except BaseException as error:
            self._handshake.fail(error, for_good=True)  # other hosts wait for this one in the handshake
            self._handshake.leave()
            raise
        self._membership.join(self)

    @property
    def _handshake(self) -> Handshake:
        return self._membership.handshake

    def _make(self, source: object, sharding: PyTree, settings: FeedSettings) -> None:
        self._settings = settings
        self._prefetch = PrefetchDepth(settings.prefetch, self.name)
        self._sizer = Sizer(settings, self._prefetch) if settings.auto else None
        placer = make_placer(sharding, settings)
        self._stream = make_stream(source, settings, placer)
        self._place = take_place(placer, self._stream)
        self._cursor: Cursor = self._stream.start()

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
          MeshfeedError: the feed is closed, another call of ``next``, ``set_state`` or ``reset`` is running, or JAX compiles
            the caller.
          Exception: any error of the source.
        """
        if self._closed:
            self._raise_closed()
        if not trace_state_clean():
            refuse_compiled(self.name)
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
                if self._place.placer.finish_computes and not ready.finished:
                    self._finish(ready)
            except Closed:  # by another thread
                self._raise_closed()
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
        if ready.finishing and self._handshake.needed:
            raise MeshfeedError(
                f"{self.name}: step {ready.batch.step} was interrupted while its rows moved between hosts; moving them "
                "again would pair them with the other hosts' next step. Call set_state(get_state()) on every host, or "
                "restart the job from its last checkpoint."
            )
        ready.finishing = True
        try:
            ready.arrays = self._place.placer.finish(ready.arrays, ready.batch.global_batch_size)
        except BaseException as error:
            if self._handshake.needed and not isinstance(error, Exception):
                self._membership.tell(_INTERRUPTED % (self.name, ready.batch.step, type(error).__name__))
            raise
        ready.finished = True

    def _fail(self, error: Exception) -> None:
        self._stats.publish(self._cursor.step, self._cursor.position)
        if isinstance(error, StopIteration):
            self._end()
        else:
            self._failed, self._failed_at = error, error.__traceback__
        if self._startup is not None:
            self._startup.forget_error()

    def _end(self) -> None:
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
        if (
            self._sizer is not None
            and (counts.last_delivery or 0.0) >= self._sizer.look_at
            and self._pipeline is not None
        ):
            self._sizer.delivered(self._stats, self._pipeline)
        if self._stats.due:
            self._stats.publish(ready.cursor.step, ready.cursor.position)
        if STEP_LOG.isEnabledFor(logging.DEBUG):
            contents = self._stream.describe_batch(batch)
            log_step(self.name, self._host, ready, position, time.perf_counter() - start, contents)

    @hides_own_frames
    @in_turn
    def start(self) -> None:
        """Begins to open the data, agree with the other hosts and read ahead, in the background, and returns at once.

        The first ``next`` then waits only for what is left of that, so it can overlap with restoring a checkpoint or
        compiling a step. Call it at any time, also after ``set_state`` and ``reset``; a second call does nothing, nor does
        one after the end of the data or an error. With ``prefetch=0`` and one process nothing is read ahead. Where devices
        compute, as with ``load="once"``, they do so in ``next``.

        With several hosts, ``set_state`` or ``reset`` after ``start`` begins anew, on all of them: call all three in the
        same order on every host. A host that follows later than ``timeout_seconds`` is late, as in ``next``.

        Raises:
          MeshfeedError: the feed is closed, or ``next``, ``set_state`` or ``reset`` is running. Any other error comes from
            the next ``next``.
        """
        if self._closed:
            self._raise_closed()
        if self._failed is None:
            self._started()

    def _running_pipeline(self) -> Pipeline:
        """Returns the pipeline of this generation; waits for it to start."""
        pipeline = self._pipeline
        if pipeline is None:
            startup = self._started()
            try:
                pipeline = startup.pipeline()
            except MeshfeedError:
                if self._closed:  # by another thread
                    self._raise_closed()
                raise
            self._pipeline = pipeline
        return pipeline

    def _started(self) -> Startup:
        """Returns the startup of this generation, under way. It is stored before its thread starts, for ``close``."""
        if self._left is not None:
            self._close_left()
        startup = self._startup
        if startup is None:
            self._startup = startup = self._make_startup()
            self._taken = None
        if self._finalizer is None:
            # A feed that is dropped without close, or lives until exit, must not leave threads behind.
            self._finalizer = finalize(self, startup.close, "dropped its feed")
        startup.start()
        if self._closed:  # by another thread, which found no startup to close
            startup.close()
            self._raise_closed()
        return startup

    def _make_startup(self) -> Startup:
        generation = Generation(
            name=self.name,
            settings=self._settings,
            stream=self._stream,
            place=self._place,
            membership=self._membership,
            prefetch=self._prefetch,
            stats=self._stats,
            sizer=self._sizer,
            cursor=self._cursor,
            origin=self._origin,
            taken=self._taken,
        )
        return Startup(generation, self._opening or self._open(self._cursor))

    # ------------------------------------------------------------------ state

    @property
    def cannot_resume(self) -> str | None:
        """Why no saved position of this feed can be restored, and what to pass instead; None if positions can be."""
        return self._stream.cannot_resume

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
                wait_until_open(
                    opening, self._settings.timeout_seconds, name=self.name, hosts_agree=self._handshake.needed
                )
            self._begin(cursor, opening, "set a state in its feed")
            self._origin, self._taken = cursor.step, None
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

    @hides_own_frames
    @in_turn
    def set_weights(self, weights: Mapping[str, float], *, from_step: int | None = None) -> None:
        """Changes the weights of a mixture from a step on, as if the mixture had been made with that stage.

        Call it after the same step on every host, with the same arguments; hosts compare them before they read on. The
        stage is part of the state: a feed made with the original weights continues with it, on any hosts. Stages given to
        the mixture for later steps stay. What was read ahead is read again, in the background if the feed has been
        started, so call it every few hundred steps rather than at each; a stream without ``get_state`` is read and
        dropped from its beginning.

        Args:
          weights: ``{name: weight}``, with the names given to the mixture; components that it leaves out are not read.
          from_step: first step with the new weights; None for the next step. Replaces a stage of an earlier call that has
            not begun.

        Raises:
          SettingsError: the source is not a mixture, a name is unknown, a weight is invalid, no weight is above 0, or
            ``from_step`` has been delivered. The feed is unchanged.
          MeshfeedError: the feed is closed, or ``next``, ``set_state`` or ``reset`` is running.
          Exception: the error with which the feed has failed.

        Examples:
          >>> import jax, meshfeed, numpy as np
          >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
          >>> parts = {"easy": {"x": np.zeros(64)}, "hard": {"x": np.ones(64)}}
          >>> mixture = meshfeed.sources.Mixture(parts, weights={"easy": 1, "hard": 0})
          >>> feed = meshfeed.Feed(mixture, mesh, global_batch_size=4, num_epochs=None)
          >>> next(feed)["x"].tolist()
          [0.0, 0.0, 0.0, 0.0]
          >>> feed.set_weights({"hard": 1})
          >>> next(feed)["x"].tolist()
          [1.0, 1.0, 1.0, 1.0]
          >>> feed.close()
        """
        if self._closed:
            self._raise_closed()
        if self._failed is not None and not isinstance(self._failed, StopIteration):
            raise self._failed.with_traceback(self._failed_at)
        try:
            cursor = self._stream.with_stage(self._cursor, from_step, weights)
        except Exception as error:
            self._handshake.fail(error, refused=True)  # other hosts may wait for this one
            raise
        started = self._startup is not None
        self._leave(cursor, None, "set the weights of its feed")
        if started:
            self._started()

    def _open(self, cursor: Cursor) -> SingleCall[AnyReader]:
        """Opens the data on a separate thread, which no interrupt can stop halfway."""
        stream, place, hosts_agree = self._stream, self._place, self._handshake.needed or self._place.follows
        previous = self._last_opening

        def open_reader() -> AnyReader:
            if previous is not None:
                previous.wait()  # an interrupt may have left it under way, and both may use one iterator
            return stream.open_reader(cursor, place.host_rows, hosts_agree=hosts_agree)

        self._last_opening = opening = SingleCall(open_reader, f"meshfeed-open-{self.name}")
        return opening

    @hides_own_frames
    @in_turn
    def reset(self) -> None:
        """Returns to the first batch of the stream; keeps ``num_lanes`` from a restored state."""
        taken = self._taken if self._startup is None else self._cursor.step
        if self._failed is not None and not isinstance(self._failed, StopIteration):
            taken = None  # the hosts may have failed at different steps
        self._begin(self._stream.start(self._cursor), None, "reset its feed")
        self._origin, self._taken = 0, taken

    def _begin(self, cursor: Cursor, opening: SingleCall[AnyReader] | None, doing: str) -> None:
        """Starts a new generation of the feed at ``cursor``."""
        self._stats.restart()
        self._leave(cursor, opening, doing)
        if self._closed:  # nothing will read from what was opened to check a state
            self._leave(cursor, None, doing)

    @hides_own_frames
    @in_turn
    def reshard(self, sharding: PyTree) -> None:
        """Continues the same stream on another sharding, such as one without the devices of a lost host.

        Call it on all hosts that have a device in ``sharding``, with the same sharding. It waits for them, and for no other
        host. Works after an error, too: a ``PeerError``, a ``StalledError``, or one of the step. Global batches, state and
        position continue as those of a feed built on ``sharding`` and set to the same state.

        Hosts that have not delivered the same steps continue at the lowest one. Afterwards :attr:`step` is that step, so
        compare it with the step of the training state; a warning names it on hosts that had received more.

        A host without a device in ``sharding`` is left out. If it calls ``reshard`` too, it gets as many batches as the
        others, without rows, like a host that builds a feed on such a sharding; else close its feed.

        The lanes of a stream move with their rows. Those of a lost host are opened where they were last known, less than a
        second before, and read forward. If ``load`` is a list, hosts that are not in ``sharding`` are left out of it.

        Args:
          sharding: as for the constructor; every batch size must be divisible over its row axes.

        Raises:
          SettingsError: the sharding is invalid, or the source is host batches and a host would get other rows.
          PlanError: a batch size is not divisible over the mesh.
          StalledError: a host with a device in ``sharding`` did not call ``reshard`` within ``timeout_seconds``.
          PeerError: such a host cannot continue.
          AgreementError: hosts called it for different sets of hosts, or are not hosts of one feed: they have different
            settings, or steps further apart than reading ahead allows. Call ``set_state`` with the same state on all first.
          SourceError: a lane cannot be read forward.
          MeshfeedError: the feed is closed, or another call of ``next``, ``set_state``, ``reset`` or ``reshard`` is running.

        After an error or an interrupt (Ctrl-C) the feed is on its old sharding at the same position, and the call can be
        repeated on all hosts. A host that is still in ``next`` raises a ``PeerError`` within seconds of another's call.
        """
        if self._closed:
            self._raise_closed()
        try:
            self._move(*self._meet(sharding))
        except BaseException:
            self._handshake.withdraw()
            raise

    def _meet(self, sharding: PyTree) -> tuple[FeedPlace, Membership, Cursor]:
        """Agrees with the hosts of a sharding on the step to continue at, and reads their lanes forward to it."""
        settings, stream, cursor = self._settings, self._stream, self._cursor
        hosts, depth = _participants(sharding), self._prefetch.depth
        try:
            place = make_place(sharding, settings, stream, self._place)
            offer = make_offer(settings, stream, cursor, self._membership.scope, self._origin, place.placer.layout)
            self._step_aside()
        except Exception as error:
            self._meetings.fail(hosts, error)
            if stream.cannot_resume is None:  # the others have left this generation of the feed
                self._step_aside()
            raise
        outcome = self._meetings.meet(
            hosts, offer, lambda offers: conclude(offers, depth), timeout_seconds=settings.timeout_seconds
        )
        joined = Membership(outcome.scope, hosts)
        try:
            state = feed_state.parse_state(outcome.result["state"])
            moving = SingleCall(
                lambda: stream.take_over(cursor, state, place.host_rows), f"meshfeed-reshard-{self.name}"
            )
            moved = wait_until_open(
                moving, settings.timeout_seconds, name=self.name, hosts_agree=self._handshake.needed
            )
        except BaseException as error:
            joined.handshake.fail(error)  # the others wait for this host before their next batch
            raise
        warn_of_going_back(self.name, outcome.result["steps"], moved.step, self._host)
        return place, joined, moved

    def _step_aside(self) -> None:
        """Ends this generation of the feed, so that hosts that wait for this one in ``next`` learn of it."""
        self._begin(self._cursor, None, _RESHARDED)
        self._handshake.step_aside(leave_notice(_RESHARDED, self._cursor.step, None))

    def _move(self, place: FeedPlace, joined: Membership, cursor: Cursor) -> None:
        """Starts a new generation of the feed at ``cursor``, with other hosts."""
        if self._left is not None:
            self._close_left()
        joined.join(self)
        left = _Left(self._startup, self._opening, self._finalizer, _RESHARDED, None, self._membership)
        # As in _leave.
        self._left, self._cursor, self._opening = left, cursor, None
        self._startup = self._pipeline = self._finalizer = self._ready = self._failed = self._failed_at = None
        self._place, self._membership, self._origin = place, joined, cursor.step
        self._close_left()

    @property
    def local_iterator(self) -> LocalIterator:
        """The feed as the local iterator that MaxText expects, with its state after the last delivered batch."""
        return LocalIterator(self)

    # ------------------------------------------------------------------ closing

    def _leave(
        self, cursor: Cursor, opening: SingleCall[AnyReader] | None, doing: str, because: BaseException | None = None
    ) -> None:
        """Discards the read-ahead and publishes a leave notice for hosts that continue."""
        if self._left is not None:
            self._close_left()
        left = _Left(self._startup, self._opening, self._finalizer, doing, because)
        # Python handles signals at calls and backward jumps, so an interrupt cannot split these assignments.
        self._left, self._cursor, self._opening = left, cursor, opening
        self._startup = self._pipeline = self._finalizer = self._ready = self._failed = self._failed_at = None
        self._close_left()

    def _close_left(self) -> None:
        left = self._left
        assert left is not None
        if left.finalizer is not None:
            left.finalizer.detach()
        if left.startup is not None:
            left.startup.close(left.doing, left.because)
        elif left.opening is not None:
            left.opening.discard(lambda reader: reader.close())
        if not self._closed:
            self._handshake.withdraw()
        if left.membership is not None:
            left.membership.leave(leave_notice(left.doing, self._cursor.step, left.because))
        self._left = None

    def close(self, *, _because: BaseException | None = None) -> None:
        """Stops threads and processes and closes the source. Idempotent; ``get_state`` still works afterwards."""
        if self._released:
            return
        self._closed = True
        if not self._owner.is_here:  # in a forked child: threads, files and keys belong to the parent
            return
        ended = isinstance(self._failed, StopIteration)  # which is no reason that the other hosts need to look for
        doing, because = "closed its feed", _because if ended else self._failed or _because
        awaited = isinstance(self._failed, PeerError)
        self._leave(self._cursor, None, doing, because)
        if self._last_opening is not None and not self._last_opening.join(_CLOSE_SECONDS):
            text = "%s: its source is still being opened %.0f s after close; the thread ends when that returns"
            _log.warning(text, self.name, _CLOSE_SECONDS)
        self._membership.leave(leave_notice(doing, self._cursor.step, because), awaited=awaited)
        self._meetings.leave()
        self._stream.close()
        self._stats.publish(self._cursor.step, self._cursor.position)
        self._released = True

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(_because=error)


MultiHostDataLoadIterator = Feed
"""The feed under the name of MaxText's loader."""


def _participants(sharding: PyTree) -> Sequence[int]:
    """Hosts with a device in the sharding. All hosts if ``sharding`` is invalid: any may be waiting for this one."""
    try:
        return participants(normalize_sharding(sharding))
    except Exception:  # make_placer raises it again
        return range(coordination.process_count())
