"""Converts a Grain pipeline to the matching kind of source."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshfeed._src.base.errors import SourceError, hides_own_frames
from meshfeed._src.base.types import public
from meshfeed._src.sources.files.formats import reader_hint
from meshfeed._src.sources.host_batches import HostBatches

if TYPE_CHECKING:
    from meshfeed._src.sources.grain.datasets import GrainRecords, GrainStream


@public("meshfeed.sources")
@hides_own_frames
def Grain(dataset: object) -> GrainRecords | GrainStream | HostBatches:
    """A Grain pipeline as a source.

    A ``grain.MapDataset`` is random access: the feed shuffles it, and it resumes exactly on any number of hosts. A
    MapDataset with ``filter`` or ``flat_map``, and any ``grain.IterDataset``, is split into lanes at its sources and
    also resumes exactly on any number of hosts. A ``grain.DataLoader`` yields host batches and resumes exactly on the
    same number of hosts.

    Args:
      dataset: a ``grain.MapDataset``, ``grain.IterDataset``, ``grain.DataLoader`` or ``grain.DatasetIterator``.

    Returns:
      A random-access source, a stream or host batches.

    Raises:
      SourceError: ``dataset`` is none of these, is an empty MapDataset, or cannot be split into lanes; the message then
        names the node and shows how to write ``Stream(open)``.
    """
    import grain

    if isinstance(dataset, grain.DataLoader | grain.DatasetIterator):
        return HostBatches(dataset)
    if isinstance(dataset, grain.MapDataset):
        from meshfeed._src.sources.grain import tree
        from meshfeed._src.sources.grain.datasets import GrainRecords

        if tree.sparse_node(dataset) is None:
            return GrainRecords(dataset)
        dataset = dataset.to_iter_dataset()
    if isinstance(dataset, grain.IterDataset):
        from meshfeed._src.sources.grain.datasets import GrainStream

        return GrainStream(dataset)
    raise SourceError(
        f"Grain got a {type(dataset).__name__}. Expected a grain.MapDataset, grain.IterDataset or grain.DataLoader. A "
        "data source such as grain.sources.ArrayRecordDataSource can be passed to the feed as it is, or wrapped: "
        f"grain.MapDataset.source(data_source).{reader_hint(dataset)}"
    )
