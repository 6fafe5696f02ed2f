"""Plays a case on one host and compares every step with the reference model."""

from __future__ import annotations

import json
import math
import threading
from typing import Any, Protocol

import numpy as np
from configurations import WINDOWS, Case, Event, Phase, is_random, narrowed
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import meshfeed

TIMEOUT_SECONDS = 20.0
_RETRY = meshfeed.Retry(attempts=20, initial_seconds=0.0002, max_seconds=0.001)


class World(Protocol):
    """Devices, and an exchange of values between hosts."""

    def devices(self, processes: int, per_host: int) -> list[Any]:
        """All devices, those of a host one after the other."""
        ...

    def check(self, name: str, array: Any, wanted: np.ndarray, phase: Phase, host: int) -> None:
        """Asserts that this host's blocks of a global array are as wanted."""
        ...

    def put(self, key: str, host: int, value: Any) -> None:
        """Publishes a value."""
        ...

    def gather(self, key: str, hosts: int) -> list[Any]:
        """The values of all hosts."""
        ...


def sharding_of(phase: Phase, devices: list[Any]) -> Any:
    """What is passed as ``sharding``."""
    topology = phase.topology
    grid = topology.grid
    placed = np.empty(grid.shape, object)
    for place in np.ndindex(*grid.shape):
        placed[place] = devices[int(grid[place])]
    mesh = Mesh(placed, topology.axes, axis_types=(AxisType.Auto,) * grid.ndim)
    if topology.layout in ("rows", "permuted"):
        return mesh
    if topology.layout == "prefix":
        return {leaf: NamedSharding(mesh, PartitionSpec(*topology.spec(leaf))) for leaf in ("id", "x")}
    return NamedSharding(mesh, PartitionSpec(*topology.spec("id")))


def play_host(case: Case, host: int, world: World, name: str) -> None:
    """Plays all phases on one host.

    Raises:
      AssertionError: something is not as the model says.
    """
    for number, (phase, wanted) in enumerate(zip(case.phases, case.events, strict=True)):
        _play_phase(case, phase, wanted, host, world, f"{name}-{number}")


def _play_phase(case: Case, phase: Phase, wanted: list[Event], host: int, world: World, name: str) -> None:
    settings = case.settings(phase)
    if settings["bad_records"] is not None:
        settings["bad_records"] = meshfeed.SkipBad(max_fraction=settings["bad_records"])
    if settings["shuffle"] in ("shards 3", "affinity"):
        settings["shuffle"] = meshfeed.ShardShuffle(*WINDOWS[settings["shuffle"]])
    settings["global_batch_size"] = (
        phase.schedule[0][1] if len(phase.schedule) == 1 else meshfeed.BatchSchedule(phase.schedule)
    )
    faults, refused = case.faults(phase, host), case.refused_on(phase, host)
    devices = world.devices(case.processes, phase.topology.devices)
    sharding = sharding_of(phase, devices)
    if isinstance(sharding, dict) and case.config["source"] == "padded":
        sharding["mask_of"] = sharding["x"]
    timeout = TIMEOUT_SECONDS * (5 if settings["num_workers"] else 1)  # processes are slow to start
    try:
        feed = meshfeed.Feed(
            case.source(phase, host, faults),
            sharding,
            **settings,
            name=name,
            retry=_RETRY,
            timeout_seconds=timeout,
        )
    except meshfeed.MeshfeedError as error:
        if type(error).__name__ != refused:
            raise AssertionError(f"refused: {error!r}") from error
        return
    assert refused is None, f"not refused: {refused}"
    faults.armed = True
    with feed:
        for number, event in enumerate(wanted):
            player = _Player(case, phase, host, world, feed, name.rpartition("-")[0])
            if case.config["start"] and (not number or wanted[number - 1].action[0] in ("set", "reset")):
                feed.start()
            player.play(event, f"action {name.rpartition('-')[2]}.{number} {event.action}")


class _Player:
    def __init__(self, case: Case, phase: Phase, host: int, world: World, feed: Any, name: str) -> None:
        self.case, self.phase, self.host, self.world, self.feed, self.name = case, phase, host, world, feed, name

    def play(self, event: Event, where: str) -> None:
        kind, *arguments = event.action
        getattr(self, f"_{kind}")(event, where, *arguments)
        if event.failing is None:
            at = self.feed.step, self.feed.position
            assert at == (event.step, event.position), f"{where}: at {at}, not {(event.step, event.position)}"

    def _take(self, event: Event, where: str, count: int) -> None:
        late = self.case.config["outside"] == "late" and self.host >= self.phase.topology.hosts
        if late and not is_random(self.case.config["source"]):  # which would not follow
            self.world.gather(f"{self.name}/{where}", self.phase.topology.hosts)
        self._take_now(event, where, count)
        if self.case.config["outside"] == "late" and self.host < self.phase.topology.hosts:
            self.world.put(f"{self.name}/{where}", self.host, None)

    def _take_now(self, event: Event, where: str, count: int) -> None:
        mask_key = "mask" if self.case.config["mask"] else None
        for batch in event.batches:
            here = f"{where}, step {batch.step}"
            try:
                arrays = next(self.feed)
            except Exception as error:
                raise AssertionError(f"{here}: raised {error!r}") from error
            wanted = {name: narrowed(leaf) for name, leaf in flat(batch.arrays(mask_key)).items()}
            arrays = flat(arrays)
            assert sorted(arrays) == sorted(wanted), f"{here}: leaves {sorted(arrays)}"
            for name, array in arrays.items():
                try:
                    self.world.check(name, array, wanted[name], self.phase, self.host)
                except AssertionError as error:
                    raise AssertionError(f"{here}, leaf {name}: {error}") from None
            at = self.feed.step, self.feed.position
            assert at == (batch.step + 1, batch.position), f"{here}: at {at}, not {(batch.step + 1, batch.position)}"
        if event.end:
            for _ in range(2):
                self._raises(where, ("StopIteration",))
        elif event.failing is not None:
            if self.host in event.failing:
                kinds: tuple[str, ...] = (event.kind,) if len(event.failing) == 1 else (event.kind, "PeerError")
            elif self.host < self.phase.topology.hosts:
                kinds = ("PeerError",)
            elif is_random(self.case.config["source"]):  # reads alone
                return
            else:
                kinds = (event.kind, "PeerError")
            for _ in range(2):
                self._raises(where, kinds)

    def _raises(self, where: str, kinds: tuple[str, ...]) -> None:
        try:
            next(self.feed)
        except Exception as error:
            if type(error).__name__ not in kinds:
                raise AssertionError(f"{where}: raised {error!r}, not {kinds}") from error
        else:
            raise AssertionError(f"{where}: gave a batch after {self.feed.step - 1} steps, not {kinds}")

    def _save(self, event: Event, where: str, key: str) -> None:
        state = self.feed.get_state()
        assert state == json.loads(json.dumps(state)), where
        assert state["position"] == event.position, f"{where}: position {state['position']}, not {event.position}"
        self.world.put(f"{self.name}/{key}", self.host, state)

    def _set(self, event: Event, where: str, key: str) -> None:
        states = self.world.gather(f"{self.name}/{key}", self.case.savers(key))
        merged = meshfeed.merge_states(states)
        self._check_merged(merged, event, where)
        self.feed.set_state(merged)
        again = self.feed.get_state()
        assert again["position"] == merged["position"], where

    def _check_merged(self, state: Any, event: Event, where: str) -> None:
        ledgers = (state.get("skipped") or {}).values()
        bad = {(entry[0], entry[1], entry[3]) for ledger in ledgers for entry in ledger}
        assert bad == event.bad, f"{where}: the state lists the bad records {bad}, not {event.bad}"
        if "lanes" in state and state["lanes"] is not None:
            assert len(state["lanes"]) == self.case.num_lanes, f"{where}: lanes {sorted(state['lanes'])}"
            records = sum(lane["records"] for lane in state["lanes"].values())
            assert records == event.position, f"{where}: {records} records in the lanes"

    def _reset(self, event: Event, where: str) -> None:
        self.feed.reset()

    def _len(self, event: Event, where: str) -> None:
        try:
            found = len(self.feed)
        except TypeError:
            found = None
        assert found == event.length, f"{where}: length {found}, not {event.length}"

    def _ids(self, event: Event, where: str) -> None:
        for step, wanted in (event.ids or {}).items():
            try:
                found = self.feed.record_ids(step).tolist()
            except IndexError:
                found = None
            assert found == wanted, f"{where}: record_ids({step}) = {found}, not {wanted}"

    def _spec(self, event: Event, where: str) -> None:
        if event.following is not None:
            batch = event.following.arrays("mask" if self.case.config["mask"] else None)
            wanted = {name: (leaf.shape, narrowed(leaf).dtype) for name, leaf in flat(batch).items()}
            found = {name: (leaf.shape, leaf.dtype) for name, leaf in flat(self.feed.element_spec).items()}
            assert found == wanted, f"{where}: element_spec {found}, not {wanted}"

    def _replay(self, event: Event, where: str) -> None:
        mask_key = "mask" if self.case.config["mask"] else None
        for batch in event.replayed:
            found, wanted = flat(self.feed.replay(batch.step)), flat(batch.arrays(mask_key))
            assert sorted(found) == sorted(wanted), f"{where}: replay({batch.step}) has the leaves {sorted(found)}"
            for name, leaf in wanted.items():
                same = found[name].dtype == leaf.dtype and found[name].tobytes() == leaf.tobytes()
                assert same, f"{where}: replay({batch.step}), leaf {name}: {found[name]}, not {leaf}"


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    """Leaves by path."""
    if not isinstance(tree, dict):
        return {path: tree}
    return {name: leaf for key in tree for name, leaf in flat(tree[key], f"{path}/{key}" if path else key).items()}


class Exchange:
    """Values of hosts that are threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, dict[int, Any]] = {}
        self._changed = threading.Condition()
        self.given_up = False

    def put(self, key: str, host: int, value: Any) -> None:
        with self._changed:
            self._values.setdefault(key, {})[host] = value
            self._changed.notify_all()

    def give_up(self) -> None:
        with self._changed:
            self.given_up = True
            self._changed.notify_all()

    def gather(self, key: str, hosts: int) -> list[Any]:
        with self._changed:
            self._changed.wait_for(lambda: self.given_up or len(self._values.get(key, {})) == hosts, TIMEOUT_SECONDS)
            found = self._values.get(key, {})
            assert len(found) == hosts, f"only the hosts {sorted(found)} of {hosts} saved {key}"
            return [found[host] for host in sorted(found)]


def check_block(data: np.ndarray, wanted: np.ndarray, index: tuple[slice, ...]) -> None:
    """Asserts that one block of a global array is as wanted, bit for bit."""
    block = np.ascontiguousarray(wanted[index])
    assert data.dtype == block.dtype, f"dtype {data.dtype}, not {block.dtype}"
    assert data.shape == block.shape, f"block {index} of shape {data.shape}, not {block.shape}"
    assert np.ascontiguousarray(data).tobytes() == block.tobytes(), f"block {index} is {data}, not {block}"


def blocks_of(phase: Phase, name: str, host: int, shape: tuple[int, ...]) -> dict[int, tuple[slice, ...]]:
    """Device number → index of its block, of a host's devices, by the layout alone."""
    topology = phase.topology
    grid, sizes = topology.grid, dict(zip(topology.axes, topology.grid.shape, strict=True))
    found = {}
    for place in np.ndindex(*grid.shape):
        if topology.host_of(int(grid[place])) != host:
            continue
        at = dict(zip(topology.axes, place, strict=True))
        index = []
        spec = (*topology.spec(name), *[None] * len(shape))
        for size, entry in zip(shape, spec, strict=False):
            axes = () if entry is None else (entry if isinstance(entry, tuple) else (entry,))
            number = 0
            for axis in axes:
                number = number * sizes[axis] + at[axis]
            each = size // math.prod(sizes[axis] for axis in axes)
            index.append(slice(number * each, (number + 1) * each))
        found[int(grid[place])] = tuple(index)
    return found
