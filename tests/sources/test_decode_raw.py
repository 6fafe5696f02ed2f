"""Fixed-size records as one array."""

from __future__ import annotations

import pathlib
import pickle

import ml_dtypes
import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

import meshfeed
from meshfeed.sources import ArrayRecord, DecodeRaw


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.float64, ml_dtypes.bfloat16, bool])
@pytest.mark.parametrize("shape", [(), 3, (2, 5)])
def test_rows_are_the_bytes_of_the_records(dtype: type, shape: int | tuple[int, ...]) -> None:
    decode = pickle.loads(pickle.dumps(DecodeRaw(dtype, shape)))
    wanted = np.random.default_rng(0).integers(0, 2, (7, *np.empty(shape, bool).shape)).astype(dtype)
    rows = decode([row.tobytes() for row in wanted])
    assert rows.dtype == wanted.dtype
    assert rows.tobytes() == wanted.tobytes()
    assert rows.shape == wanted.shape
    assert rows.ctypes.data % 64 == 0
    assert rows.flags.writeable
    assert decode([]).shape == (0, *wanted.shape[1:])


def test_a_record_of_another_size_is_a_bad_record(tmp_path: pathlib.Path) -> None:
    writer = ArrayRecordWriter(str(tmp_path / "records"), "group_size:1")
    for number in range(40):
        writer.write(np.full(2 if number == 17 else 4, number, np.int32).tobytes())
    writer.close()
    source = ArrayRecord(str(tmp_path / "records"), decode_batch=DecodeRaw(np.int32, (4,), key="x"))
    with pytest.raises(ValueError, match=r"record 1 of 2 has 8 bytes; int32\[4\] takes 16\. Give DecodeRaw"):
        DecodeRaw(np.int32, (4,))([bytes(16), bytes(8)])
    skip = meshfeed.SkipBad(max_fraction=0.5)
    with meshfeed.MultiHostDataLoadIterator(source, _mesh(), global_batch_size=8, bad_records=skip) as feed:
        rows = np.concatenate([np.asarray(batch["x"]) for batch in feed])
    assert rows.shape == (40, 4)
    assert 17 not in rows
    assert set(range(40)) - {17} <= set(rows[:, 0].tolist())


def test_numbers_of_several_parts_are_dimensions() -> None:
    decode = DecodeRaw(np.dtype((np.int32, (2,))), 3)
    rows = np.arange(24, dtype=np.int32)
    found = decode([rows[:6].tobytes(), rows[6:12].tobytes()])
    assert (found == rows[:12].reshape(2, 3, 2)).all()
    assert (decode.from_rows(rows[:12].view(np.uint8).reshape(2, 24)) == found).all()


def test_records_of_no_size_are_refused() -> None:
    for dtype, shape in ((np.int32, (0,)), (object, (2,))):
        with pytest.raises(meshfeed.SettingsError, match="at least one number of a fixed size"):
            DecodeRaw(dtype, shape)
    for dtype, shape in (("int23", 4), (np.int32, 4.0), (np.int32, "4")):
        with pytest.raises(meshfeed.SettingsError, match="It takes a dtype, and a shape as an int or a tuple of ints"):
            DecodeRaw(dtype, shape)  # type: ignore[arg-type]
    assert repr(DecodeRaw(np.int32, 4, key="x")) == "DecodeRaw('int32', (4,), key='x')"


def _mesh() -> object:
    import jax

    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
