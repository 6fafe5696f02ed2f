"""The dtypes and specs that host arrays have on devices: native byte order, and 32 bits if x64 is off.

Without x64, JAX has no 64-bit dtypes. Integers that do not fit in 32 bits are an error. Floats are rounded without one, as
``jax.device_put`` does: float64 is the default of numpy and seldom meant, and what is lost is precision.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding

from meshfeed._src.base import memory
from meshfeed._src.base.errors import SourceError
from meshfeed._src.base.trees import flatten, flatten_with_paths
from meshfeed._src.base.types import PyTree
from meshfeed._src.plan.plan import check_shape, cut_spec, leaves_with_shardings

_NARROWED: dict[np.dtype, np.dtype] = {
    np.dtype(wide): np.dtype(narrow)
    for wide, narrow in (
        (np.int64, np.int32),
        (np.uint64, np.uint32),
        (np.float64, np.float32),
        (np.complex128, np.complex64),
    )
}

_AS_THEY_ARE = frozenset(
    np.dtype(name) for name in ("int32", "float32", "uint8", "bool", "int8", "uint32")
)  # these need no conversion in any mode and skip the checks


def narrowed_dtype(dtype: npt.DTypeLike, x64: bool) -> np.dtype:
    """Returns the dtype that values of ``dtype`` have on device; ``x64`` keeps 64-bit dtypes (``jax_enable_x64``)."""
    native: np.dtype = np.dtype(dtype).newbyteorder("=")
    return native if x64 else _NARROWED.get(native, native)


def _is_numeric(dtype: np.dtype) -> bool:
    # Most types of ml_dtypes have the kind V, like structured dtypes and raw bytes.
    if dtype.names is None and dtype.type.__module__.split(".")[0] == "ml_dtypes":
        return True
    # The item sizes exclude long double, which JAX does not have.
    return dtype.kind in "biu" or (dtype.kind in "fc" and dtype.itemsize <= (8 if dtype.kind == "f" else 16))


def narrow(leaf: npt.ArrayLike, path: str, x64: bool) -> np.ndarray:
    """Returns a leaf ``[rows, ...]`` as an array of a dtype that JAX supports: unchanged, or a new aligned copy.

    Without ``x64``, int64 and uint64 become 32 bits wide if every value fits, and float64 and complex128 are rounded to 32
    bits per component. ``path`` is for messages.

    Raises:
      SourceError: an integer does not fit in 32 bits, or the dtype is not numeric (strings, objects, times).
    """
    array = leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf)
    if array.dtype in _AS_THEY_ARE:
        return array
    if not _is_numeric(array.dtype):
        raise SourceError(
            f"leaf {path or '(the only one)'} has dtype {array.dtype} and shape {array.shape}, but a jax.Array holds "
            f"only bools, integers, floats and complex numbers. Turn it into numbers in `decode`, or drop it there."
        )
    dtype = narrowed_dtype(array.dtype, x64)
    if dtype == array.dtype and array.dtype.isnative:
        return array
    if dtype.kind in "iu" and dtype.itemsize < array.dtype.itemsize:
        _check_fits(array, dtype, path)
    with np.errstate(over="ignore"):  # an out-of-range float becomes inf, as in jax.device_put
        return memory.copy(array, dtype)


def check_values(tree: PyTree, x64: bool) -> None:
    """Checks that the values of a host batch fit in the dtypes that they have on device; see :func:`narrow`.

    Raises:
      SourceError: an integer does not fit in 32 bits.
    """
    if x64 or not any(leaf.dtype.kind in "iu" and leaf.dtype.itemsize == 8 for leaf in flatten(tree)[0]):
        return
    for path, leaf in flatten_with_paths(tree)[0]:
        if leaf.dtype.kind in "iu" and leaf.dtype.itemsize == 8:
            _check_fits(leaf, narrowed_dtype(leaf.dtype, x64), path)


def _check_fits(array: np.ndarray, dtype: np.dtype, path: str) -> None:
    if not array.size:
        return
    limits = np.iinfo(dtype)
    smallest, largest = array.min(), array.max()
    if smallest >= limits.min and largest <= limits.max:
        return
    bad = (array < limits.min) | (array > limits.max)
    place = tuple(int(i[0]) for i in np.nonzero(bad))
    raise SourceError(
        f"leaf {path or '(the only one)'} of dtype {array.dtype} holds {int(array[place])} at {place}, which does not "
        f"fit in {dtype} ({limits.min}..{limits.max}), and jax_enable_x64 is off. Map the values to a smaller range "
        f"in `decode`, or enable 64-bit types with jax.config.update('jax_enable_x64', True)."
    )


@contextlib.contextmanager
def x64_types(wanted: bool) -> Iterator[None]:
    """Enables or disables 64-bit dtypes on this thread; does nothing if already so."""
    if jax.config.jax_enable_x64 == wanted:  # pyright: ignore[reportAttributeAccessIssue] # JAX 0.10 does not declare it
        yield
        return
    with jax.enable_x64(wanted):
        yield


def leaf_spec(
    global_shape: tuple[int, ...], dtype: npt.DTypeLike, sharding: NamedSharding, path: str, x64: bool
) -> jax.ShapeDtypeStruct:
    """Returns the spec of one leaf ``[global_batch_size, ...]`` of a batch, with the sharding cut to its rank.

    ``dtype`` is that of the host array; ``path`` is for messages.

    Raises:
      PlanError: a dimension is not divisible by the mesh axes of its sharding.
    """
    sharding = cut_spec(sharding, len(global_shape))
    check_shape(global_shape, sharding, path)
    return jax.ShapeDtypeStruct(global_shape, narrowed_dtype(dtype, x64), sharding=sharding)


def batch_spec(prefix: PyTree, record_shapes: PyTree, global_batch_size: int, x64: bool) -> PyTree:
    """Returns the spec of a batch: a pytree of ``jax.ShapeDtypeStruct`` with shardings.

    ``prefix`` has normalized shardings; ``record_shapes`` the ``.shape`` and ``.dtype`` of each leaf of one record.

    Raises:
      PlanError: a dimension is not divisible by the mesh axes of its sharding.
      SourceError: ``prefix`` does not match the structure of the record.
    """
    return flatten(record_shapes)[1].unflatten(
        leaf_spec((global_batch_size, *spec.shape), spec.dtype, sharding, path, x64)
        for path, spec, sharding in leaves_with_shardings(prefix, record_shapes)
    )
