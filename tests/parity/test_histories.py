"""Random histories of the KV-cache managers of vLLM 0.32 and 0.33, block for block (made by record_histories.py).

Field reports B12, B13 and D08: EAGLE with windows and states, sparse retention, drafts, small pools. `make parity` also
runs new histories through the vLLM installed here, if KVLEDGER_VLLM_PYTHON names an interpreter that has it.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.parity.recorded import Recorded, read_jsonl
from tests.parity.test_schedules import HAS_VLLM

GOLDEN = Path(__file__).parents[1] / "golden"
# The second file has keys that look ahead, as vLLM 0.33 makes them for EAGLE and MTP.
FILES = (GOLDEN / "histories.jsonl.gz", GOLDEN / "histories_0_33.jsonl.gz")


# Histories for each run that `make parity` asks for: they are shorter than schedules.
HISTORIES_PER_RUN = 15


def histories(*paths: Path) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each recorded history: its header and its operations."""
    found: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    for line in (line for path in paths for line in read_jsonl(path)):
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


@pytest.mark.parametrize("history", histories(*FILES), ids=name_of)
def test_history_reproduces_block_for_block(history) -> None:
    header, operations = history
    recorded = Recorded(header)
    recorded.run(operations)
    assert recorded.compared == len(operations)
    assert recorded.log.replay().snapshot() == recorded.allocator.state.snapshot()


def test_histories_are_those_of_the_vllm_installed_here(tmp_path) -> None:
    interpreter = os.environ.get("KVLEDGER_VLLM_PYTHON", "")
    if not interpreter or subprocess.run([interpreter, "-c", HAS_VLLM], check=False).returncode:
        pytest.skip("KVLEDGER_VLLM_PYTHON names no interpreter that has vLLM: `make parity` sets it")
    seed, runs = os.environ.get("KVLEDGER_PARITY_SEED", "0"), int(os.environ.get("KVLEDGER_PARITY_RUNS", "5"))
    path, recorder = tmp_path / "histories.jsonl.gz", Path(__file__).with_name("record_histories.py")
    command = [interpreter, str(recorder), str(path), "--seed", seed, "--count", str(HISTORIES_PER_RUN * runs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    differ: list[str] = []
    for history in histories(path):
        try:
            Recorded(history[0]).run(history[1])
        except AssertionError:
            differ.append(name_of(history))
    assert differ == []
