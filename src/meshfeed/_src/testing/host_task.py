"""The task of each process of a local multi-host job: join the job, call functions, and leave the job in order."""

from __future__ import annotations

import dataclasses
import importlib
import pickle
import sys
import traceback

from meshfeed._src.base.types import PyTree


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
        try:
            self._join()
        except BaseException:
            traceback.print_exc()  # the parent searches the log for the error of a port that is in use
            raise
        return self

    def _join(self) -> None:
        import jax

        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        if self.recoverability:
            jax.config.update("jax_enable_recoverability", True)
        options: dict[str, object] = {}
        if self.heartbeat_timeout_seconds is not None:
            options["heartbeat_timeout_seconds"] = int(self.heartbeat_timeout_seconds)
        address = f"127.0.0.1:{self.port}"
        if self.host == 0:
            options["coordinator_bind_address"] = address  # not on public network interfaces
        jax.distributed.initialize(address, self.num_hosts, self.host, **options)  # pyright: ignore[reportArgumentType] # keywords of several types
        jax.devices()  # exchanges topologies collectively; an error here is better than one in the first test

    def __call__(self, payload: bytes) -> bytes:
        """Calls the pickled function with its arguments and returns its pickled value."""
        import cloudpickle

        try:
            function, args = pickle.loads(payload)
            if isinstance(function, str):
                module, _, name = function.partition(":")
                function = getattr(importlib.import_module(module), name)
            return cloudpickle.dumps(_portable(function(*args)))
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()

    def close(self) -> None:
        """Leaves the job. This is a barrier: the coordinator must outlive the other hosts' last calls."""
        import jax

        jax.distributed.shutdown()


def _portable(value: PyTree) -> PyTree:
    """Converts jax.Arrays to numpy, which the parent can unpickle without a JAX backend."""
    import jax
    import numpy as np

    def leaf(x: object) -> object:
        if isinstance(x, jax.Array) and (x.is_fully_addressable or x.is_fully_replicated):
            return np.asarray(x)
        return x

    return jax.tree_util.tree_map(leaf, value)
