"""Checks of ids, counts and packages that sources share."""

import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from meshfeed._src.base.errors import SettingsError, SourceError
from meshfeed._src.sources.checks import as_run, check_ids, checked_count, checked_id, is_count
from meshfeed.sources import TFDS, HuggingFace, Parquet, ShuffleBuffer, Stream, TFData


@pytest.mark.parametrize("ids", [[0, 3], np.array([3, 0, 0]), []])
def test_ids_in_range(ids):
    check_ids(ids, 4)
    assert [checked_id(record_id, 4) for record_id in ids] == list(ids)


@pytest.mark.parametrize(("ids", "named"), [([1, 4], 4), (np.array([4, -1]), -1), ([9, 5], 9)])
def test_an_id_out_of_range_is_named(ids, named):
    text = rf"^record id {named} is out of range: the split has 4 records$"
    with pytest.raises(IndexError, match=text):
        check_ids(ids, 4, "split")
    with pytest.raises(IndexError, match=text):
        checked_id(np.int64(named), 4, "split")


@pytest.mark.parametrize(
    ("ids", "run"), [([5], (5, 6)), ([2, 3, 4], (2, 5)), ([2, 4, 4], None), ([3, 2], None), ([], None)]
)
def test_runs_of_ids(ids, run):
    assert as_run(np.array(ids, np.int64)) == (None if run is None else slice(*run))


def test_counts():
    assert [is_count(value) for value in (1, np.int32(7), 0, True, np.True_, 2.0, "3", None)] == [True] * 2 + [
        False
    ] * 6
    assert is_count(-2, -2)
    assert not is_count(-3, -2)
    assert checked_count(np.int64(3), "length") == 3
    with pytest.raises(SettingsError, match=r"^length=0; it takes an int of at least 1\.$"):
        checked_count(0, "length")


def test_numpy_counts_become_ints_in_a_fingerprint():
    source = ShuffleBuffer(Stream(lambda lane_index, num_lanes: iter(range(9))), np.int64(4))
    assert type(source.fingerprint()["size"]) is int


@pytest.mark.parametrize(
    ("package", "extra", "use"),
    [
        ("datasets", "hf", lambda: HuggingFace([])),
        ("pyarrow", "hf", lambda: Parquet(__file__)),
        ("tensorflow", "tf", lambda: TFData(lambda lane_index, num_lanes: ()).open(0, 1)),
        ("tensorflow_datasets", "tfds", lambda: TFDS("mnist", "train")),
    ],
)
def test_a_missing_package_is_named_with_the_extra_that_installs_it(monkeypatch, package, extra, use):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SourceError, match=rf"needs {package}(\.\w+)?, .*pip install '\.\[{extra}\]'"):
        use()
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]
    names = [line.replace("_", "-") for line in project["optional-dependencies"][extra]]
    assert any(name.startswith(package.replace("_", "-")) for name in names)
