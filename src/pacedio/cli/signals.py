"""Ending a command by a signal without leaving half-done work behind."""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType


class Interrupted(BaseException):
    """A signal that ends the command. No Exception, so that what handles errors does not swallow it."""


class Signals:
    """Turns the first of SIGINT, SIGTERM, SIGHUP and SIGPIPE into `Interrupted`, raised in the main thread.

    Between `hold` and `release` it is put off, so that "create a file" and "remember that we created it" are one step.
    A signal that was ignored when the command was started (nohup) stays so; only of SIGPIPE that cannot be known,
    because the interpreter ignores it itself.
    """

    def __init__(self) -> None:
        self._held = False
        self._number = 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._arrived)
        signal.signal(signal.SIGPIPE, self._arrived)

    def hold(self) -> None:
        self._held = True

    def release(self) -> None:
        self._held = False
        if self._number:
            raise Interrupted

    def obey(self) -> None:
        """If there was a signal, die by it, so that who waits for this process (a shell, make) knows and stops too."""
        if self._number:
            signal.signal(self._number, signal.SIG_DFL)
            os.kill(os.getpid(), self._number)

    def _arrived(self, number: int, _frame: FrameType | None) -> None:
        if self._number:
            return  # another one while we tidy up
        self._number = number
        if not self._held:
            raise Interrupted
