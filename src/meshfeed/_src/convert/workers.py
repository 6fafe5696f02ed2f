"""Runs tasks in worker processes."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from meshfeed._src.base.errors import StalledError
from meshfeed._src.convert.job import Phase, Task
from meshfeed._src.reading.workers import WorkerPool, pickle_task

_POLL_SECONDS = 0.02


def run_in_workers(directory: str, phase: Phase, numbers: Sequence[int], num_workers: int) -> None:
    """Runs tasks of one phase in ``num_workers`` processes; raises the error of one that failed."""
    make_task = functools.partial(Task, directory, phase)
    pool: WorkerPool[int, None] = WorkerPool(num_workers, pickle_task(make_task), name="convert", gc_every=0)
    try:
        _work(pool, list(reversed(numbers)), num_workers)
    finally:
        pool.close()


def _work(pool: WorkerPool[int, None], waiting: list[int], num_workers: int) -> None:
    """Gives each worker the next number when it is done with one."""
    busy = {worker for worker in range(num_workers) if waiting}
    for worker in busy:
        pool.submit(worker, waiting.pop())
    while busy:
        for worker in sorted(busy):
            try:
                pool.result(worker, _POLL_SECONDS)
            except StalledError:
                continue
            if waiting:
                pool.submit(worker, waiting.pop())
            else:
                busy.remove(worker)
