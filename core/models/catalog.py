"""Built-in models: the public facts of their configurations, in the field names of their config.json.

A paragraph a model: its name, then `field=value` with JSON values, bare words for strings and dots for nested objects.
`like NAME` takes the fields of an earlier model first. Only what decides the cache and the parameters is kept, so a
paragraph without the sizes that parameters need says what a model stores but not how much its weights take.
"""

import copy
import functools
import re
from typing import Any

from ..errors import InputError

CATALOGUE = """
llama-2-7b
architectures=["LlamaForCausalLM"] dtype=float16 num_hidden_layers=32 hidden_size=4096 num_attention_heads=32
num_key_value_heads=32 intermediate_size=11008 vocab_size=32000 max_position_embeddings=4096 tie_word_embeddings=false

llama-2-13b
like llama-2-7b num_hidden_layers=40 hidden_size=5120 num_attention_heads=40 num_key_value_heads=40
intermediate_size=13824

llama-2-70b
like llama-2-7b num_hidden_layers=80 hidden_size=8192 num_attention_heads=64 num_key_value_heads=8
intermediate_size=28672

codellama-34b
like llama-2-7b dtype=bfloat16 num_hidden_layers=48 hidden_size=8192 num_attention_heads=64 num_key_value_heads=8
intermediate_size=22016 max_position_embeddings=16384

llama-3-8b
like llama-2-7b dtype=bfloat16 num_key_value_heads=8 intermediate_size=14336 vocab_size=128256
max_position_embeddings=8192

llama-3-70b
like llama-3-8b num_hidden_layers=80 hidden_size=8192 num_attention_heads=64 intermediate_size=28672

llama-3.1-8b
like llama-3-8b max_position_embeddings=131072

llama-3.1-70b
like llama-3-70b max_position_embeddings=131072

llama-3.3-70b
like llama-3.1-70b

llama-3.1-405b
like llama-3.1-8b num_hidden_layers=126 hidden_size=16384 num_attention_heads=128 intermediate_size=53248

llama-3.2-1b
like llama-3.1-8b num_hidden_layers=16 hidden_size=2048 head_dim=64 intermediate_size=8192 tie_word_embeddings=true

llama-3.2-3b
like llama-3.1-8b num_hidden_layers=28 hidden_size=3072 num_attention_heads=24 head_dim=128 intermediate_size=8192
tie_word_embeddings=true

llama-4-scout-17b-16e
architectures=["Llama4ForConditionalGeneration"] dtype=bfloat16 num_hidden_layers=48 hidden_size=5120
num_attention_heads=40 num_key_value_heads=8 head_dim=128 intermediate_size=8192 intermediate_size_mlp=16384
num_local_experts=16 num_experts_per_tok=1 interleave_moe_layer_step=1 attention_chunk_size=8192 vocab_size=202048
max_position_embeddings=10485760 tie_word_embeddings=false

llama-4-maverick-17b-128e
like llama-4-scout-17b-16e num_local_experts=128 interleave_moe_layer_step=2 max_position_embeddings=1048576

yi-34b
like llama-2-7b dtype=bfloat16 num_hidden_layers=60 hidden_size=7168 num_attention_heads=56 num_key_value_heads=8
intermediate_size=20480 vocab_size=64000

smollm2-135m
like llama-2-7b dtype=bfloat16 num_hidden_layers=30 hidden_size=576 num_attention_heads=9 num_key_value_heads=3
intermediate_size=1536 vocab_size=49152 max_position_embeddings=8192 tie_word_embeddings=true

qwen2.5-0.5b
architectures=["Qwen2ForCausalLM"] dtype=bfloat16 num_hidden_layers=24 hidden_size=896 num_attention_heads=14
num_key_value_heads=2 intermediate_size=4864 vocab_size=151936 max_position_embeddings=32768 tie_word_embeddings=true
use_sliding_window=false

qwen2.5-7b
like qwen2.5-0.5b num_hidden_layers=28 hidden_size=3584 num_attention_heads=28 num_key_value_heads=4
intermediate_size=18944 vocab_size=152064 tie_word_embeddings=false

qwen2.5-14b
like qwen2.5-7b num_hidden_layers=48 hidden_size=5120 num_attention_heads=40 num_key_value_heads=8
intermediate_size=13824

qwen2.5-32b
like qwen2.5-14b num_hidden_layers=64 intermediate_size=27648

qwen2.5-coder-32b
like qwen2.5-32b

qwen2.5-72b
like qwen2.5-7b num_hidden_layers=80 hidden_size=8192 num_attention_heads=64 num_key_value_heads=8
intermediate_size=29568

qwen3-4b
architectures=["Qwen3ForCausalLM"] dtype=bfloat16 num_hidden_layers=36 hidden_size=2560 num_attention_heads=32
num_key_value_heads=8 head_dim=128 intermediate_size=9728 vocab_size=151936 max_position_embeddings=40960
tie_word_embeddings=true use_sliding_window=false

qwen3-8b
like qwen3-4b hidden_size=4096 intermediate_size=12288 tie_word_embeddings=false

qwen3-14b
like qwen3-8b num_hidden_layers=40 hidden_size=5120 num_attention_heads=40 intermediate_size=17408

qwen3-32b
like qwen3-8b num_hidden_layers=64 hidden_size=5120 num_attention_heads=64 intermediate_size=25600

qwen3-30b-a3b
like qwen3-8b architectures=["Qwen3MoeForCausalLM"] num_hidden_layers=48 hidden_size=2048 num_key_value_heads=4
intermediate_size=6144 moe_intermediate_size=768 num_experts=128 num_experts_per_tok=8

qwen3-235b-a22b
like qwen3-30b-a3b num_hidden_layers=94 hidden_size=4096 num_attention_heads=64 intermediate_size=12288
moe_intermediate_size=1536

qwen3.5-9b
architectures=["Qwen3_5ForConditionalGeneration"] dtype=bfloat16 num_hidden_layers=32 hidden_size=4096
num_attention_heads=16 num_key_value_heads=4 head_dim=256 intermediate_size=12288 vocab_size=248320
max_position_embeddings=262144 tie_word_embeddings=false full_attention_interval=4 linear_num_key_heads=16
linear_key_head_dim=128 linear_num_value_heads=32 linear_value_head_dim=128 linear_conv_kernel_dim=4

qwen3.5-0.8b
like qwen3.5-9b num_hidden_layers=24 hidden_size=1024 num_attention_heads=8 num_key_value_heads=2
intermediate_size=3584 linear_num_value_heads=16 tie_word_embeddings=true

qwen3.5-27b
like qwen3.5-9b num_hidden_layers=64 hidden_size=5120 num_attention_heads=24 intermediate_size=17408
linear_num_value_heads=48

qwen3.5-35b-a3b
like qwen3.5-9b architectures=["Qwen3_5MoeForConditionalGeneration"] num_hidden_layers=40 hidden_size=2048
num_key_value_heads=2 num_experts=256 num_experts_per_tok=8 moe_intermediate_size=512
shared_expert_intermediate_size=512

qwen3.5-122b-a10b
like qwen3.5-35b-a3b num_hidden_layers=48 hidden_size=3072 num_attention_heads=32 linear_num_value_heads=64
moe_intermediate_size=1024 shared_expert_intermediate_size=1024

qwen3.5-397b-a17b
like qwen3.5-122b-a10b num_hidden_layers=60 hidden_size=4096 num_experts=512 num_experts_per_tok=10

qwen3.6-27b
like qwen3.5-27b

qwen3.6-35b-a3b
like qwen3.5-35b-a3b

mistral-7b-v0.1
architectures=["MistralForCausalLM"] dtype=bfloat16 num_hidden_layers=32 hidden_size=4096 num_attention_heads=32
num_key_value_heads=8 intermediate_size=14336 vocab_size=32000 max_position_embeddings=32768 tie_word_embeddings=false
sliding_window=4096

mistral-7b-v0.3
like mistral-7b-v0.1 vocab_size=32768 sliding_window=null

mistral-nemo-12b
like mistral-7b-v0.3 num_hidden_layers=40 hidden_size=5120 head_dim=128 vocab_size=131072
max_position_embeddings=131072

mistral-small-24b
like mistral-nemo-12b intermediate_size=32768 max_position_embeddings=32768

mixtral-8x7b
like mistral-7b-v0.3 architectures=["MixtralForCausalLM"] vocab_size=32000 num_local_experts=8 num_experts_per_tok=2

mixtral-8x22b
like mixtral-8x7b num_hidden_layers=56 hidden_size=6144 num_attention_heads=48 intermediate_size=16384
vocab_size=32768 max_position_embeddings=65536

phi-4
architectures=["Phi3ForCausalLM"] dtype=bfloat16 num_hidden_layers=40 hidden_size=5120 num_attention_heads=40
num_key_value_heads=10 intermediate_size=17920 vocab_size=100352 max_position_embeddings=16384
tie_word_embeddings=false

phi-3-mini-4k
like phi-4 num_hidden_layers=32 hidden_size=3072 num_attention_heads=32 num_key_value_heads=32 intermediate_size=8192
vocab_size=32064 max_position_embeddings=4096 sliding_window=2047

phi-2
architectures=["PhiForCausalLM"] dtype=float16 num_hidden_layers=32 hidden_size=2560 num_attention_heads=32
num_key_value_heads=32 intermediate_size=10240 vocab_size=51200 max_position_embeddings=2048 tie_word_embeddings=false

gpt2
architectures=["GPT2LMHeadModel"] dtype=float32 n_layer=12 n_embd=768 n_head=12 n_positions=1024 vocab_size=50257

opt-13b
architectures=["OPTForCausalLM"] dtype=float16 num_hidden_layers=40 hidden_size=5120 num_attention_heads=40
ffn_dim=20480 word_embed_proj_dim=5120 vocab_size=50272 max_position_embeddings=2048

gemma-2-9b
architectures=["Gemma2ForCausalLM"] dtype=bfloat16 num_hidden_layers=42 hidden_size=3584 num_attention_heads=16
num_key_value_heads=8 head_dim=256 intermediate_size=14336 vocab_size=256000 max_position_embeddings=8192
sliding_window=4096

gemma-2-27b
like gemma-2-9b num_hidden_layers=46 hidden_size=4608 num_attention_heads=32 num_key_value_heads=16 head_dim=128
intermediate_size=36864

gemma-3-1b
architectures=["Gemma3ForCausalLM"] dtype=bfloat16 num_hidden_layers=26 hidden_size=1152 num_attention_heads=4
num_key_value_heads=1 head_dim=256 intermediate_size=6912 vocab_size=262144 max_position_embeddings=32768
sliding_window=512 sliding_window_pattern=6

gemma-3-4b
like gemma-3-1b architectures=["Gemma3ForConditionalGeneration"] num_hidden_layers=34 hidden_size=2560
num_attention_heads=8 num_key_value_heads=4 intermediate_size=10240 vocab_size=262208 max_position_embeddings=131072
sliding_window=1024

gemma-3-27b
like gemma-3-4b num_hidden_layers=62 hidden_size=5376 num_attention_heads=32 num_key_value_heads=16 head_dim=128
intermediate_size=21504

gemma-4-e2b
architectures=["Gemma4ForConditionalGeneration"] dtype=bfloat16 num_hidden_layers=35 hidden_size=1536
num_attention_heads=8 num_key_value_heads=1 head_dim=256 global_head_dim=512 intermediate_size=6144 vocab_size=262144
max_position_embeddings=131072 sliding_window=512 sliding_window_pattern=5 num_kv_shared_layers=20
use_double_wide_mlp=true hidden_size_per_layer_input=256 vocab_size_per_layer_input=262144

gemma-4-31b
architectures=["Gemma4ForConditionalGeneration"] dtype=bfloat16 num_hidden_layers=60 hidden_size=5376
num_attention_heads=32 num_key_value_heads=16 num_global_key_value_heads=4 attention_k_eq_v=true head_dim=256
global_head_dim=512 intermediate_size=21504 vocab_size=262144 max_position_embeddings=262144 sliding_window=1024
sliding_window_pattern=6

gpt-oss-20b
architectures=["GptOssForCausalLM"] dtype=bfloat16 num_hidden_layers=24 hidden_size=2880 num_attention_heads=64
num_key_value_heads=8 head_dim=64 intermediate_size=2880 num_local_experts=32 num_experts_per_tok=4 vocab_size=201088
max_position_embeddings=131072 tie_word_embeddings=false sliding_window=128 quantization_config.quant_method=mxfp4

gpt-oss-120b
like gpt-oss-20b num_hidden_layers=36 num_local_experts=128

cohere-command-r7b-12-2024
architectures=["Cohere2ForCausalLM"] dtype=bfloat16 num_hidden_layers=32 hidden_size=4096 num_attention_heads=32
num_key_value_heads=8 head_dim=128 intermediate_size=14336 vocab_size=256000 max_position_embeddings=132096
sliding_window=4096 sliding_window_pattern=4

cohere-command-a-03-2025
like cohere-command-r7b-12-2024 num_hidden_layers=64 hidden_size=12288 num_attention_heads=96 intermediate_size=36864
max_position_embeddings=131072

minimax-m2
architectures=["MiniMaxM2ForCausalLM"] dtype=bfloat16 num_hidden_layers=62 hidden_size=3072 num_attention_heads=48
num_key_value_heads=8 head_dim=128 intermediate_size=1536 num_local_experts=256 num_experts_per_tok=8
vocab_size=200064 max_position_embeddings=196608 tie_word_embeddings=false quantization_config.quant_method=fp8
quantization_config.weight_block_size=[128,128]

minimax-m2.1
like minimax-m2

minimax-m2.5
like minimax-m2

minimax-m3
architectures=["MiniMaxM3SparseForConditionalGeneration"] dtype=bfloat16 num_hidden_layers=60 hidden_size=6144
num_attention_heads=64 num_key_value_heads=4 head_dim=128 intermediate_size=3072 dense_intermediate_size=12288
shared_intermediate_size=3072 num_local_experts=128 num_experts_per_tok=4 vocab_size=200064
max_position_embeddings=1048576 tie_word_embeddings=false first_k_dense_replace=3
sparse_attention_config.sparse_index_dim=128 sparse_attention_config.sparse_num_index_heads=4
sparse_attention_config.sparse_attention_freq=[0,0,0, 1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1, 1,1,1,1,1,1,1,1,1,1,
1,1,1,1,1,1,1,1,1,1, 1,1,1,1,1,1,1,1,1,1, 1,1,1,1,1,1,1,1]

mimo-v2.5
architectures=["MiMoV2ForCausalLM"] dtype=bfloat16 num_hidden_layers=48 hidden_size=4096 num_attention_heads=64
num_key_value_heads=4 head_dim=192 v_head_dim=128 swa_num_attention_heads=64 swa_num_key_value_heads=8
swa_head_dim=192 swa_v_head_dim=128 sliding_window=128 intermediate_size=16384 moe_intermediate_size=2048
n_routed_experts=256 num_experts_per_tok=8 vocab_size=152576 max_position_embeddings=1048576 tie_word_embeddings=false
first_k_dense_replace=1
hybrid_layer_pattern=[0,1,1,1,1, 0,1,1,1,1,1, 0,1,1,1,1,1, 0,1,1,1,1,1, 0,1,1,1,1,1, 0,1,1,1,1,1, 0,1,1,1,1,1,
0,1,1,1,1,1, 0] quantization_config.quant_method=fp8 quantization_config.weight_block_size=[128,128]
quantization_config.ignored_layers=["o_proj"]

mimo-v2.5-pro
like mimo-v2.5 num_hidden_layers=70 hidden_size=6144 num_attention_heads=128 num_key_value_heads=8
swa_num_attention_heads=128 swa_num_key_value_heads=8 n_routed_experts=384
hybrid_layer_pattern=[0,1,1,1,1,1,1, 0,1,1,1,1,1,1,1, 0,1,1,1,1,1,1,1, 0,1,1,1,1,1,1,1, 0,1,1,1,1,1,1,1,
0,1,1,1,1,1,1,1, 0,1,1,1,1,1,1,1, 0,1,1,1,1,1,1, 0,1,1,1,1,1,1, 0]

deepseek-v3
architectures=["DeepseekV3ForCausalLM"] dtype=bfloat16 num_hidden_layers=61 hidden_size=7168 num_attention_heads=128
num_key_value_heads=128 q_lora_rank=1536 kv_lora_rank=512 qk_nope_head_dim=128 qk_rope_head_dim=64 v_head_dim=128
intermediate_size=18432 moe_intermediate_size=2048 n_routed_experts=256 n_shared_experts=1 num_experts_per_tok=8
first_k_dense_replace=3 moe_layer_freq=1 vocab_size=129280 max_position_embeddings=163840 tie_word_embeddings=false
quantization_config.quant_method=fp8 quantization_config.weight_block_size=[128,128]

deepseek-r1
like deepseek-v3

deepseek-v3.2
like deepseek-v3 architectures=["DeepseekV32ForCausalLM"] index_head_dim=128 index_n_heads=64

deepseek-v2-lite
architectures=["DeepseekV2ForCausalLM"] dtype=bfloat16 num_hidden_layers=27 hidden_size=2048 num_attention_heads=16
num_key_value_heads=16 kv_lora_rank=512 qk_nope_head_dim=128 qk_rope_head_dim=64 v_head_dim=128
intermediate_size=10944 moe_intermediate_size=1408 n_routed_experts=64 n_shared_experts=2 num_experts_per_tok=6
first_k_dense_replace=1 moe_layer_freq=1 vocab_size=102400 max_position_embeddings=163840 tie_word_embeddings=false

deepseek-v4-flash
architectures=["DeepseekV4ForCausalLM"] dtype=bfloat16 num_hidden_layers=43 hidden_size=4096 num_attention_heads=64
num_key_value_heads=1 head_dim=512 q_lora_rank=1024 o_groups=8 o_lora_rank=1024 hc_mult=4 moe_intermediate_size=2048
n_routed_experts=256 n_shared_experts=1 num_experts_per_tok=6 sliding_window=128 index_head_dim=128 index_n_heads=64
vocab_size=129280 max_position_embeddings=1048576 tie_word_embeddings=false
compress_ratios=[0,0, 4,128,4,128,4,128,4,128,4,128,4,128,4,128,4,128,4,128,4,128,4,128,4,128,4,128,4,128,4,128,
4,128,4,128,4,128,4,128,4,128,4, 0,0,0] quantization_config.quant_method=fp8 quantization_config.expert_dtype=fp4
quantization_config.weight_block_size=[128,128]

kimi-k2
like deepseek-v3 num_attention_heads=64 num_key_value_heads=64 n_routed_experts=384 first_k_dense_replace=1
vocab_size=163840 max_position_embeddings=131072

kimi-k2.7-code
like kimi-k2 architectures=["KimiK25ForConditionalGeneration"] max_position_embeddings=262144 quantization_config=null

kimi-k3
architectures=["KimiK3ForConditionalGeneration"] dtype=bfloat16 num_hidden_layers=93 hidden_size=7168
num_attention_heads=96 num_key_value_heads=96 kv_lora_rank=512 qk_nope_head_dim=128 qk_rope_head_dim=64 v_head_dim=128
vocab_size=163840 max_position_embeddings=1048576 linear_attn_config.num_heads=96 linear_attn_config.head_dim=128
linear_attn_config.short_conv_kernel_size=4
linear_attn_config.full_attn_layers=[4,8,12,16,20,24,28,32,36,40,44,48,52,56,60,64,68,72,76,80,84,88,92,93]

kimi-linear-48b-a3b
architectures=["KimiLinearForCausalLM"] dtype=bfloat16 num_hidden_layers=27 hidden_size=2304 num_attention_heads=32
num_key_value_heads=32 kv_lora_rank=512 qk_nope_head_dim=128 qk_rope_head_dim=64 v_head_dim=128 intermediate_size=9216
moe_intermediate_size=1024 num_experts=256 num_shared_experts=1 num_experts_per_tok=8 first_k_dense_replace=1
vocab_size=163840 max_position_embeddings=1048576 tie_word_embeddings=false linear_attn_config.num_heads=32
linear_attn_config.head_dim=128 linear_attn_config.short_conv_kernel_size=4
linear_attn_config.full_attn_layers=[4,8,12,16,20,24,27]

glm-5.1
architectures=["GlmMoeDsaForCausalLM"] dtype=bfloat16 num_hidden_layers=78 hidden_size=6144 num_attention_heads=64
num_key_value_heads=64 q_lora_rank=2048 kv_lora_rank=512 qk_nope_head_dim=192 qk_rope_head_dim=64 v_head_dim=256
intermediate_size=12288 moe_intermediate_size=2048 n_routed_experts=256 n_shared_experts=1 num_experts_per_tok=8
first_k_dense_replace=3 index_head_dim=128 index_n_heads=32 vocab_size=154880 max_position_embeddings=202752
tie_word_embeddings=false

glm-5.2
like glm-5.1 index_topk_freq=4 index_skip_topk_offset=3 max_position_embeddings=1048576
"""

ALIASES = {
    "mistral-nemo": "mistral-nemo-12b",
    "mistral-small-24b-2501": "mistral-small-24b",
    "mistral-7b": "mistral-7b-v0.3",
    "phi-3-mini": "phi-3-mini-4k",
    "c4ai-command-a-03-2025": "cohere-command-a-03-2025",
    "c4ai-command-r7b-12-2024": "cohere-command-r7b-12-2024",
    "meta-llama-3-8b": "llama-3-8b",
    "meta-llama-3-70b": "llama-3-70b",
    "meta-llama-3.1-8b": "llama-3.1-8b",
    "meta-llama-3.1-70b": "llama-3.1-70b",
    "meta-llama-3.1-405b": "llama-3.1-405b",
    "openai-community-gpt2": "gpt2",
}
"""Names on the hub that differ from the short names here by more than an organisation or a tuning suffix."""

_FIELD = re.compile(r"([\w.]+)=(\[[^\]]*\]|\S+)")


@functools.cache
def builtin_configs() -> dict[str, dict[str, Any]]:
    """Every built-in config by its short name, in the order of the catalogue."""
    configs: dict[str, dict[str, Any]] = {}
    for paragraph in CATALOGUE.strip().split("\n\n"):
        name, _, body = paragraph.partition("\n")
        config: dict[str, Any] = {}
        if body.startswith("like "):
            base, _, body = body.removeprefix("like ").replace("\n", " ").partition(" ")
            config.update(copy.deepcopy(configs[base]))
        for key, text in _FIELD.findall(body):
            _put(config, key.split("."), _value(text), name)
        configs[name] = config
    return configs


def _value(text: str) -> Any:
    import json

    try:
        return json.loads(text)
    except ValueError:
        return text


def _put(config: dict[str, Any], path: list[str], value: Any, name: str) -> None:
    for part in path[:-1]:
        config = config.setdefault(part, {})
    if not path[-1]:
        raise InputError(f"built-in {name}: an empty field name")
    config[path[-1]] = value
