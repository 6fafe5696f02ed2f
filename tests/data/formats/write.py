"""Writes the files beside it with the libraries of their formats, and what these libraries read back.

Needs ``pip install mosaicml-streaming webdataset pillow``, which conflict with the test environment. Run it in this folder:
``python write.py``.
"""

from __future__ import annotations

import base64
import decimal
import io
import json
import pathlib
import shutil
import tarfile
from typing import Any

import numpy as np
import webdataset
from PIL import Image
from streaming import MDSWriter, StreamingDataset

HERE = pathlib.Path(__file__).parent
SCALARS = ["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]


def image(seed: int, mode: str = "RGB") -> Image.Image:
    shape = {"RGB": (5, 6, 3), "L": (5, 6), "RGBA": (5, 6, 4)}[mode]
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, np.uint8), mode)


def jpeg_bytes(seed: int) -> bytes:
    out = io.BytesIO()
    image(seed).save(out, format="JPEG")
    return out.getvalue()


ALL = {
    "bytes": "bytes", "str": "str", "int": "int", "json": "json",
    "str_int": "str_int", "str_float": "str_float", "str_decimal": "str_decimal",
    "array": "ndarray", "array_i32": "ndarray:int32", "array_f32_2x3": "ndarray:float32:2,3",
    "pil": "pil", "jpeg": "jpeg", "png": "png", "jpegs": "list[jpeg]", "pngs": "list[png]", "pils": "list[pil]",
    "jpeg_array": "jpeg_array",
    **{name: name for name in SCALARS},
}  # fmt: skip


def sample(i: int) -> dict[str, Any]:
    rng = np.random.default_rng(i)
    scalars = {name: np.dtype(name).type(i * 3) for name in SCALARS}
    dtype = [*SCALARS][i % len(SCALARS)]
    return {
        "bytes": rng.bytes(i % 7), "str": "größe " * (i % 3) + str(i), "int": -i * 10**12, "json": {"a": [i, None], "b": "x"},
        "str_int": 10**30 + i, "str_float": i / 3, "str_decimal": decimal.Decimal(i) / 8,
        "array": (rng.random((1 + i % 3, 300 if i == 5 else 2)) * 100).astype(dtype),
        "array_i32": rng.integers(-9, 9, 1 + i % 4, np.int32), "array_f32_2x3": rng.random((2, 3), np.float32),
        "pil": image(i, "L" if i % 2 else "RGBA"), "jpeg": image(i), "png": image(i + 1, "RGB"),
        "jpegs": [image(i + k) for k in range(i % 3)], "pngs": [image(i + k) for k in range(2)], "pils": [image(i)],
        "jpeg_array": [jpeg_bytes(i + k) for k in range(1 + i % 2)],
        **scalars,
    }  # fmt: skip


def plain(value: Any) -> Any:
    """What a library read, as JSON that keeps types."""
    if isinstance(value, Image.Image):
        return plain(np.asarray(value))
    if isinstance(value, np.ndarray | np.generic):
        data = base64.b64encode(value.tobytes()).decode()
        return [type(value).__name__, value.dtype.name, list(value.shape), data]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, decimal.Decimal):
        return ["Decimal", str(value)]
    if isinstance(value, list):
        return ["list", [plain(item) for item in value]]
    if isinstance(value, dict):
        return ["dict", {key: plain(item) for key, item in value.items()}]
    return [type(value).__name__, repr(value)]


def write_mds(name: str, columns: dict[str, str], samples: list[dict[str, Any]], **options: Any) -> None:
    shutil.rmtree(HERE / name, ignore_errors=True)
    with MDSWriter(out=str(HERE / name), columns=columns, **options) as writer:
        for one in samples:
            writer.write(one)
    copy = HERE / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(HERE / name, copy)
    dataset = StreamingDataset(local=str(copy), batch_size=1)
    records = [{key: plain(value) for key, value in dataset[i].items()} for i in range(len(dataset))]
    (HERE / name / "read.json").write_text(json.dumps(records))
    shutil.rmtree(copy)


def write_tars() -> None:
    folder = HERE / "tar"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for shard, count in enumerate([7, 4]):
        with webdataset.TarWriter(str(folder / f"shard-{shard}.tar"), mtime=0.0) as writer:
            for i in range(count):
                key = f"{'deep/' * i}{'k' * 30 * i}{shard}-{i}"
                record = {"__key__": key, "cls": shard * 100 + i, "json": {"i": i}, "seg.npy": np.arange(i)}
                if i % 3 == 0:
                    record["PNG"] = jpeg_bytes(i)
                writer.write(record)
    with tarfile.open(folder / "odd.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        names = [
            ".hidden",
            "no_extension",
            "__meta__/a.txt",
            "a.b/c.d.txt",
            "a.b/c.cls",
            "d/.x",
            "x.Txt",
            "x.cls",
            "y.cls",
            "x.late",
        ]
        names += [f"{'long/' * 40}name.txt", "__info__", "__skip__x/z.txt"]
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = len(name)
            tar.addfile(info, io.BytesIO(name.encode()))
        link = tarfile.TarInfo("x.link")
        link.type, link.linkname = tarfile.SYMTYPE, "x.cls"
        tar.addfile(link)
        directory = tarfile.TarInfo("folder.d")
        directory.type = tarfile.DIRTYPE
        tar.addfile(directory)
    for path in sorted(folder.glob("*.tar")):
        records = []
        for record in webdataset.WebDataset(str(path), shardshuffle=False):
            records.append(
                {key: plain(value) for key, value in record.items() if key not in ("__url__", "__local_path__")}
            )
        path.with_suffix(".json").write_text(json.dumps(records))


if __name__ == "__main__":
    write_mds("mds", ALL, [sample(i) for i in range(14)], size_limit=12_000, hashes=["sha1", "xxh64"])
    fixed = {"x": "ndarray:int32:4", "id": "int64"}
    rows = [{"x": np.arange(4, dtype=np.int32) + i, "id": np.int64(i)} for i in range(50)]
    write_mds("mds_zstd", fixed, rows, size_limit=600, compression="zstd:7", hashes=["sha1"])
    write_mds("mds_gz", fixed, rows[:20], size_limit=600, compression="gz")
    write_tars()
