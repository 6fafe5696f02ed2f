"""Tar archives as WebDataset writes them: ``source.py`` reads samples, ``index.py`` finds them in an archive."""
