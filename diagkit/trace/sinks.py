"""Where the lines of a trace go: a file, memory, or nowhere."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from stat import S_ISREG
from typing import Protocol


class Sink(Protocol):
    """Where lines go. ``write`` may return a note about what befell it on the way."""

    def write(self, line: bytes) -> str | None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


class MemorySink:
    """Keeps the lines; for a live look that leaves no file behind."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def write(self, line: bytes) -> None:
        self.lines.append(line)

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


class NullSink:
    """Goes nowhere; for a recorder whose folder cannot be written, and whose job must not mind."""

    def write(self, line: bytes) -> None:
        pass

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


class CappedSink:
    """Lets another sink grow to a size. Beyond it only failures, and what says how the trace ended, get through."""

    #: Failures written beyond the cap; more would be the same ones again.
    FAILURES = 20

    def __init__(self, inner: Sink, limit: int) -> None:
        self._inner = inner
        self._limit = limit
        self._size = 0
        self._failures = 0
        self.full = False

    def write(self, line: bytes) -> str | None:
        """Appends the line; the note that is returned is the marker in the trace.

        Raises:
            OSError: the cap is reached and the line can be done without.
        """
        if self.full and not self._vital(line):
            raise OSError(errno.EFBIG, f"the size cap of {self._limit:,} bytes is reached")
        note = self._inner.write(line)
        self._size += len(line)
        if self.full or self._size < self._limit:
            return note
        self.full = True
        return f"the size cap of {self._limit:,} bytes is reached: from here on only failures and the end are written"

    def _vital(self, line: bytes) -> bool:
        head = line[:200]
        if b'"kind":"failure"' in head:
            self._failures += 1
            return self._failures <= self.FAILURES
        return b'"ev":"moment"' not in head

    def sync(self) -> None:
        self._inner.sync()

    def close(self) -> None:
        self._inner.close()


class FileSink:
    """Unbuffered appends to one file, by the process that opened it alone: a forked child writes nothing.

    A job may close descriptors that it did not open, and the number may then belong to a file of its own. So the file
    behind the descriptor is compared before each use: a stranger's is neither written nor closed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._owner = os.getpid()
        self._torn = False
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0), 0o644)
        stat = os.fstat(self._file)
        self._identity = (stat.st_dev, stat.st_ino)
        self._linked = stat.st_nlink > 0  # some network file systems never count links
        self._regular = S_ISREG(stat.st_mode)
        self._first = b""  # how the file begins: a number of an inode is soon used again
        self._size = stat.st_size

    def write(self, line: bytes) -> str | None:
        """Appends the line; what befell it on the way, None for nothing.

        Raises:
            OSError: it could not be written, or not whole.
        """
        if os.getpid() != self._owner:
            return None
        note = self._reach()
        if self._torn:
            line = b"\n" + line  # what a full disk or an interrupt left of an earlier line must not swallow this one
        done = 0
        self._torn = True
        try:
            while done < len(line):
                done += os.write(self._file, line[done:])
        finally:
            self._size += done
            if len(self._first) < 256:
                self._first = (self._first + line[:done])[:256]
        self._torn = False
        return note

    def sync(self) -> None:
        if os.getpid() == self._owner and self._stat() is not None:
            os.fsync(self._file)

    def close(self) -> None:
        if os.getpid() == self._owner and self._stat() is not None:
            os.close(self._file)

    def _stat(self) -> os.stat_result | None:
        """What is behind the descriptor, None where that is not our file."""
        try:
            stat = os.fstat(self._file)
        except OSError:
            return None
        return stat if self._is_ours(stat) else None

    def _is_ours(self, stat: os.stat_result) -> bool:
        return (stat.st_dev, stat.st_ino) == self._identity and (stat.st_size >= self._size or not self._regular)

    def _reach(self) -> str | None:
        """Makes sure that the descriptor leads to our file and that somebody can find it there."""
        stat = self._stat()
        note = None
        if stat is None:
            file = os.open(self.path, os.O_RDWR | os.O_APPEND | getattr(os, "O_CLOEXEC", 0))
            stat = os.fstat(file)
            if not self._is_ours(stat) or (self._regular and os.pread(file, len(self._first), 0) != self._first):
                os.close(file)
                raise OSError(errno.ESTALE, "another file is in its place", str(self.path))
            self._file = file
            note = "the job closed the trace's file; it was opened again"
        if self._linked and stat.st_nlink == 0:
            raise OSError(errno.ENOENT, "the file was removed", str(self.path))
        return note
