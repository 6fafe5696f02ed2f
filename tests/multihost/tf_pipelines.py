"""TFDS and pipelines of tf.data over real files: what tests of several hosts read."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from source_pipelines import BATCH, NUM_LANES, SIZES, SMALL

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


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


def make_feed(source_name: str, folder: str, devices: Sequence[Any], **options: Any) -> Any:
    """A feed of one source over some devices."""
    from jax.sharding import AxisType, Mesh

    import meshfeed

    how = {"shuffle": True} if source_name in RANDOM else {"num_lanes": NUM_LANES}
    settings = {"global_batch_size": BATCH, "end": "pad", "mask_key": "mask", "timeout_seconds": 100, "seed": 5}
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    return meshfeed.Feed(make_source(source_name, folder), mesh, **{**settings, **how, **options})
