"""``meshfeed convert``: files of other formats become ArrayRecord or token files.

``job.py`` holds the plan: which record is in which output file follows from the input and the settings alone. Its tasks
(scan one input file, write one output file) are independent and leave their results as files, so they run in this
process, in workers or as an Apache Beam pipeline, and a job that was killed continues with those that are missing.
``destination.py`` is where results and state are: a folder or a URL. Read first: ``job.py``, then ``inputs.py`` for a
format, ``example.py`` and ``writers.py`` for what is written. May import: base, reading, sources.
"""
