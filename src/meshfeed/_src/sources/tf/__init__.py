"""tf.data and TFDS as sources. Read first: ``tf_data.py`` and ``tfds.py``."""
