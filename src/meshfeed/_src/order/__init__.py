"""Maps positions in the stream to records: epochs, shards, buckets, mixtures, packing, and the step schedule. Pure numpy.

May import: base. Read first: ``epochs.py``; ``shards.py`` is another order with the same methods.
"""
