"""What a command shows: messages, a line of statistics, and a progress bar that makes way for both.

Messages go to the descriptors themselves, not through `sys.stdout` and `sys.stderr`: a name may hold bytes that are
no text, and nothing may be left in a buffer for the interpreter to lose, or complain about, at exit.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time

from pacedio.cli.quoting import shell_quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rich.progress import Progress

    from pacedio.writer import WriteStats

_PATIENCE = 1.0  # seconds without a bar: most copies are done by then
_REFRESH = 0.1  # seconds


class Output:
    """Standard output and standard error of the command `command`."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._stdout_error: OSError | None = None
        self._bar: _Bar | None = None
        self._bar_due = float("inf")
        self._total: int | None = None
        self._files = 1
        self._started = 0.0
        self.failed = False

    def complain(self, text: str) -> None:
        """An error, as GNU's commands word them: "command: text"."""
        self.failed = True
        self.note(f"{self._command}: {text}")

    def note(self, text: str) -> None:
        """A line on standard error. If it cannot be written, there is nobody to tell."""
        self.make_way()
        with contextlib.suppress(OSError):
            _write(2, os.fsencode(f"{text}\n"))

    def say(self, text: str) -> None:
        """A line on standard output, where failing to write is an error, which `close` reports once."""
        self.make_way()
        try:
            _write(1, os.fsencode(f"{text}\n"))
        except OSError as error:
            self._stdout_error = self._stdout_error or error

    def expect(self, total: int | None, *, files: int, at_once: bool) -> None:
        """Show a bar: of `total` bytes in so many files, or None if that is unknown; at once, or when a second has
        passed.
        """
        self._total = total
        self._files = files
        self._bar_due = time.monotonic() + (0 if at_once else _PATIENCE)
        if at_once:  # making the bar takes its time, and that is not the first file's
            self._make_bar()
        self._started = time.monotonic()

    def _make_bar(self) -> _Bar | None:
        try:
            self._bar = _Bar(self._files)
        except OSError:  # no descriptors left to import it with; the copy can do without
            self._bar_due = float("inf")
        return self._bar

    def wants_progress(self) -> bool:
        """Whether it is time to draw: a few times a second at most."""
        return time.monotonic() >= self._bar_due

    def progress(self, name: str, done: int) -> None:
        """`done` bytes of the total are done, the latest of them in the file `name`."""
        bar = self._bar or self._make_bar()
        if bar is None:
            return
        bar.show(shell_quote(name), done, self._total, time.monotonic() - self._started)
        self._bar_due = time.monotonic() + _REFRESH

    def finish(self, name: str, done: int) -> None:
        """All is done. If there is a bar, its last state stays."""
        if self._bar and (done or not self.failed):
            label = shell_quote(name) if self._files == 1 else "total"
            self._bar.show(label, done, done, time.monotonic() - self._started)
            self._bar.keep()
            self._bar = None

    def close(self) -> None:
        """Take the bar away; report that standard output could not be written."""
        self.make_way()
        if self._stdout_error:
            self.complain(f"write error: {self._stdout_error.strerror}")

    def make_way(self) -> None:
        """Give the terminal back to others, until the next `progress`."""
        if self._bar:
            self._bar.hide()


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


class _Terminal:
    """Standard error as rich is to see it: nothing buffered, and not being able to draw is no error of the copy."""

    encoding = sys.getfilesystemencoding()

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            _write(2, text.encode(self.encoding, "replace"))
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return os.isatty(2)

    def fileno(self) -> int:
        return 2


class _Bar:
    """One line at the bottom of the terminal. Drawn by who copies, not by a thread of its own: signals are for the
    main thread, and while nothing moves there is nothing to draw.
    """

    def __init__(self, files: int) -> None:
        # These take longer to import than a small file takes to copy.
        from typing import IO, cast

        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        self._progress: Progress = Progress(
            TextColumn(
                "{task.description}",
                markup=False,
                table_column=Column(max_width=24, no_wrap=True, overflow="ellipsis"),
            ),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[amount]}", markup=False, table_column=Column(no_wrap=True)),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=Console(file=cast("IO[str]", _Terminal())),
            redirect_stdout=False,
            redirect_stderr=False,
            auto_refresh=False,
            transient=True,
            expand=True,
        )
        self._progress.add_task("", total=None, amount="")
        (self._task,) = self._progress.tasks
        self._of = "of" if files == 1 else "of all"
        self._on_terminal = self._progress.console.is_terminal

    def show(self, name: str, done: int, total: int | None, seconds: float) -> None:
        from pacedio.pacing import format_size

        if total is not None:
            total = max(total, done)  # a source may grow
        self._progress.update(self._task.id, description=name, completed=done, total=total)
        amount = format_size(done)
        if total is not None:
            amount = f"{self._task.percentage:3.0f}% {self._of} {format_size(total)}"
        speed = self._task.speed if done != total else done / seconds
        if speed:
            amount += f" {format_size(int(speed))}/s"
        self._progress.update(self._task.id, amount=amount)
        if self._on_terminal:
            self._progress.start()  # does nothing while it is shown
            self._progress.refresh()

    def hide(self) -> None:
        if self._on_terminal:
            self._progress.stop()

    def keep(self) -> None:
        if not self._on_terminal:  # the last state is all that is worth a line
            self._progress.console.print(self._progress.get_renderable())
            return
        self._progress.live.transient = False
        self._progress.stop()


def stats_line(name: str, size: int, seconds: float, stats: WriteStats) -> str:
    """What a user of --stats wants to know of the copy `name`, in one line."""
    from pacedio.pacing import format_size
    from pacedio.writer import format_in_flight

    parts = [f"{format_size(size)} in {seconds:.3f} s"]
    if stats.bytes != size:
        parts[0] += f", {format_size(stats.bytes)} of it written and the rest holes"
    if seconds > 0 and stats.bytes > 0:
        parts.append(f"{format_size(int(stats.bytes / seconds))}/s")
    if stats.engine == "none":
        parts.append("not paced")
    else:
        parts.append(format_in_flight(stats))
        parts.append(f"stalled {stats.stall_seconds:.3f} s")
    parts.append(f"final sync {stats.sync_seconds:.3f} s" if stats.sync_seconds else "not synced")
    engine = f"engine {stats.engine}"
    if stats.reason:
        engine += f" ({stats.reason})"
    parts.append(engine)
    return f"{shell_quote(name)}: {', '.join(parts)}"
