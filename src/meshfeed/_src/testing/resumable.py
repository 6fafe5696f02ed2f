"""The conformance check for resumable iterators: save at any step, restore, and compare the remaining batches."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from meshfeed._src.base.errors import SettingsError
from meshfeed._src.base.exact_json import decode_value, encode_value
from meshfeed._src.base.hooks import Resumable
from meshfeed._src.base.types import PyTree, public

_SHORT = 3  # batches to compare if another check already covers the rest


class ResumableBatches(Resumable, Protocol):
    """An iterator over batches with a state."""

    def __next__(self) -> PyTree: ...


@dataclasses.dataclass(frozen=True)
class _Block:
    """Consecutive rows of one leaf: a whole numpy array, or one device's shard of a jax.Array."""

    first_row: int
    where: str
    dtype: str
    shape: tuple[int, ...]
    rows: tuple[int, ...]  # one digest per row


@dataclasses.dataclass(frozen=True)
class _Batch:
    """The contents of a batch."""

    structure: Any  # the treedef
    leaves: dict[str, list[_Block]]  # leaf path → its blocks, in a fixed order


@public("meshfeed.testing")
def check_resumable(
    make_feed: Callable[[], Any],
    *,
    max_steps: int = 40,
    save_points: Iterable[int] | None = None,
) -> int:
    """Checks that a feed, or any iterator with ``get_state`` and ``set_state``, resumes exactly.

    Runs the feed once without interruption. Then, for every save point, a new feed restored from that state must deliver
    the remaining batches bit for bit, with the same dtypes and shapes; so must a feed restored from a state that was
    saved immediately after a restore. A running feed is also set to its own current state and to a different save point.
    The states before the first batch and after the last are always checked, as is ``reset()`` if the feed has it. After
    the end, the feed must keep raising StopIteration, even if it was restored there.

    On several hosts, call this on all of them with the same arguments; each compares its own data. The number of batches
    read grows quadratically with the number of save points: use a small source.

    Args:
      make_feed: creates a new feed with the same source and settings on every call. The feed is closed if it has
        ``close``. For an iterable that is not an iterator (such as a Grain dataset), its iterator is checked.
      max_steps: number of batches to compare at most, for infinite streams.
      save_points: numbers of delivered batches after which to save; None for all.

    Returns:
      The number of save points checked.

    Raises:
      AssertionError: a batch differs; names the save point, the step, the leaf and the first differing row and, if that
        row belongs to a different step of the uninterrupted run, that step.
      SettingsError: ``max_steps`` is below 1, or a save point is outside the run.

    Examples:
      >>> import jax, meshfeed, numpy as np
      >>> from meshfeed.testing import check_resumable
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> check_resumable(lambda: meshfeed.Feed({"x": np.arange(12)}, mesh, global_batch_size=4))  # states that were tried
      4
    """
    if not callable(make_feed):
        raise SettingsError(
            f"make_feed={make_feed!r:.80}; it takes a function that makes a new feed.", setting="make_feed"
        )
    if isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 1:
        raise SettingsError(f"max_steps={max_steps!r}; it takes a positive int.", setting="max_steps")
    run = _Run(make_feed, max_steps)
    wanted = set(range(len(run.states)) if save_points is None else save_points)
    outside = sorted(point for point in wanted if not 0 <= point < len(run.states))
    if outside:
        raise SettingsError(
            f"save_points={outside}: the run has {len(run.batches)} batches, so points are 0..{len(run.batches)}.",
            setting="save_points",
        )
    points = sorted(wanted | {0, len(run.batches)})
    for number, point in enumerate(points):
        run.check_restore(point)
        run.check_running(point, other=points[(number + len(points) // 2) % len(points)])
    run.check_start_again()
    return len(points)


class _Run:
    """The uninterrupted run, and the comparisons with it."""

    def __init__(self, make_feed: Callable[[], Any], max_steps: int) -> None:
        self._make_feed = make_feed
        self.batches: list[_Batch] = []
        self.states: list[str] = []
        self.ended = False
        with self._fresh() as feed:
            self.states.append(_save(feed))
            for _ in range(max_steps):
                try:
                    batch = next(feed)
                except StopIteration:
                    self.ended = True
                    break
                self.batches.append(_digest(batch))
                self.states.append(_save(feed))
            self._row_origins = self._find_row_origins()
            if self.ended:
                self._stays_ended(feed, "after StopIteration")
            self._last_state = _save(feed)  # the state that a program would save after StopIteration

    def _find_row_origins(self) -> dict[tuple[str, int], tuple[int, int]]:
        """Maps (leaf, row digest) to (batch, row), to report where a wrong row came from."""
        return {
            (leaf, row): (step, block.first_row + number)
            for step, batch in enumerate(self.batches)
            for leaf, blocks in batch.leaves.items()
            for block in blocks
            for number, row in enumerate(block.rows)
        }

    def check_restore(self, point: int) -> None:
        """Checks a new feed restored at ``point``, and a second one restored from the state that the first saves."""
        with self._fresh() as first:
            _restore(first, self.states[point])
            again = _save(first)
            self._compare(first, point, f"restored at step {point}", limit=_SHORT)
        with self._fresh() as second:
            _restore(second, again)
            self._compare(second, point, f"restored at step {point}, saved immediately and restored again")

    def check_running(self, point: int, other: int) -> None:
        """Checks that ``set_state`` on a running feed, to its own state and to ``other``, discards the read-ahead."""
        with self._fresh() as feed:
            _restore(feed, self.states[point])
            if point < len(self.batches):
                self._compare(feed, point, f"restored at step {point}", limit=1)
                _restore(feed, _save(feed))
                self._compare(
                    feed, point + 1, f"restored at step {point}, one batch on saved and set back while running", _SHORT
                )
            _restore(feed, self.states[other])
            self._compare(feed, other, f"set to step {other} while it was running behind step {point}", _SHORT)

    def check_start_again(self) -> None:
        """Checks a feed that is set back to the start or reset after the end."""
        with self._fresh() as feed:
            _restore(feed, self._last_state)
            if self.ended:
                self._stays_ended(feed, "restored after the end")
            _restore(feed, self.states[0])
            self._compare(feed, 0, "set to the state before the first batch, from the end")
            if hasattr(feed, "reset"):
                feed.reset()
                self._compare(feed, 0, "reset after the end" if self.ended else "reset while it was running")

    @contextlib.contextmanager
    def _fresh(self) -> Iterator[Any]:
        made = self._make_feed()
        feed = made if hasattr(made, "__next__") else iter(made)
        for method in ("get_state", "set_state"):
            assert hasattr(feed, method), f"{type(feed).__name__} has no {method}, so it cannot be saved and resumed"
        try:
            yield feed
        finally:
            for thing in (feed,) if feed is made else (feed, made):
                if callable(close := getattr(thing, "close", None)):
                    close()

    def _compare(self, feed: ResumableBatches, step: int, how: str, limit: int | None = None) -> None:
        """Compares the batches of ``feed`` from ``step`` on with the uninterrupted run."""
        last = len(self.batches) if limit is None else min(len(self.batches), step + limit)
        for k in range(step, last):
            try:
                batch = _digest(next(feed))
            except StopIteration:
                raise AssertionError(
                    f"{how}: it ended before batch {k}; the uninterrupted run has {len(self.batches)} batches"
                ) from None
            if batch != self.batches[k]:
                raise AssertionError(f"{how}: batch {k} differs. {self._difference(batch, self.batches[k])}")
        if self.ended and last == len(self.batches):
            self._stays_ended(feed, how)

    def _stays_ended(self, feed: ResumableBatches, how: str) -> None:
        for attempt in range(2):  # a faulty iterator may deliver batches again after its first StopIteration
            try:
                batch = _digest(next(feed))
            except StopIteration:
                continue
            text = (
                "it continued after StopIteration" if attempt else f"it did not end after {len(self.batches)} batches"
            )
            rows = ((leaf, row) for leaf, blocks in batch.leaves.items() for block in blocks for row in block.rows)
            raise AssertionError(
                " ".join([f"{how}: {text}.", *(self._origin(*row) for row in itertools.islice(rows, 1))])
            )

    def _difference(self, got: _Batch, expected: _Batch) -> str:
        if got.leaves.keys() != expected.leaves.keys():
            return f"Its leaves are {sorted(got.leaves)}, expected {sorted(expected.leaves)}"
        if got.structure != expected.structure:
            return f"Its structure is {got.structure}, expected {expected.structure}"
        for leaf, blocks in expected.leaves.items():
            if len(got.leaves[leaf]) != len(blocks):
                return f"Leaf {leaf!r} has {len(got.leaves[leaf])} shards here, expected {len(blocks)}"
            for new, old in zip(got.leaves[leaf], blocks, strict=True):
                if dataclasses.replace(new, rows=()) != dataclasses.replace(old, rows=()):
                    return (
                        f"Leaf {leaf!r} is {new.dtype}{list(new.shape)} at {new.where}, "
                        f"expected {old.dtype}{list(old.shape)} at {old.where}"
                    )
                wrong = [r for r, (a, b) in enumerate(zip(new.rows, old.rows, strict=True)) if a != b]
                if wrong:
                    row = wrong[0]
                    return (
                        f"Leaf {leaf!r}, row {new.first_row + row} is the first of {len(wrong)} rows (of "
                        f"{len(new.rows)} at {new.where}) that differ. {self._origin(leaf, new.rows[row])}"
                    )
        raise AssertionError("two batches are unequal without a difference")  # pragma: no cover

    def _origin(self, leaf: str, row: int) -> str:
        if (leaf, row) not in self._row_origins:
            return "The row is not in the uninterrupted run."
        step, number = self._row_origins[leaf, row]
        return f"The row is row {number} of batch {step} of the uninterrupted run."


def _save(feed: ResumableBatches) -> str:
    """Returns the state as JSON text, the form stored in a checkpoint."""
    state = feed.get_state()
    try:
        # The state of a feed is JSON. Other iterators may have tuples and bytes in their state, which a feed encodes.
        is_feed_state = isinstance(state, dict) and "meshfeed" in state
        return json.dumps(state if is_feed_state else {"other": encode_value(state)})
    except TypeError as error:
        raise AssertionError(
            f"get_state() of {type(feed).__name__} returned a value that cannot be represented as JSON: {error}"
        ) from error


def _restore(feed: ResumableBatches, text: str) -> None:
    state = json.loads(text)
    feed.set_state(state if "meshfeed" in state else decode_value(state["other"]))


def _digest(batch: PyTree) -> _Batch:
    leaves, structure = jax.tree_util.tree_flatten_with_path(batch)
    return _Batch(structure, {jax.tree_util.keystr(path): _blocks(leaf) for path, leaf in leaves})


def _blocks(leaf: object) -> list[_Block]:
    if not isinstance(leaf, jax.Array):
        return [_block(leaf, 0, "the host")]
    blocks = []
    dtype = str(leaf.dtype)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    for shard in sorted(leaf.addressable_shards, key=lambda shard: shard.device.id):
        first = (shard.index[0].start or 0) if shard.index else 0
        ends = (["" if end is None else end for end in (part.start, part.stop)] for part in shard.index)
        where = f"{shard.device} {list(leaf.shape)}[{', '.join(f'{start}:{stop}' for start, stop in ends)}]"
        blocks.append(dataclasses.replace(_block(np.asarray(shard.data), first, where), dtype=dtype))
    return blocks


def _block(value: object, first_row: int, where: str) -> _Block:
    if isinstance(value, bytes | str):
        data = value if isinstance(value, bytes) else value.encode()
        return _Block(first_row, where, type(value).__name__, (), (xxhash.xxh3_64_intdigest(data),))
    array = np.asarray(value)
    rows = array if array.ndim else array[None]
    # A buffer of objects contains pointers, which differ between runs.
    parts = (repr(row).encode() if array.dtype.hasobject else np.ascontiguousarray(row).tobytes() for row in rows)
    kind = str(array.dtype) if isinstance(value, np.ndarray) else f"{type(value).__name__} {array.dtype}"
    return _Block(first_row, where, kind, array.shape, tuple(map(xxhash.xxh3_64_intdigest, parts)))
