"""Fields of the identity of a source that states saved by earlier versions lack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from meshfeed._src.base.types import JsonValue

ALL_RECORDS = "all_records"
"""Field of an identity: a digest of all records. It comes beside the digest of four, which older states have alone."""
FOUR_RECORDS = "four_records"
"""Field of an identity: a digest of four records, of a source whose older states have none."""
JOINED = "joined"
"""Field of the identity of a stream: those of the records that ``Join`` adds, and of their keys."""
_LATER = (ALL_RECORDS, FOUR_RECORDS, JOINED)


def without_later(identity: Mapping[str, JsonValue]) -> tuple[dict[str, JsonValue], list[JsonValue]]:
    """Returns an identity without the fields that older states lack, at any depth, and the values of these in order."""
    bare: dict[str, JsonValue] = {}
    found: list[JsonValue] = []
    for name, value in identity.items():
        if name in _LATER:
            found.append(value)
        elif isinstance(value, dict):
            bare[name], more = without_later(cast("dict[str, JsonValue]", value))
            found += more
        else:
            bare[name] = value
    return bare, found


def as_saved(current: JsonValue, saved: JsonValue) -> JsonValue:
    """Returns an identity without the fields that older states lack, if the saved one lacks them, at any depth."""
    if not isinstance(current, dict) or not isinstance(saved, dict):
        return current
    here, then = cast("dict[str, JsonValue]", current), cast("dict[str, JsonValue]", saved)
    return {name: as_saved(value, then.get(name)) for name, value in here.items() if name not in _LATER or name in then}
