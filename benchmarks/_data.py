"""Data to measure on: files of records made from a seed, kept for the length of a run."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

TOKENS = 2048


def tokens(num_records: int, num_tokens: int) -> Any:
    """Records of int32 ``[num_tokens]``, compressible by about a half; 512 different ones."""
    rng = np.random.default_rng(0)
    some = rng.integers(0, 50_000, (512, num_tokens), np.int32)
    some[:, ::2] = 0
    for record in range(num_records):
        row = some[record % 512]
        row[0] = record
        yield row


def write_array_record(path: str, records: Any, options: str = "group_size:1,uncompressed") -> str:
    """An ArrayRecord file of the bytes of arrays."""
    from array_record.python.array_record_module import ArrayRecordWriter

    if not os.path.exists(path):
        writer = ArrayRecordWriter(f"{path}.part", options)  # half a file must not pass for a whole one the next time
        for record in records:
            writer.write(record if isinstance(record, bytes) else record.tobytes())
        writer.close()
        os.replace(f"{path}.part", path)
    with open(path, "rb") as file:  # one kept from an earlier run need not be in the page cache
        while file.read(1 << 24):
            pass
    return path


def write_mds(folder: str, lengths: Sequence[int], values: int, first: int = 0) -> int:
    """Shards as Mosaic Streaming writes them; returns the bytes of all.

    Args:
      folder: an existing folder.
      lengths: records of each shard.
      values: int32 per record, random except the first, which is the number of the record.
      first: the number of the first record.
    """
    rng = np.random.default_rng(first)
    shards = []
    for number, records in enumerate(lengths):
        name = f"shard.{number:05}.mds"
        rows = rng.integers(0, 1 << 31, (records, values), np.int64).astype(np.int32)
        rows[:, 0] = np.arange(records) + first
        first += records
        config = {
            "column_encodings": [f"ndarray:int32:{values}"],
            "column_names": ["x"],
            "column_sizes": [4 * values],
            "compression": None,
            "format": "mds",
            "hashes": [],
            "size_limit": None,
            "version": 2,
        }
        head = json.dumps(config, sort_keys=True).encode()
        start = 4 * (2 + records) + len(head)
        offsets = np.arange(start, start + rows.nbytes + 1, 4 * values, dtype=np.uint32)
        content = b"".join((np.uint32(records).tobytes(), offsets.tobytes(), head, rows.tobytes()))
        with open(os.path.join(folder, name), "wb") as file:
            file.write(content)
        raw = {"basename": name, "bytes": len(content), "hashes": {}}
        shards.append({**config, "raw_data": raw, "samples": records, "zip_data": None})
    with open(os.path.join(folder, "index.json"), "w") as file:
        json.dump({"version": 2, "shards": shards}, file)
    return sum(shard["raw_data"]["bytes"] for shard in shards)


def jpegs(number: int) -> list[bytes]:
    """Encoded images of 224 × 224 × 3, smooth as photographs are."""
    from PIL import Image

    rng, found = np.random.default_rng(0), []
    for _ in range(number):
        small = Image.fromarray(rng.integers(0, 256, (28, 28, 3), np.uint8))
        buffer = io.BytesIO()
        small.resize((224, 224), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
        found.append(buffer.getvalue())
    return found


def join_tokens(records: list[bytes]) -> np.ndarray:
    """Records of one size as int32 ``[len(records), tokens]``: one join, no copy after it."""
    return np.frombuffer(b"".join(records), np.int32).reshape(len(records), -1)


def decode_tokens(record: bytes) -> np.ndarray:
    """One record."""
    return np.frombuffer(record, np.int32)


def decode_jpeg(record: bytes) -> np.ndarray:
    """uint8 ``[224, 224, 3]``."""
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(record)).convert("RGB"))
