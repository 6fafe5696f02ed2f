"""The digest of all records in the identity of a source, which states saved by earlier versions lack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from meshfeed._src.base.types import JsonValue

ALL_RECORDS = "all_records"
"""Field of an identity: a digest of all records. It comes beside the digest of four, which older states have alone."""


def without_all_records(identity: Mapping[str, JsonValue]) -> tuple[dict[str, JsonValue], list[JsonValue]]:
    """Returns an identity without the digests of all records, at any depth, and these digests in order."""
    bare: dict[str, JsonValue] = {}
    found: list[JsonValue] = []
    for name, value in identity.items():
        if name == ALL_RECORDS:
            found.append(value)
        elif isinstance(value, dict):
            bare[name], more = without_all_records(cast("dict[str, JsonValue]", value))
            found += more
        else:
            bare[name] = value
    return bare, found


def as_saved(current: JsonValue, saved: JsonValue) -> JsonValue:
    """Returns an identity without the digests of all records that the saved one lacks, at any depth."""
    if not isinstance(current, dict) or not isinstance(saved, dict):
        return current
    here, then = cast("dict[str, JsonValue]", current), cast("dict[str, JsonValue]", saved)
    return {
        name: as_saved(value, then.get(name)) for name, value in here.items() if name != ALL_RECORDS or name in then
    }
