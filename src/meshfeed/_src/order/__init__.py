"""Maps positions in the stream to records: epochs, mixtures, stages, and the step schedule. Pure numpy.

May import: base. Start with ``epochs.py``.
"""
