"""Random histories of the KV-cache managers of vLLM 0.32 and 0.33, block for block (made by record_histories.py).

Field reports B12, B13 and D08: EAGLE with windows and states, sparse retention, drafts, small pools.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.parity.recorded import Recorded, read_jsonl

GOLDEN = Path(__file__).parents[1] / "golden"
# The second file has keys that look ahead, as vLLM 0.33 makes them for EAGLE and MTP.
FILES = (GOLDEN / "histories.jsonl.gz", GOLDEN / "histories_0_33.jsonl.gz")


def histories() -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each recorded history: its header and its operations."""
    found: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    for line in (line for path in FILES for line in read_jsonl(path)):
        if line.get("type") == "header":
            found.append((line, []))
        else:
            found[-1][1].append(line)
    return found


def name_of(history: tuple[dict[str, Any], list[dict[str, Any]]]) -> str:
    header, _ = history
    kinds = "+".join(f"{group['kind']}{group['block_size']}" for group in header["groups"])
    drafts = "-eagle" * header["use_eagle"] + "-lookahead" * (header.get("num_lookahead_tokens", 0) > 0)
    return f"{header['seed']}-{kinds}{drafts}-retention{header['retention_interval']}"


@pytest.mark.parametrize("history", histories(), ids=name_of)
def test_history_reproduces_block_for_block(history) -> None:
    header, operations = history
    recorded = Recorded(header)
    recorded.run(operations)
    assert recorded.compared == len(operations)
    assert recorded.log.replay().snapshot() == recorded.allocator.state.snapshot()
