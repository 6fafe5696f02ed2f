"""tf.data and TFDS. Read first: ``tf_data.py`` and ``tfds.py``."""
