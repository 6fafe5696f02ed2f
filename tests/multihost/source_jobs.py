"""Every source and pipeline through the feed on real hosts, for tests/multihost/test_sources.py."""

from __future__ import annotations

import itertools
import json
import logging
import pathlib
from typing import Any

import numpy as np
from shared_workers import shared_workers

NUM_LANES = 12
BATCH = 24
SIZES = [37, 5, 64, 0, 18, 90, 41]  # rows of each file: uneven, one empty, fewer files than lanes
SMALL = [3, 8, 1, 5, 9, 2, 4, 6, 7, 3, 5, 0, 8, 2, 6, 4, 1]  # more files than lanes


def write_files(folder: str) -> None:
    """Real files by the real libraries: parquet, jsonl, ArrayRecord, zarr."""
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
            table = pa.table({"id": ids, "x": (ids * 0.5).astype(np.float32)})
            pq.write_table(table, root / f"{name}-{number:02d}.parquet", row_group_size=16)
            lines = "".join(json.dumps({"id": int(i), "x": float(i) * 0.5}) + "\n" for i in ids)
            (root / f"{name}-{number:02d}.jsonl").write_text(lines)
            writer = ArrayRecordWriter(str(root / f"{name}-{number:02d}.array_record"), "group_size:1")
            for i in ids:
                writer.write(int(i).to_bytes(8, "little"))
            writer.close()
    tokens = np.arange(200 * 8, dtype=np.int32).reshape(200, 8)
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(root / "tokens.zarr")}}
    store = ts.open(spec, create=True, delete_existing=True, shape=tokens.shape, dtype=ts.int32).result()
    store.write(tokens).result()


def _files(folder: str, pattern: str) -> list[str]:
    return sorted(str(path) for path in pathlib.Path(folder).glob(pattern))


def _decode(record: bytes) -> dict[str, Any]:
    return {"id": np.int64(int.from_bytes(record, "little"))}


def _documents(folder: str) -> Any:
    """A Grain pipeline of documents of uneven length, for packing."""
    import grain

    lengths = np.random.default_rng(0).integers(1, 9, 120)

    def document(index: int) -> dict[str, np.ndarray]:
        return {"tokens": np.full(lengths[index], index + 1, np.int32)}

    return grain.MapDataset.range(120).map(document).to_iter_dataset()


def _grain_records(folder: str) -> Any:
    import grain

    return grain.MapDataset.source(grain.sources.ArrayRecordDataSource(_files(folder, "few-*.array_record"))).map(
        _decode
    )


def _make(name: str, folder: str) -> tuple[Any, dict[str, Any]]:
    """A pipeline by name, and the settings of the feed that go with it."""
    import grain
    from grain.experimental import ParquetIterDataset  # noqa: F401  fails early where Grain has moved it

    from meshfeed import sources

    few = _files(folder, "few-*.parquet")
    if name == "array_record":
        return sources.ArrayRecord(_files(folder, "few-*.array_record"), decode=_decode), {"shuffle": True}
    if name == "tensorstore":
        return sources.TensorStore({"tokens": f"{folder}/tokens.zarr"}), {"shuffle": 16}
    if name == "grain map":
        return sources.Grain(_grain_records(folder)), {"shuffle": True}
    if name == "grain filter":
        return sources.Grain(_grain_records(folder).filter(lambda r: r["id"] % 3 != 0)), {}
    if name == "grain window shuffle":
        dataset = _grain_records(folder).to_iter_dataset()
        return sources.Grain(grain.experimental.WindowShuffleIterDataset(dataset, window_size=7, seed=3)), {}
    if name == "grain mix":
        left, right = _grain_records(folder), _grain_records(folder).map(lambda r: {"id": r["id"] + 1000})
        return sources.Grain(grain.IterDataset.mix([left.to_iter_dataset(), right.to_iter_dataset()], [0.7, 0.3])), {}
    if name == "grain concat then split":
        dataset = grain.experimental.ConcatThenSplitIterDataset(_documents(folder), length_struct={"tokens": 8})
        return sources.Grain(dataset), {}
    if name == "grain first fit":
        dataset = grain.experimental.FirstFitPackIterDataset(
            _documents(folder), length_struct={"tokens": 8}, num_packing_bins=2
        )
        return sources.Grain(dataset), {}
    if name == "grain best fit":
        dataset = grain.experimental.BestFitPackIterDataset(
            _documents(folder), length_struct={"tokens": 8}, num_packing_bins=2
        )
        return sources.Grain(dataset), {}
    if name.startswith("hf"):
        import datasets

        datasets.disable_progress_bars()
        logging.getLogger("datasets").setLevel(logging.ERROR)
        if name == "hf map":
            return sources.HuggingFace(
                datasets.Dataset.from_dict({"id": list(range(255)), "x": [i * 0.5 for i in range(255)]})
            ), {"shuffle": True}
        kind, files = {
            "hf parquet": ("parquet", few),
            "hf parquet many": ("parquet", _files(folder, "many-*.parquet")),
            "hf json": ("json", _files(folder, "few-*.jsonl")),
            "hf shuffled": ("parquet", few),
            "hf mapped": ("parquet", few),
        }[name]
        dataset = datasets.load_dataset(kind, data_files=files, streaming=True, split="train")
        if name == "hf mapped":
            dataset = dataset.map(lambda row: {"id": row["id"] + 7}).filter(lambda row: row["id"] % 5 != 0)
        return sources.HuggingFace(dataset, shuffle_buffer=120 if name == "hf shuffled" else 0), {}
    if name == "mixture":
        parts = {"a": sources.ArrayRecord(_files(folder, "few-*.array_record"), decode=_decode)}
        parts["b"] = sources.ArrayRecord(_files(folder, "many-*.array_record"), decode=_decode)
        return sources.Mixture(parts, weights={"a": 3, "b": 1}, block=64), {"shuffle": True}
    if name == "mixture of streams":
        parts = {"a": _make("hf parquet", folder)[0], "b": _make("hf parquet many", folder)[0]}
        return sources.Mixture(parts, weights={"a": 2, "b": 1}, block=24), {}
    raise ValueError(name)


RANDOM = ("array_record", "tensorstore", "grain map", "hf map", "mixture")
STREAMS = (
    "grain filter",
    "grain window shuffle",
    "grain mix",
    "grain concat then split",
    "grain first fit",
    "grain best fit",
    "hf parquet",
    "hf parquet many",
    "hf json",
    "hf shuffled",
    "hf mapped",
    "mixture of streams",
)
NAMES = RANDOM + STREAMS


def _feed(name: str, folder: str, num_workers: int = 0) -> Any:
    import jax
    from jax.sharding import AxisType, Mesh

    import meshfeed

    source, options = _make(name, folder)
    if name in STREAMS:
        options["num_lanes"] = NUM_LANES
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    return meshfeed.MultiHostDataLoadIterator(
        source,
        mesh,
        global_batch_size=BATCH,
        end="pad",
        mask_key="mask",
        timeout_seconds=100,
        num_workers=num_workers,
        seed=5,
        **options,
    )


def rows_of(batch: Any) -> dict[int, str]:
    """Row of the global batch → its bytes as text, of the rows that this host holds."""
    rows: dict[int, str] = {}
    for name in sorted(batch):
        for shard in batch[name].addressable_shards:
            first = shard.index[0].start or 0
            for i, value in enumerate(np.asarray(shard.data)):
                rows[first + i] = rows.get(first + i, "") + f"{name}={value.tolist()!r};"
    return rows


def run(names: list[str], folder: str, save_at: int) -> dict[str, Any]:
    """Each pipeline from the beginning to its end: rows of every step here, and this host's state after ``save_at``."""
    found: dict[str, Any] = {}
    for name in names:
        with _feed(name, folder) as feed:
            steps, state = [], None
            for batch in feed:
                steps.append(rows_of(batch))
                if feed.step == save_at:
                    state = json.dumps(feed.get_state())
            found[name] = {"steps": steps, "state": state, "position": feed.position}
    return found


def go_on(names: list[str], folder: str, states: dict[str, dict[str, list[str]]]) -> dict[str, Any]:
    """Each pipeline continued from the states of each other topology: rows of every further step here."""
    import meshfeed

    found: dict[str, Any] = {}
    for name in names:
        with _feed(name, folder) as feed:
            for origin, parts in states[name].items():
                feed.set_state(meshfeed.merge_states([json.loads(part) for part in parts]))
                found[f"{name} from {origin}"] = [rows_of(batch) for batch in feed]
    return found


def go_on_with_workers(
    names: list[str], folder: str, states: dict[str, list[str]], num_workers: list[int], steps: list[int | None]
) -> dict[str, Any]:
    """Each pipeline continued with one number of workers for some steps, saved, and continued with the next number."""
    import meshfeed

    found: dict[str, Any] = {}
    with shared_workers(max(num_workers)) as used:
        for name in names:
            state, rows = meshfeed.merge_states([json.loads(part) for part in states[name]]), []
            for number, count in zip(num_workers, steps, strict=True):
                with _feed(name, folder, number) as feed:
                    feed.set_state(state)
                    rows += [rows_of(batch) for batch in itertools.islice(feed, count)]
                    state = json.loads(json.dumps(feed.get_state()))
            found[name] = {"steps": rows, "state": json.dumps(state)}
        assert len(used) == max(num_workers), "the rows came from the workers"
    return found
