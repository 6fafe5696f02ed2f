"""Saves and restores arrays and feed state as Orbax checkpoints: handlers, Checkpointer, read-once restore, integrity.

May import: arrays (its resharding), base, state. Imported only by cli and the public module. Read first:
``checkpointer.py``.

* Save: a tree is encoded by ``leaves.py``; ``handlers.py`` cuts each array as ``layout.py`` plans, has Orbax write it, and
  adds digests to the manifest in ``stored.py``.
* Restore: ``restore.py`` turns each leaf into a request, plans it with ``layout.py``, reads with ``stored.py``, and agrees
  and gathers with ``collectives.py``.
* Integrity: ``step.py`` checks, describes and compares steps, also as JSON for the command line.
* ``foreign.py`` converts positions that Grain and MaxText saved.
"""
