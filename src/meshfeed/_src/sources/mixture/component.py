"""One component of one mixture lane: its records over its own epochs, stacked and resumable."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshfeed._src.base.errors import SourceError, StateMismatchError
from meshfeed._src.base.ownership import own_batch
from meshfeed._src.base.progress import Dropping
from meshfeed._src.base.rng import philox
from meshfeed._src.base.types import JsonValue, PyTree, RecordIds
from meshfeed._src.order import epochs as epoch_order
from meshfeed._src.reading.host_batch import RecordSpec, RecordStack, num_rows
from meshfeed._src.reading.records import accepts_keyword, read_records, wants_rng

_COMPONENT_SEED = 104  # purpose of a derived key; differs from those in order/mixture.py


class RecordsLane:
    """Every ``num_lanes``-th record of a random-access source, in the order of one epoch, as a lane.

    Args:
      source: a random-access source.
      lane_index: 0 … num_lanes - 1.
      num_lanes: number of lanes.
      epoch: the component's epoch.
      shuffle: see :class:`meshfeed._src.order.epochs.EpochOrder`.
      seed: seed of the order.
      rng_seed: seed of the decoders' random numbers.
    """

    fresh_arrays = True

    def __init__(
        self,
        source: Any,
        lane_index: int,
        num_lanes: int,
        *,
        epoch: int,
        shuffle: bool | int,
        seed: int,
        rng_seed: int,
    ) -> None:
        self._source, self._lane_index, self._num_lanes = source, lane_index, num_lanes
        self._order = epoch_order.EpochOrder(len(source), shuffle=shuffle, seed=seed, num_epochs=None)
        self._epoch, self._rng_seed = epoch, rng_seed
        self._wants_rng = wants_rng(source)
        self._taken = 0

    def next_batch(self, num_records: int) -> PyTree:
        """Up to ``num_records`` records, stacked.

        Raises:
          StopIteration: the epoch has ended.
        """
        size = self._order.num_records
        offsets = self._lane_index + self._num_lanes * np.arange(self._taken, self._taken + num_records)
        offsets = offsets[offsets < size]
        if not offsets.size:
            raise StopIteration
        record_ids: RecordIds = self._order.ids_at(self._epoch * size + offsets)[0]
        rngs = None
        if self._wants_rng:
            rngs = [philox(self._rng_seed, self._epoch, record_id) for record_id in record_ids.tolist()]
        batch = read_records(self._source, record_ids, rngs)
        self._taken += offsets.size
        return batch

    def get_state(self) -> int:
        """Number of records read."""
        return self._taken

    def set_state(self, state: int) -> None:
        """Resumes after ``state`` records."""
        self._taken = state


class ComponentLane:
    """Reads one component for one mixture lane. Opens the source on the first read.

    Args:
      name: the component's name.
      number: the component's index in the mixture.
      source: a stream source or a random-access source.
      lane_index: 0 … num_lanes - 1.
      num_lanes: number of lanes.
      seed: the feed's seed.
      shuffle: order of a random-access source; see :class:`meshfeed._src.order.epochs.EpochOrder`.
    """

    def __init__(
        self, name: str, number: int, source: Any, lane_index: int, num_lanes: int, seed: int, shuffle: bool | int
    ) -> None:
        self.name = name
        self.epoch = 0
        self._number, self._source = number, source
        self._lane_index, self._num_lanes = lane_index, num_lanes
        self._seed, self._shuffle = seed, shuffle
        self._is_stream = hasattr(source, "open") and not hasattr(source, "__getitem__")
        self._decode = getattr(source, "decode", None) if self._is_stream else None
        self._decode_rng = accepts_keyword(self._decode, "rng")
        self._taken = 0
        self._state: Any = None
        self._skip = 0
        self._iterator: Any = None
        self._spec: RecordSpec | None = None

    @property
    def state_cost(self) -> str:
        """``state_cost`` of the open iterator; "cheap" if it has none."""
        return getattr(self._iterator, "state_cost", "cheap")

    def read(self, num_records: int) -> list[tuple[PyTree, int]]:
        """Reads ``num_records`` records, or fewer if the epoch ends first.

        Returns:
          ``[(batch, number of records in it), ...]``.

        Raises:
          SourceError: the component raised StopIteration while it was being opened or decoded.
          Any error that the component raises, with a note naming it. Do not use this object after an error.
        """
        try:
            if self._iterator is None:
                self._reopen()
            batches, missing = [], num_records
            while missing:
                batch, count = self._next(missing)
                if count:
                    batches.append((batch, count))
                    self._taken += count
                    missing -= count
                if batch is None or not count:
                    break
            return batches
        except StopIteration as error:
            raise SourceError(
                f"component {self.name!r} raised StopIteration outside of its records, in lane {self._lane_index}.",
                lane_index=self._lane_index,
            ) from error
        except Exception as error:
            error.add_note(f"in component {self.name!r} of the mixture, lane {self._lane_index}, epoch {self.epoch}")
            raise

    def next_epoch(self) -> None:
        """Starts the component's next epoch.

        Raises:
          SourceError: the current epoch had no records, so repeating it would loop forever.
        """
        if not self._taken:
            raise SourceError(
                f"component {self.name!r} of the mixture has no record in lane {self._lane_index} of {self._num_lanes} "
                f"(epoch {self.epoch}), so that it cannot be repeated. Use fewer lanes (num_lanes=), or give each lane "
                "data.",
                lane_index=self._lane_index,
            )
        self.close()
        self.epoch += 1
        self._taken, self._state, self._skip = 0, None, 0

    def get_state(self) -> JsonValue:
        """``[epoch, records taken, [the source's state] or None, records to skip from it]``."""
        iterator = self._iterator
        if iterator is None:  # not opened since set_state: return the restored state
            return [self.epoch, self._taken, self._state, self._skip]
        if self._taken and hasattr(iterator, "get_state"):
            return [self.epoch, self._taken, [iterator.get_state()], 0]
        return [self.epoch, self._taken, None, self._taken]

    def set_state(self, state: JsonValue) -> None:
        """Resumes after the record at which ``state`` was taken; opens nothing yet."""
        self.close()
        self.epoch, self._taken, self._state, self._skip = state

    def close(self) -> None:
        """Closes the open iterator."""
        iterator, self._iterator = self._iterator, None
        close = getattr(iterator, "close", None)
        if callable(close):
            close()

    def _open(self) -> Any:
        if not self._is_stream:
            return RecordsLane(
                self._source,
                self._lane_index,
                self._num_lanes,
                epoch=self.epoch,
                shuffle=self._shuffle,
                seed=epoch_order.derive_key(self._seed, _COMPONENT_SEED, self._number),
                rng_seed=self._seed,
            )
        extra: dict[str, Any] = {}
        if accepts_keyword(self._source.open, "epoch"):
            extra["epoch"] = self.epoch
        if accepts_keyword(self._source.open, "seed"):
            extra["seed"] = self._seed
        return self._source.open(self._lane_index, self._num_lanes, **extra)

    def _reopen(self) -> None:
        iterator = self._open()
        if self._state is not None:
            if not hasattr(iterator, "set_state"):
                raise StateMismatchError(
                    f"lanes.{self._lane_index}.mixture.{self.name}",
                    "a state of the component",
                    f"{type(iterator).__name__} has no set_state",
                    "Pass the component that the state was saved with.",
                )
            iterator.set_state(self._state[0])
        self._iterator = iterator
        left = self._skip
        with Dropping(f"component {self.name!r} of lane {self._lane_index}", left) as dropping:
            while left:
                batch, count = self._next(left, decode=False)
                if batch is None:
                    raise SourceError(
                        f"component {self.name!r} ended {left} records before the place where lane {self._lane_index} is "
                        "to be continued; the data has become shorter.",
                        lane_index=self._lane_index,
                    )
                left -= count
                dropping.add(count)

    def _next(self, num_records: int, *, decode: bool = True) -> tuple[PyTree, int]:
        """A batch of up to ``num_records`` records and its size; None and 0 at the end of the epoch."""
        iterator = self._iterator
        if self._decode is None and hasattr(iterator, "next_batch"):
            try:
                batch = own_batch(iterator.next_batch(num_records), iterator, "next_batch")
            except StopIteration:
                return None, 0
            return batch, num_rows(batch)
        stack, count = RecordStack(num_records, self._spec, lane_index=self._lane_index), 0
        while count < num_records:
            try:
                record = next(iterator)
            except StopIteration:
                break
            if decode:
                stack.add(self._decoded(record, count))
            count += 1
        if not count:
            return None, 0
        if not decode:  # skipped to resume: only their number counts
            return (), count
        batch, self._spec = stack.take()
        return batch, count

    def _decoded(self, record: Any, ahead: int) -> Any:
        if self._decode is None:
            return record
        if not self._decode_rng:
            return self._decode(record)
        # Unique across components, like the record ids of a random-access mixture.
        record_id = (self._number << 48) | (self._taken + ahead)
        return self._decode(
            record, rng=philox(epoch_order.derive_key(self._seed, self._lane_index), self.epoch, record_id)
        )
