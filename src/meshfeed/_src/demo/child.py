"""Runs a script like ``python script arguments``, and kills it when the parent process ends.

``python -m meshfeed._src.demo.child script arguments``: standard input is a pipe held open by the parent. End of input
means that the parent has exited for any reason, and the script would otherwise run on as an orphan.
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
