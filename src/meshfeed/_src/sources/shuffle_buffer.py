"""Shuffles the records of any stream, with the feed's seed and an exact state.

Apart from ``window_shuffle.py``, which streams that ``recognize.py`` makes use too: one module would be a cycle of imports.
"""

from __future__ import annotations

import copy
from typing import Any

from meshfeed._src.base import hooks
from meshfeed._src.base.errors import SettingsError, SourceError, hides_own_frames
from meshfeed._src.base.types import JsonValue, public
from meshfeed._src.reading.identity import source_identity
from meshfeed._src.sources.built import SameHooks
from meshfeed._src.sources.checks import is_count
from meshfeed._src.sources.host_batches import HostBatches
from meshfeed._src.sources.recognize import as_source
from meshfeed._src.sources.window_shuffle import WindowShuffle, shuffle_windows, window_of


@public("meshfeed.sources")
class ShuffleBuffer(SameHooks):
    """Shuffles a stream within windows of records.

    Each lane reads ``size // num_lanes`` records (at least 2), delivers them in a random order that depends on the feed's
    seed, the epoch and the lane, and reads the next ones. The state is that of the stream at the start of the window,
    plus one number: a few hundred bytes for any size. Resuming reads the window again.

    Args:
      source: a stream, or any object that the feed accepts as one.
      size: records over all lanes, at least 2. They are in memory, undecoded if the stream has a decoder.

    Raises:
      SettingsError: ``size`` is not an int of at least 2, or the source is read at random.
      SourceError: ``source`` is not a source of records.

    Examples:
      >>> import numpy as np
      >>> from meshfeed.sources import ShuffleBuffer, Stream
      >>> source = ShuffleBuffer(Stream(lambda lane_index, num_lanes: ({"x": np.int32(n)} for n in range(9))), 4)
    """

    kind = "shuffle_buffer"
    _same_hooks = ("decode", "check_lanes", "file_names", "cut_version", "lane_lengths", "num_drawing", "read_threads")

    @hides_own_frames
    def __init__(self, source: Any, size: int) -> None:
        if not is_count(size, 2):
            raise SettingsError(
                f"size={size!r}; ShuffleBuffer takes a number of records of at least 2.", setting="size"
            )
        self._source, self._size = as_source(source), int(size)
        if isinstance(self._source, HostBatches):
            raise SourceError("ShuffleBuffer got batches of this host. Expected a stream of records.")
        if not hooks.is_stream(self._source):
            raise SettingsError(
                f"ShuffleBuffer got a {type(self._source).__name__}, which is read at random. Pass shuffle=True to the "
                "feed: it shuffles all records, and needs no memory.",
                setting="source",
            )
        if hooks.find(self._source, hooks.StagedStream) is not None:
            raise SettingsError(
                "ShuffleBuffer got a mixture. Expected a stream of records: the shares of a mixture hold in every block, "
                "so shuffle its components instead: Mixture({name: ShuffleBuffer(stream, size)}, weights=…).",
                setting="source",
            )

    def __repr__(self) -> str:
        return f"ShuffleBuffer({self._source!r}, {self._size:,})"

    def open(self, lane_index: int, num_lanes: int, epoch: int = 0, seed: int = 0, first_id: int = 0) -> WindowShuffle:
        """Lane ``lane_index`` of ``num_lanes`` of the stream, shuffled."""
        lane = hooks.open_lane(self._source, lane_index, num_lanes, epoch=epoch, seed=seed, first_id=first_id)
        return shuffle_windows(lane, window_of(self._size, num_lanes), (seed, epoch, lane_index))

    def with_cut(self, version: int) -> ShuffleBuffer:
        """See :class:`meshfeed._src.base.hooks.CutsLanes`; other streams lack the rest of that hook."""
        return self._over(self._source.with_cut(version))

    def unconverted(self) -> ShuffleBuffer:
        """Returns the records as they are stored, such as with text, for functions that make arrays of them."""
        return self._over(hooks.unconverted(self._source))

    def _over(self, source: Any) -> ShuffleBuffer:
        other = copy.copy(self)
        other._source = source
        return other

    def fingerprint(self) -> JsonValue:
        """Identity: that of the stream, and the size."""
        return {"source": source_identity(self._source), "size": self._size}
