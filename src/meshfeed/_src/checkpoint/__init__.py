"""Saves and restores arrays and feed state as Orbax checkpoints: handlers, Checkpointer, read-once restore, integrity.

May import: arrays (its resharding), base, state. Imported only by cli and the public module. Read first:
``checkpointer.py``.

* Save: ``handlers.py`` encodes the tree with ``leaves.py`` and ``dtypes.py``, lays out each array with
  ``save_layout.py`` for Orbax to write, and writes digests through ``manifest.py``. ``iterator.py`` saves the feed.
* Restore: ``tree_restore.py`` matches leaves, ``restore.py`` plans with ``load_plan.py``, reads with ``stored.py``, agrees
  with ``agreement.py`` and gathers with ``gather.py``. ``boxes.py`` has the geometry that saving and restoring share.
* Integrity: ``step.py`` checks, describes and compares steps, also as JSON for the command line.
* ``foreign.py`` converts positions that Grain and MaxText saved. ``arguments.py`` checks arguments.
"""
