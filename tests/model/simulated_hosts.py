"""Hosts of a job as threads of one process: whole feeds, on devices that hold no arrays.

Everything of the feed runs but two calls: putting blocks on devices keeps the blocks instead, and the compiled move of
``load="once"`` leaves the rows where they were read. Both are checked block by block.
"""

from __future__ import annotations

import _thread
import collections
import contextlib
import dataclasses
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import remote_hosts

sys.path.insert(0, str(Path(__file__).parent.parent / "chaos"))

from configurations import LEAVES, Case, Phase
from driver import Exchange, blocks_of, check_block, play_host, types_of
from memory_store import MemoryStore

from meshfeed._src.agreement import followers, handover, handshake, windows
from meshfeed._src.arrays import device_put, load_once
from meshfeed._src.base import child, coordination, serving, threads
from meshfeed._src.plan.topology import fake_devices
from meshfeed._src.reading import identity
from meshfeed._src.state import files
from meshfeed._src.streams import lane_moves

JOIN_SECONDS, CLEANUP_SECONDS = 60.0, 10.0
_STEPS = "meshfeed.steps"
_ROUND = re.compile(r"(feed/.+(?<!/meet))/(\d+)/(?:in/\d+|out)$")  # of a handshake, or a window of steps
_KEPT_ROUNDS = {False: 2, True: 4}  # of a handshake, if a reshard has failed or hosts have left: these wait in others


@dataclasses.dataclass
class Blocks:
    """A global array of which one host holds some blocks."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Any
    blocks: list[tuple[Any, np.ndarray]]  # device, block

    @property
    def addressable_shards(self) -> list[Any]:
        """The blocks in the form that ``jax.Array`` has them."""
        indices = self.sharding.devices_indices_map(self.shape)
        return [types.SimpleNamespace(index=indices[device], data=block) for device, block in self.blocks]


class _Put(device_put.BlockDevicePut):
    """Keeps the blocks."""

    def __call__(self, blocks: list[np.ndarray]) -> Any:
        assert len(blocks) == len(self._devices)
        assert all(block.flags.c_contiguous for block in blocks)
        return Blocks(self._shape, self._dtype, self._sharding, list(zip(self._devices, blocks, strict=True)))


class _Move(load_once.LoadOncePlacer):
    """Leaves the rows in the load sharding."""

    def finish(self, arrays: Any, global_batch_size: int) -> Any:
        return jax.tree.unflatten(arrays.treedef, list(zip(arrays.arrays, arrays.specs, strict=True)))


class _Here:
    """The process as which a thread runs; threads that it starts run as the same one."""

    def __init__(self) -> None:
        self._local = threading.local()

    @property
    def host(self) -> int:
        return getattr(self._local, "host", 0)

    @host.setter
    def host(self, host: int) -> None:
        self._local.host = host

    @property
    def job(self) -> Any:
        return getattr(self._local, "job", None)

    @job.setter
    def job(self, job: Any) -> None:
        self._local.job = job


class _WorkerThread:
    """A worker process as a thread of its host: it starts at once, and the faults of a source reach it."""

    returncode = None

    def __init__(self, command: list[str], **_: Any) -> None:
        target, *descriptors = command[command.index("-c") + 2 :][:4]
        assert target == "meshfeed._src.base.child:serve", target
        parent = child.Parent(*(os.dup(int(number)) for number in descriptors), os.getpid())
        self.pid = os.getpid()
        self._thread = threading.Thread(target=self._serve, args=(parent,), name="worker", daemon=True)
        self._thread.start()

    @staticmethod
    def _serve(parent: child.Parent) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its host has hung up
            child._serve(parent)
        parent._connection.close()
        parent._stack_requests.close()
        os.close(parent._stacks)

    def poll(self) -> int | None:
        self.returncode = None if self._thread.is_alive() else 0
        return self.returncode

    def wait(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)

    def send_signal(self, number: int) -> None:
        """Does nothing: a thread cannot be killed."""


class _Connection:
    """A host's connection to the key-value store; of a host that is killed nothing arrives there.

    Attributes:
      repeated: keys under which the host has published the same bad records again in one generation.
    """

    def __init__(self, store: MemoryStore, killed: set[int], host: int) -> None:
        self._store, self._killed, self._host = store, killed, host
        self._bad: dict[str, Any] = {}
        self.repeated: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name in ("delete", "increment") and self._host in self._killed:
            return lambda *_, **__: None
        return getattr(self._store, name)

    def set(self, key: str, value: str, **options: Any) -> None:
        if self._host in self._killed:
            return
        if key.endswith("/bad"):
            bad = json.loads(value)[1]
            self.repeated += [key] if self._bad.get(key) == bad else []
            self._bad[key] = bad
        self._store.set(key, value, **options)

    def begin_generation(self) -> None:
        """From now on, a publication may say the same as one before, which may be of another past."""
        self._bad.clear()


class Job:
    """The hosts of one case, and the key-value store that they share."""

    def __init__(self, processes: int, store: MemoryStore | None = None) -> None:
        self.processes = processes
        self.store = MemoryStore() if store is None else store
        self.killed: set[int] = set()
        self.connections = [_Connection(self.store, self.killed, host) for host in range(processes)]
        self.counts: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.warnings: dict[int, list[logging.LogRecord]] = collections.defaultdict(list)  # by host
        self.steps: dict[int, list[str]] = collections.defaultdict(list)  # host → lines of its log of steps
        self.threads: list[threading.Thread] = []  # that hosts have started


class _Entries(logging.Handler):
    """Keeps the warnings of each host and its log of steps, instead of writing them."""

    def __init__(self, here: _Here) -> None:
        super().__init__()
        self._here = here

    def emit(self, record: logging.LogRecord) -> None:
        if self._here.job is not None and record.name == _STEPS:
            self._here.job.steps[self._here.host].append(record.getMessage())
        elif self._here.job is not None and record.levelno >= logging.WARNING:
            self._here.job.warnings[self._here.host].append(record)


@contextlib.contextmanager
def simulation(*, quiet: bool = True) -> Iterator[None]:
    """Makes threads hosts; see :func:`play`.

    Args:
      quiet: whether the hosts' log is kept from other handlers.
    """
    here = _Here()
    old_start = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        job, host, run = here.job, here.host, thread.run

        def run_as() -> None:
            here.job, here.host = job, host
            run()

        if job is not None:
            thread.run = run_as  # type: ignore[method-assign]
            job.threads.append(thread)
        old_start(thread)

    def start_new_thread(function: Any, arguments: tuple[Any, ...]) -> int:
        job, host = here.job, here.host

        def run_as() -> None:
            here.job, here.host = job, host
            function(*arguments)

        return _thread.start_new_thread(run_as, ())

    init_handover = handover.Handover.__init__

    def begin_handover(self: handover.Handover, store: Any, **options: Any) -> None:
        here.job.connections[here.host].begin_generation()
        init_handover(self, store, **options)

    def next_use(name: str) -> int:
        counts = here.job.counts[here.host]
        counts[name] += 1
        return counts[name] - 1

    patches: list[tuple[Any, str, Any]] = [
        (threading.Thread, "start", start),
        (threads, "_thread", types.SimpleNamespace(start_new_thread=start_new_thread)),
        (child, "subprocess", types.SimpleNamespace(**{**vars(subprocess), "Popen": _WorkerThread})),
        (child, "TaskServer", lambda gc_every: serving.TaskServer(0)),  # which would disable this process's collector
        (coordination, "process_index", lambda: here.host),
        (coordination, "process_count", lambda: here.job.processes if here.job else 1),
        (coordination, "key_value_store", lambda: here.job.connections[here.host]),
        (coordination, "next_use", next_use),
        (coordination, "is_distributed", lambda: True),
        (handover.Handover, "__init__", begin_handover),
        (identity, "process_index", lambda: here.host),
        (files, "process_index", lambda: here.host),
        *((module, "ASIDE_SECONDS", 0.1) for module in (followers, handshake, windows)),
        (lane_moves, "_CHUNK_RECORDS", 3),  # or no lane would be read forward in more than one piece
        (device_put, "BlockDevicePut", _Put),
        (load_once, "BlockDevicePut", _Put),
        (
            jax,
            "make_array_from_single_device_arrays",
            lambda shape, sharding, arrays, *, dtype: Blocks(shape, dtype, sharding, arrays),
        ),
    ]
    from meshfeed._src.arrays import placer

    patches += [(placer, "LoadOncePlacer", _Move), *remote_hosts.patches()]
    saved = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for owner, name, value in patches:
        setattr(owner, name, value)
    _current.append(here)
    log, steps, handler = logging.getLogger("meshfeed"), logging.getLogger(_STEPS), _Entries(here)
    log.addHandler(handler)
    propagates, log.propagate = log.propagate, not quiet
    steps.setLevel(logging.DEBUG)
    disabled = logging.root.manager.disable
    logging.disable(logging.NOTSET)
    try:
        yield
    finally:
        log.removeHandler(handler)
        steps.setLevel(logging.NOTSET)
        logging.disable(disabled)
        log.propagate = propagates
        _current.pop()
        for owner, name, value in saved:
            setattr(owner, name, value)


_current: list[_Here] = []


class _World(Exchange):
    def __init__(self, case: Case, here: _Here) -> None:
        super().__init__()
        self._case, self._here = case, here

    def warnings(self) -> list[logging.LogRecord]:
        return self._here.job.warnings[self._here.host]

    def steps(self) -> list[str]:
        return self._here.job.steps[self._here.host]

    def check_rounds(self) -> None:
        most, rounds = _KEPT_ROUNDS[self._case.config["reshard"] != "none"], collections.defaultdict[str, set[int]](set)
        for key in self._here.job.store.directory("meshfeed"):
            if found := _ROUND.match(key):
                rounds[found[1]].add(int(found[2]))
        kept = {
            scope: sorted(found)
            for scope, found in rounds.items()
            # Windows are deleted in their order.
            if (len(found) > most if scope.endswith("/settings") else max(found) - min(found) >= len(found))
        }
        assert self._here.job.killed or not kept, f"rounds or windows are left in the store: {kept}"

    def kill(self, host: int) -> None:
        self._here.job.killed.add(host)

    def devices(self, processes: int, per_host: int) -> list[Any]:
        return fake_devices(processes, per_host, this_process=self._here.host)

    def check(self, name: str, array: Any, wanted: np.ndarray, phase: Phase, host: int) -> None:
        if isinstance(array, Blocks):
            _check_shape(array.shape, array.dtype, wanted)
            expected = blocks_of(phase, name, host, wanted.shape)
            found = {self._number(phase, device): block for device, block in array.blocks}
            assert sorted(found) == sorted(expected), f"blocks on the devices {sorted(found)}, not {sorted(expected)}"
            for number, index in expected.items():
                check_block(found[number], wanted, index)
            return
        loaded, spec = array
        _check_shape(spec.shape, spec.dtype, wanted)
        self._check_loaded(loaded, wanted, phase, host)

    def _check_loaded(self, loaded: Blocks, wanted: np.ndarray, phase: Phase, host: int) -> None:
        """The rows that this host read, as integers, each on the device that the assignment names."""
        found = {self._number(phase, device): block for device, block in loaded.blocks}
        topology = phase.topology
        mine = [int(device) for device in topology.grid.flat if topology.host_of(int(device)) == host]
        assert sorted(found) == sorted(mine), f"blocks on the devices {sorted(found)}, not {sorted(mine)}"
        bits = wanted
        if wanted.dtype.kind == "c":
            bits = wanted.view(f"u{wanted.itemsize // 2}")
        elif wanted.dtype.kind not in "iu":
            bits = wanted.view(f"u{wanted.itemsize}")
        for rank, device in enumerate(topology.reading_devices(phase.load)):
            if device not in found:
                continue
            rows = topology.chunk(rank, len(wanted), phase.load)
            block = found[device]
            each = topology.chunk(0, len(wanted), phase.load)
            assert len(block) == len(each), f"{len(block)} rows on device {device}, not {len(each)}"
            assert not np.ascontiguousarray(block[len(rows) :]).any(), f"more rows than {rows} on device {device}"
            assert block.dtype == bits.dtype, f"carrier {block.dtype}, not {bits.dtype}"
            got, right = np.ascontiguousarray(block[: len(rows)]), np.ascontiguousarray(bits[rows.start : rows.stop])
            assert got.tobytes() == right.tobytes(), f"rows {rows} on device {device}: {got}, not {right}"

    @staticmethod
    def _number(phase: Phase, device: Any) -> int:
        return device.process_index * phase.topology.devices + device.local_hardware_id


def _check_shape(shape: tuple[int, ...], dtype: Any, wanted: np.ndarray) -> None:
    assert tuple(shape) == wanted.shape, f"shape {shape}, not {wanted.shape}"
    assert np.dtype(dtype) == wanted.dtype, f"dtype {dtype}, not {wanted.dtype}"


def run(
    processes: int,
    function: Callable[[int], Any],
    seconds: float | None = None,
    *,
    job: Job | None = None,
    give_up: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Calls ``function(host)`` as each host of a job, within :func:`simulation`; returns what each call returned.

    Args:
      processes: of the job.
      function: what a host does.
      seconds: that all calls may take; None for ``JOIN_SECONDS``.
      job: with the hosts' key-value store; None for one of its own.
      give_up: called after an error on some host.

    Raises:
      AssertionError: a call raised, or has not returned within ``seconds``.
    """
    here, job = _current[-1], job or Job(processes)
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}

    def run_as(host: int) -> None:
        here.job, here.host = job, host
        try:
            results[host] = function(host)
        except BaseException as error:
            errors[host] = error
            give_up()

    hosts = [threading.Thread(target=run_as, args=(host,), daemon=True) for host in range(processes)]
    for thread in hosts:
        thread.start()
    deadline = time.monotonic() + (JOIN_SECONDS if seconds is None else seconds)
    for thread in hosts:
        thread.join(max(0.0, deadline - time.monotonic()))
    hanging = [host for host, thread in enumerate(hosts) if thread.is_alive()]
    texts = [f"host {host}: {type(error).__name__}: {error}" for host, error in sorted(errors.items())]
    if hanging:
        texts.append(f"hosts {hanging} hang")
    if texts:
        raise AssertionError("\n".join(texts)) from next(iter(errors.values()), None)
    return [results[host] for host in range(processes)]


def play(case: Case) -> None:
    """Plays a case on simulated hosts, within :func:`simulation`.

    Raises:
      AssertionError: something is not as the model says, or a host hangs.
    """
    world, job = _World(case, _current[-1]), Job(case.processes)
    assert case.events  # once for all hosts
    # Which others find out after some time.
    alone = case.config["fault"] in ("unopened", *LEAVES) or case.config["reshard"] == "killed"
    handshake._GRACE_SECONDS, windows._ERROR_GRACE_SECONDS = (0.4, 0.4) if alone else (3.0, 4.0)
    with types_of(case):
        run(case.processes, lambda host: play_host(case, host, world, "case"), job=job, give_up=world.give_up)
    end = time.monotonic() + CLEANUP_SECONDS
    while ((left := _unexpected(job.store.keys(), job.killed)) or _running(job)) and time.monotonic() < end:
        time.sleep(0.01)
    assert not left, f"keys are left in the store: {left}"
    assert not _running(job), f"threads are left: {_running(job)}"
    repeated = [key for connection in job.connections for key in connection.repeated]
    assert not repeated, f"published again without a change: {repeated}"


def _running(job: Job) -> list[str]:
    return sorted(thread.name for thread in job.threads if thread.is_alive())


def _unexpected(keys: list[str], killed: Collection[int] = ()) -> list[str]:
    """Keys that feeds leave behind.

    Those of a feed's last 16 generations are for hosts that follow it late, and the results of its last two meetings for
    those that call reshard late; one that failed is deleted once the same hosts have met. What a host that is killed has
    shared with the others stays, as it may only be slow, but nothing of what these share after they have met.
    """
    if killed:
        own = {f"meshfeed/{what}/{host}" for what in ("alive", "watch") for host in killed}
        keys = [key for key in keys if key not in own and (not key.startswith("meshfeed/feed/") or "-on-" in key)]
    of = {key: key.rpartition("/")[0] for key in keys if key.startswith("meshfeed/follow/")}
    of |= {key: key.rpartition("-on-")[0] + "/meet" for key in of if key.endswith("/meet/out")}
    counts = collections.Counter(of.values())
    return [key for key in keys if key not in of or counts[of[key]] > (2 if of[key].endswith("/meet") else 16)]
