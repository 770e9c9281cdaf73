"""Dense decoders: Llama, Mistral, Qwen 2 and 3, Phi, GPT-2, OPT, Gemma 2 and 3, Command."""

from .architecture_parts import (
    Architecture,
    attention_caches,
    decoder,
    every_nth_full,
    layer_types,
    num_layers,
    read_heads,
)
from .config_fields import ConfigFields
from .errors import InputError
from .layer_cache import LayerCaches
from .model_weights import AttentionShape, Groups, ModelWeights, embedding, gated_mlp, plain_mlp, vector


def _full_caches(fields: ConfigFields) -> LayerCaches:
    return attention_caches(fields, ["full_attention"] * num_layers(fields))


def _windowed_where_set_caches(fields: ConfigFields) -> LayerCaches:
    """All layers slide where the config gives a window (Mistral 7B v0.1, Phi 3), else all are full."""
    default = "sliding_attention" if fields.has("sliding_window") else "full_attention"
    return attention_caches(fields, layer_types(fields, lambda index: default))


def _qwen_caches(fields: ConfigFields) -> LayerCaches:
    """`use_sliding_window` decides; then layers from `max_window_layers` on slide."""
    if not fields.flag("use_sliding_window", False):
        return _full_caches(fields)
    first_sliding = fields.integer("max_window_layers")
    types = layer_types(fields, lambda index: "sliding_attention" if index >= first_sliding else "full_attention")
    return attention_caches(fields, types)


def _gemma2_caches(fields: ConfigFields) -> LayerCaches:
    return attention_caches(fields, layer_types(fields, every_nth_full(fields, "sliding_window_pattern", 2)))


def _gemma3_caches(fields: ConfigFields) -> LayerCaches:
    return attention_caches(fields, layer_types(fields, every_nth_full(fields, "sliding_window_pattern", 6)))


def _cohere2_caches(fields: ConfigFields) -> LayerCaches:
    return attention_caches(fields, layer_types(fields, every_nth_full(fields, "sliding_window_pattern", 4)))


def attention_shape(
    fields: ConfigFields, *, qkv_bias: bool = False, output_bias: bool = False, qk_norm: int = 0
) -> AttentionShape:
    """The attention of a decoder whose layers are alike."""
    heads = read_heads(fields)
    return AttentionShape(
        hidden_size=fields.integer("hidden_size", "n_embd"),
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_size=heads.head_size,
        head_size_v=heads.head_size_v,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
    )


def _llama_weights(fields: ConfigFields) -> ModelWeights:
    bias = fields.flag("attention_bias", False)
    return _gated_decoder(fields, attention_shape(fields, qkv_bias=bias, output_bias=bias))


def _qwen2_weights(fields: ConfigFields) -> ModelWeights:
    return _gated_decoder(fields, attention_shape(fields, qkv_bias=True))


def _qwen3_weights(fields: ConfigFields) -> ModelWeights:
    bias = fields.flag("attention_bias", False)
    norms = 2 * read_heads(fields).head_size
    return _gated_decoder(fields, attention_shape(fields, qkv_bias=bias, output_bias=bias, qk_norm=norms))


def _gated_decoder(
    fields: ConfigFields, attention: AttentionShape, norms: int = 2, tied_by_default: bool = False
) -> ModelWeights:
    hidden_size, intermediate_size = fields.integers("hidden_size", "intermediate_size")
    layer = (
        *attention.groups(),
        *gated_mlp(hidden_size, intermediate_size, fields.flag("mlp_bias", False)),
        vector("norms", norms * hidden_size),
    )
    return decoder(fields, lambda index: layer, tied_by_default=tied_by_default)


def _gemma2_weights(fields: ConfigFields) -> ModelWeights:
    return _gated_decoder(fields, attention_shape(fields), norms=4, tied_by_default=True)


def _gemma3_weights(fields: ConfigFields) -> ModelWeights:
    norms = 2 * read_heads(fields).head_size
    return _gated_decoder(fields, attention_shape(fields, qk_norm=norms), norms=4, tied_by_default=True)


def _cohere_weights(fields: ConfigFields) -> ModelWeights:
    """One norm a layer, since attention and MLP read the same input."""
    heads = read_heads(fields)
    norms = (heads.num_heads + heads.num_kv_heads) * heads.head_size if fields.flag("use_qk_norm", False) else 0
    bias = fields.flag("attention_bias", False)
    shape = attention_shape(fields, qkv_bias=bias, output_bias=bias, qk_norm=norms)
    return _gated_decoder(fields, shape, norms=1, tied_by_default=True)


def _phi_weights(fields: ConfigFields) -> ModelWeights:
    """Phi 1 and 2: biases everywhere, one layer norm a layer, a bias on the output matrix."""
    hidden_size, intermediate_size, vocab_size = fields.integers("hidden_size", "intermediate_size", "vocab_size")
    attention = attention_shape(fields, qkv_bias=True, output_bias=True)
    layer = (*attention.groups(), *plain_mlp(hidden_size, intermediate_size), vector("norm", 2 * hidden_size))
    return decoder(
        fields,
        lambda index: layer,
        tied_by_default=False,
        final_norm=2 * hidden_size,
        more_head=(vector("lm_head bias", vocab_size),),
    )


def _gpt2_weights(fields: ConfigFields) -> ModelWeights:
    hidden_size = fields.integer("hidden_size", "n_embd")
    intermediate_size = fields.integer_or("n_inner", 4 * hidden_size)
    positions = fields.integer("max_position_embeddings", "n_positions")
    return _learned_positions_decoder(fields, hidden_size, intermediate_size, positions)


def _opt_weights(fields: ConfigFields) -> ModelWeights:
    """OPT keeps two more positions than its longest sequence; sizes with an embedding projection are refused."""
    hidden_size, intermediate_size, positions = fields.integers("hidden_size", "ffn_dim", "max_position_embeddings")
    projected = fields.integer_or("word_embed_proj_dim", hidden_size)
    if projected != hidden_size:
        raise InputError(
            f"{fields.place}: word_embed_proj_dim {projected} differs from hidden_size {hidden_size}; the parameters of"
            " OPT models with an embedding projection are not known here, so give the weights' bytes"
        )
    return _learned_positions_decoder(fields, hidden_size, intermediate_size, positions + 2)


def _learned_positions_decoder(
    fields: ConfigFields, hidden_size: int, intermediate_size: int, positions: int
) -> ModelWeights:
    attention = attention_shape(fields, qkv_bias=True, output_bias=True)
    layer: Groups = (
        *attention.groups(),
        *plain_mlp(hidden_size, intermediate_size),
        vector("norms", 4 * hidden_size),
    )
    return decoder(
        fields,
        lambda index: layer,
        tied_by_default=True,
        final_norm=2 * hidden_size,
        more_embeddings=(embedding("embed_positions", positions, hidden_size),),
    )


_VISION = ("vision encoder and projector",)
_GEMMA3_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
    "sliding_window": 4096,
    "max_position_embeddings": 131072,
}

DENSE_ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(caches=_full_caches, weights=_llama_weights),
    "MistralForCausalLM": Architecture(caches=_windowed_where_set_caches, weights=_llama_weights),
    "Qwen2ForCausalLM": Architecture(caches=_qwen_caches, weights=_qwen2_weights),
    "Qwen3ForCausalLM": Architecture(caches=_qwen_caches, weights=_qwen3_weights, class_defaults={"head_dim": 128}),
    "Phi3ForCausalLM": Architecture(caches=_windowed_where_set_caches, weights=_llama_weights),
    "PhiForCausalLM": Architecture(caches=_full_caches, weights=_phi_weights),
    "GPT2LMHeadModel": Architecture(caches=_full_caches, weights=_gpt2_weights),
    "OPTForCausalLM": Architecture(caches=_full_caches, weights=_opt_weights),
    "Gemma2ForCausalLM": Architecture(
        caches=_gemma2_caches, weights=_gemma2_weights, class_defaults={"head_dim": 256, "sliding_window": 4096}
    ),
    "Gemma3ForCausalLM": Architecture(caches=_gemma3_caches, weights=_gemma3_weights, class_defaults=_GEMMA3_DEFAULTS),
    "Gemma3ForConditionalGeneration": Architecture(
        caches=_gemma3_caches, weights=_gemma3_weights, left_out=_VISION, class_defaults=_GEMMA3_DEFAULTS
    ),
    "CohereForCausalLM": Architecture(caches=_full_caches, weights=_cohere_weights),
    "Cohere2ForCausalLM": Architecture(caches=_cohere2_caches, weights=_cohere_weights),
}
