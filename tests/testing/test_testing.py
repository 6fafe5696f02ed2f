"""run_hosts, HostPool and start_hosts with real processes: results, errors, deadlines, kills, nothing left behind."""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from meshfeed import testing
from meshfeed._src.base import machine
from meshfeed._src.base.errors import SettingsError
from meshfeed._src.testing import hosts

_SCALE = 10


def _sum_over_hosts(x: int) -> dict[str, object]:
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    rows = np.arange(jax.device_count(), dtype=np.int32) * x
    array = jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])
    return {
        "sum": jax.jit(lambda a: a.sum())(array),
        "scaled": _helper(x),
        "host": jax.process_index(),
        "local": len(jax.local_devices()),
        "pid": os.getpid(),
    }


def _helper(x: int) -> int:
    return x * _SCALE


def _check_a_feed(load: str) -> int:
    import meshfeed

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    data = {"x": np.arange(26, dtype=np.int32).reshape(13, 2)}

    def make_feed() -> meshfeed.MultiHostDataLoadIterator:
        return meshfeed.MultiHostDataLoadIterator(
            data, mesh, global_batch_size=4, shuffle=True, num_epochs=2, end="pad", mask_key="real", load=load
        )

    return testing.check_resumable(make_feed, save_points=[3])


def _fail_on(host: int) -> int:
    print(f"here is host {jax.process_index()}")
    if jax.process_index() == host:
        raise ValueError(f"broken on purpose on {host}")
    return jax.process_index()


def _die_on(host: int) -> None:
    if jax.process_index() == host:
        os.kill(os.getpid(), signal.SIGKILL)


def _sleep_on(host: int) -> int:
    if jax.process_index() == host:
        time.sleep(600)
    return jax.process_index()


def _gone(pid: int) -> bool:
    """Whether a process has ended (a zombie that nobody reaps has)."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def _slowly(value: str, seconds: float) -> str:
    time.sleep(seconds)
    return value


@pytest.fixture(scope="module")
def pool() -> Iterator[testing.HostPool]:
    with testing.HostPool(2, 2, timeout_seconds=60) as pool:
        yield pool


@pytest.mark.multihost
def test_one_job_runs_many_functions_in_the_same_processes(pool: testing.HostPool) -> None:
    first, second = pool.run(_sum_over_hosts, 3), pool.run(_sum_over_hosts, 5)
    assert [r.value["sum"] for r in first] == [18, 18]
    assert [r.value["scaled"] for r in second] == [50, 50]
    assert [r.value["host"] for r in second] == [0, 1]
    assert {r.value["local"] for r in second} == {2}
    assert [r.value["pid"] for r in first] == [r.value["pid"] for r in second] == pool.pids
    assert isinstance(first[0].value["sum"], np.ndarray)


@pytest.mark.multihost
def test_closures_lambdas_partials_and_names_travel(pool: testing.HostPool) -> None:
    factor = 7
    assert [r.value for r in pool.run(lambda x: x * factor, 6)] == [42, 42]
    assert [r.value for r in pool.run(functools.partial(_helper, 2))] == [20, 20]
    assert [r.value for r in pool.run("os:getpid")] == pool.pids


@pytest.mark.multihost
@pytest.mark.parametrize("load", ["sharded", "once"])
def test_check_resumable_of_a_feed_on_several_hosts(pool: testing.HostPool, load: str) -> None:
    assert [r.value for r in pool.run(_check_a_feed, load)] == [3, 3]


@pytest.mark.multihost
def test_an_exception_comes_back_with_its_traceback_and_log(pool: testing.HostPool) -> None:
    ok, bad = pool.run(_fail_on, 1, check=False)
    assert (ok.value, ok.error) == (0, None)
    assert isinstance(bad.error, ValueError)
    assert str(bad.error) == "broken on purpose on 1"
    assert "here is host 1" in bad.log
    assert "_fail_on" in bad.traceback
    pids = pool.pids
    assert [r.value["pid"] for r in pool.run(_sum_over_hosts, 1)] == pids  # expected failures cost no restart

    with pytest.raises(testing.HostRunError, match="1 of 2 hosts failed") as raised:
        pool.run(_fail_on, 0)
    assert "broken on purpose on 0" in str(raised.value)
    assert "here is host 0" in str(raised.value)
    assert [r.value for r in raised.value.results] == [None, 1]
    assert isinstance(raised.value.__cause__, ValueError)
    fresh = [r.value["pid"] for r in pool.run(_sum_over_hosts, 1)]
    assert not set(fresh) & set(pids)
    assert all(_gone(pid) for pid in pids)


@pytest.mark.multihost
def test_results_are_those_of_the_last_function(pool: testing.HostPool) -> None:
    pool.start(functools.partial(_slowly, "first", 0.2))  # no one waits for it
    pool.start(functools.partial(_slowly, "second", 1.0))
    assert [r.value for r in pool.wait()] == ["second", "second"]
    assert [r.value for r in pool.run(_helper, 4)] == [40, 40]


class _Unpicklable:
    def __reduce__(self) -> tuple[type, tuple[str]]:
        return int, ("x",)


@pytest.mark.multihost
def test_a_value_that_cannot_be_unpickled_is_an_error_of_its_host(pool: testing.HostPool) -> None:
    with pytest.raises(testing.HostRunError, match="the value of host 1 cannot be unpickled here: ValueError: invalid"):
        pool.run(_Unpicklable)
    assert [r.value for r in pool.run(_helper, 4)] == [40, 40]


@pytest.mark.multihost
def test_a_late_host_is_named_its_stack_shown_and_killed(pool: testing.HostPool) -> None:
    pool.run(_helper, 1)
    pids = pool.pids
    quick, late = pool.run(_sleep_on, 1, timeout_seconds=1.5, check=False)
    assert quick.value == 0
    assert isinstance(late.error, TimeoutError)
    assert "host 1 had no result after" in str(late.error)
    assert "_sleep_on" in late.log  # faulthandler's stack
    assert _gone(pids[1])


@pytest.mark.multihost
def test_a_killed_host_is_seen_and_the_next_run_starts_afresh(pool: testing.HostPool) -> None:
    pool.run(_helper, 1)
    ok, dead = pool.run(_die_on, 1, check=False)
    assert ok.error is None
    assert isinstance(dead.error, ChildProcessError)
    assert "SIGKILL" in str(dead.error)
    assert dead.returncode == -signal.SIGKILL
    assert [r.value for r in pool.run(_helper, 4)] == [40, 40]


@pytest.mark.multihost
def test_start_hosts_gives_a_handle_to_kill_with_and_closes_clean() -> None:
    with testing.start_hosts(_sleep_on, 0, num_hosts=2, devices_per_host=1, recoverability=True) as job:
        pids = job.pids
        end = time.monotonic() + 30
        while job.poll()[1] is None and time.monotonic() < end:
            time.sleep(0.05)
        waiting, done = job.poll()
        assert waiting is None
        assert done is not None
        assert done.value == 1
        job.kill(0)
        results = job.wait(timeout_seconds=20, check=False)
        assert results[0].returncode == -signal.SIGKILL
        assert results[1].value == 1
    assert all(_gone(pid) for pid in pids)


@pytest.mark.multihost
def test_a_host_that_does_not_start_in_time_is_an_error() -> None:
    with (
        testing.HostPool(1, 1, start_timeout_seconds=0.05) as pool,
        pytest.raises(testing.HostRunError, match=r"host 0: TimeoutError: host 0 had no result after 0 s") as raised,
    ):
        pool.start(_helper, 1)
    (result,) = raised.value.results
    assert result.returncode == -signal.SIGKILL


@pytest.mark.multihost
def test_hosts_die_with_their_parent() -> None:
    script = (
        "import os, signal, time\n"
        "from meshfeed import testing\n"
        "job = testing.start_hosts('time:sleep', 600, num_hosts=2, devices_per_host=1)\n"
        "print(*job.pids, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    pids = [int(pid) for pid in ended.stdout.split()]
    assert len(pids) == 2, ended.stderr
    end = time.monotonic() + 10
    while not all(_gone(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert all(_gone(pid) for pid in pids)


@pytest.mark.multihost
def test_a_port_that_another_process_took_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        ports = [other.getsockname()[1], hosts.free_port()]
        monkeypatch.setattr(hosts, "free_port", lambda: ports.pop(0))
        assert [r.value for r in testing.run_hosts(_helper, 4, num_hosts=1, devices_per_host=1)] == [40]
    assert ports == []


_NEVER_WAITS = """
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
everywhere = NamedSharding(mesh, PartitionSpec())
step = jax.jit(lambda state, x: state + (x * state).sum() * 1e-9, out_shardings=everywhere)
state = jax.device_put(np.float32(1), everywhere)
x = jax.device_put(np.ones((64, 1_000), np.float32), NamedSharding(mesh, PartitionSpec("data")))
for _ in range(4_000):
    state = step(state, x)
print(float(state) > 1)
"""


@pytest.mark.multihost
def test_a_loop_that_never_waits_for_a_result_does_not_abort() -> None:
    """It does after 40 s if XLA's pool has one thread per device, as it has by default on few CPUs."""
    env = {**os.environ, **hosts.cpu_environment(8)}
    ended = subprocess.run([sys.executable, "-c", _NEVER_WAITS], env=env, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr


@pytest.mark.parametrize(("given", "expected"), [("", 16), ("3", 16), ("40", 40), ("many", 16)])
def test_cpu_devices_have_two_threads_each(given: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC", given)
    monkeypatch.setattr(machine, "available_cpus", lambda: 4)
    assert hosts.cpu_environment(8)["NPROC"] == str(expected)


def test_other_flags_of_xla_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2 --xla_cpu_max_isa=AVX2")
    assert hosts.cpu_environment(8)["XLA_FLAGS"] == "--xla_cpu_max_isa=AVX2 --xla_force_host_platform_device_count=8"


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(SettingsError, match="num_hosts=0; it takes a positive int"):
        testing.HostPool(0)
    with pytest.raises(SettingsError, match="devices_per_host=True"):
        testing.HostPool(1, True)


def test_arguments_in_another_order_start_no_process() -> None:
    with pytest.raises(SettingsError, match=r"function=3; it takes a callable.* number of hosts is num_hosts="):
        testing.run_hosts(3, print)  # type: ignore[arg-type]
