"""Converts positions saved by Grain and MaxText to the state of a feed over the same data, if that can be exact.

Grain and MaxText write one ``process_<i>-of-<n>.json`` per host (MaxText also ``-of-2.0``, from a scaling factor), or a
single ``process_0.json`` from Grain's ElasticIterator. Three kinds of feed can resume from them:

* **Random access**: a feed over the ``MapDataset`` without its batching and its per-host slice. If every host reads
  every n-th record and all have read equally many, they have consumed the first records of the dataset's order. Each
  batch then has the same records as before, with its rows in our order.
* **Lanes**, one per old host, each the same pipeline as that host had, without its ``batch`` and ``mp_prefetch``.
* **Host batches**: the same iterators on the same number of hosts.

The files hold an index, but neither its unit nor the order of the records. The caller supplies both: the number of
batches delivered, and a feed over records in the order of the old run. Anything that contradicts this is an error, and
so is a feed that would be wrong in later epochs: Grain reorders a shuffled dataset in each epoch.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from etils import epath

from meshfeed._src.base.errors import CheckpointError, StateMismatchError
from meshfeed._src.base.exact_json import decode_value, encode_value
from meshfeed._src.base.store_path import make_path
from meshfeed._src.base.types import JsonValue, public
from meshfeed._src.state import files as state_files
from meshfeed._src.state.grain_files import with_tuples
from meshfeed._src.state.state import parse_state, seal

if TYPE_CHECKING:  # the handlers import Orbax, which takes seconds and is not needed here
    from meshfeed._src.checkpoint.saves import HasState

_NAME = re.compile(r"process_(\d+)(?:-of-(\d+)(?:\.0)?)?\.json")
_ELASTIC = "global_next_index"
_LOADER = "last_seen_indices"
_WORKERS = "iterators_in_use_states"


def read_foreign_files(directory: epath.PathLike) -> tuple[dict[int, JsonValue], int | None]:
    """Reads the states that the hosts wrote, by host, and the number of hosts (None for an elastic state)."""
    directory = make_path(directory)
    states: dict[int, JsonValue] = {}
    counts: set[int | None] = set()
    for path in sorted(directory.iterdir(), key=lambda path: path.name) if directory.exists() else []:
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        try:
            states[int(match[1])] = decode_value(json.loads(path.read_text()))
        except ValueError as error:
            raise CheckpointError(f"{path}: not JSON ({error}); it is damaged. Use a different step.") from None
        counts.add(int(match[2]) if match[2] else None)
    if not states:
        raise CheckpointError(
            f"{directory}: contains no process_<i>-of-<n>.json or process_0.json. Pass the folder in which MaxText or "
            "Grain stores the iterator of one step."
        )
    if len(counts) > 1:
        raise CheckpointError(f"{directory}: files of different numbers of hosts ({sorted(map(str, counts))}).")
    count = counts.pop()
    missing = [] if count is None else sorted(set(range(count)) - set(states))
    if missing:
        raise CheckpointError(
            f"{directory}: hosts {missing} of {count} are missing. Copy all hosts' files into one folder."
        )
    return states, count


@public("meshfeed.checkpoint")
def convert_state(
    directory: epath.PathLike, feed: HasState, *, step: int | None = None, unshuffled: bool = False
) -> dict[str, JsonValue]:
    """Returns a state from which ``feed`` resumes from the position in the files of ``directory``; does not change the feed.

    ::

        feed.set_state(meshfeed.checkpoint.convert_state("run/checkpoints/5000/iter", feed, step=5000))

    Args:
      directory: folder with the ``process_*.json`` files of one step.
      feed: a feed over the same records in the same order, before its first batch.
      step: number of batches delivered. May be omitted only for an elastic state.
      unshuffled: the old run read the records in the order of the source, the same in every epoch. Required if the feed
        repeats the source (``num_epochs`` is not 1), because the files do not record whether Grain shuffled.

    Returns:
      A state for ``feed.set_state``, the same on every host.

    Raises:
      CheckpointError: the feed cannot resume exactly; the message gives the reason.
    """
    return _converted(directory, feed.get_state(), _batch_size(feed), step, unshuffled)


def _converted(
    directory: epath.PathLike, template: dict[str, JsonValue], size: int, step: int | None, unshuffled: bool
) -> dict[str, JsonValue]:
    """Returns a state for a new feed with the state ``template`` and the global batch size ``size``."""
    states, count = read_foreign_files(directory)
    if template.get("position"):
        raise CheckpointError("the feed has delivered batches; import a position with a new feed.")
    run = _OldRun(directory, states, count, step, template, size)
    if step is None and count is not None:
        raise run.refused(
            "the files hold an index but not whether it counts records or batches. Pass the number of batches delivered "
            "(step=, on the command line --step)."
        )
    if template["kind"] == "random_access":
        position = run.position(unshuffled)
        return _stamped({**template, "position": position, "segments": [[0, 0, size]] if position else []})
    if count is None or step is None:
        raise run.refused("an elastic state counts records of a MapDataset; pass that MapDataset itself as the source.")
    if template["fingerprint"].get("num_epochs", 1) != 1:
        raise run.refused(
            f"the feed reads its stream num_epochs={template['fingerprint']['num_epochs']} times, but the files do not "
            "record each host's epoch. Repeat inside the stream, as before, and pass num_epochs=1."
        )
    moved = {"position": step * size, "step": step, "segments": [[0, 0, size]] if step else []}
    return _stamped({**template, **moved, **run.entries(step)})


def _stamped(state: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Returns the state with the version number that its content requires."""
    return parse_state({**state, "meshfeed": 1}).to_json()


def _batch_size(feed: HasState) -> int:
    config = getattr(feed, "config", None)
    size = getattr(feed, "batch", None) if config is None else config().get("global_batch_size")
    if isinstance(size, list):
        size = size[0][1] if isinstance(size[0], list | tuple) else size[0]
    if not isinstance(size, int):
        raise CheckpointError("the feed's global_batch_size is not known yet; pass it as an int.")
    return size


@dataclasses.dataclass(frozen=True)
class _OldRun:
    """The position of a run as recorded in its files, and the feed that will continue it."""

    directory: epath.PathLike  # of the files
    states: Mapping[int, JsonValue]  # by host
    count: int | None  # number of hosts; None for an elastic state
    step: int | None  # number of batches delivered, or None if unknown
    template: Mapping[str, JsonValue]  # state of the feed before its first batch
    size: int  # the feed's global batch size

    def refused(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.directory}: {problem}")

    def position(self, unshuffled: bool) -> int:
        """Returns the number of records consumed over all hosts, after every check."""
        self._check_order(self._samplers_keep_order() or unshuffled)
        step, size = self.step, self.size
        if self.count is None:
            position, counts_batches = self._elastic_position(), False
        else:
            assert step is not None
            position, counts_batches = self._counted_position(self.count, step)
        if step is not None and position != step * size:
            raise self.refused(
                f"the files are at record {position}, but {step} batches of {size} are {step * size}. Pass the "
                "global_batch_size and step of that run; a pipeline that filters can only continue as lanes or host batches."
            )
        if position % size:
            raise self.refused(f"position {position} is not a multiple of the batch size {size}.")
        fingerprint = self.template["fingerprint"]
        records, num_epochs = fingerprint["source"]["records"], fingerprint.get("num_epochs", 1)
        if counts_batches and (num_epochs != 1 or self._has_node("Repeat")):
            raise self.refused(
                "the old pipeline made batches before to_iter_dataset(), so each of its epochs may have "
                "dropped a partial batch, which the feed would not. Continue it as host batches."
            )
        if num_epochs is not None and position > records * num_epochs:
            raise self.refused(
                f"position {position} is beyond the {records * num_epochs} records of the feed. Pass the data and the "
                "number of epochs of that run."
            )
        return position

    def _has_node(self, word: str) -> bool:
        """Returns whether the source is a Grain dataset with a transform whose name contains ``word``."""
        return any(word in node for node in self.template["fingerprint"]["source"].get("pipeline", ()))

    def _check_order(self, unshuffled: bool) -> None:
        """Raises if the feed's records cannot be in the order of the old run, in this epoch and in later ones."""
        fingerprint = self.template["fingerprint"]
        if "mixture" in fingerprint:
            raise self.refused(
                "the feed mixes its components in its own order. Pass the old MapDataset.mix as the source."
            )
        if fingerprint.get("shuffle"):
            raise self.refused(
                "the feed shuffles, so its first records differ from those consumed. Pass shuffle=False, and "
                "shuffle inside the MapDataset as before."
            )
        num_epochs = fingerprint.get("num_epochs", 1)
        if num_epochs == 1:
            return
        remedy = (
            "Put .repeat(n), or .repeat() to repeat forever, into the MapDataset, and pass num_epochs=1 to the feed."
        )
        if self._has_node("Shuffle"):
            raise self.refused(
                f"with num_epochs={num_epochs} every epoch of the feed has the order of the first, but Grain "
                f"shuffles each epoch differently. {remedy}"
            )
        if not unshuffled:
            raise self.refused(
                f"with num_epochs={num_epochs} every epoch of the feed has the same order, but the files do not record "
                f"whether the old run shuffled. If it did not, pass unshuffled=True (--unshuffled). If it did: {remedy}"
            )

    def _samplers_keep_order(self) -> bool:
        """Returns whether every state belongs to a DataLoader whose sampler does not shuffle."""
        samplers = [str(state.get("sampler")) if isinstance(state, dict) else "" for state in self.states.values()]
        return all("shuffle=False" in sampler or sampler.startswith("SequentialSampler") for sampler in samplers)

    def _elastic_position(self) -> int:
        state = self.states[min(self.states)]
        if not isinstance(state, dict) or set(state) != {_ELASTIC}:
            raise self.refused(f"process_0.json is not a state of Grain's ElasticIterator: {state!r:.200}")
        return int(state[_ELASTIC])

    def _counted_position(self, count: int, step: int) -> tuple[int, bool]:
        """Returns the records consumed by hosts that each count their own, and whether they counted batches."""
        size = self.size
        if size % count:
            raise self.refused(
                f"{count} hosts wrote it, which cannot have read equal parts of a batch of {size}. Pass the "
                "global_batch_size of that run."
            )
        taken = {host: self._elements_taken(host, state) for host, state in self.states.items()}
        if len(set(taken.values())) > 1:
            raise self.refused(f"hosts are at different positions ({taken}), so no step ends there.")
        # With one row per host and batch, batches and records are the same count.
        elements, rows = next(iter(taken.values())), size // count
        counts_batches = elements == step and step > 0 and rows > 1
        return (step * size if counts_batches else elements * count), counts_batches

    def _elements_taken(self, host: int, state: JsonValue) -> int:
        """Returns how many elements one host's iterator has returned."""
        if isinstance(state, dict) and _LOADER in state:
            return self._loader_position(host, state)
        state = self.only_worker(host, state)
        if isinstance(state, dict) and set(state) == {"next_index"}:
            return int(state["next_index"])
        raise self.refused(
            f"host {host}'s state has more than a position ({_keys(state)}), as packing, filters and mixtures "
            "have, so its records are not the first ones of an order. Continue it as a stream with as many lanes as there "
            "were hosts, or as host batches."
        )

    def only_worker(self, host: int, state: JsonValue) -> JsonValue:
        """Unwraps the state inside ``mp_prefetch``: one worker reads in pipeline order, several alternate by batch."""
        if not isinstance(state, dict) or _WORKERS not in state:
            return state
        workers = state[_WORKERS]
        alone = state.get("iterators_in_use_indices") == [0] and state.get("next_index_in_datasets") == 1
        if len(workers) == 1 and alone and not state.get("future_states"):
            return workers[0]
        raise self.refused(
            f"host {host} read with mp_prefetch of {len(workers)} workers (or interleaved as many datasets), "
            "which take turns by batch, so its records are not the first ones of an order. Continue it as host batches."
        )

    def _loader_position(self, host: int, state: Mapping[str, JsonValue]) -> int:
        """Returns how many records a Grain DataLoader has read, if they are the first ones of its source."""
        sampler = str(state.get("sampler"))
        as_batches = "Continue it as host batches, on the same number of hosts."
        if "shuffle=True" in sampler:
            raise self.refused(
                f"host {host}'s DataLoader shuffled in its sampler ({sampler}); that order is not a feed's. "
                f"{as_batches}"
            )
        if self.count != 1 or re.search(r"shard_count=(?!1\b)", sampler):
            raise self.refused(
                f"host {host} is one of several with a DataLoader, whose sampler gives each host a part of its "
                f"own ({sampler}), so their records are not the first ones of the source. {as_batches}"
            )
        # Worker w reads records w, w + num_workers, …; -1 means that it has read none.
        last_seen = {int(worker): int(last) for worker, last in state[_LOADER].items() if int(last) >= 0}
        num_workers = len(state[_LOADER])
        read = sum((last - worker) // num_workers + 1 for worker, last in last_seen.items())
        if read and max(last_seen.values()) + 1 != read:
            raise self.refused(
                f"the {num_workers} workers of the DataLoader are in the middle of a round ({state[_LOADER]}), "
                f"so their records are not the first ones of the source. Use a step that is a multiple of {num_workers}, or "
                "continue it as host batches."
            )
        return read

    def entries(self, step: int) -> dict[str, JsonValue]:
        """Returns the states of the lanes, or of the hosts, of a feed that reads streams."""
        in_lanes = self.template["kind"] == "lanes"
        states = {host: self.only_worker(host, state) if in_lanes else state for host, state in self.states.items()}
        saved = {host: encode_value(_as_grain_gave_it(state)) for host, state in states.items()}
        return {"lanes": self._lanes(saved, step)} if in_lanes else {"hosts": self._hosts(saved, step)}

    def _lanes(self, saved: Mapping[int, JsonValue], step: int) -> dict[str, JsonValue]:
        num_lanes = self.template["num_lanes"]
        if num_lanes != len(saved) or self.size % num_lanes:
            raise self.refused(
                f"{len(saved)} hosts wrote it, but the feed has {num_lanes} lanes for a batch of {self.size}. Pass "
                f"num_lanes={len(saved)}, with a stream whose lane i is the pipeline of host i without its batch."
            )
        records = step * self.size // num_lanes
        entry = {"records": records, "epoch": 0, "taken": records, "skip": 0, "ended": False}
        return {str(host): seal({**entry, "state": state}) for host, state in sorted(saved.items())}

    def _hosts(self, saved: Mapping[int, JsonValue], step: int) -> dict[str, JsonValue]:
        processes = self.template["fingerprint"]["processes"]
        if processes != len(saved):
            raise self.refused(
                f"{len(saved)} hosts wrote it, but the feed has {processes}; host batches are not elastic. "
                "Continue on as many hosts, or pass the records as a source."
            )
        return {
            str(host): seal({"iterator": {"batches": step, "state": state}, "epoch": 0})
            for host, state in sorted(saved.items())
        }


def _keys(state: JsonValue) -> str:
    return ", ".join(map(str, state)) if isinstance(state, dict) else type(state).__name__


def _as_grain_gave_it(state: JsonValue) -> JsonValue:
    """Restores what ``get_state`` returned before it was written as JSON, which has neither bytes nor tuples."""
    if isinstance(state, dict) and _LOADER in state:
        return json.dumps(state, indent=4).encode()
    return with_tuples(state)


def import_position(
    directory: epath.PathLike,
    template: epath.PathLike,
    output: epath.PathLike,
    *,
    global_batch_size: int,
    step: int | None = None,
    unshuffled: bool = False,
) -> dict[str, JsonValue]:
    """Converts files that MaxText or Grain wrote to a state from which a feed can resume, and writes it to ``output``.

    Returns:
      The state.

    Raises:
      CheckpointError: the template is invalid, or the feed cannot resume exactly; the message gives the reason.
    """
    try:
        state = parse_state(epath.Path(template).read_bytes()).to_json()
    except (StateMismatchError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{template} is not a template: {error} A template is the state of a new feed over the same records in the same "
            "order, before its first batch. Write one with json.dump(feed.get_state(), file)."
        ) from None
    imported = _converted(directory, state, global_batch_size, step, unshuffled)
    folder = make_path(output)
    folder.mkdir(parents=True, exist_ok=True)
    document = state_files.make_document(imported, None, 0)  # holds all hosts' state, also for streams
    state_files.write_json(folder / state_files.STATE_FILE, document)
    return imported
