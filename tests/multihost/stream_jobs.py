"""What the hosts of tests/multihost/test_streams.py run: streams of uneven lanes, checked row by row."""

from __future__ import annotations

import itertools
import json
import pathlib
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "feed"))
from forced_numbers import PlacesHere

import meshfeed
from meshfeed._src.feed.sizing import Numbers


def value(lane: int, number: int, epoch: int) -> int:
    """What record ``number`` of a lane says."""
    return lane * 1_000_000 + epoch * 100_000 + number


def lane_rows(lengths: list[int], epochs: int, lane: int) -> list[int]:
    """All records of a lane."""
    return [value(lane, number, epoch) for epoch in range(epochs) for number in range(lengths[lane])]


def expected_batches(lengths: list[int], size: int, end: str, epochs: int = 1) -> list[list[int | None]]:
    """The stream by its definition; None is a padded row."""
    lanes = [lane_rows(lengths, epochs, lane) for lane in range(len(lengths))]
    per_lane = size // len(lengths)
    count = (min if end == "drop" else max)(
        len(rows) // per_lane if end == "drop" else -(-len(rows) // per_lane) for rows in lanes
    )
    batches = []
    for step in range(count):
        batch: list[int | None] = []
        for rows in lanes:
            part: list[int | None] = list(rows[step * per_lane : (step + 1) * per_lane])
            batch += part + [None] * (per_lane - len(part))
        batches.append(batch)
    return batches


def source(lengths: list[int], *, stateful: bool = True) -> Any:
    """A stream whose lanes have these lengths."""

    class Lane:
        def __init__(self, lane: int, epoch: int) -> None:
            self.lane, self.epoch, self.number = lane, epoch, 0

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            if self.number >= lengths[self.lane]:
                raise StopIteration
            self.number += 1
            return {
                "id": np.int64(value(self.lane, self.number - 1, self.epoch)),
                "x": np.full(3, self.number, np.float32),
            }

        if stateful:

            def get_state(self) -> Any:
                return {"at": (self.number, [self.epoch])}  # a tuple must come back as one

            def set_state(self, state: Any) -> None:
                assert isinstance(state["at"], tuple), state
                self.number = state["at"][0]

    return meshfeed.sources.Stream(lambda lane_index, num_lanes, epoch=0: Lane(lane_index, epoch))


def sharding_of(layout: str) -> Any:
    """Rows over all devices, or over half of them with replicas on the rest."""
    devices = np.array(jax.devices())
    if layout == "rows":
        return jax.sharding.Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
    mesh = jax.sharding.Mesh(devices.reshape(2, -1).T, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    return NamedSharding(mesh, P("data"))


def check(batch: Any, wanted: list[int | None], *, masked: bool) -> None:
    """Every shard here is what the definition says."""
    ids = np.array([0 if row is None else row for row in wanted], np.int32)
    real = np.array([row is not None for row in wanted])
    for shard in batch["id"].addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), ids[shard.index])
    for shard in batch["x"].addressable_shards:
        assert not np.asarray(shard.data)[~real[shard.index[0]]].any()
    if masked:
        for shard in batch["mask"].addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), real[shard.index])


def run(cases: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Runs each case to its end, with a collective a step; (steps, position) of each."""
    total = jax.jit(lambda x: x.sum())
    results = []
    for case in cases:
        options = dict(case)
        lengths, size, end = options.pop("lengths"), options["global_batch_size"], options["end"]
        epochs = options.get("num_epochs", 1)
        expected = expected_batches(lengths, size, end, epochs)
        masked = end == "pad"
        stateful = options.pop("stateful", True)
        with meshfeed.MultiHostDataLoadIterator(
            source(lengths, stateful=stateful),
            sharding_of(options.pop("layout", "rows")),
            num_lanes=len(lengths),
            mask_key="mask" if masked else None,
            timeout_seconds=60,
            **options,
        ) as feed:
            forced = None
            if options.get("num_workers") == "auto":  # hosts change their numbers at different steps
                numbers = [Numbers(2, 1, 2), Numbers(0, 2, 1), Numbers(3, 1, 2), Numbers(0, 1, 3)]
                forced = PlacesHere(feed, numbers[jax.process_index() % 4 :] + numbers)
            for step, batch in enumerate(feed):
                assert step < len(expected), (case, step)
                float(total(batch["x"]))
                check(batch, expected[step], masked=masked)
            assert feed.step == len(expected), (case, feed.step, len(expected))
            assert forced is None or {used.num_workers for used in forced.used} >= {0, 2}, forced.used
            real = sum(row is not None for batch in expected for row in batch)
            assert feed.position == real, (case, feed.position, real)
            try:
                next(feed)
                raise AssertionError("after the end")
            except StopIteration:
                pass
            results.append((feed.step, feed.position))
    return results


def go_on(case: dict[str, Any], states: Any, steps: int | None) -> str:
    """Continues from the joined states of other hosts; this host's state as JSON."""
    options = dict(case)
    lengths, size, end = options.pop("lengths"), options["global_batch_size"], options["end"]
    expected = expected_batches(lengths, size, end, options.get("num_epochs", 1))
    with meshfeed.MultiHostDataLoadIterator(
        source(lengths, stateful=options.pop("stateful", True)),
        sharding_of(options.pop("layout", "rows")),
        mask_key="mask" if end == "pad" else None,
        timeout_seconds=60,
        **{"num_lanes": len(lengths), **options},
    ) as feed:
        if states is not None:
            feed.set_state(meshfeed.merge_states([json.loads(text) for text in states]))
        first = feed.step
        stop = len(expected) if steps is None else first + steps
        for step in range(first, stop):
            check(next(feed), expected[step], masked=end == "pad")
        if steps is None:
            assert next(feed, None) is None
        return json.dumps(feed.get_state())


def host_batches(counts: list[int], end: str, short: dict[int, int], prefetch: int) -> tuple[int, int, list[int]]:
    """Uneven hosts that bring their own batches; (steps, position, real rows seen here a step)."""
    here, hosts = jax.process_index(), jax.process_count()
    rows = 2 * jax.local_device_count()

    def make() -> Any:
        for number in range(counts[here]):
            count = short.get(here, rows) if number == counts[here] - 1 else rows
            yield {"x": np.full((count, 2), number + 1, np.float32)}

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    total = jax.jit(lambda x: x.sum())
    seen = []
    with meshfeed.MultiHostDataLoadIterator(
        make(),
        mesh,
        global_batch_size=rows * hosts,
        end=end,  # type: ignore[arg-type]
        mask_key="mask" if end == "pad" else None,
        prefetch=prefetch,
        timeout_seconds=60,
    ) as feed:
        for batch in feed:
            float(total(batch["x"]))
            if end == "pad":
                seen.append(int(sum(np.asarray(s.data).sum() for s in batch["mask"].addressable_shards)))
        return feed.step, feed.position, seen


def host_batches_resumed(counts: list[int], global_batch_size: int | None) -> tuple[int, list[int]]:
    """Uneven hosts that pad, in a new feed for each step; (position, real rows seen here a step)."""
    here = jax.process_index()
    batches = [{"x": np.full((4, 2), number + 1, np.float32)} for number in range(counts[here])]
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    state, seen, position = None, [], 0
    while True:
        with meshfeed.MultiHostDataLoadIterator(
            meshfeed.sources.HostBatches(batches),
            mesh,
            global_batch_size=global_batch_size,
            end="pad",
            mask_key="mask",
            timeout_seconds=60,
        ) as feed:
            if state is not None:
                feed.set_state(state)
            batch = next(feed, None)
            if batch is None:
                return position, seen
            real = sum(int(np.asarray(shard.data).sum()) for shard in batch["mask"].addressable_shards)
            rows = np.concatenate([np.asarray(shard.data) for shard in batch["x"].addressable_shards])
            assert sorted(rows[:, 0].tolist()) == [0.0] * (4 - real) + [float(feed.step)] * real
            seen.append(real)
            state, position = feed.get_state(), feed.position


def host_batches_that_others_hold_too() -> tuple[int, int]:
    """Hosts that bring the same rows, for a mesh whose model axis spans them; the last batch is short by 3 rows."""
    batches = ({"x": np.full((8 if number < 4 else 5, 2), number, np.float32)} for number in range(5))
    with meshfeed.MultiHostDataLoadIterator(
        batches, sharding_of("replicas"), end="pad", mask_key="mask", timeout_seconds=60
    ) as feed:
        for batch in feed:
            assert batch["x"].shape == (8, 2)
        return feed.step, feed.position


def skip_bad(
    bad: list[int], limit: float, layout: str, size: int, state: str | None = None, steps: int = 1000
) -> dict[str, Any]:
    """Random access with bad records, from a state or the start: rows by step, the ledger, or the error."""
    from meshfeed import CorruptDataError

    class Records:
        def __len__(self) -> int:
            return 200

        def __getitem__(self, record_id: int) -> Any:
            if record_id in bad:
                raise CorruptDataError(f"record {record_id} is damaged", record_id=record_id)
            return {"id": np.int32(record_id)}

        def fingerprint(self) -> str:
            return "records"

    feed = meshfeed.MultiHostDataLoadIterator(
        Records(),
        sharding_of(layout),
        global_batch_size=size,
        shuffle=True,
        bad_records=meshfeed.SkipBad(limit),
        timeout_seconds=60,
    )
    rows: list[dict[int, int]] = []
    error = None
    if state is not None:
        feed.set_state(json.loads(state))
    try:
        for batch in itertools.islice(feed, steps):
            step = {}
            for shard in batch["id"].addressable_shards:
                start = shard.index[0].start or 0
                step.update({start + i: int(v) for i, v in enumerate(np.asarray(shard.data))})
            rows.append(step)
    except meshfeed.MeshfeedError as failure:
        error = f"{type(failure).__name__}: {failure}"
    state = json.dumps(feed.get_state())
    stats = feed.stats()
    feed.close()
    return {"rows": rows, "error": error, "state": state, "skipped": stats.skipped_records}


def replicas(differ: bool) -> str | None:
    """Hosts that hold the same rows, read from files that differ or not."""
    rows = {"x": np.arange(64 * 3, dtype=np.float32).reshape(64, 3)}
    if differ and jax.process_index() == 1:
        rows["x"][5, 2] += 1

    class Records:
        def __len__(self) -> int:
            return 64

        def __getitem__(self, record_id: int) -> Any:
            return {"x": rows["x"][record_id]}

        def fingerprint(self) -> str:
            return "the same"

    feed = meshfeed.MultiHostDataLoadIterator(
        Records(), sharding_of("replicas"), global_batch_size=8, check_replicas=True, timeout_seconds=60
    )
    try:
        return f"{len(list(feed))} batches"
    except meshfeed.AgreementError as error:
        return str(error)
    finally:
        feed.close()


def stalls(timeout: float) -> str:
    """One host's source sleeps far longer than the time-out."""
    import time

    class Records:
        def __len__(self) -> int:
            return 640

        def __getitem__(self, record_id: int) -> Any:
            if jax.process_index() == 1 and record_id >= 320:
                time.sleep(4 * timeout)
            return {"x": np.float32(record_id)}

        def fingerprint(self) -> str:
            return "sleeper"

        def file_of(self, record_id: int) -> str:
            return "slow.array_record"

    feed = meshfeed.MultiHostDataLoadIterator(
        Records(), sharding_of("rows"), global_batch_size=16, timeout_seconds=timeout
    )
    start = time.monotonic()
    try:
        for _ in feed:
            start = time.monotonic()
    except (meshfeed.StalledError, meshfeed.PeerError) as error:  # the latter where the others gave up a moment before
        return f"{time.monotonic() - start:.1f}|{error}"
    finally:
        import threading

        threading.Thread(target=feed.close, daemon=True).start()
    return "no error"


def empty(end: str) -> str:
    """A stream without a record in any lane."""
    feed = meshfeed.MultiHostDataLoadIterator(
        source([0] * 8),
        sharding_of("rows"),
        global_batch_size=8,
        end=end,  # type: ignore[arg-type]
        num_lanes=8,
        timeout_seconds=60,
    )
    try:
        return f"{len(list(feed))} batches"
    except meshfeed.MeshfeedError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        feed.close()


def slow_resume(hangs: bool) -> str:
    """A stream without states: host 1 takes several time-outs to drop what was delivered, or hangs in it, host 0 no time."""
    import time

    timeout, dropped = 3.0, 400

    class Records:
        slow = False

        def open(self, lane_index: int, num_lanes: int) -> Any:
            for number in range(2 * dropped):
                if self.slow and lane_index == 1 and number < dropped:
                    time.sleep(6 * timeout if hangs and number == dropped // 2 else 0.025)
                yield {"x": np.float32(lane_index * 1000 + number)}

        def fingerprint(self) -> str:
            return "slow to resume"

    options: dict[str, Any] = {"global_batch_size": 80, "num_lanes": 2, "timeout_seconds": timeout}
    records = Records()
    with meshfeed.MultiHostDataLoadIterator(records, sharding_of("rows"), **options) as feed:
        for _ in range(10):
            next(feed)
        state = feed.get_state()
    records.slow = True
    with meshfeed.MultiHostDataLoadIterator(records, sharding_of("rows"), **options) as feed:
        start = time.monotonic()
        try:
            feed.set_state(state)
            seconds = time.monotonic() - start
            batch = next(feed)
        except (meshfeed.StalledError, meshfeed.PeerError) as error:
            return f"{type(error).__name__}: {error}"
        assert seconds > 3 * timeout or jax.process_index() == 0
        local = [int(x) for shard in batch["x"].addressable_shards for x in np.asarray(shard.data)]
        assert local == [1000 * jax.process_index() + dropped + row for row in range(40)], local
        return f"step {feed.step}"


def hosts_without_lanes(cases: list[dict[str, Any]]) -> list[int]:
    """Streams on hosts that have no lane, or other lanes at another size; the steps of each, checked row by row.

    Each case is read in turns of three steps, continued by a new feed from this host's own state.
    """
    steps = []
    for case in cases:
        options = dict(case)
        lengths, sizes = options.pop("lengths"), options.pop("sizes")
        epochs, endless = options.get("num_epochs", 1), options.get("num_epochs", 1) is None
        masked = options["end"] == "pad"
        expected = scheduled_batches(lengths, sizes, options["end"], 3 if endless else epochs)
        expected = expected[:9] if endless else expected
        state, done = None, 0
        while done < len(expected):
            with meshfeed.Feed(
                source(lengths),
                sharding_of("rows"),
                global_batch_size=meshfeed.BatchSchedule(sizes),
                num_lanes=len(lengths),
                mask_key="mask" if masked else None,
                timeout_seconds=60,
                **options,
            ) as feed:
                if state is not None:
                    feed.set_state(json.loads(state))
                for wanted in expected[done : done + 3]:
                    check(next(feed), wanted, masked=masked)
                    done += 1
                state = json.dumps(feed.get_state())
                if done == len(expected) and not endless:
                    assert next(feed, None) is None, case
                if done == len(expected):
                    feed.reset()
                    check(next(feed), expected[0], masked=masked)
        steps.append(done)
    return steps


def scheduled_batches(
    lengths: list[int], sizes: list[tuple[int, int]], end: str, epochs: int
) -> list[list[int | None]]:
    """The stream by its definition, with a batch schedule; None is a padded row."""
    lanes = [lane_rows(lengths, epochs, lane) for lane in range(len(lengths))]
    batches: list[list[int | None]] = []
    taken = 0
    while True:
        size = next(size for first, size in reversed(sizes) if first <= len(batches))
        each = size // len(lanes)
        parts = [rows[taken : taken + each] for rows in lanes]
        taken += each
        if not any(parts) or (end == "drop" and min(map(len, parts)) < each):
            return batches
        batches.append([row for part in parts for row in [*part, *[None] * (each - len(part))]])


def outside_of_the_mesh(kind: str) -> str:
    """A stream over the devices of all hosts but the last; the batches here, or why the feed was refused."""
    hosts, each = jax.process_count(), jax.local_device_count()
    rows = (hosts - 1) * each
    devices = np.array([device for device in jax.devices() if device.process_index < hosts - 1])
    mesh = jax.sharding.Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
    data: Any = {
        "lanes": lambda: source([5] * rows),
        "host batches": lambda: meshfeed.sources.HostBatches([{"x": np.zeros((each, 2), np.float32)}] * 5),
        "mixture": lambda: meshfeed.sources.Mixture({"a": source([5] * rows)}, {"a": 1.0}),
        "random access": lambda: {"x": np.zeros((rows * 5, 2), np.float32)},
    }[kind]()
    try:
        with meshfeed.Feed(data, mesh, global_batch_size=rows, timeout_seconds=60, name=f"outside {kind}") as feed:
            return str(sum(1 for _ in feed))
    except meshfeed.SettingsError as error:
        return str(error)


def spec_where_only_others_have_batches(global_batch_size: int | None) -> tuple[str, str]:
    """The spec of the next batch, before and after the first, on hosts of which only host 0 has batches."""
    here, each = jax.process_index(), jax.local_device_count()
    batches = [] if here else [{"x": np.ones((2 * each, 3), np.float32)}] * 3
    with meshfeed.Feed(
        meshfeed.sources.HostBatches(batches),
        sharding_of("rows"),
        global_batch_size=global_batch_size,
        end="pad",
        mask_key="mask",
        timeout_seconds=60,
    ) as feed:
        try:
            before = str(feed.element_spec)
        except meshfeed.MeshfeedError as error:
            before = str(error)
        next(feed)
        return before, str(feed.element_spec)
