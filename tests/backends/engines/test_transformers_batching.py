"""transformers' continuous batching generates the same tokens on our allocator, and finds more prefixes."""

import random

import pytest
from kvledger.backends.engines.transformers_batching import ledger_cache
from kvledger.core import EventLog, InputError
from kvledger.testing import check

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.torch


def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.3,
    )
    return transformers.LlamaForCausalLM(config).eval()


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(3)
    shared = [[rng.randrange(500) for _ in range(96)] for _ in range(6)]
    return [
        rng.choice(shared)[: rng.choice((32, 64, 96))] + [rng.randrange(500) for _ in range(rng.randrange(5, 40))]
        for _ in range(count)
    ]


def generated(num_blocks: int, count: int = 60) -> list[list[int]]:
    outputs = model().generate_batch(
        prompts(count),
        generation_config=transformers.GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=-1),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            page_size=16,
            num_blocks=num_blocks,
            max_batch_tokens=128,
            max_requests_per_batch=8,
            use_cuda_graph=False,
            use_async_batching=False,
            allow_block_sharing=True,
        ),
        progress_bar=False,
    )
    return [list(map(int, outputs[name].generated_tokens)) for name in sorted(outputs, key=lambda n: int(n[4:]))]


@pytest.fixture
def found_by_its_own(monkeypatch) -> dict[str, int]:
    """By request, the length of the prefix that the first lookup in transformers' own cache finds."""
    cache = transformers.generation.continuous_batching.cache.PagedAttentionCache
    search, found = cache.search_prefix_match, {}

    def searching(self, request_id, prompt_ids) -> int:
        length = search(self, request_id, prompt_ids)
        found.setdefault(request_id, length)
        return length

    monkeypatch.setattr(cache, "search_prefix_match", searching)
    return found


@pytest.mark.parametrize("num_blocks", [40, 200])
def test_the_same_tokens_are_generated_from_prefixes_found_in_the_cache(num_blocks: int, found_by_its_own) -> None:
    own = generated(num_blocks)
    log = EventLog()
    with ledger_cache(sinks=[log]) as made:
        assert generated(num_blocks) == own
    (cache,) = made
    assert len(own) == 60
    found, by_its_own = sum(cache.num_found_tokens.values()), sum(found_by_its_own.values())
    assert found > 500
    if num_blocks == 200:  # enough for every request of a batch
        assert found > by_its_own
    check(cache.ledger)
    assert log.verify().snapshot() == cache.ledger.state.snapshot()


def test_another_cache_of_transformers_is_refused(monkeypatch) -> None:
    from transformers.generation.continuous_batching import continuous_api

    class Other:
        pass

    monkeypatch.setattr(continuous_api, "PagedAttentionCache", Other)
    with pytest.raises(InputError, match=r"made for transformers 5\.24"), ledger_cache():
        pass
