"""Child processes: new Python interpreters that this process starts, exchanges messages with, and ends.

Fork is unsafe with JAX's threads, and multiprocessing imports the user's script again, which requires
``if __name__ == "__main__"``. A child is therefore ``python -c`` with the import path of its parent, connected by a Unix
socket. When the parent ends, even by SIGKILL, the socket closes and the child ends itself.

:class:`ChildProcess` is the parent's side. :func:`main` is the child's side: it calls a function named by the parent,
such as :func:`serve`, which answers one request after another by a :class:`~meshfeed._src.base.serving.TaskServer`.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import importlib
import logging
import math
import os
import pathlib
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from typing import IO, NoReturn

from meshfeed._src.base.frames import Frame, Inbox, Packed, pack, send_packed, small_frame
from meshfeed._src.base.progress import PROGRESS
from meshfeed._src.base.serving import ERROR, Message, TaskServer

SETUP, REQUEST, STOP = 1, 2, 3  # from the parent
PROGRESS_TEXT = 7  # from the child, beside the messages of its TaskServer

_BOOT = "import sys; sys.path[:] = {path!r}; from meshfeed._src.base.child import main; main()"
_EXIT_SECONDS = 5.0  # for a child to close its task and exit; then it is killed
_HANG_UP_SECONDS = 0.5  # for an idle child to close its task
_CHECK_SECONDS = 1.0  # between looks whether the other side has ended
_STACK_SECONDS, _STACK_PAUSE_SECONDS = 0.5, 0.02
_STACK_FRAMES = 16
_WATCHES = re.compile(r'^.*\n.*child\.py", line \d+ in watch$', re.M)  # the stack of :meth:`Parent.watch`
_log = logging.getLogger("meshfeed.child")


class ChildProcess:
    """A child as seen by its parent. One thread at a time may receive; any thread may send.

    Attributes:
      pid: process id.
      hung_up: whether the child has ended or closed its connection, and nothing more arrives.
    """

    def __init__(
        self,
        target: str,  # "module:function", called in the child with its Parent
        *arguments: str,  # the child's ``sys.argv[1:]``
        env: Mapping[str, str] | None = None,  # in addition to that of this process
        log_path: pathlib.Path | None = None,  # to append its output to; None to share the output of this process
        own_group: bool = False,  # as a leader: the terminal's Ctrl-C does not reach the group, and signals reach all of it
    ) -> None:
        self._log_path = log_path
        self._own_group = own_group
        self._stacks = _stack_file()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._stack_requests, their_requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._stack_requests.setblocking(False)
        code = _BOOT.format(path=[path or os.getcwd() for path in sys.path])
        passed = (theirs.fileno(), their_requests.fileno(), self._stacks.fileno())
        try:
            with theirs, their_requests, contextlib.nullcontext() if log_path is None else open(log_path, "ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", code, target, *map(str, (*passed, os.getpid())), *arguments],
                    pass_fds=passed,
                    stdin=subprocess.DEVNULL,  # a child must not read the terminal's input
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **(env or {})},
                    start_new_session=own_group,
                )
        except BaseException:
            for file in (self._connection, self._stack_requests, self._stacks):
                file.close()
            raise
        self._connection.setblocking(False)  # send() must not wait for a busy child
        self._inbox = Inbox(self._connection)
        self._outbox: collections.deque[memoryview] = collections.deque()
        self._lock = threading.Lock()  # guards the outbox
        self.pid = self._process.pid
        self.hung_up = False

    # ------------------------------------------------------------------ messages

    def fileno(self) -> int:
        """Returns the file descriptor to wait for in a selector."""
        return self._connection.fileno()

    def send(self, kind: int, value: object = None) -> None:
        """Sends as much as the child accepts without blocking; :meth:`exchange` sends the rest."""
        with self._lock:
            self._outbox.append(memoryview(small_frame(kind, value)))
            self._flush()

    def _flush(self) -> None:
        try:
            while self._outbox:
                sent = self._connection.send(self._outbox[0])
                if sent == len(self._outbox[0]):
                    self._outbox.popleft()
                else:
                    self._outbox[0] = self._outbox[0][sent:]
        except BlockingIOError:
            pass
        except OSError:  # the child is dead, which exchange() notices after receiving what it has sent
            self._outbox.clear()

    def drain(self) -> None:
        """Waits until everything is sent, or the child is dead."""
        while self._outbox and not self.hung_up:
            self.exchange(None)

    def exchange(self, seconds: float | None) -> bool:
        """Sends and receives available bytes; returns False if the socket was not ready in time."""
        left = math.inf if seconds is None else max(0.0, seconds)
        poller = select.poll()
        with self._lock:
            poller.register(self._connection, select.POLLIN | (select.POLLOUT if self._outbox else 0))
        while True:
            ended = self.returncode is not None  # read first: then all that it has sent has arrived
            pause = 0.0 if ended else min(left, _CHECK_SECONDS)
            if events := poller.poll(pause * 1000):
                break
            if ended:  # and a process that it has forked keeps the connection open
                self.hung_up = True
                return True
            left -= pause
            if left <= 0:
                return False
        with self._lock:
            self._flush()
        if events[0][1] & ~select.POLLOUT:
            try:
                self.hung_up = not self._inbox.receive()
            except BlockingIOError:
                pass
            except ConnectionResetError:
                self.hung_up = True
        return True

    def take(self) -> Frame | None:
        """Returns the next message, or None if none has arrived completely."""
        return self._inbox.take()

    # ------------------------------------------------------------------ the process

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while the process runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> bool:
        """Waits for the process to end; returns False if it did not end in time."""
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return False
        return True

    def how_it_ended(self) -> str:
        """Describes how a child that has hung up ended, such as ``exited with code 1``."""
        if not self.wait(_EXIT_SECONDS):
            return "closed its connection"
        if (code := self._process.returncode) >= 0:
            return f"exited with code {code}"
        known = {number.value: number.name for number in signal.Signals}
        return f"was killed by signal {-code} ({known.get(-code, 'unknown')})"

    def log_stacks(self) -> None:
        """Appends the child's stacks to its log."""
        assert self._log_path is not None
        with open(self._log_path, "a") as log:
            log.write(f"{self.stacks()}\n")

    def log(self, start: int = 0) -> str:
        """Returns the child's output, from byte ``start`` of its log."""
        assert self._log_path is not None
        with open(self._log_path, "rb") as log:
            log.seek(start)
            return log.read().decode(errors="replace")

    @property
    def log_bytes(self) -> int:
        """Size of the log so far."""
        return 0 if self._log_path is None else self._log_path.stat().st_size

    def stacks(self) -> str:
        """Returns the stacks of the child's threads, innermost call first; empty if it is not ready.

        While the child holds Python's lock in a call of C, only the stack of its main thread.
        """
        try:
            start = os.fstat(self._stacks.fileno()).st_size
            with contextlib.suppress(BlockingIOError):  # earlier requests are not answered either
                self._stack_requests.send(b"?")
            # A signal shows what holds the lock. Only the main thread, which receives it: the frames of a thread that
            # runs meanwhile may be freed while they are read, which ends the process.
            if not (text := self._shown(start)) and _handles(self.pid, signal.SIGUSR2):
                self._process.send_signal(signal.SIGUSR2)
                text = self._shown(start)
            shown = [one for one in text.strip().split("\n\n") if not _WATCHES.search(one)]
            return "\n".join("\n".join(one.split("\n")[: 1 + _STACK_FRAMES]) for one in shown)
        except (OSError, ValueError):  # it has just ended, or was closed
            return ""

    def _shown(self, start: int) -> str:
        """Waits for what the child appends to its stacks, and returns it; empty if there is nothing in time."""
        size, deadline = start, time.monotonic() + _STACK_SECONDS
        while time.monotonic() < deadline:
            time.sleep(_STACK_PAUSE_SECONDS)
            before, size = size, os.fstat(self._stacks.fileno()).st_size
            if start < before == size:  # written whole
                break
        # Not read(): the child writes at the position that both share.
        return os.pread(self._stacks.fileno(), size - start, start).decode(errors="replace")

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal to the child; with ``own_group``, to its child processes too."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number) if self._own_group else self._process.send_signal(number)

    def stop(self) -> None:
        """Ends the child within 0.5 s, even if it is busy, and wakes a thread in :meth:`exchange`. Thread-safe."""
        with contextlib.suppress(OSError):  # it has ended, or was closed
            self._connection.shutdown(socket.SHUT_RDWR)

    def hang_up(self) -> None:
        """Stops the child and closes the connection."""
        self.stop()  # closing does nothing yet while another thread waits for the connection
        self._inbox.close()
        for file in (self._connection, self._stack_requests, self._stacks):
            file.close()

    def close(self, deadline: float | None = None) -> bool:
        """Hangs up and waits for the end of the child.

        Args:
          deadline: time on the clock of ``time.monotonic()`` at which the child is killed; None kills it now.

        Returns:
          False if the child cannot be killed: it is in an uninterruptible sleep, such as a read of a dead disk.
        """
        self.hang_up()
        if deadline is not None and self.wait(deadline - time.monotonic()):
            return True
        self.kill()  # for example, the child holds the GIL in a C call
        return self.wait(_EXIT_SECONDS)


def _stack_file() -> IO[bytes]:
    """A file in memory, if the system has such files, to which a child writes its stacks."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("meshfeed-stacks"), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def _handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, which would otherwise end it; False if that is unknown."""
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def close_children(children: Mapping[str, ChildProcess]) -> None:
    """Closes children by name, within one deadline of 5 s for all."""
    deadline = time.monotonic() + _EXIT_SECONDS
    for child in children.values():  # all of them exit at the same time
        child.hang_up()
    for name, child in children.items():
        if not child.close(deadline):
            _log.warning("%s (process %d) is in a read that cannot be killed; not waiting for it", name, child.pid)


# ---------------------------------------------------------------------- the child's side


class Parent:
    """The parent as seen by its child. Any thread may send; one thread at a time may receive."""

    def __init__(self, descriptor: int, stack_requests: int, stacks: int, pid: int) -> None:
        for number in (descriptor, stack_requests, stacks):
            os.set_inheritable(number, False)
        self._connection = socket.socket(fileno=descriptor)
        self._inbox = Inbox(self._connection)
        self._stack_requests = socket.socket(fileno=stack_requests)
        self._stacks = stacks
        self._pid = pid
        self._lock = threading.Lock()

    def receive(self) -> Frame | None:
        """Waits for and returns the next message; None once the parent has hung up."""
        while (frame := self._inbox.take()) is None:
            if not self._inbox.receive():
                return None
        return frame

    def send(self, kind: int, packed: Packed) -> None:
        """Sends a message. The parent must be reading, or a large message blocks."""
        with self._lock:
            send_packed(self._connection, kind, packed)

    def tell(self, progress: str) -> None:
        """Sends progress, unless that would block because the parent is not reading."""
        if self._lock.acquire(blocking=False):
            try:
                writable = select.poll()  # select() fails for descriptors from 1024 on
                writable.register(self._connection, select.POLLOUT)
                if writable.poll(0):
                    send_packed(self._connection, PROGRESS_TEXT, pack(progress))
            finally:
                self._lock.release()

    def watch(self) -> NoReturn:
        """Ends this process soon after the parent has hung up or died, even during a long request.

        Until then, shows the stacks of all threads when the parent asks for them.
        """
        poller = select.poll()
        poller.register(self._connection, getattr(select, "POLLRDHUP", 0) | select.POLLHUP)
        poller.register(self._stack_requests, select.POLLIN)
        # A process forked by the parent may keep the parent's end of the socket open, so check the parent's id too.
        while os.getppid() == self._pid:
            ready = {number for number, _ in poller.poll(_CHECK_SECONDS * 1000)}
            if self._connection.fileno() in ready or (ready and not self._stack_requests.recv(64)):
                break
            if ready:  # this thread holds Python's lock meanwhile, so that no other one changes its frames
                faulthandler.dump_traceback(self._stacks, all_threads=True)
        time.sleep(_HANG_UP_SECONDS)  # an idle main thread uses this time to close its task
        _leave()


def main() -> None:
    """Runs the function that the parent named.

    ``sys.argv`` holds its name, the arguments of :class:`Parent`, and those of the function.
    """
    target, descriptor, stack_requests, stacks, pid = sys.argv[1], *map(int, sys.argv[2:6])
    del sys.argv[1:6]
    if sys.stderr is not None:  # the parent may have been started with it closed: 2>&-
        faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=False)
    if not _leads_group():
        _leave_signals_to_parent()
    parent = Parent(descriptor, stack_requests, stacks, pid)
    threading.Thread(target=parent.watch, name="meshfeed-parent", daemon=True).start()
    module, _, function = target.partition(":")
    getattr(importlib.import_module(module), function)(parent)


def _leave_signals_to_parent() -> None:
    """Ignores what reaches the whole group: Ctrl-C, and what a scheduler sends before it ends a job.

    The parent may go on for a while after a warning, to save a checkpoint. It ends its children.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings = signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1
    # Not SIG_IGN: programs that a decoder starts would inherit it, and could not be terminated.
    for number in warnings:
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)

    def restore() -> None:
        for number in warnings:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, warnings)

    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, warnings),  # or one before restore() would be lost
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, warnings),
        after_in_child=restore,
    )


def serve(parent: Parent) -> None:
    """Creates a task from the first message, and answers each later message with the task's result.

    The first message is ``(make_task, gc_every)``; see :class:`meshfeed._src.reading.workers.WorkerPool`. Returns at
    STOP, and ends the process once the parent has hung up.
    """
    PROGRESS.tell = parent.tell
    try:
        stopped = _serve(parent)
    except (BrokenPipeError, ConnectionResetError):
        stopped = False  # the parent has exited
    except BaseException:
        traceback.print_exc()
        _leave(1)
    if not stopped:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        _leave()


def _serve(parent: Parent) -> bool:
    """Returns whether the parent has sent STOP, rather than hung up."""
    frame = parent.receive()
    if frame is None:
        return False
    make_task, gc_every = frame.value
    server = TaskServer(gc_every)
    try:
        if not _send(parent, server.set_up(make_task)):
            return False
        while (frame := parent.receive()) is not None and frame.kind != STOP:
            _send(parent, server.answer(frame.value))
            del frame  # frees its arrays before waiting for the next one
            server.collect()
        return frame is not None
    finally:
        server.close()


def _send(parent: Parent, messages: Iterable[Message]) -> bool:
    """Sends an answer, which is freed on return; returns whether it is no error."""
    kind = ERROR
    for kind, packed in messages:
        parent.send(kind, packed)
    return kind != ERROR


def _leads_group() -> bool:
    return os.getpgrp() == os.getpid()


def _leave(code: int = 0) -> NoReturn:
    """Ends this process, and its group if it leads one, without teardown, which a library's threads could block."""
    if _leads_group() and not code:
        os.killpg(0, signal.SIGKILL)
    os._exit(code)
