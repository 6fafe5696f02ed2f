"""Sources as lists of records, over which other sources are built: which sources are lists, and what groups lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from meshfeed._src.base import hooks
from meshfeed._src.base.errors import SourceError
from meshfeed._src.sources.recognize import as_source


def plain_records(source: object, name: str) -> Any:
    """Returns the source over which the view ``name`` is made, from what the user passed: a list of records.

    Raises:
      SourceError: it is read in order, or its records are grouped in batches of one shape each.
      SettingsError: it is a mixture whose weights change at steps.
    """
    records = as_source(source)
    if not hasattr(records, "__getitem__"):
        raise SourceError(
            f"{name} got a {type(records).__name__}, which is read in order. Expected random-access records. Select the "
            "records of a stream in the function that opens it."
        )
    return listed(records, name)


def listed(records: Any, name: str) -> Any:
    """Returns random-access records as a list with the ids 0 to n − 1, for the source ``name`` built over it.

    Raises:
      SourceError: the records have no common shape.
      SettingsError: it is a mixture whose weights change at steps.
    """
    if hooks.find(records, hooks.NumbersRecords) is None:
        return records
    lists = hooks.find(records, hooks.ListsRecords)
    if lists is not None:
        return lists.as_list()
    kind = getattr(records, "kind", type(records).__name__)
    raise SourceError(
        f"{name} got a source of kind {kind!r}, whose records differ in shape from batch to batch. Expected records of one "
        f"shape, or of unequal length before they are grouped. Apply {name} to the records below it, or pad them with Padded."
    )


def select(source: object, name: str, view: Callable[[Any], Any]) -> Any:
    """Returns ``view(records)`` of the records that the user passed to the view ``name``; groups them afterwards."""
    records = as_source(source)
    groups = hooks.find(records, hooks.GroupsRecords)
    return view(plain_records(records, name)) if groups is None else groups.regrouped(view(groups.ungrouped()))


def select_all(sources: Mapping[str, Any], name: str, view: Callable[[dict[str, Any]], Any]) -> Any:
    """Returns ``view(sources)``; if their records are grouped, groups the result instead.

    Raises:
      SourceError: some sources group their records and others do not, or not in the same way.
    """
    groups = {key: hooks.find(source, hooks.GroupsRecords) for key, source in sources.items()}
    first = next((group for group in groups.values() if group is not None), None)
    if first is None:
        return view(dict(sources))
    for key, group in groups.items():
        if group is None or group.grouping != first.grouping:
            raise SourceError(
                f"{name} got {key!r} and others whose records are not grouped alike. A batch of Buckets has one shape, so "
                f"all sources must have the same boundaries and settings. Apply Buckets to the {name} of plain records."
            )
    return first.regrouped(view({key: group.ungrouped() for key, group in groups.items() if group is not None}))
