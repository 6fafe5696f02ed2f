"""Which steps of a checkpoint folder are kept."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from orbax.checkpoint import checkpoint_managers as policies

from meshfeed._src.base.errors import SettingsError
from meshfeed._src.base.settings import checked, integer, optional

_REPLACED = ("keep_period", "keep_time_interval")


class NewestSteps:
    """Keeps the steps with the highest numbers, and the step just saved even if it is older than those.

    Orbax's own policy keeps the steps that were saved last, so saving an older step would remove a newer one.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def should_preserve(
        self, checkpoints: Sequence[policies.PolicyCheckpointInfo], *, context: policies.PreservationContext
    ) -> Sequence[bool]:
        """Returns whether to keep each step; Orbax appends the step just saved to the others."""
        newest = sorted(info.step for info in checkpoints)[-self._count :]
        return [info.step in newest or info is checkpoints[-1] for info in checkpoints]


def check_manager_options(orbax: Mapping[str, Any]) -> None:
    """Rejects keywords for Orbax's options that would keep no step, or on which Orbax fails only when it saves."""
    for name in ("max_to_keep", "save_interval_steps", "keep_period"):
        checked(f"orbax_options.{name}", orbax.get(name), optional(integer(1)), "a positive int or None")
    if orbax.get("best_fn") is not None:
        raise SettingsError(
            "orbax_options: best_fn chooses steps by metrics, which Checkpointer.save does not take. Use "
            "preservation_policy.",
            setting="orbax_options",
        )
    if orbax.get("read_only"):
        raise SettingsError(
            "orbax_options: read_only=True has no use here: a Checkpointer that does not save writes nothing. Leave it out.",
            setting="orbax_options",
        )


def retention_options(max_to_keep: int | None, orbax: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keywords of Orbax's options for keeping ``max_to_keep`` of the newest steps; None keeps all.

    ``orbax`` are the user's keywords for Orbax's options, which take precedence.
    """
    orbax = {"max_to_keep": max_to_keep, **orbax}
    count = orbax["max_to_keep"]
    if count is None:
        return orbax
    if orbax.get("preservation_policy") is not None:
        return {**orbax, "max_to_keep": None}
    kept: list[policies.PreservationPolicy] = [NewestSteps(count)]
    if (period := orbax.get("keep_period")) is not None:
        kept.append(policies.EveryNSteps(period))
    if (interval := orbax.get("keep_time_interval")) is not None:
        if not isinstance(interval, datetime.timedelta):
            raise TypeError(f"keep_time_interval={interval!r}; it takes a datetime.timedelta")
        kept.append(policies.EveryNSeconds(interval_secs=int(interval.total_seconds())))
    rest = {name: value for name, value in orbax.items() if name not in _REPLACED}
    return {**rest, "max_to_keep": None, "preservation_policy": policies.AnyPreservationPolicy(kept)}
