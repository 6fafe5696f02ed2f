"""Records joined to those of another source by a key: what is read, what is kept, and what is refused."""

from __future__ import annotations

import io
import pathlib
import pickle
import tarfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record_files import write
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

import meshfeed
from meshfeed._src.sources.key_index import _digest, index_of
from meshfeed.sources import (
    ArrayRecord,
    Concat,
    Folder,
    Join,
    Map,
    Memory,
    Mixture,
    Packed,
    Padded,
    Parquet,
    Stream,
    Subset,
    WebDataset,
    Zip,
)
from meshfeed.testing import check_resumable

NUMBER = 12
NAMES = [f"{'ab'[number % 2]}/{number}" for number in range(NUMBER)]


def content(number: int) -> bytes:
    return bytes([number] * 4)


def write_folder(path: pathlib.Path) -> Any:
    for number, name in enumerate(NAMES):
        file = path / "pictures" / f"{name}.raw"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content(number))
    return Folder(path / "pictures")


def write_tars(path: pathlib.Path) -> Any:
    for part in range(2):
        with tarfile.open(path / f"{part}.tar", "w") as tar:
            for number in range(part * 5, NUMBER if part else 5):
                entry = tarfile.TarInfo(f"{NAMES[number]}.raw")
                entry.size = 4
                tar.addfile(entry, io.BytesIO(content(number)))
    return WebDataset(f"{path}/*.tar")


def write_parquet(path: pathlib.Path) -> Any:
    table = pa.table({"name": NAMES, "raw": [content(number) for number in range(NUMBER)]})
    pq.write_table(table, path / "others.parquet", row_group_size=5)
    return Parquet(path / "others.parquet")


def decode_named(record: bytes) -> dict[str, Any]:
    return {"name": NAMES[record[0]], "raw": record}


def write_array_record(path: pathlib.Path) -> Any:
    write(path / "others.array_record", [content(number) for number in range(NUMBER)])
    return ArrayRecord(path / "others.array_record", decode=decode_named)


def write_hugging_face(path: pathlib.Path) -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"name": NAMES, "raw": [content(number) for number in range(NUMBER)]})


OTHERS: dict[str, tuple[Callable[[pathlib.Path], Any], dict[str, Any], str]] = {
    "folder": (write_folder, {}, "bytes"),
    "webdataset": (write_tars, {}, "raw"),
    "parquet": (write_parquet, {"other_key": "name"}, "raw"),
    "array_record": (write_array_record, {"other_key": "name"}, "raw"),
    "huggingface": (write_hugging_face, {"other_key": "name"}, "raw"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_the_records_with_the_keys_are_added(kind: str, tmp_path: pathlib.Path) -> None:
    make, how, leaf = OTHERS[kind]
    names = [f"{name}.raw" for name in NAMES] if kind == "folder" else NAMES
    texts = [
        {"text": "none", "images": []},
        {"text": "two", "images": [names[7], names[2]]},
        {"text": "twice", "images": [names[11], names[11]]},
        {"text": "unknown", "images": None},
        {"text": "one", "images": names[0]},
    ]
    joined = Join(texts, make(tmp_path), key="images", **how)
    assert len(joined) == 5
    found = [record["images"] for record in joined.__getitems__([1, 2, 0, 4, 3])]
    assert [[image[leaf] for image in images] for images in found[:3]] == [
        [content(7), content(2)],
        [content(11), content(11)],
        [],
    ]
    assert found[3][leaf] == content(0)
    assert found[4] is None
    assert joined[1]["text"] == "two"
    assert texts[1]["images"] == [names[7], names[2]], "the record that was given stays as it is"
    copy = pickle.loads(pickle.dumps(joined))
    assert copy[1]["images"][1][leaf] == content(2)
    assert copy.fingerprint() == joined.fingerprint()


def test_a_function_returns_keys_and_the_records_go_into_a_leaf_of_their_own(tmp_path: pathlib.Path) -> None:
    texts = [{"image": f"{name}.jpg"} for name in NAMES]
    joined = Join(texts, write_tars(tmp_path), key=lambda record: record["image"].removesuffix(".jpg"), into="found")
    assert joined[3] == {"image": "b/3.jpg", "found": {"__key__": "b/3", "raw": content(3)}}


class Counting:
    """Records by number, which counts the calls."""

    def __init__(self, keys: Sequence[Any]) -> None:
        self.keys, self.calls = list(keys), []

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, record_id: int) -> Any:
        return self.__getitems__([record_id])[0]

    def __getitems__(self, record_ids: list[int]) -> list[Any]:
        self.calls.append(list(record_ids))
        return [{"id": self.keys[record_id], "x": np.int32(record_id)} for record_id in record_ids]

    def fingerprint(self) -> Any:
        return [str(key) for key in self.keys]


def test_a_batch_reads_each_source_with_one_call() -> None:
    texts, others = Counting([f"k{number}" for number in range(9)]), Counting([f"k{number}" for number in range(9)])
    joined = Join(texts, others, key="id", other_key="id", into="other")
    texts.calls.clear()
    others.calls.clear()
    records = joined.__getitems__([5, 2, 8])
    assert [int(record["other"]["x"]) for record in records] == [5, 2, 8]
    assert (texts.calls, others.calls) == ([[5, 2, 8]], [[5, 2, 8]])


KEYS = st.one_of(st.text(max_size=3), st.binary(max_size=2), st.integers(-3, 1 << 70))


@given(st.lists(KEYS, unique_by=lambda key: key.encode() if isinstance(key, str) else key, min_size=1), KEYS)
@settings(deadline=None)
def test_an_index_is_a_dict_of_keys(keys: list[Any], other: Any) -> None:
    index = index_of(Counting(keys), "id", None)
    wanted = {_digest(key): number for number, key in enumerate(keys)}
    asked = [*reversed(keys), other]
    assert index.find(asked).tolist() == [wanted.get(_digest(key), -1) for key in asked]


def test_a_missing_key_names_the_record_and_shows_what_keys_look_like(tmp_path: pathlib.Path) -> None:
    pq.write_table(pa.table({"text": ["a", "b"], "image": ["a/0.raw", "images/a/2.raw"]}), tmp_path / "texts.parquet")
    joined = Join(Parquet(tmp_path / "texts.parquet"), write_folder(tmp_path), key="image")
    assert joined[0]["image"]["bytes"] == content(0)
    words = (
        r"record 1 of .*texts\.parquet: its leaf 'image' is 'images/a/2\.raw', which is the key 'path' of none of the 12 "
        r"records of Folder\(.*\(whose keys look like 'a/0\.raw'\)"
    )
    with pytest.raises(meshfeed.SourceError, match=words) as error:
        joined.__getitems__([0, 1])
    assert error.value.record_id == 1


def test_equal_keys_are_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(
        meshfeed.SourceError, match=r"records 1 and 3 of .* same key 'id': 'b'\. 1 more keys occur again\."
    ):
        Join([{"k": "a"}], Counting(["a", "b", "c", "b", "a"]), key="k", other_key="id")
    tars = write_tars(tmp_path)
    with pytest.raises(
        meshfeed.SourceError, match=r"records \d+ and \d+ of Concat\(.* same key '__key__': '[ab]/\d+'\. 11 more"
    ):
        Join([{"k": "a"}], Concat([tars, tars]), key="k")


def test_an_index_file_saves_reading_the_records_again(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "index"

    def joined(keys: Sequence[str]) -> tuple[Any, int]:
        others = Counting(keys)
        found = Join([{"k": keys[-1]}], others, key="k", other_key="id", index_file=path)
        return found, len(others.calls)

    for keys, calls in ((["a", "b"], 1), (["a", "b"], 0), (["b", "a", "c"], 1), (["b", "a", "c"], 0)):
        found, made = joined(keys)
        assert made == calls
        assert int(found[0]["k"]["x"]) == len(keys) - 1
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:-8], whole[:-1] + b"x", whole[:40]):
        path.write_bytes(damaged)
        assert joined(["b", "a", "c"])[1] == 1
        assert path.read_bytes() == whole
    path.write_bytes(b"my data")
    with pytest.raises(meshfeed.SettingsError, match="is a file of something else"):
        joined(["b", "a", "c"])
    assert path.read_bytes() == b"my data"
    assert [file.name for file in tmp_path.iterdir()] == ["index"]


def test_an_index_of_records_that_have_changed_is_noticed(tmp_path: pathlib.Path) -> None:
    others = [{"id": number, "x": number} for number in range(64)]
    texts = [{"k": [number, 9]} for number in range(64)]
    settings: dict[str, Any] = {"key": "k", "other_key": "id", "index_file": tmp_path / "index"}
    assert [other["x"] for other in Join(texts, others, **settings)[3]["k"]] == [3, 9]
    others[3], others[4] = others[4], others[3]  # which are not among the 4 that identify a list
    joined = Join(texts, others, **settings)
    with pytest.raises(
        meshfeed.SourceError,
        match=r"record 3: the record with the key 3 of .* now has the key 'id' 4.* delete the file",
    ) as error:
        joined.__getitems__([2, 3])
    assert error.value.record_id == 3
    with pytest.raises(meshfeed.SourceError, match="the record with the key 3 "):
        list(Join(Stream(lambda lane_index, num_lanes: iter(texts)), others, **settings).open(0, 1))


@pytest.mark.parametrize("kind", ["webdataset", "parquet", "concat"])
def test_an_index_of_files_that_know_their_keys_and_have_changed_is_noticed(kind: str, tmp_path: pathlib.Path) -> None:
    def write_others(numbers: Sequence[int]) -> Any:
        if kind == "parquet":
            pq.write_table(pa.table({"id": [f"{number:02}" for number in numbers], "x": numbers}), tmp_path / "others")
            return Parquet(tmp_path / "others")
        with tarfile.open(tmp_path / "others.tar", "w") as tar:
            for number in numbers:
                entry = tarfile.TarInfo(f"{number:02}.x")
                entry.size = 1
                tar.addfile(entry, io.BytesIO(bytes([number])))
        archive = WebDataset(tmp_path / "others.tar")
        return archive if kind == "webdataset" else Concat([archive])

    texts = [{"k": f"{number:02}"} for number in range(16)]
    leaf = "id" if kind == "parquet" else "__key__"
    how: dict[str, Any] = {"key": "k", "other_key": leaf, "index_file": tmp_path / "index"}
    assert Join(texts, write_others(range(16)), **how)[3]["k"][leaf] == "03"
    # Of the same size, and with the same 4 records that identify them.
    others = write_others([0, 1, 2, 4, 3, *range(5, 16)])
    joined = Join(texts, others, **how)
    assert joined[2]["k"][leaf] == "02"
    with pytest.raises(
        meshfeed.SourceError, match=f"record 3: the record with the key '03' of .* has the key '{leaf}' '04'"
    ):
        _ = joined[3]


@pytest.mark.parametrize("name", ["", "missing/index"])
def test_an_index_file_without_a_folder_is_refused_before_records_are_read(tmp_path: pathlib.Path, name: str) -> None:
    others = Counting(["a"])
    with pytest.raises(meshfeed.SettingsError, match=r"index_file=.* is a folder, or in a folder that does not exist"):
        Join([{"k": "a"}], others, key="k", other_key="id", index_file=tmp_path / name)
    assert not others.calls


def test_known_keys_are_not_read(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [write_folder(tmp_path), write_tars(tmp_path), write_parquet(tmp_path)]
    hugging_face = meshfeed.sources.HuggingFace(write_hugging_face(tmp_path))
    for source in (*sources, Concat([sources[0], Folder(tmp_path / "pictures" / "a")]), hugging_face):
        kind = source if source is not hugging_face else type(source.unconverted())
        kind = type(source) if kind is source else kind
        monkeypatch.setattr(kind, "__getitems__", lambda *_: pytest.fail("reads records"), raising=True)
        other_key = {"other_key": "name"} if source in (sources[2], hugging_face) else {}
        Join([{"k": "a"}], source, key="k", **other_key)
        monkeypatch.undo()


@pytest.mark.slow
def test_files_and_shards_are_those_of_the_records(tmp_path: pathlib.Path) -> None:
    for part in range(3):
        table = pa.table(
            {"id": [*range(part * 4, part * 4 + 4)], "image": [f"{name}.raw" for name in NAMES[part * 4 :][:4]]}
        )
        pq.write_table(table, tmp_path / f"texts-{part}.parquet")
    texts = Parquet(f"{tmp_path}/texts-*.parquet")
    joined = Join(texts, write_folder(tmp_path), key="image")
    assert joined.shard_lengths().tolist() == [4, 4, 4]
    assert joined.file_of(5).endswith("texts-1.parquet")
    assert len(joined.file_names()) == 3 + NUMBER
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))

    def feed(**how: Any) -> Any:
        return meshfeed.Feed(Map(joined, with_id), mesh, global_batch_size=3, num_epochs=2, **how)

    for how in ({"shuffle": "shards", "num_lanes": 3}, {"shuffle": True}, {"num_workers": 1}):
        with feed(**how) as opened:
            batches = [jax.tree.map(np.asarray, batch) for batch in opened]
        assert all((batch["id"] == batch["x"]).all() for batch in batches)
        assert sorted(np.concatenate([batch["id"] for batch in batches])) == sorted([*range(NUMBER)] * 2)


def with_id(record: dict[str, Any]) -> dict[str, Any]:
    return {"id": np.int32(record["id"]), "x": np.int32(record["image"]["bytes"][0])}


def pixels(record: dict[str, Any]) -> dict[str, Any]:
    images = [np.frombuffer(image["bytes"], np.uint8) for image in record["images"]]
    return {"tokens": np.array(record["tokens"], np.int32), "images": np.array(images, np.uint8).reshape(-1, 4)}


def some_texts(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Texts whose tokens name their images."""
    rng = np.random.default_rng(seed)
    texts = []
    for _ in range(count):
        own = rng.integers(0, NUMBER, rng.integers(0, 4)).tolist()
        texts.append({"tokens": [100 + len(own), *own], "images": [f"{NAMES[number]}.raw" for number in own]})
    return texts


def check_document(tokens: np.ndarray, images: np.ndarray) -> None:
    count = int(tokens[0]) - 100
    assert tokens[1 : 1 + count].tolist() == [int(image[0]) for image in images[:count]], "images of another text"


@pytest.mark.parametrize("build", ["packed", "padded", "mixture", "views"])
def test_images_stay_with_their_text(build: str, tmp_path: pathlib.Path) -> None:
    folder, texts = write_folder(tmp_path), some_texts(40)

    def documents(part: slice) -> Any:
        return Map(Join(texts[part], folder, key="images"), pixels)

    whole = documents(slice(None))
    if build == "padded":
        source = Padded(whole, {"tokens": 6, "images": 4})
        for record in source:
            check_document(record["tokens"], record["images"])
            assert record["images_mask"].sum() == record["tokens"][0] - 100
        return
    if build == "mixture":
        whole = Mixture({"a": documents(slice(0, 20)), "b": documents(slice(20, None))}, weights={"a": 1, "b": 1})
    if build == "views":
        whole = Subset(Concat([documents(slice(0, 20)), documents(slice(20, None))]), slice(None, None, -1))
    packed = Packed(whole, 16, method="fit", side={"images": 6})
    seen = []
    for number in range(len(packed)):
        row = packed[number]
        for segment in range(1, row["segment_ids"].max() + 1):
            tokens = row["tokens"][row["segment_ids"] == segment]
            check_document(tokens, row["images"][row["images_segment"] == segment])
            seen.append(tokens.tolist())
    # An epoch of a mixture has exact shares, for which it repeats some documents.
    assert set(map(tuple, seen)) == {tuple(text["tokens"]) for text in texts}
    assert build == "mixture" or len(seen) == len(texts)


def test_a_join_may_be_joined_again_and_zipped(tmp_path: pathlib.Path) -> None:
    texts = [{"image": f"{NAMES[number]}.raw", "sound": number} for number in (3, 8)]
    sounds = Memory({"number": np.arange(NUMBER), "samples": np.arange(NUMBER * 2).reshape(NUMBER, 2)})
    joined = Join(Join(texts, write_folder(tmp_path), key="image"), sounds, key="sound", other_key="number")
    both = Zip({"texts": joined, "labels": Memory(np.arange(2))})
    record = both[1]["texts"]
    assert (record["image"]["bytes"], record["sound"]["samples"].tolist()) == (content(8), [16, 17])


def open_texts(lane_index: int, num_lanes: int) -> Any:
    for number in range(lane_index, 24, num_lanes):
        yield {"id": number % NUMBER, "image": f"{NAMES[number % NUMBER]}.raw"}


def test_a_stream_is_joined_too(tmp_path: pathlib.Path) -> None:
    folder = write_folder(tmp_path)
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))

    def feed() -> Any:
        source = Map(Join(Stream(open_texts), folder, key="image"), with_id)
        return meshfeed.Feed(source, mesh, global_batch_size=4, num_lanes=2)

    assert check_resumable(feed, save_points=[2]) == 3
    with feed() as opened:
        assert all((np.asarray(batch["id"]) == np.asarray(batch["x"])).all() for batch in opened)
    lost = Map(Join(Stream(lambda lane_index, num_lanes: iter([{"image": "lost"}])), folder, key="image"), with_id)
    with (
        meshfeed.Feed(lost, mesh, global_batch_size=1, num_lanes=1) as opened,
        pytest.raises(meshfeed.SourceError, match="'lost'"),
    ):
        next(opened)


def test_the_records_that_a_stream_is_joined_to_belong_to_its_identity_and_are_closed(tmp_path: pathlib.Path) -> None:
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))

    class Others(meshfeed.sources.Memory):
        closed = 0

        def close(self) -> None:
            self.closed += 1

    def feed(factor: int) -> tuple[Any, Others]:
        others = Others({"id": np.arange(NUMBER), "x": np.arange(NUMBER) * factor})
        joined = Join(Stream(open_texts), others, key="id", other_key="id", into="other")
        source = Map(joined, lambda record: {"x": record["other"]["x"]})
        return meshfeed.Feed(source, mesh, global_batch_size=4, num_lanes=2), others

    first, others = feed(1)
    next(first)
    state = first.get_state()
    rest = [np.asarray(batch["x"]).tolist() for batch in first]
    first.close()
    assert others.closed == 1
    other, _ = feed(2)
    with other, pytest.raises(meshfeed.StateMismatchError, match=r"source\.source\.joined\.others"):
        other.set_state(state)
    del state["fingerprint"]["source"]["source"]["joined"]  # as earlier versions saved it
    again, _ = feed(1)
    with again:
        again.set_state(state)
        assert [np.asarray(batch["x"]).tolist() for batch in again] == rest


def test_a_function_around_a_joined_stream_gets_lists_as_they_are(tmp_path: pathlib.Path) -> None:
    folder = write_folder(tmp_path)
    names = [f"{name}.raw" for name in NAMES]
    lists = {"tags": [], "boxes": [[1, 2], [3]], "numbers": [1, 2]}
    records = [{"image": names[:count], **lists} for count in (0, 1, 2, 1)]
    for source in (records, Stream(lambda lane_index, num_lanes: iter(records))):
        seen: list[Any] = []

        def count_of(record: Any, seen: list[Any] = seen) -> Any:
            seen.append({name: record[name] for name in lists})
            return {"count": np.int32(len(record["image"]))}

        settings: dict[str, Any] = {"num_lanes": 1} if isinstance(source, Stream) else {}
        mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))
        with meshfeed.Feed(
            Map(Join(source, folder, key="image"), count_of), mesh, global_batch_size=4, **settings
        ) as feed:
            assert np.asarray(next(feed)["count"]).tolist() == [0, 1, 2, 1]
        assert all(found == lists for found in seen)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"key": 7}, "key=7"),
        ({"key": len}, "into=None"),
        ({"key": "k", "into": 3}, "into=3"),
        ({"key": "k", "other_key": None}, r"Name the leaf that has the keys: Join\(…, other_key=…\)"),
    ],
)
def test_wrong_settings_are_refused(how: dict[str, Any], words: str) -> None:
    with pytest.raises(meshfeed.SettingsError, match=words):
        Join([{"k": "a"}], Counting(["a"]), **{"other_key": "id", **how})


def test_wrong_sources_and_keys_are_refused() -> None:
    with pytest.raises(
        meshfeed.SourceError, match="record 0: it has the leaves \\['id', 'x'\\], and not the key 'name'"
    ):
        Join([{"k": "a"}], Counting(["a"]), key="k", other_key="name")
    with pytest.raises(meshfeed.SourceError, match="record 1: its key is None"):
        Join([{"k": "a"}], Counting(["a", None]), key="k", other_key="id")
    with pytest.raises(meshfeed.SourceError, match=r"record 0: its key is 1\.5, float"):
        Join([{"k": 1.5}], Counting(["a"]), key="k", other_key="id")[0]
    with pytest.raises(meshfeed.SourceError, match="read in order"):
        Join([{"k": "a"}], Stream(open_texts), key="k", other_key="id")
    with pytest.raises(meshfeed.SourceError, match="Join got others with 0 records, a list"):
        Join([{"k": "a"}], [], key="k", other_key="id")
    with pytest.raises(meshfeed.SourceError, match="batches of this host"):
        Join(meshfeed.sources.HostBatches([]), Counting(["a"]), key="k", other_key="id")

    def augment(record: Any, rng: Any) -> Any:
        return record

    with pytest.raises(meshfeed.SettingsError, match=r"Join got others whose decoder takes rng="):
        Join([{"k": "a"}], Map(Counting(["a"]), augment), key="k", other_key="id")


def test_another_folder_or_key_is_another_source(tmp_path: pathlib.Path) -> None:
    folder = write_folder(tmp_path)
    texts = [{"a": f"{NAMES[0]}.raw", "b": f"{NAMES[1]}.raw"}]
    first = Join(texts, folder, key="a").fingerprint()
    assert first == Join(texts, Folder(tmp_path / "pictures"), key="a").fingerprint()
    assert first != Join(texts, folder, key="b").fingerprint()
    (tmp_path / "pictures" / "a" / "0.raw").rename(tmp_path / "pictures" / "a" / "00.raw")
    assert first != Join(texts, Folder(tmp_path / "pictures"), key="a").fingerprint()


# ---------------------------------------------------------------------- Folder


def test_a_folder_has_its_files_in_order_of_path(tmp_path: pathlib.Path) -> None:
    folder = write_folder(tmp_path)
    (tmp_path / "pictures" / ".hidden").write_bytes(b"x")
    (tmp_path / "pictures" / "top[1].txt").write_bytes(b"t")
    again = Folder(tmp_path / "pictures")
    names = sorted([*(f"{name}.raw" for name in NAMES), "top[1].txt"])
    assert [record["path"] for record in again] == names
    assert again[-1 % len(again)]["bytes"] == b"t"
    assert [record["path"] for record in Folder(tmp_path / "pictures", "a/*.raw")] == [n for n in names if n[0] == "a"]
    assert folder.fingerprint() != again.fingerprint()
    assert again.file_of(0) == str(tmp_path / "pictures" / names[0])
    moved = tmp_path / "moved"
    (tmp_path / "pictures").rename(moved)
    assert Folder(moved).fingerprint() == again.fingerprint()
    with pytest.raises(meshfeed.SourceError, match=r"record 0: .*a/0\.raw has been removed"):
        again[0]
    with pytest.raises(IndexError):
        Folder(moved)[len(names)]


def test_a_folder_may_have_braces_in_its_name(tmp_path: pathlib.Path) -> None:
    for folder in ("{a,b}", "run[1]-{0..2}"):
        (tmp_path / folder / "in").mkdir(parents=True)
        for name in ("x.jpg", "in/y.png", "in/z.txt"):
            (tmp_path / folder / name).write_bytes(name.encode())
        assert [record["path"] for record in Folder(tmp_path / folder)] == ["in/y.png", "in/z.txt", "x.jpg"]
        assert [record["path"] for record in Folder(tmp_path / folder, "**/*.{jpg,png}")] == ["in/y.png", "x.jpg"]


def test_a_folder_that_is_none_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(meshfeed.SourceError, match="there is no folder"):
        Folder(tmp_path / "lost")
    with pytest.raises(meshfeed.SourceError, match="no file matches"):
        Folder(tmp_path, "*.jpg")
    with pytest.raises(meshfeed.SourceError, match="reads local folders"):
        Folder("gs://bucket/images")


# ---------------------------------------------------------------------- lengths of lists, for Packed(side=)


@pytest.mark.parametrize("kind", ["parquet", "huggingface"])
def test_lists_have_their_lengths_without_reading_records(
    kind: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {
        "tokens": [[number] * (1 + number % 4) for number in range(20)],
        "patches": [[[number, 1]] * (number % 3) for number in range(20)],
    }
    if kind == "parquet":
        pq.write_table(pa.table(rows), tmp_path / "rows.parquet", row_group_size=7)
        source: Any = Parquet(tmp_path / "rows.parquet")
        stored = source
    else:
        datasets = pytest.importorskip("datasets")
        shuffled = datasets.Dataset.from_dict(rows).select([*range(0, 20, 2), *range(1, 20, 2)])
        rows = {name: shuffled[name][:] for name in rows}
        source = meshfeed.sources.HuggingFace(shuffled)
        stored = source.unconverted()
    for name, values in rows.items():
        assert stored.stored_lengths(name).tolist() == [len(value) for value in values]
    assert stored.stored_lengths("other") is None
    with monkeypatch.context() as patched:
        patched.setattr(type(stored), "__getitems__", lambda *_: pytest.fail("reads records"))
        packed = Packed(source, 8, method="fit", side={"patches": 5})
    found = sorted(int(patch[0]) for row in packed for patch in row["patches"][row["patches_mask"]])
    assert found == sorted(number[0][0] for number in rows["patches"] for _ in number)
