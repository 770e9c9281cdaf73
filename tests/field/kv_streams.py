"""KV events as servers send them, for the field reports E03 to E09, and what `kvledger follow` says of them."""

import json
from collections.abc import Sequence
from typing import Any


def digest(number: int) -> bytes:
    """The hash of a block."""
    return bytes([number]) * 32


def stored_map(
    blocks: Sequence[int], parent: int | None = None, size: int = 4, medium: str | None = "GPU", **more: Any
) -> dict[str, Any]:
    """A `BlockStored` as vLLM 0.32 sends it, with `size` tokens for each block unless `token_ids` are given."""
    return {
        "type": "BlockStored",
        "block_hashes": [digest(block) for block in blocks],
        "parent_block_hash": None if parent is None else digest(parent),
        "token_ids": [100 * block + place for block in blocks for place in range(size)],
        "block_size": size,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
        **more,
    }


def removed_map(blocks: Sequence[int], medium: str | None = "GPU", **more: Any) -> dict[str, Any]:
    """A `BlockRemoved` as vLLM 0.32 sends it."""
    return {"type": "BlockRemoved", "block_hashes": [digest(block) for block in blocks], "medium": medium, **more}


class Followed:
    """What `kvledger follow` said of a stream: exit code, standard error, last report and trace."""

    def __init__(self, code: int, out: str, err: str, rows: list[dict[str, Any]]) -> None:
        self.code, self.err, self.rows = code, err, rows
        self.out = out.splitlines()

    def __getitem__(self, name: str) -> Any:
        """A figure of the last report."""
        assert self.code == 0, self.err
        return json.loads(self.out[-1])[name]

    def figures(self, *names: str) -> tuple[Any, ...]:
        return tuple(self[name] for name in names)
