"""Token files written by hand, byte by byte as the formats' own writers do."""

from __future__ import annotations

import pathlib
import struct
from collections.abc import Sequence

import numpy as np


def write_llm_c(path: pathlib.Path, tokens: np.ndarray, *, magic: int = 20240520, version: int = 1) -> None:
    header = struct.pack("<3i", magic, version, len(tokens)) + bytes(253 * 4)
    path.write_bytes(header + tokens.tobytes())


MEGATRON_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write_megatron(stem: pathlib.Path, documents: Sequence[Sequence[np.ndarray]]) -> None:
    """Documents of one or more sequences each."""
    sequences = [sequence for document in documents for sequence in document]
    dtype = sequences[0].dtype
    lengths = [len(sequence) for sequence in sequences]
    pointers = [sum(lengths[:i]) * dtype.itemsize for i in range(len(lengths))]
    bounds = [sum(len(document) for document in documents[:i]) for i in range(len(documents) + 1)]
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, MEGATRON_CODES[dtype.name], len(sequences), len(bounds))
    index += struct.pack(f"<{len(lengths)}i", *lengths)
    index += struct.pack(f"<{len(pointers)}q", *pointers)
    index += struct.pack(f"<{len(bounds)}q", *bounds)
    stem.with_suffix(".idx").write_bytes(index)
    stem.with_suffix(".bin").write_bytes(b"".join(sequence.tobytes() for sequence in sequences))
