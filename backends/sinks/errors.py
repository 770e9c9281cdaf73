"""Errors of logs on disk. Each names the file and, if it can, the byte offset and the commit."""

from pathlib import Path

from ...core.errors import CorruptLedgerError, KVLedgerError, MisuseError


class LogDamagedError(CorruptLedgerError):
    """A file on disk is not what was written.

    Attributes:
        path: the file.
        offset: the first byte that may be wrong.
        commit: the first commit that is affected; None if unknown.
        reason: what is wrong, in words.
    """

    def __init__(self, path: Path, reason: str, offset: int = 0, commit: int | None = None) -> None:
        self.path, self.reason, self.offset, self.commit = path, reason, offset, commit
        affected = "" if commit is None else f", from commit {commit} on"
        super().__init__(f"{path}: {reason} (byte {offset}{affected})")


class LogInUseError(MisuseError):
    """Another process is writing this log."""


class LogWriteError(KVLedgerError):
    """The operating system refused a write. The log is unchanged, and the commits are kept in memory."""
