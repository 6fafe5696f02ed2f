"""A source of each kind on 1, 2, 3 and 4 real hosts with 12 lanes: the same batches, and resume from each on each.

``tests/sources/test_topologies.py`` does the same with every source on simulated hosts.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from real_topologies import RealTopologies
from source_pipelines import write_files

from meshfeed.testing import HostPool

pytest.importorskip("datasets")
NAMES = ("array_record", "packed within limits", "stream", "grain filter", "hf parquet many")
PROCESSES = {4: (0, 1, 2, 3), 3: (0, 1, 2), 2: (0, 1), 1: (3,)}
"""Number of hosts → the processes that play them; one host at the same time as three and two."""


@pytest.fixture(scope="module")
def topologies(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = str(tmp_path_factory.mktemp("files"))
    write_files(folder)
    with HostPool(4, 2, timeout_seconds=300) as pool:
        yield RealTopologies(pool, PROCESSES, "source_pipelines", folder, NAMES, save_at=3)


def test_global_batches_are_the_same_on_any_number_of_hosts(topologies: RealTopologies) -> None:
    topologies.check_batches()


def test_resume_from_any_number_of_hosts_on_any_other(topologies: RealTopologies) -> None:
    topologies.check_resume()


def test_workers_may_change_on_resume(topologies: RealTopologies) -> None:
    topologies.check_resume_with_workers(["array_record", "stream"], [1], [None])
