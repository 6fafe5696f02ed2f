"""A feed that runs on the CPU hosts attached to the accelerators, under one controller; see :class:`RemoteFeed`."""

from __future__ import annotations

from meshfeed._src.remote.feed import RemoteFeed

__all__ = ["RemoteFeed"]
