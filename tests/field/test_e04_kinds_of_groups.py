"""E04: groups of latent attention are followed like full attention, and what we publish has the server's names of kinds
(llm-d-router#2362/#2363; AMD-AGI/Infera#98; dynamo#12169).
"""

import json
import sys

import pytest
from kvledger.backends.sinks.kv_events.content import ContentRegistry, ListedTokens, RequestContent
from kvledger.backends.sinks.kv_events.encoder import KVEventEncoder
from kvledger.backends.sinks.kv_events.schema import SPEC_KINDS, BlockStored, decode_batch
from kvledger.core.cache_kinds import ChunkedLocal, CompressedState, FullAttention, SequenceState, SlidingWindow
from kvledger.core.events import BlocksCached, Commit, PoolCreated, RowsAssigned
from kvledger.core.keys.block_hash import block_hasher
from kvledger.core.keys.token_keys import TokenKeySource

from tests.field.kv_streams import stored_map

# vllm/v1/kv_cache_interface.py, KVCacheSpecKind, of vLLM 0.32
OF_SERVERS = {
    *("full_attention", "mla_attention", "sliding_window", "sliding_window_mla", "mamba", "chunked_local_attention"),
    *("sink_full_attention", "encoder_only_attention", "cross_attention", "unknown"),
}
PREFIX = {"full_attention", "mla_attention", "sink_full_attention"}


def turns(kind: str | None, group: int = 0):
    """A prompt, a later turn that finds it, and a block whose parent was never seen."""
    more = {"group_idx": group, "kv_cache_spec_kind": kind}
    return (
        (1.0, [stored_map([1, 2], **more)]),
        (10.0, [stored_map([3], parent=2, **more)]),
        (20.0, [stored_map([9], parent=77, **more)]),
    )


@pytest.mark.parametrize("kind", ["full_attention", "mla_attention", "sink_full_attention", None])
def test_e04_kinds_whose_hits_need_every_block_before_them_give_the_same(follow, kind) -> None:
    seen = follow(*turns(kind))
    assert seen.figures("requests", "hit_blocks", "orphans", "warnings") == (3, 2, 1, [])
    assert [(row["input_length"], row["hash_ids"]) for row in seen.rows] == [(8, [0, 1]), (12, [0, 1, 2]), (4, [3])]


@pytest.mark.parametrize("kind", sorted({*OF_SERVERS, "newer"} - PREFIX))
def test_e04_a_group_that_skips_blocks_tells_no_requests_apart_beside_one_that_does_not(follow, kind) -> None:
    pairs = zip(turns(kind), turns("mla_attention", 1), strict=True)
    both = [(ts, [*other, *latent]) for (ts, other), (_, latent) in pairs]
    seen = follow(*both, options=())
    assert seen.figures("num_blocks", "requests", "hit_blocks", "orphans", "warnings") == (8, 3, 2, 1, [])


def test_e04_where_no_group_tells_requests_apart_the_report_says_so(follow) -> None:
    seen = follow(*turns("mamba"))
    assert seen.figures("num_blocks", "requests", "orphans") == (4, 0, 0)
    (warning,) = seen["warnings"]
    assert "no requests are told apart" in warning
    assert "(mamba)" in warning


@pytest.mark.parametrize(
    "group, kind",
    [
        (FullAttention(4), "full_attention"),
        (CompressedState(4, 2), "mla_attention"),
        (SlidingWindow(4, 8), "sliding_window"),
        (ChunkedLocal(4, 8), "chunked_local_attention"),
        (SequenceState(4), "mamba"),
        (type("Own", (FullAttention,), {})(4), "unknown"),
    ],
)
def test_e04_what_is_published_is_a_kind_of_the_servers(group, kind: str) -> None:
    assert set(SPEC_KINDS) == OF_SERVERS
    tokens = list(range(4))
    keys = TokenKeySource(tokens, block_hasher(), 4)
    registry = ContentRegistry()
    registry.add("r", RequestContent(ListedTokens(tokens), keys))
    encoder = KVEventEncoder(registry)
    encoder.encode(
        Commit(0, (PoolCreated(32, (group,), 4, 64, True, 4, 4, "lru", "sha256"), RowsAssigned(("r",), (0,))))
    )
    cached = BlocksCached(0, (0,), (0,), (1,), (1,), (0,), (1,), tuple(keys.keys(0, 1)), (None,))
    (event,) = encoder.encode(Commit(1, (cached,)))
    assert isinstance(event, BlockStored)
    assert event.kv_cache_spec_kind == kind


@pytest.mark.parametrize(
    "model, kinds",
    [
        ("llama-3.1-8b", {"full_attention"}),
        ("deepseek-v3", {"mla_attention"}),
        ("deepseek-v3.2", {"mla_attention"}),
        ("qwen3.6-35b-a3b", {"full_attention", "mamba"}),
    ],
)
def test_e04_a_run_of_a_latent_model_is_published_as_a_server_would(tmp_path, model: str, kinds: set[str]) -> None:
    pytest.importorskip("pyarrow")
    from kvledger.backends.sinks.kv_events.file import read_kv_event_file
    from kvledger.sim.commands.cli import main

    trace, log, stream = tmp_path / "one.jsonl", tmp_path / "log", tmp_path / "stream.kve"
    trace.write_text(
        json.dumps({"timestamp": 0, "input_length": 8192, "output_length": 1, "hash_ids": list(range(16))})
    )
    commands = [
        ["replay", trace, "--model", model, "--gpu", "H200", "--tensor-parallel-size", 8, "--log", log, "--json"],
        ["log", "convert", log, stream, "--to", "kv-events"],
    ]
    for command in commands:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setattr(sys, "argv", ["kvledger", *map(str, command)])
            main()
        assert not ended.value.code
    events = [event for _, payload in read_kv_event_file(stream) for event in decode_batch(payload).events]
    assert {event.kv_cache_spec_kind for event in events if isinstance(event, BlockStored)} == kinds
