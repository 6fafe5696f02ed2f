"""From host batches to global ``jax.Array``: dtypes, assembly, transfer, ``load="once"``, exact resharding.

May import: base, order, plan, state, reading. Read first: ``placer.py``, then ``assemble.py``.
"""
