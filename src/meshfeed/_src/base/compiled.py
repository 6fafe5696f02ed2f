"""Refuses batches to a function that JAX compiles: it runs once, and each later call would get the same batch."""

from __future__ import annotations

import numpy as np

from meshfeed._src.base.errors import MeshfeedError
from meshfeed._src.base.jax_internals import is_tracing


def check_not_compiled(name: str) -> None:
    """Raises a MeshfeedError if JAX is compiling the function that takes a batch from the feed ``name``."""
    if is_tracing() and _is_staged():
        raise MeshfeedError(
            f"{name}: next was called in a function that JAX compiles (jit, scan, shard_map, …). It runs only once, so each "
            "later call would get the same batch. Call next(feed) outside, and pass the batch as an argument."
        )


def _is_staged() -> bool:
    """Whether operations are recorded instead of run; grad and vmap outside of jit run a function at each call."""
    from jax.core import Tracer
    from jax.lax import add

    return isinstance(add(np.int32(0), np.int32(0)), Tracer)
