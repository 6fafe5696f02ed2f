from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import ml_dtypes
import numpy as np
import psutil
import pytest

from meshfeed._src.base import frames
from meshfeed._src.base.errors import CorruptDataError, MeshfeedError, SettingsError, SourceError, StalledError
from meshfeed._src.base.progress import PROGRESS
from meshfeed._src.reading.workers import WorkerPool, pickle_task

SECONDS = 60.0  # far beyond what anything here takes

needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="looks into /proc")


def descriptors() -> set[tuple[str, str]]:
    """Open files, by number and target. Those of earlier tests may be closed at any time, so look at what is new only."""
    opened = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            opened.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return opened


def pool_of(task, num_workers: int = 1, **settings) -> WorkerPool:
    return WorkerPool(num_workers, pickle_task(lambda: task), name="feed-test", **settings)


@pytest.fixture(scope="module")
def echo():
    """Two workers that run what they are sent, kept for all tests that leave them whole."""

    def make_task():
        import pickle

        import cloudpickle  # noqa: F401  the requests need it

        return lambda request: pickle.loads(request)()

    with_pool = WorkerPool(2, pickle_task(make_task), name="feed-echo", describe=lambda request: "an echo")
    yield with_pool
    with_pool.close()


def call(pool: WorkerPool, function, worker_index: int = 0):
    pool.submit(worker_index, pickle_task(function))
    return pool.result(worker_index, SECONDS)


def test_results_come_in_order_from_every_worker() -> None:
    with_state: list[int] = []

    def task(number: int):
        with_state.append(number)
        time.sleep(0.001 * (number % 3))
        return np.full(number, number), {"seen": list(with_state)}

    pool = pool_of(task, 3)
    try:
        for number in range(12):
            pool.submit(number % 3, number)
        for number in range(12):
            array, info = pool.result(number % 3, SECONDS)
            np.testing.assert_array_equal(array, np.full(number, number))
            assert info == {"seen": list(range(number % 3, number + 1, 3))}
    finally:
        pool.close()


def arrays_of_all_kinds() -> dict:
    rng = np.random.default_rng(0)
    big = rng.integers(0, 255, (3, 1 << 20), np.uint8)
    bits = rng.integers(0, 1 << 16, (5, 7), np.uint16)
    return {
        "big": big,
        "bfloat16": bits.view(ml_dtypes.bfloat16),
        "float8": bits.view(np.uint8).view(ml_dtypes.float8_e4m3fn),
        "nothing": np.zeros((0, 4), np.float32),
        "no_columns": np.zeros((4, 0), ml_dtypes.bfloat16),
        "scalar": np.array(7, np.int64),
        "number": np.float32(1.5),
        "bool": np.array([True, False]),
        "strided": big[:, ::3],
        "fortran": np.asfortranarray(np.arange(12).reshape(3, 4)),
        "nested": [(np.arange(3),), {"a": None, "b": "text", "c": (1, 2)}],
    }


def assert_equal(got, want) -> None:
    if isinstance(want, dict):
        assert list(got) == list(want)
        for key in want:
            assert_equal(got[key], want[key])
    elif isinstance(want, list | tuple):
        assert type(got) is type(want)
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            assert_equal(one, other)
    elif isinstance(want, np.ndarray):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        assert got.tobytes() == want.tobytes()
    else:
        assert type(got) is type(want)
        assert got == want


def array_leaves(tree) -> list[np.ndarray]:
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        return [leaf for branch in tree for leaf in array_leaves(branch)]
    return [tree] if isinstance(tree, np.ndarray) else []


def test_arrays_arrive_bit_for_bit_aligned_and_read_only(echo) -> None:
    got = call(echo, arrays_of_all_kinds)
    assert_equal(got, arrays_of_all_kinds())
    filled = [leaf for leaf in array_leaves(got) if leaf.size]
    assert len(filled) >= 8
    for leaf in filled:
        assert leaf.ctypes.data % 64 == 0
        assert not leaf.flags.writeable
        with pytest.raises(ValueError, match=r"read-only|WRITEABLE"):
            leaf[...] = 0
        with pytest.raises(ValueError, match="WRITEABLE"):
            leaf.flags.writeable = True


@pytest.mark.skipif(frames.memory_file_flags() is None, reason="needs memfd_create")
def test_both_ways_of_the_wire_give_the_same(monkeypatch) -> None:
    tree = arrays_of_all_kinds()
    packed = frames.pack(tree)
    for flags in (frames.memory_file_flags(), None):
        monkeypatch.setattr(frames, "memory_file_flags", lambda flags=flags: flags)
        left, right = socket.socketpair()
        with left, right:
            sender = threading.Thread(target=lambda left=left: [frames.send_packed(left, k, packed) for k in (9, 8)])
            sender.start()
            inbox, received = frames.Inbox(right), []
            while len(received) < 2:
                frame = inbox.take()
                if frame is None:
                    assert inbox.receive()
                else:
                    received.append(frame)
            sender.join(SECONDS)
        assert [frame.kind for frame in received] == [9, 8]
        for frame in received:
            assert_equal(frame.value, tree)
            assert all(leaf.ctypes.data % 64 == 0 for leaf in array_leaves(frame.value) if leaf.size)
            assert not any(leaf.flags.writeable for leaf in array_leaves(frame.value) if leaf.size)


@pytest.mark.slow
@needs_proc
def test_memory_is_freed_with_the_last_array_and_costs_no_descriptor(echo) -> None:
    def mapped() -> set[str]:
        gc.collect()
        lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
        return {line for line in lines if "memfd:meshfeed" in line}

    before, files = mapped(), descriptors()

    def count() -> int:
        return len(mapped() - before)

    kept = [call(echo, lambda: {"a": np.arange(100_000), "b": np.ones(3)}) for _ in range(20)]
    assert count() == 20
    assert not descriptors() - files
    one_leaf = kept[0]["b"][1:]
    kept.clear()
    assert count() == 1
    assert one_leaf.tolist() == [1, 1]
    del one_leaf
    assert count() == 0


def test_jax_can_alias_and_donate_them(echo) -> None:
    import jax

    host = call(echo, lambda: np.arange(1 << 16, dtype=np.float32).reshape(256, 256))
    device = jax.device_put(host, jax.devices("cpu")[0])
    total = jax.jit(lambda x: x * 2, donate_argnums=0)(device)
    np.testing.assert_array_equal(np.asarray(total), host * 2)
    np.testing.assert_array_equal(host.ravel(), np.arange(1 << 16, dtype=np.float32))


def test_a_jax_array_comes_back_as_numpy(echo) -> None:
    def make():
        import jax.numpy as jnp

        return jnp.arange(5), [device.platform for device in __import__("jax").devices()]

    array, platforms = call(echo, make)
    assert type(array) is np.ndarray
    assert array.tolist() == [0, 1, 2, 3, 4]
    assert set(platforms) == {"cpu"}


def test_a_worker_imports_no_jax_by_itself() -> None:
    pool = pool_of(lambda request: sorted(set(request) & set(sys.modules)))
    try:
        pool.submit(0, ["jax", "grain", "orbax", "numpy", "__mp_main__"])
        assert pool.result(0, SECONDS) == ["numpy"]
    finally:
        pool.close()


@pytest.mark.parametrize(
    "error",
    [
        OSError(5, "Input/output error", "/data/x"),
        ValueError("three"),
        CorruptDataError("bad bytes", path="/data/y", record_id=7),
        KeyError("k"),
        ConnectionResetError(104, "Connection reset by peer"),
        BrokenPipeError(32, "Broken pipe"),
    ],
)
def test_exceptions_keep_their_type_and_the_workers_traceback(echo, error: Exception) -> None:
    def fail():
        raise error

    with pytest.raises(type(error)) as caught:
        call(echo, fail)
    assert caught.value.args == error.args
    note = caught.value.__notes__[0]
    assert "in worker 0 of 2 of feed-echo (process " in note
    assert "while working on an echo" in note
    assert "in fail" in note
    if isinstance(error, CorruptDataError):
        assert (caught.value.path, caught.value.record_id) == ("/data/y", 7)
    assert call(echo, lambda: 1) == 1  # and the worker goes on


def test_exceptions_that_cannot_be_raised_here_are_told(echo) -> None:
    class Odd(Exception):
        def __init__(self, a, b):
            super().__init__(f"odd {a}{b}")

    def raise_odd():
        raise Odd(1, 2)

    class Exits(Exception):
        def __reduce__(self):
            return sys.exit, (5,)

        def __str__(self):
            raise RuntimeError("no text")

    @dataclasses.dataclass(frozen=True)
    class Frozen(Exception):
        code: int

    def raise_exits():
        raise Exits

    def raise_frozen():
        raise Frozen(6)

    def stop():
        raise StopIteration(3)

    def leave():
        sys.exit(4)

    def unpicklable():
        return (i for i in range(3))

    for function, message in [
        (raise_odd, r"Odd: odd 12, in worker 0 .*in raise_odd"),
        (stop, r"StopIteration: 3, in worker 0"),
        (leave, r"SystemExit: 4, in worker 0"),
        (raise_exits, r"Exits: <exception str\(\) failed>, in worker 0 .*in raise_exits"),
        (raise_frozen, r"Frozen: 6, in worker 0 .*in raise_frozen"),
    ]:
        with pytest.raises(SourceError, match=f"(?s){message}"):
            call(echo, function)
    with pytest.raises(TypeError, match="pickle"):
        call(echo, unpicklable)
    assert call(echo, lambda: "still here") == "still here"


def test_a_set_up_that_fails() -> None:
    def make_task():
        raise FileNotFoundError(2, "No such file", "/data/z")

    pool = WorkerPool(1, pickle_task(make_task), name="feed-broken")
    try:
        pool.submit(0, 1)
        pool.submit(0, 2)
        for _ in range(2):
            with pytest.raises(FileNotFoundError) as caught:
                pool.result(0, SECONDS)
            assert "while being set up" in caught.value.__notes__[0]
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("number", "message"),
    [(signal.SIGKILL, r"killed by signal 9 \(SIGKILL\).*memory"), (signal.SIGSEGV, r"signal 11 \(SIGSEGV\)")],
)
def test_a_killed_worker_is_an_error_with_its_signal(number: int, message: str) -> None:
    pool = pool_of(lambda request: time.sleep(request) or request, 2)
    try:
        for request in (0, 30):
            pool.submit(0, request)
        assert pool.result(0, SECONDS) == 0
        os.kill(pool.pids[0], number)
        for _ in range(2):
            with pytest.raises(SourceError, match=rf"worker 0 of 2 of feed-test .*{message}") as caught:
                pool.result(0, SECONDS)
            assert "while it was working on 30" in str(caught.value)
        pool.submit(0, 1)  # no broken pipe here, the error stays
        with pytest.raises(SourceError, match=message):
            pool.result(0, SECONDS)
        pool.submit(1, 0)
        assert pool.result(1, SECONDS) == 0  # the other one lives
    finally:
        pool.close()


def test_a_killed_worker_is_an_error_though_a_process_that_it_forked_lives() -> None:
    def task(seconds: float) -> int:
        forked = os.fork()  # which keeps the connection open
        if not forked:
            time.sleep(2 * SECONDS)
            os._exit(0)
        time.sleep(seconds)
        return forked

    pool = pool_of(task)
    pool.submit(0, 0.0)
    forked = [pool.result(0, SECONDS)]
    try:
        [worker] = pool.pids
        pool.submit(0, 2 * SECONDS)
        while len(children := psutil.Process(worker).children()) < 2:
            time.sleep(0.01)
        forked = [child.pid for child in children]
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(SourceError, match=r"worker 0 of 1 .* was killed by signal 9 \(SIGKILL\).*memory"):
            pool.result(0, SECONDS)
        assert pool.killed
    finally:
        pool.close()
        for pid in forked:
            os.kill(pid, signal.SIGKILL)


def test_results_of_several_workers_come_when_they_are_there_and_cost_those_that_work_nothing() -> None:
    pool = pool_of(lambda seconds: time.sleep(seconds) or seconds, 3)
    try:
        for worker, seconds in enumerate((2.0, 0.0, 0.5)):
            pool.submit(worker, seconds)
        waiting, found = {0, 1, 2}, []
        while waiting:
            for worker, seconds in pool.results(waiting).items():
                waiting.remove(worker)
                found.append(seconds)
        assert sorted(found) == [0.0, 0.5, 2.0]
        assert found[-1] == 2.0
        # Stacks, which a wait without a result shows, would be written to memory again and again.
        assert [os.fstat(worker.child._stacks.fileno()).st_size for worker in pool._workers] == [0, 0, 0]
        pool.submit(1, 2 * SECONDS)
        os.kill(pool.pids[1], signal.SIGKILL)
        with pytest.raises(SourceError, match=r"worker 1 of 3 .*SIGKILL"):
            pool.results({1})
    finally:
        pool.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_what_a_scheduler_sends_to_all_processes_of_a_job_ends_no_worker(echo, number: int) -> None:
    """The program may save a checkpoint then, for which it takes further batches."""

    def warned() -> tuple[str, list[int]]:
        os.kill(os.getpid(), number)
        with subprocess.Popen(["sleep", "600"]) as other:  # as a decoder may start, and end
            other.terminate()
        forked = os.fork()
        if not forked:
            time.sleep(600)
            os._exit(0)
        os.kill(forked, signal.SIGTERM)
        return "here", [other.returncode, os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])]

    pids = echo.pids
    assert call(echo, warned) == ("here", [-signal.SIGTERM] * 2)
    assert call(echo, lambda: "still here") == "still here"
    assert echo.pids == pids


def test_a_worker_that_exits_is_an_error_with_its_code() -> None:
    pool = pool_of(lambda request: os._exit(request))
    try:
        pool.submit(0, 7)
        with pytest.raises(SourceError, match=r"exited with code 7 while it was working on 7"):
            pool.result(0, SECONDS)
    finally:
        pool.close()


def test_a_worker_that_hangs_meets_the_callers_timeout(echo) -> None:
    echo.submit(0, pickle_task(lambda: time.sleep(0.8) or "late"))
    with pytest.raises(StalledError, match=r"worker 0 of 2 .* has not answered within .* working on an echo") as caught:
        echo.result(0, 0.2)
    assert 0.2 <= caught.value.waited_seconds < SECONDS
    assert echo.result(0, SECONDS) == "late"  # nothing is lost by it


def test_many_requests_ahead_do_not_block(echo) -> None:
    request = np.arange(20_000)
    big = pickle_task(lambda: int(request[-1]))
    for _ in range(40):  # 6 MB, far more than the socket holds
        echo.submit(1, big)
    assert [echo.result(1, SECONDS) for _ in range(40)] == [19_999] * 40


@pytest.mark.slow
@needs_proc
def test_close_leaves_nothing_and_does_not_wait_for_work(tmp_path) -> None:
    def make_task():
        class Task:
            def __call__(self, request):
                (tmp_path / f"begun-{request}").touch()
                time.sleep(request)
                return np.zeros(request)

            def close(self):
                (tmp_path / str(os.getpid())).touch()

        return Task()

    gc.collect()
    files, children = descriptors(), set(psutil.Process().children())
    pool = WorkerPool(3, pickle_task(make_task), name="feed-closing")
    idle, busy, _ = pool.pids
    pool.submit(0, 0)
    pool.result(0, SECONDS)
    pool.submit(1, 600)
    for _ in range(4):
        pool.submit(2, 0)
    pool.result(2, SECONDS)
    deadline = time.monotonic() + SECONDS
    while not (tmp_path / "begun-600").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 30
    pool.close()
    assert set(psutil.Process().children()) <= children
    assert not descriptors() - files
    assert (tmp_path / str(idle)).exists()
    assert not (tmp_path / str(busy)).exists()
    for use in (lambda: pool.submit(0, 1), lambda: pool.result(0, 1)):
        with pytest.raises(MeshfeedError, match="closed"):
            use()


@pytest.mark.slow
def test_a_forgotten_pool_is_closed() -> None:
    pool = pool_of(lambda request: request)
    process = psutil.Process(pool.pids[0])
    del pool
    gc.collect()
    assert not process.is_running()


def wait_until_gone(pids: list[int], seconds: float = 20.0) -> list[int]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        left = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
        if not left:
            return []
        time.sleep(0.05)
    return left


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("forked", [False, True])
def test_a_killed_parent_leaves_no_worker_and_no_memory(forked: bool, tmp_path) -> None:
    # As a plain script: no guard around its main part, functions defined in it.
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, time
        import numpy as np
        from meshfeed._src.reading.workers import WorkerPool, pickle_task

        class Mine(Exception):
            pass

        def task(request):
            if request == "hang":
                time.sleep(600)
            if request == "raise":
                raise Mine("own class")
            return np.zeros(1 << 20)

        print("main runs", flush=True)
        pool = WorkerPool(2, pickle_task(lambda: task), name="feed-0")
        for worker_index in range(2):
            for request in ("raise", "ok", "ok", "ok"):
                pool.submit(worker_index, request)
            try:
                pool.result(worker_index, 60)
            except Mine:
                pass
            kept = pool.result(worker_index, 60)
        if {forked} and os.fork() == 0:  # holds a copy of the sockets
            time.sleep(20)
            os._exit(0)
        pool.submit(0, "hang")
        print(*pool.pids, flush=True)
        time.sleep(600)
        """)
    )
    shm = set(os.listdir("/dev/shm"))
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "main runs\n"
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(psutil.pid_exists(pid) for pid in pids)
        forks = [child for child in psutil.Process(parent.pid).children() if child.pid not in pids]
        parent.kill()
        parent.wait(SECONDS)
        assert wait_until_gone(pids) == []
        deadline = time.monotonic() + SECONDS  # other programs use the folder too, for a while
        while not set(os.listdir("/dev/shm")) <= shm and time.monotonic() < deadline:
            time.sleep(0.05)
        assert set(os.listdir("/dev/shm")) <= shm
        for fork in forks:
            fork.kill()
    finally:
        parent.kill()
        parent.wait()
        if parent.stdout is not None:
            parent.stdout.close()


def test_garbage_is_collected_between_requests_only() -> None:
    def state(request):
        return gc.isenabled(), gc.get_freeze_count() > 1000, gc.get_stats()[2]["collections"]

    frozen, free = pool_of(state, gc_every=3), pool_of(state, gc_every=0)
    try:
        for _ in range(8):
            frozen.submit(0, None)
        seen = [frozen.result(0, SECONDS) for _ in range(8)]
        assert {(enabled, many_frozen) for enabled, many_frozen, _ in seen} == {(False, True)}
        assert seen[-1][2] - seen[0][2] == 2  # after the set-up and requests 2 and 5, seen from request 0 to request 7
        free.submit(0, None)
        assert free.result(0, SECONDS)[:2] == (True, False)
    finally:
        frozen.close()
        free.close()


def test_what_cannot_travel_is_a_settings_error() -> None:
    lock = threading.Lock()
    with pytest.raises(SettingsError, match=r"num_workers starts worker processes.*num_workers=0"):
        pickle_task(lambda: lock)


def test_a_result_without_a_request_is_refused(echo) -> None:
    with pytest.raises(MeshfeedError, match="no pending request"):
        echo.result(1, 0.1)


@pytest.mark.slow
def test_a_worker_that_drops_records_may_take_longer_than_the_time_out(echo) -> None:
    def drop(count: int, then_seconds: float = 0.0):
        from meshfeed._src.base import progress

        progress._TELL_SECONDS = 0.1
        with progress.Dropping("lane 0", 30) as dropping:
            for _ in range(count):
                time.sleep(0.1)
                dropping.add()
            time.sleep(then_seconds)
        return "done"

    echo.submit(0, pickle_task(lambda: drop(30)))
    assert echo.result(0, 1.5) == "done"
    echo.submit(0, pickle_task(lambda: drop(10, then_seconds=4)))
    with pytest.raises(StalledError, match=r"it is resuming lane 0: dropped \d+ of 30 records"):
        echo.result(0, 1.5)
    assert echo.result(0, SECONDS) == "done"
    assert not str(PROGRESS)
