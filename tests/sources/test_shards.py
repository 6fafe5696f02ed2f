"""Batches are divided into parts of few files each, which together have every record once."""

from __future__ import annotations

import numpy as np
import pytest

from meshfeed._src.sources.files import shards
from meshfeed._src.sources.files.shard import Shard
from meshfeed._src.sources.files.shards import Shards


@pytest.mark.parametrize("few_files", [0, 1024], ids=["many files", "few files"])
@pytest.mark.parametrize("count", [1, 2, 40, 90])
def test_parts_have_every_record_once(count: int, few_files: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_FEW_FILES", few_files)
    monkeypatch.setattr(shards, "files_per_call", lambda: 32)
    rng = np.random.default_rng(count)
    files = [
        Shard(str(number), 1, "", int(size)) for number, size in enumerate(rng.integers(0, 9, count) + (count == 1))
    ]
    source = Shards(files, "Files")
    everything = [(number, row) for number, file in enumerate(files) for row in range(file.num_records)]
    for num_ids in (1, 7, 200):
        ids = rng.integers(0, len(source), num_ids)
        found: dict[int, tuple[int, int]] = {}
        for numbers, index, rows, slots in source.parts(ids):
            assert numbers == sorted(set(numbers))
            assert len(numbers) <= 32
            assert (index is None) == (len(numbers) == 1 and slots is None)
            of_rows = np.zeros(len(rows), int) if index is None else index
            assert set(of_rows.tolist()) == set(range(len(numbers))), "no file is opened in vain"
            for slot, file, row in zip(np.arange(num_ids) if slots is None else slots, of_rows, rows, strict=True):
                assert slot not in found
                found[int(slot)] = numbers[file], int(row)
        assert [found[slot] for slot in range(num_ids)] == [everything[one] for one in ids.tolist()]
    assert list(source.parts(np.empty(0, np.int64))) == []
