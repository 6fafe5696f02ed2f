"""Every format to ArrayRecord and tokens: files by the formats' own libraries, read back by ours and by Grain's."""

from __future__ import annotations

import csv
import functools
import json
import pathlib
import struct
import tempfile
from collections.abc import Callable
from typing import Any

import formats
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import meshfeed
from meshfeed._src.convert.formats import FORMATS
from meshfeed._src.convert.run import Converted, convert, run_here, run_in_workers
from meshfeed._src.convert.writers import Settings, eod_id
from meshfeed._src.sources.manifest import make_manifest
from meshfeed.sources import ArrayRecord, DecodeExample, Tokens


def run(data: Any, folder: pathlib.Path, workers: int = 1, **settings: Any) -> Converted:
    paths = [str(item) for item in (data if isinstance(data, list) else [data])]
    return convert(paths, str(folder), Settings(**settings), functools.partial(run_in_workers, num_workers=workers))


def records_of(folder: pathlib.Path) -> list[bytes]:
    return ArrayRecord(str(folder / "*.array_record")).read_raw(range(len(ArrayRecord(str(folder / "*.array_record")))))


def features_of(folder: pathlib.Path) -> list[dict[str, Any]]:
    return [
        {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in DecodeExample()(record).items()
        }
        for record in records_of(folder)
    ]


@pytest.mark.parametrize("make", [formats.parquet, formats.jsonl, formats.huggingface])
def test_tables_become_examples(make: Callable[[pathlib.Path], list[str]], tmp_path: pathlib.Path) -> None:
    data = make(tmp_path)
    result = run(data, tmp_path / "out", shards=4)
    assert result.num_records == formats.COUNT
    assert result.features == {
        "label": {"kind": "int64", "list": False},
        "text": {"kind": "bytes", "list": False},
        "tokens": {"kind": "int64", "list": True},
        "weight": {"kind": "float", "list": False},
    }
    assert features_of(tmp_path / "out") == formats.flat(formats.rows())
    names = [f"data-{shard:05}-of-00004.array_record" for shard in range(4)]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [*names, "manifest.json"]
    assert result.files == names
    lengths = ArrayRecord(str(tmp_path / "out" / "*.array_record")).shard_lengths()
    assert lengths.tolist() == [15, 15, 15, 16]  # [61 * i // 4, 61 * (i + 1) // 4)


@pytest.mark.slow
def test_the_bytes_do_not_depend_on_the_workers_and_grain_reads_them(tmp_path: pathlib.Path) -> None:
    import grain

    data = formats.jsonl(tmp_path)
    run(data, tmp_path / "one", shards=5)
    run(data, tmp_path / "three", workers=3, shards=5)
    assert formats.content_of(tmp_path / "one") == formats.content_of(tmp_path / "three")
    grains = grain.sources.ArrayRecordDataSource(sorted(map(str, (tmp_path / "one").glob("*.array_record"))))
    assert [grains[i] for i in range(len(grains))] == records_of(tmp_path / "one")


@pytest.mark.parametrize("make", [formats.parquet, formats.jsonl, formats.huggingface])
def test_some_columns(make: Callable[[pathlib.Path], list[str]], tmp_path: pathlib.Path) -> None:
    run(make(tmp_path), tmp_path / "out", shards=2, columns=["tokens", "label"])
    wanted = [{name: row[name] for name in ("label", "tokens")} for row in formats.flat(formats.rows())]
    assert features_of(tmp_path / "out") == wanted
    with pytest.raises(meshfeed.SettingsError, match=r"unknown columns \['no'\]; the data has \["):
        run(make(tmp_path / "out"), tmp_path / "other", columns=["no", "label"])


def test_blank_lines_before_the_header_of_a_csv(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\r\n\na,b\n1,2\n")
    run(tmp_path / "a.csv", tmp_path / "out")
    assert features_of(tmp_path / "out") == [{"a": [1], "b": [2]}]


def test_a_header_of_csv_with_quotes_and_line_breaks(tmp_path: pathlib.Path) -> None:
    """A line break within a quoted name belongs to the name; after an even number of quotes, it ends the header."""
    for number, names in enumerate([["a,b", "c"], ["a", 'the "b"'], ["two\nlines", "c"], ['a "b"\n', "c\nd"]]):
        with (tmp_path / f"{number}.csv").open("w", newline="") as file:
            csv.writer(file, quoting=csv.QUOTE_ALL if number == 1 else csv.QUOTE_MINIMAL).writerows(
                [names, [1, 2], [3, 4]]
            )
        run(tmp_path / f"{number}.csv", tmp_path / f"out-{number}")
        assert features_of(tmp_path / f"out-{number}") == [
            {names[0]: [1], names[1]: [2]},
            {names[0]: [3], names[1]: [4]},
        ]


def test_csv_with_line_breaks_in_values(tmp_path: pathlib.Path) -> None:
    wanted = [{key: row[key] for key in ("text", "label", "weight")} for row in formats.rows()]
    wanted[3]["text"] = "2026-11-22"  # stays text
    formats.write_csv(tmp_path / "a.csv", wanted)
    run(tmp_path / "a.csv", tmp_path / "out", shards=7)
    found = features_of(tmp_path / "out")
    assert found == [
        {"label": [row["label"]], "text": row["text"].encode(), "weight": [row["weight"]]} for row in wanted
    ]


@pytest.mark.slow
def test_types_that_the_first_block_does_not_show(tmp_path: pathlib.Path) -> None:
    """The 1 MiB that decides the types holds integers; a float, text in another column and a new key come later."""
    count = 12_000
    late = [{"n": i, "t": i, "pad": "p" * 100} for i in range(count)]
    late[-1] |= {"n": 1.5, "new": "x"}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in late))
    late[-1].pop("new")
    late[-1]["t"] = "text"
    formats.write_csv(tmp_path / "a.csv", late)
    for name, workers in (("a.jsonl", 1), ("a.csv", 2)):
        run(tmp_path / name, tmp_path / name[2:], workers=workers, shards=3)
        found = features_of(tmp_path / name[2:])
        assert len(found) == count
        assert found[7]["n"] == [7.0]
        assert found[-1]["n"] == [1.5]
    assert found[7]["t"] == b"7"
    assert features_of(tmp_path / "jsonl")[-1]["new"] == b"x"


def test_a_named_column_may_first_appear_after_the_first_block(tmp_path: pathlib.Path) -> None:
    rows = [{"pad": "p" * 1000} for _ in range(1200)] + [{"pad": "", "late": "x"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(tmp_path / "a.jsonl", tmp_path / "out", columns=["late"])
    found = features_of(tmp_path / "out")
    assert (len(found), found[0], found[-1]) == (1201, {}, {"late": b"x"})
    with pytest.raises(meshfeed.SettingsError, match=r"unknown columns \['never'\]; the data has \['pad', 'late'\]"):
        run(tmp_path / "a.jsonl", tmp_path / "other", columns=["never"])
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("column", ["note", None])
def test_the_column_to_write_may_be_empty_in_the_first_block(column: str | None, tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.csv").write_text("id,note\n" + f"{'1' * 18},\n" * 60_000 + "7,text\n")
    settings = Settings(encoding="bytes", column=column)
    result = convert([f"{tmp_path}/a.csv"], str(tmp_path / "out"), settings, run_here)
    assert (list(result.features), result.num_records) == (["note"], 60_001)
    source = ArrayRecord(f"{tmp_path}/out/*.array_record")
    assert (source[0], source[60_000]) == (b"", b"text")


def test_lines_of_text(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\n\n  three \xff\nlast")
    (tmp_path / "b.txt").write_bytes(b"")
    (tmp_path / "c.txt").write_bytes(b"c\n\r")
    run(tmp_path / "?.txt", tmp_path / "out", shards=2, encoding="bytes")
    assert records_of(tmp_path / "out") == [b"one", b"", b"  three \xff", b"last", b"c", b""]


@pytest.mark.slow
def test_tfrecords_are_copied_and_checked(tmp_path: pathlib.Path) -> None:
    tf = pytest.importorskip("tensorflow")
    features = tf.train.Features(feature={"a": tf.train.Feature(int64_list=tf.train.Int64List(value=[1, 2]))})
    wanted = [tf.train.Example(features=features).SerializeToString(), b"", b"\x0a\x00"] * 5
    for name in ("x.tfrecord-00000-of-00002", "x.tfrecord-00001-of-00002"):
        with tf.io.TFRecordWriter(str(tmp_path / name)) as writer:
            for record in wanted:
                writer.write(record)
    result = run(tmp_path / "x.tfrecord-*", tmp_path / "out", shards=4)
    assert records_of(tmp_path / "out") == wanted * 2
    assert result.features == {"a": {"kind": "int64", "list": True}}

    stored = bytearray((tmp_path / "x.tfrecord-00001-of-00002").read_bytes())
    stored[14] ^= 1
    (tmp_path / "x.tfrecord-00001-of-00002").write_bytes(stored)
    with pytest.raises(meshfeed.CorruptDataError, match="record 0 has a wrong checksum"):
        run(tmp_path / "x.tfrecord-*", tmp_path / "damaged", shards=2)
    (tmp_path / "short.tfrecord").write_bytes(stored[:-3])
    with pytest.raises(meshfeed.CorruptDataError, match="ends within the record at byte"):
        run(tmp_path / "short.tfrecord", tmp_path / "short")
    (tmp_path / "text.tfrecord").write_bytes(b"this is no TFRecord")
    with pytest.raises(meshfeed.CorruptDataError, match="no record begins at byte 0"):
        run(tmp_path / "text.tfrecord", tmp_path / "text")
    with tf.io.TFRecordWriter(str(tmp_path / "later.tfrecord")) as writer:
        writer.write(b"")
        writer.write(b"not an Example")
    with pytest.raises(meshfeed.SourceError, match=r"record 1 is not a tf.train.Example: .* use --encoding bytes"):
        run(tmp_path / "later.tfrecord", tmp_path / "later")
    with tf.io.TFRecordWriter(str(tmp_path / "raw.tfrecord")) as writer:
        writer.write(b"not an Example")
    with pytest.raises(meshfeed.SourceError, match="use --encoding bytes"):
        run(tmp_path / "raw.tfrecord", tmp_path / "raw")
    run(tmp_path / "raw.tfrecord", tmp_path / "raw", encoding="bytes")
    assert records_of(tmp_path / "raw") == [b"not an Example"]


def test_webdataset_with_a_file_that_some_samples_lack(tmp_path: pathlib.Path) -> None:
    samples = [{"txt": b"hello %d" % i, **({"cls": b"%d" % i} if i % 2 else {})} for i in range(20)]
    formats.tar(tmp_path / "a.tar", samples[:12])
    formats.tar(tmp_path / "b.tar", samples[12:])
    run([tmp_path / "a.tar", tmp_path / "b.tar"], tmp_path / "out", shards=3)
    found = features_of(tmp_path / "out")
    assert [{name: value for name, value in one.items() if name != "__key__"} for one in found] == samples
    assert found[11]["__key__"] == b"0011"
    assert not list(tmp_path.glob("*.meshfeed-index"))


@pytest.mark.parametrize("name", ["webdataset", "mds", "huggingface"])
def test_few_large_samples_are_read_at_once(name: str, tmp_path: pathlib.Path) -> None:
    """Videos: some hundred of them would not fit into memory, once per worker."""
    path, content = tmp_path / "data", bytes(1 << 20)
    if name == "webdataset":
        formats.tar(path, [{"mp4": content}] * 40)
    elif name == "mds":
        write_mds(path, [np.zeros(60_000)] * 40)
    else:
        pytest.importorskip("datasets").Dataset.from_dict({"mp4": [content] * 40}).save_to_disk(path)
    reader = FORMATS[name]()
    reader.kept = reader.scratch = tmp_path
    found = reader.scan(str(path), all_types=False)
    assert found.schema is not None
    sizes = [(batch.num_rows, batch.nbytes) for batch in reader.read(str(path), found, 0, 40, found.schema)]
    assert sum(rows for rows, _ in sizes) == 40
    assert max(num_bytes for _, num_bytes in sizes) < 10 << 20


def test_an_index_of_an_archive_is_no_input(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.tar.meshfeed-index").touch()
    with pytest.raises(meshfeed.SourceError, match=r"names only indexes .* Name the archives beside them"):
        run(tmp_path / "*.meshfeed-index", tmp_path / "out")


def test_a_manifest_is_no_input(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    formats.parquet(folder)
    make_manifest(f"{folder}/*.parquet")
    assert run(folder, tmp_path / "out").num_records == formats.COUNT
    with pytest.raises(meshfeed.SourceError, match=r"array_record is an ArrayRecord file already"):
        run(tmp_path / "out", tmp_path / "again")
    (folder / "manifest.json").write_text('{"audio": "a.wav"}')  # of another tool
    with pytest.raises(meshfeed.SourceError, match=r"different formats: .*manifest\.json"):
        run(folder, tmp_path / "again")


def test_mds(tmp_path: pathlib.Path) -> None:
    """The data set that Mosaic Streaming wrote: each value as Mosaic Streaming's own index and ``MDS`` have it."""
    stored = pathlib.Path(__file__).parents[1] / "data" / "formats" / "mds"
    columns = ["array_f32_2x3", "array_i32", "bytes", "float32", "int", "jpeg", "json", "str"]
    run(stored, tmp_path / "out", shards=2, columns=columns)
    source = meshfeed.sources.MDS(str(stored), columns, image_bytes=True)
    for found, wanted in zip(features_of(tmp_path / "out"), source.__getitems__(range(len(source))), strict=True):
        assert found["array_f32_2x3"] == wanted["array_f32_2x3"].ravel().tolist()
        assert found["array_f32_2x3/shape"] == [2, 3]
        assert found["array_i32"] == wanted["array_i32"].ravel().tolist()
        assert (found["bytes"], found["jpeg"], found["str"].decode()) == tuple(
            wanted[n] for n in ("bytes", "jpeg", "str")
        )
        assert (found["float32"], found["int"]) == ([wanted["float32"]], [wanted["int"]])
        assert json.loads(found["json"]) == wanted["json"]
    with pytest.raises(meshfeed.SourceError, match=r"the column 'jpeg_array' holds lists \(jpeg_array\)"):
        run(stored, tmp_path / "other")
    with pytest.raises(meshfeed.SettingsError, match=r"unknown columns \['no'\]; the data has \['array', .*'uint8'\]"):
        run(stored, tmp_path / "other", columns=["int", "no"])


def write_mds(folder: pathlib.Path, arrays: list[np.ndarray]) -> None:
    """Writes a data set of one column of arrays, each with a dtype and a shape of its own."""
    samples = []
    for array in arrays:
        head = [{"u": 0, "i": 1, "f": 2}[array.dtype.kind] + 8 * array.dtype.itemsize, array.ndim << 2 | 1]
        value = bytes(head) + np.array(array.shape, "<u2").tobytes() + array.tobytes()
        samples.append(struct.pack("<I", len(value)) + value)
    ends = np.cumsum([4 + 4 * (len(samples) + 1), *map(len, samples)], dtype=np.uint32)
    content = struct.pack("<I", len(samples)) + ends.tobytes() + b"".join(samples)
    folder.mkdir()
    (folder / "shard.mds").write_bytes(content)
    raw = {"basename": "shard.mds", "bytes": len(content), "hashes": {}}
    shard = {"column_names": ["x"], "column_encodings": ["ndarray"], "column_sizes": [None], "format": "mds"}
    shard |= {
        "compression": None,
        "hashes": [],
        "raw_data": raw,
        "samples": len(samples),
        "version": 2,
        "zip_data": None,
    }
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))


@pytest.mark.parametrize(
    ("first", "second", "fits"),
    [
        (np.int32([0, 0]), np.int16([-3, 4]), True),
        (np.float64([0]), np.float32([0.5]), True),
        (np.array(0.25), np.array(0.5, np.float32), True),
        (np.int64([0]), np.uint8([[200]])[0], True),
        (np.int32([0, 0]), np.float32([1.5, -2.75]), False),
        (np.int32([[0]]), np.float32([[1.5]]), False),
        (np.float32([0]), np.float64([1e300]), False),
        (np.float64([0]), np.int64([2**53 + 1]), False),
        (np.int64([0]), np.uint64([2**63]), False),
        (np.uint8([0]), np.int8([-1]), False),
    ],
)
def test_arrays_of_mds_with_several_dtypes(
    tmp_path: pathlib.Path, first: np.ndarray, second: np.ndarray, fits: bool
) -> None:
    write_mds(tmp_path / "data", [first, second])
    if fits:
        run(tmp_path / "data", tmp_path / "out")
        assert [one["x"] for one in features_of(tmp_path / "out")] == [
            first.reshape(-1).tolist(),
            second.reshape(-1).tolist(),
        ]
        return
    dtypes = f"one holds {second.dtype}, and record 0 holds {first.dtype}"
    message = rf"column 'x' of the records 0 to 1 holds values that differ .* {dtypes}"
    with pytest.raises(meshfeed.SourceError, match=message):
        run(tmp_path / "data", tmp_path / "out")


@pytest.mark.parametrize(("name", "given"), [("mds_zstd", ""), ("mds_gz", "index.json")])
def test_compressed_mds(tmp_path: pathlib.Path, name: str, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    stored = pathlib.Path(__file__).parents[1] / "data" / "formats" / name
    run(stored / given, tmp_path / "out", shards=2)
    source = meshfeed.sources.MDS(str(stored), cache=meshfeed.ShardCache(tmp_path / "cache"))
    for found, wanted in zip(features_of(tmp_path / "out"), source.__getitems__(range(len(source))), strict=True):
        assert found["id"] == [wanted["id"]]
        assert found["x"] == wanted["x"].ravel().tolist()
    assert not (tmp_path / "temporary").exists()  # a kill would leave files there


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (
            '{"chunks": []}',
            "is no index of MDS shards (KeyError: 'shards'). Copy it again. If the data has another format",
        ),
        ('{"shards": [', "is no index of MDS shards (JSONDecodeError: "),
        ('{"shards": [{"raw_data": {}}]}', "is no index of MDS shards (KeyError: 'bytes')"),
        ('{"shards": [{"raw_data": {"bytes": 5}}]}', "is no index of MDS shards (KeyError: "),
        ('{"shards": []}', "lists no shards"),
    ],
)
def test_an_index_that_is_not_of_mds(index: str, message: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "index.json").write_text(index)
    with pytest.raises(meshfeed.SourceError) as caught:
        run(tmp_path / "data", tmp_path / "out")
    assert f"{tmp_path}/data/index.json {message}" in str(caught.value)


def test_images_in_folders(tmp_path: pathlib.Path) -> None:
    folder = formats.images(tmp_path)
    result = run(folder, tmp_path / "out", shards=3)
    found = features_of(tmp_path / "out")
    assert [one["label"] for one in found] == [[0]] * 5 + [[1]] * 5
    assert [one["filename"] for one in found][4:6] == [b"cat/4.png", b"dog/0.png"]
    assert [one["image"] for one in found] == [(folder / one["filename"].decode()).read_bytes() for one in found]
    assert result.features["image"] == {"kind": "bytes", "list": False}
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["made"]["class_names"] == result.class_names == {"label": ["cat", "dog"]}


@pytest.mark.parametrize("pattern", ["*/*.png", "cat/0.png"])
def test_images_without_their_folder(pattern: str, tmp_path: pathlib.Path) -> None:
    folder = formats.images(tmp_path)
    with pytest.raises(meshfeed.SourceError, match=r"cat/0\.png is one image\. Pass the folder that contains"):
        run(folder / pattern, tmp_path / "out")


def test_types_of_columns(tmp_path: pathlib.Path) -> None:
    import datetime

    day = datetime.date(2026, 11, 22)
    table = pa.table(
        {
            "matrix": [[[1, 2], [3, 4]], [], None],
            "struct": [{"a": 1, "b": "x"}, None, {"a": None, "b": ""}],
            "day": [day, None, day],
            "flag": [True, False, None],
            "words": [["a", ""], [], None],
            "half": pa.array(np.array([1, 2, 3], np.float16)),
            "fixed": pa.FixedSizeListArray.from_arrays(pa.array([1, 2, 3, 4, 5, 6], pa.uint8()), 2),
            "code": pa.array(["x", "y", "x"]).dictionary_encode(),
            "image": [{"bytes": b"png", "path": None}] * 3,
            "nothing": pa.nulls(3),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    run(tmp_path / "a.parquet", tmp_path / "out")
    first, second, third = features_of(tmp_path / "out")
    days = (day - datetime.date(1970, 1, 1)).days
    always = {"image/bytes": b"png"}
    assert first == always | {
        "matrix": [1, 2, 3, 4],
        "matrix/shape": [2, 2],
        "struct/a": [1],
        "struct/b": b"x",
        "day": [days],
        "flag": [1],
        "words": [b"a", b""],
        "half": [1.0],
        "fixed": [1, 2],
        "code": b"x",
    }
    assert second == always | {
        "matrix": [],
        "matrix/shape": [0, 0],
        "flag": [0],
        "words": [],
        "half": [2.0],
        "fixed": [3, 4],
        "code": b"y",
    }
    assert third == always | {"struct/b": b"", "day": [days], "half": [3.0], "fixed": [5, 6], "code": b"x"}


def test_an_arrow_file_that_is_no_stream(tmp_path: pathlib.Path) -> None:
    table = pa.table({"a": [1, 2]})
    with pa.OSFile(str(tmp_path / "file.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(meshfeed.SourceError, match=r"file\.arrow is an Arrow file with a footer.* as Parquet: "):
        run(tmp_path / "file.arrow", tmp_path / "out")
    with pa.OSFile(str(tmp_path / "stream.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    run(tmp_path / "stream.arrow", tmp_path / "out")
    assert features_of(tmp_path / "out") == [{"a": [1]}, {"a": [2]}]


def test_a_hugging_face_dataset_of_splits_names_one_of_them(tmp_path: pathlib.Path) -> None:
    import datasets

    part = datasets.Dataset.from_dict({"a": [1]})
    datasets.DatasetDict({"test": part, "train": part}).save_to_disk(tmp_path / "data")
    message = rf"splits \['test', 'train'\]. Convert one at a time, such as {tmp_path}/data/test\.$"
    with pytest.raises(meshfeed.SourceError, match=message):
        run(tmp_path / "data", tmp_path / "out")
    with pytest.raises(
        meshfeed.SettingsError, match=f"^--to .* is in the data set {tmp_path}/data/test. Name a folder out"
    ):
        run(tmp_path / "data" / "test", tmp_path / "data" / "test" / "out")


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([[[1], [2, 3]]], "record 0: column 'x' holds lists of lists of different lengths"),
        ([[1, None]], "record 0: column 'x' holds a list with a null"),
        (pa.array([1], pa.decimal128(5)), r"column 'x' has the type decimal128\(5, 0\)"),
        ([[{"a": 1}]], r"column 'x' has the type list<.*struct<a: int64>>"),
        ([[[{"a": 1}]]], r"column 'x' has the type list<.*list<.*struct<a: int64>>>"),
        ([1e300], "record 0: column 'x' holds 1e\\+300"),
        (pa.array([2**63], pa.uint64()), "record 0: column 'x' holds 9223372036854775808"),
    ],
)
def test_values_that_an_example_cannot_hold(column: Any, message: str, tmp_path: pathlib.Path) -> None:
    pq.write_table(pa.table({"x": column, "y": [1]}), tmp_path / "a.parquet")
    with pytest.raises(meshfeed.SourceError, match=message):
        run(tmp_path / "a.parquet", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    run(tmp_path / "a.parquet", tmp_path / "out", columns=["y"])
    assert features_of(tmp_path / "out") == [{"y": [1]}]


@pytest.mark.slow
def test_tokens(tmp_path: pathlib.Path) -> None:
    import tokenizers

    words = {word: number for number, word in enumerate(["<eod>", "<unk>", "a", "b", "c"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = ["a b c", "", "c c", "b z"] * 5
    pq.write_table(pa.table({"text": texts, "n": range(20)}), tmp_path / "a.parquet")
    settings: dict[str, Any] = {"encoding": "tokens", "tokenizer": str(tmp_path / "tokenizer.json"), "shards": 3}
    result = run(tmp_path / "a.parquet", tmp_path / "out", eod="<eod>", **settings)
    assert (result.num_records, result.num_tokens) == (20, 5 * 11)
    assert result.features == {"text": {"kind": "uint16", "list": True}}
    run(tmp_path / "a.parquet", tmp_path / "two", workers=2, eod="<eod>", **settings)
    assert formats.content_of(tmp_path / "out") == formats.content_of(tmp_path / "two")
    documents = Tokens.documents(str(tmp_path / "out" / "*.bin"), eod=0)
    found = [documents[i]["tokens"].tolist() for i in range(len(documents))]
    assert found == [[2, 3, 4, 0], [0], [4, 4, 0], [3, 1, 0]] * 5
    with pytest.raises(meshfeed.SettingsError, match=r"no token '<end>'. Give a token of its vocabulary or a number"):
        run(tmp_path / "a.parquet", tmp_path / "three", eod="<end>", **settings)
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=2, pad_id=1)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    run(tmp_path / "a.parquet", tmp_path / "four", eod="<eod>", **settings)
    same = {**formats.content_of(tmp_path / "out"), **formats.content_of(tmp_path / "four")}
    assert {name: content for name, content in same.items() if name.endswith(".bin")} == {
        path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.bin")
    }


def test_digits_that_end_a_document_are_a_number() -> None:
    import tokenizers

    words = {word: number for number, word in enumerate(["a", "</s>", "0", "1", "9"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    assert [eod_id(tokenizer, eod) for eod in ("</s>", "1", "0", "9", "a")] == [
        1,
        1,
        0,
        4,
        0,
    ]  # no token has the number 9


def test_bytes_of_one_column(tmp_path: pathlib.Path) -> None:
    pq.write_table(pa.table({"a": ["x", "y"], "b": [b"1", None], "c": [1, 2]}), tmp_path / "a.parquet")
    run(tmp_path / "a.parquet", tmp_path / "out", encoding="bytes", column="a", compression="none")
    assert records_of(tmp_path / "out") == [b"x", b"y"]
    for settings, message in [
        ({}, r'Several columns hold text or bytes.*one of \["a", "b"\]'),
        ({"column": "c"}, r'--column c is not a column of text or bytes.*one of \["a", "b"\]'),
        ({"columns": ["c"]}, "No column holds text or bytes. --encoding bytes writes one: use --encoding example."),
        ({"column": "b"}, "/a.parquet, record 1: the record has no value in the column 'b'"),
    ]:
        with pytest.raises(meshfeed.MeshfeedError, match=message):
            run(tmp_path / "a.parquet", tmp_path / "other", encoding="bytes", **settings)


def test_run_here_is_the_engine_of_one_worker(tmp_path: pathlib.Path) -> None:
    data = formats.parquet(tmp_path)
    convert(data, str(tmp_path / "out"), Settings(), run_here)
    assert len(features_of(tmp_path / "out")) == formats.COUNT
