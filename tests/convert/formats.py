"""Writes the same records in every format, with the format's own library."""

from __future__ import annotations

import csv
import gzip
import io
import json
import pathlib
import tarfile
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

COUNT = 61


def rows(count: int = COUNT) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {
            "text": f'líne {i}\n"quoted", ' * (i % 3),
            "label": i % 7 - 3,
            "weight": i / 4,
            "tokens": rng.integers(0, 70_000, i % 5).tolist(),
        }
        for i in range(count)
    ]


def flat(wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The features of the rows, as ``DecodeExample()`` returns them."""
    return [
        {
            "label": [row["label"]],
            "text": row["text"].encode(),
            "tokens": row["tokens"],
            "weight": [row["weight"]],
        }
        for row in wanted
    ]


def parquet(folder: pathlib.Path) -> list[str]:
    table = pa.Table.from_pylist(rows())
    pq.write_table(table.slice(0, 20), folder / "a.parquet", row_group_size=7)
    pq.write_table(table.slice(20), folder / "b.parquet", row_group_size=30)
    return [str(folder / "*.parquet")]


def jsonl(folder: pathlib.Path) -> list[str]:
    lines = [json.dumps(row) for row in rows()]
    (folder / "a.jsonl").write_text("\n".join(lines[:30]))  # no line break at the end
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.write("\n\n".join(lines[30:]) + "\n")
    return [str(folder / "a.jsonl"), str(folder / "b.jsonl.gz")]


def huggingface(folder: pathlib.Path) -> list[str]:
    import datasets

    datasets.Dataset.from_list(rows()).save_to_disk(folder / "hf")
    return [str(folder / "hf")]


def write_csv(path: pathlib.Path, records: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]))
        writer.writeheader()
        writer.writerows(records)


def tar(path: pathlib.Path, samples: list[dict[str, bytes]]) -> None:
    with tarfile.open(path, "w") as archive:
        for number, sample in enumerate(samples):
            for extension, content in sample.items():
                info = tarfile.TarInfo(f"{number:04}.{extension}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))


def images(folder: pathlib.Path) -> pathlib.Path:
    for label in ("cat", "dog"):
        (folder / "images" / label).mkdir(parents=True)
        for number in range(5):
            pixels = np.full((4, 4, 3), number, np.uint8)
            Image.fromarray(pixels).save(folder / "images" / label / f"{number}.png")
    return folder / "images"


def content_of(folder: pathlib.Path) -> dict[str, bytes]:
    """The content of the files that a conversion wrote."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}
