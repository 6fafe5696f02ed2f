"""The private parts of Orbax that are used here, and what happens in a version of Orbax without them."""

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
    """Where Orbax stores the implementation of PRNG keys, so plain Orbax can restore the keys that we save.

    None if this version of Orbax has no such class: then plain Orbax restores such keys as their uint32 data, and
    meshfeed still restores keys.
    """
    try:
        from orbax.checkpoint._src.metadata.array_metadata_store import Store
    except ImportError:
        _log.warning(
            "Orbax %s keeps the metadata of arrays elsewhere; without meshfeed, it restores PRNG keys that are saved now "
            "as their uint32 data",
            ocp.__version__,
        )
        return None
    return Store()
