"""Checkpoints in object stores: gs:// against an emulator, and why s3:// is refused."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
from orbax.checkpoint._src.serialization import tensorstore_utils

from meshfeed._src.base.errors import SettingsError
from meshfeed.checkpoint import Checkpointer

# No search for credentials, which takes seconds each time; etils through gcsfs, as TensorFlow knows no emulator.
WITHOUT_CREDENTIALS = {
    "EPATH_USE_TF": "false",
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
    "GOOGLE_CLOUD_PROJECT": "test",
    "NO_GCE_CHECK": "true",
}


@pytest.mark.slow
def test_google_cloud_storage():
    for library in ("gcp_storage_emulator", "gcsfs"):
        pytest.importorskip(library)
    here = pathlib.Path(__file__).parent
    path = os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])
    child = subprocess.run(
        [sys.executable, str(here / "gs_child.py")],
        env={**os.environ, **WITHOUT_CREDENTIALS, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    assert json.loads(child.stdout.splitlines()[-1]) == [True, True]


def test_s3_is_refused_for_as_long_as_orbax_takes_it_for_a_relative_path():
    with pytest.raises(ValueError, match="should be absolute"):
        tensorstore_utils.build_kvstore_tspec("s3://bucket/run", use_ocdbt=True)
    with pytest.raises(SettingsError, match=r"treats s3:// as a relative path"):
        Checkpointer("s3://bucket/run")
