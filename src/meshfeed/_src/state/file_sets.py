"""Describes missing files of a source, for errors about a state whose source had a different set of files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_SHARD = re.compile(r"(?P<before>.*?)(?P<number>\d+)-of-(?P<total>\d+)(?P<after>.*)")


def about_files(saved: Mapping[str, Any], current: Mapping[str, Any], names: Sequence[str]) -> str:
    """Describes a change in the number of files, and missing files, as sentences with a trailing space.

    Args:
      saved: flat fingerprint of the saved source.
      current: flat fingerprint of the current source.
      names: files of the current source.

    Returns:
      The sentences, or ``""`` if the number of files is unchanged or unknown.
    """
    counts = [
        f"The saved source had {saved[name]} files, the current one has {count}. "
        for name, count in current.items()
        if name.endswith(".count") and name in saved and saved[name] != count
    ]
    missing = missing_shards(names) if counts else []
    listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    return "".join(counts[:1]) + (f"Missing: {listed}. " if missing else "")


def missing_shards(names: Iterable[str]) -> list[str]:
    """Files missing from numbered sets: ``a-00001-of-00002`` if ``names`` contains only ``a-00000-of-00002``."""
    sets: dict[tuple[str, str, str], set[str]] = {}
    for name in names:
        found = _SHARD.fullmatch(os.path.basename(name))
        if found:
            sets.setdefault((found["before"], found["total"], found["after"]), set()).add(found["number"])
    missing = []
    for (before, total, after), numbers in sets.items():
        # Sets are numbered from 0 or from 1; a file with the number ``total`` implies 1.
        width, first = len(next(iter(numbers))), int(str(int(total)).zfill(len(total)) in numbers)
        wanted = [str(number).zfill(width) for number in range(first, int(total) + first)]
        missing += [f"{before}{number}-of-{total}{after}" for number in wanted if number not in numbers]
    return missing
