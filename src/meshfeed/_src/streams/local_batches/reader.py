"""Reads one host's own batches in order."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import jax
import numpy as np

from meshfeed._src.base import coordination
from meshfeed._src.base.errors import SourceError, StalledError
from meshfeed._src.base.retry import call_with_retry
from meshfeed._src.base.settings import FeedSettings
from meshfeed._src.base.types import PyTree
from meshfeed._src.plan.plan import HostRows
from meshfeed._src.reading.host_batch import RecordSpec, add_mask, check_spec, num_bytes, pad_rows, spec_of_batch
from meshfeed._src.streams.protocol import EMPTY_BATCHES, Cursor, HostBatch

_log = logging.getLogger("meshfeed.feed")


SINGLE_RECORDS = (
    "If these are single records, pass the dataset that they come from, not its iterator; if a function generates them, "
    "wrap it in sources.Stream: meshfeed.sources.Stream(lambda lane_index, num_lanes: "
    "itertools.islice(make_records(), lane_index, None, num_lanes))."
)


def rows_of(batch: PyTree) -> int:
    """Returns the number of rows of a host batch.

    Raises:
      SourceError: the batch is not a pytree of arrays with rows as the first dimension.
    """
    leaves = jax.tree.leaves(batch)
    if leaves and getattr(leaves[0], "ndim", 0):
        return int(leaves[0].shape[0])
    expected = f"a host batch is a pytree of arrays with rows first. {SINGLE_RECORDS}"
    if not leaves:
        raise SourceError(f"a host batch has no leaves: {batch!r}; {expected}")
    path = jax.tree_util.keystr(jax.tree_util.tree_flatten_with_path(batch)[0][0][0])
    raise SourceError(
        f"leaf {path or '(the batch itself)'} of a host batch is {type(leaves[0]).__name__} (dtype "
        f"{np.asarray(leaves[0]).dtype}) of shape (); {expected}"
    )


class LocalBatchReader:
    """Reads this host's batches from its iterator.

    Args:
      stream: the stream.
      cursor: where to start.
      host_rows: this host's rows.
      settings: the feed's settings.
      iterator: opened at the cursor.
      ready: the iterator's first batch, if already taken.
      epoch: index of the current pass through the iterable.
      hosts_agree: whether other hosts take part and may still have data when this one has none.
    """

    sequential = True
    empty: bool
    """Whether this host has had no batch since the start of the stream."""

    def __init__(
        self,
        stream: Any,
        cursor: Cursor,
        host_rows: HostRows,
        settings: FeedSettings,
        iterator: Any,
        ready: PyTree | None,
        epoch: int,
        *,
        hosts_agree: bool,
    ) -> None:
        self._stream = stream
        self._host_rows = host_rows
        self._settings = settings
        self._iterator = iterator
        self._ready = ready
        self._epoch = epoch
        self._step = cursor.step
        self._host = coordination.process_index()
        self.empty = cursor.step == 0
        self._hosts_agree = hosts_agree
        self._go_on = hosts_agree and settings.end == "pad"
        self._final: int | None = None
        self._entry: dict[str, Any] = cursor.entries.get(str(self._host), {})  # after this host's last batch
        self._spec: RecordSpec | None = None
        self._checked: Any = None  # structure, shapes and dtypes of the last valid batch
        self._since = time.monotonic()
        self._taking = threading.Lock()  # peek may run on the caller's thread during next

    def peek(self) -> PyTree:
        """The next batch, left for :meth:`next`."""
        if not self._taking.acquire(timeout=self._settings.timeout_seconds):
            raise StalledError(
                f"host {self._host} itself is late: it is {self.describe()} "
                f"(timeout_seconds={self._settings.timeout_seconds:g}).",
                hosts=(self._host,),
                waited_seconds=self._settings.timeout_seconds,
            )
        try:
            self._ready = call_with_retry(self._take, self._settings.retry, doing=f"taking batch {self._step}")
            if self._ready is None:
                raise SourceError("the iterable of host batches has no further batch on this host to take a look at.")
            return self._ready
        finally:
            self._taking.release()

    def _take(self) -> PyTree | None:
        """The next batch, or None at the end."""
        if self._ready is not None:
            batch, self._ready = self._ready, None
            return batch
        while True:
            try:
                batch = next(self._iterator)
                if batch is None:
                    raise SourceError("the iterable of host batches gave None; a host batch is a pytree of arrays.")
                return batch
            except StopIteration:
                epoch, epochs = self._epoch + 1, self._settings.num_epochs
                if epochs is not None and epoch >= epochs:
                    return None
                self._iterator.close()
                self._iterator, self._epoch = self._iterator.next_pass(), epoch  # counted only once it has begun
                first = next(self._iterator, None)
                if first is None:
                    raise SourceError(
                        f"the iterable of host batches gave none in epoch {self._epoch}; with num_epochs it must start "
                        "again at each iter()."
                    ) from None
                return first

    def _take_to_deliver(self) -> PyTree | None:
        """The next batch, or None at the end. With ``end="drop"`` the short one at the end of each epoch is left out."""
        while True:
            batch = call_with_retry(self._take, self._settings.retry, doing=f"taking batch {self._step}")
            if batch is None:
                return None
            self.empty = False
            self._stream.learn(batch)
            num_rows, wanted = rows_of(batch), len(self._host_rows.rows(self._stream.size_for(rows_of(batch))))
            if num_rows >= wanted or self._settings.end == "pad":
                return batch
            epoch, step = self._epoch, self._step
            self._ready = call_with_retry(self._take, self._settings.retry, doing=f"taking batch {self._step}")
            if self._ready is None:
                return None
            if self._epoch == epoch:
                raise SourceError(
                    f"host batch {self._step} has {num_rows} rows, and others follow; expected {wanted} rows, which is "
                    f"what this host holds of a global batch of {self._stream.schedule().sizes[0]}, in all batches but "
                    "the last. Give batches of that many rows, or leave global_batch_size out to take it from the first. "
                    f"{SINGLE_RECORDS if not step else ''}".rstrip()
                )

    def next(self) -> HostBatch:
        """See :class:`meshfeed._src.streams.protocol.HostReader`."""
        self._since = time.monotonic()
        start = time.perf_counter()
        batch = None
        if self._final is None:
            with self._taking:
                batch = self._take_to_deliver()
        seconds = time.perf_counter() - start
        made = self._padding() if batch is None else self._filled(batch)
        made.times = {"read_seconds": seconds}
        self._step += 1
        return made

    def _filled(self, batch: PyTree) -> HostBatch:
        """Makes a HostBatch of ``batch``, padded to this host's rows."""
        step = self._step
        self._entry = {"epoch": self._epoch, "step": step + 1, "iterator": self._iterator.get_state()}
        real = rows_of(batch)
        size = self._stream.size_for(real)
        rows = self._host_rows.rows(size)
        tree = self._check(batch, real, len(rows), step)
        return self._made(size, self._with_mask(tree, len(rows), real), rows[real:])

    def _padding(self) -> HostBatch:
        """Makes a HostBatch of padding only, while other hosts still have data."""
        if self.empty and not self._hosts_agree:
            raise SourceError(EMPTY_BATCHES)
        if not self._go_on:
            raise StopIteration
        if self._final is None:
            self._final = self._step
        if not self._entry:  # a state needs an entry even for a host that never has a batch
            self._entry = {"epoch": 0, "step": self._step, "iterator": self._iterator.get_state()}
        size, size_known = self._stream.size_of_padding()
        rows = self._host_rows.rows(size)
        tree = None
        if size_known and self._spec is not None:
            tree = self._with_mask(self._spec.zeros(len(rows)), len(rows), 0)
        return self._made(size, tree, rows, size_from_others=not size_known)

    def _with_mask(self, tree: PyTree, num_rows: int, real: int) -> PyTree:
        if self._settings.mask_key is None:
            return tree
        return add_mask(tree, self._settings.mask_key, np.arange(num_rows) < real)

    def _made(self, size: int, tree: PyTree, padded: Any, *, size_from_others: bool = False) -> HostBatch:
        padded = np.asarray(padded)
        runs = np.split(padded, np.flatnonzero(np.diff(padded) != 1) + 1) if padded.size else []
        return HostBatch(
            step=self._step,
            global_batch_size=size,
            tree=tree,
            num_bytes=0 if tree is None else num_bytes(tree),
            entries={str(self._host): self._entry},
            # run lengths keyed by (step + 1, first row): merging the hosts' maps counts replicated padding only once
            ended={(self._step + 1) << 32 | int(run[0]): run.size for run in runs},
            size_from_others=size_from_others,
        )

    def _check(self, batch: PyTree, real: int, num_rows: int, step: int) -> PyTree:
        leaves, treedef = jax.tree.flatten(batch)
        kind = treedef, [(leaf.shape, leaf.dtype) for leaf in leaves]
        if kind != self._checked:  # most batches match the last one
            found = spec_of_batch(batch, real, what=f"host batch {step}")
            if self._spec is None:
                self._spec = found
            check_spec(self._spec, found, what=f"host batch {step}")
            self._checked = kind
        if real == num_rows:
            return batch
        if real > num_rows:
            leaf = spec_of_batch(batch, real, what=f"host batch {step}").leaves[0]
            raise SourceError(
                f"host batch {step}: leaf {leaf.path or '(the batch)'} has {real} rows, and this host holds {num_rows} "
                f"rows of a global batch of {self._stream.schedule().sizes[0]}; give batches of {num_rows} rows."
                f"{'' if step else ' ' + SINGLE_RECORDS}"
            )
        return pad_rows(batch, num_rows)

    def final(self) -> int | None:
        """Returns the first step without a batch of this host, if reached."""
        return self._final

    def describe(self) -> str:
        """Returns what the reader is doing."""
        return f"waiting for host batch {self._step} for {time.monotonic() - self._since:.1f} s"

    def close(self) -> None:
        """Closes the iterator."""
        self._stream.forget(self)
        try:
            self._iterator.close()
        except Exception as error:  # a generator in which a read hangs cannot be closed
            _log.debug("closing the iterator of host batches failed: %s", error)
