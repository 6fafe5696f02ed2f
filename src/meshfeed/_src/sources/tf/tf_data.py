"""tf.data pipelines as lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshfeed._src.base.errors import SourceError
from meshfeed._src.base.names import public
from meshfeed._src.base.tracebacks import hides_own_frames
from meshfeed._src.base.types import JsonValue
from meshfeed._src.reading.records import accepts_keyword
from meshfeed._src.sources.tf.lane import TFDataLane, is_shuffle, steps_of


@public("meshfeed.sources")
class TFData:
    """Any tf.data pipeline of single records, cut into lanes by the user's own function.

    ::

        def open(lane_index, num_lanes):
            files = tf.data.Dataset.from_tensor_slices(paths).shard(num_lanes, lane_index)
            return files.interleave(tf.data.TFRecordDataset).map(parse).shuffle(10_000, seed=0)

        source = meshfeed.sources.TFData(open)

    A lane is resumed from a checkpoint of its iterator, which the feed takes now and then (how often follows from what
    it costs), and by reading over the records since. Pipelines that tf.data cannot checkpoint (``from_generator``,
    ``py_function``) are resumed by reading them again from the start.

    Args:
      open: ``open(lane_index, num_lanes)`` gives a ``tf.data.Dataset`` of single records (not of batches): the same
        records whichever host asks, and over all lanes each record once. It gets ``epoch=`` and ``seed=`` if it has
        these parameters; without ``epoch`` all epochs are alike.
      fingerprint: JSON value that must be equal for a saved state to be continued, such as the names of the files.

    Raises:
      SourceError: ``open`` is no function.
    """

    @hides_own_frames
    def __init__(self, open: Callable[..., Any], *, fingerprint: JsonValue = None) -> None:
        if not callable(open):
            raise SourceError(
                f"TFData got a {type(open).__name__}. Expected a function open(lane_index, num_lanes) that returns a "
                "tf.data.Dataset of records, such as lambda lane_index, num_lanes: dataset.shard(num_lanes, "
                "lane_index)."
            )
        self._open = open
        self._fingerprint = fingerprint
        self._checked = False

    def __repr__(self) -> str:
        return f"TFData({getattr(self._open, '__qualname__', type(self._open).__name__)})"

    def open(self, lane_index: int, num_lanes: int, epoch: int = 0, seed: int = 0) -> TFDataLane:
        """The records of lane ``lane_index`` of ``num_lanes`` from the beginning.

        Raises:
          SourceError: the function returned no tf.data.Dataset, or one that shuffles without a seed, or with a shuffle
            that it had returned before.
        """
        more = {name: value for name, value in (("epoch", epoch), ("seed", seed)) if accepts_keyword(self._open, name)}

        def make() -> Any:
            return self._open(lane_index, num_lanes, **more)

        if not self._checked:
            _refuse_shared_shuffle(make(), make())
            self._checked = True
        return TFDataLane(make, lane_index)

    def fingerprint(self) -> JsonValue:
        """What must be equal for a saved state to be continued; each lane's state has its pipeline's steps too."""
        return {"kind": "tf.data"} if self._fingerprint is None else {"kind": "tf.data", "given": self._fingerprint}


def _refuse_shared_shuffle(first: Any, second: Any) -> None:
    """Raises SourceError where two calls of ``open`` return one and the same reshuffling ``shuffle``.

    It gives another order to each of its iterators, so lanes above it would lose and repeat records.
    """
    shuffles = [step for step in steps_of(first) if is_shuffle(step)]
    again = steps_of(second)
    for step in shuffles:
        if getattr(step, "_reshuffle_each_iteration", True) is not False and any(step is other for other in again):
            raise SourceError(
                "open returns pipelines that share a shuffle() made outside of it, which gives another order to each "
                "lane, "
                "so that records would be lost and repeated. Expected a new one at each call. Call shuffle() inside "
                "open, "
                "after shard(), or give it reshuffle_each_iteration=False."
            )
