"""Single columns on their way into records, and where a conversion goes."""

from __future__ import annotations

import pyarrow as pa
import pytest

from meshfeed import SettingsError, SourceError
from meshfeed._src.convert.destination import Bucket, Disk, destination_of
from meshfeed._src.convert.example import _flatten
from meshfeed._src.convert.inputs import to_bytes
from meshfeed._src.convert.values import measure


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
def test_texts_and_bytes_of_any_part_of_a_column(kind: pa.DataType) -> None:
    array = pa.array(["", "é", None, "abc", None, "x" * 300], kind)
    whole = [b"", "é".encode(), b"", b"abc", b"", b"x" * 300]
    assert to_bytes(array) == whole
    for start in range(6):
        for stop in range(start, 7):
            assert to_bytes(array.slice(start, stop - start)) == whole[start:stop]
    assert to_bytes(pa.array([None, None], kind)) == [b"", b""]
    assert to_bytes(pa.nulls(2, kind)) == [b"", b""]
    assert to_bytes(pa.array([], kind)) == []


def test_a_nested_column_of_a_type_that_fits_nowhere_is_named() -> None:
    intervals = pa.array([[[(1, 2, 3)]]], pa.list_(pa.list_(pa.month_day_nano_interval())))
    with pytest.raises(SourceError, match=r"column 'when' has the type .*interval"):
        list(_flatten("when", intervals, 0))


def test_a_folder_may_have_any_name() -> None:
    for text in ("/tmp/a::b", "file:///tmp/a::b", "file:/tmp/a::b"):
        found = destination_of(text)
        assert isinstance(found, Disk), text
        assert found.name == "/tmp/a::b"
    assert isinstance(destination_of("memory://bucket/out"), Bucket)
    with pytest.raises(SettingsError):
        destination_of("simplecache::memory://bucket/out")
    with pytest.raises(SettingsError, match="is a URL"):
        destination_of("s3:/bucket/out")  # as pathlib writes it: would be a folder named s3:


@pytest.mark.parametrize(
    ("shapes", "same"),
    [([[2, 3]] * 3, [2, 3]), ([[2, 3], [2, 4], [2, 3]], None), ([[2, 3], [6]], None), ([[], []], None)],
)
def test_a_few_integers_that_are_the_same_in_all_records(shapes: list[list[int]], same: list[int] | None) -> None:
    assert measure([("x/shape", pa.array(shapes, pa.list_(pa.int64())))])["x/shape"]["same"] == same
