"""Files that the formats' own libraries wrote, and what these libraries read from them (``tests/data/formats``)."""

from __future__ import annotations

import base64
import json
import pathlib
from typing import Any

import numpy as np

FOLDER = pathlib.Path(__file__).parent.parent / "data" / "formats"


def read_by_library(name: str) -> list[dict[str, Any]]:
    return json.loads((FOLDER / name).read_text())


def plain(value: Any) -> Any:
    """A value as the JSON of ``write.py``, which keeps types."""
    if isinstance(value, np.ndarray | np.generic):
        data = base64.b64encode(value.tobytes()).decode()
        return [type(value).__name__, value.dtype.name, list(value.shape), data]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, list):
        return ["list", [plain(item) for item in value]]
    if isinstance(value, dict):
        return ["dict", {key: plain(item) for key, item in value.items()}]
    return [type(value).__name__, str(value) if type(value).__name__ == "Decimal" else repr(value)]


def plain_record(record: dict[str, Any]) -> dict[str, Any]:
    return {key: plain(value) for key, value in record.items()}
