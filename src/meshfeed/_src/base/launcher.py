"""Detects processes of a job that ``jax.distributed`` has not joined.

In a job of several processes without ``jax.distributed.initialize()``, each process acts as the whole job: it reads all
of the data and writes to the same checkpoint folder. :func:`other_processes` detects this from the launcher's
environment variables, but only from those set per task: in a Slurm batch script or an interactive ``salloc`` shell,
``SLURM_NTASKS`` is the size of the allocation, and a single process is correct there.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping

import jax

from meshfeed._src.base import coordination

INDEPENDENT = "MESHFEED_INDEPENDENT_PROCESSES"
_COUNTS = (
    "SLURM_STEP_NUM_TASKS",  # set by srun; absent outside a step, and 1 in an interactive step
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "PMI_SIZE",
)
_TPU_LISTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
_COMPLETION_INDEX = "JOB_COMPLETION_INDEX"  # set in the pods of an indexed Kubernetes Job, hence also of a JobSet
_log = logging.getLogger("meshfeed.feed")


def other_processes(environment: Mapping[str, str], *, on_tpu: bool) -> str | None:
    """Returns a variable and value that imply more than one process, such as ``"OMPI_COMM_WORLD_SIZE=4"``, or None."""
    if environment.get(INDEPENDENT, "0") not in ("", "0"):
        return None
    found = [name for name in _COUNTS if _number(environment.get(name)) > 1]
    if _number(environment.get(_COMPLETION_INDEX)) > 0:  # the first pod, 0, cannot infer whether there are others
        found.append(_COMPLETION_INDEX)
    if on_tpu:
        found += [name for name in _TPU_LISTS if "," in environment.get(name, "")]
        found += ["MEGASCALE_NUM_SLICES"] if _number(environment.get("MEGASCALE_NUM_SLICES")) > 1 else []
    return f"{found[0]}={environment[found[0]]}" if found else None


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.strip().isdecimal() else 0


def forgotten_processes() -> str | None:
    """Returns a message about processes missing from the JAX job, with the fix; None if there are none."""
    if coordination.process_count() > 1 or coordination.is_distributed():
        return None
    if (shown := other_processes(os.environ, on_tpu=jax.default_backend() == "tpu")) is None:
        return None
    return (
        f"{shown} shows that this job has several processes, but JAX sees only this one. Call jax.distributed.initialize() "
        f"before anything else. If the processes are meant to be independent jobs, set the environment variable "
        f"{INDEPENDENT}=1."
    )


@functools.cache
def warn_if_forgotten() -> None:
    """Logs a warning, once per process, if this process reads all of the data although the job has others."""
    if (text := forgotten_processes()) is not None:
        _log.warning("each process reads all of the data: %s", text)
