"""Arrays and feed state in Orbax checkpoints: handlers, Checkpointer, read-once restore, integrity.

May import: base, plan, state, and the resharding of arrays; only cli, demo and the public face import it.
Read first: ``checkpointer.py``, then ``tree_restore.py``.
"""
