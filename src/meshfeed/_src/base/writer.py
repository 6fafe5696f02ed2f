"""Which process writes to a folder: the last one that began to. A note in the folder names it, and earlier ones then stop.

A lock would outlive a killed process, whose successor runs on another machine and cannot see that it is gone.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time


def new_note() -> str:
    """Returns the text, in JSON, of a note that names this process, each time another."""
    note = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time(), "id": secrets.token_hex(8)}
    return json.dumps(note)


def who(note: str) -> str:
    """Returns the process that a note names, for messages: "process 7 on node-a"; "another process" if it is damaged."""
    try:
        content = json.loads(note)
        return f"process {content['pid']} on {content['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
