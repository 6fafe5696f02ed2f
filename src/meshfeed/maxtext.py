"""meshfeed under MaxText's names: change one import of a MaxText training loop, and keep its checkpoint code.

::

    - from maxtext.input_pipeline import multihost_dataloading
    + from meshfeed import maxtext as multihost_dataloading

Each difference from MaxText is listed in docs/how-to/migrate-from-maxtext.md.
"""

from __future__ import annotations

from meshfeed._src.maxtext.loader import MultiHostDataLoadIterator
from meshfeed._src.maxtext.remote import RemoteIterator, RemoteIteratorWrapper

__all__ = ["MultiHostDataLoadIterator", "RemoteIterator", "RemoteIteratorWrapper"]
