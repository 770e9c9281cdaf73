"""Layers, heads and exact parameter counts of the built-in models: one test per row of model_geometry.jsonl."""

import collections
import json
from typing import Any

import pytest
from kvledger.core.models.catalog import catalogue_name
from kvledger.core.models.geometry import builtin_geometry
from kvledger.core.models.layer_cache import AttentionCache

from tests.parity.golden import golden_dir


def _rows() -> list[Any]:
    path = golden_dir() / "model_geometry.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.strip()]
    return [pytest.param(row, id=row["name"]) for row in rows]


@pytest.mark.parametrize("row", _rows())
def test_model_geometry_of_the_built_in_model_is_exact(row: dict[str, Any]) -> None:
    if catalogue_name(row["name"]) is None:
        pytest.skip(f"{row['name']} is not built in")
    geometry = builtin_geometry(row["name"])
    assert geometry.parameters == row["parameters"]
    assert geometry.num_hidden_layers == row["num_hidden_layers"]
    assert geometry.hidden_size == row["hidden_size"]
    assert geometry.vocab_size == row["vocab_size"]
    assert geometry.max_position_embeddings == row["max_position_embeddings"]
    caches = [cache for layer in geometry.layers for cache in layer]
    assert all(isinstance(cache, AttentionCache) for cache in caches)
    assert {cache.num_kv_heads for cache in caches} == {row["num_key_value_heads"]}
    assert {cache.head_size for cache in caches} == {row["head_dim"]}
    types = collections.Counter("sliding_attention" if cache.sliding_window else "full_attention" for cache in caches)
    if row["layer_types"] is not None:
        assert types == row["layer_types"]
    elif row["sliding_window"] is not None:
        assert types == {"sliding_attention": row["num_hidden_layers"]}
    windows = {cache.sliding_window for cache in caches} - {None}
    assert windows == ({row["sliding_window"]} if row["sliding_window"] else set())
