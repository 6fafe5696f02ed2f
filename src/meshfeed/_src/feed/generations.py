"""What begins and ends the generations of a feed.

``set_state``, ``set_weights``, ``reset`` and ``reshard`` leave a generation, with what it has read ahead, and begin another
one at a cursor. The startup of a generation opens the data, compares settings with the other hosts and starts the pipeline.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import TracebackType
from typing import NamedTuple, NoReturn

from meshfeed._src.agreement.handshake import Handshake
from meshfeed._src.agreement.meeting import Meetings
from meshfeed._src.agreement.windows import leave_notice
from meshfeed._src.base.errors import MeshfeedError, PeerError, StalledError
from meshfeed._src.base.fork import Finalizer, Owner, finalize
from meshfeed._src.base.threads import SingleCall
from meshfeed._src.base.turn import in_turn
from meshfeed._src.base.types import JsonValue, PyTree
from meshfeed._src.feed.inspection import Inspection
from meshfeed._src.feed.membership import Membership
from meshfeed._src.feed.parts import FeedPlace, Generation, participants_of
from meshfeed._src.feed.pipeline import Pipeline, PrefetchDepth, Ready
from meshfeed._src.feed.resharding import conclude, make_offer, make_place, warn_of_going_back
from meshfeed._src.feed.startup import Startup, wait_until_open
from meshfeed._src.state import state as feed_state
from meshfeed._src.streams.protocol import AnyReader, Cursor

_log = logging.getLogger("meshfeed.feed")
_CLOSE_SECONDS = 5.0
_RESHARDED = "called reshard of its feed"


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


class Generations(Inspection):
    """The methods of a feed that move it; the feed sets these attributes, and takes batches from ``_pipeline``."""

    _opening: SingleCall[AnyReader] | None  # opens the data at the cursor, for the startup to come
    _last_opening: SingleCall[AnyReader] | None
    _startup: Startup | None
    _pipeline: Pipeline | None  # of the startup, once a ``next`` has waited for it
    _finalizer: Finalizer | None
    _ready: Ready | None  # the next batch after a peek, or the remains of the last delivered one
    _left: _Left | None  # replaced by reset or set_state and not yet closed
    _released: bool
    _failed_at: TracebackType | None
    _turn: dict[str, object]
    _owner: Owner
    _meetings: Meetings
    _prefetch: PrefetchDepth
    _origin: int  # step of the state that the feed was last set to
    _taken: int | None  # batches before a reset, which hosts compare when they begin anew

    @property
    def _handshake(self) -> Handshake:
        return self._membership.handshake

    def _raise_closed(self) -> NoReturn:
        raise MeshfeedError(f"{self.name} is closed. To continue, pass its get_state() to set_state of a new feed.")

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
            if not isinstance(error, KeyboardInterrupt):  # after which the caller may repeat the call
                self._handshake.fail(error, refused=True)
            raise

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
        hosts, scope, depth = participants_of(sharding), self._membership.scope, self._prefetch.depth
        try:
            place = make_place(sharding, settings, stream, self._place)
            offer = make_offer(settings, stream, cursor, scope, self._origin, place.placer.layout, depth)
            self._step_aside()
        except Exception as error:
            self._meetings.fail(hosts, error)
            if stream.cannot_resume is None:  # the others have left this generation of the feed
                self._step_aside()
            raise
        outcome = self._meetings.meet(hosts, offer, conclude, timeout_seconds=settings.timeout_seconds)
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
        # The program ends, and the others may wait in a collective.
        if isinstance(because, SystemExit | KeyboardInterrupt):
            self._membership.tell(f"{leave_notice(doing, self._cursor.step, because)}. Collectives with it cannot end.")
        self._leave(self._cursor, None, doing, because)
        if self._last_opening is not None and not self._last_opening.join(_CLOSE_SECONDS):
            text = "%s: its source is still being opened %.0f s after close; the thread ends when that returns"
            _log.warning(text, self.name, _CLOSE_SECONDS)
        self._membership.leave(leave_notice(doing, self._cursor.step, because), awaited=awaited)
        self._meetings.leave()
        self._stream.close()
        self._stats.publish(self._cursor.step, self._cursor.position)
        self._released = True
