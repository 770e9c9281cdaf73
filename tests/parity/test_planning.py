"""vLLM 0.32's planner, number for number: one test per line of planning.jsonl."""

import json
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from kvledger.core.errors import KVLedgerError
from kvledger.core.planner.cache_dtype import CacheFormat, ScaleStorage, cache_format
from kvledger.core.planner.inputs import PlanInputs
from kvledger.core.planner.layout import KVCacheGroup, KVCacheLayout, KVCacheTensor
from kvledger.core.planner.plan import KVCachePlan, plan_kv_cache
from kvledger.core.planner.specs import (
    ChunkedLocalSpec,
    CompressedStateSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaLikeSpec,
    MLASpec,
    OpaqueSpec,
    SlidingWindowSpec,
    StateArray,
)
from kvledger.core.planner.verdict import PlanCondition, PlanRefusedError

Record = dict[str, Any]

OPAQUE_BYTES = {"fp8_ds_mla": 656}
ATTENTION_CLASSES = {
    "full": FullAttentionSpec,
    "sliding": SlidingWindowSpec,
    "chunked": ChunkedLocalSpec,
    "cross": CrossAttentionSpec,
    "sliding_mla": SlidingWindowSpec,
}


def _cases() -> list[Any]:
    root = os.environ.get("KVLEDGER_GOLDEN_DIR") or Path(__file__).parents[1] / "golden"
    path = Path(root) / "planning.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.strip()]
    return [pytest.param(record, id=record["case"]) for record in records]


def _spec(record: Record) -> KVCacheSpec:
    """The spec of a record; a field that is not understood fails the test rather than going unnoticed."""
    fields = dict(record)
    kind = fields.pop("kind")
    if kind == "mamba":
        return _state_spec(fields)
    stored = _format(fields)
    if kind == "mla":
        return _latent_spec(fields, stored)
    if "state_content_bytes" in fields:
        # An opaque format of several heads: all of them together are one packed token.
        heads = fields.pop("num_kv_heads", 1)
        return _opaque_spec(fields, heads * fields.pop("state_content_bytes"))
    if kind == "sliding_mla":
        fields = {"num_kv_heads": 1, **fields, "head_size_v": 0}
    return ATTENTION_CLASSES[kind](**fields, dtype=stored.dtype, scales=stored.scales)


def _format(fields: Record) -> CacheFormat:
    dtype, mode = fields.pop("dtype"), fields.pop("kv_quant_mode", None)
    if mode in (None, "none", "fp8_per_tensor"):
        return CacheFormat(dtype)
    known: dict[str, ScaleStorage | None] = {mode: cache_format(mode).scales}
    return CacheFormat(cache_format(mode).dtype, known[mode])


def _latent_spec(fields: Record, stored: CacheFormat) -> KVCacheSpec:
    cache_dtype, alignment = fields.pop("cache_dtype_str", None), fields.pop("alignment", None)
    fields.pop("num_kv_heads", None)
    opaque_bytes = fields.pop("state_content_bytes", OPAQUE_BYTES.get(cache_dtype))
    tokens_per_state = fields.pop("tokens_per_state", 1)
    spec: KVCacheSpec
    if opaque_bytes is not None:
        spec = _opaque_spec(fields, opaque_bytes)
    elif tokens_per_state > 1:
        spec = CompressedStateSpec(
            **fields, tokens_per_state=tokens_per_state, dtype=stored.dtype, scales=stored.scales
        )
    else:
        spec = MLASpec(**fields, dtype=stored.dtype, scales=stored.scales)
    if alignment is not None and spec.page_size_bytes % alignment:
        spec = spec.with_page_size(-(-spec.page_size_bytes // alignment) * alignment)
    return spec


def _opaque_spec(fields: Record, opaque_bytes: int) -> OpaqueSpec:
    fields.pop("head_size", None)
    return OpaqueSpec(**fields, opaque_bytes_per_token=opaque_bytes)


def _state_spec(fields: Record) -> MambaLikeSpec:
    fields.pop("mamba_cache_mode", None)
    shapes, dtypes = fields.pop("shapes"), fields.pop("dtypes")
    states = tuple(StateArray(tuple(shape), dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
    return MambaLikeSpec(**fields, states=states)


def _inputs(record: Record) -> PlanInputs:
    given = dict(record)
    specs = {name: _spec(fields) for name, fields in given.pop("specs").items()}
    workers = given.pop("workers")
    inputs = PlanInputs(
        layer_specs={layer: specs[name] for layer, name in given.pop("layers")},
        available_bytes=tuple(given.pop("available_bytes")),
        rank_layers=None if workers is None else tuple(tuple(names) for names in workers),
        max_model_len=given.pop("max_model_len"),
        auto_fit_max_model_len=given.pop("auto_fit"),
        enable_prefix_caching=given.pop("prefix_caching"),
        block_size=given.pop("block_size"),
        max_in_flight_tokens=given.pop("max_in_flight"),
        max_encoder_tokens=given.pop("max_encoder"),
        decode_context_parallel_size=given.pop("dcp"),
        state_cache_mode=given.pop("mamba_mode"),
        layout=KVCacheLayout[given.pop("layout")],
        disable_hybrid_kv_cache_manager=given.pop("disable_hybrid"),
        num_gpu_blocks_override=given.pop("override"),
        validate_override=False,
    )
    # Heads are already divided and the layers already dealt out; retention is the allocator's affair.
    for unused in ("tp", "pp", "retention"):
        given.pop(unused)
    assert not given, f"inputs that the test does not understand: {sorted(given)}"
    return inputs


def _group(group: KVCacheGroup, specs_by_layer: dict[str, Record]) -> Record:
    record: Record = {
        "layers": list(group.layer_names),
        "kind": group.kind,
        "block_size": group.block_size,
        "page_size_bytes": group.page_size_bytes,
    }
    if group.is_uniform_type:
        pages = [spec.page_size_bytes for spec in group.layer_specs]
        record["per_layer_page_size_bytes"] = dict(zip(group.layer_names, pages, strict=True))
        return record
    source = specs_by_layer[group.layer_names[0]]
    if group.kind == _spec(source).kind:
        # The recorded names are coarser than ours: an opaque or compressed latent is "mla" there.
        record["kind"] = source["kind"]
    if not isinstance(group.spec, MambaLikeSpec):
        record |= {"num_kv_heads": source.get("num_kv_heads", 1), "head_size": source["head_size"]}
    for field in ("sliding_window", "attention_chunk_size", "page_size_padded"):
        record[field] = getattr(group.spec, field, None)
    return _given(record)


def _given(record: Record) -> Record:
    """The record without fields that are absent by value."""
    return {field: value for field, value in record.items() if value is not None}


def _tensor(tensor: KVCacheTensor) -> Record:
    return {
        "size": tensor.size_bytes,
        "layers": list(tensor.layers),
        "layer_stride": tensor.layer_stride_bytes,
        "block_stride": tensor.block_stride_bytes,
        "offset": tensor.offset_bytes,
    }


def _check_refusal(plan: KVCachePlan, error: str) -> None:
    with pytest.raises(PlanRefusedError) as refused:
        plan.require_fits()
    assert refused.value.condition == error
    assert refused.value.shortfall_bytes > 0


@pytest.mark.parametrize("record", _cases())
def test_planning_is_vllms(record: Record) -> None:
    given, expected = record["inputs"], dict(record["outputs"])
    error = expected.pop("error", None)
    if error is not None and error not in list(PlanCondition):
        # Layers that cannot be planned at all: vLLM asserts, we refuse.
        with pytest.raises(KVLedgerError):
            plan_kv_cache(_inputs(given)).require_fits()
        return
    expected["groups"] = [_given(group) for group in expected["groups"]]
    pages = {name: _spec(fields).page_size_bytes for name, fields in given["specs"].items()}
    specs_by_layer = {layer: given["specs"][name] for layer, name in given["layers"]}
    plan = plan_kv_cache(_inputs(given))
    actual: Record = {
        "spec_page_size_bytes": pages,
        "groups": [_group(group, specs_by_layer) for group in plan.groups],
        "bytes_per_block": [rank.bytes_per_block for rank in plan.ranks],
        "num_blocks_before_min": [rank.num_blocks_alone for rank in plan.ranks],
        "request_bytes_at_max_model_len": [rank.request_bytes for rank in plan.ranks],
        "estimated_max_model_len": [rank.largest_max_model_len for rank in plan.ranks],
        "blocks_per_request_at_max_model_len": [
            Fraction(rank.request_bytes, rank.bytes_per_block) for rank in plan.ranks
        ],
    }
    if error is not None:
        _check_refusal(plan, error)
    else:
        actual |= {
            "max_model_len_after": plan.max_model_len,
            "num_blocks": plan.num_blocks,
            "kv_cache_size_tokens": plan.kv_cache_size_tokens,
            "max_concurrency": plan.max_concurrency,
            "max_concurrency_2dp": f"{plan.max_concurrency:.2f}",
            "tensors": [[_tensor(tensor) for tensor in config.tensors] for config in plan.configs()],
            "scheduler_block_size": plan.scheduler_block_size,
            "hash_block_size": plan.hash_block_size,
            "needs_zeroing": plan.needs_zeroing,
        }
    assert actual == expected
