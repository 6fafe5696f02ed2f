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
from meshfeed.sources import ArrayRecord, DecodeRaw, Mixture
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


def test_random_numbers_stay_with_their_records(tmp_path) -> None:
    sources = {f"c{n}": ArrayRecord(write(tmp_path / f"{n}", n, "group_size:1"), decode_batch=noisy) for n in range(3)}
    mixture, ids = Mixture(sources, dict.fromkeys(sources, 1), block=10), ids_of(3)

    def read() -> dict[str, np.ndarray]:
        return mixture.read_batch(ids, rngs=[np.random.default_rng(int(i) & 0xFFFF) for i in ids])

    by_component, at_once = read(), read()
    np.testing.assert_array_equal(by_component["noise"], at_once["noise"])
    np.testing.assert_array_equal(by_component["x"], at_once["x"])


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
