"""Files of many formats whose rows are numbered through all of them, for tests of streaming datasets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

BUILDERS = {"parquet": "parquet", "jsonl": "json", "csv": "csv", "txt": "text", "arrow": "arrow"}


def write_files(
    folder: Path, suffix: str, sizes: Sequence[int], *, first: int = 0, rows_per_group: int = 7
) -> list[str]:
    """Files with ``sizes`` rows; a size of -1 writes a file of no bytes. Rows have "id", and "x" where they can."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, size in enumerate(sizes):
        path = folder / f"{number:02d}.{suffix}"
        ids = range(first, first + max(size, 0))
        first += len(ids)
        paths.append(str(path))
        if size < 0:
            path.write_bytes(b"")
        elif suffix == "jsonl":
            path.write_text("".join(json.dumps({"id": i, "x": [i, i + 1]}) + "\n" for i in ids))
        elif suffix == "csv":
            path.write_text("id,y\n" + "".join(f"{i},{i * 0.5}\n" for i in ids))
        elif suffix == "txt":
            path.write_text("".join(f"{i}\n" for i in ids))
        else:
            table = table_of(ids)
            if suffix == "parquet":
                pq.write_table(table, path, row_group_size=rows_per_group)
            else:
                make = pa.ipc.new_file if number % 2 else pa.ipc.new_stream
                with pa.OSFile(str(path), "wb") as file, make(file, table.schema) as writer:
                    writer.write_table(table, max_chunksize=rows_per_group)
    return paths


def table_of(ids: Sequence[int]) -> pa.Table:
    pairs = pa.array([[i, i + 1] for i in ids], pa.list_(pa.int32()))
    return pa.table(
        {"id": pa.array(np.asarray(ids, np.int64)), "x": pairs, "s": pa.array([str(i) for i in ids], pa.string())}
    )
