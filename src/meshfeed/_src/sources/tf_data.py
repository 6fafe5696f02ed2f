"""tf.data pipelines as lanes that resume from iterator checkpoints."""

from __future__ import annotations

import base64
import logging
import pathlib
import tempfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from meshfeed._src.base.errors import CorruptDataError, SourceError, StateMismatchError, hides_own_frames
from meshfeed._src.base.hooks import accepts_keyword
from meshfeed._src.base.types import JsonValue, Record, public
from meshfeed._src.sources.stream import check_lane_function
from meshfeed._src.sources.tf_internals import (
    Dataset,
    find_randomness,
    import_tensorflow,
    reshuffles,
    step_name,
    steps_of,
)

_log = logging.getLogger("meshfeed.sources.tfdata")
_END = object()
_FOLDER = "meshfeed-tfdata-"


class TFDataLane:
    """Records of a ``tf.data.Dataset`` as numpy, with an exact state.

    Args:
      make: returns the lane's pipeline, a new one on each call, since a ``shuffle`` reorders its records each time the
        same pipeline object is iterated. The lane makes its order deterministic.
      lane_index: the lane, for errors.

    Raises:
      SourceError: the pipeline has randomness without a seed.
    """

    def __init__(self, make: Callable[[], Dataset], lane_index: int) -> None:
        self._tf, self._make, self._lane_index = import_tensorflow(), make, lane_index
        self._pipeline: list[str] = []
        self._iterator: Iterator[object] = self._start()
        self._records = 0  # records returned since the start
        self._can_checkpoint = True
        self._error: BaseException | None = None

    def _start(self) -> Iterator[object]:
        dataset, data = self._make(), self._tf.data
        self._pipeline = _describe(dataset, self._lane_index)
        options = data.Options()
        options.deterministic = True
        # With FAIL, checkpointing raises if the pipeline has external state; the default omits that state.
        options.experimental_external_state_policy = data.experimental.ExternalStatePolicy.FAIL
        return iter(dataset.with_options(options))

    def __iter__(self) -> TFDataLane:
        return self

    def __next__(self) -> Record:
        element = self._next_element()
        return self._tf.nest.map_structure(self._to_numpy, element)

    @property
    def reads_again(self) -> bool:
        """See :class:`meshfeed._src.base.hooks.ReadsAgain`."""
        return not self._can_checkpoint

    def get_state(self) -> JsonValue:
        """State after the last record returned: an iterator checkpoint and the number of records before it.

        If tf.data cannot checkpoint the pipeline, the state has only the number, and a restore reads the records again.
        """
        # Before the first record there is nothing to save: a new pipeline is in the same state.
        checkpoint = self._take_checkpoint() if self._can_checkpoint and self._records else None
        return {"pipeline": self._pipeline, "records": self._records, "checkpoint": checkpoint}

    def set_state(self, state: JsonValue) -> None:
        """Resumes after the record at which ``state`` was taken.

        Raises:
          StateMismatchError: the pipeline has different steps, or TensorFlow cannot restore the checkpoint.
          SourceError: the pipeline ends before that record.
        """
        if state["pipeline"] != self._pipeline:
            raise StateMismatchError(
                f"lanes.{self._lane_index}.pipeline",
                state["pipeline"],
                self._pipeline,
                "Return the pipeline that the state was saved with from open(lane_index, num_lanes).",
            )
        if self._records or self._error is not None:  # a used iterator cannot be rewound
            self._start_again()
        if state["checkpoint"] is not None:
            self._restore_checkpoint(state["checkpoint"], state["records"])
        while self._records < state["records"]:
            try:
                self._next_element()
            except StopIteration:
                raise SourceError(
                    f"lane {self._lane_index} ended after {self._records:,} of the {state['records']:,} records "
                    "already delivered. Expected the pipeline that the state was saved with. Restore its files.",
                    lane_index=self._lane_index,
                ) from None

    def _start_again(self) -> None:
        self._error = None
        self._records = 0
        self._iterator = self._start()

    def close(self) -> None:
        """Releases the iterator and the records it prefetched."""
        self._iterator = iter(())

    def _next_element(self) -> object:
        if self._error is not None:
            raise self._error.with_traceback(None)  # after an error, tf.data may skip records or end silently
        try:
            element = next(self._iterator, _END)
        except Exception as error:
            self._error = self._translate(error)
            raise self._error from (None if self._error is error else error)  # not its own cause
        if element is _END:
            raise StopIteration
        self._records += 1
        return element

    def _translate(self, error: Exception) -> Exception:
        """Maps an error to OSError (can be retried) or CorruptDataError; returns other errors unchanged."""
        errors, message = self._tf.errors, getattr(error, "message", error)
        if isinstance(error, errors.DataLossError):
            return CorruptDataError(
                f"lane {self._lane_index} of tf.data read damaged data: {message}. Expected what the writer wrote. Write "
                "or download the file again.",
                lane_index=self._lane_index,
            )
        if isinstance(error, errors.UnavailableError | errors.DeadlineExceededError | errors.AbortedError):
            return OSError(f"lane {self._lane_index} of tf.data: {message}")
        return error

    def _to_numpy(self, tensor: Any) -> Record:
        if isinstance(tensor, self._tf.Tensor):
            return tensor.numpy()
        raise SourceError(
            f"a record of lane {self._lane_index} holds a {type(tensor).__name__}. Expected dense tensors. Convert it "
            "in the pipeline: to_tensor() for ragged ones, tf.sparse.to_dense for sparse ones.",
            lane_index=self._lane_index,
        )

    def _take_checkpoint(self) -> dict[str, str] | None:
        """The files of a checkpoint: suffix → base64 of zlib data. None if tf.data cannot checkpoint the pipeline."""
        errors = self._tf.errors
        with tempfile.TemporaryDirectory(prefix=_FOLDER) as folder:
            try:
                self._tf.train.Checkpoint(iterator=self._iterator).write(f"{folder}/state")
            except (errors.FailedPreconditionError, errors.UnimplementedError, errors.InvalidArgumentError) as error:
                self._give_up_checkpoints(error)
                return None
            files = {path.name.removeprefix("state"): path.read_bytes() for path in pathlib.Path(folder).iterdir()}
        return {name: base64.b64encode(zlib.compress(data, 1)).decode() for name, data in files.items()}

    def _give_up_checkpoints(self, error: Any) -> None:
        self._can_checkpoint = False
        _log.info(
            "lane %d cannot be checkpointed by tf.data (%s); it is resumed by reading it again from the start",
            self._lane_index,
            error.message,
        )

    def _restore_checkpoint(self, checkpoint: dict[str, str], records: int) -> None:
        with tempfile.TemporaryDirectory(prefix=_FOLDER) as folder:
            for name, text in checkpoint.items():
                pathlib.Path(folder, f"state{name}").write_bytes(zlib.decompress(base64.b64decode(text)))
            try:
                restored = self._tf.train.Checkpoint(iterator=self._iterator).read(f"{folder}/state")
                restored.assert_existing_objects_matched()  # read() alone ignores what does not match
                self._records = records
            except self._tf.errors.FailedPreconditionError as error:
                # Of steps with external state that had ended, the others may have been saved, but read() takes all steps.
                self._give_up_checkpoints(error)
                self._start_again()
            except (self._tf.errors.OpError, AssertionError) as error:
                raise StateMismatchError(
                    f"lanes.{self._lane_index}.checkpoint",
                    f"a checkpoint of {sum(map(len, checkpoint.values())):,} characters",
                    f"a pipeline into which TensorFlow {self._tf.__version__} cannot restore it ({error})",
                    "Return the pipeline that the state was saved with, under the same version of TensorFlow.",
                ) from error


def _describe(dataset: Dataset, lane_index: int) -> list[str]:
    """The names of a pipeline's steps, from the last to the sources, and the type of its records.

    Raises:
      SourceError: a step has randomness without a seed.
    """
    steps = steps_of(dataset)
    for loose in filter(None, map(find_randomness, steps)):
        raise SourceError(
            f"the pipeline of lane {lane_index} has a {loose}, so hosts and runs would read different records. "
            "Expected an order and randomness that the pipeline determines. Write shuffle(buffer_size, seed=…), "
            "tf.random.stateless_uniform(shape, seed=…) with a seed made of the record's number, or parallel steps without "
            "deterministic=False.",
            lane_index=lane_index,
        )
    return [*map(step_name, steps), str(dataset.element_spec)]


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
      SourceError: ``open`` is not callable, or not as ``open(lane_index, num_lanes)``.
      SettingsError: ``fingerprint`` is not JSON.
    """

    @hides_own_frames
    def __init__(self, open: Callable[..., Any], *, fingerprint: JsonValue = None) -> None:
        if not callable(open):
            raise SourceError(
                f"TFData got a {type(open).__name__}. Expected a function open(lane_index, num_lanes) that returns a "
                "tf.data.Dataset of records, such as lambda lane_index, num_lanes: dataset.shard(num_lanes, "
                "lane_index)."
            )
        self._passed = [name for name in ("epoch", "seed") if accepts_keyword(open, name)]
        check_lane_function(open, self._passed, fingerprint, "TFData")
        self._open, self._fingerprint, self._checked = open, fingerprint, False

    def __repr__(self) -> str:
        return f"TFData({getattr(self._open, '__qualname__', type(self._open).__name__)})"

    def open(self, lane_index: int, num_lanes: int, epoch: int = 0, seed: int = 0) -> TFDataLane:
        """The records of lane ``lane_index`` of ``num_lanes``, from the beginning.

        Raises:
          SourceError: the function did not return a tf.data.Dataset, or the dataset has randomness without a seed, or a
            ``shuffle`` that an earlier call had already returned.
        """
        more = {name: value for name, value in (("epoch", epoch), ("seed", seed)) if name in self._passed}

        def make() -> Dataset:
            return _checked_dataset(self._open(lane_index, num_lanes, **more), lane_index)

        if not self._checked:  # only once, since the check builds two pipelines
            _refuse_shared_shuffle(make(), make())
            self._checked = True
        return TFDataLane(make, lane_index)

    def fingerprint(self) -> JsonValue:
        """Identity: the kind, and the user's ``fingerprint`` if given; lane states also hold the pipeline's steps."""
        return {"kind": "tf.data"} if self._fingerprint is None else {"kind": "tf.data", "given": self._fingerprint}


def _checked_dataset(made: Any, lane_index: int) -> Dataset:
    if isinstance(made, import_tensorflow().data.Dataset):
        return made
    raise SourceError(
        f"open returned a {type(made).__name__} for lane {lane_index}. Expected a tf.data.Dataset of records. Return the "
        "dataset, not its iterator; for other iterators use meshfeed.sources.Stream.",
        lane_index=lane_index,
    )


def _refuse_shared_shuffle(first: Dataset, second: Dataset) -> None:
    """Checks that two calls of ``open`` do not return the same ``shuffle`` that reshuffles, or samples that are drawn anew.

    Such a step gives each of its iterators a different order, so lanes that share it would lose and repeat records.

    Raises:
      SourceError: they return the same one.
    """
    again = steps_of(second)
    if any(step is other for step in filter(reshuffles, steps_of(first)) for other in again):
        raise SourceError(
            "open returns pipelines that share a shuffle() or sample_from_datasets() made outside of it, which gives each "
            "lane a different order, so records would be lost and repeated. Call it inside open, shuffle() after shard(), or "
            "give it reshuffle_each_iteration=False or rerandomize_each_iteration=False."
        )
