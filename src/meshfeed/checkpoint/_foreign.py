"""Positions that Grain and MaxText saved, continued by a feed over the same data, where that can be exact.

They write ``process_<i>-of-<n>.json`` (MaxText also ``-of-2.0``, from a scaling factor), one file a host, or
``process_0.json`` from Grain's ElasticIterator. What can be exact:

* **Random access**, the feed over the same ``MapDataset`` or records in the same order (``shuffle=False`` here; a
  shuffle inside the ``MapDataset`` is part of the order): hosts that took every n-th record and stand at the same place
  have consumed the first records of that order. The batch at a step then has the same records, its rows in our order.
* **Host batches**, the feed over the same iterator on the same number of hosts.
* **Lanes**, as many as there were hosts, each the same pipeline as one host had, without its ``batch``.

Everything else is refused: a Grain DataLoader with ``shuffle=True`` (its order lies in its sampler), states with
buffers into a random-access feed, another number of hosts for what is not elastic.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from etils import epath

from meshfeed._errors import CheckpointError
from meshfeed._names import public
from meshfeed._state import encode_value, seal

_NAME = re.compile(r"process_(\d+)(?:-of-(\d+)(?:\.0)?)?\.json")
_ELASTIC = "global_next_index"


def read_foreign_files(directory: Any) -> tuple[dict[int, Any], int | None]:
    """The states that hosts wrote, by host, and the number of hosts (None for an elastic state).

    Args:
      directory: a folder of such files, such as ``<step>/iter``.

    Raises:
      CheckpointError: no such files, files of different host counts, missing hosts, or no JSON.
    """
    directory = epath.Path(directory)
    states: dict[int, Any] = {}
    counts: set[int | None] = set()
    for path in sorted(directory.iterdir(), key=lambda path: path.name) if directory.exists() else []:
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        try:
            states[int(match[1])] = json.loads(path.read_text())
        except ValueError as error:
            raise CheckpointError(f"{path}: not JSON ({error}); it is damaged. Use another step.") from None
        counts.add(int(match[2]) if match[2] else None)
    if not states:
        raise CheckpointError(
            f"{directory}: no process_<i>-of-<n>.json or process_0.json there. Give the folder in which MaxText or "
            "Grain keeps the iterator of one step."
        )
    if len(counts) > 1:
        raise CheckpointError(f"{directory}: files of different numbers of hosts ({sorted(map(str, counts))}).")
    count = counts.pop()
    missing = [] if count is None else sorted(set(range(count)) - set(states))
    if missing:
        raise CheckpointError(f"{directory}: hosts {missing} of {count} are missing. Bring their files together.")
    return states, count


@public("meshfeed.checkpoint")
def convert_state(directory: Any, feed: Any, *, step: int | None = None) -> dict[str, Any]:
    """A state for ``feed`` that continues where the files in ``directory`` say; the feed itself is not changed.

    ::

        feed.set_state(meshfeed.checkpoint.convert_state("run/checkpoints/5000/iter", feed, step=5000))

    Args:
      directory: of ``process_*.json`` files of one step.
      feed: over the same data, at its beginning.
      step: batches that were delivered; needed for lanes and host batches, and checked for random access.

    Returns:
      a state for ``feed.set_state``; on each host the same for random access, that host's own for host batches.

    Raises:
      CheckpointError: it cannot be continued exactly; says why.
    """
    states, count = read_foreign_files(directory)
    template = feed.get_state()
    if template.get("position"):
        raise CheckpointError("the feed has delivered batches; convert with a feed at its beginning.")
    size = _batch_size(feed)
    if template["kind"] == "random_access":
        position = _position(directory, states, count, size, step)
        if position % size:
            raise CheckpointError(f"{directory}: {position} records are no whole batches of {size}.")
        if template["fingerprint"].get("shuffle"):
            raise CheckpointError(
                f"{directory}: the feed shuffles, so its first {position} records are others than those consumed. Pass "
                "shuffle=False, and shuffle inside the MapDataset as before."
            )
        return {**template, "position": position, "segments": [[0, 0, size]] if position else []}
    if step is None:
        raise CheckpointError("step is needed: the files do not say how many batches were delivered.")
    if count is None:
        raise CheckpointError(
            f"{directory}: an elastic state counts records of a MapDataset; pass that MapDataset itself as the source."
        )
    moved = {"position": step * size, "step": step, "segments": [[0, 0, size]] if step else []}
    if template["kind"] == "lanes":
        return {**template, **moved, "lanes": _lanes(directory, template, states, count, step * size)}
    return {**template, **moved, "hosts": _hosts(directory, states, count, step)}


def _batch_size(feed: Any) -> int:
    size = feed.config().get("global_batch_size") if hasattr(feed, "config") else getattr(feed, "batch", None)
    if isinstance(size, list):
        size = size[0][1] if isinstance(size[0], list | tuple) else size[0]
    if not isinstance(size, int):
        raise CheckpointError("the feed's global_batch_size is not known yet; give it as an int.")
    return size


def _position(directory: Any, states: Mapping[int, Any], count: int | None, size: int, step: int | None) -> int:
    if count is None:
        state = states[min(states)]
        if not isinstance(state, dict) or set(state) != {_ELASTIC}:
            raise CheckpointError(
                f"{directory}: process_0.json holds no state of Grain's ElasticIterator: {state!r:.200}"
            )
        position = int(state[_ELASTIC])
    else:
        taken = {host: _records_taken(directory, host, state, count) for host, state in states.items()}
        if len(set(taken.values())) > 1:
            raise CheckpointError(f"{directory}: hosts stand at different places ({taken}); no step ends there.")
        position = count * next(iter(taken.values()))
        whole_batches = position * (size // count)  # where each index stood for a host's batch
        if step is not None and position != step * size and whole_batches == step * size and size % count == 0:
            position = whole_batches
    if step is not None and position != step * size:
        raise CheckpointError(
            f"{directory}: the files say {position} records, {step} batches of {size} are {step * size}. Give the "
            "global_batch_size and step of that run."
        )
    return position


def _records_taken(directory: Any, host: int, state: Any, count: int) -> int:
    """Elements that one host's iterator had given."""
    if isinstance(state, dict) and set(state) == {"next_index"}:
        return int(state["next_index"])
    if isinstance(state, dict) and "last_seen_indices" in state:
        sampler = str(state.get("sampler"))
        if "shuffle=True" in sampler:
            raise CheckpointError(
                f"{directory}: host {host}'s DataLoader shuffled in its sampler ({sampler}); that order is not a "
                "feed's. Continue it as host batches, on the same number of hosts."
            )
        return sum((int(last) - host) // count + 1 for last in state["last_seen_indices"].values() if int(last) >= 0)
    raise CheckpointError(
        f"{directory}: host {host}'s state has more than a position ({_keys(state)}), so its records are not the first "
        "ones of an order. Continue it as a stream with as many lanes as there were hosts, or as host batches."
    )


def _keys(state: Any) -> str:
    return ", ".join(map(str, state)) if isinstance(state, dict) else type(state).__name__


def _lanes(
    directory: Any, template: Mapping[str, Any], states: Mapping[int, Any], count: int, position: int
) -> dict[str, Any]:
    num_lanes = template["num_lanes"]
    if num_lanes != count:
        raise CheckpointError(
            f"{directory}: {count} hosts wrote it, the feed has {num_lanes} lanes. Pass num_lanes={count}, with a "
            "stream whose lane i is what host i read, without its batch."
        )
    records = position // num_lanes
    lanes = {}
    for key in template["lanes"]:
        state = encode_value(states[int(key)])
        entry = {"records": records, "epoch": 0, "taken": records, "state": state, "skip": 0, "ended": False}
        lanes[key] = seal(entry)
    return lanes


def _hosts(directory: Any, states: Mapping[int, Any], count: int, step: int) -> dict[str, Any]:
    from meshfeed._process import process_count, process_index

    if count != process_count():
        raise CheckpointError(
            f"{directory}: {count} hosts wrote it, this job has {process_count()}; host batches are not elastic. "
            "Continue on as many hosts, or pass the records as a source."
        )
    state = encode_value(states[process_index()])
    return {str(process_index()): seal({"iterator": {"batches": step, "state": state}, "epoch": 0})}
