"""Reads whole units of stored leaves once each, and copies the requested parts into this process's buffers.

Which dtype changes a restore may request.

A change of precision is often intended (float32 to bfloat16, a counter as float). A change that drops fractions, signs
or imaginary parts nearly always means that the template belongs to a different model, and would go unnoticed.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from meshfeed._src.base.errors import CheckpointError
from meshfeed._src.checkpoint.load_plan import Box, box_size, clip, intersect, slices
from meshfeed._src.checkpoint.stored import StoredArrays, StoredLeaf

# In order of generality: a cast to a later kind loses at most precision.
_KINDS = ("bool", "integer", "floating point", "complex")
_PYTHON_KINDS: dict[type, int] = {bool: 0, int: 1, float: 2, complex: 3}


def _kind(dtype: np.dtype[Any]) -> int | None:
    if dtype == np.bool_:
        return 0
    for number, kind in ((1, jnp.integer), (2, jnp.floating), (3, jnp.complexfloating)):
        if jnp.issubdtype(dtype, kind):
            return number
    return None


def check_cast(where: str, stored: Any, wanted: Any) -> None:
    """Rejects a cast that loses more than precision.

    Args:
      where: the leaf, for the error message.
      stored: stored dtype, not of PRNG keys.
      wanted: requested dtype, not of PRNG keys.

    Raises:
      CheckpointError: floats as integers, numbers as bools, complex as real, or non-numeric types.
    """
    stored, wanted = np.dtype(stored), np.dtype(wanted)
    if stored == wanted:
        return
    before, after = _kind(stored), _kind(wanted)
    if before is None and after is None and np.can_cast(stored, wanted, "safe"):  # text of a different length
        return
    if before is None or after is None or after < before:
        names = [dtype.name if kind is None else _KINDS[kind] for dtype, kind in ((stored, before), (wanted, after))]
        raise CheckpointError(
            f"{where} is stored as {stored.name}, wanted is {wanted.name}: {names[0]} values are not cast to {names[1]} "
            f"ones. Ask for {stored.name}, and convert the result where that is meant."
        )


def may_overflow(stored: Any, wanted: Any) -> bool:
    """Returns whether values of one integer dtype may not fit in another; False unless both are integer dtypes."""
    stored, wanted = np.dtype(stored), np.dtype(wanted)
    if not (jnp.issubdtype(stored, jnp.integer) and jnp.issubdtype(wanted, jnp.integer)):
        return False
    before, after = jnp.iinfo(stored), jnp.iinfo(wanted)
    return int(before.min) < int(after.min) or int(before.max) > int(after.max)


def check_fits(where: str, values: np.ndarray[Any, Any], wanted: Any) -> None:
    """Rejects integers that would wrap around.

    Raises:
      CheckpointError: a value does not fit in ``wanted``; the message gives the value and the range.
    """
    if not values.size:
        return
    limits = jnp.iinfo(np.dtype(wanted))
    least, most = int(values.min()), int(values.max())
    if least < int(limits.min) or most > int(limits.max):
        raise CheckpointError(
            f"{where} holds {least if least < int(limits.min) else most}, stored as {values.dtype.name}, and "
            f"{np.dtype(wanted).name} holds {int(limits.min)} to {int(limits.max)}. Ask for {values.dtype.name}."
        )


def check_python(where: str, stored: type, wanted: type) -> None:
    """Rejects restoring a stored Python value as a different type if that could change the value.

    Raises:
      CheckpointError: text as a number, a float as an int, and the like.
    """
    if stored is wanted:
        return
    # Treat subclasses of int and float (such as enums) as their base type.
    before, after = (
        next((k for t, k in _PYTHON_KINDS.items() if issubclass(one, t)), None) for one in (stored, wanted)
    )
    if before is None or after is None or after < before:
        raise CheckpointError(
            f"{where} is stored as {stored.__name__}, wanted is {wanted.__name__}. Ask for {stored.__name__}, and "
            "convert the result where that is meant."
        )


def python_type_of(dtype: Any) -> type:
    """Returns the Python type that a value of ``dtype`` becomes, or ``object`` if there is none."""
    kind = _kind(np.dtype(dtype))
    return object if kind is None else list(_PYTHON_KINDS)[kind]


DEFAULT_BYTES_IN_FLIGHT = 512 << 20


class Target:
    """A buffer for one box of a leaf.

    Attributes:
      box: the box in the leaf's coordinates.
      buffer: host array whose first value is the box's first; it has the final dtype.
    """

    __slots__ = ("box", "buffer")

    def __init__(self, box: Box, buffer: np.ndarray[Any, Any]) -> None:
        self.box = box
        self.buffer = buffer

    def fill(self, unit_box: Box, values: np.ndarray[Any, Any]) -> None:
        """Copies the overlap of ``unit_box`` and the box, cast to the buffer's dtype."""
        if self.buffer.ndim == 0:
            self.buffer[...] = values
            return
        common = intersect(self.box, unit_box)
        if box_size(common):
            self.buffer[slices(common, self.box)] = values[slices(common, unit_box)]


class Wanted(NamedTuple):
    """A unit to read.

    Attributes:
      leaf: the leaf that it belongs to.
      number: the unit's number.
      take: called with (box, values).
      room: memory of the unit's shape and dtype into which storage may write the values directly; if it does, ``take``
        is not called.
    """

    leaf: StoredLeaf
    number: int
    take: Callable[[Box, np.ndarray[Any, Any]], None]
    room: np.ndarray[Any, Any] | None = None


def unit_box(leaf: StoredLeaf, number: int) -> Box:
    """Returns the box of a unit; handles scalars too."""
    return leaf.units.box(number) if leaf.shape else ()


def wanted_unit(leaf: StoredLeaf, number: int, targets: Sequence[Target]) -> Wanted:
    """Describes a unit for ``targets``; it is read directly into a sole target that holds all of it without a cast."""

    def take(box: Box, values: np.ndarray[Any, Any]) -> None:
        for target in targets:
            target.fill(box, values)

    box, room = unit_box(leaf, number), None
    first = targets[0]
    if len(targets) == 1 and box and first.buffer.dtype == leaf.dtype and intersect(first.box, box) == box:
        room = first.buffer[slices(box, first.box)]
    return Wanted(leaf, number, take, room)


class UnitReader:
    """Reads units with a bounded number of bytes in flight, checks them, and counts the bytes.

    Args:
      stored: the item.
      verify: check digests.
      bytes_in_flight: limit on the bytes requested from storage at once; at least one unit is always allowed.
      on_bytes: called with the number of bytes of each unit that was read.
      must_fit: parameter name → integer dtype in which its values must fit.
    """

    def __init__(
        self,
        stored: StoredArrays,
        *,
        verify: bool,
        bytes_in_flight: int | None,
        on_bytes: Callable[[int], None] = lambda count: None,
        must_fit: Mapping[str, Any] | None = None,
    ) -> None:
        self._stored = stored
        self._verify = verify
        self._limit = DEFAULT_BYTES_IN_FLIGHT if bytes_in_flight is None else max(1, bytes_in_flight)
        self._on_bytes = on_bytes
        self._must_fit = must_fit or {}
        self.bytes_read = 0
        self.seconds = 0.0

    def read(self, wanted: Iterable[Wanted]) -> None:
        """Reads units in order and calls each one's ``take`` in the same order.

        Args:
          wanted: the units to read.

        Raises:
          CheckpointError, DamagedCheckpointError: see :meth:`StoredArrays.finish_read`; or integers that do not fit.
        """
        started = time.perf_counter()
        wanted = list(wanted)
        self._stored.open_soon(dict.fromkeys(unit.leaf.name for unit in wanted))
        pending: collections.deque[Any] = collections.deque()
        in_flight = 0

        def finish() -> int:
            unit, box, future, placed, count = pending.popleft()
            leaf = unit.leaf
            values = self._stored.finish_read(leaf, box, future, self._verify)
            if leaf.name in self._must_fit:  # while hosts still agree on errors
                check_fits(f"leaf {leaf.name!r}", values, self._must_fit[leaf.name])
            self.bytes_read += count
            self._on_bytes(count)
            if not placed:
                unit.take(box, values)
            return count

        for unit in wanted:
            leaf, box = unit.leaf, unit_box(unit.leaf, unit.number)
            count = box_size(box) * leaf.itemsize
            while pending and in_flight + count > self._limit:
                in_flight -= finish()
            future = None if unit.room is None else self._stored.start_read_into(leaf, box, unit.room)
            placed = future is not None
            pending.append((unit, box, future or self._stored.start_read(leaf, box), placed, count))
            in_flight += count
        while pending:
            finish()
        self.seconds += time.perf_counter() - started


def units_for(leaf: StoredLeaf, targets: Iterable[Target]) -> dict[int, list[Target]]:
    """Returns unit number → the targets that need part of it, ascending by number."""
    found: dict[int, list[Target]] = collections.defaultdict(list)
    units = leaf.units
    for target in targets:
        for number in units.touching(clip(target.box, leaf.shape)) if leaf.shape else (0,):
            found[number].append(target)
    return dict(sorted(found.items()))
