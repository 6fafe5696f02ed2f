"""Eight CPU devices in this process, set before anything imports JAX."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8").strip()

import hypothesis

# No example may fail for being slow: speed is measured in benchmarks/, and CI machines are noisy.
hypothesis.settings.register_profile(
    "meshfeed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)
hypothesis.settings.load_profile("meshfeed")
