"""Grain pipelines: which of the sources one becomes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshfeed._src.base.errors import SourceError
from meshfeed._src.base.names import public
from meshfeed._src.base.tracebacks import hides_own_frames
from meshfeed._src.sources.files.formats import reader_hint
from meshfeed._src.sources.host_batches import HostBatches

if TYPE_CHECKING:
    from meshfeed._src.sources.grain.map import GrainRecords
    from meshfeed._src.sources.grain.stream import GrainStream


@public("meshfeed.sources")
@hides_own_frames
def Grain(dataset: Any) -> GrainRecords | GrainStream | HostBatches:
    """A Grain pipeline as a source.

    A ``grain.MapDataset`` is read at random: exact on any number of hosts, shuffled by the feed. One with ``filter`` or
    ``flat_map``, and every ``grain.IterDataset``, is cut into lanes at its sources: exact on any number of hosts too. A
    ``grain.DataLoader`` gives batches of this host, resumed exactly on the same number of hosts.

    Args:
      dataset: a ``grain.MapDataset``, ``grain.IterDataset`` or ``grain.DataLoader``.

    Returns:
      A random-access source, a stream or host batches.

    Raises:
      SourceError: none of these, an empty MapDataset, or a pipeline that cannot be cut into lanes; the message names
        the node and shows how to write ``Stream(open)``.
    """
    import grain

    if isinstance(dataset, grain.DataLoader | grain.DatasetIterator):
        return HostBatches(dataset)
    if isinstance(dataset, grain.MapDataset):
        from meshfeed._src.sources.grain import tree as grain_tree
        from meshfeed._src.sources.grain.map import GrainRecords

        if grain_tree.sparse_node(dataset) is None:
            return GrainRecords(dataset)
        dataset = dataset.to_iter_dataset()
    if isinstance(dataset, grain.IterDataset):
        from meshfeed._src.sources.grain.stream import GrainStream

        return GrainStream(dataset)
    raise SourceError(
        f"Grain got a {type(dataset).__name__}. Expected a grain.MapDataset, grain.IterDataset or grain.DataLoader. A "
        "data source such as grain.sources.ArrayRecordDataSource can be passed to the feed as it is, or wrapped: "
        f"grain.MapDataset.source(data_source).{reader_hint(dataset)}"
    )
