"""Components that read and decode alike are read by one call; every record and every error stays as by component."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import jax
import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

import meshfeed
from meshfeed import SourceError
from meshfeed._src.order.mixture import join_ids
from meshfeed.sources import ArrayRecord, DecodeRaw, Mixture, Subset
from meshfeed.testing import check_resumable

RECORDS = 40


def write(path, number: int, options: str, dtype: type = np.int32, width: int = 4) -> str:
    writer = ArrayRecordWriter(str(path), options)
    for row in range(RECORDS):
        writer.write(np.full(width, 1000 * number + row, dtype).tobytes())
    writer.close()
    return str(path)


def join(records: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(records), np.int32).reshape(len(records), -1)


def one(record: bytes) -> np.ndarray:
    return np.frombuffer(record, np.int32)


def noisy(records: list[bytes], rng: list[np.random.Generator]) -> dict[str, np.ndarray]:
    return {"x": join(records), "noise": np.array([own.integers(1 << 30) for own in rng], np.int32)}


class Calls:
    """A decoder that notes how many records each call gets."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, records: list[bytes]) -> np.ndarray:
        self.sizes.append(len(records))
        return join(records)


def ids_of(num_components: int, count: int = 300) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.array([join_ids(c, i) for c, i in rng.integers(0, [num_components, RECORDS], (count, 2))], np.int64)


DECODERS: dict[str, Callable[[], dict]] = {
    "batch": lambda: {"decode_batch": join},
    "rows": lambda: {"decode_batch": DecodeRaw(np.int32, (4,))},
    "single": lambda: {"decode": one},
}


@pytest.mark.parametrize("options", ["group_size:1", "group_size:7"])
@pytest.mark.parametrize("decoder", DECODERS)
def test_the_same_records_as_by_component(tmp_path, options: str, decoder: str) -> None:
    arguments = DECODERS[decoder]()
    sources = {f"c{n}": ArrayRecord(write(tmp_path / f"{n}", n, options), **arguments) for n in range(5)}
    mixture, ids = Mixture(sources, dict.fromkeys(sources, 1), block=10), ids_of(5)
    expected = [1000 * (mixture_id >> 48) + (mixture_id & ((1 << 48) - 1)) for mixture_id in ids.tolist()]
    for _ in range(2):  # the first read compares the components' structures, the second reads all at once
        assert mixture.read_batch(ids)[:, 0].tolist() == expected
    assert pickle.loads(pickle.dumps(mixture)).read_batch(ids)[:, 3].tolist() == expected
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    assert check_resumable(
        lambda: meshfeed.Feed(mixture, mesh, global_batch_size=8, shuffle=True), max_steps=8, save_points=[1, 5]
    )


def test_one_call_per_decoder(tmp_path) -> None:
    first, second = Calls(), Calls()
    sources = {
        f"c{n}": ArrayRecord(write(tmp_path / f"{n}", n, "group_size:1"), decode_batch=second if n == 2 else first)
        for n in range(4)
    }
    mixture, ids = Mixture(sources, dict.fromkeys(sources, 1), block=10), ids_of(4)
    mixture.read_batch(ids)
    assert (len(first.sizes), len(second.sizes)) == (3, 1), "each component's structure is compared once"
    mixture.read_batch(ids)
    assert (len(first.sizes), len(second.sizes)) == (4, 2)
    assert first.sizes[-1] + second.sizes[-1] == len(ids)


def own_decoders(number: int, calls: list[int]) -> dict[str, dict]:
    """Arguments of component ``number``: a decoder of its own, of each kind."""

    def scaled(records: list[bytes]) -> dict[str, np.ndarray]:
        calls.append(len(records))
        return {"x": join(records) * (number + 1)}

    def scaled_with_noise(records: list[bytes], rng: list[np.random.Generator]) -> dict[str, np.ndarray]:
        return {"x": join(records) * (number + 1) + np.array([own.integers(9) for own in rng], np.int32)[:, None]}

    def scaled_one(record: bytes, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {"x": one(record) * (number + 1) + np.int32(rng.integers(9))}

    return {
        "batch": {"decode_batch": scaled},
        "rows": {"decode_batch": DecodeRaw(np.int32, (4,), key="x")},
        "noise": {"decode_batch": scaled_with_noise},
        "one": {"decode": lambda record: {"x": one(record) * (number + 1)}},
        "one with noise": {"decode": scaled_one},
    }


def expected_rows(ids: np.ndarray, kinds: list[str], seed: int) -> list[int]:
    found = []
    for row, mixture_id in enumerate(ids.tolist()):
        number, record = mixture_id >> 48, mixture_id & ((1 << 48) - 1)
        noise = int(np.random.default_rng(seed + row).integers(9)) if "noise" in kinds[number] else 0
        scale = 1 if kinds[number] == "rows" else number + 1
        found.append((1000 * number + record) * scale + noise)
    return found


@pytest.mark.parametrize("options", ["group_size:1", "group_size:7"])
@pytest.mark.parametrize(
    "kinds",
    [["batch"] * 4, ["rows"] * 3, ["one"] * 3, ["one", "one with noise", "one"], ["batch", "noise", "noise"],
     ["rows", "batch", "one", "noise", "rows", "batch", "one"]],
)  # fmt: skip
def test_components_with_decoders_of_their_own(tmp_path, kinds: list[str], options: str) -> None:
    calls: list[int] = []
    parts = {
        f"c{n}": ArrayRecord(write(tmp_path / f"{n}", n, options), **own_decoders(n, calls)[kind])
        for n, kind in enumerate(kinds)
    }
    mixture, ids = Mixture(parts, dict.fromkeys(parts, 1), block=10), ids_of(len(kinds))
    noisy_ones = any("noise" in kind for kind in kinds)
    for seed in (0, 1000):
        rngs = [np.random.default_rng(seed + row) for row in range(len(ids))] if noisy_ones else None
        assert mixture.read_batch(ids, rngs=rngs)["x"][:, 2].tolist() == expected_rows(ids, kinds, seed)
    copied = pickle.loads(pickle.dumps(mixture)) if kinds == ["rows"] * 3 else mixture
    few = ids[:1]
    rngs = [np.random.default_rng(5)] if noisy_ones else None
    for _ in range(2):
        assert copied.read_batch(few, rngs=rngs and list(rngs))["x"].shape == (1, 4)
    if kinds == ["batch"] * 4:
        assert len(calls) == 4 + 4 + 2, "the decoder of a component gets its records of a batch together"


def test_components_with_decoders_of_their_own_are_read_with_one_call(tmp_path, monkeypatch) -> None:
    parts = {
        f"c{n}": ArrayRecord(write(tmp_path / f"{n}", n, "group_size:1"), decode_batch=lambda records: join(records))
        for n in range(4)
    }
    views = {name: part if name == "c0" else Subset(part, slice(None, None, -1)) for name, part in parts.items()}
    read: list[int] = []
    whole = ArrayRecord.read_raw
    monkeypatch.setattr(ArrayRecord, "read_raw", lambda self, ids: (read.append(len(ids)), whole(self, ids))[1])
    for sources, expected in ((parts, 1), (views, 2)):
        mixture, ids = Mixture(sources, dict.fromkeys(sources, 1), block=10), ids_of(4)
        first = mixture.read_batch(ids)
        read.clear()
        np.testing.assert_array_equal(mixture.read_batch(ids), first)
        assert len(read) == expected
        assert sum(read) == len(ids)


def test_arrays_that_a_decoder_writes_again_are_copied(tmp_path) -> None:
    held = np.empty((300, 4), np.int32)

    def refilled(scale: int) -> Callable[[list[bytes]], np.ndarray]:
        def decode(records: list[bytes]) -> np.ndarray:
            return np.multiply(join(records), scale, out=held[: len(records)])

        return decode

    parts = {
        f"c{n}": ArrayRecord(write(tmp_path / f"{n}", n, "group_size:1"), decode_batch=refilled(1)) for n in range(3)
    }
    mixture, ids = Mixture(parts, dict.fromkeys(parts, 1), block=10), ids_of(3)
    expected = [1000 * (mixture_id >> 48) + (mixture_id & ((1 << 48) - 1)) for mixture_id in ids.tolist()]
    mixture.read_batch(ids)
    together = mixture.read_batch(ids)
    alone = mixture.read_batch(ids[ids >> 48 == 0])
    held[:] = -1
    assert together[:, 0].tolist() == expected
    assert (alone >= 0).all()


@pytest.mark.parametrize("batched", [True, False])
def test_a_component_with_its_own_decoder_that_fails_or_changes_is_named(tmp_path, *, batched: bool) -> None:
    broken: dict[int, Callable[[np.ndarray], np.ndarray]] = {}

    def decoder(number: int) -> dict[str, Callable]:
        def change(array: np.ndarray) -> np.ndarray:
            return broken[number](array) if number in broken else array

        if batched:
            return {"decode_batch": lambda records: change(join(records))}
        return {"decode": lambda record: change(one(record))}

    parts = {f"c{n}": ArrayRecord(write(tmp_path / f"{n}", n, "group_size:1"), **decoder(n)) for n in range(4)}
    mixture, ids = Mixture(parts, dict.fromkeys(parts, 1), block=10), ids_of(4)
    expected = mixture.read_batch(ids)

    def fail(array: np.ndarray) -> np.ndarray:
        raise KeyError("tokens")

    broken[2] = fail
    with pytest.raises(KeyError) as caught:
        mixture.read_batch(ids)
    assert "in component 'c2' of the mixture" in caught.value.__notes__
    broken[2] = lambda array: array.astype(np.int64)
    with pytest.raises(SourceError, match="'c2' and 'c0' have unlike records"):
        mixture.read_batch(ids)
    broken[2] = lambda array: array[..., :3]
    with pytest.raises(SourceError, match="'c2' and 'c0' have unlike records"):
        mixture.read_batch(ids)
    broken[2] = lambda array: np.ma.masked_equal(array, array.flat[0])
    with pytest.raises(SourceError, match="masked"):
        mixture.read_batch(ids)
    broken.clear()
    np.testing.assert_array_equal(mixture.read_batch(ids), expected)


def test_random_numbers_stay_with_their_records(tmp_path) -> None:
    sources = {f"c{n}": ArrayRecord(write(tmp_path / f"{n}", n, "group_size:1"), decode_batch=noisy) for n in range(3)}
    mixture, ids = Mixture(sources, dict.fromkeys(sources, 1), block=10), ids_of(3)

    def read() -> dict[str, np.ndarray]:
        return mixture.read_batch(ids, rngs=[np.random.default_rng(int(i) & 0xFFFF) for i in ids])

    by_component, at_once = read(), read()
    np.testing.assert_array_equal(by_component["noise"], at_once["noise"])
    np.testing.assert_array_equal(by_component["x"], at_once["x"])


@pytest.mark.parametrize("own_decoders", [False, True])
def test_random_numbers_stay_the_same_if_a_read_fails_for_a_moment(tmp_path, *, own_decoders: bool) -> None:
    paths = [write(tmp_path / f"{n}.array_record", n, "group_size:1") for n in range(2)]
    fails: list[int] = []

    def decode(record: bytes, rng: np.random.Generator) -> dict[str, np.ndarray]:
        noise = rng.integers(1 << 30)
        if fails and fails.pop():
            raise OSError("for a moment")
        return {"x": one(record), "noise": np.int32(noise)}

    def other(record: bytes, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return decode(record, rng)

    decoders = [decode, other if own_decoders else decode]
    source = Mixture(
        {str(n): ArrayRecord(path, decoders[n]) for n, path in enumerate(paths)}, {"0": 1, "1": 1}, block=8
    )
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def noise() -> list[int]:
        found = []
        with meshfeed.Feed(source, mesh, global_batch_size=8, prefetch=0) as feed:
            for number, batch in enumerate(feed):
                found += batch["noise"].tolist()
                fails[:] = [1, 0, 0] if number == 2 and fail else []
        return found

    fail = False
    usual = noise()
    fail = True
    assert noise() == usual


def test_unlike_components_are_refused_before_one_call_could_promote_them(tmp_path) -> None:
    def by_width(records: list[bytes]) -> np.ndarray:  # would promote to int64 if it got both components at once
        return np.stack([np.frombuffer(r, np.int64 if len(r) == 32 else np.int32).copy() for r in records])

    narrow = ArrayRecord(write(tmp_path / "narrow", 0, "group_size:1"), decode_batch=by_width)
    wide = ArrayRecord(write(tmp_path / "wide", 1, "group_size:1", np.int64), decode_batch=by_width)
    mixture = Mixture({"narrow": narrow, "wide": wide}, {"narrow": 1, "wide": 1}, block=10)
    for _ in range(2):
        with pytest.raises(SourceError, match=r"'wide' and 'narrow' have unlike records"):
            mixture.read_batch(ids_of(2))


def test_a_component_that_fails_is_named(tmp_path) -> None:
    armed: list[bool] = []

    def decode(records: list[bytes]) -> np.ndarray:
        batch = join(records)
        if armed and (batch == 2007).any():
            raise KeyError("tokens")
        return batch

    sources = {f"c{n}": ArrayRecord(write(tmp_path / f"{n}", n, "group_size:1"), decode_batch=decode) for n in range(4)}
    mixture = Mixture(sources, dict.fromkeys(sources, 1), block=10)
    ids = np.array([join_ids(c, 7) for c in range(4)], np.int64)
    mixture.read_batch(ids)
    armed.append(True)
    with pytest.raises(KeyError) as caught:
        mixture.read_batch(ids)
    assert "in component 'c2' of the mixture" in caught.value.__notes__
    with pytest.raises(SourceError, match="record 40 of component 'c1'"):
        mixture.read_batch(np.array([join_ids(0, 1), join_ids(1, RECORDS)], np.int64))
    with pytest.raises(SourceError, match="names component 4"):
        mixture.read_batch(np.array([join_ids(4, 0)], np.int64))


def test_a_subclass_reads_its_own_way(tmp_path) -> None:
    class Negated(ArrayRecord):
        def read_raw(self, record_ids):
            return [(-np.frombuffer(r, np.int32)).tobytes() for r in super().read_raw(record_ids)]

    plain = ArrayRecord(write(tmp_path / "a", 1, "group_size:1"), decode_batch=join)
    negated = Negated(write(tmp_path / "b", 2, "group_size:1"), decode_batch=join)
    mixture, ids = Mixture({"a": plain, "b": negated}, {"a": 1, "b": 1}, block=10), ids_of(2)
    for _ in range(2):
        batch = mixture.read_batch(ids)[:, 0]
        assert (batch[ids >> 48 == 0] > 0).all()
        assert (batch[ids >> 48 == 1] < 0).all()
