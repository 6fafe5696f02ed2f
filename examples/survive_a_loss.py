"""Trains through the loss of a host: the others continue in their processes, on the devices that are left.

Start three hosts on this machine; host 1 kills itself after step 20::

    python examples/survive_a_loss.py

On several machines, run on each, with its own number::

    python examples/survive_a_loss.py --coordinator host0:8476 --num-hosts 4 --host 0

Every global batch is the same as without the loss, and each is trained on once. Host 0 runs JAX's coordination service: if
it is lost, JAX ends the others, and the job restarts from its last checkpoint.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshfeed

STEPS, BATCH, KILLED_AFTER, HEARTBEAT_SECONDS = 60, 24, 20, 10


def mesh_of(devices: Sequence[Any]) -> Mesh:
    devices = sorted(devices, key=lambda device: (device.process_index, device.id))
    return Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))


@jax.jit
def train_step(weights: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    def loss(weights: jax.Array) -> jax.Array:
        return jnp.mean((batch["x"] @ weights - batch["y"]) ** 2)

    value, gradient = jax.value_and_grad(loss)(weights)
    return weights - 0.05 * gradient, value


def devices_left(before: int) -> list[Any]:
    """Waits until JAX has noticed which hosts are gone."""
    deadline = time.monotonic() + 6 * HEARTBEAT_SECONDS
    while time.monotonic() < deadline:
        try:
            with multihost_utils.live_devices(jax.devices()) as live:
                if len(live) < before:
                    return list(live)
                time.sleep(0.2)
        except Exception as error:  # a host was lost in the block
            print(f"host {jax.process_index()}: {str(error).splitlines()[0]}", file=sys.stderr)
    raise TimeoutError("no host is gone")


def train(killed: int | None) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS * BATCH, 8)).astype(np.float32)
    source = {"x": x, "y": x @ np.arange(8, dtype=np.float32)}
    mesh = mesh_of(jax.devices())
    sharding = NamedSharding(mesh, P("data"))
    feed = meshfeed.Feed(source, sharding, global_batch_size=BATCH, shuffle=True, timeout_seconds=60)
    here = jax.process_index()

    def place(weights: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(weights.shape, NamedSharding(mesh, P()), lambda index: weights[index])

    weights = place(np.zeros(8, np.float32))
    # What to continue from, by step. A step can end on one host and fail on another, so two are kept.
    kept = {0: (feed.get_state(), np.asarray(weights))}
    while True:
        try:
            for batch in feed:
                weights, loss = train_step(weights, batch)
                value = float(loss)  # waits for the step: its errors are raised here
                kept = {feed.step: (feed.get_state(), np.asarray(weights)), **dict(list(kept.items())[:1])}
                if feed.step % 20 == 0:
                    print(f"host {here}, step {feed.step}, {mesh.size} devices, loss {value:.4f}", flush=True)
                if here == killed and feed.step == KILLED_AFTER:
                    os.kill(os.getpid(), signal.SIGKILL)
            break
        except (meshfeed.PeerError, meshfeed.StalledError, jax.errors.JaxRuntimeError, ValueError) as error:
            print(f"host {here}: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
            feed.set_state(next(iter(kept.values()))[0])  # after the last step that ended here
            mesh = mesh_of(devices_left(mesh.size))
            feed.reshard(NamedSharding(mesh, P("data")))
            weights = place(kept[feed.step][1])  # the hosts may have agreed on the step before
            print(f"host {here}, continues at step {feed.step} on {mesh.size} devices", flush=True)
    feed.close()
    if here == 0:
        time.sleep(5)  # JAX's shutdown does not wait for recoverable hosts, and the others still need its service


def start_all(num_hosts: int) -> int:
    """Starts the hosts as processes of this machine; returns 1 if one fails that was not to be killed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, __file__, "--coordinator", address, "--num-hosts", str(num_hosts), "--kill", "1"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    hosts = [subprocess.Popen([*command, "--host", str(host)], env=env) for host in range(num_hosts)]
    codes = [host.wait() for host in hosts]
    return int(any(code != (-signal.SIGKILL if host == 1 else 0) for host, code in enumerate(codes)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coordinator", help="address of host 0, such as host0:8476; default: start all hosts here")
    parser.add_argument("--num-hosts", type=int, default=3)
    parser.add_argument("--host", type=int)
    parser.add_argument("--kill", type=int, help="a host that kills itself")
    options = parser.parse_args()
    if options.coordinator is None:
        return start_all(options.num_hosts)
    jax.config.update("jax_enable_recoverability", True)  # JAX does not end the others when a host is lost
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        options.coordinator, options.num_hosts, options.host, heartbeat_timeout_seconds=HEARTBEAT_SECONDS
    )
    train(options.kill)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
