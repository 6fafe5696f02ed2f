"""What the hosts of tests/multihost/test_maxtext.py and test_remote.py run."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshfeed
from meshfeed import maxtext
from meshfeed._src.base import coordination, jax_internals
from meshfeed._src.remote.served_store import CALLS, StoreClient

HOST_ROWS = 8


def mesh() -> jax.sharding.Mesh:
    """All devices of the job, in an order of which the rows of a host are no single block."""
    devices = np.array(jax.devices()).reshape(-1, 2)
    return jax.sharding.Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))


def batches(count: int, host: int, rows: int = HOST_ROWS) -> list[dict[str, np.ndarray]]:
    """Rows that tell host, batch and row: 10,000 * (host + 1) + 100 * batch + row."""
    base = 10_000 * (host + 1) + np.arange(rows)
    return [
        {"x": (base + 100 * number).astype(np.int32), "y": np.ones((rows, 3), np.float32)} for number in range(count)
    ]


def local_rows(batch: Any, name: str = "x") -> list[int]:
    """The rows on this host's devices, in row order."""
    shards = sorted(batch[name].addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return np.concatenate([np.asarray(shard.data) for shard in shards]).tolist()


def uneven(counts: list[int], padding: bool, steps: int) -> dict[str, Any]:
    """Hosts with unlike numbers of batches and a collective a step; what this host saw at each step."""
    host = jax.process_index()
    loader = maxtext.MultiHostDataLoadIterator(batches(counts[host], host), mesh(), padding)
    total = jax.jit(lambda x: x.sum())
    seen, sums, error = [], [], None
    try:
        for _ in range(steps):
            batch = next(loader)
            seen.append(local_rows(batch))
            sums.append(int(total(batch["x"])))
            assert batch["x"].shape == (HOST_ROWS * jax.process_count(),)
    except StopIteration:
        error = "StopIteration"
    except ValueError as failure:
        error = f"ValueError: {failure}"
    loader.close()
    return {"seen": seen, "sums": sums, "error": error}


def padded(counts: list[int], steps: int, last_rows: int = HOST_ROWS) -> dict[str, Any]:
    """Every step with padding as this host sees it, then ``iter()`` and the first two steps again.

    ``last_rows``: of the last of all batches.
    """
    host = jax.process_index()
    made = batches(counts[host], host)
    if counts[host] == max(counts):
        made[-1] = {key: leaf[:last_rows] for key, leaf in made[-1].items()}
    loader = maxtext.MultiHostDataLoadIterator(made, mesh(), True)
    seen = [_look(loader) for _ in range(steps)]
    before = loader.position
    again = iter(loader)
    fresh = (again.out_of_data, again.last_local_data)
    again = [_look(loader)["rows"] for _ in range(2)]
    loader.close()
    return {"seen": seen, "position": before, "fresh": fresh, "again": again}


def _look(loader: Any) -> dict[str, Any]:
    batch = next(loader)
    total = int(jax.jit(lambda x: x.sum())(batch["x"]))  # of all hosts: each of them runs it, or all would hang
    return {
        "rows": local_rows(batch),
        "sum": total,
        "out": loader.out_of_data,
        "last": np.asarray((loader.last_local_data or {"x": ()})["x"]).tolist(),
        "shapes": (batch["x"].shape, batch["y"].shape, str(batch["y"].dtype)),
    }


def padded_from_states(counts: list[int], at: int, steps: int) -> dict[str, Any]:
    """Rows after ``at`` steps: of the loader itself, and of fresh ones that get either kind of state, one after another."""
    host = jax.process_index()

    def make() -> Any:
        return maxtext.MultiHostDataLoadIterator(Loader(batches(counts[host], host)), mesh(), True)

    loader = make()
    for _ in range(at):
        next(loader)
    local_state, state = loader.local_iterator.get_state(), loader.get_state()
    found = {"rest": [_look(loader)["rows"] for _ in range(steps)]}
    loader.local_iterator.set_state(local_state)
    found["same"] = [_look(loader)["rows"] for _ in range(steps)]
    loader.close()
    loader = make()
    loader.local_iterator.set_state(local_state)
    found["local"] = [_look(loader)["rows"] for _ in range(steps)]
    loader.close()
    found["own"] = []
    for _ in range(steps):  # a state of a resumed loader is as good as the first one
        loader = make()
        loader.set_state(state)
        found["own"].append(_look(loader)["rows"])
        state = loader.get_state()
        found["position"] = loader.position
        loader.close()
    return found


def padded_factors() -> list[dict[str, Any]]:
    """Two hosts load: by joining two batches, and by taking two loaders in turns. The others have MaxText's placeholders,
    which are made without padding and never end.
    """
    host = jax.process_index()
    half = batches(7, 0, rows=HOST_ROWS // 2)
    nothing = {"x": np.full(HOST_ROWS, -1, np.int32), "y": np.zeros((HOST_ROWS, 3), np.float32)}
    loaders: list[tuple[Any, float]] = [
        (half, 2),
        ([batches(2, 1), batches(2, 1)], 0.5),
        (itertools.repeat(nothing), -1),
        (itertools.repeat(nothing), -1),
    ]
    loader = maxtext.MultiHostDataLoadIterator(loaders[host][0], mesh(), host < 2, loaders[host][1])
    seen = [_look(loader) for _ in range(7)]
    loader.close()
    return seen


def padding_on_one_host(counts: list[int]) -> list[list[int]]:
    """Only host 0 pads; up to 7 steps without a collective, which a host that has stopped would not enter."""
    host = jax.process_index()
    loader = maxtext.MultiHostDataLoadIterator(batches(counts[host], host), mesh(), host == 0)
    seen = [local_rows(batch) for batch in itertools.islice(loader, 7)]
    loader.close()
    return seen


def reset_on_all() -> list[list[int]]:
    """One host's loader starts again, the other's is read once (as MaxText's placeholder); each reset on both."""
    host = jax.process_index()
    made = batches(4, host)
    loader = maxtext.MultiHostDataLoadIterator(made if host == 0 else iter(made), mesh())
    seen = [local_rows(next(loader)) for _ in range(2)]
    loader = iter(loader)
    seen += [local_rows(next(loader)) for _ in range(2)]
    loader.close()
    return seen


def factors(first: float, second: float) -> list[list[int]]:
    """Hosts with unlike factors: rows of each loading batch are such that the hosts' batches are alike."""
    host = jax.process_index()
    factor = [first, second][host]
    made = batches(6, host, rows=int(HOST_ROWS // max(1, factor)))
    loader = maxtext.MultiHostDataLoadIterator(made, mesh(), False, factor)
    seen = [local_rows(batch) for batch in loader]
    loader.close()
    return seen


def placeholders() -> dict[str, Any]:
    """One host loads for all; the other gives placeholder rows, which stand where its rows are."""
    host = jax.process_index()
    real = batches(3, 0, rows=HOST_ROWS // 2)
    made = (
        real if host == 0 else [{"x": np.full(HOST_ROWS, -1, np.int32), "y": np.zeros((HOST_ROWS, 3), np.float32)}] * 9
    )
    loader = maxtext.MultiHostDataLoadIterator(made, mesh(), False, 2 if host == 0 else -1)
    batch = next(loader)
    # what MaxText's step does: rows past the ones to train on are dropped
    kept = jax.jit(lambda x: x[:HOST_ROWS], out_shardings=NamedSharding(mesh(), P()))(batch["x"])
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh(), P()))(batch["x"])
    loader.close()
    return {"kept": np.asarray(kept).tolist(), "whole": np.asarray(whole).tolist()}


def failing(kind: str) -> dict[str, Any]:
    """One host's loader fails; what each host is told, and how soon."""
    host = jax.process_index()

    def read() -> Any:
        made = batches(9, host)
        for number, batch in enumerate(made):
            if host == 1 and number == 3:
                if kind == "raises":
                    raise RuntimeError("bucket is gone")
                batch = {key: leaf[: HOST_ROWS - 3] for key, leaf in batch.items()}
                if kind == "fewer rows":
                    batch = {key: leaf[: HOST_ROWS // 2] for key, leaf in made[number].items()}
            yield batch

    loader = maxtext.MultiHostDataLoadIterator(read(), mesh())
    steps, start = 0, time.monotonic()
    try:
        for _ in range(9):
            next(loader)
            steps += 1
    except Exception as error:
        return {"steps": steps, "type": type(error).__name__, "text": str(error), "waited": time.monotonic() - start}
    finally:
        loader.close()
    return {"steps": steps, "type": None, "text": "", "waited": 0.0}


def hanging() -> dict[str, Any]:
    """The loader of host 1 hangs before batch 3; steps, error and state of this host, all before the loader goes on."""
    host = jax.process_index()
    released = threading.Event()

    def read() -> Any:
        for number, batch in enumerate(batches(9, host)):
            if (host, number) == (1, 3):
                released.wait(60)
            yield batch

    with (
        mock.patch("meshfeed._src.maxtext.loader._TIMEOUT_SECONDS", 8.0),
        mock.patch("meshfeed._src.base.read_ahead._JOIN_SECONDS", 0.1),
    ):
        loader = maxtext.MultiHostDataLoadIterator(read(), mesh())
        start = time.monotonic()
        steps, error = 0, ""
        try:
            while True:
                next(loader)
                steps += 1
        except (meshfeed.StalledError, meshfeed.PeerError) as stalled:  # this host's deadline, or the other's
            error = str(stalled)
        state = loader.local_iterator.get_state()
        loader.close()
        seconds = time.monotonic() - start
    released.set()
    return {"steps": steps, "error": error, "state": state, "seconds": seconds}


def slow_restart() -> list[list[int]]:
    """Host 1 drops batches for longer than the deadline to set its loader's state, while host 0 waits for it in next."""
    host = jax.process_index()

    class Slow:
        def __iter__(self) -> Any:
            for batch in batches(15, host):
                time.sleep(0.5 * host)
                yield batch

    with mock.patch("meshfeed._src.maxtext.loader._TIMEOUT_SECONDS", 2.0):
        loader = maxtext.MultiHostDataLoadIterator(Slow(), mesh())
    loader.local_iterator.set_state({"batches": 12})
    seen = []
    while True:
        try:
            seen.append(local_rows(next(loader)))
        except StopIteration:
            loader.close()
            return seen


def get_ds(dataloading_host_index: int, dataloading_host_count: int) -> Any:
    """The host's batches."""
    del dataloading_host_count
    return batches(6, dataloading_host_index)


class Loader:
    """Starts again, and its iterators have states."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> LoaderIterator:
        return LoaderIterator(self.dataset)


class LoaderIterator:
    """A state of its own on each host."""

    def __init__(self, made: Any) -> None:
        self.made, self.at = made, 0

    def __iter__(self) -> LoaderIterator:
        return self

    def __next__(self) -> Any:
        if self.at == len(self.made):
            raise StopIteration
        self.at += 1
        return self.made[self.at - 1]

    def get_state(self) -> dict[str, int]:
        return {"at": self.at, "host": jax.process_index()}

    def set_state(self, state: Any) -> None:
        assert state["host"] == jax.process_index()
        assert state["at"] <= len(self.made)
        self.at = state["at"]


def remote_iterator(folder: str) -> dict[str, Any]:
    """MaxText's remote iterator on every host: batches, files, end and reset."""
    rows = HOST_ROWS * jax.process_count()
    wrapper = maxtext.RemoteIteratorWrapper(get_ds, Loader, mesh(), (rows, 3), folder)
    before = [local_rows(next(wrapper)) for _ in range(2)]
    wrapper.save_state(2)
    rest = [local_rows(batch) for batch in wrapper]
    wrapper.restore_state(2)
    again = [local_rows(batch) for batch in wrapper]
    wrapper.reset()
    first = local_rows(next(wrapper))
    wrapper.close()
    return {
        "before": before,
        "rest": rest,
        "again": again,
        "first": first,
        "files": sorted(os.listdir(f"{folder}/2/iter")),
    }


def remote_ends(counts: list[int]) -> list[list[int]]:
    """A remote iterator on hosts with unlike numbers of batches, to its end and after a reset."""
    host = jax.process_index()
    dummy = jax.device_put(np.zeros(mesh().size, np.float32), NamedSharding(mesh(), P(("data", "model"))))
    remote = maxtext.RemoteIterator(lambda **_: counts[host], lambda dataset: Loader(batches(dataset, host)), None, "")
    seen = []
    for _ in range(2):
        try:
            while True:
                seen.append(local_rows(remote.get_next(dummy)))
        except StopIteration:
            remote.reset()
    remote.close()
    return seen


def make_memory() -> Any:
    """101 records that name themselves."""
    return meshfeed.sources.Memory({"x": (np.arange(101)[:, None] * 10 + np.arange(6)).astype(np.int32)})


def open_lane(lane_index: int, num_lanes: int) -> Any:
    """Records of one lane."""
    for number in range(lane_index, 101, num_lanes):
        yield {"x": (number * 10 + np.arange(6)).astype(np.int32)}


def make_stream() -> Any:
    """The same records as a stream."""
    return meshfeed.sources.Stream(open_lane)


def compare_remote(make: Any, settings: dict[str, Any], folder: str) -> dict[str, Any]:
    """Remote and local feed side by side, states and checkpoints exchanged; states as JSON text."""
    sharding = NamedSharding(mesh(), P("data"))
    with (
        meshfeed.remote.RemoteFeed(make, sharding, name="remote", **settings) as remote,
        meshfeed.MultiHostDataLoadIterator(make(), sharding, name="local", **settings) as local,
    ):
        for _ in range(3):
            here, there = next(local)["x"], next(remote)["x"]
            _same(here, there)
            assert (remote.step, remote.position) == (local.step, local.position)
            assert remote.get_state() == local.get_state()
        state = remote.get_state()
        with meshfeed.checkpoint.Checkpointer(folder) as checkpointer:
            checkpointer.save(3, {"w": np.ones(3)}, remote, force=True)
            checkpointer.wait()
            fourth = next(local)["x"]
            next(remote)
            checkpointer.restore({"w": np.ones(3)}, local)  # the remote feed's checkpoint in the local one
            _same(next(local)["x"], fourth)
            checkpointer.restore({"w": np.ones(3)}, remote)
            _same(next(remote)["x"], fourth)
        count = 4
        for here in local:
            _same(here["x"], next(remote)["x"])
            count += 1
        ended = [False, False]
        for number, feed in enumerate((local, remote)):
            try:
                next(feed)
            except StopIteration:
                ended[number] = True
        remote.reset()
        first = next(remote)["x"]
        assert first.shape[0] == settings["global_batch_size"]
    return {"count": count, "ended": ended, "state": json.dumps(state)}


def compare_remote_over_a_served_store(cases: dict[str, Any], folder: str) -> dict[str, Any]:
    """:func:`compare_remote` in processes that agree through a store that one of them serves, as if JAX had none."""
    jaxs = jax_internals.key_value_store()
    assert jaxs is not None
    with (
        mock.patch.object(jax_internals, "_own_client", return_value=None),
        mock.patch.object(StoreClient, "_call", autospec=True, side_effect=StoreClient._call) as call,
    ):
        assert CALLS["store"]() is None
        if (address := CALLS["serve"](1)) is not None:
            jaxs.set("address of the served store", address)
        CALLS["join"](jaxs.get("address of the served store", 60))
        assert CALLS["store"]() == jaxs.get("address of the served store", 60)
        assert coordination.place_in_job() == (jax.process_index(), jax.process_count())
        results = {name: compare_remote(make, settings, f"{folder}/{name}") for name, (make, settings) in cases.items()}
        served = jax_internals.key_value_store()
        assert served is not None
        return {"results": results, "calls": call.call_count, "answers": [_answers(served), _answers(jaxs)]}


def _answers(store: jax_internals.KeyValueStore) -> list[Any]:
    """What a store says to everything that it can be asked, of keys of this process."""
    base, answers = f"asked/{jax.process_index()}", []

    def note(call: Any, *args: Any, **kwargs: Any) -> None:
        try:
            answers.append(call(*args, **kwargs))
        except Exception as error:
            answers.append(str(error).partition(":")[0])

    for key in ("a", "a/b", "a/c", "ab"):
        note(store.set, f"{base}/{key}", key)
        note(store.set, f"{base}/{key}", "again")
        note(store.set, f"{base}/{key}", f'"{key}"\n\u00fc', overwrite=True)
    for key in ("a", "a/", "a/b", "none"):
        note(store.try_get, f"{base}/{key}")
        note(store.get, f"{base}/{key}", 0.01)
        note(lambda key=key: sorted(store.directory(f"{base}/{key}").items()))
    note(store.increment, f"{base}/n")
    note(store.increment, f"{base}/n")
    note(store.try_get, f"{base}/n")
    note(store.delete, f"{base}/a")
    note(store.delete, f"{base}/none")
    note(lambda: sorted(store.directory(base).items()))
    return answers


def _same(here: jax.Array, there: jax.Array) -> None:
    assert here.sharding == there.sharding
    assert here.shape == there.shape
    for ours, theirs in zip(here.addressable_shards, there.addressable_shards, strict=True):
        assert ours.index == theirs.index
        assert np.asarray(ours.data).tobytes() == np.asarray(theirs.data).tobytes()


def beside_other_devices() -> int:
    """Half of each host's devices stand for accelerators, the others for the CPUs beside them."""
    import meshfeed._src.remote.client as client

    devices = np.array(jax.devices()).reshape(jax.process_count(), 2, -1)
    auto = (AxisType.Auto, AxisType.Auto)
    near, far = (jax.sharding.Mesh(devices[:, half], ("data", "model"), axis_types=auto) for half in (0, 1))
    client.colocated_mesh, real = (lambda mesh: far), client.colocated_mesh
    sharding = {"x": NamedSharding(near, P(("model", "data")))}
    settings: dict[str, Any] = {"global_batch_size": 16, "shuffle": True}
    count = 0
    with (
        meshfeed.remote.RemoteFeed(make_memory, sharding, **settings) as remote,
        meshfeed.MultiHostDataLoadIterator(make_memory(), sharding, **settings) as local,
    ):
        for here in local:
            _same(here["x"], next(remote)["x"])
            count += 1
    client.colocated_mesh = real
    return count


def remote_not_made() -> list[Any]:
    """A source that host 1 cannot make: what each host is told, how long that takes, and what the next feed delivers."""

    def make() -> Any:
        if jax.process_index() == 1:
            raise OSError("no such disk")
        return {"x": np.arange(64)}

    start, told = time.monotonic(), "nothing"
    try:
        with meshfeed.remote.RemoteFeed(make, mesh(), global_batch_size=16, timeout_seconds=60) as feed:
            next(feed)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    with meshfeed.Feed({"y": np.arange(64)}, mesh(), global_batch_size=16, timeout_seconds=60) as after:
        return [told, seconds, after.name, sorted(set(local_rows(next(after), "y")))]


def remote_failing() -> dict[str, Any]:
    """One host's source fails under remote feeds; what each host's controller raises."""

    class Failing:
        def __len__(self) -> int:
            return 640

        def __getitem__(self, record_id: int) -> Any:
            if jax.process_index() == 1 and record_id >= 96:
                raise RuntimeError("disk on fire")
            return {"x": np.full(3, record_id, np.int32)}

        def fingerprint(self) -> str:
            return "failing"

    feed = meshfeed.remote.RemoteFeed(lambda: Failing(), mesh(), global_batch_size=32, timeout_seconds=60)
    steps = 0
    try:
        while True:
            next(feed)
            steps += 1
    except Exception as error:
        return {"steps": steps, "type": type(error).__name__, "text": str(error)}
    finally:
        feed.close()


def poisoned_placeholders() -> list[list[int]]:
    """``load=[0]`` with poison where nothing was read: none of it may reach the batch."""
    import meshfeed._src.arrays.load_once as load

    def poison(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        block = np.empty(shape, dtype)
        block.view(np.uint8)[...] = 0xAA
        return block

    load.placeholder = poison
    seen = []
    with meshfeed.MultiHostDataLoadIterator(make_memory(), mesh(), global_batch_size=40, load=[0]) as feed:
        for batch in feed:
            for shard in batch["x"].addressable_shards:
                rows = np.asarray(shard.data)
                start = shard.index[0].start or 0
                wanted = (40 * (feed.step - 1) + start + np.arange(len(rows)))[:, None] * 10 + np.arange(6)
                np.testing.assert_array_equal(rows, wanted)
            seen.append([feed.step, feed.position])
    return seen
