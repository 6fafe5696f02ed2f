from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pathlib
import pickle
import shutil
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import array_record_files
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from format_files import FOLDER
from http_store import Store
from hypothesis import given, settings
from hypothesis import strategies as st
from token_files import write_llm_c, write_megatron

from meshfeed import CorruptDataError, SettingsError, SourceError
from meshfeed._src.cli.main import main
from meshfeed._src.convert.example import encode_examples
from meshfeed._src.reading.identity import digest_tree, source_identity
from meshfeed._src.sources import documents
from meshfeed._src.sources.files.manifest import (
    FileEntry,
    Lengths,
    describe_file,
    digest_of,
    read_manifest,
    write_manifest,
)
from meshfeed._src.sources.files.shard_cache import ShardCache
from meshfeed._src.sources.manifest import make_manifest
from meshfeed._src.sources.tokens import files as tokens_module
from meshfeed.sources import ArrayRecord, Packed, Parquet, Tokens, WebDataset

T = TypeVar("T")


def test_a_manifest_is_what_was_written_wherever_the_folder_is_moved(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "x.bin").write_bytes(b"abc")
    files = [
        dataclasses.replace(describe_file(f"{folder}/x.bin", 3), details={"group_size": 1}),
        FileEntry("s3://bucket/y.bin", 5, 2, None, {"group_size": 1}),
        FileEntry("/elsewhere/z.bin", 6, 1, "md5:00", {"group_size": 2}),
    ]
    lengths = {"tokens": Lengths(np.arange(1, 7)), "a/b": Lengths(np.array([1 << 40]), [1, 0, 0], 7)}
    write_manifest(f"{folder}/manifest.json", "ArrayRecord", files, lengths=lengths)
    os.rename(folder, tmp_path / "b")
    found = read_manifest(f"{tmp_path}/b/manifest.json")
    assert found.source == "ArrayRecord"
    assert found.files == [FileEntry(f"{tmp_path}/b/x.bin", 3, 3, digest_of(b"abc"), {"group_size": 1}), *files[1:]]
    lists = {key: found.lengths(key, eod) for key, eod in (("tokens", None), ("a/b", 7))}
    names = [entry.path for entry in found.files]
    assert {key: list(parts or ()) for key, parts in lists.items()} == {"tokens": names, "a/b": names}
    tokens, wide = (list((lists[key] or {}).values()) for key in ("tokens", "a/b"))
    assert [(part.dtype, part.tolist()) for part in tokens] == [
        (np.uint32, [1, 2, 3]), (np.uint32, [4, 5]), (np.uint32, [6]),
    ]  # fmt: skip
    assert [(part.dtype, part.tolist()) for part in wide] == [
        (np.int64, [1 << 40]), (np.int64, []), (np.int64, []),
    ]  # fmt: skip
    assert found.lengths("a/b", 8) is None
    assert found.lengths("text") is None
    assert sorted(os.listdir(tmp_path / "b")) == [
        "manifest.a%2Fb.lengths", "manifest.json", "manifest.tokens.lengths", "x.bin",
    ]  # fmt: skip
    (tmp_path / "b" / "manifest.tokens.lengths").write_bytes(b"")
    with pytest.raises(CorruptDataError, match=r"manifest.tokens.lengths: .*manifest.json lists it with xxh3_64"):
        found.lengths("tokens")


def test_a_manifest_in_a_store() -> None:
    write_manifest("memory://manifest-test/manifest.json", "Parquet", [FileEntry("memory://manifest-test/a", 1, 2)])
    (file,) = read_manifest("memory://manifest-test/manifest.json").files
    assert file == FileEntry("memory://manifest-test/a", 1, 2)
    assert b'["a", 1, 2, null, 0]' in fsspec.open("memory://manifest-test/manifest.json").open().read()


def test_several_manifests_by_one_pattern(tmp_path: pathlib.Path) -> None:
    memory = fsspec.filesystem("memory")
    for number, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"x": [number] * 2}), tmp_path / name / "0.parquet")
        make_manifest(f"{tmp_path}/{name}/0.parquet", f"{tmp_path}/{name}/manifest.json")
        memory.put(f"{tmp_path}/{name}", "/several-manifests/", recursive=True)
    for folder in (str(tmp_path), "memory://several-manifests"):
        for pattern in ("*/manifest.json", "{a,b}/manifest.json"):
            assert Parquet(f"{folder}/{pattern}").read_batch([0, 1, 2, 3])["x"].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, SourceError, "there is no manifest .*a.json"),
        ("", CorruptDataError, "a.json: it is no manifest of meshfeed"),
        ("[1]", CorruptDataError, "it is no manifest"),
        ('{"format": "webdataset"}', CorruptDataError, "its format is 'webdataset'"),
        ('{"format": "meshfeed manifest", "version": 2}', SourceError, "has version 2; .* up to 1"),
        ('{"format": "meshfeed manifest", "version": 1, "details": [], "files": [1]}', CorruptDataError, "TypeError"),
    ],
)
def test_what_is_no_manifest(tmp_path: pathlib.Path, content: str | None, error: type, message: str) -> None:
    if content is not None:
        (tmp_path / "a.json").write_text(content)
    with pytest.raises(error, match=message):
        read_manifest(f"{tmp_path}/a.json")


@pytest.mark.parametrize(
    "name",
    ["../x.parquet", "a/../../x.parquet", "/etc/hostname", "file:///etc/hostname", "local:///etc/hostname", "", "\0"],
)
def test_a_remote_manifest_lists_no_local_file(tmp_path: pathlib.Path, name: str) -> None:
    write_manifest(str(tmp_path / "manifest.json"), "Parquet", [FileEntry("/somewhere/0.parquet", 1, 1)])
    text = (tmp_path / "manifest.json").read_text()
    content = text.replace("/somewhere/0.parquet", json.dumps(name)[1:-1]).encode()
    store = fsspec.filesystem("memory")
    for path in ("memory://listed/manifest.json", str(tmp_path / "manifest.json")):
        store.pipe("/listed/manifest.json", content)
        (tmp_path / "manifest.json").write_bytes(content)
        if path[0] == "/" and name == "/etc/hostname":  # the user's own manifest may list files elsewhere
            assert read_manifest(path).files[0].path == name
            continue
        if path[0] == "/" and name.startswith("local:"):
            continue
        with pytest.raises(CorruptDataError, match="which is not in its folder"):
            read_manifest(path)
    store.rm("/listed", recursive=True)


def test_one_line_per_file(tmp_path: pathlib.Path) -> None:
    write_manifest(f"{tmp_path}/m.json", "Tokens", [FileEntry(f"{tmp_path}/{i}.bin", 1, 1) for i in range(9)])
    content = (tmp_path / "m.json").read_text()
    assert json.loads(content)["files"][8] == ["8.bin", 1, 1, None, 0]
    assert len([line for line in content.splitlines() if line.startswith("  [")]) == 9


def same_source(first: object, second: object) -> None:
    """The same records in the same order, and states carry over."""
    assert source_identity(first) == source_identity(second)  # type: ignore[arg-type]
    assert digest_tree(list(first)) == digest_tree(list(second))  # type: ignore[call-overload]


def opened_without_a_look(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, make: Callable[[], T]) -> T:
    """Makes a source whose files may not be looked at."""
    with monkeypatch.context() as patch:
        patch.setattr(module, name, lambda *_args: pytest.fail("a file was looked at"))
        return make()


def make_array_record(folder: pathlib.Path) -> str:
    for part, options in enumerate(("group_size:1,uncompressed", "group_size:4")):
        array_record_files.write(
            folder / f"{part}.array_record", array_record_files.some_records(20 + part, 100 * part), options
        )
    return f"{folder}/*.array_record"


def make_parquet(folder: pathlib.Path) -> str:
    for part in range(2):
        rows = [list(range(part, part + size)) for size in (3, 0, 5)]
        pq.write_table(pa.table({"tokens": rows, "y": [part, 1, 2]}), folder / f"{part}.parquet", row_group_size=2)
    return f"{folder}/*.parquet"


def make_tars(folder: pathlib.Path) -> str:
    shutil.copytree(FOLDER / "tar", folder, dirs_exist_ok=True)
    return f"{folder}/shard-*.tar"


def make_tokens(folder: pathlib.Path) -> str:
    documents = [[np.arange(1, 6, dtype=np.uint16)], [np.arange(9, dtype=np.uint16)]]
    write_megatron(folder / "0", documents)
    write_llm_c(folder / "1.bin", np.arange(40, dtype=np.uint16))
    np.save(folder / "2.npy", np.arange(33, dtype=np.int32))
    return f"{folder}/*.[bn][ip][ny]"


@pytest.mark.parametrize(
    ("make", "module", "look", "open_source"),
    [
        (make_array_record, "array_record.source", "inspect", ArrayRecord),
        (make_parquet, "parquet", "inspect", Parquet),
        (make_tars, "webdataset", "inspect", WebDataset),
        (make_tokens, "tokens.source", "inspect", lambda paths: Tokens(paths, 4)),
    ],
)
def test_the_same_source_with_and_without_a_manifest(
    make: Callable[[pathlib.Path], str],
    module: str,
    look: str,
    open_source: Callable[[str], Any],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pattern = make(tmp_path)
    plain = open_source(pattern)
    result = CliRunner().invoke(main, ["manifest", pattern])
    assert result.exit_code == 0, result.output
    assert f"{tmp_path}/manifest.json: " in result.output
    sources = importlib.import_module(f"meshfeed._src.sources.{module}")
    beside = opened_without_a_look(monkeypatch, sources, look, lambda: open_source(pattern))
    by_path = opened_without_a_look(monkeypatch, sources, look, lambda: open_source(f"{tmp_path}/manifest.json"))
    for source in (beside, by_path, pickle.loads(pickle.dumps(beside))):
        same_source(plain, source)
    files = read_manifest(f"{tmp_path}/manifest.json").files
    assert {entry.digest for entry in files} == {digest_of(pathlib.Path(entry.path).read_bytes()) for entry in files}

    changed = pathlib.Path(files[1].path)
    content = changed.read_bytes()
    changed.write_bytes(content + b"x")
    for paths in (pattern, f"{tmp_path}/manifest.json"):
        with pytest.raises(SourceError, match=f"{changed.name} has changed since the manifest .*manifest.json was"):
            open_source(paths)
    changed.write_bytes(content)
    late = open_source(pattern)
    os.utime(changed, (1, 1))
    with pytest.raises(SourceError, match=f"{changed.name} has changed since the manifest .*Write the manifest again"):
        list(late)
    changed.unlink()
    with pytest.raises(SourceError, match=f"no file .*{changed.name}, which the manifest"):
        open_source(f"{tmp_path}/manifest.json")


@pytest.fixture(scope="module")
def listed_folders(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[pathlib.Path, Callable[[str], Any]]]:
    """Folders of each format with a manifest, and the source that reads them."""
    found: list[tuple[pathlib.Path, Callable[[str], Any]]] = []
    for make, open_source in (
        (make_array_record, ArrayRecord),
        (make_parquet, Parquet),
        (make_tars, WebDataset),
        (make_tokens, lambda paths: Tokens(paths, 4)),
    ):
        folder = tmp_path_factory.mktemp("listed")
        make_manifest(make(folder))
        found.append((folder, open_source))
    return found


@settings(max_examples=100, deadline=None, database=None)
@given(st.data())
def test_any_damage_of_a_manifest_is_an_error_of_a_file(
    listed_folders: list[tuple[pathlib.Path, Callable[[str], Any]]], data: st.DataObject
) -> None:
    folder, open_source = data.draw(st.sampled_from(listed_folders))
    manifest = folder / "manifest.json"
    whole = manifest.read_text()
    part = found = json.loads(whole)
    while True:
        key = data.draw(st.sampled_from(sorted(part) if isinstance(part, dict) else range(len(part))))
        if not isinstance(part[key], dict | list) or not part[key] or data.draw(st.integers(0, 3)) == 0:
            break
        part = part[key]
    values = [None, True, -1, 0, 3, 10**6, 1 << 63, 10**30, 0.5, "", "x", "O", "<u4", "AAAA", [], [1], {}, {"a": 1}]
    part[key] = data.draw(st.sampled_from(values))
    try:
        manifest.write_text(json.dumps(found))
        source = open_source(str(manifest))
        for record_id in range(min(len(source), 40)):
            source[record_id]
    except SourceError as error:
        assert str(folder) in str(error) or "manifest" in str(error)  # noqa: PT017
    finally:
        manifest.write_text(whole)


def test_packed_takes_the_lengths_from_a_manifest(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = make_parquet(tmp_path)
    plain = Packed(Parquet(pattern, ["tokens"]), 4)
    assert CliRunner().invoke(main, ["manifest", pattern, "--lengths", "tokens"]).exit_code == 0
    monkeypatch.setattr(documents, "read_items", lambda *_: pytest.fail("documents were read for their lengths"))
    listed = Packed(Parquet(pattern, ["tokens"]), 4)
    assert source_identity(listed) == source_identity(plain)
    part = Packed(Parquet(f"{tmp_path}/1.parquet", ["tokens"]), 4)  # one of the files
    assert part.stats() == dataclasses.replace(plain.stats(), **vars(part.stats()))
    assert len(part) == 2
    monkeypatch.undo()
    same_source(plain, listed)


def test_lengths_of_documents_of_token_files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.array([1, 2, 0, 3, 0, 0, 4], np.uint16)
    for part in range(2):
        tokens[part:].tofile(tmp_path / f"{part}.bin")
    pattern = f"{tmp_path}/*.bin"
    plain = Tokens.documents(pattern, dtype=np.uint16, eod=0)
    assert CliRunner().invoke(main, ["manifest", pattern, "--dtype", "uint16", "--eod", "0"]).exit_code == 0
    with monkeypatch.context() as patch:
        patch.setattr(tokens_module, "document_lengths", lambda *_: pytest.fail("the tokens were read"))
        listed = Tokens.documents(pattern, dtype=np.uint16, eod=0)
        windows = Tokens(pattern, 2, next_token=False, eod=0)  # the manifest has the dtype
    same_source(plain, listed)
    assert len(windows) == 4
    assert Tokens.documents(pattern, eod=4).lengths().tolist() == [7, 6]  # of another eod: the tokens are read
    with pytest.raises(SourceError, match=r"holds uint16, not uint32"):
        Tokens(pattern, 2, dtype=np.uint32)


def test_bare_tokens_in_array_records(tmp_path: pathlib.Path) -> None:
    records = [np.arange(size, dtype=np.uint16).tobytes() for size in (3, 1, 7)]
    array_record_files.write(tmp_path / "a.array_record", records)
    arguments = ["manifest", f"{tmp_path}/*.array_record", "--lengths", "t", "--dtype", "uint16"]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    assert ArrayRecord(f"{tmp_path}/a.array_record").stored_lengths("t").tolist() == [3, 1, 7]  # type: ignore[union-attr]


def test_what_the_command_refuses(tmp_path: pathlib.Path) -> None:
    pattern = make_parquet(tmp_path)
    (tmp_path / "b").mkdir()
    array_record_files.write(tmp_path / "b" / "a.array_record", [b"a"])
    for name in ("x.mds", "x.txt", "x.npy.gz"):
        (tmp_path / "b" / name).touch()
    for arguments, message in [
        ([pattern, f"{tmp_path}/b/a.array_record"], "2 folders"),
        ([f"{tmp_path}/b/x.mds"], "is read by MDS"),
        ([f"{tmp_path}/b/x.txt"], "is read by no source"),
        ([f"{tmp_path}/b/x.npy.gz"], "compressed file"),
        ([f"{tmp_path}/b/a.array_record", "--lengths", "x"], "--lengths x of files for ArrayRecord"),
        ([f"{tmp_path}/b/a.array_record", "--eod", "0"], "eod=0 is for token files"),
        ([pattern, "--source", "Tokens"], "has no header"),
        (["http://127.0.0.1:1/x.parquet"], "Pass --output"),
        ([pattern, "--workers", "0"], "--workers"),
    ]:
        result = CliRunner().invoke(main, ["manifest", *arguments])
        assert (result.exit_code != 0, message in result.output) == (True, True), result.output


def test_files_in_a_store(tmp_path: pathlib.Path) -> None:
    store = fsspec.filesystem("memory")
    for make in (make_array_record, make_parquet, make_tars, make_tokens):
        name = make.__name__
        (tmp_path / name).mkdir()
        pattern = make(tmp_path / name)
        store.put(f"{tmp_path / name}/", f"/manifests/{name}/", recursive=True)
        pattern = pattern.replace(f"{tmp_path}/", "memory://manifests/")
        try:
            assert CliRunner().invoke(main, ["manifest", pattern, "--workers", "2"]).exit_code == 0
            found = read_manifest(f"memory://manifests/{name}/manifest.json")
        finally:
            store.rm(f"/manifests/{name}", recursive=True)
        assert found.files
        names = {entry.path: entry.path.replace("memory://manifests/", f"{tmp_path}/") for entry in found.files}
        local = make_manifest([names[entry.path] for entry in found.files], f"{tmp_path / name}/manifest.json")
        assert [dataclasses.replace(entry, path=names[entry.path]) for entry in found.files] == local.files


def test_files_of_a_server_and_lengths_of_a_feature(tmp_path: pathlib.Path) -> None:
    store = Store()
    arrays = [np.arange(size, dtype=np.uint16) for size in (3, 0, 200)]
    columns = {
        "t": pa.array(arrays, pa.list_(pa.int64())),
        "raw": pa.array([array.tobytes() for array in arrays]),
        "x": pa.array([[1, 2]] * 3, pa.list_(pa.float32())),
    }
    records = encode_examples(list(columns.items()), len(next(iter(columns.values()))), 0)
    array_record_files.write(tmp_path / "a.array_record", records)
    url = store.put("a.array_record", (tmp_path / "a.array_record").read_bytes())
    output = f"{tmp_path}/manifest.json"

    def lengths(key: str, *more: str) -> list[int]:
        result = CliRunner().invoke(main, ["manifest", url, "--output", output, "--lengths", key, *more])
        assert result.exit_code == 0, result.output
        return ArrayRecord(output).stored_lengths(key).tolist()  # type: ignore[union-attr]

    assert lengths("t") == lengths("raw", "--dtype", "uint16") == [3, 0, 200]
    assert lengths("x", "--dtype", "float32") == [2, 2, 2]
    assert read_manifest(output).files[0].digest == digest_of(store.files["a.array_record"])
    for key, message in (
        ("raw", "record 0 .*holds 6 bytes. Pass --dtype"),
        ("gone", "record 0 .*no feature 'gone'. It has"),
    ):
        with pytest.raises(SourceError, match=message):
            make_manifest(url, output, lengths=key)
    assert ArrayRecord(output).stored_lengths("x").tolist() == [2, 2, 2]  # type: ignore[union-attr]  # not lost by the errors


@pytest.mark.parametrize(
    ("name", "key", "dtype", "message"),
    [
        (
            "a.parquet",
            "number",
            None,
            "record 0 .*--lengths number: it has 1, which is no list. Expected a column of lists",
        ),
        ("a.parquet", "list", None, "record 1 .*--lengths list: it has no value. Expected"),
        ("a.parquet", "text", None, "record 0 .*--lengths text: it has ab, which is no list"),
        ("a.parquet", "struct", None, "record 0 .*--lengths struct: it has {'a': 1}, which is no list"),
        ("a.bin", None, "float32", "dtype='float32'. Expected that of the tokens"),
        ("a.bin", None, "no such", "dtype='no such'. Expected that of the tokens"),
        ("a.parquet", "list", "O", "dtype='O'. Expected that of the tokens"),
    ],
)
def test_what_has_no_length(
    tmp_path: pathlib.Path, name: str, key: str | None, dtype: str | None, message: str
) -> None:
    columns = {"number": [1, 2], "text": ["ab", "c"], "list": [[1], None], "struct": [{"a": 1}] * 2}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(SourceError if dtype is None else SettingsError, match=message):
        make_manifest(f"{tmp_path}/{name}", lengths=key, dtype=dtype)


def test_a_manifest_that_is_being_written_holds_no_records(tmp_path: pathlib.Path) -> None:
    pq.write_table(pa.table({"x": [1, 2, 3]}), tmp_path / "a.parquet")
    for name in ("manifest.json", "manifest.tokens.lengths"):
        (tmp_path / f"{name}.0123456789abcdef.part").write_bytes(b"{")
    assert len(Parquet(f"{tmp_path}/*")) == 3


def test_manifests_of_others_and_several_folders(tmp_path: pathlib.Path) -> None:
    patterns = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        patterns.append(make_array_record(tmp_path / name))
    plain = ArrayRecord(patterns)
    (tmp_path / "a" / "manifest.json").write_text('{"files": ["0.array_record"]}')
    same_source(plain, ArrayRecord(patterns))  # of another tool
    for pattern in patterns:
        make_manifest(pattern)
    same_source(plain, ArrayRecord([f"{tmp_path}/{name}/manifest.json" for name in ("a", "b")]))
    everything = ArrayRecord([f"{tmp_path}/{name}/*" for name in ("a", "b")])  # the manifests hold no records
    same_source(plain, everything)
    with pytest.raises(SourceError, match=r"manifest .* of files for ArrayRecord. Pass it to meshfeed.sources.ArrayR"):
        Parquet(f"{tmp_path}/a/manifest.json")
    content = (tmp_path / "a" / "manifest.json").read_text()
    (tmp_path / "a" / "manifest.json").write_text(content.replace('"group_size"', '"group"'))
    with pytest.raises(CorruptDataError, match=r"it lists .*0.array_record with the details \{'group': 1\}"):
        ArrayRecord(patterns)


def test_a_remote_data_set_opens_with_one_request(tmp_path: pathlib.Path) -> None:
    store, folder = Store(), tmp_path / "data"
    folder.mkdir()
    pattern = make_array_record(folder)
    plain = ArrayRecord(pattern)
    make_manifest(pattern)
    urls = [store.put(path.name, path.read_bytes()) for path in sorted(folder.iterdir())]
    cache = ShardCache(tmp_path / "cache")
    store.requests.clear()
    source = ArrayRecord(store.url("manifest.json"), cache=cache)
    assert [name for name, _, _ in store.requests] == ["manifest.json"]
    same_source(plain, source)
    same_source(plain, ArrayRecord(urls[:2], cache=cache))  # beside the data

    source.close()  # what is open is not fetched again
    content = store.files["1.array_record"]
    store.put("1.array_record", content[:-2] + b"yy")
    with pytest.raises(CorruptDataError, match=r"1.array_record: fetched .* xxh3_64 .*, expected"):
        list(ArrayRecord(urls[:2], cache=ShardCache(tmp_path / "other")))
    make_manifest(pattern, digests=False)
    store.put("manifest.json", (folder / "manifest.json").read_bytes())
    store.put("1.array_record", content + b"x")
    with pytest.raises(SourceError, match=r"1.array_record has changed since the manifest"):
        list(ArrayRecord(urls[:2], cache=ShardCache(tmp_path / "third")))
