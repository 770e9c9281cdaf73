"""What can go wrong with a log on disk; each error names the file, and where it can the byte offset and the commit."""

from pathlib import Path

from ...core.errors import CorruptLedgerError, KVLedgerError, MisuseError


class LogDamagedError(CorruptLedgerError):
    """What is on disk is not what was written.

    Attributes:
        path: the file.
        offset: the byte from which on it cannot be believed.
        commit: the first commit that is affected; None where that cannot be known.
        reason: what is wrong, in words.
    """

    def __init__(self, path: Path, reason: str, offset: int = 0, commit: int | None = None) -> None:
        self.path, self.reason, self.offset, self.commit = path, reason, offset, commit
        affected = "" if commit is None else f", from commit {commit} on"
        super().__init__(f"{path}: {reason} (byte {offset}{affected})")


class LogInUseError(MisuseError):
    """Another process is writing this log."""


class LogWriteError(KVLedgerError):
    """The operating system did not take what was to be written. The log is as it was, the commits are still held."""
