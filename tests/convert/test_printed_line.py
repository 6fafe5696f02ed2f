"""The line that ``meshfeed convert`` prints is executed as it is, and a feed takes a batch of what it gives."""

from __future__ import annotations

import json
import pathlib
import random
import struct
from collections.abc import Callable
from typing import Any

import formats
import jax
import numpy
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from convert_cases import crc, example

import meshfeed
from meshfeed._src.cli.main import main

MDS_FOLDER = pathlib.Path(__file__).parents[1] / "data" / "formats" / "mds"


def printed(data: list[str], folder: pathlib.Path | str, *options: str) -> tuple[str, str]:
    """The whole output of the command, and the expression in it."""
    ended = CliRunner().invoke(main, ["convert", *data, "--to", str(folder), "--workers", "1", *options])
    assert ended.exit_code == 0, ended.output
    (line,) = [line for line in ended.output.splitlines() if line.startswith("Read it with: ")]
    return ended.output, line.removeprefix("Read it with: ")


def batch_of(expression: str) -> Any:
    source = eval(expression, {"meshfeed": meshfeed, "numpy": numpy})
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    with meshfeed.Feed(source, mesh, global_batch_size=len(source)) as feed:  # all records, not only the first
        return jax.tree.map(np.asarray, next(feed))


def csv(folder: pathlib.Path) -> list[str]:
    rows = [{key: row[key] for key in ("text", "label", "weight")} for row in formats.rows()]
    formats.write_csv(folder / "a.csv", rows)
    return [str(folder / "a.csv")]


def text(folder: pathlib.Path) -> list[str]:
    (folder / "a.txt").write_text("one\nthree\n\n")
    return [str(folder / "a.txt")]


def tfrecord(folder: pathlib.Path) -> list[str]:
    rows = [{"i": n, "x": [n / 2, 1.0], "name": b"n" * n, "ragged": [1] * (n % 3)} for n in range(9)]
    content = b""
    for record in map(example, rows):
        size = struct.pack("<Q", len(record))
        content += size + crc(size) + record + crc(record)
    (folder / "a.tfrecord").write_bytes(content)
    return [str(folder / "a.tfrecord")]


def webdataset(folder: pathlib.Path) -> list[str]:
    formats.tar(folder / "a.tar", [{"txt": b"x" * n, "cls": b"%d" % n} for n in range(12)])
    return [str(folder / "a.tar")]


def images(folder: pathlib.Path) -> list[str]:
    return [str(formats.images(folder))]


SCALAR, VECTOR = ("int32", ()), ("float32", ())


@pytest.mark.parametrize(
    ("make", "leaves", "left_out"),
    [
        (formats.parquet, {"label": SCALAR, "weight": VECTOR}, "text (bytes), tokens (0 to 4 values)"),
        (formats.jsonl, {"label": SCALAR, "weight": VECTOR}, "text (bytes), tokens (0 to 4 values)"),
        (formats.huggingface, {"label": SCALAR, "weight": VECTOR}, "text (bytes), tokens (0 to 4 values)"),
        (csv, {"label": SCALAR, "weight": VECTOR}, "text (bytes)"),
        (images, {"label": SCALAR}, "filename (bytes), image (bytes)"),
        (tfrecord, {"i": SCALAR, "x": ("float32", (2,))}, "name (bytes), ragged (0 to 2 values)"),
        (text, {"text": ("uint8", (5,))}, None),
        (webdataset, {"__key__": ("uint8", (4,)), "cls": ("uint8", (2,)), "txt": ("uint8", (11,))}, None),
    ],
)
def test_every_format(
    make: Callable[[pathlib.Path], list[str]], leaves: dict[str, Any], left_out: str | None, tmp_path: pathlib.Path
) -> None:
    output, expression = printed(make(tmp_path), tmp_path / "out", "--shards", "2")
    batch = batch_of(expression)
    assert {name: (str(leaf.dtype), leaf.shape[1:]) for name, leaf in batch.items()} == leaves
    assert ("Left out" in output) == (left_out is not None)
    if left_out is not None:
        assert f"  Left out: {left_out}.\n" in output
        example = output.partition("such as ")[2].removesuffix(".\n").removesuffix(" with numpy imported")
        (name,) = eval(example, {"meshfeed": meshfeed, "numpy": numpy})
        pattern = expression.partition(", decode=")[0]
        decoded = batch_of(f"{pattern}, decode=meshfeed.sources.DecodeExample({example}))")[name]
        assert decoded.any(), "the values, padded"
        assert (name == "image") == (make is images)
        assert decoded.shape[1:] == (224, 224, 3) if make is images else decoded.ndim == 2


def test_a_class_alone(tmp_path: pathlib.Path) -> None:
    folder = formats.images(tmp_path)
    _, expression = printed([str(next(path for path in sorted(folder.iterdir()) if path.is_dir()))], tmp_path / "out")
    assert batch_of(expression)["image"].shape[1:] == (224, 224, 3)


def test_mds_with_arrays(tmp_path: pathlib.Path) -> None:
    columns = "array_f32_2x3,array_i32,bytes,float32,int,jpeg,json,str"
    _, expression = printed([str(MDS_FOLDER)], tmp_path / "out", "--columns", columns)
    batch = batch_of(expression)
    source = meshfeed.sources.MDS(str(MDS_FOLDER), ["array_f32_2x3", "float32"])
    for name in ("array_f32_2x3", "float32"):
        np.testing.assert_array_equal(batch[name], [row[name] for row in source.__getitems__(range(len(source)))])


@pytest.mark.parametrize("lines", [["abcd", "efgh"], ["abcd", "e"], ["", ""]])
def test_bytes(lines: list[str], tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"{line}\n" for line in lines))
    _, expression = printed([str(tmp_path / "a.txt")], tmp_path / "out", "--encoding", "bytes")
    size = max(1, *map(len, lines))
    assert batch_of(expression)["text"].tobytes() == b"".join(line.encode().ljust(size, b"\0") for line in lines)


@pytest.mark.parametrize("count", [3, 500])
def test_tokens_of_small_data(count: int, tmp_path: pathlib.Path) -> None:
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("a b c\n" * count)
    options = ["--encoding", "tokens", "--tokenizer", str(tmp_path / "tokenizer.json"), "--shards", "3"]
    _, expression = printed([str(tmp_path / "a.txt")], tmp_path / "out", *options)
    assert batch_of(expression)["tokens"].size > count


def test_values_that_do_not_fit(tmp_path: pathlib.Path) -> None:
    """Each feature does not fit because of one record, which is not in the first file."""
    rows: list[dict[str, Any]] = [
        {"good": n, "wide": n, "some": n, "pair": [n, n], "deep": [[n, 1], [2, 3]]} for n in range(40)
    ]
    rows[30]["wide"] = 2**31
    rows[31]["some"] = None
    rows[32]["pair"] = [1, 2, 3]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "a.parquet")
    output, expression = printed([str(tmp_path / "a.parquet")], tmp_path / "out", "--shards", "4")
    assert {name: leaf.shape for name, leaf in batch_of(expression).items()} == {"good": (40,), "deep": (40, 2, 2)}
    assert "wide (integers of more than 32 bits, which need jax_enable_x64)" in output
    assert "some (no value in some records)" in output
    assert "pair (2 to 3 values)" in output
    assert "  some: int64, missing in some records\n" in output


@pytest.mark.parametrize("other", [[7], [-1], [2.0], [2, 2]])
def test_a_column_that_is_named_like_a_shape(other: list[Any], tmp_path: pathlib.Path) -> None:
    """It is one if the values fill it: four do not fill 7, and no array has -1 rows."""
    (tmp_path / "a.jsonl").write_text(
        (json.dumps({"x": [1, 2, 3, 4], "x/shape": other, "t": "", "t/shape": 3}) + "\n") * 8
    )
    _, expression = printed([str(tmp_path / "a.jsonl")], tmp_path / "out")
    found = {name: leaf.shape[1:] for name, leaf in batch_of(expression).items()}
    is_shape = other == [2, 2]
    assert found == {"t/shape": ()} | ({"x": (2, 2)} if is_shape else {"x": (4,), "x/shape": (len(other),)})


def test_nothing_fits(tmp_path: pathlib.Path) -> None:
    """Ragged values are padded; values that some records lack need a decision, which is the user's."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"ids": list(range(n))}) + "\n" for n in range(1, 6)))
    output, expression = printed([str(tmp_path / "a.jsonl")], tmp_path / "out")
    assert batch_of(expression)["ids"].tolist() == [[*range(n), *[0] * (5 - n)] for n in range(1, 6)]
    assert "pads values with zeros" in output
    (tmp_path / "b.jsonl").write_text('{"a": 1}\n{"b": 2}\n')
    output, expression = printed([str(tmp_path / "b.jsonl")], tmp_path / "other")
    assert "a feed batches arrays of one shape: give a decoder" in output.lower()
    assert len(eval(expression, {"meshfeed": meshfeed})) == 2


def test_a_folder_whose_name_is_a_pattern(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / 'a[1]*"'
    _, expression = printed(formats.parquet(tmp_path), folder)
    assert len(batch_of(expression)["label"]) == formats.COUNT


def test_a_folder_with_a_slash_at_the_end(tmp_path: pathlib.Path) -> None:
    _, expression = printed(formats.parquet(tmp_path), f"{tmp_path}/out/")
    assert f'"{tmp_path}/out/*.array_record"' in expression


def test_the_same_line_for_a_folder_that_is_complete(tmp_path: pathlib.Path) -> None:
    data = formats.parquet(tmp_path)
    _, expression = printed(data, tmp_path / "out")
    output, again = printed(data, tmp_path / "out")
    assert again == expression
    assert "is complete" in output


@pytest.mark.parametrize("seed", range(3))
def test_drawn_rows(seed: int, tmp_path: pathlib.Path) -> None:
    """Whatever the columns are, the line works, or says that it does not."""
    rng = random.Random(seed)
    kinds: list[Callable[[], Any]] = [
        lambda: rng.randint(-5, 5),
        lambda: rng.random(),
        lambda: rng.choice([None, 1]),
        lambda: [rng.random() for _ in range(rng.randint(0, 3))],
        lambda: [1, 2],
        lambda: "x" * rng.randint(0, 3),
        lambda: {"in": rng.randint(0, 2**40), "flag": rng.random() < 0.5},
        lambda: ["a", "b"],
    ]
    chosen = rng.sample(kinds, 4)
    rows = [{f"c{number}": kind() for number, kind in enumerate(chosen)} for _ in range(30)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    output, expression = printed([str(tmp_path / "a.parquet")], tmp_path / "out", "--shards", "3")
    assert "give a decoder that makes them" in output or len(jax.tree.leaves(batch_of(expression))) > 0


@pytest.mark.parametrize("name", ["a.bin", "a.npy", "folder"])
def test_token_files_are_no_input(name: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "folder").mkdir()
    for path in ("a.bin", "a.npy", "folder/b.bin"):
        np.save(tmp_path / "array.npy", np.arange(9))
        (tmp_path / "array.npy").replace(tmp_path / path)
    ended = CliRunner().invoke(main, ["convert", str(tmp_path / name), "--to", str(tmp_path / "out")])
    assert ended.exit_code != 0
    assert "meshfeed.sources.Tokens reads it as it is" in " ".join(ended.output.split())
