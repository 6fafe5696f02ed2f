"""TFDS and tf.data on 1, 2, 3 and 4 simulated hosts with 12 lanes: the same batches, and resume on each."""

from __future__ import annotations

import functools
import os
import re

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
pytest.importorskip("tensorflow")
pytest.importorskip("tensorflow_datasets")

import tf_pipelines
from source_topologies import SourceTopologies
from tf_pipelines import EXPECTED, NAMES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def topologies(tmp_path_factory: pytest.TempPathFactory) -> SourceTopologies:
    """Plays all sources, and checks that the batches are the same on any number of hosts."""
    folder = str(tmp_path_factory.mktemp("files"))
    tf_pipelines.write_files(folder)
    return SourceTopologies(functools.partial(tf_pipelines.make_feed, folder=folder), NAMES, save_at=2)


def test_no_record_is_lost_or_repeated(topologies: SourceTopologies) -> None:
    for name in NAMES:
        rows = [text for step in topologies.steps[name] for text in step.values() if "mask=True" in text]
        assert sorted(int(re.search(r"id=(\d+);", text)[1]) for text in rows) == sorted(EXPECTED[name]), name  # type: ignore[index]
        assert topologies.positions[name] == len(EXPECTED[name])


def test_each_resumes_on_any_number_of_hosts(topologies: SourceTopologies) -> None:
    topologies.resume()


def test_workers_may_change_on_resume(topologies: SourceTopologies) -> None:
    topologies.resume_with_workers(["tfds array_record few", "interleave"])  # each worker imports TensorFlow for 10 s
