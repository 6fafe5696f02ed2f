"""An error that one host reports is raised on the others with its class, its host, and what it says."""

from __future__ import annotations

import json

import pytest

from meshfeed import CheckpointError, SettingsError
from meshfeed._src.base.errors import Failure, MeshfeedError
from meshfeed._src.checkpoint.agreement import error_of, report_of
from meshfeed._src.checkpoint.stored import DamagedCheckpointError, MissingArrayError, StoredShapeError


@pytest.mark.parametrize(
    ("error", "kind", "raised", "text"),
    [
        (DamagedCheckpointError("d", step=3), "damaged", DamagedCheckpointError, "d"),
        (MissingArrayError("m", step=4), "missing", MissingArrayError, "m"),
        (StoredShapeError("s"), "shape", StoredShapeError, "s"),
        (CheckpointError("c", step=5), "unreadable", CheckpointError, "c"),
        (MeshfeedError("f"), "unreadable", CheckpointError, "f"),
        (OSError(5, "gone"), "unreadable", CheckpointError, "OSError: [Errno 5] gone"),
        (SettingsError("w", setting="lenient"), "setting", SettingsError, "w"),
        (SettingsError("w"), "unreadable", CheckpointError, "w"),
    ],
)
def test_each_kind_keeps_its_class(error: Exception, kind: str, raised: type, text: str) -> None:
    report = json.loads(json.dumps(report_of(error)))
    assert Failure.from_json(report).kind == kind
    again = error_of(report)
    assert type(again) is raised
    assert str(again) == f"host 0: {text}"
    assert str(error_of(report, "saving step 3")) == f"saving step 3: {text}"
    if isinstance(again, SettingsError):
        assert again.setting == "lenient"
    else:
        assert getattr(again, "step", None) == getattr(error, "step", None)
