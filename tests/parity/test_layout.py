"""vLLM 0.32's six packed layouts, stride for stride, and its block-table widths: one test per line of layout.jsonl."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from kvledger.core.errors import InputError
from kvledger.core.planner.layout import (
    KVCacheLayout,
    block_table_width,
    layer_shape_bytes,
    layout_strides_bytes,
)
from kvledger.core.planner.specs import FullAttentionSpec, KVCacheSpec, MLASpec

Record = dict[str, Any]


def _cases(is_table_width: bool) -> list[Any]:
    root = os.environ.get("KVLEDGER_GOLDEN_DIR") or Path(__file__).parents[1] / "golden"
    path = Path(root) / "layout.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.strip()]
    return [
        pytest.param(record, id="-".join(str(value) for value in list(record.values())[:5]))
        for record in records
        if (record.get("fn") == "block_table_width") == is_table_width
    ]


def _spec(name: str) -> KVCacheSpec:
    """`full.h8.d128.bf16.bs16.pad32768` -> the spec that it describes."""
    kind, *parts = name.split(".")
    numbers = {part.rstrip("0123456789"): int(part.lstrip("abcdefghijklmnopqrstuvwxyz")) for part in parts}
    dtype = next(part for part in parts if part.rstrip("0123456789") in ("bf", "fp"))
    if kind == "mla":
        return MLASpec(
            block_size=numbers["bs"], head_size=numbers["d"], dtype=dtype, page_size_padded=numbers.get("pad")
        )
    assert kind == "full"
    return FullAttentionSpec(
        block_size=numbers["bs"],
        num_kv_heads=numbers["h"],
        head_size=numbers["d"],
        dtype=dtype,
        page_size_padded=numbers.get("pad"),
    )


@pytest.mark.parametrize("record", _cases(is_table_width=False))
def test_layout_strides_are_vllms(record: Record) -> None:
    spec, layout = _spec(record["spec"]), KVCacheLayout[record["layout"]]
    kernel_block_size = record["kernel_block_size"]
    shape = layer_shape_bytes(spec, record["num_blocks"], kernel_block_size)
    assert spec.page_size_bytes == record["page_size_bytes"]
    assert list(shape) == record["shape_bytes_BHNC"]
    assert layout.is_block_outermost == record["block_outermost"]
    assert layout.is_block_compact == record["block_compact"]
    assert layout.is_layer_outermost == record["layer_outermost"]
    if "error" in record:
        with pytest.raises(InputError, match="padded"):
            layout_strides_bytes(spec, record["num_blocks"], record["num_layers"], layout, kernel_block_size)
    else:
        strides = layout_strides_bytes(spec, record["num_blocks"], record["num_layers"], layout, kernel_block_size)
        assert list(strides) == record["strides_LBHNC_bytes"]


@pytest.mark.parametrize("record", _cases(is_table_width=True))
def test_layout_block_table_width_is_vllms(record: Record) -> None:
    assert block_table_width(record["max_num_blocks"], record["block_size"]) == record["out"]
