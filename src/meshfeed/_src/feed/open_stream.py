"""From what a user passes as source to the stream that reads it."""

from __future__ import annotations

from typing import Any

from meshfeed._src.arrays.placer import Placer
from meshfeed._src.base.settings import FeedSettings
from meshfeed._src.sources.host_batches import HostBatches
from meshfeed._src.sources.recognize import as_source
from meshfeed._src.streams.lanes.stream import LaneStream
from meshfeed._src.streams.local_batches.stream import LocalBatchStream
from meshfeed._src.streams.random_access import RandomAccessStream


def make_stream(
    source: Any, settings: FeedSettings, placer: Placer
) -> RandomAccessStream | LaneStream | LocalBatchStream:
    """Recognises ``source`` and chooses how it is read.

    Raises:
      SourceError: nothing that can be read; the message lists what can.
      SettingsError: a keyword that does not go with this kind of source.
    """
    recognized = as_source(source)
    if isinstance(recognized, HostBatches):
        return LocalBatchStream(recognized, settings, placer)
    if hasattr(recognized, "open") and not hasattr(recognized, "__getitem__"):
        return LaneStream(recognized, settings)
    return RandomAccessStream(recognized, settings)
