"""What the hosts of tests/multihost/test_feed.py run: feeds over many layouts, checked shard by shard."""

from __future__ import annotations

import contextlib
import json
import logging
import pathlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "feed"))
from forced_numbers import ForcedNumbers

import meshfeed
from meshfeed._src.agreement import windows
from meshfeed._src.base import coordination
from meshfeed._src.feed import pipeline
from meshfeed._src.feed.sizing import Numbers

TIMEOUT_SECONDS = 60
RECORDS, WIDTH = 101, 24


def data() -> dict[str, np.ndarray]:
    """Rows that name themselves; float bits include NaN payloads."""
    ids = np.arange(RECORDS)
    tokens = (ids[:, None] * 1000 + np.arange(WIDTH)[None, :]).astype(np.int32)
    bits = (np.uint32(0x7F800001) + ids[:, None].astype(np.uint32) * np.uint32(7)).astype(np.uint32)
    return {"tokens": tokens, "weird": np.broadcast_to(bits, (RECORDS, 4)).copy().view(np.float32), "id": ids}


def mesh_of(kind: str) -> jax.sharding.Mesh:
    """A mesh over all devices of the job."""
    devices = np.array(jax.devices())
    count = devices.size
    auto = (AxisType.Auto, AxisType.Auto)
    if kind == "rows":
        return jax.sharding.Mesh(devices.reshape(count, 1), ("data", "model"), axis_types=auto)
    if kind == "model":  # the model axis spans hosts wherever a host has fewer than count // 2 devices
        return jax.sharding.Mesh(devices.reshape(2, count // 2), ("data", "model"), axis_types=auto)
    if kind == "model-first":  # neighbouring rows on different hosts
        return jax.sharding.Mesh(devices.reshape(2, count // 2).T, ("data", "model"), axis_types=auto)
    if kind == "permuted":
        order = np.random.default_rng(3).permutation(count)
        return jax.sharding.Mesh(devices[order].reshape(count // 2, 2), ("data", "model"), axis_types=auto)
    raise ValueError(kind)


def sharding_of(kind: str) -> Any:
    """A sharding by name."""
    if kind == "sequence":
        mesh = mesh_of("model")
        return {
            "tokens": NamedSharding(mesh, P("data", "model")),
            "weird": NamedSharding(mesh, P("data")),
            "id": NamedSharding(mesh, P()),
        }
    if kind == "mesh":
        return mesh_of("rows")
    return NamedSharding(mesh_of(kind), P("data"))


def check(batch: Any, ids: np.ndarray) -> None:
    """Every shard here holds the bits that a batch of the records ``ids`` has there."""
    rows = data()
    for name, leaf in batch.items():
        wanted = rows[name][ids]
        wanted = wanted.astype(leaf.dtype) if name == "id" else wanted
        assert leaf.shape == wanted.shape, (name, leaf.shape, wanted.shape)
        for shard in leaf.addressable_shards:
            assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(wanted[shard.index]).tobytes(), name


def run_variants(variants: list[dict[str, Any]], expected: list[list[int]]) -> int:
    """Runs a feed for each variant and compares all of its batches; the number of batches seen."""
    seen = 0
    for variant in variants:
        options = dict(variant)
        sharding = sharding_of(options.pop("layout"))
        source = meshfeed.sources.Memory(data())
        with meshfeed.MultiHostDataLoadIterator(source, sharding, timeout_seconds=TIMEOUT_SECONDS, **options) as feed:
            if options.get("num_threads") == "auto":
                host = jax.process_index()  # hosts change their numbers at different steps
                ForcedNumbers(feed, [Numbers(0, 1 + (n + host) % 4, 1 + (n * host) % 5) for n in range(7)])
            assert len(feed) == len(expected), variant
            for step, batch in enumerate(feed):
                assert feed.record_ids(step).tolist() == expected[step], (variant, step)
                check(batch, np.array(expected[step]))
                seen += 1
            assert feed.step == len(expected), (variant, feed.step)
    return seen


def run_some(options: dict[str, Any], layout: str, state: Any, steps: int, expected: list[list[int]]) -> str:
    """Continues from ``state`` for ``steps`` batches and gives the state then, as JSON text."""
    source = meshfeed.sources.Memory(data())
    with meshfeed.MultiHostDataLoadIterator(
        source, sharding_of(layout), timeout_seconds=TIMEOUT_SECONDS, **options
    ) as feed:
        if state is not None:
            feed.set_state(json.loads(state))
        first = feed.step
        for offset in range(steps):
            batch = next(feed)
            check(batch, np.array(expected[first + offset]))
        text = json.dumps(feed.get_state())
        assert len(text) <= 2048, len(text)
        return text


def failing(bad_host: int, bad_step: int, where: str) -> dict[str, Any]:
    """Trains with a collective a step while one host's read fails; what each host saw."""
    mesh = mesh_of("rows")
    size = 2 * jax.device_count()

    class Source(meshfeed.sources.Memory):
        reads = 0

        def read_batch(self, record_ids: Any, columns: Any = None) -> Any:
            batch = super().read_batch(record_ids, columns=columns)
            if len(record_ids) > 1 and jax.process_index() == bad_host:
                if Source.reads == bad_step:
                    raise RuntimeError("disk on fire")
                Source.reads += 1
            return batch

    def open_lane(lane_index: int, num_lanes: int) -> Any:
        for number in range(1000):
            if jax.process_index() == bad_host and number == bad_step:
                raise RuntimeError("disk on fire")
            yield {"x": np.full(3, number, np.float32)}

    rows = {"x": np.ones((size * 40, 3), np.float32)}
    host_rows = size // jax.process_count()
    source: Any = {
        "random": lambda: Source(rows),
        "stream": lambda: meshfeed.sources.Stream(open_lane),
        "batches": lambda: (
            {"x": np.ones((host_rows, 3), np.float32)} if n != bad_step or jax.process_index() != bad_host else 1 / 0
            for n in range(40)
        ),
    }[where]()
    options: dict[str, Any] = {"num_lanes": size} if where == "stream" else {}
    total = jax.jit(lambda x: x.sum())
    feed = meshfeed.MultiHostDataLoadIterator(
        source, NamedSharding(mesh, P("data")), global_batch_size=size, timeout_seconds=TIMEOUT_SECONDS, **options
    )
    steps, start = 0, time.monotonic()
    try:
        for batch in feed:
            float(total(batch["x"]))
            steps += 1
            start = time.monotonic()
    except Exception as error:
        waited = time.monotonic() - start
        again = None
        try:
            next(feed)
        except Exception as second:
            again = type(second).__name__
        feed.close()
        return {"steps": steps, "type": type(error).__name__, "text": str(error), "waited": waited, "again": again}
    return {"steps": steps, "type": None, "text": "", "waited": 0.0, "again": None}


def differing(field: str) -> str:
    """Hosts built with one setting that differs; the error's type and text."""
    options: dict[str, Any] = {"global_batch_size": 2 * jax.device_count(), "timeout_seconds": 30}
    rows = data()
    here = jax.process_index()
    if field == "source.records":
        rows = {key: value[: RECORDS - here] for key, value in rows.items()}
    elif field == "source.content":
        rows["tokens"] = rows["tokens"] + here
    elif field in ("position", "jax_enable_x64"):
        pass
    elif field == "bad_records":
        options["bad_records"] = meshfeed.SkipBad(0.1) if here else None
    else:
        options[field] = {"seed": here, "shuffle": [False, 4][here > 0], "end": ["drop", "pad"][here > 0]}[field]
    with jax.enable_x64(bool(field == "jax_enable_x64" and here)):
        feed = meshfeed.MultiHostDataLoadIterator(meshfeed.sources.Memory(rows), mesh_of("rows"), **options)
    if field == "position" and here:
        state = feed.get_state()
        state["position"], state["segments"] = options["global_batch_size"], [[0, 0, options["global_batch_size"]]]
        feed.set_state(state)
    try:
        next(feed)
    except meshfeed.MeshfeedError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        feed.close()
    return "no error"


def early_source(when: str, fails: Callable[[], bool]) -> Any:
    """A source that cannot be opened, or set to a state, while it ``fails``."""

    class Lane:
        at = 0

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            self.at += 1
            return {"x": np.float32(self.at)}

        def get_state(self) -> int:
            return self.at

        def set_state(self, state: int) -> None:
            if fails():
                raise SystemExit("no access to the shard")
            self.at = state

    def open_lane(lane_index: int, num_lanes: int) -> Any:
        if when.startswith("open") and fails():
            raise (SystemExit if when == "open exits" else PermissionError)("no access to the shard")
        return Lane()

    records = when not in ("open", "open exits", "state exits")
    return meshfeed.sources.Memory(data()) if records else meshfeed.sources.Stream(open_lane)


def fails_early(when: str, bad_host: int) -> dict[str, Any]:
    """One host cannot make its feed, open its data, or take its state; then all begin again, in the same processes."""
    bad = jax.process_index() == bad_host
    size = 2 * jax.device_count()
    start = time.monotonic()
    feed = None
    broken = [True]

    source: Any = early_source(when, lambda: bad and broken[0])
    seen: dict[str, Any] = {"type": None, "text": "", "waited": 0.0, "again": None}
    try:
        if when == "construct" and bad:
            source = []
        if when == "layout" and bad:
            size += 1
        prefetch = -1 if when == "settings" and bad else 2
        feed = meshfeed.MultiHostDataLoadIterator(
            source, mesh_of("rows"), global_batch_size=size, prefetch=prefetch, timeout_seconds=TIMEOUT_SECONDS
        )
        if when.startswith("state"):
            next(feed)
            state = feed.get_state()
            feed.set_state({**state, "position": 3} if bad and when == "state" else state)
        next(feed)
    except BaseException as error:
        seen.update(type=type(error).__name__, text=str(error), waited=time.monotonic() - start)
    if when.startswith(("open", "state")) and feed is not None:
        broken[0] = False
        # A host that was refused a state could come at any moment.
        time.sleep(9.0 if bad and when.startswith("state") else 0.0)
        feed.reset()
        next(feed)
        seen["again"] = feed.step
    if feed is not None:
        feed.close()
    return seen


def leaves(how: str, leavers: list[int], step: int) -> dict[str, Any]:
    """Some hosts leave their feed at a step, and the others go on; where all leave, they begin again."""
    seen: dict[str, Any] = {"steps": 0, "type": None, "text": "", "host": None, "waited": 0.0, "again": None, "log": []}
    heard = logging.Handler(logging.WARNING)
    heard.emit = lambda record: seen["log"].append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("meshfeed").addHandler(heard)
    leaver = jax.process_index() in leavers
    options: dict[str, Any] = {
        "global_batch_size": jax.device_count(),
        "num_epochs": None,
        "timeout_seconds": TIMEOUT_SECONDS,
    }

    def make_feed() -> Any:
        return meshfeed.MultiHostDataLoadIterator(meshfeed.sources.Memory(data()), mesh_of("rows"), **options)

    feed = make_feed()
    start = time.monotonic()
    try:
        with feed if how == "raise" else contextlib.nullcontext():
            for _ in range(step if leaver else 10_000):
                start = time.monotonic()
                next(feed)
                seen["steps"] += 1
            if how == "raise":
                _ = 1 / 0
    except Exception as error:
        if not isinstance(error, ZeroDivisionError):
            seen.update(type=type(error).__name__, text=str(error), host=getattr(error, "host", None))
            seen["waited"] = time.monotonic() - start
    if leaver and how == "close":
        feed.close()
    if leaver and how == "reset":
        feed.reset()
    if leaver and how == "drop":
        feed = None
    if len(leavers) == jax.process_count():
        time.sleep(1.0)  # should anybody have something to say
        feed = feed if how == "reset" else make_feed()
        next(feed)
        seen["again"] = feed.step
    multihost_utils.sync_global_devices("all hosts are here")  # so that no host leaves while another looks
    if feed is not None:
        feed.close()
    logging.getLogger("meshfeed").removeHandler(heard)
    return seen


def refused_everywhere() -> list[Any]:
    """All hosts are refused the same state and begin from the start, some of them late."""
    here = jax.process_index()
    seen: list[Any] = []
    for late in range(jax.process_count()):
        with meshfeed.MultiHostDataLoadIterator(
            meshfeed.sources.Memory(data()),
            mesh_of("rows"),
            global_batch_size=2 * jax.device_count(),
            timeout_seconds=TIMEOUT_SECONDS,
        ) as feed:
            try:
                feed.set_state({**feed.get_state(), "position": 3})
            except meshfeed.StateMismatchError:
                seen.append("refused")
            time.sleep(6.0 if here == late else 0.0)
            next(feed)
            seen.append(feed.step)
    return seen


def on_a_part_of_the_mesh() -> int:
    """A feed on the devices of hosts 0 and 2 only, while the others make no feed and go on."""
    here = jax.process_index()
    chosen = [device for device in jax.devices() if device.process_index in (0, 2)]
    mesh = jax.sharding.Mesh(np.array(chosen), ("data",), axis_types=(AxisType.Auto,))
    if here not in (0, 2):
        return 0
    with meshfeed.MultiHostDataLoadIterator(
        meshfeed.sources.Memory(data()), mesh, global_batch_size=4, name="part", timeout_seconds=TIMEOUT_SECONDS
    ) as feed:
        for step, batch in enumerate(feed):
            check(batch, feed.record_ids(step))
        return feed.step


def on_all_with_a_host_left_out() -> int:
    """Every host makes the feed, and the mesh leaves host 1 out: it sees the same steps, without data."""
    chosen = [device for device in jax.devices() if device.process_index != 1]
    mesh = jax.sharding.Mesh(np.array(chosen), ("data",), axis_types=(AxisType.Auto,))
    with meshfeed.MultiHostDataLoadIterator(
        meshfeed.sources.Memory(data()), mesh, global_batch_size=len(chosen), timeout_seconds=TIMEOUT_SECONDS
    ) as feed:
        for step, batch in enumerate(feed):
            check(batch, feed.record_ids(step))
        return feed.step


def interrupted_starts(functions: list[str], interrupted_host: int, expected: list[list[int]]) -> list[int]:
    """For each function: a feed whose first ``next`` is interrupted on one host where it is entered. Batches seen."""
    seen = []
    for name in functions:

        def trace(frame: Any, event: str, arg: Any, name: str = name) -> None:
            if frame.f_code.co_name == name and "meshfeed" in frame.f_code.co_filename:
                sys.settrace(None)
                raise KeyboardInterrupt

        options: dict[str, Any] = {"global_batch_size": len(expected[0]), "shuffle": True, "seed": 7, "num_epochs": 2}
        with meshfeed.MultiHostDataLoadIterator(
            meshfeed.sources.Memory(data()), mesh_of("rows"), timeout_seconds=30, **options
        ) as feed:
            if jax.process_index() == interrupted_host:
                sys.settrace(trace)
                with contextlib.suppress(KeyboardInterrupt):
                    next(feed)
                    raise AssertionError(f"{name} was not entered")
            for step, batch in enumerate(feed):
                check(batch, np.array(expected[step]))
            seen.append(feed.step)
    return seen


def some_hosts_make_more_feeds() -> list[tuple[str, int]]:
    """Feeds of host 0 alone, of hosts 0 and 1, and of all: the names and steps of those of this host, in its order."""
    here, found = jax.process_index(), []

    def run(hosts: list[int], **options: Any) -> None:
        chosen = [device for device in jax.devices() if device.process_index in hosts]
        mesh = jax.sharding.Mesh(np.array(chosen), ("data",), axis_types=(AxisType.Auto,))
        source = meshfeed.sources.Memory({"id": np.arange(4 * len(chosen))})
        feed = meshfeed.Feed(source, mesh, global_batch_size=len(chosen), timeout_seconds=20, **options)
        found.append((feed.name, len(list(feed))))
        feed.close()

    def run_loader(hosts: list[int]) -> None:
        chosen = [device for device in jax.devices() if device.process_index in hosts]
        mesh = jax.sharding.Mesh(np.array(chosen), ("data",), axis_types=(AxisType.Auto,))
        rows = 4 if here == hosts[0] else 2  # the others pad
        loader = meshfeed.maxtext.MultiHostDataLoadIterator(
            [{"x": np.zeros((2, 2), np.float32)}] * rows, mesh, generate_padding_batch=True
        )
        for _ in range(6):
            next(loader)
        found.append((loader.name, loader.step))
        loader.close()

    everyone = list(range(jax.process_count()))
    for hosts in ([0], [0], everyone, [0, 1], [3], everyone, [1, 2, 3]):
        if here in hosts:
            run(hosts)
            run(hosts, name="same")
            run_loader(hosts)
    return found


def feeds_made_in_another_order() -> list[int]:
    """Two feeds at once, over all hosts and over two of them, which the hosts make and read in unlike orders."""
    here = jax.process_index()
    everyone = list(range(jax.process_count()))
    steps = []
    feeds = {}
    for hosts in ([1, 2], everyone) if here != 2 else (everyone, [1, 2]):
        if here not in hosts:
            continue
        chosen = [device for device in jax.devices() if device.process_index in hosts]
        mesh = jax.sharding.Mesh(np.array(chosen), ("data",), axis_types=(AxisType.Auto,))
        source = meshfeed.sources.Memory({"id": np.arange(40 * len(chosen))})
        feeds[len(hosts)] = meshfeed.Feed(
            source, mesh, global_batch_size=len(chosen), timeout_seconds=20, name="same order"
        )
    for _, feed in sorted(feeds.items()):
        steps.append(len(list(feed)))
        feed.close()
    return steps


def feeds_read_in_another_order(start: bool) -> str:
    """Two feeds whose first batches the hosts request in unlike orders, which works if both have been started."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    source = meshfeed.sources.Memory({"id": np.arange(64)})
    feeds = [meshfeed.Feed(source, mesh, global_batch_size=8, timeout_seconds=120 if start else 3) for _ in range(2)]
    try:
        for feed in feeds if start else []:
            feed.start()
        for feed in feeds if jax.process_index() else reversed(feeds):
            next(feed)
    except meshfeed.StalledError as error:
        return str(error)
    finally:
        # A host that comes late would find that the other has closed its feeds.
        multihost_utils.sync_global_devices("read")
        for feed in feeds:
            feed.close()
    return ""


def hangs(bad_host: int, num_workers: int, prefetch: int) -> dict[str, Any]:
    """One host's read hangs; what the others log of it."""
    windows.late_seconds = pipeline.late_seconds = lambda timeout: 2.0
    seen: dict[str, Any] = {"log": [], "stalls": []}
    heard = logging.Handler(logging.WARNING)
    heard.emit = lambda record: seen["log"].append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("meshfeed").addHandler(heard)
    bad = jax.process_index() == bad_host

    class Source:
        def __len__(self) -> int:
            return 4096

        def __getitem__(self, record_id: int) -> Any:
            if bad and record_id >= 2048:
                self.read_from_the_dead_disk()
            return {"x": np.float32(record_id)}

        def read_from_the_dead_disk(self) -> None:
            time.sleep(1e6)

        def file_of(self, record_id: int) -> str:
            return f"/data/part-{record_id // 1024}"

        def fingerprint(self) -> str:
            return "the same on all hosts"

    size = 16 * jax.device_count()
    options: dict[str, Any] = {"num_workers": num_workers if bad else 0, "prefetch": prefetch, "timeout_seconds": 240}
    feed = meshfeed.Feed(Source(), mesh_of("rows"), global_batch_size=size, name=f"{num_workers}-{prefetch}", **options)

    def take() -> None:
        with contextlib.suppress(meshfeed.MeshfeedError):  # closed below
            while not (bad and prefetch == 0 and feed.step == 2048 // size - 4):  # then only its heartbeat is there
                next(feed)

    taking = threading.Thread(target=take)
    taking.start()
    deadline = time.monotonic() + 200
    while not bad and time.monotonic() < deadline:
        if any("/data/part-2" in text and "dead_disk" in text for text in seen["log"]):
            break
        time.sleep(0.1)
    seen["stalls"] = [f"{stall.what}\n{stall.stacks}" for stall in feed._stats.stalls]
    coordination.key_value_store().set(f"meshfeed/test/{feed.name}/{jax.process_index()}", "seen", overwrite=True)
    for host in range(jax.process_count()):
        assert coordination.key_value_store().get(f"meshfeed/test/{feed.name}/{host}", 200)
    feed.close()
    taking.join(60)
    assert not taking.is_alive()
    logging.getLogger("meshfeed").removeHandler(heard)
    return seen
