"""When commits reach the disk. Needs no pyarrow, so that a command checks the option before anything is loaded."""

import attrs

from ....core.errors import InputError


@attrs.frozen
class FlushPolicy:
    """When commits reach the disk. Give either `every_commits` or `every_ms`.

    Attributes:
        every_commits: write after this many commits; 1 writes before the command returns.
        every_ms: a thread writes the gathered commits this often. A killed process loses at most those.
        fsync: whether a write waits for the device, so that it also survives a power cut.
        max_gathered_rows: write at the latest when this many events have gathered, so that memory stays bounded.
    """

    every_commits: int | None = None
    every_ms: float | None = None
    fsync: bool = False
    max_gathered_rows: int = 1 << 16

    def __attrs_post_init__(self) -> None:
        if (self.every_commits is None) == (self.every_ms is None):
            raise InputError(
                "a flush policy takes either every_commits or every_ms, not "
                f"every_commits={self.every_commits} and every_ms={self.every_ms}"
            )
        for name in ("every_commits", "every_ms", "max_gathered_rows"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InputError(f"{name} must be above 0, not {value}")

    @classmethod
    def parse(cls, text: str, fsync: bool = False) -> "FlushPolicy":
        """Parse `commit`, `100commits` or `50ms`, the command line's spellings."""
        try:
            if text.endswith("ms"):
                return cls(every_ms=float(text.removesuffix("ms")), fsync=fsync)
            return cls(every_commits=1 if text == "commit" else int(text.removesuffix("commits")), fsync=fsync)
        except ValueError as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"a flush policy is like commit, 100commits or 50ms, not {text!r}") from None
