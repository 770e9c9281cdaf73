"""One writer a log: a lock that the kernel releases however its holder ends."""

import os
from pathlib import Path

from ...core.errors import MisuseError
from .errors import LogInUseError
from .log_names import LOCK


class WriterLock:
    """Held from construction until `release`; the file stays, it is the lock on it that counts."""

    def __init__(self, directory: Path) -> None:
        """Take the lock of a log.

        Raises:
            LogInUseError: another writer holds it.
            MisuseError: this system has no such locks.
        """
        try:
            import fcntl
        except ImportError:
            raise MisuseError("writing an event log needs POSIX file locks, which this system does not have") from None
        self._fd = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip()
            os.close(self._fd)
            raise LogInUseError(
                f"{directory} is being written by process {holder or 'unknown'}; a log has one writer at a time"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        """Let another writer in."""
        os.close(self._fd)
