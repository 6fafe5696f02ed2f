"""Streaming Hugging Face datasets as lanes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from datasets import IterableDataset
from datasets.features.features import require_decoding

from meshfeed._src.base.errors import SettingsError, SourceError
from meshfeed._src.base.types import JsonValue
from meshfeed._src.sources.files import paths as file_paths
from meshfeed._src.sources.huggingface.counts import Counts
from meshfeed._src.sources.huggingface.cut import LaneCut, check_tree, cut_tree, find_leaves, walk
from meshfeed._src.sources.huggingface.files import file_sizes, open_files
from meshfeed._src.sources.huggingface.identity import function_name
from meshfeed._src.sources.huggingface.lanes import ExampleLane, ReplayedLane, TableLane
from meshfeed._src.sources.window_shuffle import WindowShuffle, shuffle_windows

_log = logging.getLogger("meshfeed.sources.huggingface")
_MAX_LISTED = 4
# Settings of nodes that change the stream.
_SETTINGS = (
    *("batch_size", "batched", "drop_last_batch", "remove_columns", "input_columns", "with_indices", "column_names"),
    *("n", "num_times", "stopping_strategy", "probabilities", "step", "offset"),
)


class HuggingFaceStream:
    """A ``datasets.IterableDataset`` as lanes that resume exactly.

    Args:
      dataset: a streaming dataset of one split; it is not modified and may be used elsewhere.
      columns: the columns of a record; None for all.
      shuffle_buffer: size of the shuffle buffer in records, over all lanes; 0 for none.

    Raises:
      SourceError: the dataset is already split by node, or has its own shuffle buffer.
      SettingsError: ``columns`` has a name that the dataset does not have.
    """

    def __init__(self, dataset: IterableDataset, columns: Sequence[str] | None, shuffle_buffer: int) -> None:
        if not hasattr(dataset, "_ex_iterable"):
            raise SourceError(
                "this version of datasets keeps streaming datasets in a form that is not known here, so they cannot be "
                "cut into lanes. Open each lane yourself: meshfeed.sources.Stream(lambda lane_index, num_lanes: "
                "iter(split_dataset_by_node(dataset, lane_index, num_lanes)))."
            )
        if dataset._distributed is not None:
            raise SourceError(
                "the dataset was split by node already (split_dataset_by_node). Expected the whole dataset: the feed "
                "cuts it into lanes, so that it can go on with another number of hosts. Take the split out."
            )
        check_tree(dataset._ex_iterable)
        known = None if dataset.features is None else list(dataset.features)
        missing = [name for name in columns or () if known is not None and name not in known]
        if missing:
            raise SettingsError(
                f"columns names {missing}, which the dataset has not; it has {known}.", setting="columns"
            )
        self._dataset = dataset
        self._columns = list(columns) if columns is not None else known
        self._shuffle_buffer = shuffle_buffer
        self._warned: set[int] = set()
        self._counts: dict[int, Counts] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_counts": {}}  # keyed by id(), which is only valid in this process

    def open(
        self, lane_index: int, num_lanes: int, epoch: int = 0, seed: int = 0
    ) -> TableLane | ExampleLane | ReplayedLane | WindowShuffle:
        """The records of lane ``lane_index`` of ``num_lanes``, from the beginning.

        Args:
          lane_index: 0 … num_lanes - 1.
          num_lanes: number of lanes.
          epoch: the feed's epoch; with ``shuffle_buffer``, each epoch has a different order.
          seed: the feed's seed.

        Returns:
          An iterator of dicts of numpy values. It has ``get_state`` and ``set_state`` unless a node's state is not
          exact.
        """
        shuffles = self._shuffle_buffer > 0
        cut = LaneCut(lane_index, num_lanes, seed, epoch, shuffles, self._columns, counts=self._counts)
        tree = cut_tree(self._dataset._ex_iterable, cut)
        self._warn(cut)
        lane = self._lane(tree, cut)
        if not self._shuffle_buffer:
            return lane
        window = max(min(2, self._shuffle_buffer), self._shuffle_buffer // num_lanes)  # a window of 1 does not shuffle
        if self._shuffle_buffer < 2 * num_lanes and lane_index == 0:
            _log.warning(
                "shuffle_buffer=%d over %d lanes is less than two records a lane: each shuffles windows of %d, and the "
                "order of its files; give at least %d, and better some thousands",
                self._shuffle_buffer,
                num_lanes,
                window,
                2 * num_lanes,
            )
        return shuffle_windows(lane, window, (seed, epoch, lane_index))

    def __repr__(self) -> str:
        return f"HuggingFace({type(self._dataset).__name__})"

    def file_names(self) -> list[str]:
        """Paths and URLs of the dataset's files."""
        leaves = [leaf for leaf in find_leaves(self._dataset._ex_iterable) if hasattr(leaf, "kwargs")]
        return [path for leaf in leaves for path in open_files(leaf, None).paths or ()]

    def fingerprint(self) -> JsonValue:
        """Identity: files by base name and size, columns, and the dataset's steps with their function names."""
        paths: list[str] = []
        sizes: list[int] = []
        rows = 0
        for leaf in find_leaves(self._dataset._ex_iterable):
            if not hasattr(leaf, "kwargs"):
                continue
            files = open_files(leaf, None)
            paths += files.paths or ()
            sizes += file_sizes(leaf, files.paths or ())
            rows += sum(len(shard) for shard in getattr(files, "shards", ()))
        identity: dict[str, Any] = {
            "kind": "huggingface stream",
            "columns": self._columns,
            "structure": [_describe(node) for node in walk(self._dataset._ex_iterable)],
            "shuffle_buffer": self._shuffle_buffer,
        }
        if paths:
            identity["files"] = file_paths.identify_files(paths, sizes)
        if rows:
            identity["rows"] = rows
        return identity

    def _lane(self, tree: Any, cut: LaneCut) -> TableLane | ExampleLane | ReplayedLane:
        dataset, features = self._dataset, self._dataset.features
        chosen = {} if features is None else {name: features[name] for name in self._columns or features}
        lane: TableLane | ExampleLane
        if tree.iter_arrow is not None and not any(require_decoding(feature) for feature in chosen.values()):
            lane = TableLane(tree, self._columns, features, cut.lane_index, cut.epoch, cut.units)
        else:
            part = IterableDataset(tree, info=dataset._info.copy(), token_per_repo_id=dataset._token_per_repo_id)
            lane = ExampleLane(part, self._columns, cut.lane_index, cut.epoch, cut.units)
        # batch(by_column=) buffers the rows of the current group, which its state does not include.
        exact = not any(getattr(node, "is_batch_accumulate_arrow_table_function", False) for node in walk(tree))
        return lane if exact else ReplayedLane(lane)

    def _warn(self, cut: LaneCut) -> None:
        if not cut.costs or cut.num_lanes in self._warned:
            return
        self._warned.add(cut.num_lanes)  # warn once, not once per lane
        listed = "; ".join(cut.costs[:_MAX_LISTED])
        more = f"; and {len(cut.costs) - _MAX_LISTED} more" if len(cut.costs) > _MAX_LISTED else ""
        _log.warning(
            "read amplification with %d lanes: %s%s. A number of files, or of Parquet row groups, that num_lanes "
            "divides is read once.",
            cut.num_lanes,
            listed,
            more,
        )


def _describe(node: Any) -> list[Any]:
    """A description of a node: its class, its function's name and its settings."""
    settings = {}
    for name in _SETTINGS:
        value = getattr(node, name, None)
        if value is not None:
            settings[name] = value if isinstance(value, bool | int | float | str) else [str(item) for item in value]
    function = getattr(node, "mask_function", None) or getattr(node, "function", None)
    if function is not None:
        settings["function"] = function_name(function)
    return [type(node).__name__, settings]
