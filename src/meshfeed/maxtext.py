"""meshfeed under MaxText's names: change one import in a MaxText training loop and keep its checkpoint code.

::

    - from maxtext.input_pipeline import multihost_dataloading
    + from meshfeed import maxtext as multihost_dataloading

``MultiHostDataLoadIterator`` here is not ``meshfeed.MultiHostDataLoadIterator``, which is a second name of ``meshfeed.Feed``.
docs/how-to/migrate-from-maxtext.md lists all differences from MaxText.
"""

from __future__ import annotations

from meshfeed._src.maxtext.loader import MultiHostDataLoadIterator
from meshfeed._src.maxtext.remote import RemoteIterator, RemoteIteratorWrapper

__all__ = ["MultiHostDataLoadIterator", "RemoteIterator", "RemoteIteratorWrapper"]
