"""JPEG to 224 × 224 by Ray actors on 1, 2 and 4 local nodes, then with node kills: images/s, differences, object store.

All nodes are on this machine and share its cores: the rates show what Ray costs beside worker processes, not how decoding
scales over machines. The batches are compared, by digest, with those of ``num_workers=0``.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash

from benchmarks import _data
from benchmarks._measure import Table, main, make_mesh, with_cpu_devices
from benchmarks.images import photographs

STORE_BYTES = 100 << 20  # of each node


class Nodes:
    """A cluster whose head runs no actors."""

    def __init__(self) -> None:
        import ray
        from ray.cluster_utils import Cluster

        checks = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_timeout_ms": 10_000}
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES, "_system_config": checks}
        self._cluster = started(lambda: Cluster(initialize_head=True, head_node_args=head))
        ray.init(address=self._cluster.address, log_to_driver=False, configure_logging=False)

    def grow(self, number: int) -> None:
        while len(self._cluster.worker_nodes) < number:
            started(lambda: self._cluster.add_node(num_cpus=4, object_store_memory=STORE_BYTES))

    def replace(self, turn: int) -> None:
        """Kills one node, as SIGKILL does, and adds one."""
        nodes = sorted(self._cluster.worker_nodes, key=lambda node: node.node_id)
        self._cluster.remove_node(nodes[turn % len(nodes)], allow_graceful=False)
        self.grow(len(nodes))

    def shutdown(self) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()


def started(start: Callable[[], Any]) -> Any:
    """Ray gives a node 30 s to start, which is not always enough on a busy machine."""
    for _ in range(3):
        try:
            return start()
        except Exception as error:
            if "timed out" not in str(error):
                raise
    return start()


class StoreUse(threading.Thread):
    """Samples the bytes in the object stores of all nodes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0.0
        self.done = threading.Event()

    def run(self) -> None:
        import ray

        name = "object_store_memory"
        while not self.done.wait(0.1):
            free = ray._private.state.available_resources_per_node()
            total = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
            used = [total[node][name] - free[node].get(name, total[node][name]) for node in total.keys() & free.keys()]
            self.peak = max(self.peak, sum(used))


def digest(batch: Any) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(batch))


def measure(options: argparse.Namespace) -> list[Table]:
    from jax.sharding import NamedSharding, PartitionSpec

    import meshfeed

    sharding = NamedSharding(make_mesh(), PartitionSpec("data"))
    nodes: list[Nodes] = []

    def feed_of(num_workers: Any, path: str) -> Any:
        source = meshfeed.sources.ArrayRecord(path, decode=meshfeed.sources.DecodeImage(224, crop="random", flip=True))
        settings = {"global_batch_size": options.batch, "shuffle": True, "num_epochs": None, "num_workers": num_workers}
        return meshfeed.Feed(source, sharding, **settings)

    def ray_workers(number: int) -> meshfeed.Workers:
        return meshfeed.Workers(number, engine="ray")

    def rate(feed: Any, expected: list[int]) -> tuple[float, int]:
        """Images per second after the first batches, and the batches that differ."""
        warm, found, start = len(expected) // 4, [], 0.0
        for step in range(len(expected)):
            if step == warm:
                start = time.perf_counter()
            found.append(digest(next(feed)))
        seconds = time.perf_counter() - start
        return (len(expected) - warm) * options.batch / seconds, differences(found, expected)

    def differences(found: list[int], expected: list[int]) -> int:
        return sum(one != other for one, other in zip(found, expected, strict=True))

    def with_kills(path: str, expected: list[int]) -> dict[str, Any]:
        """A kill at regular steps, of the nodes in turn."""
        use, found, start = StoreUse(), [], time.perf_counter()
        use.start()
        every = len(expected) // (options.kills + 1)
        kills = 0
        with feed_of(ray_workers(2), path) as feed:
            for step in range(len(expected)):
                if step and step % every == 0 and kills < options.kills:
                    nodes[0].replace(kills)
                    kills += 1
                found.append(digest(next(feed)))
        use.done.set()
        use.join()
        return {
            "way": "2 actors, 4 nodes",
            "kills": kills,
            "batches": len(found),
            "that differ": differences(found, expected),
            "seconds": time.perf_counter() - start,
            "peak MB in object stores": use.peak / 1e6,
            "bound, MB": 2 * 2 * options.batch * 224 * 224 * 3 / 1e6,
        }

    with tempfile.TemporaryDirectory() as folder:
        os.environ["RAY_TMPDIR"] = folder
        encoded = photographs(32, 375, 500)
        path = _data.write_array_record(os.path.join(folder, "records"), (encoded[i % 32] for i in range(1024)))
        num_batches = max(options.batches, 4 * (options.kills + 1))
        with feed_of(0, path) as feed:
            expected = [digest(next(feed)) for _ in range(num_batches)]
        rows = []
        with feed_of(0, path) as feed:
            images, differ = rate(feed, expected[: options.batches])
            rows.append({"way": "num_workers=0", "images/s": images, "batches that differ": differ})
        with feed_of(2, path) as feed:
            images, differ = rate(feed, expected[: options.batches])
            rows.append({"way": "2 processes", "images/s": images, "batches that differ": differ})
        nodes.append(Nodes())
        try:
            for number in (1, 2, 4):
                nodes[0].grow(number)
                use = StoreUse()
                use.start()
                with feed_of(ray_workers(number), path) as feed:
                    images, differ = rate(feed, expected[: options.batches])
                use.done.set()
                use.join()
                rows.append(
                    {
                        "way": f"Ray, {number} actors on {number} nodes",
                        "images/s": images,
                        "batches that differ": differ,
                        "peak MB in object stores": use.peak / 1e6,
                        "bound, MB": 2 * number * options.batch * 224 * 224 * 3 / 1e6,
                    }
                )
            killed = with_kills(path, expected)
        finally:
            nodes[0].shutdown()
    note = f"All nodes share the {os.cpu_count()} cores of this machine."
    return [
        Table(f"Ray: JPEG 500×375 to 224×224, {options.batch} per batch, on local nodes", rows, note),
        Table(
            "Ray: node kills",
            [killed],
            "The bound is two batches per worker; twice that while answers of a lost actor are not freed yet.",
        ),
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--batches", type=int, default=64)
    parser.add_argument("--kills", type=int, default=20)


if __name__ == "__main__":
    with_cpu_devices(8)
    main(__doc__, measure, add_options)
