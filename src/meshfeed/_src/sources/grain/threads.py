"""Daemon threads for the prefetching of a Grain iterator that the user made.

``to_iter_dataset`` reads in a ``ThreadPoolExecutor``, and Python waits for such threads when it exits: after a read that
hangs, the process would never end. The number of threads and the order of elements stay as they are.
"""

from __future__ import annotations

import concurrent.futures
from typing import Any

from meshfeed._src.base.threads import Threads
from meshfeed._src.sources.grain.pool import MAX_THREADS


def use_daemon_threads(iterator: Any) -> None:
    """Replaces the executors of a Grain iterator and of what it reads from.

    The names are private to Grain: in a version that renames them the iterator is left as it is.
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
            executor.shutdown(wait=False)  # finishes what an iterator in use has asked for
        waiting += [*getattr(node, "_parents", ()), *filter(None, [getattr(node, "_iterator", None)])]
