"""Fields of a config that could decide what layers store and that its architecture's reader did not ask for.

A config names what a layer stores in many ways, and new ones appear with every model. A reader that passes over such a
field counts wrong without a word: it counts layers that read another layer's cache, or a whole sequence where a window
is kept (field report A19). So every name that could decide is compared with the names that the reader asked for.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from .config_fields import ConfigFields

# Parts of names that decide what a layer stores: which layers store at all, how many tokens, of which size and dtype.
_DECIDES = re.compile(
    r"""
    sliding | window | (?:attn|attention)_(?:chunk|layer|type|pattern|every|interval) | chunk_size
    | layer_types | layers?_block_type | block_(?:types?|configs?) | layer_pattern | hybrid | override_pattern
    | full_att | linear_att | linear_num | linear_\w*head_dim | linear_conv | local_att | global_att | global_head
    | global_key_value | swa_
    | source_layer | shared_layers | kv_shar | shared?_kv | cross_layer | cla_ | use_cla | yoco | kv_reuse
    | compress | latent_dim | kv_lora | index_head_dim | index_topk_(?:freq|pattern) | indexer_types | index_skip
    | index_source | sparse_att | _msa_ | kda_
    | mamba | ssm | recurrent | rwkv | conv_(?:kernel|l_cache|dim) | short_conv | state_size | lru_width
    | kv_heads_per | key_value_heads_per | num_attention_groups | multi_query | n_head_kv | num_kv_heads | n_kv_heads
    | kv_cache | cache_dtype
    """,
    re.VERBOSE | re.IGNORECASE,
)
# Names that the pattern finds and that decide nothing of it: weights, training, image and audio inputs, generation.
_DECIDES_NOT = re.compile(
    r"vision|image|audio|loss|dropout|init|norm|rope|expert|mlp|moe_latent|_bias|use_cache|cache_implementation"
    r"|mamba_(?:proj|chunk|expand|hidden|act)|attn_implementation|quant|window_layers|time_step",
    re.IGNORECASE,
)
_ALL_FULL = frozenset({"full_attention", "attention", "full"})


def unread_fields(top: ConfigFields, fields: ConfigFields, understood: Collection[str]) -> tuple[str, ...]:
    """`name value` of every field that could decide what layers store and that nobody asked for.

    Args:
        top: the whole config.
        fields: its decoder's part, whose reader has been asked for the caches.
        understood: names that the reader knows without asking for them in every config.
    """
    found: dict[str, str] = {}
    for part in (fields, top):
        for name, value in part.values.items():
            is_known = name in part.asked or name in fields.asked or name in understood
            if not is_known and _decides(name) and not _is_harmless(name, value, fields):
                found.setdefault(name, _shown(value))
    return tuple(f"{name} {value}" for name, value in found.items())


def warning_about(unread: Collection[str], place: str, architecture: str) -> str:
    """The sentence that names them."""
    return (
        f"{place}: {'; '.join(unread)}: may decide what layers store, and the reader of {architecture} does not know"
        f" {'it' if len(unread) == 1 else 'them'}, so the sizes are as if {'it' if len(unread) == 1 else 'they'} were"
        " not there. If that is wrong, describe the caches by hand (docs/planning.md)"
    )


def _decides(name: str) -> bool:
    return _DECIDES.search(name) is not None and _DECIDES_NOT.search(name) is None


def _is_harmless(name: str, value: Any, fields: ConfigFields) -> bool:
    """Whether the value says that nothing is special: off, empty, or full attention everywhere."""
    if isinstance(value, bool):
        return value is False
    if value in (None, 0, -1, "") or value in ([], {}):
        return True
    if "window" in name and fields.values.get("use_sliding_window") is False:
        return True
    if "type_list" in name:  # one number a layer; 1: full attention
        return all(item == 1 for item in _items(value))
    items = list(_items(value))
    return bool(items) and all(isinstance(item, str) and item in _ALL_FULL for item in items)


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, str):
        yield value


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{...}"
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
