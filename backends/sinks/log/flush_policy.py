"""When commits reach the disk: said by whoever opens the log, never assumed."""

import attrs

from ....core.errors import InputError


@attrs.frozen
class FlushPolicy:
    """Give exactly one of the two.

    Attributes:
        every_commits: write when this many commits have gathered; 1: before the command returns.
        every_ms: a thread writes what has gathered, this often. A killed process loses at most what gathered since.
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
                f"a flush policy is every_commits or every_ms, one of them; given are {self.every_commits} and "
                f"{self.every_ms}"
            )
        for name in ("every_commits", "every_ms", "max_gathered_rows"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InputError(f"{name} must be above 0, not {value}")

    @classmethod
    def parse(cls, text: str, fsync: bool = False) -> "FlushPolicy":
        """`commit`, `100commits` or `50ms`, as the command line spells it."""
        try:
            if text.endswith("ms"):
                return cls(every_ms=float(text.removesuffix("ms")), fsync=fsync)
            return cls(every_commits=1 if text == "commit" else int(text.removesuffix("commits")), fsync=fsync)
        except ValueError as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"a flush policy is like commit, 100commits or 50ms, not {text!r}") from None
