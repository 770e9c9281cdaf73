"""Recorded runs of vLLM 0.32's KV-cache core, operation by operation, id for id (reference: golden/ops)."""

from pathlib import Path

import pytest

from tests.parity.golden import golden_dir
from tests.parity.recorded import Recorded, read_jsonl

OPS_FILES = sorted((golden_dir() / "ops").glob("*.jsonl.gz"))


@pytest.mark.parametrize("path", OPS_FILES, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_recorded_ops_reproduce_id_for_id(path: Path, record_property) -> None:
    header, *operations = read_jsonl(path)
    recorded = Recorded(header)
    recorded.run(operations)
    assert recorded.compared == len(operations)
    record_property("ops_compared", recorded.compared)
    assert recorded.log.replay().snapshot() == recorded.allocator.state.snapshot()
