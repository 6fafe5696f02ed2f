"""A host that is killed is named in the logs of the others, long before JAX ends them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import killed_jobs

from meshfeed.testing import HostRunError, run_hosts, start_hosts


def test_the_others_name_it() -> None:
    options = {"num_hosts": 3, "devices_per_host": 1, "timeout_seconds": 180}
    with (  # both jobs at once, since their hosts mostly wait
        start_hosts(killed_jobs.run, "between", **options) as between,
        start_hosts(killed_jobs.run, "within", **options) as within,
    ):
        for job in (between, within):
            with pytest.raises(HostRunError) as caught:
                job.wait()
            results = caught.value.results
            assert results[killed_jobs.VICTIM].returncode == -9
            for host, result in enumerate(results):
                if host != killed_jobs.VICTIM:
                    print(result.value, result.error)
                    assert result.value["early"] == []
                    assert result.value["line"].startswith(f"host {killed_jobs.VICTIM}: no sign of life for ")
                    assert "JAX will abort this process when its heartbeat times out" in result.value["line"]


def test_the_others_hear_of_one_that_was_interrupted_while_they_wait_for_its_rows() -> None:
    results = run_hosts(killed_jobs.interrupted, num_hosts=3, devices_per_host=1, timeout_seconds=120, grace_seconds=90)
    for host, result in enumerate(results):
        if host == killed_jobs.VICTIM:
            assert result.value == {"errors": ["KeyboardInterrupt"], "told": []}
            continue
        ((seconds, line),) = result.value["told"]
        print(host, seconds, result.value["errors"])
        assert seconds < 20, "long before the user would look for the reason"
        assert line.startswith(
            f"host {killed_jobs.VICTIM}: feed-0: step 3 was interrupted by KeyboardInterrupt while its rows"
        )
