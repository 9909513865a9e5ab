"""pacedcp: cp(1) for big files, paced.

The messages, exit codes and rules are those of GNU cp, which users and scripts know; the order of the checks is that
of coreutils 9. What differs is said in docs/pacedcp.md: the copy is paced, it is durable when the command ends, and a
destination that a failed or interrupted copy created is removed.

Whatever goes wrong with one file is a `_Complaint` and ends that file, not the command. A signal ends the command, by
that signal, after removing what the copy at hand created (see signals.py).

Start-up is most of what copying a small file costs, so what only some runs need is imported where it is needed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import time

from pacedio.cli.display import Output, stats_line
from pacedio.cli.options import OPTIONAL_ARGUMENT, REQUIRED_ARGUMENT, Option, UsageError, parse
from pacedio.cli.quoting import shell_quote
from pacedio.cli.signals import Signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from pacedio.pacing import Pacing
    from pacedio.writer import PacedWriter

_NAME = "pacedcp"

_HELP = """\
Usage: pacedcp [OPTION]... [-T] SOURCE DEST
  or:  pacedcp [OPTION]... SOURCE... DIRECTORY
  or:  pacedcp [OPTION]... -t DIRECTORY SOURCE...
Copy SOURCE to DEST, or multiple SOURCE(s) to DIRECTORY, as cp does, but paced:
few bytes are in flight at any time, and the copy is durable when the command
ends.

As in cp:
  -f, --force                  if an existing destination file cannot be
                                 opened, remove it and try again
  -p                           preserve mode, ownership and timestamps
  -t, --target-directory=DIRECTORY  copy all SOURCE arguments into DIRECTORY
  -T, --no-target-directory    treat DEST as a normal file
  -v, --verbose                explain what is being done
      --help                   display this help and exit
      --version                output version information and exit

Pacing (spelled in full; SIZE and RATE are written like 512KiB, 8M, 100MB/s):
      --limit=SIZE             have at most SIZE in flight (default auto: as few
                                 as keep the device busy)
      --window=SIZE            start, wait for and drop SIZE at once (default
                                 auto)
      --polite                 give way to others who use the device
      --rate=RATE              copy at most RATE a second
      --engine=NAME            auto (default), uncached, range, advise, datasync
                                 or none
      --keep-cache             leave what was written in the page cache
      --no-sync                do not wait until the copy is durable
      --stats                  print a line about each copy to standard error
      --progress               show a progress bar at once; on a terminal it
                                 appears after a second anyway"""

# GNU cp's options in the order of its own table, all of them: an abbreviation must not mean one thing here and another
# there. Then ours.
_OPTIONS = (
    Option("a", "archive"),
    Option("", "attributes-only"),
    Option("", "backup", OPTIONAL_ARGUMENT),
    Option("b", ""),
    Option("", "copy-contents"),
    Option("d", ""),
    Option("L", "dereference"),
    Option("f", "force"),
    Option("H", ""),
    Option("i", "interactive"),
    Option("l", "link"),
    Option("n", "no-clobber"),
    Option("P", "no-dereference"),
    Option("", "no-preserve", REQUIRED_ARGUMENT),
    Option("T", "no-target-directory"),
    Option("x", "one-file-system"),
    Option("p", ""),
    Option("", "parents"),
    Option("", "preserve", OPTIONAL_ARGUMENT),
    Option("rR", "recursive"),
    Option("", "remove-destination"),
    Option("", "sparse", REQUIRED_ARGUMENT),
    Option("", "reflink", OPTIONAL_ARGUMENT),
    Option("", "strip-trailing-slashes"),
    Option("S", "suffix", REQUIRED_ARGUMENT),
    Option("s", "symbolic-link"),
    Option("t", "target-directory", REQUIRED_ARGUMENT),
    Option("u", "update"),
    Option("v", "verbose"),
    Option("Z", ""),
    Option("", "context", OPTIONAL_ARGUMENT),
    Option("", "help"),
    Option("", "version"),
    Option("", "limit", REQUIRED_ARGUMENT, ours=True),
    Option("", "window", REQUIRED_ARGUMENT, ours=True),
    Option("", "polite", ours=True),
    Option("", "rate", REQUIRED_ARGUMENT, ours=True),
    Option("", "engine", REQUIRED_ARGUMENT, ours=True),
    Option("", "keep-cache", ours=True),
    Option("", "no-sync", ours=True),
    Option("", "stats", ours=True),
    Option("", "progress", ours=True),
)


class _Fatal(Exception):  # noqa: N818
    """Ends the command, with a message."""


class _Complaint(Exception):  # noqa: N818
    """Ends the copy of one file, with a message."""


def main() -> int:
    """The command; returns its exit status."""
    signals = Signals()
    status = _run(sys.argv[1:], signals)
    signals.hold()  # nothing can be interrupted any more
    return status


def _run(arguments: Sequence[str], signals: Signals) -> int:
    output = Output(_NAME)
    signals.before_end(output.make_way)
    try:
        settings = _Settings()
        text = settings.read(arguments)
        if text:
            output.say(text)
        else:
            _copy_operands(settings, signals, output)
    except UsageError as mistake:
        output.complain(str(mistake))
        output.note(f"Try '{_NAME} --help' for more information.")
    except _Fatal as reason:
        output.complain(str(reason))
    except MemoryError:
        output.complain("memory exhausted")
    except OSError as error:  # of no file in particular: no descriptors left to import something with
        output.complain(error.strerror or str(error))
    finally:
        output.close()
    return 1 if output.failed else 0


class _Settings:
    """What the command line says."""

    def __init__(self) -> None:
        self.force = False
        self.preserve = False
        self.verbose = False
        self.no_target_directory = False
        self.target_directory: str | None = None
        self.sync = True
        self.stats = False
        self.progress = False
        self.operands: list[str] = []
        self._pacing: dict[str, Any] = {}
        self._drop_cache = True

    def read(self, arguments: Sequence[str]) -> str | None:
        """Read the command line. Returns a text if all there is to do is to show it."""
        for option, value in parse(arguments, _OPTIONS):
            if option is None:
                self.operands.append(value or "")
                continue
            name = option.name or option.letters
            if name == "help":
                return _HELP
            if name == "version":
                from pacedio import __version__

                return f"{_NAME} (pacedio) {__version__}"
            self._set(name, value or "")
        return None

    def pacing(self) -> Pacing:
        from pacedio.pacing import Pacing

        try:
            return Pacing(**self._pacing, drop_cache=self._drop_cache)
        except ValueError as error:
            raise _Fatal(str(error)) from error

    def _set(self, name: str, value: str) -> None:
        if name == "force":
            self.force = True
        elif name == "p":
            self.preserve = True
        elif name == "verbose":
            self.verbose = True
        elif name == "no-target-directory":
            self.no_target_directory = True
        elif name == "target-directory":
            if self.target_directory is not None:
                raise _Fatal("multiple target directories specified")
            self.target_directory = value
        elif name == "no-sync":
            self.sync = False
        elif name == "keep-cache":
            self._drop_cache = False
        elif name == "polite":
            self._pacing.update(polite=True, io_class="idle")
        elif name == "stats":
            self.stats = True
        elif name == "progress":
            self.progress = True
        elif name in ("limit", "window", "rate", "engine"):
            self._pacing[name] = value
        else:
            dashes = "-" if len(name) <= 2 else "--"
            raise UsageError(f"cp's option '{dashes}{name}' is not supported")


class _Target:
    """Where a copy goes: the name to show, and the path to use, which is relative to the descriptor `directory` if
    there is one. So a target directory stays the same one even if it is renamed meanwhile.
    """

    def __init__(self, name: str, path: str | None = None, directory: int | None = None) -> None:
        self.name = name
        self._path = name if path is None else path
        self._directory = directory

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self._path, dir_fd=self._directory, follow_symlinks=follow_symlinks)

    def open(self, flags: int, mode: int = 0) -> int:
        return _not_standard(os.open(self._path, flags, mode, dir_fd=self._directory))

    def unlink(self) -> None:
        os.unlink(self._path, dir_fd=self._directory)

    def is_symlink(self) -> bool:
        try:
            return stat.S_ISLNK(self.stat(follow_symlinks=False).st_mode)
        except OSError:
            return False

    def referent(self) -> _Target:
        """Where the symbolic link at this place leads."""
        base = "" if self._directory is None else f"/proc/self/fd/{self._directory}/"
        return _Target(self.name, os.path.realpath(base + self._path))


def _not_standard(descriptor: int) -> int:
    """The same, but none of the first three. Where one of those is closed, messages must not go to a file that took its
    number. (What is open for reading only may have it: writing there fails as it does where nothing is.)
    """
    if descriptor > 2:
        return descriptor
    try:
        return _not_standard(os.dup(descriptor))
    finally:
        os.close(descriptor)


class _Creation:
    """A file that we created and whose copy is not complete."""

    def __init__(self, target: _Target, descriptor: int) -> None:
        self._target = target
        self._status = os.fstat(descriptor)

    def remove(self) -> None:
        # Not what someone else put there meanwhile. And if it fails, the error that brought us here is the one to tell.
        with contextlib.suppress(OSError):
            if os.path.samestat(self._target.stat(follow_symlinks=False), self._status):
                self._target.unlink()


def _copy_operands(settings: _Settings, signals: Signals, output: Output) -> None:
    sources = settings.operands
    directory = settings.target_directory
    descriptor = None
    new = False
    if len(sources) <= (directory is None):
        if not sources:
            raise UsageError("missing file operand")
        raise UsageError(f"missing destination file operand after {shell_quote(sources[0])}")
    if settings.no_target_directory:
        if directory is not None:
            raise _Fatal("cannot combine --target-directory (-t) and --no-target-directory (-T)")
        if len(sources) > 2:
            raise UsageError(f"extra operand {shell_quote(sources[2])}")
    elif directory is not None:
        try:
            descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY)
        except OSError as error:
            raise _Fatal(f"target directory {shell_quote(directory)}: {error.strerror}") from error
    else:
        try:
            descriptor = os.open(sources[-1], os.O_PATH | os.O_DIRECTORY)
        except OSError as error:
            if len(sources) > 2:
                raise _Fatal(f"target {shell_quote(sources[-1])}: {error.strerror}") from error
            new = error.errno == errno.ENOENT
        else:
            directory = sources.pop()

    copier = _Copier(settings, signals, output)
    signals.before_end(copier.remove_unfinished)
    try:
        if directory is None:
            source, name = sources
            copier.begin([source])
            copier.copy(source, _Target(name), new=new)
        else:
            copier.begin(sources)
            for source in sources:
                base = source.rstrip("/").rpartition("/")[2]
                copier.copy(source, _Target(f"{directory.rstrip('/')}/{base}", base, descriptor))
        copier.end()
    finally:
        copier.remove_unfinished()


class _Copier:
    """Copies one operand after the other. What it keeps of one is for the next ones and for the end."""

    def __init__(self, settings: _Settings, signals: Signals, output: Output) -> None:
        self._settings = settings
        self._pacing = settings.pacing()
        self._signals = signals
        self._output = output
        self._several = False
        self._sources: set[object] = set()
        self._copies: set[object] = set()
        self._creation: _Creation | None = None  # by the copy at hand
        self._done = 0  # bytes of the copies before the one at hand
        self._name = ""  # of the latest copy

    def begin(self, sources: Sequence[str]) -> None:
        self._several = len(sources) > 1
        if self._settings.progress or os.isatty(2):
            self._output.expect(_total(sources), files=len(sources), at_once=self._settings.progress)

    def end(self) -> None:
        self._output.finish(self._name, self._done)

    def copy(self, source: str, target: _Target, *, new: bool = False) -> None:
        """Copy one operand, or say why not. `new`: nothing was found at the target already."""
        try:
            self._copy(source, target, new=new)
        except _Complaint as complaint:
            self.remove_unfinished()
            self._output.complain(str(complaint))

    def remove_unfinished(self) -> None:
        if self._creation:
            self._creation.remove()
            self._creation = None

    def _copy(self, source: str, target: _Target, *, new: bool) -> None:
        try:
            status = os.stat(source)
            entry = _entry(source, status) if self._several else None
        except OSError as error:
            raise _failed("cannot stat", source, error) from error
        if stat.S_ISDIR(status.st_mode):
            raise _Complaint(f"-r not specified; omitting directory {shell_quote(source)}")
        if entry is not None:
            if entry in self._sources:
                self._output.note(f"{_NAME}: warning: source file {shell_quote(source)} specified more than once")
                return
            self._sources.add(entry)
        exists = not new and self._may_overwrite(source, status, target)
        if self._settings.verbose:
            self._output.say(f"{shell_quote(source)} -> {shell_quote(target.name)}")
        try:
            descriptor = os.open(source, os.O_RDONLY)
        except OSError as error:
            raise _Complaint(f"cannot open {shell_quote(source)} for reading: {error.strerror}") from error
        try:
            if not os.path.samestat(os.fstat(descriptor), status):
                raise _Complaint(f"skipping file {shell_quote(source)}, as it was replaced while being copied")
            self._write(descriptor, source, status, target, exists=exists)
        finally:
            os.close(descriptor)
        if self._several:
            with contextlib.suppress(OSError):
                self._copies.add((target.name, *_identity(target.stat(follow_symlinks=False))))

    def _may_overwrite(self, source: str, status: os.stat_result, target: _Target) -> bool:
        """Whether there is anything at the target; a `_Complaint` if it must stay as it is."""
        try:
            there = target.stat()
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno == errno.ELOOP and self._settings.force:
                return True  # opening it will fail as well, and then it is removed
            raise _failed("cannot stat", target.name, error) from error
        if os.path.samestat(there, status):
            raise _Complaint(f"{shell_quote(source)} and {shell_quote(target.name)} are the same file")
        if stat.S_ISDIR(there.st_mode):
            raise _Complaint(f"cannot overwrite directory {shell_quote(target.name)} with non-directory")
        if (target.name, *_identity(there)) in self._copies:
            raise _Complaint(f"will not overwrite just-created {shell_quote(target.name)} with {shell_quote(source)}")
        return True

    def _open(self, status: os.stat_result, target: _Target, *, exists: bool) -> int:
        """The target, empty and open for writing; if that makes a new file, `_creation` says so."""
        try:
            if exists:
                try:
                    return target.open(os.O_WRONLY | os.O_TRUNC)
                except FileNotFoundError:
                    pass  # it has gone since
                except OSError:
                    if not self._settings.force:
                        raise
                    self._remove(target)
            return self._create(status, target)
        except OSError as error:
            if error.errno == errno.EISDIR and target.name.endswith("/"):
                error.strerror = os.strerror(errno.ENOTDIR)
            raise _failed("cannot create regular file", target.name, error) from error

    def _remove(self, target: _Target) -> None:
        try:
            target.unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            raise _failed("cannot remove", target.name, error) from error
        if self._settings.verbose:
            self._output.say(f"removed {shell_quote(target.name)}")

    def _create(self, status: os.stat_result, target: _Target) -> int:
        mode = status.st_mode & (stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO)
        if self._settings.preserve:
            mode &= stat.S_IRWXU  # until it has the right owner
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._signals.hold()
        try:
            try:
                descriptor = target.open(flags, mode)
            except FileExistsError:
                if not target.is_symlink():
                    raise
                if "POSIXLY_CORRECT" not in os.environ:
                    raise _Complaint(f"not writing through dangling symlink {shell_quote(target.name)}") from None
                target = target.referent()
                descriptor = target.open(flags, mode)
            self._creation = _Creation(target, descriptor)
        finally:
            self._signals.release()
        return descriptor

    def _write(self, descriptor: int, source: str, status: os.stat_result, target: _Target, *, exists: bool) -> None:
        from pacedio.files import open as open_paced

        started = time.monotonic()
        opened = self._open(status, target, exists=exists)
        # sync=False: that is done here, in its place, and not at all for a copy that fails.
        writer = open_paced(opened, "wb", pacing=self._pacing, sync=False)
        try:
            size = self._write_contents(descriptor, source, writer, target)
            kind = stat.S_IFMT(os.fstat(opened).st_mode)
            durable = self._settings.sync and kind in (stat.S_IFREG, stat.S_IFBLK)
            if durable:
                try:
                    writer.sync()
                except OSError as error:
                    raise _failed("error syncing", target.name, error) from error
            if self._settings.preserve:
                self._preserve(status, opened, target, durable=durable)
        except BaseException:
            writer.discard()
            raise
        try:
            writer.close()
        except OSError as error:
            raise _failed("failed to close", target.name, error) from error
        self._creation = None
        self._done += size
        if self._settings.stats:
            seconds = time.monotonic() - started
            self._output.note(stats_line(target.name, size, seconds, writer.stats))

    def _write_contents(self, descriptor: int, source: str, writer: PacedWriter, target: _Target) -> int:
        from pacedio._contents import copy_contents
        from pacedio.exceptions import SourceError

        self._name = target.name
        moved = 0

        def progress(count: int) -> None:
            nonlocal moved
            moved += count
            if self._output.wants_progress():
                # What is in flight is not done.
                self._output.progress(target.name, self._done + moved - writer.stats.in_flight)

        try:
            size = copy_contents(descriptor, writer, source_name=source, progress=progress)
            writer.flush()
        except SourceError as error:
            raise _failed("error reading", source, error) from error
        except OSError as error:
            raise _failed("error writing", target.name, error) from error
        return size

    def _preserve(self, status: os.stat_result, descriptor: int, target: _Target, *, durable: bool) -> None:
        """Owner, then mode, which changing the owner may change, then times. What fails is reported as GNU does, and
        the copy stays.
        """
        mode = stat.S_IMODE(status.st_mode)
        there = os.fstat(descriptor)
        what = "clearing permissions for"
        try:
            if (there.st_uid, there.st_gid) != (status.st_uid, status.st_gid):
                if not self._creation:
                    # Nobody whom the old mode allows to, and the new one does not, may open it in between.
                    os.fchmod(descriptor, there.st_mode & mode & stat.S_IRWXU)
                what = "failed to preserve ownership for"
                if not _change_owner(descriptor, status.st_uid, status.st_gid):
                    mode &= ~(stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX)
            what = "preserving permissions for"
            os.fchmod(descriptor, mode)
            what = "preserving times for"
            os.utime(descriptor, ns=(status.st_atime_ns, status.st_mtime_ns))
            if durable:
                what = "error syncing"
                os.fsync(descriptor)
        except OSError as error:
            self._output.complain(f"{what} {shell_quote(target.name)}: {error.strerror}")


def _change_owner(descriptor: int, uid: int, gid: int) -> bool:
    """Whether the owner could be changed. That only root may is no error for anyone else."""
    try:
        os.fchown(descriptor, uid, gid)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EINVAL):
            raise
        with contextlib.suppress(OSError):
            os.fchown(descriptor, -1, gid)  # the group alone may be allowed
        if os.geteuid() == 0:
            raise
        return False
    return True


def _failed(what: str, name: str, error: OSError) -> _Complaint:
    return _Complaint(f"{what} {shell_quote(name)}: {error.strerror}")


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _entry(path: str, status: os.stat_result) -> tuple[object, ...]:
    """What is equal for two paths to the same name of the same file."""
    directory, _, base = path.rstrip("/").rpartition("/")
    parent = os.stat(directory or ("/" if path.startswith("/") else "."))
    return (base, *_identity(status), *_identity(parent))


def _total(sources: Sequence[str]) -> int | None:
    """Bytes to copy, as far as that can be known."""
    total = 0
    for source in sources:
        try:
            status = os.stat(source)
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode):
            total += status.st_size
        elif not stat.S_ISDIR(status.st_mode):
            return None
    return total


if __name__ == "__main__":
    sys.exit(main())
