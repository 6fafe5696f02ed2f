"""A feed on hosts beside the accelerators; see :class:`RemoteFeed`."""

from __future__ import annotations

from meshfeed._src.remote.feed import RemoteFeed

__all__ = ["RemoteFeed"]
