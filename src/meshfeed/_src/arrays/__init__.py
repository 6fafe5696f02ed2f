"""Host batches to global ``jax.Array``: dtypes, assembly, transfer, ``load="once"``, and exact resharding.

May import: base, plan, reading. Read first: ``device_put.py``, then ``placer.py``.
"""
