"""The order of the tokens of a sequence that is divided among devices."""

from __future__ import annotations

import numpy as np

from meshfeed._src.base.errors import SettingsError, hides_own_frames
from meshfeed._src.base.types import RecordIds, public
from meshfeed._src.sources.checks import check_choice, checked_count


@public("meshfeed.sources")
@hides_own_frames
def sequence_order(kind: str, length: int, n: int) -> RecordIds:
    """Returns the order of the tokens of a sequence that n shards of the sequence axis divide into equal parts.

    With causal attention, the last tokens of a document attend to the most, so shards of consecutive tokens have unequal
    work. ``Packed(sequence_order=(kind, n))`` puts every leaf of one value per token into this order; the positions say
    where a token was.

    Args:
      kind: ``"zigzag"`` cuts the sequence into 2n equal chunks, and shard i holds chunks i and 2n − 1 − i.
        ``"striped"`` gives tokens i, i + n, i + 2n, … to shard i; every shard then has about equal work, however documents
        are packed.
      length: tokens of the sequence; a multiple of 2n for ``"zigzag"``, of n for ``"striped"``.
      n: shards of the sequence axis.

    Returns:
      int64[length]: entry j is the token at place j, ``out[j] = in[order[j]]``. ``numpy.argsort(order)`` undoes it.

    Raises:
      SettingsError: an argument is out of range, or the shards do not divide the length; names the argument.
    """
    check_choice(kind, "kind", "zigzag", "striped")
    checked_count(length, "length")
    checked_count(n, "n")
    parts = 2 * n if kind == "zigzag" else n
    if length % parts:
        raise SettingsError(
            f"length={length!r} is not a multiple of {parts}, the number of {'chunks' if kind == 'zigzag' else 'shards'} of "
            f"the order ({kind!r}, {n}). Choose a length or a number of shards that divides evenly.",
            setting="length",
        )
    if kind == "striped":
        return np.arange(length).reshape(-1, n).T.reshape(-1)
    chunks = np.arange(length).reshape(parts, -1)
    return np.stack([chunks[:n], chunks[: n - 1 : -1]], 1).reshape(-1)
