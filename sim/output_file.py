"""A file that a run leaves behind: written beside its place, and put there whole when the run has ended."""

import contextlib
import io
import os
import stat
from pathlib import Path
from typing import Any

from ..core.errors import InputError


class _CheckedFile(io.FileIO):
    """A file whose failed writes name the option that asked for it."""

    def __init__(self, path: Path, option: str) -> None:
        super().__init__(path, "wb")
        self._option = option

    def write(self, data: Any, /) -> int | None:
        """Write some of the bytes. Raises InputError where the system takes none, such as on a full disk."""
        try:
            return super().write(data)
        except OSError as error:
            raise InputError(
                f"{self._option}: {error.strerror} while writing beside its place; nothing was changed there"
            ) from error


class OutputFile:
    """Open for writing from the start, so that a place that cannot be written is known before the run.

    Attributes:
        option: the option that asked for it, as error messages name it.
        path: where it will stand, symbolic links followed.
        stream: takes the bytes.
    """

    def __init__(self, option: str, name: str) -> None:
        """Create the file beside its place.

        Raises:
            InputError: that is no place for a file, or it cannot be written.
        """
        self.option = option
        self.path = Path(name).resolve()
        if self.path.exists() and not self.path.is_file():
            raise InputError(f"{option} {name}: there is something that is not a file; name a file")
        self._partial = self.path.with_name(f".{self.path.name}.{os.getpid()}.partial")
        try:
            self.stream = io.BufferedWriter(_CheckedFile(self._partial, option))
        except FileNotFoundError:
            raise InputError(f"{option} {name}: there is no folder {self.path.parent}; create it first") from None
        except OSError as error:
            raise InputError(f"{option} {name} cannot be written: {error.strerror}") from None

    def close(self) -> None:
        """Write what is buffered."""
        self.stream.close()

    def publish(self) -> None:
        """Put the closed file in its place, over one that is there (whose permissions it takes).

        Raises:
            InputError: the folder does not let it.
        """
        try:
            if self.path.exists():
                self._partial.chmod(stat.S_IMODE(self.path.stat().st_mode))
            self._partial.replace(self.path)
        except OSError as error:
            raise InputError(f"{self.option} {self.path} cannot be put in place: {error.strerror}") from error

    def discard(self) -> None:
        """Leave nothing behind; a file that was there stays as it was."""
        with contextlib.suppress(OSError, InputError):
            self.stream.close()
        self._partial.unlink(missing_ok=True)
