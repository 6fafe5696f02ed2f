"""Worker processes: requests in, values with large arrays out, nothing left behind.

A worker is a fresh Python process started by ``subprocess``, neither forked (JAX has threads) nor by multiprocessing
(which imports the user's script again and asks for an ``if __name__ == "__main__"``). It never touches an accelerator.
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
from meshfeed._src.base.fork import finalize
from meshfeed._src.reading.workers.main import ERROR, READY, REQUEST, SETUP
from meshfeed._src.reading.workers.wire import Inbox, pack_request

_log = logging.getLogger("meshfeed.workers")
GC_EVERY = 100

_EXIT_SECONDS = 5.0
_BOOT = "from meshfeed._src.reading.workers.main import main; main()"


def pickle_task(make_task: Callable[[], Any], *, setting: str = "num_workers") -> bytes:
    """``make_task`` as bytes that a worker can load, functions of the user's script and closures included.

    Raises:
      SettingsError: something that it holds cannot travel to another process.
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
    """Processes that each answer requests in the order in which they were given.

    A worker is busy with one request at a time; further ones wait in its queue, and so do the answers, in memory, so
    the caller bounds how many it submits ahead. Thread-safe as long as only one thread at a time asks one worker for
    results.

    Args:
      num_workers: how many processes.
      make_task: from :func:`pickle_task`: a function without arguments that returns ``task``. ``task(request)`` returns
        any value that can be pickled. Its numpy arrays reach the caller without a copy, aligned to 64 bytes and
        read-only. If ``task`` has ``close()`` it is called at the end, as long as it is idle.
      name: for messages.
      gc_every: the workers' garbage collector runs every so many requests and never in between; 0 leaves it alone.
      describe: what a request is, for messages.

    Raises:
      SettingsError: processes cannot be started here.
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
        # Also at exit, and when the pool is forgotten. The list is filled below, so a failure half-way is cleaned up.
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
        """Queues a request. Returns at once.

        Raises:
          MeshfeedError: the pool is closed. (A dead worker is reported by :meth:`result`.)
        """
        self._worker(worker_index).submit(request)

    def result(self, worker_index: int, timeout: float | None) -> Any:
        """The answer to the oldest request of a worker that has not been answered.

        Args:
          worker_index: which worker.
          timeout: seconds to wait; None waits as long as the worker lives. After a StalledError it may be asked again.

        Raises:
          StalledError: it did not come in time.
          SourceError: the worker died (with its exit code or signal), or raised something that cannot be raised here.
          Exception: what the task raised, of the same type, with the worker's traceback as a note.
        """
        return self._worker(worker_index).result(timeout)

    def _worker(self, worker_index: int) -> _Worker:
        if not self._finalizer.alive:
            raise MeshfeedError("the worker pool is closed")
        return self._workers[worker_index]

    def close(self) -> None:
        """Ends the processes, also in the middle of a request, and waits for them. Safe to call again."""
        self._finalizer()


class _Worker:
    """One process, the socket to it, and what it still owes."""

    def __init__(self, label: str, make_task: bytes, gc_every: int, describe: Callable[[Any], str]) -> None:
        self._label = label
        self._describe = describe
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
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
        self._connection.setblocking(False)
        self._inbox = Inbox(self._connection)
        self._outbox: collections.deque[memoryview] = collections.deque()
        self._pending: collections.deque[Any] = collections.deque()
        self._lock = threading.Lock()  # of the outbox
        self._ready = False
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
        """Sends what the socket takes now; the rest goes out while waiting for a result."""
        try:
            while self._outbox:
                sent = self._connection.send(self._outbox[0])
                if sent == len(self._outbox[0]):
                    self._outbox.popleft()
                else:
                    self._outbox[0] = self._outbox[0][sent:]
        except BlockingIOError:
            pass
        except OSError:  # the worker is dead: result() says so, after the answers that it still gave
            self._outbox.clear()

    def result(self, timeout: float | None) -> Any:
        if not self._pending:
            raise MeshfeedError(f"{self._label} was asked for a result without a request")
        start = time.monotonic()
        while True:
            frame = self._inbox.take()
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
                    if not self._ready:
                        self._death = error
                    raise error
                return frame.value
            if self._death is not None:
                raise self._death.with_traceback(None)
            if not self._wait(None if timeout is None else timeout - (time.monotonic() - start)):
                raise self._stalled(time.monotonic() - start)

    def _wait(self, seconds: float | None) -> bool:
        """Moves bytes in either direction; False if there were none in time."""
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
        return f"working on {self._summary(self._pending[0])}"

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
            except Exception:  # it reads its own pickle there but not here: tell it as text
                pass
        return SourceError(f"{description['type']}: {description['message']}, {where}")

    def begin_close(self) -> None:
        if self._open:
            self._open = False
            self._inbox.close()
            self._connection.close()  # the worker ends at that, within half a second also when it is busy

    def finish_close(self, deadline: float) -> None:
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:  # it holds the interpreter lock in a C call
            self.process.kill()
            try:
                self.process.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:  # the kernel ends it only when its read of a dead disk returns
                _log.warning(
                    "%s (process %d) is in a read that cannot be killed; not waiting for it",
                    self._label, self.process.pid,
                )  # fmt: skip


def _close_workers(workers: Sequence[_Worker]) -> None:
    deadline = time.monotonic() + _EXIT_SECONDS
    for worker in workers:
        worker.begin_close()
    for worker in workers:
        worker.finish_close(deadline)


def _environment() -> dict[str, str]:
    """What a worker imports is found where this process finds it; JAX there sees only the CPU."""
    paths = [path or os.getcwd() for path in sys.path if os.pathsep not in path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
