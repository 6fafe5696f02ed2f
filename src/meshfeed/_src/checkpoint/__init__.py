"""Saves and restores arrays and feed state as Orbax checkpoints: handlers, Checkpointer, read-once restore, integrity.

May import base, plan, state and the resharding of arrays. Imported only by cli, demo and the public module.
Start with ``checkpointer.py``, then ``tree_restore.py``.
"""
