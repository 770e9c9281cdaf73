"""From a transformers model to a plan: groups of layers, and what is refused before anything is allocated."""

import pytest

torch = pytest.importorskip("torch", reason="live serving needs torch")
transformers = pytest.importorskip("transformers", reason="real models need transformers")

from kvledger.backends import CacheArrangement, CudaBackend  # noqa: E402
from kvledger.backends.serving import (  # noqa: E402
    ModelRunner,
    kv_cache_config,
    register_paged_attention,
    served_layers,
    transformers_geometry,
)
from kvledger.backends.serving.model.attention import PagedBatch, paged_attention_forward  # noqa: E402
from kvledger.core import InputError, MisuseError  # noqa: E402
from kvledger.core.planner.layout import KVCacheLayout  # noqa: E402

from tests.backends.serving.model_families import FAMILIES, WINDOW  # noqa: E402
from tests.backends.serving.real_models import (  # noqa: E402
    BLOCK_SIZE,
    Alone,
    Pool,
    prompt,
    tiny_model,
)

pytestmark = pytest.mark.torch


def groups_of(family, **settings):
    geometry = transformers_geometry(tiny_model(family))
    return [
        (group.kind, len(group.layer_names))
        for group in kv_cache_config(geometry, block_size=4, **settings, num_blocks=2).groups
    ]


@pytest.mark.parametrize(
    ("family", "groups"),
    [
        ("llama", [("full", 2)]),
        ("gpt2", [("full", 2)]),
        ("qwen2", [("full", 2)]),
        ("mistral-windowed", [("sliding", 2)]),
        ("gemma3-windowed", [("sliding", 1), ("full", 1)]),
    ],
)
def test_layers_that_live_alike_share_a_group(family, groups):
    assert groups_of(family) == groups


def test_windowed_layers_can_be_sized_like_full_ones():
    assert groups_of("gemma3-windowed", disable_hybrid_kv_cache_manager=True) == [("full", 2)]
    assert [layer.window for layer in served_layers(transformers_geometry(tiny_model("gemma3-windowed")))] == [
        WINDOW,
        None,
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_page_holds_what_the_model_caches(family):
    """Heads and sizes of the plan against the keys that the model itself makes."""
    model = tiny_model(family)
    reference = Alone(model)
    reference.forward(prompt(6))
    group = kv_cache_config(transformers_geometry(model), block_size=BLOCK_SIZE, num_blocks=2).groups[0]
    layer = reference.cache.layers[0]
    _, num_kv_heads, _, head_size = layer.keys.shape
    assert (group.spec.num_kv_heads, group.spec.head_size) == (num_kv_heads, head_size)
    assert group.spec.page_size_bytes == 2 * BLOCK_SIZE * num_kv_heads * head_size * 4


def test_the_cache_is_of_the_weights_dtype_unless_another_is_asked_for():
    geometry = transformers_geometry(tiny_model("llama").to(torch.bfloat16))
    assert kv_cache_config(geometry, block_size=4, num_blocks=2).groups[0].spec.dtype == "bf16"
    assert (
        kv_cache_config(geometry, block_size=4, kv_cache_dtype="fp8", num_blocks=2).groups[0].spec.dtype == "fp8_e4m3"
    )


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: transformers.T5ForConditionalGeneration(
                transformers.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=32)
            ),
            "is an encoder and a decoder",
        ),
        (
            lambda: tiny_model("gpt2", add_cross_attention=True),
            "attends to another sequence",
        ),
        (
            lambda: tiny_model("gemma3-windowed", use_bidirectional_attention=True),
            "attends to later tokens",
        ),
        (
            lambda: transformers.GPTNeoXForCausalLM(
                transformers.GPTNeoXConfig(
                    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=32
                )
            ),
            "unknown architecture 'GPTNeoXForCausalLM'",
        ),
        (
            lambda: transformers.DeepseekV3ForCausalLM(
                transformers.DeepseekV3Config(
                    hidden_size=16,
                    intermediate_size=16,
                    moe_intermediate_size=8,
                    num_hidden_layers=1,
                    num_attention_heads=2,
                    num_key_value_heads=2,
                    q_lora_rank=8,
                    kv_lora_rank=8,
                    qk_rope_head_dim=4,
                    qk_nope_head_dim=4,
                    v_head_dim=4,
                    vocab_size=32,
                    first_k_dense_replace=1,
                )
            ),
            "layer 0 stores LatentCache",
        ),
    ],
    ids=["encoder and decoder", "cross attention", "bidirectional", "unknown", "latent"],
)
def test_a_model_that_cannot_be_served_is_refused_with_the_reason(make, reason):
    with pytest.raises(InputError, match=reason):
        transformers_geometry(make())


def test_layers_that_share_keys_and_values_are_refused():
    model = tiny_model("llama")
    model.config.num_kv_shared_layers = 1
    with pytest.raises(InputError, match=r"keys and values of earlier ones \(num_kv_shared_layers is 1\)"):
        transformers_geometry(model)


def test_a_backend_without_the_models_layers_is_refused():
    backend = CudaBackend(device="cpu", max_num_batched_tokens=8)
    config = kv_cache_config(transformers_geometry(tiny_model("gemma3-windowed")), num_blocks=4, block_size=4)
    backend.initialize(config)
    with pytest.raises(InputError, match=r"no cache for layers\.2\.attn"):
        ModelRunner(tiny_model("llama", num_hidden_layers=3), backend)


@pytest.mark.parametrize(
    ("arrangement", "layout"),
    [
        (CacheArrangement.FLASH_NHD, KVCacheLayout.LBNHC),
        (CacheArrangement.FLASH_HND, KVCacheLayout.LBHNC),
        (CacheArrangement.INTERLEAVED_NHD, KVCacheLayout.BLNHC),
        (CacheArrangement.PACKED, KVCacheLayout.BHLNC),
    ],
)
def test_any_arrangement_that_attention_reads_gives_the_same_logits(arrangement, layout):
    model, plain = tiny_model("llama"), Pool(tiny_model("llama"))
    pool = Pool(model, arrangement=arrangement, layout=layout)
    ids = prompt(21, seed=40)
    for _ in range(3):
        expected = plain.forward({"a": ids})["a"]
        assert torch.equal(pool.forward({"a": ids})["a"], expected)
        ids = [int(expected.argmax())]


def test_a_quantised_cache_changes_the_logits_a_little():
    model = tiny_model("llama")
    with pytest.warns(UserWarning, match="scale"):
        pool = Pool(model, kv_cache_dtype="fp8", model_dtype=torch.float32)
    plain = Pool(tiny_model("llama"))
    ids = prompt(9, seed=41)
    mine, theirs = pool.forward({"a": ids})["a"], plain.forward({"a": ids})["a"]
    assert not torch.equal(mine, theirs)
    assert torch.nn.functional.cosine_similarity(mine, theirs, dim=0) > 0.9


# -- the registered attention ----------------------------------------------------------------------------------------


@pytest.fixture
def attention_call():
    """One layer's call, as the model makes it, for a batch of five tokens."""
    pool = Pool(tiny_model("mistral-windowed"))
    pool.forward({"a": prompt(5)})
    layer = pool.runner.model.model.layers[0].self_attn
    paged = PagedBatch(pool.backend, served_layers(pool.runner.geometry), 1)

    def call(batch=paged, mask=None, **given):
        query, key = torch.ones(1, 6, 5, 8), torch.ones(1, 3, 5, 8)
        return paged_attention_forward(layer, query, key, key, mask, **{"paged_batch": batch} | given)

    return call


def test_equal_values_attend_to_themselves(attention_call):
    output, weights = attention_call(scaling=0.3, sliding_window=WINDOW)
    assert weights is None
    assert torch.allclose(output, torch.ones(1, 5, 6, 8))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"mask": torch.zeros(1, 1, 5, 5)}, "an attention mask"),
        ({"dropout": 0.1}, "dropout 0.1"),
        ({"sliding_window": 7}, f"a window of 7 tokens where the plan has {WINDOW}"),
        ({"s_aux": torch.zeros(6)}, "s_aux"),
    ],
)
def test_attention_of_another_kind_is_refused(attention_call, given, named):
    with pytest.raises(InputError, match=f"asks for {named}"):
        attention_call(**given)


def test_attention_outside_the_runner_is_refused(attention_call):
    with pytest.raises(MisuseError, match="run the model through ModelRunner"):
        attention_call(batch=None)


def test_registering_twice_is_registering_once():
    assert register_paged_attention() == register_paged_attention() == "kvledger"
