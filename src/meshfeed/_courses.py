"""From what a user passes as source to the course that reads it."""

from __future__ import annotations

from typing import Any

from meshfeed._course_batches import BatchesCourse
from meshfeed._course_lanes import LanesCourse
from meshfeed._course_random import RandomCourse
from meshfeed._layout import Layout
from meshfeed._settings import FeedSettings
from meshfeed.sources._host_batches import HostBatches
from meshfeed.sources._recognize import as_source


def make_course(source: Any, settings: FeedSettings, layout: Layout) -> RandomCourse | LanesCourse | BatchesCourse:
    """Recognises ``source`` and chooses how it is read.

    Raises:
      SourceError: nothing that can be read; the message lists what can.
      SettingsError: a keyword that does not go with this kind of source.
    """
    recognized = as_source(source)
    if isinstance(recognized, HostBatches):
        return BatchesCourse(recognized, settings, layout)
    if hasattr(recognized, "open") and not hasattr(recognized, "__getitem__"):
        return LanesCourse(recognized, settings)
    return RandomCourse(recognized, settings)
