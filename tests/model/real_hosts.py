"""Cases on real processes: many in one spawn, each host compares its own shards with the reference model."""

from __future__ import annotations

import glob
import json
import logging
import math
import pathlib
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from meshfeed.testing import HostPool, HostRunError

HOSTS, DEVICES = 4, 2
START_SECONDS = 120.0


class _World:
    """The devices of the job, and files through which hosts exchange states."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder

    def warnings(self) -> None:
        return None

    def steps(self) -> None:
        return None

    def check_rounds(self) -> None:
        pass

    def devices(self, processes: int, per_host: int) -> list[Any]:
        import jax

        found = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
        assert len(found) == processes * per_host or processes == 1
        return found[: processes * per_host]

    def check(self, name: str, array: Any, wanted: np.ndarray, phase: Any, host: int) -> None:
        from driver import blocks_of, check_block

        assert array.shape == wanted.shape, f"shape {array.shape}, not {wanted.shape}"
        assert array.committed, "JAX may move it to other devices"
        per_host = phase.topology.devices
        expected = blocks_of(phase, name, host, wanted.shape)
        numbers = {device: i for i, device in enumerate(self.devices(phase.topology.processes, per_host))}
        found = {numbers[shard.device]: shard for shard in array.addressable_shards}
        assert sorted(found) == sorted(expected), f"blocks on the devices {sorted(found)}, not {sorted(expected)}"
        for number, index in expected.items():
            check_block(np.asarray(found[number].data), wanted, index)

    def put(self, key: str, host: int, value: Any) -> None:
        path = self._folder / f"{key.replace('/', '.')}.{host}"
        path.with_suffix(".part" + path.suffix).write_text(json.dumps(value))
        path.with_suffix(".part" + path.suffix).rename(path)

    def gather(self, key: str, hosts: int, seconds: float = 20.0) -> list[Any]:
        end = time.monotonic() + seconds
        pattern = f"{glob.escape(key.replace('/', '.'))}.[0-9]"  # of any hosts: some may have closed their feeds
        while len(paths := sorted(self._folder.glob(pattern))) < hosts:
            assert time.monotonic() < end, f"saved by {len(paths)} of {hosts} hosts: {key}"
            time.sleep(0.002)
        return [json.loads(path.read_text()) for path in paths]


def play_here(case: Any, folder: str) -> None:
    """Plays a case of one host in this process, on its devices.

    Raises:
      AssertionError: something is not as the model says.
    """
    from driver import callers_settings, play_host, types_of

    from meshfeed._src.arrays import device_put

    def changed(*arguments: Any, **keywords: Any) -> Any:
        raise TypeError("got an unexpected argument")

    assert case.processes == 1
    world, put = _World(pathlib.Path(tempfile.mkdtemp(dir=folder))), case.config.get("put", "private")
    probe, give_up = device_put.probe_fast_call, device_put.DevicePut.give_up
    given_up: list[Exception] = []

    def note(self: Any, error: Exception) -> None:
        given_up.append(error)
        give_up(self, error)

    device_put.probe_fast_call = {"private": probe, "public": lambda: None, "changed": lambda: changed}[put]
    device_put.DevicePut.give_up = note
    try:
        with types_of(case), callers_settings(case):
            play_host(case, 0, world, "case")
    finally:
        device_put.probe_fast_call, device_put.DevicePut.give_up = probe, give_up
    assert put == "changed" or not given_up, f"JAX's call is not used any more: {given_up}"


def play(numbered: Sequence[tuple[int, dict[str, Any]]], folder: str) -> list[tuple[int, str]]:
    """What each host runs: plays configurations until one fails on a host; returns what is wrong on this one, by number."""
    import jax
    from configurations import Case
    from driver import play_host

    logging.disable(logging.ERROR)
    host, world = jax.process_index(), _World(pathlib.Path(folder))
    failures: list[tuple[int, str]] = []
    for number, config in numbered:
        pathlib.Path(folder, f"at.{host}").write_text(str(number))
        try:
            play_host(Case(config, folder, processes=HOSTS), host, world, f"case{number}")
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            if not isinstance(error, AssertionError):
                text += "\n" + "".join(traceback.format_exception(error)[-4:])
            failures.append((number, text))
        # Hosts begin the next one together.
        world.put(f"done{number}", host, bool(failures))
        if any(world.gather(f"done{number}", HOSTS, 90.0)):
            break  # hosts may be at different collectives and numbers of feeds
    return failures


def pool() -> HostPool:
    """The hosts; they start at the first run."""
    return HostPool(HOSTS, DEVICES, env={"PYTHONPATH": str(pathlib.Path(__file__).parent)})


def play_all(
    hosts: HostPool,
    configs: Sequence[dict[str, Any]],
    folder: str,
    *,
    seconds_each: float = 4.0,
    spare_seconds: float = 60.0,
    at_once: int = 40,
    end: float = math.inf,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[int, str]:
    """Plays configurations on the hosts of a pool, and begins no further ones after ``end`` (``time.monotonic()``).

    Returns:
      The number of each configuration that failed → what the hosts say. Where hosts hang, the configuration at which
      they did. Those after it are played on new processes.
    """
    failures: dict[int, str] = {}
    waiting = list(enumerate(configs))
    while waiting and time.monotonic() < end:
        now, waiting = waiting[:at_once], waiting[at_once:]
        try:
            results = hosts.run(
                "real_hosts:play", now, folder, timeout_seconds=seconds_each * len(now) + spare_seconds, grace_seconds=5
            )
        except (HostRunError, TimeoutError) as error:
            at = min(int(path.read_text()) for path in pathlib.Path(folder).glob("at.*"))
            failures[at] = f"hangs or dies: {str(error)[:4000]}"
            waiting = [(number, config) for number, config in now if number > at] + waiting
        else:
            found = [(number, f"host {result.host}: {text}\n") for result in results for number, text in result.value]
            for number, text in found:
                failures[number] = failures.get(number, "") + text
            if found:
                hosts.close()
                waiting = [one for one in now if one[0] > found[0][0]] + waiting
        tell(
            f"{len(configs) - len(waiting)} of {len(configs)} configurations on real processes, {len(failures)} failed"
        )
    return failures
