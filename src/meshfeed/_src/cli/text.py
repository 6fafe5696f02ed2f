"""Numbers with their units, as the commands print them."""

from __future__ import annotations


def size_text(num_bytes: float) -> str:
    """Returns a number of bytes with four digits and a unit: ``"1.482 KB"``."""
    for unit in ("B", "KB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, in the plural unless it is 1: ``"2 files"``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
