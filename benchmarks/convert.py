"""``meshfeed convert`` beside reading and writing with the bare libraries: thousand records/s on one core.

Two comparisons per input. ``as Examples``: the usual script, which reads with pyarrow or json, builds
``tf.train.Example`` with TensorFlow and writes with ArrayRecordWriter. ``one column``: the least work there is, which
reads with pyarrow and passes the bytes of a column to ArrayRecordWriter; meshfeed does that with ``--encoding bytes``.
Text files are read line by line instead.
Ours includes the plan, the digest, fsync and the manifest. The records of both are compared before the clock starts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.json as pj
import pyarrow.parquet as pq
from array_record.python.array_record_module import ArrayRecordWriter

from benchmarks._measure import Table, Way, main, rates, take_turns
from meshfeed._src.convert.run import convert, run_here
from meshfeed._src.convert.writers import Settings
from meshfeed.sources import ArrayRecord, DecodeExample

KINDS = ("parquet", "jsonl", "csv", "txt")
ENCODINGS = {"example": "as Examples", "bytes": "one column"}
_OPTIONS = {"zstd": "group_size:1", "none": "group_size:1,uncompressed"}


def rows(count: int, num_bytes: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    words = [f"w{i}" for i in range(5000)]
    per_record = num_bytes // 6
    picked = rng.integers(0, len(words), (count, per_record))
    return [
        {"text": " ".join(words[word] for word in line), "label": int(line[0]), "weight": float(line[1]) / 7}
        for line in picked.tolist()
    ]


def write_inputs(folder: pathlib.Path, records: list[dict[str, Any]]) -> dict[str, pathlib.Path]:
    paths = {kind: folder / f"a.{kind}" for kind in KINDS}
    table = pa.Table.from_pylist(records)
    pq.write_table(table, paths["parquet"], row_group_size=5000)
    paths["jsonl"].write_text("".join(json.dumps(record) + "\n" for record in records))
    pc.write_csv(table, paths["csv"])
    paths["txt"].write_text("".join(record["text"] + "\n" for record in records))
    return paths


def batches(path: pathlib.Path) -> Iterable[pa.RecordBatch]:
    if path.suffix == ".parquet":
        return pq.ParquetFile(path).iter_batches(1000, use_threads=False)
    if path.suffix == ".csv":
        return pc.read_csv(path, pc.ReadOptions(use_threads=False)).to_batches()
    return pj.read_json(path, pj.ReadOptions(use_threads=False)).to_batches()


def records_of(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".txt":
        return ({"text": line.rstrip("\n")} for line in path.open())
    if path.suffix in (".parquet", ".csv"):
        return itertools.chain.from_iterable(batch.to_pylist() for batch in batches(path))
    return map(json.loads, path.open())


def example(record: dict[str, Any]) -> bytes:
    import tensorflow as tf

    feature = {"text": tf.train.Feature(bytes_list=tf.train.BytesList(value=[record["text"].encode()]))}
    if "label" in record:
        feature["label"] = tf.train.Feature(int64_list=tf.train.Int64List(value=[record["label"]]))
        feature["weight"] = tf.train.Feature(float_list=tf.train.FloatList(value=[record["weight"]]))
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


def bare(path: pathlib.Path, out: pathlib.Path, encoding: str, compression: str) -> None:
    writer = ArrayRecordWriter(str(out / "bare"), _OPTIONS[compression])
    if encoding == "example":
        for record in records_of(path):
            writer.write(example(record))
    elif path.suffix == ".txt":
        for line in path.open("rb"):
            writer.write(line.rstrip(b"\n"))
    else:
        for batch in batches(path):
            for value in batch.column("text").cast(pa.binary()).to_pylist():
                writer.write(value)
    writer.close()


def ours(path: pathlib.Path, out: pathlib.Path, encoding: str, compression: str) -> None:
    column = None if encoding == "example" else "text"
    settings = Settings(encoding=encoding, column=column, compression=compression, shards=1)
    convert([str(path)], str(out / "ours"), settings, run_here)


def ways(path: pathlib.Path, out: pathlib.Path, count: int, encoding: str, compression: str) -> dict[str, Way]:
    def turn(function: Callable[[pathlib.Path, pathlib.Path, str, str], None]) -> Callable[[], int]:
        def run() -> int:
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            function(path, out, encoding, compression)
            return count

        return run

    out.mkdir(exist_ok=True)
    shutil.rmtree(out / "ours", ignore_errors=True)
    bare(path, out, encoding, compression)
    ours(path, out, encoding, compression)
    one, two = ArrayRecord(str(out / "ours" / "*.array_record")), ArrayRecord(str(out / "bare"))
    decode = DecodeExample() if encoding == "example" else bytes
    for mine, theirs in zip(one.read_raw(range(len(one))), two.read_raw(range(count)), strict=True):
        assert repr(decode(mine)) == repr(dict(sorted(decode(theirs).items())) if encoding == "example" else theirs)
    return {"meshfeed convert": Way(turn(ours)), "bare libraries": Way(turn(bare))}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--bytes", type=int, default=600, help="of text per record, about")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--encodings", nargs="+", choices=ENCODINGS, default=list(ENCODINGS))


def measure(options: argparse.Namespace) -> Iterator[Table]:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        inputs = write_inputs(folder, rows(options.records, options.bytes))
        for (kind, path), encoding, compression in itertools.product(
            ((kind, inputs[kind]) for kind in options.kinds), options.encodings, ("zstd", "none")
        ):
            found = take_turns(
                ways(path, folder / "out", options.records, encoding, compression), rounds=options.rounds, seconds=0.1
            )
            title = f"convert {kind}, {ENCODINGS[encoding]}, {compression}: {options.records:,} records, one core"
            yield rates(title, "thousand records", found, ours="meshfeed convert", scale=1000)


if __name__ == "__main__":
    main(__doc__, measure, add_arguments)
