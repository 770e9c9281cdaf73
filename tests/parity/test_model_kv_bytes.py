"""KV bytes of well-known models, to the byte, from each row's own fields: one test per row of model_kv_bytes.jsonl.

Of rows of kinds dsa_mla and deepseek_v4_hybrid, `indexer` and `total` are superseded by field report A18: they are one
calculator's figures, with the indexer's keys in the cache's precision, or in 4 bits without scales. Servers store 128
fp8 elements and one fp32 scale, 132 bytes for each key, whatever the cache dtype. `kv` counts as it is.
"""

import json
from typing import Any

import pytest
from kvledger.core.models.catalog import catalogue_name
from kvledger.core.models.geometry import ModelGeometry, builtin_geometry, geometry_from_description

from tests.parity.golden import golden_dir

INDEXER_KEY_BYTES = 128 + 4
DTYPE_OF_PRECISION = {"bf16_fp16": "bf16", "fp8_int8": "fp8", "fp4_int4": "fp4", "fp32": "fp32"}


def _rows() -> list[Any]:
    path = golden_dir() / "model_kv_bytes.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.strip()]
    return [pytest.param(row, id=row["name"]) for row in rows]


def _keys(row: dict[str, Any], tokens: int) -> int:
    """Keys that the indexers of all layers store."""
    fields, count = row["fields"], row["fields"]["num_hidden_layers"]
    if row["kind"] == "dsa_mla":
        return fields.get("indexer_full_layers", count) * tokens
    return fields["compress_ratios"][:count].count(4) * (tokens // 4)


def _check(geometry: ModelGeometry, row: dict[str, Any]) -> None:
    for key, expected in row["kv_bytes"].items():
        precision, tokens, *with_state = key.split("/")
        found = geometry.sequence_bytes(int(tokens), DTYPE_OF_PRECISION[precision])
        total = found.total + found.state if with_state else found.total
        if row["kind"] in ("dsa_mla", "deepseek_v4_hybrid"):
            indexer = _keys(row, int(tokens)) * INDEXER_KEY_BYTES
            expected = {**expected, "indexer": indexer, "total": expected["kv"] + indexer}
        assert total == expected["total"], key
        assert found.indexer == expected["indexer"], key
        assert total - found.indexer == expected["kv"], key


@pytest.mark.parametrize("row", _rows())
def test_kv_bytes_follow_from_the_rows_own_fields(row: dict[str, Any]) -> None:
    _check(geometry_from_description(row, row["name"], f"model_kv_bytes.jsonl: {row['name']}"), row)


@pytest.mark.parametrize("row", _rows())
def test_kv_bytes_of_the_built_in_model_are_the_same(row: dict[str, Any]) -> None:
    if catalogue_name(row["name"]) is None:
        pytest.skip(f"{row['name']} is not built in; its own fields are checked above")
    geometry = builtin_geometry(row["name"])
    _check(geometry, row)
    assert geometry.max_position_embeddings == row["max_position_embeddings"]
