"""How records are decoded, and what each way of reading passes to the decoder."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshfeed._src.base.errors import SourceError
from meshfeed._src.base.settings import Retry, SkipBad
from meshfeed._src.reading.records import RecordReader, SourceReader


class Raw:
    """Records of bytes, which ``decode`` turns into numbers, with a number that is drawn if it takes ``rng``."""

    def __init__(self, length: int = 8, bad: set[int] | None = None) -> None:
        self._length, self._bad = length, bad or set()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, record_id: int) -> bytes:
        return bytes([record_id])

    def read_raw(self, record_ids: Any) -> list[bytes]:
        return [bytes([record_id % 256]) for record_id in record_ids]

    def decode(self, record: bytes) -> dict[str, Any]:
        if record[0] in self._bad:
            raise ValueError("bad")
        return {"id": np.int32(record[0])}


class Drawing(Raw):
    def decode(self, record: bytes, *, rng: np.random.Generator) -> dict[str, Any]:  # type: ignore[override]
        return {"id": np.int32(record[0]), "drawn": np.float64(rng.random())}


def rngs_of(ids: list[int]) -> list[np.random.Generator]:
    return [np.random.default_rng(number) for number in ids]


def test_each_record_is_decoded_with_its_own_generator() -> None:
    ids = np.array([5, 2, 7])
    batch = SourceReader(Drawing()).read(ids, rngs_of([50, 20, 70]))
    assert batch["id"].tolist() == [5, 2, 7]
    assert batch["drawn"].tolist() == [np.random.default_rng(seed).random() for seed in (50, 20, 70)]
    times: dict[str, float] = {"read_seconds": 1.0}
    assert SourceReader(Raw()).read(ids, times=times)["id"].tolist() == [5, 2, 7]
    assert times["read_seconds"] > 1.0
    assert times["decode_seconds"] > 0.0


def test_bad_records_are_replaced_until_the_data_seems_damaged_as_a_whole() -> None:
    def read(bad: set[int]) -> Any:
        reader = RecordReader(Raw(8, bad), seed=0, retry=Retry(attempts=1), bad_records=SkipBad())
        return reader.read(np.array([5, 2, 7]), np.zeros(3, np.int64))

    found = read({2})
    assert found.tree["id"].tolist()[::2] == [5, 7]
    assert found.tree["id"][1] not in (2,)
    assert [tuple(entry[:2]) for entry in found.bad] == [(2, 0)]
    with pytest.raises(
        SourceError, match=r"^record 5 is bad, and so are 999 candidates .* damaged as a whole"
    ) as raised:
        read(set(range(8)))
    assert raised.value.record_id == 5
