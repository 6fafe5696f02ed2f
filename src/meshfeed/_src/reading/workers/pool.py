"""A pool of worker processes that receive requests and return values with large arrays.

Each worker is a new Python process started with ``subprocess``: fork is unsafe with JAX's threads, and multiprocessing
imports the user's script again, which requires ``if __name__ == "__main__"``. Workers never use an accelerator.

Reads rows in worker processes: worker ``step % num_workers`` reads step ``step``.
"""

from __future__ import annotations

import collections
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from meshfeed._src.base.errors import MeshfeedError, SettingsError, SourceError, StalledError
from meshfeed._src.base.process import finalize
from meshfeed._src.base.settings import Workers
from meshfeed._src.base.stats import PROGRESS
from meshfeed._src.base.types import ColumnSlices, RecordIds
from meshfeed._src.reading.records import ReadRows, RecordReader
from meshfeed._src.reading.workers.main import ERROR, PROGRESS_TEXT, READY, REQUEST, SETUP
from meshfeed._src.reading.workers.wire import Inbox, pack_request

_log = logging.getLogger("meshfeed.workers")
GC_EVERY = 100

_EXIT_SECONDS = 5.0
_BOOT = "from meshfeed._src.reading.workers.main import main; main()"


def pickle_task(make_task: Callable[[], Any], *, setting: str = "num_workers") -> bytes:
    """Pickles ``make_task`` for a worker, including closures and functions of the user's script.

    Args:
      make_task: a function without arguments.
      setting: name of the keyword, for the error.

    Raises:
      SettingsError: ``make_task`` refers to an object that cannot be pickled.
    """
    import cloudpickle

    try:
        return cloudpickle.dumps(make_task)
    except Exception as error:
        raise SettingsError(
            f"{setting} asks for worker processes, but the source or its decoder cannot be sent to one: {error}. "
            f"Leave open files, locks and device arrays out of them, or set {setting}=0.",
            setting=setting,
        ) from error


class WorkerPool:
    """Processes that each handle requests in the order of submission.

    A worker handles one request at a time. Further requests and unread results are queued in memory, so callers must
    bound how many requests they submit ahead. Thread-safe if at most one thread at a time waits for each worker's
    results.

    Args:
      num_workers: number of processes.
      make_task: the result of :func:`pickle_task` for a function without arguments that returns ``task``.
        ``task(request)`` returns any picklable value. Its numpy arrays reach the caller without a copy, 64-byte-aligned
        and read-only. On close, a worker calls ``task.close()``, if defined, unless it is busy with a request.
      name: name of the pool, for messages.
      gc_every: requests per run of a worker's garbage collector, which is otherwise disabled; 0 keeps Python's default.
      describe: describes a request, for messages.

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
                "num_workers needs the path of the Python interpreter, and sys.executable is empty here (an embedded "
                "interpreter). Set num_workers=0.",
                setting="num_workers",
            )
        self.num_workers = num_workers
        self._workers: list[_Worker] = []
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
        return [worker.process.pid for worker in self._workers]

    def submit(self, worker_index: int, request: Any) -> None:
        """Queues a request and returns immediately. If the worker has died, :meth:`result` reports it.

        Raises:
          MeshfeedError: the pool is closed.
        """
        self._worker(worker_index).submit(request)

    def result(self, worker_index: int, timeout: float | None) -> Any:
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

    def _worker(self, worker_index: int) -> _Worker:
        if not self._finalizer.alive:
            raise MeshfeedError("the worker pool is closed")
        return self._workers[worker_index]

    def close(self) -> None:
        """Stops the processes, even during a request, and waits for them. Safe to call again."""
        self._finalizer()


class _Worker:
    """One process, its socket and its pending requests."""

    def __init__(self, label: str, make_task: bytes, gc_every: int, describe: Callable[[Any], str]) -> None:
        self._label = label
        self._describe = describe
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # -P: the import path comes from PYTHONPATH alone. Workers must not read the terminal's input.
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=_environment(),
            )
        except BaseException:
            self._connection.close()
            raise
        finally:
            theirs.close()
        self._connection.setblocking(False)  # submit() must not wait for a busy worker
        self._inbox = Inbox(self._connection)
        self._outbox: collections.deque[memoryview] = collections.deque()
        self._pending: collections.deque[Any] = collections.deque()
        self._lock = threading.Lock()  # guards the outbox
        self._ready = False
        self._resuming = ""
        self._open = True
        self._death: SourceError | None = None
        self._send(SETUP, (make_task, gc_every))

    def submit(self, request: Any) -> None:
        self._pending.append(request)
        self._send(REQUEST, request)

    def _send(self, kind: int, value: Any) -> None:
        with self._lock:
            self._outbox.append(memoryview(pack_request(kind, value)))
            self._flush()

    def _flush(self) -> None:
        """Sends as much as the socket accepts without blocking; :meth:`_wait` sends the rest."""
        try:
            while self._outbox:
                sent = self._connection.send(self._outbox[0])
                if sent == len(self._outbox[0]):
                    self._outbox.popleft()
                else:
                    self._outbox[0] = self._outbox[0][sent:]
        except BlockingIOError:
            pass
        except OSError:  # the worker is dead; result() raises that after returning the results already sent
            self._outbox.clear()

    def result(self, timeout: float | None) -> Any:
        if not self._pending:
            raise MeshfeedError(f"{self._label} was asked for a result without a request")
        try:
            return self._next_answer(timeout)
        finally:
            PROGRESS.ended(self._resuming)
            self._resuming = ""

    def _next_answer(self, timeout: float | None) -> Any:
        start = time.monotonic()
        while True:
            frame = self._inbox.take()
            if frame is not None and frame.kind == PROGRESS_TEXT:
                start, self._resuming = time.monotonic(), frame.value
                PROGRESS.moved(self._resuming)
                continue
            if frame is not None and frame.kind == READY:
                self._ready = True
                continue
            if frame is not None:
                if self._ready:
                    request = self._pending.popleft()
                    doing = f"while working on {self._summary(request)}"
                else:
                    doing = "while being set up"
                if frame.kind == ERROR:
                    error = self._rebuild_error(frame.value, doing)
                    if not self._ready:  # without a task, every later request fails in the same way
                        self._death = error
                    raise error
                return frame.value
            if self._death is not None:
                raise self._death.with_traceback(None)  # raised repeatedly; tracebacks would accumulate
            if not self._wait(None if timeout is None else timeout - (time.monotonic() - start)):
                raise self._stalled(time.monotonic() - start)

    def _wait(self, seconds: float | None) -> bool:
        """Sends and receives available bytes; returns False if the socket was not ready in time."""
        if seconds is not None and seconds < 0:
            return False
        poller = select.poll()
        with self._lock:
            poller.register(self._connection, select.POLLIN | (select.POLLOUT if self._outbox else 0))
        events = poller.poll(None if seconds is None else seconds * 1000)
        if not events:
            return False
        with self._lock:
            self._flush()
        if events[0][1] & ~select.POLLOUT:
            try:
                alive = self._inbox.receive()
            except BlockingIOError:
                alive = True
            except ConnectionResetError:
                alive = False
            if not alive:
                self._death = self._died()
        return True

    def _summary(self, request: Any) -> str:
        text = self._describe(request)
        return text if len(text) <= 200 else text[:197] + "…"

    def _doing(self) -> str:
        if not self._ready:
            return "being set up (importing, opening the source)"
        return self._resuming or f"working on {self._summary(self._pending[0])}"

    def _stalled(self, waited: float) -> StalledError:
        return StalledError(
            f"{self._label} (process {self.process.pid}) has not answered within {waited:.1f} s; it is "
            f"{self._doing()}. The process is alive: its storage or its decoder hangs, or is slower than that. Look "
            f"where with `py-spy dump --pid {self.process.pid}`, or give it more time with timeout_seconds=.",
            waited_seconds=waited,
        )

    def _died(self) -> SourceError:
        try:
            code = self.process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            how = "closed its connection"
        else:
            how = f"exited with code {code}" if code >= 0 else f"was killed by signal {-code} ({_signal_name(-code)})"
        hint = "Its own output, above or in this host's log, says why."
        if self.process.returncode == -signal.SIGKILL:
            hint = "SIGKILL often comes from the kernel when memory runs out: see dmesg, and use fewer workers."
        doing = self._doing() if self._pending else "idle"
        return SourceError(f"{self._label} (process {self.process.pid}) {how} while it was {doing}. {hint}")

    def _rebuild_error(self, description: dict[str, Any], doing: str) -> Any:
        where = f"in {self._label} (process {self.process.pid}) {doing}:\n{description['traceback']}"
        if description["pickled"] is not None:
            try:
                error = pickle.loads(description["pickled"])
                error.add_note(where)
                return error
            except Exception:  # the worker can load this pickle but this process cannot, so fall back to text
                pass
        return SourceError(f"{description['type']}: {description['message']}, {where}")

    def begin_close(self) -> None:
        if self._open:
            self._open = False
            self._inbox.close()
            self._connection.close()  # makes the worker exit, within 0.5 s even if it is busy

    def finish_close(self, deadline: float) -> None:
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:  # the worker holds the GIL in a C call
            self.process.kill()
            try:
                self.process.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:  # uninterruptible sleep, such as a read of a dead disk
                _log.warning(
                    "%s (process %d) is in a read that cannot be killed; not waiting for it",
                    self._label, self.process.pid,
                )  # fmt: skip


def _close_workers(workers: Sequence[_Worker]) -> None:
    deadline = time.monotonic() + _EXIT_SECONDS
    # All workers exit at the same time, within one deadline.
    for worker in workers:
        worker.begin_close()
    for worker in workers:
        worker.finish_close(deadline)


def _environment() -> dict[str, str]:
    """Environment of a worker: the import path of this process, and JAX restricted to the CPU."""
    # PYTHONPATH cannot express a path that contains its separator.
    paths = [path or os.getcwd() for path in sys.path if os.pathsep not in path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


class WorkerReader:
    """Reads rows in worker processes.

    Args:
      reader: the reader to send to each worker.
      num_workers: number of processes.
      timeout_seconds: maximum wait for one result.
    """

    def __init__(self, reader: RecordReader, num_workers: Workers, *, timeout_seconds: float) -> None:
        def make_task() -> Callable[[Any], ReadRows]:
            return lambda request: reader.read(*request)

        self._pool = WorkerPool(
            num_workers,
            pickle_task(make_task),
            name="the feed",
            gc_every=num_workers.gc_every,
            describe=lambda request: f"reading {len(request[0])} records (first id {request[0][0]})",
        )
        self._num_workers = num_workers
        self._timeout_seconds = timeout_seconds

    def submit(
        self, step: int, record_ids: RecordIds, epochs: RecordIds, columns: ColumnSlices | None
    ) -> Callable[[], ReadRows]:
        """Queues a read and returns a function that waits for its result; call both in the order of the steps."""
        worker = step % self._num_workers
        self._pool.submit(worker, (record_ids, epochs, columns))
        return lambda: self._pool.result(worker, self._timeout_seconds)

    def close(self) -> None:
        """Stops the processes."""
        self._pool.close()
