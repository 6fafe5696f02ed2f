"""Numbers with units, as people write them: ``100MB``, ``1GiB``, ``500MB/s``."""

from __future__ import annotations

import math
import re

from meshfeed._src.base.errors import SettingsError

_POWERS = {"": 1} | {f"{prefix}": 1000**power for power, prefix in enumerate("kmgtp", 1)}
_POWERS |= {f"{prefix}i": 1024**power for power, prefix in enumerate("kmgtp", 1)}
_SIZE = re.compile(r"([0-9][0-9_,]*\.?[0-9]*(?:[eE][0-9]+)?) *([kmgtpKMGTP]?[iI]?)(B|b|Bytes|bytes|Bit|bit|bits)?")


def parse_bytes(setting: str, value: object) -> int:
    """Returns a number of bytes, at least 1.

    Args:
      setting: name of the setting, for errors.
      value: a number of bytes, or text such as ``"100MB"`` (10**6 bytes each) or ``"1GiB"`` (2**30).

    Raises:
      SettingsError: if it is something else.
    """
    return int(
        _parse(setting, value, "a number of bytes of at least 1, such as 4000000, 100MB or 1GiB", per_second=False)
    )


def parse_rate(setting: str, value: object) -> float:
    """Returns bytes per second, above 0; takes text such as ``"500MB/s"``. Raises as :func:`parse_bytes`."""
    return _parse(setting, value, "bytes per second above 0, such as 500MB/s or 1.25GB/s", per_second=True)


def _parse(setting: str, value: object, wanted: str, *, per_second: bool) -> float:
    refused = SettingsError(f"{setting}={value!r}. Expected {wanted}.", setting=setting)
    if isinstance(value, str):
        text = value.strip()
        if per_second:
            text = re.sub(r" */ *s(ec)?$", "", text)
        found = _SIZE.fullmatch(text)
        if found is None:
            raise refused
        if found[3] and found[3] not in ("B", "bytes", "Bytes"):
            raise SettingsError(
                f"{setting}={value!r} is in bits. Expected {wanted}: divide by 8, as in 125MB for 1Gb.", setting=setting
            )
        if not found[2] and not found[3] and "." in found[1]:
            raise refused
        number = float(found[1].replace("_", "").replace(",", "")) * _POWERS[found[2].lower()]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
    else:
        raise refused
    if not math.isfinite(number) or number <= 0 or (not per_second and number < 1):
        raise refused
    return number
