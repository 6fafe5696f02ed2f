"""Host batches to global ``jax.Array``: dtypes, assembly, transfer, ``load="once"`` and exact resharding.

May import base, order, plan, state and reading. Start with ``placer.py``, then ``device_put.py``.
"""
