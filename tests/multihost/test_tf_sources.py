"""TFDS and tf.data on 1 and 2 real hosts with 12 lanes: the same batches, and resume from each on each.

TensorFlow takes 10 s of a core to import, so ``tests/sources/test_tf_topologies.py`` does the same with every pipeline on
more hosts, which are simulated in one process.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
pytest.importorskip("tensorflow")
pytest.importorskip("tensorflow_datasets")
sys.path.insert(0, str(Path(__file__).parent))

import tf_pipelines
from real_topologies import RealTopologies

from meshfeed.testing import HostPool

NAMES = ("tfds array_record few", "interleave")
PROCESSES = {2: (0, 1), 1: (1,)}
"""Number of hosts → the processes that play them."""


@pytest.fixture(scope="module")
def topologies(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = str(tmp_path_factory.mktemp("files"))
    tf_pipelines.write_files(folder)
    with HostPool(2, 2, timeout_seconds=300) as pool:
        yield RealTopologies(pool, PROCESSES, "tf_pipelines", folder, NAMES, save_at=2)


def test_global_batches_are_the_same_on_any_number_of_hosts(topologies: RealTopologies) -> None:
    topologies.check_batches()


def test_resume_from_any_number_of_hosts_on_any_other(topologies: RealTopologies) -> None:
    topologies.check_resume()
