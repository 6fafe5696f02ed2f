"""Sources of records: one folder or file per family of libraries or formats.

A source is any object with ``__len__`` and ``__getitem__``, or with ``open``; ``meshfeed._src.base.hooks`` lists what else
it may define. May import: base, order, state, reading; not streams. Read first: ``memory.py``, then the family
you need; ``checks.py`` has the checks that several families share.
"""
