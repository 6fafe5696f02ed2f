"""Runs inside each process that :mod:`meshfeed._src.testing.spawn` starts: joins the job, runs functions, exits."""

from __future__ import annotations

import faulthandler
import os
import pickle
import queue
import signal
import struct
import sys
import threading
import traceback
from typing import Any, BinaryIO

_LENGTH = struct.Struct("<Q")


def write_message(stream: BinaryIO, payload: bytes) -> None:
    """Writes one length-prefixed message."""
    stream.write(_LENGTH.pack(len(payload)) + payload)
    stream.flush()


def take_message(buffer: bytearray) -> bytes | None:
    """Removes and returns the first message of ``buffer``; None while it is incomplete."""
    if len(buffer) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(buffer)
    end = _LENGTH.size + length
    if len(buffer) < end:
        return None
    payload = bytes(buffer[_LENGTH.size : end])
    del buffer[:end]
    return payload


def _read_message(stream: BinaryIO) -> bytes | None:
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    payload = stream.read(length)
    return payload if len(payload) == length else None


def _read_tasks(stream: BinaryIO, tasks: queue.SimpleQueue[bytes]) -> None:
    while (payload := _read_message(stream)) is not None:
        tasks.put(payload)
    # End of input means that the parent has died: an orderly shutdown sends "stop". Without this, the process and its
    # children would be orphaned. It leads its own process group, so the signal reaches exactly those.
    os.killpg(os.getpid(), signal.SIGKILL)


def _join(setup: dict[str, Any]) -> None:
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if setup["recoverability"]:
        jax.config.update("jax_enable_recoverability", True)
    options = {}
    if setup["heartbeat_timeout_seconds"] is not None:
        options["heartbeat_timeout_seconds"] = int(setup["heartbeat_timeout_seconds"])
    address = f"127.0.0.1:{setup['port']}"
    if setup["host"] == 0:
        options["coordinator_bind_address"] = address  # not on public network interfaces
    jax.distributed.initialize(address, setup["num_hosts"], setup["host"], **options)
    jax.devices()  # exchanges topologies collectively: fail here, not in the first test


def _portable(value: Any) -> Any:
    """Converts the jax.Arrays of ``value`` to numpy, which the parent can unpickle without a JAX backend."""
    import jax
    import numpy as np

    def leaf(x: Any) -> Any:
        if isinstance(x, jax.Array) and (x.is_fully_addressable or x.is_fully_replicated):
            return np.asarray(x)
        return x

    return jax.tree_util.tree_map(leaf, value)


def _dump_error(error: BaseException) -> bytes:
    import cloudpickle

    try:
        payload = cloudpickle.dumps(error)
        pickle.loads(payload)  # an exception with its own __init__ arguments may pickle but not unpickle
        return payload
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__module__}.{type(error).__qualname__}: {error}"))


def _run(payload: bytes) -> dict[str, Any]:
    import cloudpickle

    try:
        function, args = pickle.loads(payload)
        if isinstance(function, str):
            module, _, name = function.partition(":")
            function = getattr(__import__(module, fromlist=["_"]), name)
        return {"value": cloudpickle.dumps(_portable(function(*args)))}
    except BaseException as error:  # includes SystemExit and KeyboardInterrupt: the parent waits for an answer
        text = traceback.format_exc()
        print(text, file=sys.stderr, flush=True)
        return {"error": _dump_error(error), "traceback": text}


def main(results_fd: int) -> None:
    """Runs functions read from standard input until "stop"; writes results to ``results_fd``."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the parent requests stacks before it kills
    os.set_inheritable(results_fd, False)
    stream = os.fdopen(os.dup(0), "rb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # keeps user code and its child processes from reading tasks
    os.close(null)
    results = os.fdopen(results_fd, "wb")
    setup_payload = _read_message(stream)
    if setup_payload is None:
        return
    setup = pickle.loads(setup_payload)
    sys.path[:] = setup["sys_path"]
    tasks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_tasks, args=(stream, tasks), daemon=True).start()
    _join(setup)
    write_message(results, pickle.dumps({"ready": True}))
    while (payload := tasks.get()) != b"stop":
        answer = _run(payload)
        sys.stdout.flush()
        sys.stderr.flush()
        write_message(results, pickle.dumps(answer))

    import jax

    jax.distributed.shutdown()  # a barrier: the coordinator must outlive the other hosts' last calls
