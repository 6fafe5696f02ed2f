"""What a feed shows of its stream and of itself: position, shapes, record ids, plan, settings, figures. Nothing moves it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from meshfeed._src.base.errors import SettingsError, hides_own_frames
from meshfeed._src.base.settings import FeedSettings
from meshfeed._src.base.stats import CACHES, FeedStats, Sample, stats_since
from meshfeed._src.base.stores import write_output
from meshfeed._src.base.types import JsonValue, PyTree, RecordIds
from meshfeed._src.feed.membership import Membership
from meshfeed._src.feed.parts import FeedPlace, replay_step
from meshfeed._src.feed.recorder import StatsRecorder
from meshfeed._src.feed.sizing import Sizer
from meshfeed._src.reading.host_batch import spec_with_mask
from meshfeed._src.sources.recognize import describe_source
from meshfeed._src.state import state as feed_state
from meshfeed._src.streams.protocol import AnyStream, Cursor

if TYPE_CHECKING:  # pictures are imported when one is drawn: they would be a tenth of what a feed costs to start
    from meshfeed._src.pictures.plan import MeshPlan
    from meshfeed._src.pictures.report import HostLog

_LAST_STEP = 1 << 40


class Inspection:
    """The methods of a feed that only look; the feed sets these attributes and moves ``_cursor``."""

    name: str
    _cursor: Cursor
    _stream: AnyStream
    _settings: FeedSettings
    _place: FeedPlace
    _membership: Membership
    _stats: StatsRecorder
    _sizer: Sizer | None
    _host: int
    _closed: bool
    _failed: BaseException | None

    @property
    def step(self) -> int:
        """Batches delivered so far, which is the index of the next batch."""
        return self._cursor.step

    @property
    def position(self) -> int:
        """Real records delivered so far, over all hosts."""
        return self._cursor.position

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
            raise TypeError(
                f"{self.name} repeats forever (num_epochs=None) and has no length. Count steps in the loop, or pass "
                "num_epochs."
            )
        return steps

    @property
    def element_spec(self) -> PyTree:
        """Spec of the next batch, a pytree of ``jax.ShapeDtypeStruct`` with shardings. Reads a record if needed."""
        spec = spec_with_mask(self._stream.record_spec(self._cursor), self._settings.mask_key)
        return self._place.placer.element_spec(spec, self._stream.batch_size_at(self._cursor))

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
        from meshfeed._src.pictures.plan import plan_of_batch

        return plan_of_batch(self.element_spec)

    def config(self) -> dict[str, JsonValue]:
        """Returns all settings and the fingerprint, as JSON."""
        return {
            **self._settings.to_json(),
            "name": self.name,
            "kind": self._stream.kind,
            "num_lanes": self._cursor.num_lanes or None,
            "participants": list(self._membership.participants),
            "fingerprint": self._stream.fingerprint(self._cursor),
        }

    @hides_own_frames
    def stats(self, *, since: FeedStats | None = None) -> FeedStats:
        """Returns this host's counters and times so far.

        Args:
          since: result of an earlier call; the result then covers only the time between the two calls.

        Raises:
          SettingsError: ``since`` belongs to a different feed, or is not earlier.
        """
        return stats_since(self._stats.snapshot(self._sizer and self._sizer.tuned()), since)

    @hides_own_frames
    def report(self, path: str | os.PathLike[str]) -> None:
        """Writes this host's figures over time as one HTML page, without external resources.

        For the figures of all hosts, write logs with :func:`meshfeed.monitoring.log` and run ``meshfeed report``.

        Args:
          path: a path, or the URL of an object.

        Raises:
          OSError: the file cannot be written.
          SettingsError: the store of a URL does not answer, or refuses the credentials.
        """
        from meshfeed._src.pictures.report import report_figures, report_page

        write_output("path", path, report_page(report_figures([self._figures()])))

    def _sample(self) -> Sample:
        """Returns the figures now, for exporters. May be called from any thread."""
        stats = self._stats
        return Sample(time.time(), self.step, self.position, stats.snapshot(), CACHES.totals(), stats.stalls)

    def _figures(self) -> HostLog:
        from meshfeed._src.pictures.report import HostLog

        now = self._sample()
        return HostLog(self.name, self._host, [*self._stats.history(), now])


def _checked_step(step: object, method: str) -> int:
    if isinstance(step, bool) or not isinstance(step, int | np.integer):
        raise SettingsError(f"{method}({step!r}); it takes an int of at least 0.", setting="step")
    number = int(cast("int", step))
    if number > _LAST_STEP:
        raise IndexError(f"{method}({step!r}); positions of records are 64-bit integers, so no stream gets there.")
    return number
