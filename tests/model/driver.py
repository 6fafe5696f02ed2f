"""Plays a case on one host and compares every step with the reference model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
import numpy as np
import pytest
from configurations import (
    BAD,
    DOCUMENTS,
    HOST_BATCHES,
    LEAVES,
    ODD,
    SEED,
    STREAMS,
    WINDOWS,
    Case,
    Event,
    Faults,
    Phase,
    is_random,
    narrowed,
    remote_source,
    unformed,
)
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from reference import Batch, Steps
from wrong_states import wrong_states

import meshfeed
import meshfeed.remote

TIMEOUT_SECONDS, SHORT_TIMEOUT_SECONDS = 20.0, 3.0
LOOP_ERROR = "the loss is nan"
BAD_RECORD = "ValueError: a bad record"
_RETRY = meshfeed.Retry(attempts=20, initial_seconds=0.0002, max_seconds=0.001)


class World(Protocol):
    """Devices, and an exchange of values between hosts."""

    def warnings(self) -> list[logging.LogRecord] | None:
        """The warnings of this host so far; None if they are not kept."""
        ...

    def steps(self) -> list[str] | None:
        """The lines of this host's log of steps so far; None if they are not kept."""
        ...

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

    def check_rounds(self) -> None:
        """Asserts that what hosts have said in earlier generations of a feed is deleted."""
        ...

    def kill(self, host: int) -> None:
        """Lets nothing that a host does from now on reach another."""
        ...


def sharding_of(case: Case, phase: Phase, devices: list[Any]) -> Any:
    """What is passed as ``sharding``."""
    topology = phase.topology
    grid = topology.grid
    placed = np.empty(grid.shape, object)
    for place in np.ndindex(*grid.shape):
        placed[place] = devices[int(grid[place])]
    mesh = Mesh(placed, topology.axes, axis_types=(AxisType.Auto,) * grid.ndim)
    if topology.layout in ("rows", "permuted"):
        return mesh
    if topology.layout in ("prefix", "mixed"):
        more = {"padded": ["mask_of"], "padded_leaves": ["y", "x_mask", "y_mask"]}.get(case.config["source"], [])
        leaves = ["id", "x", *more]
        return {leaf: NamedSharding(mesh, PartitionSpec(*topology.spec(leaf))) for leaf in leaves}
    return NamedSharding(mesh, PartitionSpec(*topology.spec("id")))


@contextlib.contextmanager
def callers_settings(case: Case) -> Iterator[None]:
    """What the program around the feed has chosen."""
    caller = case.config.get("caller", "plain")
    with contextlib.ExitStack() as stack:
        if caller == "mesh":
            axes = {"axis_types": (AxisType.Auto,)}
            stack.enter_context(jax.set_mesh(Mesh(np.array(jax.devices()[:1]), ("other",), **axes)))
        elif caller in ("debug_nans", "debug_infs", "disable_jit"):
            stack.enter_context(getattr(jax, caller)(True))
        elif caller in ("guarded", "logged"):
            guard = {"guarded": "disallow", "logged": "log"}[caller]
            stack.enter_context(jax.transfer_guard_host_to_device(guard))
        yield


@contextlib.contextmanager
def types_of(case: Case) -> Iterator[None]:
    """JAX with or without 64-bit types, on all threads."""
    jax.config.update("jax_enable_x64", case.config["x64"])
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)


def play_host(case: Case, host: int, world: World, name: str) -> None:
    """Plays all phases on one host.

    Raises:
      AssertionError: something is not as the model says.
    """
    for number, (phase, wanted) in enumerate(zip(case.phases, case.events, strict=True)):
        _play_phase(case, phase, wanted, host, world, f"{name}-{number}")


def _settings_of(case: Case, phase: Phase, host: int) -> dict[str, Any]:
    """The feed's keywords, with the classes of meshfeed."""
    settings = case.settings(phase, host)
    if settings["bad_records"] is not None:
        settings["bad_records"] = meshfeed.SkipBad(max_fraction=settings["bad_records"])
    if settings["shuffle"] in ("shards 3", "affinity"):
        settings["shuffle"] = meshfeed.ShardShuffle(*WINDOWS[settings["shuffle"]])
    if settings["global_batch_size"] is not None:
        settings["global_batch_size"] = (
            phase.schedule[0][1] if len(phase.schedule) == 1 else meshfeed.BatchSchedule(phase.schedule)
        )
    return settings


def _play_phase(case: Case, phase: Phase, wanted: list[Event], host: int, world: World, name: str) -> None:
    settings = _settings_of(case, phase, host)
    faults, refused = case.faults(phase, host), case.refused_on(phase, host)
    devices = world.devices(case.processes, phase.topology.devices)
    sharding = sharding_of(case, phase, devices)
    timeout = TIMEOUT_SECONDS * (5 if settings["num_workers"] else 1)  # processes are slow to start
    if "late" in (case.config["fault"], case.config["reshard"]):
        timeout = SHORT_TIMEOUT_SECONDS
    before, make = len(world.warnings() or ()), meshfeed.Feed
    if case.config["feed"] == "remote":
        number, make = case.phases.index(phase), meshfeed.remote.RemoteFeed
        source = functools.partial(remote_source, case.config, case.folder, case.processes, number, host, faults)
    else:
        source = case.source(phase, host, faults)
    try:
        feed = make(
            source,
            sharding,
            **settings,
            name=name,
            retry=_RETRY,
            timeout_seconds=timeout,
        )
    except meshfeed.MeshfeedError as error:
        setting, words = case.refusal(phase, host)
        if type(error).__name__ != refused or getattr(error, "setting", None) != setting or words not in str(error):
            raise AssertionError(f"refused: {error!r}, not about {setting}: {words!r}") from error
        return
    assert refused is None, f"not refused: {refused}"
    faults.armed = True
    with feed:
        if world.warnings() is not None and case.config["fault"] != "settings":  # by which a host has other records
            found, wanted_warnings = _warned(world, "records", after=before), case.warnings_at_first(phase)
            assert found == wanted_warnings, f"warned of {found}, not {wanted_warnings}"
        player = _Player(case, phase, host, world, feed, faults, name.rpartition("-")[0])
        for number, event in enumerate(wanted):
            if (
                case.config["start"]
                and (not number or wanted[number - 1].action[0] in _BEGINNING)
                and not (player.gone or player.left)
            ):
                feed.start()
            player.play(event, f"action {name.rpartition('-')[2]}.{number} {event.action}")
    _check_warnings(case, phase, host, world, before)
    if case.config["source"] in ("stream_state", "stream_uneven"):
        player.check_planned()
    plain = case.config["script"] == "run" and case.config["reshard"] == "none"
    if case.config["source"] == "records_cached" and plain:
        asked = [
            ids for number, ids in enumerate(source.asked) if ids or number
        ]  # at first for none, to see if it is cached
        assert source.asked or not any(event.batches for event in wanted), "nothing is asked of the cache"
        wanted_ids = case.asked_ahead(phase, host, len(asked))
        assert asked == wanted_ids, f"asked ahead for {asked}, not {wanted_ids}"


_BEGINNING = ("set", "reset", "reshard", "weights")
_MAY_WARN = {
    "replaced %d bad records": lambda case: case.config["fault"] in BAD,
    "%s %s cannot be read": lambda case: case.config["fault"] in BAD,
    "%s failed (%s: %s); attempt": lambda case: case.config["fault"] == "transient",
    "%s: the data ended before one full batch": lambda case: not is_random(case.config["source"]),
    "%s: this host had received the batches": lambda case: case.config["reshard"] in ("ahead", "killed"),
    "waited %.0f s for step": lambda case: case.config["fault"] in ("late", "unopened"),
    "waited %.0f s for": lambda case: case.config["reshard"] == "late",
    # With the short timeout of those, on a machine that is busy with something else.
    "%s: %s for %.0f s": lambda case: case.config["fault"] in ("late", "unopened") or case.config["reshard"] == "late",
}
"""The beginnings of other warnings → whether a case may have them."""


def _check_warnings(case: Case, phase: Phase, host: int, world: World, before: int) -> None:
    """Asserts that this host has warned of nothing that it need not."""
    known = [text for texts in (_WARNINGS["records"], _WARNINGS["end"]) for text in texts]
    known += [text for text, may in _MAY_WARN.items() if may(case)]
    for record in (world.warnings() or [])[before:]:
        assert str(record.msg).startswith(tuple(known)), f"host {host} warned: {record.getMessage()}"


_WARNINGS = {
    "records": ("%.0f %% of the records will not be delivered", "the source has %d records in all epochs, fewer"),
    "end": ("the stream ends with lane %d of %d",),
    "replaced": ("replaced %d bad records",),
}


def _warned(world: World, of: str, after: int = 0) -> list[Any]:
    """What this host has warned of: what is put into the texts of some warnings."""
    records = (world.warnings() or [])[after:]
    return [record.args for record in records if str(record.msg).startswith(_WARNINGS[of])]


class _Player:
    def __init__(self, case: Case, phase: Phase, host: int, world: World, feed: Any, faults: Faults, name: str) -> None:
        self.case, self.phase, self.host, self.world, self.feed, self.name = case, phase, host, world, feed, name
        self.faults = faults
        self.began = time.monotonic() - 1.0  # a little earlier: the feed is there already
        self.left = False  # whether this host or another has closed its feed early
        self.gone = False  # whether this host has closed its feed and does nothing more
        self.delivered = {"batches": 0, "records": 0, "bytes": 0, "skipped_records": 0}
        self.has_structure = False  # whether this host has had a record since the feed began or was moved
        self.sizes: tuple[int, ...] = ()  # of the batches that are delivered in an action and before
        self.first_step = 0  # where the feed began or was moved to
        self.moved = False  # whether a batch has been delivered since
        self.lanes_from = 0  # the first step of the feed that has delivered the last batch: the state has its lanes
        self.state: Any = None  # to which the feed has been set
        self.set_at = 0  # the step of that state
        self.stats: Any = None  # the last that were compared
        self.has_read = self.resharded = False
        self.replaced: dict[int, set[tuple[Any, ...]]] = {}  # step → what the log may say of bad records in it

    def _flat(self, tree: Any) -> dict[str, Any]:
        """Leaves by path, of a tree of the feed."""
        return flat(unformed(tree, self.case.config["form"]))

    def play(self, event: Event, where: str) -> None:
        if self.gone or self.left:
            return
        kind, *arguments = event.action
        self.model = event.model
        getattr(self, f"_{kind}")(event, where, *arguments)
        if not self.left and not self.gone and kind != "ahead":
            at = self.feed.step, self.feed.position
            assert at == (event.step, event.position), f"{where}: at {at}, not {(event.step, event.position)}"
            if self.case.config["fault"] != "settings":  # which the state of one host has otherwise
                self._check_state(self.feed.get_state(), event, where)

    def _take(self, event: Event, where: str, count: int) -> None:
        late = self.case.config["outside"] == "late" and self.host not in self.phase.topology.members
        if late and not is_random(self.case.config["source"]):  # which would not follow
            self.world.gather(f"{self.name}/{where}", self.phase.topology.hosts)
        hosts = self.phase.topology.hosts
        waits = self.case.config["fault"] == "unopened" and hosts > 2
        if waits and self.host == 1:  # the others learn of the host that fails before this one has come
            self.world.gather(f"{self.name}/{where}", hosts - 2)
        self._take_now(event, where, count)
        if waits and 1 != self.host < hosts:
            self.world.put(f"{self.name}/{where}", self.host, None)
        if self.case.config["outside"] == "late" and self.host in self.phase.topology.members:
            self.world.put(f"{self.name}/{where}", self.host, None)

    def _take_now(self, event: Event, where: str, count: int) -> None:
        leaves, leaver = self.case.config["fault"] in LEAVES, self.case.odd_host
        leaves_at = self.case.config["taken"] if leaves else None
        outside = self.host not in self.phase.topology.members and is_random(self.case.config["source"])
        self.sizes = event.sizes
        for batch in event.batches:
            here = f"{where}, step {batch.step}"
            if leaves and batch.step == leaves_at and self.host == leaver:
                self._leave()
                return
            try:
                arrays = next(self.feed)
            except meshfeed.PeerError as error:
                if not leaves or outside or batch.step < leaves_at:
                    raise AssertionError(f"{here}: raised {error!r}") from error
                self._check_leaver(error, leaver, leaves_at, here)
                return
            except Exception as error:
                raise AssertionError(f"{here}: raised {error!r}") from error
            self._check_arrays(batch, arrays, here)
            at = self.feed.step, self.feed.position
            assert at == (batch.step + 1, batch.position), f"{here}: at {at}, not {(batch.step + 1, batch.position)}"
            self._count(batch)
            self._check_log(batch, here)
        self._check_stats(where)
        if self.case.config["fault"] == "dies" and self.host in self.phase.topology.members and self.host != leaver:
            self.world.put(f"{self.name}/left", self.host, False)
        if event.end:
            for _ in range(2):
                self._raises(where, ("StopIteration",))
            if self.world.warnings() is not None:
                wanted = self.case.warning_at_end(self.phase, self.host, event, self.first_step)
                found = _warned(self.world, "end")
                # A host whose lanes are longer than those of others may have read ahead to their own end.
                may = self.case.config["source"] in STREAMS and self.case.config["end"] == "drop"
                assert wanted in found if wanted else may or not found, f"{where}: warned of {found}, not {wanted}"
        elif event.failing is not None:
            self._fails(event, where)

    def _check_arrays(self, batch: Batch, arrays: Any, where: str) -> None:
        leaves = flat(batch.arrays("mask" if self.case.config["mask"] else None))
        wanted = {name: narrowed(leaf, self.case.config["x64"]) for name, leaf in leaves.items()}
        arrays = self._flat(arrays)
        assert sorted(arrays) == sorted(wanted), f"{where}: leaves {sorted(arrays)}"
        for name, array in arrays.items():
            try:
                self.world.check(name, array, wanted[name], self.phase, self.host)
            except AssertionError as error:
                raise AssertionError(f"{where}, leaf {name}: {error}") from None

    def _fails(self, event: Event, where: str) -> None:
        """What the hosts raise at a step that not all can deliver."""
        assert event.failing is not None
        is_follower = self.host not in self.phase.topology.members
        if self.host in event.failing:
            kinds: tuple[str, ...] = (event.kind,) if len(event.failing) == 1 else (event.kind, "PeerError")
        elif is_follower and is_random(self.case.config["source"]):  # reads alone
            return
        elif not is_follower:
            kinds = ("PeerError",)
        else:
            kinds = (event.kind, "PeerError")
        for _ in range(2):
            error = self._raises(where, kinds)
            text = f"{error} {'; '.join(getattr(error, '__notes__', ()))}"
            if not is_follower:
                assert all(word in text for word in event.words), f"{where}: raised {error!r}, without {event.words}"
            if isinstance(error, meshfeed.PeerError) and event.failing:
                assert error.host in event.failing, f"{where}: raised {error!r}, host {error.host}"
                assert f"host {error.host}" in text or f"hosts {error.host}" in text, f"{where}: raised {error!r}"
                assert error.peer_message in text, f"{where}: raised {error!r}, {error.peer_message!r}"
            if not (is_follower and is_random(self.case.config["source"])):
                pattern = self._text_of(event, error)
                assert pattern is None or re.fullmatch(pattern, str(error)), f"{where}: raised {error!r}, not {pattern}"
            if event.lanes and isinstance(error, meshfeed.SourceError) and not is_follower:
                mine = event.lanes & self.case.lanes_of(self.phase, self.host, self.first_step)
                assert error.lane_index in mine, f"{where}: raised {error!r} of lane {error.lane_index}, not {mine}"
            if isinstance(error, meshfeed.StalledError):
                late = self.case.odd_host if not is_follower else 0
                assert text.startswith(f"step {event.step}: "), f"{where}: raised {error!r}, not of step {event.step}"
                assert error.hosts == (late,), f"{where}: raised {error!r}, of the hosts {error.hosts}"
                assert error.waited_seconds >= SHORT_TIMEOUT_SECONDS, f"{where}: waited {error.waited_seconds} s"
                assert is_follower or f"host {late}:\nthread " in text, f"{where}: raised {error!r}, without its stacks"
        if event.kind == "StalledError":  # the source goes on once all that wait for it have given up
            self.world.put(f"{self.name}/stalled", self.host, None)
            waiting = self.phase.topology.hosts if is_random(self.case.config["source"]) else event.present
            self.world.gather(f"{self.name}/stalled", waiting)
            self.faults.released.set()

    def _text_of(self, event: Event, error: Exception) -> str | None:
        """A pattern of the whole text of an error, as far as the model knows it."""
        if isinstance(error, meshfeed.PeerError) and event.kind in ("Fatal", "RuntimeError", "SourceError"):
            said = re.escape(error.peer_message.removesuffix("."))
            before = rf"All hosts delivered the steps before {event.step}; see the log of host {error.host}\."
            return rf"hosts? [0-9, ]+ failed in the read of step {event.step}: {said}\. {before}"
        if isinstance(error, meshfeed.PeerError) and self.case.config["fault"] == "unopened":
            said = re.escape(error.peer_message)
            return rf"host {error.host} failed before its first batch: {said} See the log of host {error.host}\."
        if isinstance(error, meshfeed.StalledError):
            return self._text_of_stall(event)
        if event.lanes and isinstance(error, meshfeed.SourceError):
            lane, hint = f"lane {error.lane_index} of {self.case.num_lanes}", "so repeating .* would never end.*"
            of_mixture = rf"component '[ab]' of the mixture has no record in {lane} \(epoch \d+\), {hint}"
            return rf"{lane} has no record in epoch \d+, {hint}|{of_mixture}"
        return event.text

    def _text_of_stall(self, event: Event) -> str:
        waited = rf"\d+ s \(timeout_seconds={SHORT_TIMEOUT_SECONDS:g}\)\. "
        if self.host not in self.phase.topology.members:
            has = "has announced" if event.step else "has not begun this stream: it has announced"
            return rf"step {event.step}: host 0 {has} no further step for {waited}This host has no device .* host 0\."
        odd = self.case.odd_host
        records = r"(, )?(\d+|…)( \(\d+ in all\))?"
        lane, steps = r"step \d+: reading lane \d+ \(epoch \d+, after record \d+\)", r"reading steps? \d+( to \d+)?"
        doing = rf"\(host {odd} is ({lane}|{steps} \(records? ({records})+\)) for [0-9.]+ s\)"
        waited = rf"\(waited \d+ s, timeout_seconds={SHORT_TIMEOUT_SECONDS:g}\)"
        return rf"step {event.step}: host {odd} has not read it yet {doing} {waited}\. Check the log of that host; .*"

    def _leave(self) -> None:
        """Closes the feed before the others are done, perhaps because of an error of the loop."""
        self.left = True
        if self.case.config["fault"] == "leaves":
            self.feed.close()
            return
        with contextlib.suppress(FloatingPointError), self.feed:
            raise FloatingPointError(LOOP_ERROR)

    def _goes_on_alone(self, where: str, leaver: int, step: int) -> None:
        """The other hosts begin anew, and learn that one is gone for good."""
        hosts = self.phase.topology.hosts
        if self.host >= hosts:
            return
        self.world.put(f"{self.name}/left", self.host, True)
        if not all(self.world.gather(f"{self.name}/left", hosts - 1)):  # some are at the end
            return
        self.feed.reset()
        self._check_leaver(self._raises(f"{where}, after reset", ("PeerError",)), leaver, step, where)

    def _check_leaver(self, error: meshfeed.PeerError, host: int, step: int, where: str) -> None:
        assert error.host == host, f"{where}: raised {error!r}, host {error.host}"
        assert f"host {host} closed its feed at step {step}" in str(error), f"{where}: raised {error!r}"
        assert str(error).endswith(f"ee the log of host {host}."), f"{where}: raised {error!r}"
        if self.case.config["fault"] == "dies" and not self.left:
            self.left = True
            self._goes_on_alone(where, host, step)
        because = f" after FloatingPointError: {LOOP_ERROR}" if self.case.config["fault"] == "dies" else ""
        wanted = f"closed its feed at step {step}{because}"
        assert error.peer_message == wanted, f"{where}: {error.peer_message!r}"
        self.left = True

    def check_planned(self) -> None:
        """Whether the files of all lanes were asked for ahead of their second read."""
        asked, case = self.faults.planned, self.case
        # A feed may read ahead before it has the state, perhaps in other lanes.
        num_lanes = {case.num_lanes, case.num_lanes_before_state(self.phase)}
        sizes = {size // lanes for _, size in self.phase.schedule for lanes in num_lanes}
        sizes |= set() if case.config["reshard"] == "none" else {1, 2, 3}  # of lanes that are read forward
        assert {count for _, count in asked} <= sizes, f"files of {asked} were asked for, not of reads of {sizes}"
        lanes = case.lanes_of(self.phase, self.host, self.first_step)
        plain = {"script": "run", "reshard": "none", "weights": "none", "num_workers": 0}
        known = plain == {name: case.config[name] for name in plain} and not self.left
        if known and self.delivered["batches"] >= 2:
            # A lane that ends with its first read has no further files.
            longer = {lane for lane in lanes if case.outlasts(lane, max(sizes))}
            found = {lane for lane, _ in asked}
            assert longer <= found <= lanes, f"files of {asked} were asked for, not of the lanes {longer} of {lanes}"

    def _count(self, batch: Batch) -> None:
        case = self.case
        mine = case.rows_read(self.phase, self.host, len(batch.rows))
        if case.config["source"] == "host_batches_vary":  # the size of its padding comes from others
            self.has_structure = False
        self.has_structure |= case.shows_structure(self.phase, self.host, batch)
        arrays = flat(batch.arrays("mask" if case.config["mask"] else None))
        each = sum(self._bytes_of_row(name, leaf) for name, leaf in arrays.items())
        self.moved, self.lanes_from = True, self.first_step
        self.has_read |= any(batch.rows[row] is not None for row in mine)
        self.delivered["batches"] += 1
        self.delivered["records"] += batch.position - batch.before
        self.delivered["bytes"] += each * len(mine) if self.has_structure else 0
        self.delivered["skipped_records"] += case.num_replaced(self.phase, self.host, batch, self.first_step)
        self._check_replaced(batch)

    def _check_replaced(self, batch: Batch) -> None:
        """The warning of the bad records of a delivered batch."""
        mine = self.case.bad_of(self.phase, self.host, batch, self.first_step)
        if self.world.warnings() is None or not mine:
            return
        found = [args for args in _warned(self.world, "replaced") if args[1] == batch.step]
        wanted = {(len(mine), batch.step, record_id, BAD_RECORD) for record_id in mine}
        assert wanted & set(found), f"step {batch.step}: warned of {found}, not of one of {wanted}"

    def _bytes_of_row(self, name: str, leaf: np.ndarray) -> int:
        """Bytes of a row of a leaf that this host reads: of columns in memory and files only those that it holds."""
        if self.case.config["source"] not in ("memory", "tokens") or self.phase.load != "sharded":
            return leaf.nbytes // len(leaf)
        held = np.zeros(leaf.shape[1:], bool)
        for index in blocks_of(self.phase, name, self.host, leaf.shape).values():
            held[index[1:]] = True
        return int(held.sum()) * leaf.itemsize

    def _check_log(self, batch: Batch, where: str) -> None:
        lines = self.world.steps()
        if lines is None:
            return
        case, source = self.case, self.case.config["source"]
        found = json.loads(lines[-1])
        wanted = {"step": batch.step, "host": self.host, "position": batch.before, "global_batch_size": len(batch.rows)}
        names = {"time", "feed", "wait_seconds", "transfer_seconds", "read_seconds", "decode_seconds", "bad_records"}
        if is_random(source):
            assert batch.ids is not None
            mine = case.rows_read(self.phase, self.host, len(batch.rows))
            wanted["record_ids"] = [batch.ids[row] for row in mine if row < len(batch.ids)]
            assert isinstance(found.pop("files"), list), where
        elif source in STREAMS:
            lanes = sorted(case.lanes_of(self.phase, self.host, self.first_step))
            upto = Steps(self.sizes, self.phase.schedule).position_of(batch.step + 1) // case.num_lanes
            wanted["lanes"] = {str(lane): len(self.model.upto(lane, upto)) for lane in lanes}
        assert {name: found.get(name) for name in wanted} == wanted, f"{where}: the log says {found}, not {wanted}"
        assert found.keys() - names == wanted.keys(), f"{where}: the log has {sorted(found)}"
        assert len(found.get("bad_records", ())) == case.num_replaced(self.phase, self.host, batch, self.first_step), (
            where
        )

    def _check_stats(self, where: str) -> None:
        stats = self.feed.stats()
        found = {name: getattr(stats, name) for name in self.delivered}
        assert found == self.delivered, f"{where}: stats {found}, not {self.delivered}"
        since = self.feed.stats(since=self.stats)
        more = {name: value - getattr(self.stats, name) for name, value in found.items()} if self.stats else found
        found = {name: getattr(since, name) for name in found}
        assert found == more, f"{where}: stats since the last {found}, not {more}"
        self.stats = stats
        assert 0 <= stats.startup_seconds <= stats.wait_seconds, f"{where}: {stats}"
        assert (stats.transfer_seconds > 0) == bool(stats.batches), f"{where}: {stats}"
        assert stats.read_seconds > 0 or not self.has_read, f"{where}: {stats}"
        alone = self.phase.topology.hosts == 1 and not self.resharded and self.host == 0
        assert not (alone and stats.peer_wait_seconds), f"{where}: {stats}"
        assert 0 <= stats.peer_wait_seconds <= time.monotonic() - self.began, f"{where}: {stats}"
        passing = self.faults.passing if self.case.config["fault"] == "transient" else 0
        # Steps that are read together are then read again one by one.
        bad = self.case.config["fault"] in (*BAD, "fatal")
        elsewhere = self.case.config["num_workers"] != 0 and self.world.warnings() is None  # in processes of real hosts
        assert stats.retries <= passing or bad or elsewhere, f"{where}: {stats.retries} retries after {passing} faults"
        settings = self.case.settings(self.phase)
        tuned = {name for name in ("prefetch", "num_threads", "num_workers") if settings[name] == "auto"}
        shown = set(stats.tuned or ()) - {"state", "reason", "tried"}
        assert shown == tuned, f"{where}: tuned {shown}, not {tuned}"

    def _raises(self, where: str, kinds: tuple[str, ...]) -> Exception:
        try:
            next(self.feed)
        except Exception as error:
            if type(error).__name__ not in kinds:
                raise AssertionError(f"{where}: raised {error!r}, not {kinds}") from error
            return error
        else:
            raise AssertionError(f"{where}: gave a batch after {self.feed.step - 1} steps, not {kinds}")

    def _save(self, event: Event, where: str, key: str) -> None:
        state = self.feed.get_state()
        assert state == json.loads(json.dumps(state)), where
        self._check_state(state, event, where)
        self.world.put(f"{self.name}/{key}", self.host, state)

    def _merge(self, event: Event, where: str) -> None:
        """The states of all hosts together, when a phase has ended: one host compares them."""
        if self.case.config["source"] == "host_batches_once" and event.step:
            self._cannot_go_back(event, where)
        self.world.put(f"{self.name}/{where}", self.host, self.feed.get_state())
        if self.host == min(self.phase.topology.members):
            states = self.world.gather(f"{self.name}/{where}", event.present)
            self.world.check_rounds()
            self._check_merged(meshfeed.merge_states(states), event, where)

    def _cannot_go_back(self, event: Event, where: str) -> None:
        state = self.feed.get_state()
        with pytest.raises(meshfeed.StateMismatchError) as raised:
            self.feed.set_state(state)
        found = raised.value.field, raised.value.saved, raised.value.current
        wanted = f"hosts.{self.host}", f"{event.step} batches", "an iterator that can be read once"
        assert found == wanted, f"{where}: raised {raised.value!r}, not of {wanted}"
        assert self.feed.get_state() == state, where

    def _check_state(self, state: Any, event: Event, where: str) -> None:
        """What a state says of the stream and of where it is."""
        case = self.case
        assert state["position"] == event.position, f"{where}: position {state['position']}, not {event.position}"
        assert state.get("step", event.step) == event.step, f"{where}: step {state['step']}, not {event.step}"
        follows = self.host not in self.phase.topology.members
        if not (follows and is_random(case.config["source"])):  # which learns of no bad records
            count = state.get("num_skipped", 0)
            assert count == len(event.bad), f"{where}: the state counts {count} bad records, not {len(event.bad)}"
        source, fingerprint = case.config["source"], state["fingerprint"]
        wanted = {"num_epochs": case.config["num_epochs"], "end": case.config["end"]}
        names = {"source", *wanted}
        if source in HOST_BATCHES:
            wanted |= {"elastic": False, "processes": case.processes, "source": {"kind": "host_batches"}}
            if source == "host_batches_vary":
                wanted["end"] = "drop"
            names |= wanted.keys()
            assert set(state["hosts"] or {}) <= {str(self.host)}, f"{where}: hosts {sorted(state['hosts'])}"
        else:
            wanted["seed"] = SEED
            names |= {"seed"}
        if is_random(source):
            names = set(fingerprint) | names | {"order"}
            assert set(fingerprint["order"]) == {"algorithm", "version"}, f"{where}: order {fingerprint['order']}"
        elif source in STREAMS:
            wanted["num_lanes"] = case.num_lanes
            names |= {"num_lanes"} | ({"mixture"} if source == "stream_mixture" else set())
            lanes = case.lanes_of(self.phase, self.host, self.lanes_from) if self.moved else set(range(case.num_lanes))
            assert set(state["lanes"]) == {str(lane) for lane in lanes}, f"{where}: lanes {sorted(state['lanes'])}"
            fields = {"records", "epoch", "taken", "state", "skip", "ended", "digest"}
            assert all(set(lane) == fields for lane in state["lanes"].values()), f"{where}: {state['lanes']}"
            self._check_lanes(state["lanes"], event, where)
        if "mixture" in fingerprint:
            mixture = fingerprint["mixture"]
            added, stages = mixture.get("added", []), [stage[:2] for stage in mixture["stages"]]
            assert added == event.added, f"{where}: stages {added} were added, not {event.added}"
            assert stages == event.stages, f"{where}: stages begin at {stages}, not {event.stages}"
        found = {name: fingerprint.get(name) for name in wanted}
        assert found == wanted, f"{where}: the state is of {found}, not {wanted}"
        assert set(fingerprint) == names, f"{where}: the fingerprint has {sorted(fingerprint)}, not {sorted(names)}"
        assert state["segments"] == event.segments, f"{where}: segments {state['segments']}, not {event.segments}"

    def _check_lanes(self, lanes: Any, event: Event, where: str) -> None:
        """Where each lane of a state is."""
        case = self.case
        upto = Steps(event.sizes, self.phase.schedule).position_of(event.step) // case.num_lanes
        found = {lane: entry["records"] for lane, entry in lanes.items()}
        wanted = {lane: len(event.model.upto(int(lane), upto)) for lane in lanes}
        assert found == wanted, f"{where}: lanes with {found} records, not {wanted}"
        for lane, entry in lanes.items():
            assert entry["skip"] <= entry["taken"], f"{where}: lane {lane}: {entry}"
            if entry["ended"]:
                assert wanted[lane] <= upto, f"{where}: lane {lane} has ended: {entry}"
            elif wanted[lane] < upto:
                raise AssertionError(f"{where}: lane {lane} has not ended: {entry}")

    def _set(self, event: Event, where: str, key: str) -> None:
        states = self.world.gather(f"{self.name}/{key}", self.case.savers(key))
        merged = meshfeed.merge_states(states)
        self._check_merged(merged, event, where)
        self._refuses_wrong_states(merged, event.step, event.total, where)
        self.feed.set_state(merged)
        self.has_structure, self.moved, self.first_step, self.state = False, False, event.step, merged
        self.set_at = event.step
        again = self.feed.get_state()
        assert again["position"] == merged["position"], where

    def _refuses_wrong_states(self, state: Any, step: int, total: int | None, where: str) -> None:
        """Whether the feed refuses what resembles a state, and is as before."""
        before = self.feed.get_state()
        lanes = self.case.lanes_of(self.phase, self.host, step) if self.case.config["source"] in STREAMS else set()
        for field, wrong in wrong_states(state, self.host, lanes, total):
            try:
                self.feed.set_state(wrong)
            except meshfeed.StateMismatchError as error:
                if not error.field.startswith(field):
                    raise AssertionError(f"{where}: {error!r}, not about {field!r}") from error
            else:
                raise AssertionError(f"{where}: took a state with another {field!r}: {wrong}")
            at = self.feed.step, self.feed.position, self.feed.get_state()
            assert at == (before.get("step", at[0]), before["position"], before), f"{where}: moved to {at}"

    def _check_merged(self, state: Any, event: Event, where: str) -> None:
        count = state.get("num_skipped", 0)
        assert count == len(event.bad), f"{where}: the state counts {count} bad records, not {len(event.bad)}"
        ledgers = (state.get("skipped") or {}).values()
        ledgers = list(ledgers)
        bad = {(entry[0], entry[1], entry[3]) for ledger in ledgers for entry in ledger}
        with_reason = 256 // self.case.processes
        reasons = {entry[2] for ledger in ledgers for entry in ledger[:with_reason]}
        assert reasons <= {BAD_RECORD}, f"{where}: the state gives the reasons {reasons}"
        assert not state.get("num_unlisted"), f"{where}: {state['num_unlisted']} records are not listed"
        lists_all = (
            self.case.config["feed"] == "local" or self.case.config["reshard"] == "none"
        )  # also of hosts that left
        assert bad == event.bad if lists_all else bad <= event.bad, (
            f"{where}: the state lists the bad records {bad}, not {event.bad}"
        )
        if "lanes" in state and state["lanes"] is not None:
            assert len(state["lanes"]) == self.case.num_lanes, f"{where}: lanes {sorted(state['lanes'])}"
            records = sum(lane["records"] for lane in state["lanes"].values())
            assert records == event.position, f"{where}: {records} records in the lanes"

    def _reset(self, event: Event, where: str) -> None:
        self.feed.reset()
        self.has_structure, self.moved, self.first_step, self.state = False, False, 0, None

    def _ahead(self, event: Event, where: str) -> None:
        """A batch more on some hosts, unless another has gone on to the next action."""
        if self.host % 2 == 0 or self.host not in self.phase.topology.members:
            return
        self.sizes = event.sizes
        for batch in event.batches:
            try:
                next(self.feed)
            except meshfeed.PeerError as error:
                if "called reshard" not in str(error):
                    raise AssertionError(f"{where}: raised {error!r}") from error
                continue
            assert self.feed.step == batch.step + 1, f"{where}: at {self.feed.step}, not {batch.step + 1}"
            self._count(batch)

    def _reshard(self, event: Event, where: str, topology: Any, how: str = "") -> None:
        self.gone = self.host in event.gone
        if self.host in event.killed:
            self.world.kill(self.host)
        elif event.killed and self.host not in event.told:
            self._goes_on_until_told(event, where)
        if self.gone and self.host not in event.refused:
            self.feed.close()
            return
        devices = self.world.devices(self.case.processes, topology.devices)
        sharding = sharding_of(self.case, dataclasses.replace(self.phase, topology=topology), devices)
        if event.late is not None:
            self._comes_in_vain(event, where, topology, sharding)
            return
        refused = self.host in event.refused
        if event.unable:
            if refused:
                self._unless_refused(where, True, lambda: self.feed.reshard(sharding))
            else:
                self._unable_to_reshard(event, where, sharding)
            self._wait_for_all(event, where)  # a host that calls again may meet those that have not seen the failure
            return
        self._unless_refused(where, refused, lambda: self.feed.reshard(sharding))
        if self.gone:
            self.feed.close()
        assert event.phase is not None
        self.resharded = True
        self.phase, self.has_structure, self.first_step = event.phase, False, event.step
        if not refused:  # the state has no other lanes than this host reads
            self.moved, self.lanes_from = True, event.step

    def _goes_on_until_told(self, event: Event, where: str) -> None:
        """Takes batches that need no host that was killed, until this host learns that another has called reshard."""
        hosts = self.phase.topology.members
        if self.host not in hosts and (is_random(self.case.config["source"]) or self.case.config["outside"] == "late"):
            return  # it waits for no other host, or comes when the others have taken their batches
        self.sizes = event.sizes
        try:
            for batch in event.batches:
                arrays = next(self.feed)
                self._check_arrays(batch, arrays, f"{where}, step {batch.step}")
                self._count(batch)
            if not self.case.endless:
                next(self.feed)
        except StopIteration:
            pass
        except meshfeed.PeerError as error:
            said = rf"called reshard of its feed at step {event.step}"
            known = error.host in hosts and error.host not in (*event.killed, self.host)
            if not known or error.peer_message != said or not str(error).startswith(f"host {error.host} {said}. "):
                raise AssertionError(f"{where}: raised {error!r}, of host {error.host}") from error
        except Exception as error:
            raise AssertionError(f"{where}: raised {error!r}") from error
        else:
            assert self.case.endless, f"{where}: gave a batch after the end"

    def _comes_in_vain(self, event: Event, where: str, topology: Any, sharding: Any) -> None:
        """One host does not come to the meeting, until the others have given up; then it may come alone."""
        assert event.late is not None
        others = tuple(host for host in topology.members if host != event.late)
        if self.host in others:
            self._waits_in_vain(sharding, (event.late,), where)
        self._wait_for_all(event, where)
        if self.host == event.late == 0 and others:  # where the others have to come again
            self._waits_in_vain(sharding, others, where)
        self._wait_for_all(event, f"{where}, alone")
        if self.host in others or self.host == event.late == 0:
            self.has_structure, self.first_step = False, event.step

    def _waits_in_vain(self, sharding: Any, late: tuple[int, ...], where: str) -> None:
        try:
            self.feed.reshard(sharding)
        except meshfeed.StalledError as error:
            texts = (f"did not arrive within {SHORT_TIMEOUT_SECONDS:g} s", "or has not called reshard")
            if error.hosts != late or not all(text in str(error) for text in texts):
                raise AssertionError(f"{where}: raised {error!r}, of the hosts {error.hosts}, not {late}") from error
        except Exception as error:
            raise AssertionError(f"{where}: raised {error!r}") from error
        else:
            raise AssertionError(f"{where}: did not wait for the hosts {late}")

    def _unable_to_reshard(self, event: Event, where: str, sharding: Any) -> None:
        """Some hosts have a mesh of the same hosts that divides no batch."""
        kind: Any = meshfeed.PeerError
        if self.host in event.unable:
            mesh = jax.tree.leaves(sharding)[0] if isinstance(sharding, dict) else sharding
            devices = list(np.asarray(getattr(mesh, "mesh", mesh).devices).flat)
            kind, sharding = meshfeed.PlanError, Mesh(np.array(devices * 1009), ("data",))
            if self.case.config["feed"] == "remote":  # which may find no CPU beside each of them
                kind = meshfeed.PlanError, meshfeed.SettingsError
        try:
            self.feed.reshard(sharding)
        except kind as error:
            text = str(error)
            if kind is meshfeed.PeerError and not (
                error.host in event.unable
                and error.peer_message.startswith("PlanError: ")
                and text.startswith(f"host {error.host} cannot continue on this sharding: ")
                and text.endswith(f". See the log of host {error.host}.")
                and error.peer_message.removesuffix(".") in text
            ):
                raise AssertionError(f"{where}: raised {error!r}, not about the hosts {event.unable}") from error
        except Exception as error:
            raise AssertionError(f"{where}: raised {error!r}") from error
        else:
            raise AssertionError(f"{where}: did not fail")
        self.has_structure, self.first_step = False, event.step

    def _weights(self, event: Event, where: str, weights: Any, later: int | None) -> None:
        if event.present > self.phase.topology.hosts and self.case.config["fault"] not in ODD:
            # Hosts that follow may be no more than 15 generations behind.
            self._wait_for_all(event, where)
        from_step = None if later is None else self.feed.step + later
        refused = self.host in event.refused
        self._unless_refused(where, refused, lambda: self.feed.set_weights(weights, from_step=from_step))
        if not refused:
            self.has_structure, self.first_step = False, event.step

    def _wait_for_all(self, event: Event, where: str) -> None:
        self.world.put(f"{self.name}/{where}", self.host, None)
        self.world.gather(f"{self.name}/{where}", event.present)

    def _unless_refused(self, where: str, refused: bool, call: Callable[[], None]) -> None:
        try:
            call()
        except meshfeed.SettingsError as error:
            if not refused:
                raise AssertionError(f"{where}: raised {error!r}") from error
        except Exception as error:
            raise AssertionError(f"{where}: raised {error!r}") from error
        else:
            assert not refused, f"{where}: not refused"

    def _len(self, event: Event, where: str) -> None:
        try:
            found = len(self.feed)
        except TypeError:
            found = None
        assert found == event.length, f"{where}: length {found}, not {event.length}"

    def _ids(self, event: Event, where: str) -> None:
        if not is_random(self.case.config["source"]):  # which alone has record ids
            calls = {"record_ids": lambda: self.feed.record_ids(0), "read": lambda: self.feed.read([0])}
            if self.case.config["source"] in HOST_BATCHES:
                calls["replay"] = lambda: self.feed.replay(0)
            for name, call in calls.items():
                try:
                    call()
                except meshfeed.SourceError:
                    continue
                raise AssertionError(f"{where}: {name} gave something")
        for step, wanted in (event.ids or {}).items():
            try:
                found = self.feed.record_ids(step).tolist()
            except IndexError:
                found = None
            assert found == wanted, f"{where}: record_ids({step}) = {found}, not {wanted}"

    def _spec(self, event: Event, where: str) -> None:
        if event.following is not None:
            batch = event.following.arrays("mask" if self.case.config["mask"] else None)
            wanted = {
                name: (leaf.shape, narrowed(leaf, self.case.config["x64"]).dtype) for name, leaf in flat(batch).items()
            }
            spec = self._flat(self.feed.element_spec)
            found = {name: (leaf.shape, leaf.dtype) for name, leaf in spec.items()}
            assert found == wanted, f"{where}: element_spec {found}, not {wanted}"
            for name, leaf in spec.items():
                index = blocks_of(self.phase, name, self.host, leaf.shape)
                of = leaf.sharding.devices_indices_map(leaf.shape)
                blocks = {self._number(device): block for device, block in of.items() if self._is_mine(device)}
                assert blocks.keys() == index.keys(), f"{where}: element_spec of {name} is on {sorted(blocks)}"
                for number, block in blocks.items():
                    whole = tuple(slice(*part.indices(size)[:2]) for part, size in zip(block, leaf.shape, strict=True))
                    assert whole == index[number], f"{where}: element_spec of {name}: {whole}, not {index[number]}"

    def _is_mine(self, device: Any) -> bool:
        return self._number(device) // self.phase.topology.devices == self.host

    def _number(self, device: Any) -> int:
        devices = self.world.devices(self.case.processes, self.phase.topology.devices)
        return next(number for number, one in enumerate(devices) if one.id == device.id)

    def _read(self, event: Event, where: str) -> None:
        if event.read is None:
            return
        ids, batch = event.read
        for given in (ids, np.array(ids, np.uint64)):
            found, wanted = self._flat(self.feed.read(given)), flat(batch.arrays(None))
            assert sorted(found) == sorted(wanted), f"{where}: read({ids}) has the leaves {sorted(found)}"
            for name, leaf in wanted.items():
                assert _same(found[name], leaf), f"{where}: read({ids}), leaf {name}: {found[name]}, not {leaf}"
        assert all(len(leaf) == 0 for leaf in self._flat(self.feed.read([])).values()), f"{where}: read([])"
        far = -1 if self.case.config["source"] in DOCUMENTS else 1 << 61  # whose ids count on from epoch to epoch
        for wrong, kind in (([-1], "SourceError"), ([ids[0], far], "SourceError"), ([ids], "SettingsError")):
            try:
                self.feed.read(wrong)
            except meshfeed.MeshfeedError as error:
                if type(error).__name__ != kind or str(np.ravel(wrong)[-1]) not in str(error):
                    raise AssertionError(f"{where}: read({wrong}) raised {error!r}") from error
            else:
                raise AssertionError(f"{where}: read({wrong}) gave records")

    def _replay(self, event: Event, where: str) -> None:
        mask_key = "mask" if self.case.config["mask"] else None
        # Where all are replayed, hosts take turns: all of them on each host took a third of the time of all configurations.
        hosts = self.phase.topology.hosts if len(event.replayed) > 3 else 1
        for batch in event.replayed:
            if batch.step % hosts != self.host % hosts:
                continue
            after_state = self.state is not None and batch.step >= self.set_at
            for state in (None, self.state) if after_state else (None,):
                found, wanted = self._flat(self.feed.replay(batch.step, state=state)), flat(batch.arrays(mask_key))
                what = f"{where}: replay({batch.step}{', state' if state else ''})"
                assert sorted(found) == sorted(wanted), f"{what} has the leaves {sorted(found)}"
                for name, leaf in wanted.items():
                    assert _same(found[name], leaf), f"{what}, leaf {name}: {found[name]}, not {leaf}"


def _same(found: np.ndarray, wanted: np.ndarray) -> bool:
    """Whether two arrays are the same bit for bit, but perhaps for the order of bytes, which numpy's stacking changes."""
    found, wanted = narrowed(found, x64=True), narrowed(wanted, x64=True)
    return found.dtype == wanted.dtype and found.shape == wanted.shape and found.tobytes() == wanted.tobytes()


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
