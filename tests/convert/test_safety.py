"""Data from anywhere: names in it reach no file outside of it, nothing in it is lost or changed, and errors name it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import click.testing
import formats
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordReader

import meshfeed
from meshfeed._src.cli.main import main
from meshfeed._src.convert import run as convert_run
from meshfeed._src.convert.readers import WebDatasets
from meshfeed._src.convert.run import convert, run_here
from meshfeed._src.convert.writers import Settings
from meshfeed._src.sources.files.direct import SparseFile
from meshfeed.sources import DecodeExample


def features(data: pathlib.Path | str, out: pathlib.Path, **settings: Any) -> list[dict[str, Any]]:
    """Converts, and returns the features of the records."""
    convert([str(data)], str(out), Settings(**settings), run_here)
    records = []
    for path in sorted(out.glob("*.array_record")):
        reader = ArrayRecordReader(str(path))
        records += reader.read(0, reader.num_records()) if reader.num_records() else []
    decoded = [DecodeExample()(record) for record in records]
    return [{k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in one.items()} for one in decoded]


# ------------------------------------------------------------------------ names that become paths


def test_a_name_that_is_not_utf8(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / os.fsdecode(b"\xe9.jsonl")).write_text('{"a": 1}\n{"a": 2}\n')
    assert features(folder / "*.jsonl", tmp_path / "out") == [{"a": [1]}, {"a": [2]}]


@pytest.fixture
def bucket() -> Iterator[str]:
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    yield "memory://corpus/images"
    files.store.clear()


@pytest.mark.parametrize("name", ["a/../../../../../escaped.png", "./x.png", "a//x.png", "a\0.png"])
def test_an_object_of_a_folder_at_a_url_is_written_below_the_folder_only(
    name: str, bucket: str, tmp_path: pathlib.Path
) -> None:
    import fsspec

    files = fsspec.filesystem("memory")
    files.pipe({"/corpus/images/a/0.png": b"png"})
    files.store[f"/corpus/images/{name}"] = files.store["/corpus/images/a/0.png"]
    with pytest.raises(
        meshfeed.SourceError, match=r"contains the object .*, which is no path below that folder. Rename"
    ):
        convert([bucket], str(tmp_path / "deep" / "er" / "out"), Settings(), run_here, named_format="images")
    assert not list(tmp_path.rglob("*.png"))


def test_an_object_beside_others_below_it(bucket: str, tmp_path: pathlib.Path) -> None:
    import fsspec

    files = fsspec.filesystem("memory")
    files.pipe({"/corpus/images/a/0.png": b"png"})
    files.store["/corpus/images/a"] = files.store["/corpus/images/a/0.png"]
    with pytest.raises(meshfeed.SourceError, match=r"contains the object 'a/0.png', and 'a' too, which cannot be both"):
        convert([bucket], str(tmp_path / "out"), Settings(), run_here, named_format="images")


def images_table(contents: list[bytes | None], paths: list[str | None], *, declared: bool) -> pa.Table:
    column = pa.StructArray.from_arrays(
        [pa.array(contents, pa.binary()), pa.array(paths, pa.string())], ["bytes", "path"]
    )
    table = pa.table({"image": column, "n": range(len(paths))})
    declaration = json.dumps(
        {"info": {"features": {"image": {"_type": "Image"}, "n": {"dtype": "int64", "_type": "Value"}}}}
    )
    return table.replace_schema_metadata({"huggingface": declaration} if declared else None)


def test_a_struct_of_bytes_and_path_is_a_struct_unless_declared(tmp_path: pathlib.Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    paths = [str(secret), "name.png"]
    pq.write_table(images_table([None, b"png"], paths, declared=False), tmp_path / "plain.parquet")
    assert features(tmp_path / "plain.parquet", tmp_path / "plain") == [
        {"image/path": os.fsencode(secret), "n": [0]},
        {"image/bytes": b"png", "image/path": b"name.png", "n": [1]},
    ]
    pq.write_table(images_table([b"one", b"png"], paths, declared=True), tmp_path / "declared.parquet")
    assert features(tmp_path / "declared.parquet", tmp_path / "declared") == [
        {"image": b"one", "n": [0]},
        {"image": b"png", "n": [1]},
    ]
    pq.write_table(images_table([b"png", None], paths[::-1], declared=True), tmp_path / "outside.parquet")
    with pytest.raises(
        meshfeed.SourceError, match=r"outside.parquet, record 1: the content of the file .*secret' is not in"
    ):
        features(tmp_path / "outside.parquet", tmp_path / "outside")


@pytest.mark.parametrize("kind", ["huggingface", "parquet"])
def test_numbers_of_classes_that_differ_between_files(kind: str, tmp_path: pathlib.Path) -> None:
    """The labels of both files would otherwise be mixed, as nothing in the output distinguishes them."""
    datasets = pytest.importorskip("datasets")
    paths = {}
    for number, names in enumerate((["cat", "dog"], ["cat", "dog", "bird"], ["dog", "cat"])):
        label = datasets.ClassLabel(names=names)
        features = datasets.Features(
            {"x": datasets.Value("int64"), "label": label, "all": datasets.Sequence(label), "in": {"one": label}}
        )
        rows = {"x": [number], "label": [0], "all": [[0, 1]], "in": [{"one": 1}]}
        made, path = datasets.Dataset.from_dict(rows, features), tmp_path / f"{number}.{kind}"
        made.save_to_disk(str(path)) if kind == "huggingface" else made.to_parquet(str(path))
        paths[number] = str(path)
    for columns, named in ((None, "label"), (["x", "all"], "all"), (["in"], "in")):
        with pytest.raises(
            meshfeed.SourceError, match=f"2.{kind}: 0 in the column '{named}' stands for the class 'dog', and"
        ):
            convert([paths[0], paths[2]], str(tmp_path / "out"), Settings(columns=columns), run_here)
    assert convert([paths[0], paths[2]], str(tmp_path / "x"), Settings(columns=["x"]), run_here).class_names == {}
    for ordered in (paths[0], paths[1]), (paths[1], paths[0]):
        made = convert(list(ordered), f"{tmp_path}/more{pathlib.Path(ordered[0]).stem}", Settings(), run_here)
        assert made.num_records == 2
        assert made.class_names == {name: ["cat", "dog", "bird"] for name in ("label", "all", "in/one")}


@pytest.mark.slow
def test_a_hugging_face_dataset_reads_files_of_its_own_folder_only(tmp_path: pathlib.Path) -> None:
    import datasets

    (tmp_path / "secret").write_bytes(b"secret")

    def save(name: str, path: str) -> pathlib.Path:
        kinds = datasets.Features({"image": datasets.Image(decode=False), "n": datasets.Value("int64")})
        made = datasets.Dataset.from_dict({"image": [{"bytes": b"png", "path": None}], "n": [0]}, features=kinds)
        made.save_to_disk(tmp_path / name)
        arrow = next((tmp_path / name).glob("*.arrow"))
        table = images_table([None], [path], declared=True).replace_schema_metadata(made.data.schema.metadata)
        with pa.OSFile(str(arrow), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
        (tmp_path / name / "in.png").write_bytes(b"inside")
        (tmp_path / name / "link.png").symlink_to(tmp_path / "secret")
        return tmp_path / name

    assert features(save("good", "in.png"), tmp_path / "out") == [{"image": b"inside", "n": [0]}]
    for number, path in enumerate((str(tmp_path / "secret"), "../secret", "link.png", "none.png")):
        with pytest.raises(meshfeed.SourceError, match="is not in the data, and no such file is in the folder"):
            features(save(f"bad{number}", path), tmp_path / "other")
    state = json.loads((tmp_path / "good" / "state.json").read_text())
    state["_data_files"] = [{"filename": "../bad0/data-00000-of-00001.arrow"}]
    (tmp_path / "good" / "state.json").write_text(json.dumps(state))
    with pytest.raises(
        meshfeed.CorruptDataError, match=r"state.json lists the file '../bad0/.*', which is outside of its"
    ):
        features(tmp_path / "good", tmp_path / "state")


def test_an_index_of_mds_names_files_of_its_folder_only(tmp_path: pathlib.Path) -> None:
    stored = pathlib.Path(__file__).parents[1] / "data" / "formats" / "mds"
    shutil.copytree(stored, tmp_path / "mds")
    index = json.loads((tmp_path / "mds" / "index.json").read_text())
    name = index["shards"][0]["raw_data"]["basename"]
    (tmp_path / "mds" / name).rename(tmp_path / name)
    for listed in (f"../{name}", str(tmp_path / name)):
        index["shards"][0]["raw_data"]["basename"] = listed
        (tmp_path / "mds" / "index.json").write_text(json.dumps(index))
        with pytest.raises(meshfeed.CorruptDataError, match=r"lists the file .*, which is outside of its folder"):
            features(tmp_path / "mds", tmp_path / "out", columns=["int"])


def test_a_link_to_a_folder_above_it(tmp_path: pathlib.Path) -> None:
    folder = formats.images(tmp_path)
    (folder / "cat" / "all").symlink_to(folder)
    with pytest.raises(meshfeed.SourceError, match=r"cat/all is a link to a folder that contains it. Remove the link"):
        features(folder, tmp_path / "out")


PLAN = ["--hosts", "1", "--devices-per-host", "1", "--mesh", "data=1", "--spec", "data", "--global-batch-size", "1"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["convert", "a.jsonl", "--to", "https://bucket/out"],
        ["convert", "a.jsonl", "--to", "hf://datasets/me/out"],
        ["convert", "a.jsonl", "--to", "simplecache::s3://bucket/out"],
        ["demo", "--directory", "gs://bucket/demo"],
    ],
)
def test_an_output_at_a_url_is_refused(
    arguments: list[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n')
    ended = click.testing.CliRunner().invoke(main, arguments)
    assert ended.exit_code == 2
    assert " is a URL" in ended.output
    remedy = "and copy the result." if arguments[0] == "convert" else "copy the files to the store afterwards"
    assert remedy in " ".join(ended.output.split())
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


# ------------------------------------------------------------------------ nothing is lost or changed


@pytest.mark.parametrize("rows", [[{}, {}, {}], [{"a": {}}, {"a": {}}, {}], [{}, {"a": None}, {"a": []}]])
def test_records_without_features_are_records(rows: list[dict[str, Any]], tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = features(tmp_path / "a.jsonl", tmp_path / "out", shards=2)
    assert found[:2] == [{}, {}]
    assert len(found) == 3


def test_parquet_files_without_a_column_of_the_others(tmp_path: pathlib.Path) -> None:
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"b": [3, 4, 5]}), tmp_path / "b.parquet")
    found = features(f"{tmp_path}/*.parquet", tmp_path / "out", columns=["a"])
    assert found == [{"a": [1]}, {"a": [2]}, {}, {}, {}]


TEXTS = ["02139", "0x1F", "+1", "-0", "1.50", "1e5", "1_000", " 1", "1 ", "1,000", "NaN", "NA", "null", "true", ".5", "5.",
         "1E-05", "99999999999999999999", "0.1000000000000000055", "Infinity", "00", "-01", "١"]  # fmt: skip


@pytest.mark.parametrize("other", ["7", "1.5", ""])
def test_values_of_csv_that_are_no_numbers_as_python_writes_them_stay(other: str, tmp_path: pathlib.Path) -> None:
    names = [f"c{i:02}" for i in range(len(TEXTS))]
    rows = [names, [f'"{text}"' for text in TEXTS], [other] * len(TEXTS)]
    (tmp_path / "a.csv").write_text("".join(",".join(row) + "\n" for row in rows))
    found = features(tmp_path / "a.csv", tmp_path / "out")
    assert [one[name] for name, one in zip(names, found[:1] * len(names), strict=True)] == [t.encode() for t in TEXTS]
    assert found[1] == dict.fromkeys(names, other.encode())


def test_numbers_of_csv(tmp_path: pathlib.Path) -> None:
    values = (
        ["0", "-7", "9223372036854775807"],
        ["1.0", "-0.0", "1e-05"],
        ["1", "0.25", ""],
        ["", "3", ""],
        ["", "", ""],
    )
    lines = [",".join(row) for row in zip(*values, strict=True)]
    (tmp_path / "a.csv").write_text("a,b,c,d,e\n" + "\n".join(lines) + "\n")
    found = features(tmp_path / "a.csv", tmp_path / "out")
    assert found == [
        {"a": [0], "b": [1.0], "c": [1.0]},
        {"a": [-7], "b": [0.0], "c": [0.25], "d": [3]},
        {"a": [2**63 - 1], "b": [float(np.float32(1e-5))]},
    ]


def test_an_identifier_after_the_first_block_of_csv_keeps_its_zeros(tmp_path: pathlib.Path) -> None:
    rows = [f"{i + 10000},{'p' * 100}" for i in range(12_000)]
    (tmp_path / "a.csv").write_text("zip,pad\n" + "\n".join([*rows, "02139,x"]) + "\n")
    found = features(tmp_path / "a.csv", tmp_path / "out", columns=["zip"])
    assert (len(found), found[0], found[-1]) == (12_001, {"zip": b"10000"}, {"zip": b"02139"})


def test_lists_of_json_that_are_empty_in_the_first_block(tmp_path: pathlib.Path) -> None:
    rows: list[dict[str, Any]] = [{"a": [], "b": [[]], "pad": "p" * 1000} for _ in range(1200)]
    (tmp_path / "empty.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert features(tmp_path / "empty.jsonl", tmp_path / "empty", columns=["a"])[0] == {"a": []}
    rows.append({"a": [1, 2], "b": [[3]], "pad": ""})
    (tmp_path / "late.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = features(tmp_path / "late.jsonl", tmp_path / "late", columns=["a", "b"])
    assert found[0]["a"] == []
    assert found[-1] == {"a": [1, 2], "b": [3], "b/shape": [1, 1]}


def test_an_archive_without_samples_has_only_the_key(tmp_path: pathlib.Path) -> None:
    formats.tar(tmp_path / "a.tar", [])
    reader = WebDatasets()
    reader.kept = tmp_path
    assert reader.scan(str(tmp_path / "a.tar"), all_types=False).schema.names == ["__key__"]


def test_odd_extensions_in_tar(tmp_path: pathlib.Path) -> None:
    formats.tar(tmp_path / "dot.tar", [{"": b"1", "txt": b"2"}])
    assert features(tmp_path / "dot.tar", tmp_path / "out") == [{"": b"1", "txt": b"2", "__key__": b"0000"}]
    for number, name in enumerate(("__key__", "a\nb", "\udcff")):
        formats.tar(tmp_path / f"{number}.tar", [{"txt": b"2", name: b"1"}])
        with pytest.raises(
            meshfeed.SourceError, match=rf"(?s){number}.tar has a file .*extension .*cannot be the name"
        ):
            features(tmp_path / f"{number}.tar", tmp_path / "other")


def test_hidden_folders_hold_no_class_and_empty_ones_are_classes(tmp_path: pathlib.Path) -> None:
    folder = formats.images(tmp_path)
    for hidden in (folder / ".ipynb_checkpoints", folder / "dog" / ".thumbnails"):
        shutil.copytree(folder / "cat", hidden)
    (folder / "bird").mkdir()
    (folder / "notes").mkdir()
    (folder / "notes" / "a.txt").write_text("no image")
    found = features(folder, tmp_path / "out")
    labels = [(b"cat/%d.png" % number, [1]) for number in range(5)] + [
        (b"dog/%d.png" % number, [2]) for number in range(5)
    ]
    assert [(one["filename"], one["label"]) for one in found] == labels


def test_a_link_that_leads_nowhere_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "data" / "b.jsonl").symlink_to("/nowhere/blob")
    with pytest.raises(meshfeed.SourceError, match=r"data/b\.jsonl is a link to /nowhere/blob, which does not exist"):
        features(tmp_path / "data", tmp_path / "out")


def test_tensors_keep_their_shape(tmp_path: pathlib.Path) -> None:
    kind = pa.fixed_shape_tensor(pa.int32(), (2, 3))
    storage = pa.array([list(range(6)), None, list(range(6, 12))], kind.storage_type)
    flat = pa.array([[1, 2], [3, 4], None], pa.list_(pa.int8(), 2))
    columns = {
        "x": pa.ExtensionArray.from_storage(kind, storage),
        "row": pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.int8(), (2,)), flat),
        "boxes": pa.array([[], [[1, 2, 3, 4]], None], pa.list_(pa.list_(pa.int8(), 4))),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert features(tmp_path / "a.parquet", tmp_path / "out") == [
        {"boxes": [], "boxes/shape": [0, 4], "row": [1, 2], "x": [0, 1, 2, 3, 4, 5], "x/shape": [2, 3]},
        {"boxes": [1, 2, 3, 4], "boxes/shape": [1, 4], "row": [3, 4]},
        {"x": [6, 7, 8, 9, 10, 11], "x/shape": [2, 3]},
    ]
    turned = pa.fixed_shape_tensor(pa.int32(), (2, 3), permutation=[1, 0])
    pq.write_table(pa.table({"x": pa.ExtensionArray.from_storage(turned, storage)}), tmp_path / "b.parquet")
    with pytest.raises(meshfeed.SourceError, match=r"column 'x' stores its tensors .* order \[1, 0\]"):
        features(tmp_path / "b.parquet", tmp_path / "other")


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_views_of_text_and_bytes(name: str, tmp_path: pathlib.Path) -> None:
    columns = {
        "text": pa.array(["a", None, "long enough for a buffer"], pa.string_view()),
        "bytes": pa.array([None, b"b", b"c"], pa.binary_view()),
        "list": pa.array([["a"], None, ["b", "c"]], pa.list_(pa.string_view())),
        "large": pa.array([None, ["a"], ["b", "c"]], pa.large_list(pa.binary_view())),
        "fixed": pa.array([["a", ""], ["b", "c"], None], pa.list_(pa.string_view(), 2)),
        "inside": pa.array([{"x": "a"}, None, {"x": None}], pa.struct({"x": pa.string_view()})),
    }
    table, path = pa.table(columns), tmp_path / name
    if name == "a.arrow":  # as polars writes it
        with pa.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)
    else:
        pq.write_table(table, path)
    assert features(path, tmp_path / "out") == [
        {"text": b"a", "list": b"a", "fixed": [b"a", b""], "inside/x": b"a"},
        {"bytes": b"b", "large": b"a", "fixed": [b"b", b"c"]},
        {"text": b"long enough for a buffer", "bytes": b"c", "list": [b"b", b"c"], "large": [b"b", b"c"]},
    ]


def test_dictionaries_are_the_values_in_them(tmp_path: pathlib.Path) -> None:
    """As pandas writes categories, in one file and not in another."""
    codes = pa.array(["a", None, "b"]).dictionary_encode()
    words = pa.array([["a"], [], ["b", "a"]], pa.list_(pa.dictionary(pa.int8(), pa.string())))
    pairs = pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int32(), 2))
    pq.write_table(pa.table({"code": codes, "words": words, "pair": pairs}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"code": ["c"], "words": [["c"]], "pair": pairs[:1]}), tmp_path / "b.parquet")
    assert features(f"{tmp_path}/*.parquet", tmp_path / "out", shards=3) == [
        {"code": b"a", "words": b"a", "pair": [1, 2]},
        {"words": [], "pair": [3, 4]},
        {"code": b"b", "words": [b"b", b"a"], "pair": [5, 6]},
        {"code": b"c", "words": b"c", "pair": [1, 2]},
    ]


# ------------------------------------------------------------------------ one input


def test_a_finished_folder_is_of_the_same_files_only(tmp_path: pathlib.Path) -> None:
    path, out = tmp_path / "a.txt", tmp_path / "out"
    path.write_text("one\n")
    features(path, out)
    assert convert([str(path)], str(out), Settings(), run_here).was_complete
    path.write_text("two\n")
    os.utime(path, ns=(1, 1))
    with pytest.raises(
        meshfeed.SettingsError, match="the result of a conversion of another input, or of files that have ch"
    ):
        features(path, out)


@pytest.mark.parametrize("kind", ["images", "mds"])
def test_a_file_in_a_folder_is_part_of_the_input(kind: str, tmp_path: pathlib.Path) -> None:
    if kind == "images":
        folder = formats.images(tmp_path)
        edited = folder / "cat" / "0.png"
    else:
        folder = tmp_path / "mds"
        shutil.copytree(pathlib.Path(__file__).parents[1] / "data" / "formats" / "mds_zstd", folder)
        edited = next(path for path in folder.iterdir() if path.name != "index.json")
    features(folder, tmp_path / "out")
    os.utime(edited, ns=(1, 1))
    with pytest.raises(meshfeed.SettingsError, match="of another input, or of files that have changed"):
        features(folder, tmp_path / "out")


@pytest.mark.parametrize("when", ["scan", "write"])
def test_an_input_that_changes_during_the_conversion(when: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n")

    def change(directory: str, phase: Any, numbers: Any) -> None:
        if phase == when:
            path.write_text("two\none\n")
        run_here(directory, phase, numbers)

    with pytest.raises(
        meshfeed.SourceError, match=r"a.txt has changed during the conversion, .* Leave it as it is, remove"
    ):
        convert([str(path)], str(tmp_path / "out"), Settings(shards=2), change)
    assert (tmp_path / "out").exists() == (when == "write")  # what was written stays, and is no complete conversion
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_tfrecord_that_is_cut_while_it_is_converted(tmp_path: pathlib.Path) -> None:
    """It ended the process with SIGBUS."""
    tf_records = pytest.importorskip("tensorflow").io.TFRecordWriter
    path = tmp_path / "a.tfrecord"
    with tf_records(str(path)) as writer:
        for _ in range(4000):
            writer.write(b"x" * 1000)

    def cut(directory: str, phase: Any, numbers: Any) -> None:
        if phase == "write":
            os.truncate(path, 100_000)
        run_here(directory, phase, numbers)

    with pytest.raises(meshfeed.SourceError, match=r"a.tfrecord has changed during the conversion"):
        convert([str(path)], str(tmp_path / "out"), Settings(encoding="bytes"), cut)
    from meshfeed._src.convert.example import _tf_records

    with tf_records(str(path)) as writer:
        for _ in range(4000):
            writer.write(b"x" * 1000)
    found = _tf_records(str(path), 0)
    next(found)
    os.truncate(path, 100_000)
    with pytest.raises(meshfeed.CorruptDataError, match="it ends within the record"):
        list(found)


def tokenizer(path: pathlib.Path, numbers: dict[str, int]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="b")).save(str(path))


def test_a_conversion_is_of_one_tokenizer(tmp_path: pathlib.Path) -> None:
    data, file = tmp_path / "a.txt", tmp_path / "tokenizer.json"
    data.write_text("a\nb\n")
    tokenizer(file, {"a": 1, "b": 2})
    settings = Settings(encoding="tokens", tokenizer=str(file), shards=2)

    def stop(directory: str, phase: Any, numbers: Any) -> None:
        run_here(directory, phase, numbers[:1])
        tokenizer(file, {"a": 2, "b": 1})  # the same size
        if phase == "write":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert([str(data)], str(tmp_path / "out"), settings, stop)
    with pytest.raises(
        meshfeed.SettingsError, match="an unfinished conversion of another tokenizer, or of one that has ch"
    ):
        convert([str(data)], str(tmp_path / "out"), settings, run_here)
    tokenizer(file, {"a": 1, "b": 2})
    convert([str(data)], str(tmp_path / "out"), settings, run_here)
    contents = [path.read_bytes()[1024:] for path in sorted((tmp_path / "out").glob("*.bin"))]
    assert contents == [b"\1\0", b"\2\0"]
    tokenizer(file, {"a": 2, "b": 1})
    with pytest.raises(meshfeed.SettingsError, match="the result of a conversion of another tokenizer"):
        convert([str(data)], str(tmp_path / "out"), settings, run_here)


def test_a_tokenizer_whose_numbers_have_gaps(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.txt").write_text("a\nb\n")
    tokenizer(tmp_path / "tokenizer.json", {"a": 70_000, "b": 2})
    settings = Settings(encoding="tokens", tokenizer=str(tmp_path / "tokenizer.json"))
    convert([str(tmp_path / "a.txt")], str(tmp_path / "out"), settings, run_here)
    stored = next((tmp_path / "out").glob("*.bin")).read_bytes()[1024:]
    assert np.frombuffer(stored, "<u4").tolist() == [70_000, 2]


def test_conversions_of_the_previous_version(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    features(tmp_path / "a.txt", tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    made = manifest["made"]["from"]
    del made["versions"], made["tokenizer"]
    made["version"] = 1
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(manifest))
    with caplog.at_level(logging.WARNING):
        assert convert([str(tmp_path / "a.txt")], str(tmp_path / "out"), Settings(), run_here).was_complete
    assert "was converted by an earlier version" in caplog.text
    with pytest.raises(
        meshfeed.SettingsError, match="the result of a conversion without --shards, and this one is with"
    ):
        features(tmp_path / "a.txt", tmp_path / "out", shards=1)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(convert_run, "_is_empty", lambda *_: False)
    with pytest.raises(KeyboardInterrupt):
        convert([str(tmp_path / "a.txt")], str(tmp_path / "begun"), Settings(), stop)
    job = tmp_path / "begun" / ".convert" / "job.json"
    description = json.loads(job.read_text())
    del description["tokenizer"]
    job.write_text(json.dumps(description | {"version": 1}))
    with pytest.raises(
        meshfeed.SettingsError, match=r"unfinished conversion of another version of meshfeed. .* or remove this"
    ):
        features(tmp_path / "a.txt", tmp_path / "begun")


# ------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            pa.array([1, -1, 3]),
            pa.array([1, 2**63 + 5, 2**63 + 6], pa.uint64()),
            r"int64, .*: Integer value 92\d+3 not in",
        ),
        (
            pa.array([0.5]),
            pa.array([1, 2**53 + 1, 2**60], pa.int64()),
            r"double, .*: Integer value 9007199254740993 not in",
        ),
        (
            pa.array([[0.5]]),
            pa.array([[1], [2, 2**53 + 1]]),
            r"list<.*double>, .*: Integer value 9007199254740993 not in",
        ),
        (
            pa.array([0], pa.timestamp("ns")),
            pa.array([0, 2**60], pa.timestamp("ms")),
            r"timestamp\[ns\], .*: Casting from",
        ),
    ],
)
@pytest.mark.parametrize("shards", [1, 3])
def test_values_that_do_not_fit_the_type_of_all_files(
    first: pa.Array, second: pa.Array, message: str, shards: int, tmp_path: pathlib.Path
) -> None:
    pq.write_table(pa.table({"n": first}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"n": second}), tmp_path / "b.parquet")
    with pytest.raises(
        meshfeed.SourceError, match=rf"b.parquet, record 1: column 'n' has a value that {message}.*--columns"
    ):
        features(f"{tmp_path}/*.parquet", tmp_path / "out", shards=shards)


def test_columns_of_one_name(tmp_path: pathlib.Path) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]), tmp_path / "a.parquet")
    with pytest.raises(
        meshfeed.SourceError, match=r"a.parquet has several columns named 'a'. Expected a different name"
    ):
        features(tmp_path / "a.parquet", tmp_path / "out")


@pytest.mark.slow
def test_a_damaged_footer_of_parquet_names_the_file(tmp_path: pathlib.Path) -> None:
    pq.write_table(pa.table({"a": [1], "b": ["x"]}), tmp_path / "a.parquet")
    stored = (tmp_path / "a.parquet").read_bytes()
    size = int.from_bytes(stored[-8:-4], "little")
    rng = np.random.default_rng(0)
    messages = []
    for _ in range(60):
        damaged = bytearray(stored)
        damaged[len(stored) - 8 - int(rng.integers(1, size + 1))] ^= int(rng.integers(1, 256))
        (tmp_path / "a.parquet").write_bytes(damaged)
        with contextlib.suppress(meshfeed.MeshfeedError), naming(messages):
            features(tmp_path / "a.parquet", tmp_path / "out")
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert len(messages) > 10
    assert all("a.parquet" in message for message in messages)


@contextlib.contextmanager
def naming(messages: list[str]) -> Iterator[None]:
    """Collects the messages of errors."""
    try:
        yield
    except meshfeed.MeshfeedError as error:
        messages.append(str(error))
        raise


def test_a_write_of_more_than_a_call_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda number, content, start: write(number, content[:1000], start))
    content = os.urandom(4500)
    file = SparseFile(5000)
    file.write(100, content)
    assert os.pread(file.number, 5000, 0) == bytes(100) + content + bytes(400)


def test_a_full_disk_leaves_no_negative_count(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from array_record.python import array_record_module

    class Empty:
        def __init__(self, path: str) -> None:
            pass

        def num_records(self) -> int:
            return -1

    (tmp_path / "a.txt").write_text("one\n")
    monkeypatch.setattr(array_record_module, "ArrayRecordReader", Empty)
    with pytest.raises(OSError, match=r": 0 of 1 records are stored. Is the disk full\?"):
        convert([str(tmp_path / "a.txt")], str(tmp_path / "out"), Settings(), run_here)
