"""One process of a job on this machine: how it is started, talked to, watched and ended; what travels to it."""

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
from meshfeed._src.base.names import public
from meshfeed._src.testing.spawn_child import take_message, write_message

LOG_TAIL_BYTES = 6_000
_ROOT = str(pathlib.Path(__file__).resolve().parents[3])


@public("meshfeed.testing")
@dataclasses.dataclass(frozen=True)
class HostResult:
    """What one host made of one function.

    Attributes:
      host: its process index.
      value: what the function returned; jax.Arrays that are whole on the host come back as numpy.
      error: the exception that it raised; TimeoutError if it did not end in time; ChildProcessError if the process
        ended by itself or by a signal.
      returncode: the process's exit status, negative for a signal; None while it lives.
      log: what it wrote to standard output and error during this function.
      traceback: of ``error``, as text, where the function raised it.
    """

    host: int
    value: Any = None
    error: BaseException | None = None
    returncode: int | None = None
    log: str = ""
    traceback: str = ""


@public("meshfeed.testing")
class HostRunError(MeshfeedError):
    """Some hosts failed.

    Attributes:
      results: the results of all hosts, those of the ones that succeeded included.
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
    """One process, its pipes and its log."""

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
                start_new_session=True,  # a process group of its own, killed as one
            )
        os.close(write_fd)
        self.results_fd = read_fd
        self.open = True

    def send(self, payload: bytes) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a dead host is noticed at its results pipe
            write_message(self.process.stdin, payload)  # pyright: ignore[reportArgumentType] # Popen's IO[bytes]

    def signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def print_stacks(self) -> None:
        if self.ready:  # before that the signal has no handler yet, and would end the process
            self.process.send_signal(signal.SIGUSR1)

    def log(self) -> str:
        with open(self.log_path, "rb") as log:
            log.seek(self.log_start)
            return log.read().decode(errors="replace")

    def finish(self, **fields: Any) -> None:
        self.result = HostResult(self.index, returncode=self.process.poll(), log=self.log(), **fields)

    def receive(self) -> None:
        """Reads what is there; sets ``ready`` or ``result``."""
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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _unwrap(value: Any) -> Iterator[Any]:
    while isinstance(value, functools.partial):
        yield from (inner for arg in (*value.args, *value.keywords.values()) for inner in _unwrap(arg))
        value = value.func
    yield getattr(value, "__func__", value)


def _travels_by_value(module: types.ModuleType | None) -> bool:
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__.partition(".")[0] == "meshfeed":
        return False  # built in, __main__ (by value anyhow), or importable over there
    path = pathlib.Path(file).resolve()
    installed = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return not any(path.is_relative_to(pathlib.Path(folder).resolve()) for folder in installed)


def dump_task(function: Callable[..., Any] | str, args: tuple[Any, ...]) -> bytes:
    import cloudpickle

    values = [inner for value in (function, *args) for inner in _unwrap(value)]
    names = {getattr(value, "__module__", None) or type(value).__module__ for value in values}
    modules = [sys.modules[name] for name in names if name in sys.modules and _travels_by_value(sys.modules[name])]
    registered = cloudpickle.list_registry_pickle_by_value()
    added = [module for module in modules if module.__name__ not in registered]
    for module in added:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps((function, args))
    finally:
        for module in added:
            cloudpickle.unregister_pickle_by_value(module)
