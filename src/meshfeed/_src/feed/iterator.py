"""The feed that users iterate over: it runs the stream of their source, one generation after another.

A generation begins when the feed is created and at each ``reset``, ``set_state`` and ``set_weights``. Its startup opens the
data, compares settings with the other hosts and starts the pipeline, in the background; ``start`` or the first ``next``
begins it. Each later ``next`` only takes a batch from the pipeline.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Literal

from jax.sharding import Mesh, NamedSharding

from meshfeed._src.agreement.meeting import Meetings
from meshfeed._src.arrays.placer import make_placer
from meshfeed._src.base import coordination
from meshfeed._src.base.coordination import warn_if_forgotten
from meshfeed._src.base.errors import MeshfeedError, SettingsError, hide_own_frames, hides_own_frames
from meshfeed._src.base.fork import NotCopied, Owner
from meshfeed._src.base.read_ahead import Closed
from meshfeed._src.base.settings import Balance, BatchSchedule, FeedSettings, Retry, ShardShuffle, SkipBad
from meshfeed._src.base.turn import TURN, in_use
from meshfeed._src.base.types import PyTree, public
from meshfeed._src.feed.compiled import refuse_compiled, trace_state_clean
from meshfeed._src.feed.generations import Generations
from meshfeed._src.feed.local_iterator import LocalIterator
from meshfeed._src.feed.membership import Membership
from meshfeed._src.feed.parts import make_stream, participants_of, take_place
from meshfeed._src.feed.pipeline import Pipeline, PrefetchDepth, Ready
from meshfeed._src.feed.recorder import StatsRecorder
from meshfeed._src.feed.sizing import Sizer
from meshfeed._src.feed.step_log import STEP_LOG, log_step
from meshfeed._src.reading import shared_probes
from meshfeed._src.state.files import Checkpointable
from meshfeed._src.streams.protocol import Cursor

_log = logging.getLogger("meshfeed.feed")
_INTERRUPTED = (
    "%s: step %d was interrupted by %s while its rows moved between hosts. The other hosts may wait for it until their "
    "runtime ends the collective. Then call set_state(get_state()) on every host, or restart the job from its last "
    "checkpoint."
)


class SecondPass:
    """Warns once, at the first ``iter(feed)`` after the end."""

    def __init__(self, name: str) -> None:
        self._name, self._warned = name, False

    def begins(self) -> None:
        """Warns, unless it has done so."""
        if not self._warned:
            self._warned = True
            _log.warning(
                "%s: iterating again after the end of the stream yields no batches, because iter(feed) does not reset "
                "the feed. Pass num_epochs= for several epochs, each in its own order, or call reset() to repeat the same "
                "batches.",
                self._name,
            )


def note_end(end: Exception, name: str, step: int, num_epochs: int | None) -> None:
    """Adds to the end of a feed what ended and how to go on, for a loop that calls ``next``."""
    end.add_note(
        f"{name} ended at step {step} with num_epochs={num_epochs}; num_epochs=None repeats the data, and `for batch in "
        "feed` leaves the loop at its end"
    )


@public("meshfeed")
class Feed(Generations, Checkpointable, NotCopied):
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
        self._opening = self._last_opening = self._startup = self._pipeline = self._finalizer = None
        self._ready = self._left = self._failed = self._failed_at = None
        self._previous: Cursor | None = None
        self._closed = self._released = False
        self._turn = {}
        self._host = coordination.process_index()
        self._owner = Owner()
        if isinstance(source, Mesh | NamedSharding):
            raise SettingsError(
                "Feed got its arguments in the other order. Expected Feed(source, sharding, global_batch_size=…).",
                setting="sharding",
            )
        participants = participants_of(sharding)
        # FeedSettings rejects other types below, once the handshake exists and can report the error to other hosts.
        self.name = name if isinstance(name, str) else coordination.next_name("feed", participants)
        self._stats = StatsRecorder(self.name)
        self._second_pass = SecondPass(self.name)
        scope = coordination.next_scope(f"feed/{self.name}", participants)
        self._meetings = Meetings(scope)
        self._membership = Membership(scope, participants)
        self._origin, self._taken = 0, None
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

    def _make(self, source: object, sharding: PyTree, settings: FeedSettings) -> None:
        self._settings = settings
        self._prefetch = PrefetchDepth(settings.prefetch, self.name)
        self._sizer = Sizer(settings, self._prefetch) if settings.auto else None
        placer = make_placer(sharding, settings)
        self._stream = make_stream(source, settings, placer)
        self._place = take_place(placer, self._stream)
        self._cursor: Cursor = self._stream.start()

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

    def _set_delivered(self, arrays: PyTree, delivered: bool) -> None:
        """Counts ``arrays``, which the last ``next`` returned, as delivered, or has them come again as after an interrupt."""
        ready, previous = self._ready, self._previous
        assert previous is not None
        before, after = (self._cursor, previous) if self._cursor.step < previous.step else (previous, self._cursor)
        self._previous, self._cursor = (before, after) if delivered else (after, before)
        if ready is not None:  # closed since, the feed gives no batch again, but its state must be right
            ready.arrays = None if delivered else arrays

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
        ended = isinstance(error, StopIteration)
        # A new one at the end: the traceback of the original keeps frames alive.
        self._failed, self._failed_at = (StopIteration(), None) if ended else (error, error.__traceback__)
        if ended:
            for end in (error, self._failed):
                note_end(end, self.name, self._cursor.step, self._settings.num_epochs)
        if ended and not self._cursor.step and not self._stream.length_is_known:
            _log.warning(
                "%s: the data ended before one full batch, so there is no batch. With end='drop' a stream ends with its "
                "shortest lane: give each lane data, or use end='pad' or fewer lanes.",
                self.name,
            )
        if self._startup is not None:
            self._startup.forget_error()

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

    @property
    def local_iterator(self) -> LocalIterator:
        """The feed as the local iterator that MaxText expects, with its state after the last delivered batch."""
        return LocalIterator(self)

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(_because=error)


MultiHostDataLoadIterator = Feed
"""The feed under the name of MaxText's loader."""
