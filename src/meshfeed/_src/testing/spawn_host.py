"""One process of a local multi-host job: starting it, sending it functions, reading its results, ending it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import pickle
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from meshfeed._src.base.errors import MeshfeedError
from meshfeed._src.base.types import public
from meshfeed._src.testing.spawn_child import take_message, write_message

LOG_TAIL_BYTES = 6_000
_ROOT = str(pathlib.Path(__file__).resolve().parents[3])


@public("meshfeed.testing")
@dataclasses.dataclass(frozen=True)
class HostResult:
    """Result of a function on one host.

    Attributes:
      host: process index.
      value: return value; a jax.Array that is fully addressable or fully replicated is converted to numpy.
      error: the exception raised by the function; TimeoutError if it did not finish in time; ChildProcessError if the
        process exited or was killed by a signal.
      returncode: exit status of the process, negative for a signal; None while it runs.
      log: standard output and standard error of the host during this function.
      traceback: text of the traceback of ``error``; empty if the function itself did not raise.
    """

    host: int
    value: Any = None
    error: BaseException | None = None
    returncode: int | None = None
    log: str = ""
    traceback: str = ""


@public("meshfeed.testing")
class HostRunError(MeshfeedError):
    """Raised when some hosts failed.

    Attributes:
      results: the results of all hosts, including those that succeeded.
    """

    def __init__(self, results: Sequence[HostResult]) -> None:
        self.results = list(results)
        failed = [result for result in results if result.error is not None]
        parts = [f"{len(failed)} of {len(results)} hosts failed"]
        for result in failed:
            parts.append(f"--- host {result.host}: {type(result.error).__name__}: {result.error}")
            parts.append(result.traceback.rstrip())
            parts.append(f"--- host {result.host}, end of its log:\n{result.log[-LOG_TAIL_BYTES:].rstrip()}")
        super().__init__("\n".join(part for part in parts if part))


class Host:
    """A process with its pipes and its log."""

    def __init__(self, index: int, log_path: pathlib.Path, env: dict[str, str]) -> None:
        self.index = index
        self.log_path = log_path
        self.log_start = 0
        self.result: HostResult | None = None
        self.buffer = bytearray()
        self.ready = False
        read_fd, write_fd = os.pipe()
        code = f"import sys; sys.path.insert(0, {_ROOT!r}); from meshfeed._src.testing import spawn_child"
        code += f"; spawn_child.main({write_fd})"
        with open(log_path, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                pass_fds=[write_fd],
                start_new_session=True,  # its own process group, killed as a whole
            )
        os.close(write_fd)  # with a second writer, the end of the pipe would never be seen
        self.results_fd = read_fd
        self.open = True

    def send(self, payload: bytes) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # receive() detects a dead host at its results pipe
            write_message(self.process.stdin, payload)  # pyright: ignore[reportArgumentType] # Popen's IO[bytes]

    def signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def print_stacks(self) -> None:
        if self.ready:  # earlier there is no handler yet, and the signal would end the process
            self.process.send_signal(signal.SIGUSR1)

    def log(self) -> str:
        with open(self.log_path, "rb") as log:
            log.seek(self.log_start)
            return log.read().decode(errors="replace")

    def finish(self, **fields: Any) -> None:
        self.result = HostResult(self.index, returncode=self.process.poll(), log=self.log(), **fields)

    def receive(self) -> None:
        """Reads available messages without blocking; sets ``ready`` or ``result``."""
        dead = self.process.poll() is not None
        readable = bool(select.select([self.results_fd], [], [], 0)[0])
        data = os.read(self.results_fd, 1 << 20) if readable or not dead else b""
        if not data:
            self.open = False
            code = self.process.wait()
            if self.result is None:
                how = signal.Signals(-code).name if code < 0 else f"status {code}"
                self.finish(error=ChildProcessError(f"host {self.index} ended with {how} before it had a result"))
            return
        self.buffer += data
        while (payload := take_message(self.buffer)) is not None:
            answer = pickle.loads(payload)
            if "ready" in answer:
                self.ready = True
            elif "error" in answer:
                self.finish(error=pickle.loads(answer["error"]), traceback=answer["traceback"])
            else:
                self.finish(value=pickle.loads(answer["value"]))

    def close(self) -> None:
        self.signal_group(signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        os.close(self.results_fd)


def free_port() -> int:
    """Returns a TCP port that is free now; a different process may take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _unwrap(value: Any) -> Iterator[Any]:
    while isinstance(value, functools.partial):
        yield from (inner for arg in (*value.args, *value.keywords.values()) for inner in _unwrap(arg))
        value = value.func
    yield getattr(value, "__func__", value)


def _pickle_by_value(module: types.ModuleType | None) -> bool:
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__.partition(".")[0] == "meshfeed":
        return False  # built in, __main__ (always pickled by value), or importable in the host
    path = pathlib.Path(file).resolve()
    installed = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return not any(path.is_relative_to(pathlib.Path(folder).resolve()) for folder in installed)


def dump_task(function: Callable[..., Any] | str, args: tuple[Any, ...]) -> bytes:
    """Pickles a function and its arguments; modules outside the installed packages are pickled by value."""
    import cloudpickle

    values = [inner for value in (function, *args) for inner in _unwrap(value)]
    names = {getattr(value, "__module__", None) or type(value).__module__ for value in values}
    modules = [sys.modules[name] for name in names if name in sys.modules and _pickle_by_value(sys.modules[name])]
    registered = cloudpickle.list_registry_pickle_by_value()
    added = [module for module in modules if module.__name__ not in registered]
    for module in added:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps((function, args))
    finally:
        for module in added:
            cloudpickle.unregister_pickle_by_value(module)
