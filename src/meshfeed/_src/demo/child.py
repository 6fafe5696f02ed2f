"""Runs a script as ``python script arguments`` does, and ends it with whoever started it.

``python -m meshfeed._src.demo.child script arguments``: standard input is a pipe that the parent holds open. When it ends,
the parent is gone, however it went, and nobody would ever collect this process.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading


def _end_with_the_parent() -> None:
    while os.read(0, 1 << 10):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
