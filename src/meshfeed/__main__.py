"""The command line: ``meshfeed``, or ``python -m meshfeed``. Ctrl-C ends it without a traceback, even during imports."""

import signal
import sys


def run() -> None:
    """Runs the command line."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # not if SIGINT is ignored, as in a background job of a script
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from meshfeed._src.cli.main import main

    try:
        signal.signal(signal.SIGINT, handler)
        main()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)  # as shells report it


if __name__ == "__main__":
    run()
