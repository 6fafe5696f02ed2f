"""Which record stands at which place of the stream: epochs, mixtures, stages, and the schedule of steps. Pure numpy.

May import: base. Read first: ``epochs.py``.
"""
