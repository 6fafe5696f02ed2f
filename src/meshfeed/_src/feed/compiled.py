"""Refuses batches to a function that JAX compiles: it runs once, and each later call would get the same batch."""

from __future__ import annotations

import numpy as np
from jax.core import Tracer
from jax.lax import add

from meshfeed._src.base.errors import MeshfeedError
from meshfeed._src.base.jax_internals import find_trace_state_clean

trace_state_clean = find_trace_state_clean()
"""Whether the caller runs below no transformation of JAX, so that a batch may be taken at once."""


def refuse_compiled(name: str) -> None:
    """Below a transformation, raises a MeshfeedError if the function that takes a batch from the feed ``name`` is compiled.

    Then operations are recorded instead of run; grad and vmap outside of jit run a function at each call.
    """
    if isinstance(add(np.int32(0), np.int32(0)), Tracer):
        raise MeshfeedError(
            f"{name}: next was called in a function that JAX compiles (jit, scan, shard_map, …). It runs only once, so each "
            "later call would get the same batch. Call next(feed) outside, and pass the batch as an argument."
        )
