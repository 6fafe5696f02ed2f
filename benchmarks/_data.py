"""Data to measure on: files of records made from a seed, kept for the length of a run."""

from __future__ import annotations

import io
import os
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
