"""`generate` with its cache in the pool: the same tokens, logits and cached bytes as with `DynamicCache`."""

import pytest

torch = pytest.importorskip("torch", reason="live serving needs torch")
transformers = pytest.importorskip("transformers", reason="real models need transformers")

from kvledger.backends.serving import LedgerCache  # noqa: E402
from kvledger.core import DoesNotFitError, InputError, MisuseError  # noqa: E402
from kvledger.core.events import BlockCopied, BlocksShared  # noqa: E402

from tests.backends.serving.model_families import FAMILIES, WINDOW  # noqa: E402
from tests.backends.serving.real_models import (  # noqa: E402
    BLOCK_SIZE,
    cache_keyword,
    make_backend_and_allocator,
    prompt,
    tiny_model,
)

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

PROMPT_TOKENS = 19
# A batch of three, two of them padded on the left.
IDS = torch.tensor([prompt(PROMPT_TOKENS, seed=seed) for seed in range(3)])
MASK = torch.ones_like(IDS)
MASK[1, :6] = MASK[2, :13] = 0
IDS[MASK == 0] = 0

MODES = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.3, "top_k": 40},
    "beam": {"do_sample": False, "num_beams": 3},
    "beam-sampled": {"do_sample": True, "num_beams": 2},
    "several sequences": {"do_sample": True, "num_return_sequences": 2},
    "chunked prefill": {"do_sample": False, "prefill_chunk_size": 7},
}


def ledger_cache(model, **settings):
    backend, allocator, log = make_backend_and_allocator(model, **{"num_blocks": 160, "max_num_reqs": 16} | settings)
    cache = LedgerCache(model, backend, allocator)
    cache.log = log
    return cache


def generate(model, cache, ids=IDS, mask=MASK, max_new_tokens=14, seed=3, **mode):
    torch.manual_seed(seed)
    has_logits = "prompt_lookup_num_tokens" not in mode
    keyword = {cache_keyword(model): cache}
    return model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=max_new_tokens,
        return_dict_in_generate=True,
        output_logits=has_logits,
        **keyword,
        **mode,
    )


def assert_same(model, mine, theirs, cache, dynamic):
    assert torch.equal(mine.sequences, theirs.sequences)
    for my_logits, their_logits in zip(mine.logits or (), theirs.logits or (), strict=True):
        assert torch.equal(my_logits, their_logits)
    assert cache.get_seq_length() == dynamic.get_seq_length()
    for my_layer, their_layer in zip(cache.layers, dynamic.layers, strict=True):
        assert torch.equal(my_layer.keys, their_layer.keys)
        assert torch.equal(my_layer.values, their_layer.values)


def is_empty(cache):
    return cache.allocator.num_free_blocks == cache.allocator.config.num_blocks - 1


@pytest.mark.parametrize("mode", MODES)
def test_generate_is_bit_equal_to_its_own_cache(family, mode):
    model = tiny_model(family)
    dynamic = transformers.DynamicCache(config=model.config)
    theirs = generate(model, dynamic, **MODES[mode])
    with ledger_cache(model) as cache:
        mine = generate(model, cache, **MODES[mode])
        assert_same(model, mine, theirs, cache, dynamic)
    assert is_empty(cache)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gemma2-windowed"])
def test_generate_is_bit_equal_with_fused_attention(family):
    model = tiny_model(family)  # Gemma 2 has softcaps, which torch's fused attention does not
    model.set_attn_implementation("sdpa")
    dynamic = transformers.DynamicCache(config=model.config)
    theirs = generate(model, dynamic, do_sample=False)
    with ledger_cache(model) as cache:
        assert_same(model, generate(model, cache, do_sample=False), theirs, cache, dynamic)


def test_drafts_from_the_prompt_are_taken_back_where_they_are_wrong(family):
    model = tiny_model(family)
    # A prompt that repeats itself has drafts to offer; few of them are right.
    ids = torch.tensor([prompt(5, seed=20) * 3])
    mode = {"prompt_lookup_num_tokens": 4, "do_sample": False, "mask": torch.ones_like(ids), "max_new_tokens": 20}
    dynamic = transformers.DynamicCache(config=model.config)
    theirs = generate(model, dynamic, ids, **mode)
    cache = ledger_cache(model)
    crops = []
    crop = cache.crop
    cache.crop = lambda tokens_to_remove: (crops.append(tokens_to_remove), crop(tokens_to_remove))
    mine = generate(model, cache, ids, **mode)
    assert_same(model, mine, theirs, cache, dynamic)
    assert min(crops) < 0
    cache.reset()
    assert is_empty(cache)


def test_beams_share_blocks_and_copy_what_they_write():
    model = tiny_model("llama")
    with ledger_cache(model) as cache:
        generate(model, cache, num_beams=3, do_sample=False)
        events = [event for commit in cache.log for event in commit.events]
        assert any(isinstance(event, BlocksShared) for event in events)
        assert any(isinstance(event, BlockCopied) for event in events)
        # Nine sequences of 32 tokens that share nothing would hold 9 x 8 blocks.
        held = cache.allocator.config.num_blocks - 1 - cache.allocator.num_free_blocks
        assert held < 9 * -(-cache.num_tokens // BLOCK_SIZE)
        assert len(set(cache.rows)) == 9


def test_a_batch_needs_no_more_rows_than_it_has_sequences():
    model = tiny_model("llama")
    with ledger_cache(model, max_num_reqs=9) as cache:
        mine = generate(model, cache, num_beams=3, do_sample=False)
        theirs = generate(model, transformers.DynamicCache(config=model.config), num_beams=3, do_sample=False)
        assert torch.equal(mine.sequences, theirs.sequences)


def test_a_window_gives_its_blocks_back_while_it_generates():
    model = tiny_model("mistral-windowed")
    with ledger_cache(model) as cache:
        generate(model, cache, IDS[:1], MASK[:1], max_new_tokens=40, do_sample=False)
        held = cache.allocator.config.num_blocks - 1 - cache.allocator.num_free_blocks
        assert cache.num_tokens == PROMPT_TOKENS + 39
        assert held <= -(-(WINDOW - 1) // BLOCK_SIZE) + 1


def test_a_conversation_goes_on_in_the_same_cache(family):
    model = tiny_model(family)
    dynamic, outputs = transformers.DynamicCache(config=model.config), []
    cache = ledger_cache(model)
    for each in (dynamic, cache):
        first = generate(model, each, IDS[:1], MASK[:1], do_sample=False).sequences
        longer = torch.cat([first.cpu(), torch.tensor([prompt(4, seed=30)])], dim=1)
        outputs.append(generate(model, each, longer, torch.ones_like(longer), do_sample=False).sequences)
    assert torch.equal(*outputs)
    assert cache.num_tokens == PROMPT_TOKENS + 14 + 4 + 13


def test_sequences_are_selected_and_repeated_as_by_the_model_s_own_cache():
    model = tiny_model("qwen3")
    cache, dynamic = ledger_cache(model), transformers.DynamicCache(config=model.config)
    for each in (cache, dynamic):
        generate(model, each, max_new_tokens=3, do_sample=False)
        each.batch_repeat_interleave(2)
        each.batch_select_indices(torch.tensor([5, 0, 0, 2]))
    assert torch.equal(cache.layers[1].keys, dynamic.layers[1].keys)
    step = {"input_ids": torch.tensor([[1], [2], [3], [4]]), "use_cache": True}
    with torch.no_grad():
        mine, theirs = (model(**step, **{cache_keyword(model): each}).logits for each in (cache, dynamic))
    assert torch.equal(mine, theirs)


def test_the_cache_is_usable_again_after_a_reset():
    model = tiny_model("gemma3-windowed")
    cache = ledger_cache(model)
    first = generate(model, cache, do_sample=False).sequences
    cache.reset()
    assert is_empty(cache)
    assert cache.layers[0].keys is None
    assert torch.equal(generate(model, cache, do_sample=False).sequences, first)


def test_a_pool_that_is_too_small_is_refused_and_nothing_is_held():
    model = tiny_model("llama")
    cache = ledger_cache(model, num_blocks=12)
    with pytest.raises(DoesNotFitError, match="need blocks for 19 more each; 11 of 11 blocks are free"):
        generate(model, cache, do_sample=False)
    assert is_empty(cache)


def test_limits_are_refused_with_the_numbers():
    model = tiny_model("llama")
    with pytest.raises(DoesNotFitError, match="max_model_len is 10"):
        generate(model, ledger_cache(model, max_model_len=10), do_sample=False)
    with pytest.raises(InputError, match=r"3 sequences x 19 tokens .*prefill_chunk_size 10"):
        generate(model, ledger_cache(model, max_num_batched_tokens=30), do_sample=False)
    with pytest.raises(DoesNotFitError, match="batch of 3 sequences; 2 rows"):
        generate(model, ledger_cache(model, max_num_reqs=2), do_sample=False)
    cache = ledger_cache(model)
    generate(model, cache, do_sample=False)
    with pytest.raises(InputError, match="batch of 1 sequences for a cache of 3"):
        generate(model, cache, torch.ones(1, 40, dtype=torch.int64), torch.ones(1, 40, dtype=torch.int64))
    with pytest.raises(DoesNotFitError, match=r"24 sequences to fork; 13 rows \(max_num_reqs\) are free"):
        cache.batch_repeat_interleave(9)


def test_a_crop_beyond_what_is_there_is_refused():
    model = tiny_model("mistral-windowed")
    cache = ledger_cache(model)
    generate(model, cache, do_sample=False)
    with pytest.raises(InputError, match="give minus the number of tokens to remove, -32 to 0"):
        cache.crop(-33)
    with pytest.raises(InputError, match="minus the number"):
        cache.crop(2)
    with pytest.raises(MisuseError, match="has released the first"):
        cache.crop(-20)
    with pytest.raises(MisuseError, match="call crop of the cache"):
        cache.layers[0].crop(-1)


def test_a_cache_of_another_model_is_refused():
    backend, allocator, _ = make_backend_and_allocator(tiny_model("llama", num_hidden_layers=1))
    with pytest.raises(InputError, match=r"no cache for layers\.1\.attn"):
        LedgerCache(tiny_model("llama"), backend, allocator)
