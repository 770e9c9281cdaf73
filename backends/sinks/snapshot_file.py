"""Snapshots on disk: the plain data of `core.snapshot` as compressed JSON behind a line with its checksum."""

import json
import zlib
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from ...core.errors import CorruptLedgerError
from ...core.events import PoolCreated
from ...core.ledger_state import LedgerState
from ...core.snapshot import restore_snapshot, take_snapshot
from .arrow_stream import write_whole
from .errors import LogDamagedError
from .log_keys import decode_key, encode_key

_TITLE: Final = b"kvledger snapshot 1"


def save_snapshot(path: Path, state: LedgerState) -> None:
    """Write the state; the file appears whole or not at all."""
    plain = take_snapshot(state)
    plain["copies"] = [
        [[encode_key(key).decode("latin-1"), *blocks] for key, blocks in each] for each in plain["copies"]
    ]
    text = json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode()
    body = pa.compress(text, codec="zstd", asbytes=True)
    write_whole(path, b"%s %d crc32:%08x\n%s" % (_TITLE, len(text), zlib.crc32(body), body))


def load_snapshot(path: Path, created: PoolCreated) -> LedgerState:
    """The state in a file.

    Raises:
        LogDamagedError: the file is not what was written. It can be deleted: the state is then rebuilt from commits.
    """
    line, _, body = path.read_bytes().partition(b"\n")
    title, _, rest = line.rpartition(b" ")
    title, _, size = title.rpartition(b" ")
    hint = "delete it, and the state is rebuilt from the commits before it"
    if title != _TITLE or rest != b"crc32:%08x" % zlib.crc32(body) or not size.isdigit():
        raise LogDamagedError(path, f"the snapshot does not match its checksum; {hint}")
    try:
        plain: dict[str, Any] = json.loads(pa.decompress(body, int(size), codec="zstd", asbytes=True))
        plain["copies"] = [
            [(decode_key(key.encode("latin-1")), blocks) for key, *blocks in of_group] for of_group in plain["copies"]
        ]
        return restore_snapshot(created, plain)
    except (CorruptLedgerError, pa.ArrowException, OSError, ValueError) as error:
        raise LogDamagedError(path, f"the snapshot cannot be restored ({error}); {hint}") from error
