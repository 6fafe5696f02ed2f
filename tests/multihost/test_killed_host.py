"""A host that is killed is named in the logs of the others, long before JAX ends them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import killed_jobs

from meshfeed.testing import HostRunError, start_hosts


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
