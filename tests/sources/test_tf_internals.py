"""What happens when a version of TensorFlow has renamed what is private."""

from __future__ import annotations

import os

import pytest
from hidden_names import hide

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow")

from meshfeed._src.base.errors import SourceError  # noqa: E402  # after the check that TensorFlow is installed
from meshfeed._src.sources import tf_internals as internals  # noqa: E402
from meshfeed.sources import TFData  # noqa: E402


@pytest.fixture(autouse=True)
def unprobed():
    internals.probe.cache_clear()
    yield
    internals.probe.cache_clear()


def open_lane(lane_index, num_lanes):
    return tf.data.Dataset.range(8).shard(num_lanes, lane_index).shuffle(4).batch(1)


def test_the_names_are_there():
    assert internals.probe() is type(tf.data.Dataset.range(2).shuffle(2))
    with pytest.raises(SourceError, match=r"shuffle\(\) without a seed"):
        TFData(open_lane).open(0, 1)


@pytest.mark.parametrize(
    "name",
    [
        *("_inputs", "_functions", "_seed", "_seed2", "_num_parallel_calls"),
        *("_reshuffle_each_iteration", "_rerandomize", "_as_serialized_graph"),
    ],
)
def test_without_a_name_no_pipeline_is_taken(name, monkeypatch):
    hide(monkeypatch, tf.data.Dataset, name)
    with pytest.raises(SourceError, match=r"TensorFlow \d.* does not expose .*install TensorFlow 2\.20, .*Stream\("):
        TFData(lambda i, n: tf.data.Dataset.range(8)).open(0, 1)


def test_a_method_that_lists_no_steps_is_noticed(monkeypatch):
    shuffled = type(tf.data.Dataset.range(2).shuffle(2))
    (owner,) = [kind for kind in shuffled.__mro__ if "_inputs" in vars(kind)][:1]
    monkeypatch.setattr(owner, "_inputs", lambda self: [])
    with pytest.raises(SourceError, match="the steps of a pipeline as expected"):
        TFData(open_lane).open(0, 1)


def test_a_name_that_only_some_step_lacks_is_noticed(monkeypatch):
    internals.probe()
    hide(monkeypatch, type(tf.data.Dataset.range(2).batch(1)), "_inputs")
    with pytest.raises(SourceError, match=r"_BatchDataset\._inputs"):
        TFData(open_lane).open(0, 1)
