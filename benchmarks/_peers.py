"""What people would use instead, each giving global arrays of shuffled records on the same mesh.

A peer whose library is not installed is left out of the table. All of them hand their batches to JAX by
``jax.make_array_from_process_local_data``, the public way that is fastest on one host.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks._measure import Way

Put = Callable[[Any], Any]


def has(name: str) -> bool:
    """Whether a library is installed, without importing it."""
    return importlib.util.find_spec(name) is not None


def putter(sharding: Any) -> Put:
    """Host batch → global array."""
    import jax

    return lambda batch: jax.make_array_from_process_local_data(sharding, batch, batch.shape)


def taking(
    make: Callable[[], Iterator[Any]], put: Put, drain: int = 1, close: Callable[[], object] = lambda: None
) -> Way:
    """A way that takes batches from an iterator, which is made again at its end."""
    state: dict[str, Any] = {}

    def run() -> int:
        if "iterator" not in state:
            state["iterator"] = iter(make())
        try:
            batch = next(state["iterator"])
        except StopIteration:
            state["iterator"] = iter(make())
            batch = next(state["iterator"])
        state["last"] = put(batch)  # as a step would hold it, while the next one is made
        return 1

    def end() -> None:
        state.clear()
        close()

    return Way(run, drain, end)


Read = Callable[[], list[bytes]]


def reader_loop(read: Read, decode_batch: Callable[[list[bytes]], Any]) -> Way:
    """The floor: a bare loop over the library's reader, its fastest call and options, one join a batch; no arrays."""
    last: list[Any] = [None]

    def run() -> int:
        last[0] = decode_batch(read())
        return 1

    return Way(run)


def scattered(path: str, num_records: int, batch: int) -> Read:
    """Random records of one file, the fastest way of the library."""
    reader, rng = _reader(path), np.random.default_rng(1)
    return lambda: [reader.read(row, row + 1)[0] for row in rng.integers(0, num_records, batch).tolist()]


def in_runs(path: str, num_records: int, batch: int) -> Read:
    """Records of one file in order, a batch a call."""
    reader, starts = _reader(path), itertools.cycle(range(0, num_records - batch + 1, batch))

    def read() -> list[bytes]:
        start = next(starts)
        return reader.read(start, start + batch)

    return read


def _reader(path: str) -> Any:
    from array_record.python.array_record_module import ArrayRecordReader

    return ArrayRecordReader(path, "readahead_buffer_size:1M,max_parallelism:0", file_reader_buffer_size=8192)


def limit_ways(make_read: Callable[[], Read], batch: int, num_tokens: int, sharding: Any) -> dict[str, Way]:
    """What no feed in Python can beat: the floor and JAX's private call, here and from a thread, and nothing else."""
    import jax
    from jax._src.lib import xla_client

    import meshfeed

    decode = meshfeed.sources.DecodeRaw(np.int32, num_tokens)
    aval = jax.device_put(np.zeros((batch, num_tokens), np.int32), sharding).aval
    indices = sharding.devices_indices_map((batch, num_tokens))
    devices, rows = list(indices), [index[0] for index in indices.values()]

    def making() -> Callable[[], Any]:
        read = make_read()

        def make() -> Any:
            host = decode(read())
            return xla_client.batched_device_put(aval, sharding, [host[part] for part in rows], devices)

        return make

    here, last = making(), [None]

    def alone() -> int:
        last[0] = here()
        return 1

    room: queue.SimpleQueue[bool] = queue.SimpleQueue()
    ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
    there, latest = making(), [None]

    def ahead() -> None:
        while room.get():
            ready.put(there())

    def take() -> int:
        latest[0] = ready.get()
        room.put(True)
        return 1

    for _ in range(2):
        room.put(True)
    threading.Thread(target=ahead, daemon=True).start()
    return {
        "bare loop and JAX's private call": Way(alone),
        "the same in a thread, by a SimpleQueue": Way(take, 3, lambda: room.put(False)),
    }


def grain_ways(path: str, batch: int, decode: Callable[[bytes], Any], put: Put) -> dict[str, Way]:
    """As its documentation shows it, as fast as it goes with its own sources, and its DataLoader."""
    import grain
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    source = ArrayRecordDataSource(path)
    shuffled = grain.MapDataset.source(source).shuffle(seed=0).map(decode)

    class Decode(grain.transforms.Map):
        def map(self, element: bytes) -> Any:
            return decode(element)

    def loader() -> Any:
        return grain.DataLoader(
            data_source=source,
            sampler=grain.samplers.IndexSampler(
                len(source), shuffle=True, seed=0, shard_options=grain.sharding.NoSharding()
            ),
            operations=[Decode(), grain.transforms.Batch(batch, drop_remainder=True)],
            worker_count=0,
        )

    no_threads = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    ahead = 500 // batch + 2  # its threads keep 500 elements ready
    return {
        "Grain, as documented": taking(lambda: iter(shuffled.repeat().to_iter_dataset().batch(batch)), put, ahead),
        "Grain, its best (no threads)": taking(
            lambda: iter(shuffled.batch(batch).repeat().to_iter_dataset(no_threads)), put
        ),
        "Grain DataLoader": taking(loader, put, ahead),
    }


def torch_ways(path: str, batch: int, decode_batch: Callable[[list[bytes]], Any], put: Put) -> dict[str, Way]:
    """PyTorch's DataLoader over the same file, whole batches at a time, which is its fast way."""
    if not has("torch"):
        return {}
    import torch.utils.data
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    class Source(torch.utils.data.Dataset):
        def __init__(self) -> None:
            self._source = ArrayRecordDataSource(path)

        def __len__(self) -> int:
            return len(self._source)

        def __getitem__(self, index: int) -> Any:
            return self._source[index]

        def __getitems__(self, indices: list[int]) -> Any:
            return self._source.__getitems__(indices)

    def loader() -> Any:
        return torch.utils.data.DataLoader(
            Source(),
            batch_size=batch,
            shuffle=True,
            collate_fn=lambda records: decode_batch(list(records)),
            drop_last=True,
        )

    return {"torch DataLoader, __getitems__": taking(loader, put)}


def mosaic_ways(folder: str, records: Callable[[], Iterator[np.ndarray]], batch: int, put: Put) -> dict[str, Way]:
    """Mosaic Streaming over its own format of the same records, all of it local."""
    if not has("streaming"):
        return {}
    import torch.utils.data
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    place = os.path.join(folder, "mds")
    first = next(iter(records()))
    if not os.path.exists(os.path.join(place, "index.json")):
        with MDSWriter(out=place, columns={"tokens": f"ndarray:int32:{first.shape[0]}"}) as writer:
            for row in records():
                writer.write({"tokens": row})
    clean_stale_shared_memory()
    dataset = StreamingDataset(local=place, shuffle=True, batch_size=batch)

    def collate(rows: list[dict[str, np.ndarray]]) -> np.ndarray:
        return np.stack([row["tokens"] for row in rows])

    def loader() -> Any:
        return torch.utils.data.DataLoader(dataset, batch_size=batch, collate_fn=collate, drop_last=True)

    return {"Mosaic Streaming": taking(loader, put)}


def hugging_face_ways(folder: str, records: Callable[[], Iterator[np.ndarray]], batch: int, put: Put) -> dict[str, Way]:
    """A map-style dataset over Parquet of the same records, shuffled, in numpy format: whole batches, its fast way."""
    if not has("datasets"):
        return {}
    import datasets

    dataset = hugging_face_table(folder, records)
    shuffled = dataset.shuffle(seed=0).with_format("numpy")
    datasets.disable_progress_bars()
    return {
        "Hugging Face datasets, iter(batch)": taking(
            lambda: (found["tokens"].astype(np.int32, copy=False) for found in shuffled.iter(batch, True)), put
        )
    }


def parquet(folder: str, records: Callable[[], Iterator[np.ndarray]], rows_a_file: int = 25_000) -> list[str]:
    """Parquet files with one fixed-size list column."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    place = os.path.join(folder, "parquet")
    if not os.path.exists(place):
        os.makedirs(place)
        block: list[np.ndarray] = []

        def flush(number: int) -> None:
            if block:
                flat = pa.array(np.concatenate(block))
                column = pa.FixedSizeListArray.from_arrays(flat, len(block[0]))
                table = pa.table({"tokens": column})
                pq.write_table(table, os.path.join(place, f"{number:04}.parquet"), row_group_size=1000)
                block.clear()

        for number, row in enumerate(records()):
            block.append(row.copy())
            if len(block) == rows_a_file:
                flush(number // rows_a_file)
        flush(9999)
    return sorted(os.path.join(place, name) for name in os.listdir(place))


def hugging_face_table(folder: str, records: Callable[[], Iterator[np.ndarray]]) -> Any:
    """The Parquet files as a memory-mapped map-style dataset."""
    import datasets

    return datasets.load_dataset(
        "parquet", data_files=parquet(folder, records), split="train", cache_dir=os.path.join(folder, "hf")
    )


def tf_data_ways(folder: str, records: Callable[[], Iterator[np.ndarray]], batch: int, put: Put) -> dict[str, Way]:
    """tf.data over TFRecord files of the same records, in order: parsed by batch, prefetched, as its guide advises."""
    if not has("tensorflow"):
        return {}
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    path = os.path.join(folder, "records.tfrecord")
    if not os.path.exists(path):
        with tf.io.TFRecordWriter(path) as writer:
            for row in records():
                writer.write(row.tobytes())

    def pipeline() -> Any:
        dataset = tf.data.TFRecordDataset(path).batch(batch, drop_remainder=True)
        dataset = dataset.map(lambda rows: tf.io.decode_raw(rows, tf.int32), num_parallel_calls=tf.data.AUTOTUNE)
        return dataset.repeat().prefetch(tf.data.AUTOTUNE).as_numpy_iterator()

    return {"tf.data, in order": taking(pipeline, put, 16)}


def tfds_ways(folder: str, records: Callable[[], Iterator[np.ndarray]], batch: int, put: Put) -> dict[str, Way]:
    """A TFDS data source (ArrayRecord underneath), shuffled, whole batches at a time, which is its fast way."""
    if not has("tensorflow_datasets") or not has("tensorflow"):
        return {}
    import tensorflow_datasets as tfds

    width = len(next(iter(records())))
    builder = tfds.dataset_builders.AdhocBuilder(
        name="tokens",
        version="1.0.0",
        features=tfds.features.FeaturesDict({"tokens": tfds.features.Tensor(shape=(width,), dtype=np.int32)}),
        split_datasets={"train": ((number, {"tokens": row.copy()}) for number, row in enumerate(records()))},
        data_dir=os.path.join(folder, "tfds"),
        file_format="array_record",
    )
    builder.download_and_prepare()
    source = builder.as_data_source("train")
    rng = np.random.default_rng(0)

    def batches() -> Iterator[np.ndarray]:
        while True:
            found = source.__getitems__(rng.integers(0, len(source), batch).tolist())
            yield np.stack([row["tokens"] for row in found])

    return {"TFDS data source, __getitems__": taking(batches, put)}
