"""Where the commands start.

Outside of the package, because importing anything of it imports all of it, and Python's own handler of SIGINT would
answer a Ctrl-C meanwhile with a traceback. Until a command handles its signals itself there is nothing to tidy up, and
they may end it as they end any other program. Of the time before this module, which is the interpreter's and pip's, the
same cannot be said.
"""

import _signal as signal  # type: ignore[import-not-found]  # what `signal` adds to it takes longer to import than all else


def pacedcp() -> int:
    """See pacedio.cli.pacedcp."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if it was ignored at the start
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from pacedio.cli.pacedcp import main

    return main()
