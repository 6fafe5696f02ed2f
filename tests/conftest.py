"""Eight CPU devices in this process, set before anything imports JAX."""

from __future__ import annotations

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8").strip()

import hypothesis
import pytest

# No example may fail for being slow: speed is measured in benchmarks/, and CI machines are noisy.
hypothesis.settings.register_profile(
    "meshfeed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)
hypothesis.settings.load_profile("meshfeed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever lies in tests/multihost/ starts processes, whether it says so or not."""
    folder = pathlib.Path(__file__).parent / "multihost"
    for item in items:
        if item.path.is_relative_to(folder):
            item.add_marker(pytest.mark.multihost)
