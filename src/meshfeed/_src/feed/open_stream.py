"""Chooses the stream for the ``source`` that the user passes."""

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
    """Recognizes the kind of ``source`` and returns its stream.

    Raises:
      SourceError: the source is of an unsupported type; the message lists the supported ones.
      SettingsError: a setting does not apply to this kind of source.
    """
    recognized = as_source(source)
    if isinstance(recognized, HostBatches):
        return LocalBatchStream(recognized, settings, placer)
    if hasattr(recognized, "open") and not hasattr(recognized, "__getitem__"):
        return LaneStream(recognized, settings)
    return RandomAccessStream(recognized, settings)
