"""Saves and restores arrays and feed state as Orbax checkpoints: handlers, Checkpointer, read-once restore, integrity.

May import: arrays (its resharding), base, state. Imported only by cli and the public module. Read first:
``checkpointer.py``.

* Save: ``leaves.py`` encodes a tree; ``array_handler.py`` has each array cut by ``write.py``, as ``layout.py`` chooses, and
  written by Orbax; digests go into the manifest of ``stored.py``. Hosts fail or succeed together: ``saves.py``.
  ``at_exit.py`` waits for what Orbax still writes when the program ends.
* Restore: ``restore.py`` runs four stages with values between them. ``match.py``, ``casts.py`` and ``plan.py`` plan what is
  read of each leaf; ``read.py`` reads pieces into host memory; ``place.py`` and ``exchange.py`` bring them to devices and
  hosts; ``report.py`` says what was read. ``agreement.py`` confirms each stage on all hosts.
* Stores behind URLs: ``store_manager.py`` saves in place of Orbax's manager, ``store_steps.py`` commits and removes steps,
  ``chunks.py`` reads arrays.
* Options of a restore: ``options.py``, one value that is passed whole.
* Integrity: ``step.py`` checks, describes and compares steps, also as JSON for the command line.
* ``foreign.py`` converts positions that Grain and MaxText saved.
"""
