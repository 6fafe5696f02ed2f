from __future__ import annotations

import json
import os
import pathlib

import fsspec
import numpy as np
import pytest

from meshfeed import CorruptDataError, SourceError
from meshfeed._src.sources.files.manifest import (
    FileEntry,
    describe_file,
    digest_of,
    read_manifest,
    write_manifest,
)


def test_a_manifest_is_what_was_written_wherever_the_folder_is_moved(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "x.bin").write_bytes(b"abc")
    files = [
        describe_file(f"{folder}/x.bin", 3, {"group_size": 1}),
        FileEntry("s3://bucket/y.bin", 5, 2, None, {"group_size": 1}),
        FileEntry("/elsewhere/z.bin", 6, 1, "md5:00", {"group_size": 2}),
    ]
    lengths = {"tokens": np.array([1, 2, 3, 4, 5, 6]), "a/b": np.array([1 << 40])}
    write_manifest(f"{folder}/manifest.json", "ArrayRecord", files, lengths=lengths)
    os.rename(folder, tmp_path / "b")
    found = read_manifest(f"{tmp_path}/b/manifest.json")
    assert found.source == "ArrayRecord"
    assert found.files == [FileEntry(f"{tmp_path}/b/x.bin", 3, 3, digest_of(b"abc"), {"group_size": 1}), *files[1:]]
    tokens, wide = found.lengths("tokens"), found.lengths("a/b")
    assert tokens is not None
    assert wide is not None
    assert (tokens.dtype, tokens.tolist()) == (np.uint32, [1, 2, 3, 4, 5, 6])
    assert (wide.dtype, wide.tolist()) == (np.int64, [1 << 40])
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


def test_one_line_per_file(tmp_path: pathlib.Path) -> None:
    write_manifest(f"{tmp_path}/m.json", "Tokens", [FileEntry(f"{tmp_path}/{i}.bin", 1, 1) for i in range(9)])
    content = (tmp_path / "m.json").read_text()
    assert json.loads(content)["files"][8] == ["8.bin", 1, 1, None, 0]
    assert len([line for line in content.splitlines() if line.startswith("  [")]) == 9
