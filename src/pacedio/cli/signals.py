"""Ending a command by a signal without leaving half-done work behind."""

from __future__ import annotations

import contextlib
import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import NoReturn


class Signals:
    """Ends the process by the first of SIGINT, SIGTERM, SIGHUP and SIGPIPE, after tidying up.

    All of that is done in the handler. An exception raised there would have to find its way out past closing files
    and joining threads, which take as long as a hung file system likes, and Python drops it where the signal meets a
    finalizer or a weak reference's callback.

    Between `hold` and `release` a signal is put off, so that "create a file" and "remember that we created it" are one
    step. A signal that was ignored when the command was started (nohup) stays so; only of SIGPIPE that cannot be known,
    because the interpreter ignores it itself.
    """

    def __init__(self) -> None:
        self._tidying: list[Callable[[], object]] = []
        self._held = False
        self._number = 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._arrived)
        signal.signal(signal.SIGPIPE, self._arrived)

    def before_end(self, tidy: Callable[[], object]) -> None:
        """Have `tidy` called before a signal ends the process, the last one first."""
        self._tidying.append(tidy)

    def hold(self) -> None:
        self._held = True

    def release(self) -> None:
        self._held = False
        if self._number:
            self._end()

    def _arrived(self, number: int, _frame: FrameType | None) -> None:
        if self._number:
            return  # another one while we tidy up
        self._number = number
        if not self._held:
            self._end()

    def _end(self) -> NoReturn:
        for tidy in reversed(self._tidying):
            with contextlib.suppress(Exception):
                tidy()
        # By the signal, so that who waits for this process (a shell, make) knows and stops too.
        signal.signal(self._number, signal.SIG_DFL)
        os.kill(os.getpid(), self._number)
        os._exit(128 + self._number)  # the first process of a container is spared
