"""Real ``jax.distributed`` processes on this machine, for tests.

Each host is a child process in its own process group, with CPU devices and gloo collectives. Functions are pickled by
value, which allows functions of a test module. Standard output and standard error of a host are logged, and every
failure quotes the log. The hosts and their own children end with the parent.

:class:`HostTask` runs in the hosts: it joins the job, calls functions, and leaves the job in order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import pickle
import pkgutil
import selectors
import shutil
import signal
import socket
import sys
import sysconfig
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

from meshfeed._src.base import child as child_process
from meshfeed._src.base import serving
from meshfeed._src.base.child import ChildProcess
from meshfeed._src.base.errors import MeshfeedError, SettingsError
from meshfeed._src.base.fork import Finalizer, NotCopied, Owner, finalize
from meshfeed._src.base.frames import Frame
from meshfeed._src.base.machine import xla_threads
from meshfeed._src.base.types import PyTree, public


@dataclasses.dataclass(frozen=True)
class HostTask:
    """Creates one host of a job: joins it when called, then calls a function per request.

    Attributes:
      host: process index.
      num_hosts: number of processes.
      port: port of the coordinator on this machine.
      recoverability: see :class:`meshfeed.testing.HostPool`.
      heartbeat_timeout_seconds: see :class:`meshfeed.testing.HostPool`.
    """

    host: int
    num_hosts: int
    port: int
    recoverability: bool
    heartbeat_timeout_seconds: int | None

    def join(self) -> HostTask:
        """Joins the job, with gloo collectives."""
        import jax

        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        if self.recoverability:  # read by initialize()
            jax.config.update("jax_enable_recoverability", True)
        address = f"127.0.0.1:{self.port}"
        jax.distributed.initialize(
            address,
            self.num_hosts,
            self.host,
            heartbeat_timeout_seconds=int(self.heartbeat_timeout_seconds or _HEARTBEAT_SECONDS),
            coordinator_bind_address=address if self.host == 0 else None,  # not on public network interfaces
        )
        jax.devices()  # exchanges topologies collectively; an error here is better than one in the first test
        return self

    def __call__(self, payload: bytes) -> bytes:
        """Calls the pickled function with its arguments and returns its pickled value."""
        import cloudpickle

        function, args = pickle.loads(payload)
        function = pkgutil.resolve_name(function) if isinstance(function, str) else function
        return cloudpickle.dumps(_portable(function(*args)))

    def close(self) -> None:
        """Leaves the job. This is a barrier: the coordinator must outlive the other hosts' last calls."""
        import jax

        jax.distributed.shutdown()


def _portable(value: PyTree) -> PyTree:
    """Converts jax.Arrays to numpy, which the parent can unpickle without a JAX backend."""
    import jax
    import numpy as np

    def leaf(x: object) -> object:
        whole = isinstance(x, jax.Array) and (x.is_fully_addressable or x.is_fully_replicated)
        return np.asarray(x) if whole else x

    return jax.tree_util.tree_map(leaf, value)


_LOG_TAIL_BYTES = 6_000
_HEARTBEAT_SECONDS = 100  # JAX's default
# In errors of JAX; after the last one, JAX 0.10 crashes.
_PORT_TAKEN = ("Failed to start RPC server", "Address already in use", "Failed to add port to server")
_START_ATTEMPTS = 5
_EXIT_SECONDS = 15.0


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
            parts += [
                f"--- host {result.host}: {type(result.error).__name__}: {result.error}",
                result.traceback.rstrip(),
            ]
            parts.append(f"--- host {result.host}, end of its log:\n{result.log[-_LOG_TAIL_BYTES:].rstrip()}")
        super().__init__("\n".join(filter(None, parts)))


class Host:
    """One child of the job and the result of its last function."""

    def __init__(self, task: HostTask, log_path: pathlib.Path, env: Mapping[str, str]) -> None:
        self.index = task.host
        self.child = ChildProcess("meshfeed._src.base.child:serve", env=env, log_path=log_path, own_group=True)
        self.result: HostResult | None = None
        self.ready = False
        self.open = True
        self._log_start = 0
        self._unanswered = 0  # functions that it was sent and has not finished
        self._send(child_process.SETUP, (pickle.dumps(task.join), 0))

    def _send(self, kind: int, value: object) -> None:
        self.child.send(kind, value)
        self.child.drain()

    def start(self, payload: bytes) -> None:
        self.result = None
        self._log_start = self.child.log_bytes
        self._unanswered += 1
        self._send(child_process.REQUEST, payload)

    def stop(self) -> None:
        self._send(child_process.STOP, None)

    def log(self) -> str:
        return self.child.log(self._log_start)

    def finish(self, value: object = None, error: BaseException | None = None, traceback: str = "") -> None:
        self.result = HostResult(self.index, value, error, self.child.returncode, self.log(), traceback)

    def receive(self) -> None:
        """Reads available messages without blocking; sets ``ready`` or ``result``."""
        self.child.exchange(0)
        while (frame := self.child.take()) is not None:
            self._handle(frame)
        if self.child.hung_up:
            self.open = False
            if self.result is None:
                how = self.child.how_it_ended()
                self.finish(error=ChildProcessError(f"host {self.index} {how} before it had a result"))

    def _handle(self, frame: Frame) -> None:
        if frame.kind == serving.READY:
            self.ready = True
        elif frame.kind in (serving.RESULT, serving.ERROR):
            self._unanswered = max(0, self._unanswered - 1)  # the set-up may fail, too
            if not self._unanswered:  # otherwise of an earlier function: no one waited, or the wait was interrupted
                self._finish_with(frame)

    def _finish_with(self, frame: Frame) -> None:
        if frame.kind == serving.RESULT:
            try:
                self.finish(pickle.loads(frame.value))
            except Exception as error:  # whatever the classes in it raise
                what = f"the value of host {self.index} cannot be unpickled here: {type(error).__name__}: {error}"
                self.finish(error=RuntimeError(what))
            return
        description: serving.ErrorDescription = frame.value
        raised: BaseException = RuntimeError(f"{description['type']}: {description['message']}")
        if description["pickled"] is not None:
            with contextlib.suppress(Exception):  # the host can load it, but this process cannot
                raised = pickle.loads(description["pickled"])
        self.finish(error=raised, traceback=description["traceback"])


def free_port() -> int:
    """Returns a TCP port that is free now; a different process may take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def cpu_environment(num_devices: int) -> dict[str, str]:
    """Returns environment variables that give a process ``num_devices`` CPU devices, with two threads each, and no others."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
    flags.append(f"--xla_force_host_platform_device_count={num_devices}")
    threads = max(2 * num_devices, xla_threads())
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags), "NPROC": str(threads)}


def _unwrap(value: object) -> Iterator[object]:
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
    with contextlib.ExitStack() as stack:
        for module in modules:
            if module.__name__ not in registered:  # by the user, whose registration must stay
                cloudpickle.register_pickle_by_value(module)
                stack.callback(cloudpickle.unregister_pickle_by_value, module)
        return cloudpickle.dumps((function, args))


@public("meshfeed.testing")
class HostPool(NotCopied):
    """A multi-process job that runs functions one after another, each on all hosts.

    Starting the processes takes seconds; running a function in them takes milliseconds::

        with HostPool(num_hosts=2, devices_per_host=4) as pool:
            for result in pool.run(check_rows, batch_size): ...

    Processes start on the first ``run``, and restart after a run that lost a process, timed out, or failed unexpectedly,
    because collectives may then be out of step.

    Args:
      num_hosts: number of processes.
      devices_per_host: CPU devices per process.
      timeout_seconds: default timeout of a run, in seconds, not counting the start of the processes.
      env: environment variables to set in addition to those of this process.
      recoverability: whether to set ``jax_enable_recoverability`` before joining; survivors of a lost host then keep running.
      heartbeat_timeout_seconds: time without a heartbeat after which the coordinator considers a host lost; None for
        JAX's default, 100 s.
      start_timeout_seconds: timeout for all processes to start and join.
    """

    def __init__(
        self,
        num_hosts: int = 2,
        devices_per_host: int = 4,
        *,
        timeout_seconds: float = 120,
        env: Mapping[str, str] | None = None,
        recoverability: bool = False,
        heartbeat_timeout_seconds: int | None = None,
        start_timeout_seconds: float = 180,
    ) -> None:
        for name, value in (("num_hosts", num_hosts), ("devices_per_host", devices_per_host)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SettingsError(f"{name}={value!r}; it takes a positive int.", setting=name)
        self.num_hosts = num_hosts
        self.devices_per_host = devices_per_host
        self.timeout_seconds = timeout_seconds
        self._env = dict(env or {})
        self._options = recoverability, heartbeat_timeout_seconds
        self._start_timeout_seconds = start_timeout_seconds
        self._hosts: list[Host] = []
        self._dirty = False
        self._owner = Owner()
        self._remove_logs: Finalizer | None = None
        self._directory = pathlib.Path()

    # --- running functions

    def run(
        self,
        function: Callable[..., Any] | str,
        *args: object,
        timeout_seconds: float | None = None,
        check: bool = True,
        grace_seconds: float = 30,
    ) -> list[HostResult]:
        """Runs ``function(*args)`` on every host and waits; same as :meth:`start` followed by :meth:`wait`."""
        self.start(function, *args)
        return self.wait(timeout_seconds=timeout_seconds, check=check, grace_seconds=grace_seconds)

    def start(self, function: Callable[..., Any] | str, *args: Any) -> None:
        """Sends ``function(*args)`` to every host, starting the processes if needed.

        Args:
          function: a callable, or ``"module:function"``. Callables from modules outside the installed packages (tests,
            scripts, notebooks) are pickled by value, including closures and helpers of the same module.
          *args: pickled arguments, the same on all hosts; use ``jax.process_index()`` to distinguish hosts.

        Raises:
          SettingsError: ``function`` is neither a callable nor a string.
          MeshfeedError: this is a forked child of the process that created the pool.
        """
        if not callable(function) and not isinstance(function, str):
            raise SettingsError(
                f"function={function!r:.80}; it takes a callable, or 'module:function'. The order is (function, *args), and "
                "the number of hosts is num_hosts=.",
                setting="function",
            )
        self._owner.check("this HostPool")
        payload = dump_task(function, args)
        if self._dirty or self._any_ended():
            self._kill()
        if not self._hosts:
            self._start()
        for host in self._hosts:
            host.start(payload)

    def poll(self) -> list[HostResult | None]:
        """Returns the result of each host without waiting; None for hosts that are still running."""
        self._receive(0)
        return [host.result for host in self._hosts]

    def wait(
        self, *, timeout_seconds: float | None = None, check: bool = True, grace_seconds: float = 30
    ) -> list[HostResult]:
        """Waits for the results of all hosts.

        Args:
          timeout_seconds: timeout of the wait. Hosts still running then print their stacks to their logs and are killed.
            None for the default of the pool.
          check: whether to raise if a host failed; if not, failures are only in the results.
          grace_seconds: time that the other hosts have to finish after one has failed.

        Returns:
          One result per host, in order of process index.

        Raises:
          HostRunError: ``check`` is true and some host failed; the message quotes tracebacks and logs.
        """
        self._await_results(self.timeout_seconds if timeout_seconds is None else timeout_seconds, grace_seconds)
        results = [host.result for host in self._hosts if host.result is not None]
        errors = [result.error for result in results if result.error is not None]
        if check and errors:
            self._dirty = True
            raise HostRunError(results) from errors[0]
        return results

    def _await_results(self, timeout_seconds: float, grace_seconds: float) -> None:
        started = time.monotonic()
        deadline = started + timeout_seconds
        in_grace = False
        while any(host.result is None for host in self._hosts):
            # Once a host has failed, the others usually hang in a collective: do not wait for the full timeout.
            if not in_grace and any(host.result is not None and host.result.error for host in self._hosts):
                in_grace, deadline = True, min(deadline, time.monotonic() + grace_seconds)
            left = deadline - time.monotonic()
            if left <= 0:
                self._give_up(time.monotonic() - started)
                return
            self._receive(min(left, 1.0))

    def _any_ended(self) -> bool:
        return any(host.child.returncode is not None for host in self._hosts)

    # --- single hosts

    def kill(self, host: int, number: int = signal.SIGKILL) -> None:
        """Sends signal ``number`` to ``host`` and its child processes."""
        self._hosts[host].child.kill(number)

    def log(self, host: int) -> str:
        """Returns the output of ``host`` since the last :meth:`start`."""
        return self._hosts[host].log()

    @property
    def pids(self) -> list[int]:
        """Process ids by host; empty before the first run."""
        return [host.child.pid for host in self._hosts]

    # --- closing

    def close(self) -> None:
        """Shuts the hosts down and kills those that do not exit within 15 s; no-op in a forked child."""
        if not self._owner.is_here:
            return
        if not self._dirty and not self._any_ended() and all(host.ready for host in self._hosts):
            self._stop()
        self._kill()
        if self._remove_logs is not None:
            self._remove_logs()
            self._remove_logs = None

    def _stop(self) -> None:
        for host in self._hosts:
            host.stop()
        deadline = time.monotonic() + _EXIT_SECONDS
        for host in self._hosts:
            if not host.child.wait(max(0.1, deadline - time.monotonic())):
                host.child.log_stacks()
                what = f"did not end within {_EXIT_SECONDS:.0f} s of being stopped, and was killed"
                text = f"host {host.index} {what}; its log ends:\n{host.log()[-_LOG_TAIL_BYTES:]}"
                warnings.warn(text, ResourceWarning, stacklevel=3)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _kill(self) -> None:
        for host in self._hosts:
            host.child.kill()
        for host in self._hosts:
            host.child.close()
        self._hosts = []
        self._dirty = False

    def _start(self) -> None:
        if self._remove_logs is None:  # not TemporaryDirectory, which a forked child would remove on exit
            self._directory = pathlib.Path(tempfile.mkdtemp(prefix="meshfeed-hosts-"))
            self._remove_logs = finalize(self, shutil.rmtree, self._directory, True)
        failed: list[HostResult] = []
        for attempt in range(_START_ATTEMPTS):
            failed = self._start_once(attempt)
            if not failed:
                return
            self._kill()
            # Another process may take the port between free_port() and the bind: only then is a retry useful.
            if not any(text in result.log + result.traceback for result in failed for text in _PORT_TAKEN):
                break
        raise HostRunError(failed)

    def _start_once(self, attempt: int) -> list[HostResult]:
        """Starts all processes; returns an empty list, or the results of all if some did not join."""
        env = {**cpu_environment(self.devices_per_host), "PYTHONUNBUFFERED": "1", **self._env}
        port = free_port()
        for index in range(self.num_hosts):
            task = HostTask(index, self.num_hosts, port, *self._options)
            self._hosts.append(Host(task, self._directory / f"{attempt}-{index}.log", env))
        self._await_ready()
        if all(host.ready and host.result is None for host in self._hosts):
            return []
        return [host.result or HostResult(host.index, log=host.log()) for host in self._hosts]

    def _await_ready(self) -> None:
        deadline = time.monotonic() + self._start_timeout_seconds
        while not all(host.ready for host in self._hosts):
            if any(host.result is not None for host in self._hosts):
                time.sleep(0.2)  # let the other hosts log their errors
                self._receive(0)
                return
            if time.monotonic() > deadline:
                self._give_up(self._start_timeout_seconds)
                return
            self._receive(0.5)

    def _receive(self, seconds: float) -> None:
        hosts = [host for host in self._hosts if host.open]
        with selectors.DefaultSelector() as selector:
            for host in hosts:
                selector.register(host.child, selectors.EVENT_READ, host)
            ready = [key.data for key, _ in selector.select(seconds)] if hosts else []
        for host in ready or hosts:
            # On a timeout, also poll the processes: a dead host may have left a child that keeps the pipe open.
            if ready or host.child.returncode is not None:
                host.receive()

    def _give_up(self, seconds: float) -> None:
        late = [host for host in self._hosts if host.result is None]
        for host in late:
            host.child.log_stacks()
            host.child.kill()
            host.child.wait(_EXIT_SECONDS)
            host.finish(error=TimeoutError(f"host {host.index} had no result after {seconds:.0f} s, and was killed"))
        self._dirty = True


@public("meshfeed.testing")
def run_hosts(
    function: Callable[..., Any] | str,
    *args: Any,
    num_hosts: int = 2,
    devices_per_host: int = 4,
    timeout_seconds: float = 120,
    check: bool = True,
    grace_seconds: float = 30,
    **pool_options: Any,
) -> list[HostResult]:
    """Runs ``function(*args)`` once on each of ``num_hosts`` new processes of one JAX job on this machine.

    Args:
      function: a callable, which may be defined in a test module, or ``"module:function"``.
      *args: pickled arguments, the same on all hosts.
      num_hosts: number of processes.
      devices_per_host: CPU devices per process.
      timeout_seconds: timeout of the function; hosts still running then are killed.
      check: whether to raise if a host failed; if not, failures are only in the results.
      grace_seconds: time that the other hosts have to finish after one has failed.
      **pool_options: ``env``, ``recoverability``, ``heartbeat_timeout_seconds``, ``start_timeout_seconds`` of
        :class:`HostPool`.

    Returns:
      One result per host, in order of process index.

    Raises:
      HostRunError: ``check`` is true and some host failed; the message quotes tracebacks and logs.
    """
    with HostPool(num_hosts, devices_per_host, timeout_seconds=timeout_seconds, **pool_options) as pool:
        return pool.run(function, *args, check=check, grace_seconds=grace_seconds)


@public("meshfeed.testing")
def start_hosts(
    function: Callable[..., Any] | str,
    *args: Any,
    num_hosts: int = 2,
    devices_per_host: int = 4,
    **pool_options: Any,
) -> HostPool:
    """Starts ``function(*args)`` like :func:`run_hosts`, but returns a running :class:`HostPool` immediately.

    Use the pool as a context manager; a failing test then leaves no processes behind.

    Args:
      function: as for :func:`run_hosts`.
      *args: as for :func:`run_hosts`.
      num_hosts: number of processes.
      devices_per_host: CPU devices per process.
      **pool_options: further keywords of :class:`HostPool`.

    Returns:
      The pool; get the results from :meth:`HostPool.wait` or :meth:`HostPool.poll`.
    """
    pool = HostPool(num_hosts, devices_per_host, **pool_options)
    try:
        pool.start(function, *args)
    except BaseException:
        pool.close()
        raise
    return pool
