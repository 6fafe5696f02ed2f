"""Windows and documents of flat token files, against slices of the arrays that were written."""

from __future__ import annotations

import gzip
import json
import os
import pathlib
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from token_files import write_llm_c, write_megatron

import meshfeed
from meshfeed._src.sources.files import open_files
from meshfeed._src.sources.tokens import files as module
from meshfeed._src.sources.tokens import formats
from meshfeed._src.sources.tokens.formats import TokenFile
from meshfeed.sources import Tokens

RNG = np.random.default_rng(0)
EOD = 0


@pytest.fixture(params=["extension", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(module, "extension", None)
    elif module.extension is None:
        pytest.skip("the extension module is not built")
    return request.param


def some_tokens(count: int, dtype: str = "uint16") -> np.ndarray:
    return RNG.integers(1, min(np.iinfo(dtype).max, 2**31 - 1), count, dtype, endpoint=True)


def windows(tokens: np.ndarray, length: int, stride: int, next_token: bool = True) -> list[np.ndarray]:
    """By the definition, one after the other."""
    number = max(0, (len(tokens) - length - next_token) // stride + 1)
    return [tokens[i * stride : i * stride + length + next_token].astype(np.int32) for i in range(number)]


def check(source: Tokens, wanted: list[np.ndarray], key: str = "tokens") -> None:
    assert len(source) == len(wanted)
    for ids in (np.arange(len(wanted)), RNG.permutation(len(wanted)), np.repeat(RNG.integers(0, len(wanted), 5), 3)):
        found = source.read_batch(ids)
        assert list(found) == [key]
        assert found[key].dtype == np.int32
        np.testing.assert_array_equal(found[key], np.stack([wanted[i] for i in ids]))
    np.testing.assert_array_equal(source[len(wanted) - 1][key], wanted[-1])
    np.testing.assert_array_equal(source.__getitems__([0])[0][key], wanted[0])


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"])
def test_headerless_files_of_each_dtype(dtype: str, way: str, tmp_path: pathlib.Path) -> None:
    parts = [some_tokens(count, dtype) for count in (1000, 17, 3, 500)]
    for number, part in enumerate(parts):
        (tmp_path / f"{number}.bin").write_bytes(part.tobytes())
    source = Tokens(str(tmp_path / "*.bin"), 16, dtype=dtype)
    check(source, [window for part in parts for window in windows(part, 16, 16)])


def test_numpy_files_with_and_without_their_header(way: str, tmp_path: pathlib.Path) -> None:
    parts = [some_tokens(300), some_tokens(400).astype(">u2"), some_tokens(200, "int64")]
    for number, part in enumerate(parts):
        np.save(tmp_path / f"{number}.npy", part)
    check(
        Tokens(sorted(tmp_path.glob("?.npy")), 20, stride=7, key="x"),
        [w for p in parts for w in windows(p, 20, 7)],
        "x",
    )
    (tmp_path / "bare.npy").write_bytes(parts[0].tobytes())  # as OLMo writes them
    check(Tokens(tmp_path / "bare.npy", 20, dtype=np.uint16), windows(parts[0], 20, 20))


def test_headers_of_numpy_files_are_parsed_one_at_a_time(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(tmp_path / f"{number:02d}.npy") for number in range(24)]
    for number, path in enumerate(paths):
        np.save(path, np.arange(10 * number, 10 * number + 10, dtype=np.uint16))
    inside, most = [0], [0]
    read = np.lib.format.read_array_header_1_0

    def parse(stream: object) -> object:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.002)  # other threads run
        inside[0] -= 1
        return read(stream)

    monkeypatch.setattr(np.lib.format, "read_array_header_1_0", parse)
    assert len(Tokens(paths, 3)) == 24 * 3
    assert most[0] == 1


@pytest.mark.parametrize(("magic", "version", "dtype"), [(20240520, 1, "uint16"), (20240801, 7, "uint32")])
def test_files_with_the_header_of_llm_c(magic: int, version: int, dtype: str, way: str, tmp_path: pathlib.Path) -> None:
    tokens = some_tokens(5000, dtype)
    write_llm_c(tmp_path / "fineweb.bin", tokens, magic=magic, version=version)
    check(Tokens(tmp_path / "fineweb.bin", 64, next_token=False), windows(tokens, 64, 64, next_token=False))
    assert len(Tokens(tmp_path / "fineweb.bin", 64, dtype=dtype)) == len(windows(tokens, 64, 64))
    write_llm_c(tmp_path / "newer.bin", tokens, magic=magic, version=9)
    for passed in (None, dtype):  # with dtype=, the header would be read as tokens
        with pytest.raises(
            meshfeed.SourceError, match=rf"newer\.bin has llm\.c's header with version 9. .* {version}\."
        ):
            Tokens(tmp_path / "newer.bin", 64, dtype=passed)


def some_documents(dtype: str = "int32") -> list[list[np.ndarray]]:
    return [[some_tokens(int(RNG.integers(0, 40)), dtype) for _ in range(RNG.integers(0, 4))] for _ in range(50)]


def test_megatron_files(way: str, tmp_path: pathlib.Path) -> None:
    shards = [some_documents(), some_documents("uint16")]
    for number, documents in enumerate(shards):
        write_megatron(tmp_path / f"shard_{number}_text_document", documents)
    joined = [[np.concatenate([np.empty(0, np.int32), *document]) for document in shard] for shard in shards]
    names = [tmp_path / "shard_0_text_document.idx", tmp_path / "shard_1_text_document.bin"]
    wanted = [w for shard in joined for w in windows(np.concatenate(shard), 10, 10)]
    check(Tokens(names, 10), wanted)
    check(Tokens(str(tmp_path / "*"), 10), wanted)  # .bin and .idx are one file
    check(Tokens([*names, names[0]], 10), [*wanted, *windows(np.concatenate(joined[0]), 10, 10)])  # twice, to repeat it
    inside = [w for shard in joined for document in shard for w in windows(document, 10, 3)]
    check(Tokens(names, 10, stride=3, eod=-1), inside)
    found = Tokens.documents(names)
    wanted_documents = [document for shard in joined for document in shard]
    np.testing.assert_array_equal(found.lengths(), [len(document) for document in wanted_documents])
    for ids in (list(range(len(found))), RNG.permutation(len(found)).tolist()):
        for i, document in zip(ids, found.__getitems__(ids), strict=True):
            np.testing.assert_array_equal(document["tokens"], wanted_documents[i])
            assert document["tokens"].dtype == np.int32


def pieces(tokens: np.ndarray) -> Iterator[np.ndarray]:
    start = 0
    for i, token in enumerate(tokens.tolist()):
        if token == EOD:
            yield tokens[start : i + 1]
            start = i + 1
    if start < len(tokens):
        yield tokens[start:]


def test_documents_that_end_with_eod(way: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_SCANNED_BYTES", 1 << 10)  # documents cross what is read at once
    parts = []
    for number in range(3):
        tokens = some_tokens(5000)
        tokens[RNG.random(5000) < 0.003 * 10**number] = EOD  # up to 300 documents
        tokens.tofile(tmp_path / f"{number}.bin")
        parts.append(tokens)
    wanted = [piece for part in parts for piece in pieces(part)]
    found = Tokens.documents(str(tmp_path / "*.bin"), dtype=np.uint16, eod=EOD, key="ids")
    assert len(found) == len(wanted) > 600
    assert found.lengths().dtype == np.uint32
    np.testing.assert_array_equal(found.lengths(), [len(piece) for piece in wanted])
    for i in RNG.permutation(len(wanted)):
        np.testing.assert_array_equal(found[i]["ids"], wanted[i])
    source = Tokens(str(tmp_path / "*.bin"), 8, dtype=np.uint16, eod=EOD)
    check(source, [window for piece in wanted for window in windows(piece, 8, 8)])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_slices_of_documents(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    tokens = np.array([*data.draw(st.lists(st.integers(0, 3), max_size=200)), EOD], np.uint16)
    path = tmp_path_factory.mktemp("slices") / "x.bin"
    tokens.tofile(path)
    documents = list(pieces(tokens))
    source = Tokens.documents(path, dtype=np.uint16, eod=EOD)
    ids = data.draw(st.lists(st.integers(0, len(documents) - 1), max_size=20))
    bounds = [sorted(data.draw(st.tuples(*[st.integers(0, len(documents[i]))] * 2))) for i in ids]
    starts = np.array([low for low, _ in bounds], np.int64)
    lengths = np.array([high - low for low, high in bounds], np.int64)
    found = source.read_slices(np.array(ids, np.int64), starts, lengths)["tokens"]
    wanted = [documents[i][low:high] for i, (low, high) in zip(ids, bounds, strict=True)]
    np.testing.assert_array_equal(found, np.concatenate([np.empty(0, np.int32), *wanted]))


def test_columns(way: str, tmp_path: pathlib.Path) -> None:
    tokens = some_tokens(1000)
    tokens.tofile(tmp_path / "x.bin")
    source = Tokens(tmp_path / "x.bin", 31, dtype=np.uint16)
    ids = RNG.permutation(len(source))
    whole = source.read_batch(ids)["tokens"]
    for columns in (slice(8, 16), slice(0, 0), slice(24, 99), slice(3, 30, 2)):
        found = source.read_batch(ids, columns={"['tokens']": (columns,)})["tokens"]
        np.testing.assert_array_equal(found, whole[:, columns])


def test_only_the_columns_of_a_host_are_read(tmp_path: pathlib.Path) -> None:
    tokens = np.arange(64, dtype=np.uint32)
    tokens[32:] = 2**31  # cannot be read
    tokens.tofile(tmp_path / "x.bin")
    source = Tokens(tmp_path / "x.bin", 64, dtype=np.uint32, next_token=False)
    found = source.read_batch([0], columns={"['tokens']": (slice(0, 32),)})
    np.testing.assert_array_equal(found["tokens"], [np.arange(32)])


@pytest.mark.parametrize("dtype", ["uint32", "int64", "uint64"])
def test_a_token_above_int32_is_an_error_that_names_the_file(dtype: str, way: str, tmp_path: pathlib.Path) -> None:
    some_tokens(80, dtype).tofile(tmp_path / "good.bin")
    bad = some_tokens(80, dtype)
    bad[45] = 2**31
    bad.tofile(tmp_path / "bad.bin")
    source = Tokens([tmp_path / "good.bin", tmp_path / "bad.bin"], 20, dtype=dtype, next_token=False)
    with pytest.raises(meshfeed.SourceError, match=r"bad\.bin holds the token 2147483648 in record 6") as error:
        source.read_batch(np.arange(8))
    assert error.value.record_id == 6
    assert source.read_batch([0, 5, 7])["tokens"].max() < 2**31


def test_a_negative_token_of_64_bits(way: str, tmp_path: pathlib.Path) -> None:
    np.array([-1, -(2**31), 5, -(2**31) - 1], np.int64).tofile(tmp_path / "x.bin")
    source = Tokens(tmp_path / "x.bin", 1, dtype=np.int64, next_token=False)
    np.testing.assert_array_equal(source.read_batch([0, 1, 2])["tokens"][:, 0], [-1, -(2**31), 5])
    with pytest.raises(meshfeed.SourceError, match="token -2147483649 in record 3"):
        source.read_batch([3])


def test_a_file_beyond_2_to_the_40_tokens(way: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "sparse.bin"
    number = 10**12
    with path.open("wb") as file:
        file.truncate(2 * number)
        file.seek(2 * (number - 100))
        file.write(np.arange(100, dtype=np.uint16).tobytes())
    source = Tokens(path, 50, stride=1, dtype=np.uint16, next_token=False)
    assert len(source) == number - 49
    found = source.read_batch([len(source) - 1, 0, number - 100])["tokens"]
    np.testing.assert_array_equal(found, [np.arange(50, 100), np.zeros(50), np.arange(50)])


def test_a_file_cut_short_under_the_source(way: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.bin"
    some_tokens(1000).tofile(path)
    source = Tokens(path, 9, dtype=np.uint16)
    whole = source.read_batch(np.arange(40))["tokens"]
    os.truncate(path, 900)  # the descriptor stays open
    with pytest.raises(meshfeed.CorruptDataError, match=r"x\.bin was cut short: it ends at byte 900") as error:
        source.read_batch(np.arange(len(source)))
    assert (error.value.path, error.value.record_id) == (str(path), 49)
    np.testing.assert_array_equal(source.read_batch(np.arange(40))["tokens"], whole)
    source.close()
    with pytest.raises(meshfeed.CorruptDataError, match=r"it had 2,000 bytes when the source was made and has 900 now"):
        source.read_batch([0])


def test_a_file_that_changed_or_went(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.bin"
    some_tokens(1000).tofile(path)
    source = Tokens(path, 9, dtype=np.uint16)
    source.close()
    some_tokens(2000).tofile(path)
    with pytest.raises(meshfeed.SourceError, match="has changed since the source was made"):
        source.read_batch([0])
    path.unlink()
    with pytest.raises(meshfeed.SourceError, match="is gone"):
        source.read_batch([0])


def test_damaged_headers(tmp_path: pathlib.Path) -> None:
    tokens = some_tokens(1000)
    write_llm_c(tmp_path / "short.bin", tokens)
    os.truncate(tmp_path / "short.bin", 1500)
    np.save(tmp_path / "short.npy", tokens)
    os.truncate(tmp_path / "short.npy", 1500)
    (tmp_path / "garbage.npy").write_bytes(b"\x93NUMPY\x01\x00\x10\x00not a dict      ")
    (tmp_path / "odd.bin").write_bytes(bytes(1001))
    (tmp_path / "empty.bin").touch()
    write_megatron(tmp_path / "m", [[tokens]])
    os.truncate(tmp_path / "m.bin", 1500)
    write_megatron(tmp_path / "i", [[tokens]])
    os.truncate(tmp_path / "i.idx", 40)
    (tmp_path / "o.bin").touch()
    (tmp_path / "o.idx").write_bytes(b"something else entirely, and long enough")
    for name, message in {
        "short.bin": "1,500 bytes, and 3,024 according to its header",
        "short.npy": "according to its header",
        "garbage.npy": "not a numpy file",
        "odd.bin": "1,001 bytes, which is not a positive multiple of the 2 bytes",
        "empty.bin": "0 bytes",
        "m.bin": "1,500 bytes, and 2,000 according to its header",
        "i.idx": "40 bytes, and 62 according to its header",
        "o.bin": "not a Megatron index",
    }.items():
        with pytest.raises(meshfeed.CorruptDataError, match=message) as error:
            Tokens(tmp_path / name, 8, dtype=np.uint16)
        assert error.value.path


def test_documents_out_of_order_in_an_index(tmp_path: pathlib.Path) -> None:
    write_megatron(tmp_path / "x", [[some_tokens(8)], [some_tokens(8)]])
    index = bytearray((tmp_path / "x.idx").read_bytes())
    index[34 + 8 : 34 + 24] = index[34 + 16 : 34 + 24] + index[34 + 8 : 34 + 16]  # both pointers
    (tmp_path / "x.idx").write_bytes(index)
    with pytest.raises(meshfeed.CorruptDataError, match="not stored one after the other"):
        Tokens.documents(tmp_path / "x.bin")


def test_wrong_settings(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.bin"
    some_tokens(100).tofile(path)
    for setting, value in {
        "sequence_length": 0, "stride": -1, "dtype": "float32", "eod": 1.5, "next_token": 2, "key": "", "cache": "x",
    }.items():  # fmt: skip
        arguments = {"sequence_length": 8, "dtype": np.uint16, setting: value}
        with pytest.raises(meshfeed.SettingsError, match=setting) as error:
            Tokens(path, **arguments)
        assert error.value.setting == setting
    for value in (True, 2.0, None):
        with pytest.raises(meshfeed.SettingsError, match="sequence_length"):
            Tokens(path, value, dtype=np.uint16)  # type: ignore[arg-type]


def test_files_that_are_none_of_these(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.bin"
    some_tokens(100).tofile(path)
    (tmp_path / "x.txt").write_text("some text " * 10)
    (tmp_path / "x.jsonl").write_text('{"tokens": [1, 2]}\n' * 10)
    np.save(tmp_path / "rows.npy", np.zeros((4, 8), np.int32))
    np.save(tmp_path / "floats.npy", np.zeros(80))
    np.save(tmp_path / "tokens.npy", some_tokens(80))
    for arguments, message in (
        ({"paths": path}, "no header with the dtype"),
        (
            {"paths": tmp_path / "x.jsonl", "dtype": np.uint16},
            r"as bare uint16\. Its name suggests a JSON file.* rename it",
        ),
        ({"paths": tmp_path / "x.txt", "dtype": np.uint16}, "suggests a text file"),
        ({"paths": path, "dtype": np.uint16, "sequence_length": 100}, "no window of 101 tokens fits"),
        ({"paths": tmp_path / "rows.npy"}, r"shape \(4, 8\).*Memory"),
        ({"paths": tmp_path / "floats.npy"}, "holds float64. Expected integers"),
        ({"paths": tmp_path / "tokens.npy", "dtype": np.int32}, "holds uint16, not int32"),
        ({"paths": tmp_path / "missing.bin"}, "no file"),
        ({"paths": str(tmp_path / "*.tok")}, "no file matches"),
        ({"paths": []}, "empty list"),
        ({"paths": tmp_path}, "folder"),
    ):
        with pytest.raises(meshfeed.SourceError, match=message):
            Tokens(**{"sequence_length": 8, **arguments})
    for eod in (-1, 1 << 16):
        with pytest.raises(meshfeed.SettingsError, match=f"eod={eod}; .* holds uint16, 0 to 65535, so it never occurs"):
            Tokens.documents(path, dtype=np.uint16, eod=eod)
    for make in (Tokens.documents, lambda path, **settings: Tokens(path, 8, **settings)):
        with pytest.raises(meshfeed.SettingsError, match=rf"eod=0 does not occur in {path}\. Pass") as error:
            make(path, dtype=np.uint16, eod=0)
        assert error.value.setting == "eod"
        with pytest.raises(meshfeed.SettingsError, match=r"eod=0 does not occur in .*x.bin or the 1 other file\(s\)"):
            make([path, tmp_path / "tokens.npy"], dtype=np.uint16, eod=0)
    np.array([5, 6, 0], np.uint16).tofile(tmp_path / "one.bin")  # one document each; the first does not end
    assert len(Tokens.documents([path, tmp_path / "one.bin"], dtype=np.uint16, eod=0)) == 2
    with pytest.raises(meshfeed.SourceError, match="Pass eod="):
        Tokens.documents(path, dtype=np.uint16)
    with pytest.raises(IndexError, match="record id 12 is out of range"):
        Tokens(path, 8, dtype=np.uint16).read_batch([12])


def test_what_identifies_the_source(tmp_path: pathlib.Path) -> None:
    tokens = some_tokens(1000)
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
        tokens.tofile(tmp_path / folder / "x.bin")
    changed = tokens.copy()
    changed[0] ^= 1
    changed.tofile(tmp_path / "c" / "x.bin")

    def identity(folder: str, **settings: object) -> object:
        return Tokens(tmp_path / folder / "x.bin", 8, dtype=np.uint16, **settings).fingerprint()  # type: ignore[arg-type]

    assert identity("a") == identity("b")
    others = [
        identity("c"),
        identity("a", stride=4),
        identity("a", next_token=False),
        identity("a", eod=int(tokens[3])),
    ]
    assert identity("a") not in others
    documents = [Tokens.documents(tmp_path / "a/x.bin", dtype=np.uint16, eod=int(t)).fingerprint() for t in tokens[:2]]
    assert documents[0] != documents[1]


def documents_state(source: Any, state: Any = None) -> Any:
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))
    with meshfeed.Feed(source, mesh, global_batch_size=2) as feed:
        if state is not None:
            feed.set_state(state)
        next(feed)
        return json.loads(json.dumps(feed.get_state()))


@pytest.mark.parametrize("packed", [False, True])
def test_documents_of_other_tokens_are_refused_and_states_without_their_digest_are_not(
    tmp_path: pathlib.Path, packed: bool
) -> None:
    def source(tokens: np.ndarray) -> Any:
        tokens.astype(np.uint16).tofile(tmp_path / "x.bin")
        documents = Tokens.documents(tmp_path / "x.bin", dtype=np.uint16, eod=0)
        return meshfeed.sources.Packed(documents, 4) if packed else documents

    tokens = np.tile([1, 2, 3, 0], 20)
    state = documents_state(source(tokens))
    documents_state(source(tokens), state)
    with pytest.raises(meshfeed.StateMismatchError, match=r"four_records.*The content of records differs"):
        documents_state(source(np.where(tokens, tokens + 1, 0)), state)
    identity = state["fingerprint"]["source"]
    identity = identity["source"] if packed else identity
    assert identity.pop("four_records")  # as in a state of an earlier version
    documents_state(source(tokens), state)


def test_few_tokens_of_a_long_document_identify_it(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.append(np.arange(1, 1 << 18, dtype=np.uint32), [0]).astype(np.uint32).tofile(tmp_path / "x.bin")
    documents = Tokens.documents(tmp_path / "x.bin", dtype=np.uint32, eod=0)
    read: list[int] = []
    real = documents.read_slices
    monkeypatch.setattr(
        documents, "read_slices", lambda ids, starts, lengths: read.extend(lengths) or real(ids, starts, lengths)
    )
    documents.fingerprint()
    assert read == [1 << 16]


def test_a_pickled_source_reads_the_same(tmp_path: pathlib.Path) -> None:
    tokens = some_tokens(100)
    tokens.tofile(tmp_path / "x.bin")
    source = Tokens(tmp_path / "x.bin", 8, dtype=np.uint16)
    check(pickle.loads(pickle.dumps(source)), windows(tokens, 8, 8))
    documents = Tokens.documents(tmp_path / "x.bin", dtype=np.uint16, eod=int(tokens[50]))
    again = pickle.loads(pickle.dumps(documents))
    np.testing.assert_array_equal(again[0]["tokens"], documents[0]["tokens"])
    assert (repr(source), source.file_of(0)) == ("Tokens(1 file, 12 windows of 9 tokens)", str(tmp_path / "x.bin"))
    assert repr(documents).startswith("Tokens.documents(1 file, ")


def test_many_files_share_the_bound_on_open_files(
    way: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [some_tokens(40, "uint16" if number % 2 else "uint32") for number in range(100)]
    for number, part in enumerate(parts):
        np.save(tmp_path / f"{number:03d}.npy", part)
    files = open_files.ShardPool(max_files=5)
    for users in (module, formats):
        monkeypatch.setattr(users, "shared_pool", files)
    check(Tokens(str(tmp_path / "*.npy"), 10), [window for part in parts for window in windows(part, 10, 10)])
    assert len(files) == 5


@pytest.mark.slow
def test_a_truncated_file_does_not_end_the_process(tmp_path: pathlib.Path) -> None:
    """A memory map would: reading a page that the file no longer has is SIGBUS."""
    path = tmp_path / "x.bin"
    some_tokens(1 << 20).tofile(path)
    code = f"""
import os, numpy, meshfeed
source = meshfeed.sources.Tokens({str(path)!r}, 1024, dtype=numpy.uint16)
source.read_batch([0])
os.truncate({str(path)!r}, 0)
try:
    source.read_batch(range(1000))
except meshfeed.CorruptDataError:
    print("an error")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "an error\n"), done.stderr


def test_remote_files_are_read_through_the_cache(tmp_path: pathlib.Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    documents = some_documents()
    write_megatron(tmp_path / "text", documents)
    memory = fsspec.filesystem("memory")
    for name in ("text.bin", "text.idx"):
        memory.pipe(f"/tokens-test/{name}", (tmp_path / name).read_bytes())
    cache = meshfeed.ShardCache(tmp_path / "cache")
    joined = [np.concatenate([np.empty(0, np.int32), *document]) for document in documents]
    check(Tokens("memory://tokens-test/text.bin", 10, cache=cache), windows(np.concatenate(joined), 10, 10))
    found = Tokens.documents("memory://tokens-test/*.idx", cache=cache)
    np.testing.assert_array_equal(found.lengths(), [len(document) for document in joined])


def test_compressed_files_are_read_from_a_copy_in_the_cache(tmp_path: pathlib.Path) -> None:
    tokens = some_tokens(500)
    np.save(tmp_path / "x.npy", tokens)
    (tmp_path / "x.npy.gz").write_bytes(gzip.compress((tmp_path / "x.npy").read_bytes()))
    (tmp_path / "x.bin.gz").write_bytes(gzip.compress(tokens.tobytes()))
    cache = meshfeed.ShardCache(tmp_path / "cache")
    for name, dtype in (("x.npy.gz", None), ("x.bin.gz", tokens.dtype)):
        with pytest.raises(meshfeed.SettingsError, match=r"compressed file .* and no cache"):
            Tokens(tmp_path / name, 16, dtype=dtype)
        source = Tokens(tmp_path / name, 16, dtype=dtype, cache=cache)
        check(source, windows(tokens, 16, 16))
        [file] = source._shards.files
        assert TokenFile.from_entry(file.entry(), file.version, "") == file  # what a host knows that did not look at it
        documents = Tokens.documents(tmp_path / name, dtype=dtype, eod=int(tokens[50]), cache=cache)
        np.testing.assert_array_equal(np.concatenate([record["tokens"] for record in documents]), tokens)
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b"{}" * 50))
    with pytest.raises(meshfeed.SourceError, match="no header of a token file"):
        Tokens(tmp_path / "x.jsonl.gz", 16, dtype=np.uint16, cache=cache)


def test_arguments_that_do_not_fit_their_buffers() -> None:
    if module.extension is None:
        pytest.skip("the extension module is not built")
    one = np.ones(1, np.int64)
    out = np.zeros(4, np.int32)
    for fds, offsets, lengths, places, kind, itemsize in (
        (one, one, 5 * one, one, "u", 2), (one, one, one, 4 * one, "u", 2), (one, -one, one, one, "u", 2),
        (one, one, -one, one, "u", 2), (one, one, one, -one, "u", 2), (-one, one, one, one, "u", 2),
        (one, one, one, one, "f", 2), (one, one, one, one, "u", 3), (one, np.ones(2, np.int64), one, one, "u", 2),
        (one, (2**63 - 1) * one, one, one, "u", 2),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="do not fit"):
            module.extension.read(fds, offsets, lengths, places, out, kind, itemsize)
    assert not out.any()
