"""What the files of a log are called."""

from typing import Final

MANIFEST: Final = "manifest.json"
LOCK: Final = "lock"


def parquet_name(number: int) -> str:
    """The file of a closed segment."""
    return f"segment-{number:06}.parquet"


def stream_name(number: int) -> str:
    """The file of an open segment."""
    return f"segment-{number:06}.arrows"


def snapshot_name(number: int) -> str:
    """The file of the state at the start of a segment."""
    return f"snapshot-{number:06}.json.zst"
