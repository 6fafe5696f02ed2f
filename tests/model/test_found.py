"""Configurations that found a fault of the library, each in its smallest form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import campaign
import pytest
import simulated_hosts
from configurations import DEFAULTS

REMOTE = {"source": "records_batch", "hosts": 2, "feed": "remote"}
FOUND: dict[str, dict[str, Any]] = {
    "a remote reshard leaves hosts out of load": {
        **REMOTE,
        "hosts": 3,
        "resume_hosts": 2,
        "load": "last two",
        "reshard": "there",
    },
    "a remote feed says why it closes": {**REMOTE, "fault": "dies", "num_epochs": None, "start": True},
    "a remote feed says that it cannot be made": {**REMOTE, "fault": "unopened"},
    "an iterator without a batch ends after element_spec": {
        "source": "host_batches_once",
        "feed": "remote",
        "records": 1,
        "hosts": 4,
        "devices": 2,
        "layout": "data",
        "batch": "double",
        "taken": 1,
    },
    "a follower learns of a reshard before the first batch": {
        "source": "stream_decode",
        "num_epochs": None,
        "hosts": 2,
        "outside": 1,
        "records": 40,
        "reshard": "killed",
        "midway": "first",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND)
def test_a_fault_stays_mended(name: str, tmp_path: Path) -> None:
    with simulated_hosts.simulation():
        assert campaign.failure({**DEFAULTS, **FOUND[name]}, str(tmp_path)) is None
