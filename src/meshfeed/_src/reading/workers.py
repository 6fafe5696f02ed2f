"""Workers that read and decode: a pool of child processes, which never use an accelerator.

:func:`open_pool` chooses between processes of this host and the actors of ``ray_workers.py``.
"""

from __future__ import annotations

import collections
import contextlib
import select
import signal
import sys
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from meshfeed._src.base import child as child_process
from meshfeed._src.base import serving
from meshfeed._src.base.child import ChildProcess
from meshfeed._src.base.errors import MeshfeedError, SettingsError, SourceError, StalledError, missing_package, shorten
from meshfeed._src.base.fork import finalize
from meshfeed._src.base.mapped import on_this_machine
from meshfeed._src.base.progress import PROGRESS
from meshfeed._src.base.settings import GC_EVERY, Workers
from meshfeed._src.base.stacks import PROCESSES
from meshfeed._src.base.stats import CACHES

if TYPE_CHECKING:
    from meshfeed._src.reading.ray_workers import RayPool

_SHOWN_CHARACTERS = 200  # of a request in a message
_LOOK_MILLISECONDS = 1000  # between looks at all workers, also at those that have sent nothing
_CLOSED = "the worker pool is closed"
Request = TypeVar("Request")
Answer = TypeVar("Answer")


def pickle_task(make_task: Callable[[], object], max_bytes: int | None = None, workers: Workers | None = None) -> bytes:
    """Pickles ``make_task`` for ``workers``, including closures and functions of the user's script.

    Raises:
      SettingsError: ``make_task`` refers to an object that cannot be pickled, or takes more than ``max_bytes``.
    """
    import cloudpickle

    try:
        stays_here = workers is not None and workers.engine == "process"
        with on_this_machine() if stays_here else contextlib.nullcontext():
            task = cloudpickle.dumps(make_task)
    except Exception as error:
        raise SettingsError(
            f"num_workers starts worker processes, but the source or its decoder cannot be pickled for them: {error}. "
            "Leave open files, locks and device arrays out of them, such as in __getstate__, or set num_workers=0.",
            setting="num_workers",
        ) from error
    if max_bytes is not None and len(task) > max_bytes:
        raise SettingsError(
            f"the source takes {len(task):,} bytes in each worker process, more than {max_bytes:,}.",
            setting="num_workers",
        )
    return task


class WorkerPool(Generic[Request, Answer]):
    """Processes that each handle requests in the order of submission.

    A worker handles one request at a time. Further requests and unread results are queued in memory, so callers must
    bound how many requests they submit ahead. Thread-safe if at most one thread at a time waits for each worker's
    results.

    ``make_task`` is the result of :func:`pickle_task` for a function without arguments that returns ``task``.
    ``task(request)`` returns any picklable value. Its numpy arrays reach the caller without a copy, 64-byte-aligned and
    read-only. On close, a worker calls ``task.close()``, if defined, unless it is busy with a request.

    Raises:
      SettingsError: there is no Python interpreter to start processes with.
    """

    def __init__(
        self,
        num_workers: int,
        make_task: bytes,
        *,
        name: str,
        gc_every: int = GC_EVERY,
        describe: Callable[[Any], str] = repr,
    ) -> None:
        if not sys.executable:
            raise SettingsError(
                "num_workers needs the path of the Python interpreter, but sys.executable is empty (an embedded "
                "interpreter). Set num_workers=0.",
                setting="num_workers",
            )
        self.num_workers = num_workers
        self._workers: list[_Worker[Request, Answer]] = []
        PROCESSES.add(self)
        # Also runs at exit and on garbage collection. The list is filled below, so it covers a partial failure.
        self._finalizer = finalize(self, _close_workers, self._workers)
        try:
            for worker_index in range(num_workers):
                label = f"worker {worker_index} of {num_workers} of {name}"
                self._workers.append(_Worker(label, make_task, gc_every, describe))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.child.pid for worker in self._workers]

    @property
    def killed(self) -> bool:
        """Whether a worker was ended by SIGKILL, which often comes from the kernel when memory runs out."""
        return any(worker.child.returncode == -signal.SIGKILL for worker in self._workers)

    def is_ready(self) -> bool:
        """Whether every worker has been set up. Does not wait; call it before the first request only.

        Raises:
          Exception: a worker could not be set up, as :meth:`result` raises it.
        """
        # Each sends and receives, also if an earlier one is not ready.
        ready = [worker.is_ready() for worker in self._workers]
        return all(ready)

    def stacks(self) -> list[str]:
        """Returns one text for each process with a request: what it does, and its stacks. Any thread."""
        return [text for worker in list(self._workers) if (text := worker.stacks())]

    def submit(self, worker_index: int, request: Request) -> None:
        """Queues a request and returns immediately. If the worker has died, :meth:`result` reports it.

        Raises:
          MeshfeedError: the pool is closed.
        """
        self._worker(worker_index).submit(request)

    def result(self, worker_index: int, timeout: float | None) -> Answer:
        """Waits for and returns the result of a worker's oldest pending request.

        Args:
          worker_index: index of the worker.
          timeout: maximum wait in seconds; None waits as long as the worker is alive. Safe to call again after a
            StalledError.

        Raises:
          StalledError: the result did not arrive in time.
          SourceError: the worker died (the message gives its exit code or signal), or raised an exception that cannot
            be unpickled.
          MeshfeedError: the pool is closed, or no request is pending.
          Exception: the exception of the task, with the same type and the worker's traceback as a note.
        """
        return self._worker(worker_index).result(timeout)

    def results(self, workers: Collection[int]) -> dict[int, Answer]:
        """Waits until some of these workers have a result, and returns the oldest of each by index of the worker.

        Raises as :meth:`result` does.
        """
        poller = select.poll()
        for worker_index in workers:
            poller.register(self._worker(worker_index).child, select.POLLIN)
        while True:
            answers = ((worker_index, self._worker(worker_index).poll(0)) for worker_index in workers)
            if found := {worker_index: answer[0] for worker_index, answer in answers if answer is not None}:
                return found
            poller.poll(_LOOK_MILLISECONDS)

    def _worker(self, worker_index: int) -> _Worker[Request, Answer]:
        if not self._finalizer.alive:
            raise MeshfeedError(_CLOSED)
        return self._workers[worker_index]

    def stop(self) -> None:
        """Ends the processes, even during a request, and wakes a thread in :meth:`result`. Thread-safe."""
        for worker in list(self._workers):
            worker.stop()

    def close(self) -> None:
        """Stops the processes, even during a request, and waits for them. Safe to call again."""
        self._finalizer()


class _Worker(Generic[Request, Answer]):
    """One child and its pending requests."""

    def __init__(self, label: str, make_task: bytes, gc_every: int, describe: Callable[[Any], str]) -> None:
        self.label = label
        self._describe = describe
        self.child = ChildProcess("meshfeed._src.base.child:serve", env={"JAX_PLATFORMS": "cpu"})
        self._pending: collections.deque[Request] = collections.deque()
        self._ready = False
        self._resuming = ""
        self._waits_since = 0.0
        self._death: Exception | None = None
        self._stopped = False
        self.child.send(child_process.SETUP, (make_task, gc_every))

    def submit(self, request: Request) -> None:
        self._pending.append(request)
        self.child.send(child_process.REQUEST, request)

    def stop(self) -> None:
        self._stopped = True
        self.child.stop()

    def is_ready(self) -> bool:
        while not self._ready:
            frame = self.child.take()
            if frame is None:
                if self.child.hung_up:
                    raise self._died()
                if not self.child.exchange(0):
                    return False
            elif frame.kind == serving.ERROR:
                raise self._error(frame.value)
            else:
                self._ready = frame.kind == serving.READY
        return True

    def result(self, timeout: float | None) -> Answer:
        if not self._pending:
            raise MeshfeedError(f"{self.label} has no pending request to return a result for")
        try:
            answer = self.poll(timeout)
            if answer is None:
                raise self._stalled(time.monotonic() - self._waits_since)
            return answer[0]
        finally:
            PROGRESS.ended(self._resuming)
            self._resuming = ""

    def poll(self, timeout: float | None) -> tuple[Answer] | None:
        self._waits_since = time.monotonic()
        while True:
            frame = self.child.take()
            if frame is None:
                if self._death is not None:
                    raise self._death.with_traceback(None)  # raised repeatedly; tracebacks would accumulate
                left = None if timeout is None else timeout - (time.monotonic() - self._waits_since)
                if not self.child.exchange(left):
                    return None
                if self.child.hung_up:
                    self._death = MeshfeedError(_CLOSED) if self._stopped else self._died()
            elif frame.kind == child_process.PROGRESS_TEXT:
                self._waits_since, self._resuming = time.monotonic(), frame.value
                PROGRESS.moved(self._resuming)
            elif frame.kind == serving.CACHE_USE:
                CACHES.add(frame.value)
            elif frame.kind == serving.READY:
                self._ready = True
            elif frame.kind == serving.ERROR:
                raise self._error(frame.value)
            else:
                self._pending.popleft()
                return (frame.value,)

    def _error(self, description: serving.ErrorDescription) -> Exception:
        if self._ready:
            return self._rebuild_error(description, f"while working on {self._summary(self._pending.popleft())}")
        self._death = self._rebuild_error(description, "while being set up")  # raised by every later request too
        return self._death

    def _summary(self, request: Request) -> str:
        return shorten(self._describe(request), _SHOWN_CHARACTERS)

    def stacks(self) -> str:
        try:
            doing = self._doing() if self._pending or not self._ready else ""
        except IndexError:  # its result has just arrived
            return ""
        return f"{self.label} (process {self.child.pid}), {doing}:\n{self.child.stacks()}" if doing else ""

    def _doing(self) -> str:
        if not self._ready:
            return "being set up (importing, opening the source)"
        return self._resuming or f"working on {self._summary(self._pending[0])}"

    def _stalled(self, waited: float) -> StalledError:
        error = StalledError(
            f"{self.label} (process {self.child.pid}) has not answered within {waited:.1f} s; it is "
            f"{self._doing()}. The process is alive: its storage or its decoder hangs, or is slow. See where with "
            f"`py-spy dump --pid {self.child.pid}`, or allow more time with timeout_seconds=.",
            waited_seconds=waited,
        )
        if stacks := self.child.stacks():
            error.add_note(f"its stacks, innermost call first:\n{stacks}")
        return error

    def _died(self) -> SourceError:
        how = self.child.how_it_ended()
        hint = "See its output, above or in this host's log."
        if "SIGKILL" in how:
            hint = "SIGKILL often comes from the kernel when memory runs out: see dmesg, and use fewer workers."
        doing = self._doing() if self._pending or not self._ready else "idle"
        return SourceError(f"{self.label} (process {self.child.pid}) {how} while it was {doing}. {hint}")

    def _rebuild_error(self, description: serving.ErrorDescription, doing: str) -> Exception:
        return serving.rebuild_error(description, f"in {self.label} (process {self.child.pid}) {doing}")


def _close_workers(workers: list[_Worker[Any, Any]]) -> None:
    child_process.close_children({worker.label: worker.child for worker in workers})


Pool: TypeAlias = "WorkerPool[Any, Any] | RayPool[Any, Any]"
"""Workers of any engine."""


def open_pool(
    workers: Workers,
    make_task: bytes,
    *,
    name: str,
    describe: Callable[[Any], str],
    resume: Callable[[Any, Any], Any] | None = None,
) -> Pool:
    """Returns a pool of the engine of ``workers``; see :class:`WorkerPool`.

    For tasks with a state, ``resume(request, answer)`` returns the request that brings a new worker, as its first one, to the
    state in which ``answer`` left the old one. Used by engines that replace lost workers.

    Raises:
      SettingsError: the engine cannot be used here.
    """
    if workers.engine == "ray":
        try:
            from meshfeed._src.reading.ray_workers import RayPool
        except ImportError as error:
            raise missing_package("num_workers=Workers(engine='ray')", error, "ray", setting="num_workers") from error
        return RayPool(workers, make_task, name=name, describe=describe, resume=resume)
    return WorkerPool(int(workers), make_task, name=name, gc_every=workers.gc_every, describe=describe)
