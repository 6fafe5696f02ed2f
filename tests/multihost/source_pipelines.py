"""Every kind of source, and pipelines of every library, over real files of uneven length: what tests of sources read."""

from __future__ import annotations

import functools
import json
import logging
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

NUM_LANES = 12
BATCH = 24
SIZES = [37, 5, 64, 0, 18, 90, 41]  # rows of each file: uneven, one empty, fewer files than lanes
SMALL = [3, 8, 1, 5, 9, 2, 4, 6, 7, 3, 5, 0, 8, 2, 6, 4, 1]  # more files than lanes
FEW, MANY = range(sum(SIZES)), range(sum(SMALL))
DOCUMENT_LENGTHS = np.random.default_rng(0).integers(1, 9, 120)


def write_files(folder: str) -> None:
    """Real files by the real libraries: parquet, arrow, jsonl, csv, text, ArrayRecord, zarr."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import tensorstore as ts
    from array_record.python.array_record_module import ArrayRecordWriter

    root = pathlib.Path(folder)
    for name, sizes in (("few", SIZES), ("many", SMALL)):
        first = 0
        for number, size in enumerate(sizes):
            ids = np.arange(first, first + size, dtype=np.int64)
            first += size
            path = functools.partial("{}/{}-{:02d}.{}".format, root, name, number)
            table = pa.table({"id": ids, "x": (ids * 0.5).astype(np.float32)})
            pq.write_table(table, path("parquet"), row_group_size=16)
            with pa.OSFile(path("arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
                stream.write_table(table, max_chunksize=16)
            lines = [json.dumps({"id": i, "x": i * 0.5}) for i in ids.tolist()]
            pathlib.Path(path("jsonl")).write_text("".join(f"{line}\n" for line in lines))
            pathlib.Path(path("csv")).write_text("id,x\n" + "".join(f"{i},{i * 0.5}\n" for i in ids))
            pathlib.Path(path("txt")).write_text("".join(f"{i}\n" for i in ids))
            writer = ArrayRecordWriter(path("array_record"), "group_size:1")
            for i in ids:
                writer.write(int(i).to_bytes(8, "little"))
            writer.close()
    np.arange(240, dtype=np.uint16).tofile(root / "tokens.bin")
    (root / "pictures").mkdir(exist_ok=True)
    for number in range(len(DOCUMENT_LENGTHS)):
        for picture in range(number % 3):
            (root / "pictures" / f"{number}-{picture}.raw").write_bytes(bytes([number + 1] * 2))
    ids = np.arange(200, dtype=np.int32)
    for name, array in (("id", ids), ("tokens", np.arange(200 * 8, dtype=np.int32).reshape(200, 8))):
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(root / f"{name}.zarr")}}
        store = ts.open(spec, create=True, delete_existing=True, shape=array.shape, dtype=ts.int32).result()
        store.write(array).result()


def files(folder: str, pattern: str) -> list[str]:
    """Paths in order."""
    return sorted(str(path) for path in pathlib.Path(folder).glob(pattern))


def decode(record: bytes) -> dict[str, Any]:
    """A record of the ArrayRecord files."""
    return {"id": np.int64(int.from_bytes(record, "little"))}


class Counter:
    """Numbers, with a state that holds a tuple."""

    def __init__(self, values: Sequence[int]) -> None:
        self._values, self._next = values, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        if self._next == len(self._values):
            raise StopIteration
        self._next += 1
        return {"id": np.int64(self._values[self._next - 1])}

    def get_state(self) -> Any:
        return {"next": (self._next,)}

    def set_state(self, state: Any) -> None:
        (self._next,) = state["next"]


def open_counter(lane_index: int, num_lanes: int) -> Counter:
    return Counter(FEW[lane_index::num_lanes])


def open_plain(lane_index: int, num_lanes: int) -> Iterator[dict[str, Any]]:
    yield from Counter(FEW[lane_index::num_lanes])


def _array_record(folder: str, name: str = "few") -> Any:
    from meshfeed import sources

    return sources.ArrayRecord(files(folder, f"{name}-*.array_record"), decode=decode)


def _tensorstore(folder: str, *names: str, **options: Any) -> Any:
    from meshfeed import sources

    return sources.TensorStore({name: f"{folder}/{name}.zarr" for name in names}, **options)


def _memory(folder: str) -> Any:
    from meshfeed import sources

    return sources.Memory({"id": np.arange(len(FEW)), "x": np.arange(len(FEW) * 3, dtype=np.float32).reshape(-1, 3)})


def _tokens(folder: str) -> Any:
    from meshfeed import sources

    return sources.Tokens(f"{folder}/tokens.bin", 1, dtype=np.uint16, next_token=False, key="id")


def _stream(open_lane: Any, folder: str) -> Any:
    from meshfeed import sources

    return sources.Stream(open_lane)


def _packed_documents(method: str, folder: str) -> Any:
    from meshfeed import sources

    documents = [np.full(length, number + 1, np.int32) for number, length in enumerate(DOCUMENT_LENGTHS)]
    return sources.Packed(documents, 4, method=method, block=32)


def _packed_within_limits(folder: str) -> Any:
    """Documents with images, which travel with them."""
    from meshfeed import sources

    documents = [
        {"tokens": np.full(length, number + 1, np.int32), "images": np.full((number % 3, 2), number + 1, np.uint8)}
        for number, length in enumerate(DOCUMENT_LENGTHS)
    ]
    limits: dict[str, Any] = {"max_segments": 3, "align": 2, "bos_id": 0, "cumulative_lengths": "starts"}
    order = ("zigzag", 2)
    return sources.Packed(documents, 8, method="fit", block=32, sequence_order=order, side={"images": 4}, **limits)


def _packed_join(folder: str) -> Any:
    """Documents whose images are files."""
    from meshfeed import sources

    documents = [
        {"tokens": [number + 1] * int(length), "images": [f"{number}-{picture}.raw" for picture in range(number % 3)]}
        for number, length in enumerate(DOCUMENT_LENGTHS)
    ]
    joined = sources.Join(documents, sources.Folder(f"{folder}/pictures"), key="images")
    return sources.Packed(sources.Map(joined, _with_pictures), 8, method="fit", block=32, side={"images": 4})


def _with_pictures(record: dict[str, Any]) -> dict[str, Any]:
    pixels = b"".join(image["bytes"] for image in record["images"])
    images = np.frombuffer(pixels, np.uint8).reshape(-1, 2)
    return {"tokens": np.array(record["tokens"], np.int32), "images": images}


def _join(make: Callable[[str], Any], folder: str) -> Any:
    """Records joined to those of other files."""
    from meshfeed import sources

    key: Any = _number_of_many
    others = _array_record(folder, "many")
    return sources.Map(sources.Join(make(folder), others, key=key, other_key="id", into="other"), _with_other)


def _number_of_many(record: dict[str, Any]) -> int:
    return int(record["id"]) % len(MANY)


def _with_other(record: dict[str, Any]) -> dict[str, Any]:
    assert record["other"]["id"] == _number_of_many(record)
    return {"id": record["id"], "x": record["other"]["id"] + 1000}


def _ragged(make: Callable[[Any, list[Any]], Any], folder: str) -> Any:
    """Documents of unequal length, padded."""
    from meshfeed import sources

    lengths = enumerate(DOCUMENT_LENGTHS.tolist())
    return make(sources, [{"id": number, "tokens": np.arange(length)} for number, length in lengths])


def _mapped(source: Any) -> Any:
    from meshfeed import sources

    return sources.Map(source, _add_seven)


def _shuffled(folder: str) -> Any:
    from meshfeed import sources

    return sources.ShuffleBuffer(_stream(open_counter, folder), 48)


def _grain(change: Callable[[Any, Any], Any], folder: str) -> Any:
    """A Grain pipeline over records of the ArrayRecord files."""
    import grain

    from meshfeed import sources

    records = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(files(folder, "few-*.array_record")))
    return sources.Grain(change(grain, records.map(decode)))


def _shifted(record: dict[str, Any]) -> dict[str, Any]:
    return {"id": record["id"] + 1000}


def _mix(grain: Any, records: Any) -> Any:
    return grain.IterDataset.mix([records.to_iter_dataset(), records.map(_shifted).to_iter_dataset()], [0.7, 0.3])


def _interleave(grain: Any, records: Any) -> Any:
    parts = [records[first : first + 60].to_iter_dataset() for first in range(0, len(FEW), 60)]
    return grain.experimental.InterleaveIterDataset(parts, cycle_length=3)


def _prefetched(grain: Any, records: Any) -> Any:
    return records.to_iter_dataset().mp_prefetch(grain.MultiprocessingOptions(num_workers=2))


def _parquet(folder: str) -> Any:
    from grain.experimental import ParquetIterDataset

    from meshfeed import sources

    return sources.Grain(ParquetIterDataset(files(folder, "few-*.parquet")))


def _packed(packer: str, folder: str, **options: Any) -> Any:
    import grain

    from meshfeed import sources

    def document(index: int) -> dict[str, np.ndarray]:
        return {"tokens": np.full(DOCUMENT_LENGTHS[index], index + 1, np.int32)}

    documents = grain.MapDataset.range(len(DOCUMENT_LENGTHS)).map(document).to_iter_dataset()
    return sources.Grain(getattr(grain.experimental, packer)(documents, length_struct={"tokens": 8}, **options))


def _hf(change: Callable[..., Any], folder: str, pattern: str = "few-*.parquet", **options: Any) -> Any:
    """A streaming dataset of the library over files."""
    import datasets

    from meshfeed import sources

    datasets.disable_progress_bars()
    logging.getLogger("datasets").setLevel(logging.ERROR)
    kind = {"jsonl": "json", "txt": "text"}.get(suffix := pattern.rsplit(".", 1)[1], suffix)

    def load(pattern: str) -> Any:
        return datasets.load_dataset(kind, data_files=files(folder, pattern), streaming=True, split="train")

    return sources.HuggingFace(change(load(pattern), datasets, load), **options)


def _same(dataset: Any, *_: Any) -> Any:
    return dataset


def _add_seven(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["id"] + 7}


def _no_fifth(row: dict[str, Any]) -> bool:
    return row["id"] % 5 != 0


def _number(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": int(row["text"])}


def _two_of_them(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {"id": [i for i in rows["id"] for _ in range(2)]}


def _moved(load: Any) -> Any:
    return load("many-*.parquet").select_columns("id").map(lambda row: {"id": row["id"] + 1000})


def _hf_interleaved(dataset: Any, datasets: Any, load: Any) -> Any:
    strategy = "all_exhausted_without_replacement"
    parts = [dataset.select_columns("id"), _moved(load)]
    return datasets.interleave_datasets(parts, [0.6, 0.4], seed=3, stopping_strategy=strategy)


def _hf_map_style(folder: str) -> Any:
    import datasets

    from meshfeed import sources

    return sources.HuggingFace(datasets.Dataset.from_dict({"id": [*FEW], "x": [i * 0.5 for i in FEW]}))


def _mixture(folder: str) -> Any:
    from meshfeed import sources

    parts = {"a": _array_record(folder), "b": _array_record(folder, "many")}
    return sources.Mixture(parts, weights={"a": 3, "b": 1}, block=64)


def _mixture_of_streams(folder: str) -> Any:
    from meshfeed import sources

    parts = {"a": _hf(_same, folder), "b": _hf(_same, folder, "many-*.parquet")}
    return sources.Mixture(parts, weights={"a": 2, "b": 1}, block=24)


_part = functools.partial
RANDOM: dict[str, tuple[Callable[[str], Any], bool | int, Sequence[int] | None]] = {
    "memory": (_memory, True, FEW),
    "array_record": (_array_record, True, FEW),
    "tensorstore": (lambda folder: _tensorstore(folder, "id", "tokens"), 16, range(200)),
    "tensorstore windows": (lambda folder: _tensorstore(folder, "id", window=2), True, range(200)),
    "grain map": (_part(_grain, lambda grain, records: records), True, FEW),
    "hf map": (_hf_map_style, True, FEW),
    "mixture": (_mixture, True, None),
    "tokens": (_tokens, True, range(240)),
    "packed": (_part(_packed_documents, "split"), True, None),
    "packed by best fit": (_part(_packed_documents, "fit"), True, None),
    "packed within limits": (_packed_within_limits, True, None),
    "padded": (
        _part(_ragged, lambda sources, documents: sources.Padded(documents, 8, mask_key="real")),
        True,
        range(120),
    ),
    "buckets": (
        _part(_ragged, lambda sources, documents: sources.Buckets(documents, (3, 6, 8), mask_key="real")),
        True,
        range(120),
    ),
    "packed over a join": (_packed_join, True, None),
    "join": (_part(_join, _memory), True, FEW),
    "map": (lambda folder: _mapped(_memory(folder)), True, [i + 7 for i in FEW]),
}
"""name → (maker, the feed's ``shuffle``, ids of all records)."""

STREAMS: dict[str, tuple[Callable[[str], Any], Sequence[int] | None]] = {
    "stream": (_part(_stream, open_counter), FEW),
    "stream without state": (_part(_stream, open_plain), FEW),
    "mapped stream": (lambda folder: _mapped(_stream(open_counter, folder)), [i + 7 for i in FEW]),
    "joined stream": (_part(_join, _part(_stream, open_counter)), FEW),
    "shuffle buffer": (_shuffled, FEW),
    "grain filter": (
        _part(_grain, lambda grain, records: records.filter(lambda r: r["id"] % 3 != 0)),
        [i for i in FEW if i % 3],
    ),
    "grain iter filter": (
        _part(_grain, lambda grain, records: records.to_iter_dataset().filter(lambda r: r["id"] % 3 != 0)),
        [i for i in FEW if i % 3],
    ),
    "grain window shuffle": (
        _part(
            _grain,
            lambda grain, records: grain.experimental.WindowShuffleIterDataset(
                records.to_iter_dataset(), window_size=7, seed=3
            ),
        ),
        FEW,
    ),
    "grain mix": (_part(_grain, _mix), None),
    "grain interleave": (_part(_grain, _interleave), FEW),
    "grain mp_prefetch": (_part(_grain, _prefetched), FEW),
    "grain parquet": (_parquet, FEW),
    "grain concat then split": (_part(_packed, "ConcatThenSplitIterDataset"), None),
    "grain first fit": (_part(_packed, "FirstFitPackIterDataset", num_packing_bins=2), None),
    "grain best fit": (_part(_packed, "BestFitPackIterDataset", num_packing_bins=2), None),
    "hf parquet": (_part(_hf, _same), FEW),
    "hf parquet many": (_part(_hf, _same, pattern="many-*.parquet"), MANY),
    "hf json": (_part(_hf, _same, pattern="few-*.jsonl"), FEW),
    "hf json many": (_part(_hf, _same, pattern="many-*.jsonl"), MANY),
    "hf csv": (_part(_hf, _same, pattern="many-*.csv"), MANY),
    "hf text": (_part(_hf, lambda d, *_: d.map(_number, remove_columns=["text"]), pattern="few-*.txt"), FEW),
    "hf arrow": (_part(_hf, _same, pattern="few-*.arrow"), FEW),
    "hf shuffled": (_part(_hf, _same, shuffle_buffer=120), FEW),
    "hf mapped": (
        _part(_hf, lambda d, *_: d.map(_add_seven).filter(_no_fifth)),
        [i + 7 for i in FEW if (i + 7) % 5],
    ),
    "hf batched map": (
        _part(_hf, lambda d, *_: d.map(_two_of_them, batched=True, batch_size=4, remove_columns=["x"])),
        [i for i in FEW for _ in range(2)],
    ),
    "hf batch": (_part(_hf, lambda d, *_: d.take(240).batch(2), columns=["id"]), range(240)),
    "hf interleave": (_part(_hf, _hf_interleaved), [*FEW, *(i + 1000 for i in MANY)]),
    "hf concat": (
        _part(_hf, lambda d, datasets, load: datasets.concatenate_datasets([d.select_columns("id"), _moved(load)])),
        [*FEW, *(i + 1000 for i in MANY)],
    ),
    "mixture of streams": (_mixture_of_streams, None),
}
"""name → (maker, ids of all records)."""

PACKED = (
    "grain concat then split",
    "grain first fit",
    "grain best fit",
    "packed",
    "packed by best fit",
    "packed within limits",
    "packed over a join",
)
NAMES = (*RANDOM, *STREAMS)


def make_feed(source_name: str, folder: str, devices: Sequence[Any] | None = None, **options: Any) -> Any:
    """A feed of one source over devices; all of the job by default."""
    import jax
    from jax.sharding import AxisType, Mesh

    import meshfeed

    how = {"shuffle": RANDOM[source_name][1]} if source_name in RANDOM else {"num_lanes": NUM_LANES}
    settings = {"global_batch_size": BATCH, "end": "pad", "mask_key": "mask", "timeout_seconds": 100, "seed": 5}
    mesh = Mesh(np.array(jax.devices() if devices is None else devices), ("data",), axis_types=(AxisType.Auto,))
    source = (RANDOM[source_name] if source_name in RANDOM else STREAMS[source_name])[0](folder)
    return meshfeed.Feed(source, mesh, **{**settings, **how, **options})
