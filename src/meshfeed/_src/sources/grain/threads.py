"""Daemon threads for prefetching in a Grain iterator that the user created.

``to_iter_dataset`` reads in a ``ThreadPoolExecutor``, whose threads Python joins at exit: if a read hangs, the process
never ends. The number of threads and the order of elements do not change.
"""

from __future__ import annotations

import concurrent.futures
from typing import Any

from meshfeed._src.base.threads import Threads
from meshfeed._src.sources.grain.pool import MAX_THREADS


def use_daemon_threads(iterator: Any) -> None:
    """Replaces the executors of a Grain iterator and of the iterators below it.

    Uses attributes that are private to Grain. If a version of Grain renames them, the iterator is left unchanged.
    """
    waiting, seen = [iterator], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        executor = getattr(node, "_executor", None)
        if isinstance(executor, concurrent.futures.ThreadPoolExecutor):
            node._executor = Threads(getattr(node, "_target_num_threads", MAX_THREADS), "meshfeed-grain-prefetch")
            executor.shutdown(wait=False)  # still completes reads that a running iterator has submitted
        waiting += [*getattr(node, "_parents", ()), *filter(None, [getattr(node, "_iterator", None)])]
