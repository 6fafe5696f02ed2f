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
    """A tf.data pipeline of single records, split into lanes by the user's own function.

    ::

        def open(lane_index, num_lanes):
            files = tf.data.Dataset.from_tensor_slices(paths).shard(num_lanes, lane_index)
            return files.interleave(tf.data.TFRecordDataset).map(parse).shuffle(10_000, seed=0)

        source = meshfeed.sources.TFData(open)

    A lane resumes from a checkpoint of its iterator, which the feed takes periodically (at an interval that depends on
    its cost), and then skips the records read since. A pipeline that tf.data cannot checkpoint (``from_generator``,
    ``py_function``) resumes by reading it again from the start.

    Args:
      open: ``open(lane_index, num_lanes)`` returns a ``tf.data.Dataset`` of single records, not batches. It must return
        the same records on every host, and the lanes together must hold each record once. It is called with ``epoch=``
        and ``seed=`` if it has these parameters; without ``epoch``, all epochs are the same.
      fingerprint: JSON value that identifies the data, such as the file names. A state can resume only if it is equal.

    Raises:
      SourceError: ``open`` is not callable.
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
        """The records of lane ``lane_index`` of ``num_lanes``, from the beginning.

        Raises:
          SourceError: the function did not return a tf.data.Dataset, or the dataset has randomness without a seed, or a
            ``shuffle`` that an earlier call had already returned.
        """
        more = {name: value for name, value in (("epoch", epoch), ("seed", seed)) if accepts_keyword(self._open, name)}

        def make() -> Any:
            return self._open(lane_index, num_lanes, **more)

        if not self._checked:  # only once, since the check builds two pipelines
            _refuse_shared_shuffle(make(), make())
            self._checked = True
        return TFDataLane(make, lane_index)

    def fingerprint(self) -> JsonValue:
        """Identity: the kind, and the user's ``fingerprint`` if given; lane states also hold the pipeline's steps."""
        return {"kind": "tf.data"} if self._fingerprint is None else {"kind": "tf.data", "given": self._fingerprint}


def _refuse_shared_shuffle(first: Any, second: Any) -> None:
    """Checks that two calls of ``open`` do not return the same reshuffling ``shuffle`` object.

    Such a shuffle gives each of its iterators a different order, so lanes that share it would lose and repeat records.

    Raises:
      SourceError: they return the same one.
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
