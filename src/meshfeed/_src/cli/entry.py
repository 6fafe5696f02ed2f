"""What the command ``meshfeed`` runs: Ctrl-C ends it without a traceback, while it imports modules too."""

import signal
import sys


def run() -> None:
    """Runs the command line."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from meshfeed._src.cli.main import main

    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        main()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)  # as shells report it
