"""Workers on a real Ray cluster of several nodes on this machine, which all tests share; nodes are killed in the middle."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

import meshfeed
from meshfeed._src.base.progress import PROGRESS
from meshfeed._src.base.settings import Workers, at_most
from meshfeed._src.base.stats import CACHES
from meshfeed._src.reading.workers import Pool, open_pool, pickle_task

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray")

SECONDS = 300.0  # far beyond what anything here takes
NODE = {"num_cpus": 3, "object_store_memory": 80 << 20}


class Nodes:
    """A cluster whose head runs no workers, so that any other node may be killed."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        checks = {"initial_delay_ms": 0, "period_ms": 1000, "failure_threshold": 5, "timeout_ms": 10_000}
        head = {
            "num_cpus": 0,
            "object_store_memory": 80 << 20,
            "include_dashboard": False,
            "_system_config": {f"health_check_{name}": value for name, value in checks.items()},
        }
        self.cluster = patiently(lambda: Cluster(initialize_head=True, head_node_args=head))
        self.address = self.cluster.address
        for _ in range(2):
            self.add()

    def add(self) -> None:
        patiently(lambda: self.cluster.add_node(**NODE))

    def kill(self, node_id: str) -> None:
        (node,) = (node for node in self.cluster.worker_nodes if node.node_id == node_id)
        self.cluster.remove_node(node, allow_graceful=False)


def patiently(start: Callable[[], Any]) -> Any:
    """Ray gives a node 30 s to start, which is not always enough beside other tests."""
    for _ in range(3):
        try:
            return start()
        except Exception as error:
            if "timed out" not in str(error):
                raise
    return start()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        folder = tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True)
        patch.setenv("RAY_TMPDIR", stack.enter_context(folder))  # short, because it holds sockets
        nodes = Nodes()
        stack.callback(nodes.cluster.shutdown)
        patch.setenv("RAY_ADDRESS", nodes.address)
        stack.callback(ray.shutdown)
        yield nodes


def workers(count: int, **options: Any) -> Workers:
    return Workers(count, engine="ray", **options)


@contextlib.contextmanager
def pool_of(make_task: Any, count: int = 1, resume: Any = None, **options: Any) -> Iterator[Pool]:
    task = pickle_task(make_task)
    pool = open_pool(workers(count, **options), task, name="feed-test", describe=lambda r: "a call", resume=resume)
    try:
        yield pool
    finally:
        pool.close()


def make_echo() -> Any:
    """Runs what it is sent."""
    import cloudpickle  # noqa: F401  the requests need it

    return lambda request: pickle.loads(request)()


@pytest.fixture(scope="module")
def echo(nodes: Nodes) -> Iterator[Pool]:
    before = signal.getsignal(signal.SIGTERM)
    with pool_of(make_echo, 2) as pool:
        assert signal.getsignal(signal.SIGTERM) is before  # which ray.init replaces in the main thread
        for worker_index in (0, 1):  # starts, however long that takes
            call(pool, int, worker_index)
        yield pool


def call(pool: Pool, function: Any, worker_index: int = 0, seconds: float = SECONDS) -> Any:
    pool.submit(worker_index, pickle_task(function))
    return pool.result(worker_index, seconds)


# ---------------------------------------------------------------------- the pool


def test_answers_come_in_order_from_every_worker(echo: Pool) -> None:
    for number in range(12):
        echo.submit(number % 2, pickle_task(lambda number=number: (number, os.environ["JAX_PLATFORMS"])))
    assert [echo.result(number % 2, SECONDS) for number in range(12)] == [(number, "cpu") for number in range(12)]
    assert len({call(echo, os.getpid, worker) for worker in (0, 1)}) == 2


def test_an_actor_imports_no_jax_by_itself(nodes: Nodes) -> None:
    with pool_of(lambda: lambda request: sorted(set(request) & set(sys.modules))) as pool:
        pool.submit(0, ["jax", "grain", "orbax", "numpy"])
        assert pool.result(0, SECONDS) == ["numpy"]


def test_arrays_are_copied_out_of_the_object_store_aligned_and_read_only(echo: Pool) -> None:
    def make() -> Any:
        import ml_dtypes

        bits = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
        return {
            "big": np.arange(1 << 18),
            "bfloat16": bits.view(ml_dtypes.bfloat16),
            "no": np.zeros((0, 3)),
            "text": "a",
        }

    free = ray.available_resources()["object_store_memory"]
    kept = [call(echo, make) for _ in range(60)]  # 126 MB, through a store of 80 MB
    want = make()
    for got in kept:
        assert got["text"] == "a"
        for name in ("big", "bfloat16", "no"):
            assert (got[name].dtype, got[name].shape) == (want[name].dtype, want[name].shape)
            assert got[name].tobytes() == want[name].tobytes()
        for name in ("big", "bfloat16"):
            assert got[name].ctypes.data % 64 == 0
            assert not got[name].flags.writeable
    deadline = time.monotonic() + SECONDS
    while ray.available_resources()["object_store_memory"] < free - (4 << 20) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ray.available_resources()["object_store_memory"] >= free - (4 << 20)  # although the arrays are kept


def test_exceptions_keep_their_type_and_name_the_worker_and_its_node(echo: Pool) -> None:
    class Odd(Exception):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(f"odd {a}{b}")

    def fail(kind: type[BaseException], *args: Any) -> Any:
        def function() -> None:
            raise kind(*args)

        return function

    with pytest.raises(OSError, match="/data/x") as caught:
        call(echo, fail(OSError, 5, "Input/output error", "/data/x"))
    assert caught.value.errno == 5
    note = caught.value.__notes__[0]
    assert "in worker 0 of 2 of feed-test (process " in note
    assert "Ray node " in note
    assert "while working on a call" in note
    for error, message in [
        ((Odd, 1, 2), "Odd: odd 12, in worker"),
        ((StopIteration, 3), "Stop"),
        ((SystemExit, 4), "4"),
    ]:
        with pytest.raises(meshfeed.SourceError, match=message):
            call(echo, fail(*error))
    with pytest.raises(TypeError, match="pickle"):
        call(echo, lambda: (i for i in range(3)))
    assert call(echo, lambda: "still here") == "still here"


def test_a_worker_that_hangs_is_named_and_loses_nothing(echo: Pool) -> None:
    echo.submit(1, pickle_task(lambda: time.sleep(3) or "late"))
    with pytest.raises(
        meshfeed.StalledError,
        match=r"worker 1 of 2 of feed-test \(process \d+ on .*, Ray node \w+\) has not answered within .* It is working on "
        r"a call\. .*py-spy dump --pid \d+",
    ):
        echo.result(1, 0.3)
    assert echo.result(1, SECONDS) == "late"


def test_an_interrupt_loses_no_answer_and_ends_no_worker(echo: Pool) -> None:
    pid = call(echo, os.getpid)
    echo.submit(0, pickle_task(lambda: time.sleep(2) or os.getpid()))
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background job of a script
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            echo.result(0, SECONDS)
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert echo.result(0, SECONDS) == pid


def test_a_resume_may_take_longer_than_the_timeout_while_it_moves(echo: Pool) -> None:
    def drop(seconds: float) -> Any:
        from meshfeed._src.base import progress

        progress._TELL_SECONDS = 0.1
        with progress.Dropping("lane 0", 40) as dropping:
            for _ in range(40):
                time.sleep(0.1)
                dropping.add()
            time.sleep(seconds)
        return "done"

    assert call(echo, lambda: drop(0), seconds=3) == "done"
    echo.submit(0, pickle_task(lambda: drop(5)))
    with pytest.raises(meshfeed.StalledError, match=r"It is resuming lane 0: dropped \d+ of 40 records"):
        echo.result(0, 3)
    assert echo.result(0, SECONDS) == "done"
    assert not str(PROGRESS)


def test_the_use_of_caches_is_counted_here(echo: Pool) -> None:
    def use() -> None:
        from meshfeed._src.base.stats import CACHES

        CACHES.add({"ray_hits": 3})

    before = CACHES.totals().get("ray_hits", 0)
    call(echo, use)
    assert CACHES.totals()["ray_hits"] == before + 3


def test_a_set_up_that_fails_is_raised_by_each_request(nodes: Nodes) -> None:
    def make_task() -> Any:
        raise FileNotFoundError(2, "No such file", "/data/z")

    with pool_of(make_task) as pool:
        for _ in range(2):
            pool.submit(0, 1)
            with pytest.raises(FileNotFoundError) as caught:
                pool.result(0, SECONDS)
            assert "while being set up" in caught.value.__notes__[0]


def test_a_request_that_ends_its_worker_is_an_error_in_the_end(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshfeed._src.reading import ray_workers

    monkeypatch.setattr(ray_workers, "_MAX_LOSSES", 1)
    with pool_of(lambda: os._exit) as pool:
        pool.submit(0, 7)
        for _ in range(2):
            with pytest.raises(
                meshfeed.SourceError,
                match=r"worker 0 of 1 of feed-test .* was lost while it was .*a call.*actor died.*replaced 1 times",
            ):
                pool.result(0, SECONDS)


def test_a_worker_that_ray_cannot_place_is_named_with_what_it_needs(nodes: Nodes) -> None:
    with pool_of(make_echo, ray_options={"resources": {"tape": 1}}) as pool:
        pool.submit(0, pickle_task(int))
        with pytest.raises(
            meshfeed.StalledError, match=r"Ray has not started it. It needs .*'tape': 1.*; free in .*CPU"
        ):
            pool.result(0, 1)


def test_a_value_that_ray_refuses_is_a_settings_error(nodes: Nodes) -> None:
    with pytest.raises(meshfeed.SettingsError, match=r"num_workers.ray_options=\{'num_cpus': -1\}.*actor.options"):
        with pool_of(make_echo, ray_options={"num_cpus": -1}):
            pass


def test_another_version_of_meshfeed_is_refused(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshfeed._src.reading import ray_workers

    monkeypatch.setattr(ray_workers, "_version", lambda: "9.9")
    with pool_of(make_echo) as pool:
        pool.submit(0, pickle_task(int))
        with pytest.raises(
            meshfeed.SettingsError, match=r"has meshfeed [\d.]+, this host 9.9. Install the same version"
        ):
            pool.result(0, SECONDS)


def test_closed_and_forgotten_pools_end_their_actors(nodes: Nodes) -> None:
    def running(pid: int) -> bool:
        return pathlib.Path(f"/proc/{pid}").exists()

    with pool_of(make_echo) as pool:
        pids = [call(pool, os.getpid)]
        pool.submit(0, pickle_task(lambda: time.sleep(600)))
    pool.close()
    for use in (lambda: pool.submit(0, 1), lambda: pool.result(0, 1)):
        with pytest.raises(meshfeed.MeshfeedError, match="closed"):
            use()
    forgotten = open_pool(workers(1), pickle_task(make_echo), name="feed-test", describe=repr)
    pids.append(call(forgotten, os.getpid))
    del forgotten
    gc.collect()
    deadline = time.monotonic() + SECONDS
    while any(map(running, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(running, pids))


def test_a_task_with_a_state_is_resumed_on_another_actor(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    def make_task() -> Any:
        total = [0]

        def task(request: Any) -> Any:
            if isinstance(request, tuple):
                total[0] = request[0]
                return None
            if request == "pid":
                return total[0], os.getpid()
            total[0] += request
            return total[0], None

        return task

    def resume(request: Any, answer: Any) -> Any:
        return request if answer is None else (answer[0],)

    with pool_of(make_task, resume=resume) as pool:
        for request in ((100,), 1, 2, "pid", 4, 8):
            pool.submit(0, request)
        assert [pool.result(0, SECONDS) for _ in range(3)] == [None, (101, None), (103, None)]
        total, pid = pool.result(0, SECONDS)
        os.kill(pid, signal.SIGKILL)  # with two answers that were not collected, and perhaps lost
        pool.submit(0, 16)
        pool.submit(0, "pid")
        assert [pool.result(0, SECONDS)[0] for _ in range(3)] == [total + 4, total + 12, total + 28]
        assert pool.result(0, SECONDS)[1] != pid
    assert "A new actor takes over (replacement 1 of 5 in a row)" in caplog.text


# ---------------------------------------------------------------------- feeds


class Slow:
    """Records that draw from the generator of their place in the stream, and say where they were read."""

    def __init__(self, num_records: int, seconds: float) -> None:
        self.num_records, self.seconds = num_records, seconds

    def __len__(self) -> int:
        return self.num_records

    def __getitem__(self, record_id: int) -> bytes:
        time.sleep(self.seconds)
        return record_id.to_bytes(8, "little")

    def fingerprint(self) -> str:
        return "slow"


def decode(record: bytes, rng: np.random.Generator) -> dict[str, Any]:
    record_id = int.from_bytes(record, "little")
    if record_id == 17:
        raise ValueError("bad record")
    return {"id": np.int32(record_id), "noise": rng.random(4, np.float32)}


class Counting:
    """A lane iterator with a state."""

    def __init__(self, lane_index: int, num_lanes: int, seconds: float) -> None:
        self.next, self.step, self.seconds = lane_index, num_lanes, seconds

    def __iter__(self) -> Counting:
        return self

    def __next__(self) -> dict[str, Any]:
        if self.next >= 400:
            raise StopIteration
        time.sleep(self.seconds)
        self.next += self.step
        return {"id": np.int32(self.next - self.step)}

    def get_state(self) -> int:
        return self.next

    def set_state(self, state: int) -> None:
        self.next = state


def random_access(seconds: float = 0.0) -> tuple[Any, dict[str, Any]]:
    source = meshfeed.sources.Map(Slow(200, seconds), decode)
    return source, {"shuffle": True, "num_epochs": 2, "bad_records": meshfeed.SkipBad(0.1)}


def lanes(seconds: float = 0.0) -> tuple[Any, dict[str, Any]]:
    source = meshfeed.sources.Stream(lambda lane_index, num_lanes: Counting(lane_index, num_lanes, seconds))
    return source, {"num_lanes": 4, "num_epochs": 2}


def lanes_without_state(seconds: float = 0.0) -> tuple[Any, dict[str, Any]]:
    def open_lane(lane_index: int, num_lanes: int, epoch: int) -> Iterator[Any]:
        for number in range(lane_index, 300, num_lanes):
            time.sleep(seconds)
            yield {"id": np.int32(1000 * epoch + number)}

    return meshfeed.sources.Stream(open_lane), {"num_lanes": 2, "num_epochs": 2}


def batches_of(feed: Any) -> list[dict[str, bytes]]:
    return [{name: np.asarray(leaf).tobytes() for name, leaf in batch.items()} for batch in feed]


def feed_of(make: Any, seconds: float = 0.0, **settings: Any) -> Any:
    source, keywords = make(seconds)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return meshfeed.Feed(source, mesh, global_batch_size=8, **keywords, **settings)


@pytest.mark.parametrize(("make", "kills"), [(random_access, (10, 30)), (lanes, (20,))])
def test_the_stream_is_that_of_no_workers_while_nodes_are_killed(
    make: Any, kills: tuple[int, ...], nodes: Nodes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshfeed._src.reading import ray_workers

    pools = []

    class Recorded(ray_workers.RayPool):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            pools.append(self)

    monkeypatch.setattr(ray_workers, "RayPool", Recorded)
    with feed_of(make) as feed:
        want = batches_of(feed)
        skipped = feed.stats().skipped_records
    assert len(want) >= 50
    with feed_of(make, 0.004, num_workers=workers(2)) as feed, caplog.at_level(logging.WARNING):
        got = []
        for batch in feed:
            got.append({name: np.asarray(leaf).tobytes() for name, leaf in batch.items()})
            if len(got) in kills:
                nodes.kill(pools[-1]._workers[0]._place.node_id)
                nodes.add()
        assert got == want
        assert feed.stats().skipped_records == skipped
        assert caplog.text.count("worker 0 of 2 of the feed") >= len(kills)
        assert "was lost while" in caplog.text
    pools.clear()


def test_a_state_goes_from_one_engine_to_the_other(nodes: Nodes) -> None:
    with feed_of(lanes_without_state) as feed:
        want = batches_of(feed)
    with feed_of(lanes_without_state, num_workers=workers(1)) as feed:
        got = [next(feed) for _ in range(7)]
        assert [{name: np.asarray(leaf).tobytes() for name, leaf in batch.items()} for batch in got] == want[:7]
        state = feed.get_state()
        assert feed.config()["num_workers"] == 1
    with feed_of(lanes_without_state) as feed:
        feed.set_state(state)
        assert batches_of(feed) == want[7:]


def test_a_program_that_closes_nothing_ends(nodes: Nodes, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train.py"  # as a plain script: functions defined in it, no guard around its main part
    script.write_text(
        "import time\n"
        "import jax, numpy as np, ray, meshfeed\n"
        "def slow(record):\n"
        "    time.sleep(0.3)\n"
        "    return record\n"
        "mesh = jax.make_mesh((8,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))\n"
        "source = meshfeed.sources.Map({'x': np.arange(800)}, slow)\n"
        "feed = meshfeed.Feed(source, mesh, global_batch_size=8, num_workers=meshfeed.Workers(1, engine='ray'))\n"
        "print(np.asarray(next(feed)['x']).tolist(), flush=True)\n"
    )
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=SECONDS)
    assert (run.returncode, run.stdout) == (0, "[0, 1, 2, 3, 4, 5, 6, 7]\n"), run.stderr
    assert "Started a local Ray instance" not in run.stderr
    assert "Traceback" not in run.stderr


# ---------------------------------------------------------------------- settings


def test_settings_are_checked_and_travel() -> None:
    given = workers(3, gc_every=7, ray_options={"num_cpus": 2, "resources": {"ssd": 1}})
    for copy in (pickle.loads(pickle.dumps(given)), at_most(given, 5)):
        assert (copy, copy.engine, copy.gc_every, copy.ray_options) == (3, "ray", 7, given.ray_options)
    assert at_most(given, 2) == 2
    assert repr(given) == "Workers(3, engine='ray', gc_every=7, ray_options={'num_cpus': 2, 'resources': {'ssd': 1}})"
    assert Workers(2).engine == "process"
    refused = [
        ({"engine": "dask"}, r"num_workers.engine='dask'; it takes 'process' or 'ray'"),
        ({"engine": None}, r"num_workers.engine=None"),
        ({"engine": "ray", "ray_options": {"max_restarts": 3}}, r"ray_options=.*it takes a dict with some of the keys"),
        ({"engine": "ray", "ray_options": 3}, "ray_options=3"),
        ({"ray_options": {"num_cpus": 1}}, "they need engine='ray'"),
    ]
    for keywords, message in refused:
        with pytest.raises(meshfeed.SettingsError, match=message):
            Workers(2, **keywords)


def test_without_ray_or_a_cluster_the_error_says_what_to_do(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\n"
        "import meshfeed\n"
        "from meshfeed._src.reading.workers import open_pool, pickle_task\n"
        "def refusal():\n"
        "    try:\n"
        "        open_pool(meshfeed.Workers(1, engine='ray'), pickle_task(lambda: abs), name='feed', describe=repr)\n"
        "    except meshfeed.SettingsError as error:\n"
        "        return str(error)\n"
        "sys.modules['ray'] = None\n"
        "print(refusal())\n"
        "del sys.modules['ray']\n"
        "from meshfeed._src.reading import ray_workers\n"
        "ray_workers._CONNECT_SECONDS = 2.0\n"
        "print(refusal())\n"
    )
    environment = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1"}
    out = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    absent, unreachable = out.stdout.splitlines()
    assert "num_workers=Workers(engine='ray') needs ray" in absent
    assert "Run pip install '.[ray]' in a checkout." in absent
    assert "RAY_ADDRESS=127.0.0.1:1: no answer within 2 s. Start one with `ray start --head`" in unreachable
