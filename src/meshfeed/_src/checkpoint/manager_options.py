"""The options of Orbax's manager: the user's keywords for them, checked, and which steps of a folder are kept."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from meshfeed._src.base.errors import SettingsError
from meshfeed._src.base.settings import checked, integer, optional
from meshfeed._src.checkpoint.options import naming, short

# Steps are found by their folders, which are named by their number alone.
_NAMES_OF_STEPS = ("step_prefix", "step_format_fixed_length", "step_name_format")
_IN_A_STORE = ("max_to_keep", "keep_period", "save_interval_steps", "save_on_steps")
_USELESS = {
    "best_fn": ": best_fn chooses steps by metrics, which Checkpointer.save does not take. Use preservation_policy.",
    "read_only": ": read_only=True has no use here: a Checkpointer that does not save writes nothing. Leave it out.",
    "single_host_load_and_broadcast": (
        ": with single_host_load_and_broadcast=True, a host that lists the steps again, as after a failed save that only it "
        "has seen, waits for the others. Leave it out."
    ),
}
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


def manager_options(
    given: Mapping[str, Any] | None, *, max_to_keep: int | None, in_store: bool, **settings: Any
) -> ocp.CheckpointManagerOptions:
    """Returns the options for keeping ``max_to_keep`` of the newest steps (None: all), and other settings.

    ``given`` are the user's keywords, which take precedence.

    Raises:
      SettingsError: Orbax does not take a keyword or fails on it only when it saves, no step would be kept or found again,
        or it does not apply to a checkpoint in a store.
    """
    with naming("orbax_options", given):
        for name, value in (given or {}).items():
            _check_keyword(name, value, in_store)
        settings |= {"max_to_keep": max_to_keep, **(given or {})}
        for name in ("max_to_keep", "save_interval_steps", "keep_period"):
            checked(f"orbax_options.{name}", settings.get(name), optional(integer(1)), "a positive int or None")
        return ocp.CheckpointManagerOptions(**_with_policy(settings))


def _check_keyword(name: str, value: Any, in_store: bool) -> None:
    problem = _USELESS.get(name) if value else None
    if name in _NAMES_OF_STEPS and value and not _is_number(value):
        problem = (
            f"={{{name!r}: {short(value)}}}: the folder of a step is its number, without prefix or zeros, or a Checkpointer "
            "would not find it again. Omit it."
        )
    elif in_store and name not in _IN_A_STORE:
        takes = ", ".join(_IN_A_STORE)
        problem = f"={{{name!r}: …}}: does not apply to a checkpoint in a store, which takes {takes}. Omit it."
    if problem is not None:
        raise SettingsError(f"orbax_options{problem}", setting="orbax_options")


def _is_number(name_format: Any) -> bool:
    build_name = getattr(name_format, "build_name", None)
    return callable(build_name) and build_name(7) == "7"


def _with_policy(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings with one policy in place of all that say which steps are kept."""
    count = settings["max_to_keep"]
    if count is None:
        return settings
    if settings.get("preservation_policy") is not None:
        return {**settings, "max_to_keep": None}
    kept: list[policies.PreservationPolicy] = [NewestSteps(count)]
    if (period := settings.get("keep_period")) is not None:
        kept.append(policies.EveryNSteps(period))
    if (interval := settings.get("keep_time_interval")) is not None:
        if not isinstance(interval, datetime.timedelta):
            raise TypeError(f"keep_time_interval={interval!r}; it takes a datetime.timedelta")
        kept.append(policies.EveryNSeconds(interval_secs=int(interval.total_seconds())))
    rest = {name: value for name, value in settings.items() if name not in _REPLACED}
    return {**rest, "max_to_keep": None, "preservation_policy": policies.AnyPreservationPolicy(kept)}
