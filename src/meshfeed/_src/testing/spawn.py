"""Real ``jax.distributed`` processes on this machine, for tests.

Each host is a new Python interpreter in its own process group, with CPU devices and gloo collectives. Functions are
pickled by value, which allows functions of a test module. Standard output and standard error of a host are logged, and
every failure quotes the log. If the parent dies, the hosts reach the end of standard input and kill their process group.
"""

from __future__ import annotations

import os
import pathlib
import pickle
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Self

from meshfeed._src.base.errors import SettingsError
from meshfeed._src.base.process import Owner, finalize
from meshfeed._src.base.types import public
from meshfeed._src.testing.spawn_host import LOG_TAIL_BYTES, Host, HostResult, HostRunError, dump_task, free_port

_PORT_TAKEN = ("Failed to start RPC server", "Address already in use")
_START_ATTEMPTS = 5
_EXIT_SECONDS = 15.0


@public("meshfeed.testing")
class HostPool:
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
      heartbeat_timeout_seconds: time after which the coordinator considers a silent host lost; None for JAX's default,
        100 s.
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
                raise SettingsError(f"{name}={value!r}: takes a positive int", setting=name)
        self.num_hosts = num_hosts
        self.devices_per_host = devices_per_host
        self.timeout_seconds = timeout_seconds
        self._env = dict(env or {})
        self._setup = {
            "num_hosts": num_hosts,
            "recoverability": recoverability,
            "heartbeat_timeout_seconds": heartbeat_timeout_seconds,
        }
        self._start_timeout_seconds = start_timeout_seconds
        self._hosts: list[Host] = []
        self._dirty = False
        self._owner = Owner()
        self._remove_logs: weakref.finalize[..., Any] | None = None
        self._directory = pathlib.Path()

    # --- running functions

    def run(
        self,
        function: Callable[..., Any] | str,
        *args: Any,
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
          SettingsError: if ``function`` is neither a callable nor a string.
          MeshfeedError: if this is a forked child of the process that created the pool.
        """
        if not callable(function) and not isinstance(function, str):
            raise SettingsError(
                f"function={function!r}: takes a callable, or 'module:function'. The order is (function, *args), and the "
                "number of hosts is num_hosts=.",
                setting="function",
            )
        self._owner.check("this HostPool")
        payload = dump_task(function, args)
        if self._dirty or any(host.process.poll() is not None for host in self._hosts):
            self._kill()
        if not self._hosts:
            self._start()
        for host in self._hosts:
            host.result = None
            host.log_start = host.log_path.stat().st_size
            host.send(payload)

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
          check: whether to raise if a host failed; otherwise failures are only in the results.
          grace_seconds: time that the other hosts have to finish after one has failed.

        Returns:
          One result per host, in order of process index.

        Raises:
          HostRunError: if ``check`` is true and any host failed; the message quotes tracebacks and logs.
        """
        deadline = time.monotonic() + (self.timeout_seconds if timeout_seconds is None else timeout_seconds)
        started = time.monotonic()
        in_grace = False
        while any(host.result is None for host in self._hosts):
            # Once a host has failed, the others usually hang in a collective: do not wait for the full timeout.
            if not in_grace and any(host.result is not None and host.result.error for host in self._hosts):
                in_grace, deadline = True, min(deadline, time.monotonic() + grace_seconds)
            left = deadline - time.monotonic()
            if left <= 0:
                self._give_up(time.monotonic() - started)
                break
            self._receive(min(left, 1.0))
        results = [host.result for host in self._hosts if host.result is not None]
        if any(isinstance(result.error, ChildProcessError | TimeoutError) for result in results):
            self._dirty = self._dirty or any(host.process.poll() is not None for host in self._hosts)
        if check and any(result.error is not None for result in results):
            self._dirty = True
            error = HostRunError(results)
            raise error from next(result.error for result in results if result.error is not None)
        return results

    # --- single hosts

    def kill(self, host: int, number: int = signal.SIGKILL) -> None:
        """Sends signal ``number`` to ``host`` and its child processes."""
        self._hosts[host].signal_group(number)

    def log(self, host: int) -> str:
        """Returns the output of ``host`` since the last :meth:`start`."""
        return self._hosts[host].log()

    @property
    def pids(self) -> list[int]:
        """Process ids by host; empty before the first run."""
        return [host.process.pid for host in self._hosts]

    # --- closing

    def close(self) -> None:
        """Shuts the hosts down and kills those that do not exit within 15 s; no-op in a forked child."""
        if not self._owner.is_here:
            return
        alive = [host for host in self._hosts if host.process.poll() is None]
        if alive and not self._dirty and len(alive) == len(self._hosts) and all(host.ready for host in alive):
            for host in alive:
                host.send(b"stop")
            deadline = time.monotonic() + _EXIT_SECONDS
            for host in alive:
                try:
                    host.process.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    host.print_stacks()
                    time.sleep(0.5)
                    warnings.warn(
                        f"host {host.index} did not end within {_EXIT_SECONDS:.0f} s of being told to, and was killed; "
                        f"its log ends:\n{host.log()[-LOG_TAIL_BYTES:]}",
                        ResourceWarning,
                        stacklevel=2,
                    )
        self._kill()
        if self._remove_logs is not None:
            self._remove_logs()
            self._remove_logs = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _kill(self) -> None:
        for host in self._hosts:
            host.signal_group(signal.SIGKILL)
        for host in self._hosts:
            host.close()
        self._hosts = []
        self._dirty = False

    def _start(self) -> None:
        if self._remove_logs is None:  # not TemporaryDirectory, which a forked child would remove on exit
            self._directory = pathlib.Path(tempfile.mkdtemp(prefix="meshfeed-hosts-"))
            self._remove_logs = finalize(self, shutil.rmtree, self._directory, True)
        failed: list[HostResult] = []
        for attempt in range(_START_ATTEMPTS):
            failed = self._start_once(self._directory, attempt)
            if not failed:
                return
            self._kill()
            # Another process may take the port between free_port() and the bind: only then is a retry useful.
            if not any(text in result.log for result in failed for text in _PORT_TAKEN):
                break
        raise HostRunError(failed)

    def _start_once(self, directory: pathlib.Path, attempt: int) -> list[HostResult]:
        """Starts all processes; returns an empty list, or the results of all if some did not join."""
        env = dict(os.environ)
        flags = [flag for flag in env.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
        flags.append(f"--xla_force_host_platform_device_count={self.devices_per_host}")
        env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags), "PYTHONUNBUFFERED": "1", **self._env}
        self._hosts = [Host(i, directory / f"{attempt}-{i}.log", env) for i in range(self.num_hosts)]
        port = free_port()
        for host in self._hosts:
            setup = self._setup | {"host": host.index, "port": port, "sys_path": sys.path}
            host.send(pickle.dumps(setup))
        deadline = time.monotonic() + self._start_timeout_seconds
        while not all(host.ready for host in self._hosts):
            if any(host.result is not None for host in self._hosts):
                time.sleep(0.2)  # let the other hosts log their errors
                self._receive(0)
                break
            if time.monotonic() > deadline:
                self._give_up(self._start_timeout_seconds)
                break
            self._receive(0.5)
        if all(host.ready and host.result is None for host in self._hosts):
            return []
        return [host.result or HostResult(host.index, log=host.log()) for host in self._hosts]

    def _receive(self, seconds: float) -> None:
        with selectors.DefaultSelector() as selector:
            for host in self._hosts:
                if host.open:
                    selector.register(host.results_fd, selectors.EVENT_READ, host)
            if not selector.get_map():
                return
            ready = [key.data for key, _ in selector.select(seconds)]
        for host in ready or self._hosts:
            # On a timeout, also poll the processes: a dead host may have left a child that keeps the pipe open.
            if host in ready or (host.open and host.process.poll() is not None):
                host.receive()

    def _give_up(self, seconds: float) -> None:
        late = [host for host in self._hosts if host.result is None]
        for host in late:
            host.print_stacks()
        time.sleep(1.0)
        for host in late:
            host.signal_group(signal.SIGKILL)
            host.process.wait()
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
      check: whether to raise if a host failed; otherwise failures are only in the results.
      grace_seconds: time that the other hosts have to finish after one has failed.
      **pool_options: ``env``, ``recoverability``, ``heartbeat_timeout_seconds``, ``start_timeout_seconds`` of
        :class:`HostPool`.

    Returns:
      One result per host, in order of process index.

    Raises:
      HostRunError: if ``check`` is true and any host failed; the message quotes tracebacks and logs.
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
    """
    pool = HostPool(num_hosts, devices_per_host, **pool_options)
    try:
        pool.start(function, *args)
    except BaseException:
        pool.close()
        raise
    return pool
