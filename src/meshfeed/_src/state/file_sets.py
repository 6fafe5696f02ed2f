"""Which files of a source are missing, in words: for the error of a state whose source had more of them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_SHARD = re.compile(r"(?P<before>.*?)(?P<number>\d+)-of-(?P<total>\d+)(?P<after>.*)")


def about_files(saved: Mapping[str, Any], current: Mapping[str, Any], names: Sequence[str]) -> str:
    """What is known of files that the saved source had and this one lacks, as sentences with a space behind them.

    Args:
      saved: flat fingerprint of the saved source.
      current: of the current one.
      names: its files.
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
    """Files that a numbered set lacks: ``a-00001-of-00002`` if only ``a-00000-of-00002`` is in ``names``."""
    sets: dict[tuple[str, str, str], set[str]] = {}
    for name in names:
        found = _SHARD.fullmatch(os.path.basename(name))
        if found:
            sets.setdefault((found["before"], found["total"], found["after"]), set()).add(found["number"])
    missing = []
    for (before, total, after), numbers in sets.items():
        width, first = len(next(iter(numbers))), int(str(int(total)).zfill(len(total)) in numbers)
        wanted = [str(number).zfill(width) for number in range(first, int(total) + first)]
        missing += [f"{before}{number}-of-{total}{after}" for number in wanted if number not in numbers]
    return missing
