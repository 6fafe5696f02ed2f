"""TFDS and tf.data through the feed on real hosts, for tests/multihost/test_tf_sources.py.

TensorFlow takes 10 s of a core to import, so one job of four processes plays every number of hosts: a feed over the
devices of some of its processes.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
from typing import Any

import numpy as np
from shared_workers import shared_workers
from source_jobs import rows_of
from source_pipelines import BATCH, NUM_LANES, SIZES, SMALL

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
PROCESSES = {4: (0, 1, 2, 3), 3: (0, 1, 2), 2: (0, 1), 1: (3,)}
"""Number of hosts → the processes that play them; one host at the same time as three and two."""


def write_files(folder: str) -> None:
    """TFRecord files, and data sets of TFDS over files of the same sizes in both of its formats."""
    import tensorflow as tf
    import tensorflow_datasets as tfds
    from array_record.python.array_record_module import ArrayRecordWriter

    root = pathlib.Path(folder)
    features = tfds.features.FeaturesDict({"id": np.int64})
    for name, sizes in (("few", SIZES), ("many", SMALL)):
        for kind in ("tfrecord", "array_record"):
            (root / f"{name}-{kind}").mkdir()
        first = 0
        for number, size in enumerate(sizes):
            records = [features.serialize_example({"id": i}) for i in range(first, first + size)]
            first += size
            shard = f"numbers-train.{{}}-{number:05d}-of-{len(sizes):05d}"
            with tf.io.TFRecordWriter(str(root / f"{name}-tfrecord" / shard.format("tfrecord"))) as writer:
                for record in records:
                    writer.write(record)
            writer = ArrayRecordWriter(
                str(root / f"{name}-array_record" / shard.format("array_record")), "group_size:1"
            )
            for record in records:
                writer.write(record)
            writer.close()
        for kind in ("tfrecord", "array_record"):
            split = tfds.core.SplitInfo(
                name="train",
                shard_lengths=list(sizes),
                num_bytes=0,
                filename_template=tfds.core.ShardedFileTemplate(
                    template="{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
                    data_dir=root / f"{name}-{kind}",
                    dataset_name="numbers",
                    split="train",
                    filetype_suffix=kind,
                ),
            )
            tfds.folder_dataset.write_metadata(
                data_dir=root / f"{name}-{kind}",
                features=features,
                split_infos=[split],
                filename_template="{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
                check_data=False,  # which reads through tf.data, and that reads no ArrayRecord
            )


def _parse(record: Any) -> dict[str, Any]:
    import tensorflow as tf

    example = tf.io.parse_single_example(record, {"id": tf.io.FixedLenFeature((), tf.int64)})
    return {"id": example["id"]}


def _paths(folder: str, name: str) -> list[str]:
    return sorted(str(path) for path in pathlib.Path(folder, f"{name}-tfrecord").glob("numbers-*"))


def _pipelines(folder: str) -> dict[str, Any]:
    """``open`` of each pipeline of tf.data."""
    import tensorflow as tf

    few, many = _paths(folder, "few"), _paths(folder, "many")

    def numbers(lane_index: int, num_lanes: int) -> Any:
        return tf.data.Dataset.range(sum(SIZES)).shard(num_lanes, lane_index)

    def range_map_filter(lane_index: int, num_lanes: int) -> Any:
        return numbers(lane_index, num_lanes).map(lambda i: {"id": i * 2}).filter(lambda r: r["id"] % 5 != 0)

    def shuffled(lane_index: int, num_lanes: int, epoch: int) -> Any:
        records = numbers(lane_index, num_lanes).shuffle(9, seed=1 + epoch)
        return records.map(lambda i: {"id": i}, num_parallel_calls=2).prefetch(2)

    def interleaved(lane_index: int, num_lanes: int) -> Any:  # more files than lanes
        files = tf.data.Dataset.from_tensor_slices(many).shard(num_lanes, lane_index)
        return files.interleave(tf.data.TFRecordDataset, cycle_length=2, num_parallel_calls=2).map(_parse)

    def flattened(lane_index: int, num_lanes: int) -> Any:  # fewer files than lanes: each reads all and keeps its own
        records = tf.data.Dataset.from_tensor_slices(few).flat_map(tf.data.TFRecordDataset)
        return records.shard(num_lanes, lane_index).map(_parse)

    def zipped(lane_index: int, num_lanes: int) -> Any:
        left, right = numbers(lane_index, num_lanes), tf.data.Dataset.from_tensor_slices(many).repeat()
        batches = tf.data.Dataset.zip((left, right)).batch(4)
        return batches.map(lambda i, path: {"id": i, "size": tf.strings.length(path)}).unbatch()

    def generated(lane_index: int, num_lanes: int) -> Any:  # which tf.data cannot checkpoint
        def records() -> Any:
            yield from ({"id": i} for i in range(lane_index, sum(SMALL), num_lanes))

        return tf.data.Dataset.from_generator(records, output_signature={"id": tf.TensorSpec((), tf.int64)})

    return {
        "range, map, filter": range_map_filter,
        "shuffle": shuffled,
        "interleave": interleaved,
        "flat_map": flattened,
        "zip, batch, unbatch": zipped,
        "generator": generated,
    }


PIPELINES = ("range, map, filter", "shuffle", "interleave", "flat_map", "zip, batch, unbatch", "generator")
RANDOM = ("tfds array_record few", "tfds array_record many")
NAMES = (*RANDOM, "tfds tfrecord few", "tfds tfrecord many", *PIPELINES)
_few, _many = range(sum(SIZES)), range(sum(SMALL))
EXPECTED: dict[str, list[int]] = {
    "tfds array_record few": [*_few],
    "tfds array_record many": [*_many],
    "tfds tfrecord few": [*_few],
    "tfds tfrecord many": [*_many],
    "range, map, filter": [i * 2 for i in _few if i % 5],
    "shuffle": [*_few],
    "interleave": [*_many],
    "flat_map": [*_few],
    "zip, batch, unbatch": [*_few],
    "generator": [*_many],
}
"""Every id of each stream, in any order."""


def make_source(name: str, folder: str) -> Any:
    """A source by name."""
    from meshfeed import sources

    if name.startswith("tfds"):
        _, kind, sizes = name.split()
        return sources.TFDS(f"{folder}/{sizes}-{kind}", "train")
    return sources.TFData(_pipelines(folder)[name])


def make_feed(name: str, folder: str, devices: list[Any], **options: Any) -> Any:
    """A feed of one source over some devices."""
    from jax.sharding import AxisType, Mesh

    import meshfeed

    settings = {
        "global_batch_size": BATCH,
        "end": "pad",
        "mask_key": "mask",
        "timeout_seconds": 100,
        "seed": 5,
        "name": f"{name} on {len(devices)} devices",
        **({"shuffle": True} if name in RANDOM else {"num_lanes": NUM_LANES}),
    }
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    return meshfeed.MultiHostDataLoadIterator(make_source(name, folder), mesh, **{**settings, **options})


def _devices(hosts: int) -> list[Any]:
    import jax

    return [device for device in jax.devices() if device.process_index in PROCESSES[hosts]]


def run(names: list[str], folder: str, save_at: int) -> dict[str, Any]:
    """Each source from its beginning to its end on each number of hosts."""
    import jax

    found: dict[str, Any] = {}
    for hosts, processes in PROCESSES.items():
        if jax.process_index() not in processes:
            continue
        for name in names:
            with make_feed(name, folder, _devices(hosts)) as feed:
                steps, state = [], None
                for batch in feed:
                    steps.append(rows_of(batch))
                    if feed.step == save_at:
                        state = json.dumps(feed.get_state())
                found[f"{name} on {hosts}"] = {"steps": steps, "state": state, "position": feed.position}
    return found


def go_on(names: list[str], folder: str, states: dict[str, list[str]]) -> dict[str, Any]:
    """Each source continued on each number of hosts from those of each other: ``"<name> on <hosts>"`` → their states."""
    import jax

    import meshfeed

    found: dict[str, Any] = {}
    for target, processes in PROCESSES.items():
        if jax.process_index() not in processes:
            continue
        for name in names:
            with make_feed(name, folder, _devices(target)) as feed:
                for origin in PROCESSES.keys() - {target}:
                    feed.set_state(meshfeed.merge_states([json.loads(part) for part in states[f"{name} on {origin}"]]))
                    found[f"{name} from {origin} on {target}"] = [rows_of(batch) for batch in feed]
    return found


def go_on_with_workers(names: list[str], folder: str, states: dict[str, list[str]]) -> dict[str, Any]:
    """Each source continued on one host with two workers for a step, saved, and continued with one."""
    import jax

    import meshfeed

    found: dict[str, Any] = {}
    if jax.process_index() not in PROCESSES[1]:
        return found
    with shared_workers(2) as used:
        for name in names:
            state, rows = meshfeed.merge_states([json.loads(part) for part in states[name]]), []
            for number, count in ((2, 1), (1, None)):
                with make_feed(name, folder, _devices(1), num_workers=number) as feed:
                    feed.set_state(state)
                    rows += [rows_of(batch) for batch in itertools.islice(feed, count)]
                    state = json.loads(json.dumps(feed.get_state()))
            found[name] = rows
        assert len(used) == 2, "the rows came from the workers"
    return found
