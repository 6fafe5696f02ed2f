"""Puts blocks on this host's devices, as parts of global ``jax.Array``.

The fast path is ``batched_device_put``, the function underneath JAX's own transfers. It is 1.5 to 5 times as fast as the
public API because nothing is recomputed per batch. It is private, so it is probed before use (``base/jax_internals.py``)
and, if a call fails, abandoned with one log line. The public path (``jax.make_array_from_callback``) gives the same array
and also makes the first array of each kind: the fast call takes its abstract value from that array, which avoids
constructing JAX's private classes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Self

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding

from meshfeed._src.arrays.dtypes import narrow, x64_types
from meshfeed._src.base import memory
from meshfeed._src.base.errors import SourceError
from meshfeed._src.base.jax_internals import FastCall, probe_fast_call
from meshfeed._src.base.types import MeshDevice
from meshfeed._src.plan.plan import HostPlan

_log = logging.getLogger("meshfeed.put")
# Without the *_explicit levels: they also cover explicit transfers, so a user who sets them means these transfers too.
_GUARDS_OF_IMPLICIT_TRANSFERS = ("log", "disallow")
BlockOf = Callable[[tuple[slice, ...] | None], np.ndarray]
"""Index of a block in the global array → the block."""


class BlockDevicePut:
    """Puts blocks on this host's devices, for arrays of one shape, dtype and sharding.

    Args:
      device_put: shared by all leaves.
      global_shape: shape of the global arrays.
      sharding: sharding of the global arrays.
      dtype: dtype of the blocks, already narrowed.
      devices: this host's devices in the sharding's order; empty on a host outside the sharding's mesh.
      indices: for each of ``devices``, the index of its block in the global array.
    """

    def __init__(
        self,
        device_put: DevicePut,
        global_shape: tuple[int, ...],
        sharding: NamedSharding,
        dtype: npt.DTypeLike,
        devices: Sequence[MeshDevice],
        indices: Sequence[tuple[slice, ...]],
    ) -> None:
        self._device_put = device_put
        self._shape = global_shape
        self._sharding = sharding
        self._dtype = np.dtype(dtype)
        self._devices = list(devices)
        self._number_of_index = {index_key(index): number for number, index in enumerate(indices)}
        self._aval: object = None

    def __call__(self, blocks: list[np.ndarray]) -> jax.Array:
        """Returns the global array.

        Args:
          blocks: one C-contiguous array of ``dtype`` per device; several may be the same array. On CPU the result
            shares their memory: do not write to them afterwards.
        """
        if not self._devices:
            return self._device_put.without_blocks(self._shape, self._sharding, self._dtype)
        fast_call = self._device_put.fast_call
        if fast_call is not None and self._aval is not None:
            try:
                return fast_call(
                    self._aval, self._sharding, blocks, self._devices, True, enable_x64=self._device_put.x64
                )
            except (TypeError, AttributeError) as error:
                self._device_put.give_up(error)
        array = self._device_put.public_call(
            self._shape, self._sharding, self._dtype, lambda i: blocks[self._number(i)]
        )
        self._aval = getattr(array, "aval", None)
        return array

    def _number(self, index: tuple[slice, ...] | None) -> int:
        assert index is not None  # None is for dtypes without an index, such as PRNG keys
        whole = (slice(*part.indices(size)[:2]) for part, size in zip(index, self._shape, strict=True))
        return self._number_of_index[index_key(whole)]


class DevicePut:
    """The transfer path (private or public) shared by all leaves of one feed.

    Args:
      fast_call: the private call (``jax_internals.probe_fast_call``), or None to use only the public API.
      x64: whether 64-bit dtypes are enabled. Passed explicitly because the ``jax.enable_x64`` context is
        thread-local.
    """

    def __init__(self, fast_call: FastCall | None, x64: bool) -> None:
        self.fast_call = fast_call
        self.x64 = x64

    @classmethod
    def default(cls) -> Self:
        """JAX's private fast call if available, and the current value of ``jax_enable_x64`` on this thread."""
        return cls(probe_fast_call(), bool(jax.config.jax_enable_x64))  # pyright: ignore[reportAttributeAccessIssue] # JAX 0.10 does not declare it

    def give_up(self, error: Exception) -> None:
        """Switches to the public API for the rest of the feed's life."""
        if self.fast_call is not None:
            self.fast_call = None
            _log.warning(
                "batched_device_put of JAX %s no longer accepts the expected arguments (%s: %s); from now on, arrays are "
                "assembled by the public make_array_from_callback, which gives the same result more slowly",
                jax.__version__,
                type(error).__name__,
                error,
            )

    def transfer(self) -> contextlib.AbstractContextManager[object]:
        """Context for a transfer: :meth:`allowed`, annotated for the profiler."""
        annotation = jax.profiler.TraceAnnotation("meshfeed.transfer")
        return _both(self.allowed(), annotation) if _is_guarded() else annotation

    def allowed(self) -> contextlib.AbstractContextManager[object]:
        """Context in which a guard against implicit transfers permits these transfers, which are intended."""
        return jax.transfer_guard_host_to_device("allow") if _is_guarded() else contextlib.nullcontext()

    def public_call(
        self,
        global_shape: tuple[int, ...],
        sharding: NamedSharding,
        dtype: np.dtype,
        block_of: BlockOf,
    ) -> jax.Array:
        """``jax.make_array_from_callback`` under the feed's own x64 setting."""
        with x64_types(self.x64):
            return jax.make_array_from_callback(global_shape, sharding, block_of, dtype=dtype)

    def without_blocks(self, global_shape: tuple[int, ...], sharding: NamedSharding, dtype: np.dtype) -> jax.Array:
        """Returns the array of a host with no device in the sharding: no addressable shards."""
        with x64_types(self.x64):  # make_array_from_callback calls for a block even here if the array is replicated
            return jax.make_array_from_single_device_arrays(global_shape, sharding, [], dtype=dtype)


def _is_guarded() -> bool:
    return jax.config.jax_transfer_guard_host_to_device in _GUARDS_OF_IMPLICIT_TRANSFERS  # pyright: ignore[reportAttributeAccessIssue] # JAX 0.10 does not declare it


@contextlib.contextmanager
def _both(
    first: contextlib.AbstractContextManager[object], second: contextlib.AbstractContextManager[object]
) -> Iterator[None]:
    with first, second:
        yield


def index_key(index: Iterable[slice]) -> tuple[tuple[int, int], ...]:
    """Returns slices in a form that can be hashed."""
    return tuple((part.start, part.stop) for part in index)


def contiguous(part: np.ndarray) -> np.ndarray:
    """Returns ``part`` if it is C-contiguous, else a new aligned copy."""
    return part if part.flags.c_contiguous else memory.copy(part)


def check_leaf(leaf: np.ndarray, plan: HostPlan, path: str, x64: bool) -> None:
    """Checks the rows and the dtype of a host array, before any work.

    Raises:
      SourceError: it has a different number of rows than the plan, or a dtype that JAX does not support.
    """
    if leaf.ndim == 0 or leaf.shape[0] != plan.num_rows:
        raise SourceError(
            f"leaf {path or '(the only one)'} has shape {leaf.shape} and dtype {leaf.dtype}; expected {plan.num_rows} rows "
            f"first, the rows that host {plan.process_index} reads of a global batch of {plan.global_batch_size}"
        )
    narrow(leaf[:0], path, x64)
