"""The private parts of Orbax that meshfeed uses, and the fallbacks for versions of Orbax without them."""

from __future__ import annotations

import logging
from typing import Any

import orbax.checkpoint as ocp

_log = logging.getLogger("meshfeed.checkpoint")

JSON_HANDLER = "orbax.checkpoint.experimental.v1._src.handlers.json_handler.JsonHandler"
"""The name under which Orbax v1 finds its JSON handler, even in a process that never imports meshfeed.

In Orbax v0 only our class has this name, so v0 uses our class. It is written into checkpoints and must not change. An
Orbax v1 that does not find the name reads the item only if it is given a handler.
"""


def metadata_store() -> Any | None:
    """Returns Orbax's store for the implementation of PRNG keys, with which plain Orbax can restore keys saved here.

    Returns None if this version of Orbax has no such class. Plain Orbax then restores such keys as their uint32 data, and
    meshfeed still restores keys.
    """
    try:
        from orbax.checkpoint._src.metadata.array_metadata_store import Store
    except ImportError:
        _log.warning(
            "Orbax %s stores the metadata of arrays elsewhere; without meshfeed, it will restore PRNG keys saved now as "
            "their uint32 data",
            ocp.__version__,
        )
        return None
    return Store()
