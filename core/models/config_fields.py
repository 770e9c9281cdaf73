"""Typed access to the fields of a config.json, and the names of those that nobody asked for.

An error names the field, its value and the file. A config names what a layer stores in many ways, and new ones appear
with every model. A reader that passes over such a field counts wrong without a word: it counts layers that read another
layer's cache, or a whole sequence where a window is kept (field report A19). So every name that could decide is
compared with the names that the reader asked for.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import attrs

from ..errors import InputError

Default = TypeVar("Default", int, None)


@attrs.frozen
class ConfigFields:
    """A config's mapping and the place it came from (`config.json`, `config.json: text_config`).

    A field that is null counts as absent. Every access by name is remembered in `asked`, so that a field that nobody
    asked for can be named (`unread_fields`).
    """

    values: Mapping[str, Any]
    place: str
    asked: set[str] = attrs.field(factory=set[str], eq=False, repr=False)

    def get(self, name: str) -> Any:
        """The value as it is; None where the field is absent."""
        self.asked.add(name)
        return self.values.get(name)

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.get(name) is not None

    def integer(self, name: str, *aliases: str) -> int:
        """A whole number above 0, under the first of these names that is there.

        Raises:
            InputError: absent, or of another type.
        """
        for alias in (name, *aliases):
            if self.has(alias):
                return self._checked_integer(alias)
        raise InputError(f"{self.place}: missing {' or '.join((name, *aliases))}, which nothing else says")

    def integers(self, *names: str) -> tuple[int, ...]:
        """Whole numbers above 0, all of them required.

        Raises:
            InputError: names every one that is missing, or the first that is of another type.
        """
        missing = [name for name in names if not self.has(name)]
        if missing:
            raise InputError(f"{self.place}: missing {', '.join(missing)}, which nothing else says")
        return tuple(self._checked_integer(name) for name in names)

    def integer_or(self, name: str, default: Default) -> int | Default:
        """A whole number above 0, or the architecture's default (None: it has none) where the field is absent."""
        return self._checked_integer(name) if self.has(name) else default

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false, or the architecture's default where the field is absent."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InputError(f"{self.place}: {name} is {value!r}; expected true or false")
        return value

    def text(self, name: str) -> str | None:
        """A string, or None where the field is absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise InputError(f"{self.place}: {name} is {value!r}; expected a string")
        return value

    def integer_list(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers (0 allowed).

        Raises:
            InputError: absent, or not such a list.
        """
        items = self.items(name)
        for index, item in enumerate(items):
            if not isinstance(item, int) or item < 0:
                raise InputError(f"{self.place}: {name}[{index}] is {item!r}; expected a whole number of at least 0")
        return tuple(int(item) for item in items)

    def text_list(self, name: str) -> tuple[str, ...]:
        """A list of strings.

        Raises:
            InputError: absent, or not such a list.
        """
        items = self.items(name)
        for index, item in enumerate(items):
            if not isinstance(item, str):
                raise InputError(f"{self.place}: {name}[{index}] is {item!r}; expected a string")
        return items

    def items(self, name: str) -> tuple[Any, ...]:
        """A list of anything.

        Raises:
            InputError: absent, or not a list.
        """
        value = self.get(name)
        if value is None:
            raise InputError(f"{self.place}: missing {name}, which nothing else says")
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise InputError(f"{self.place}: {name} is {value!r}; expected a list")
        return tuple(cast("Sequence[Any]", value))

    def section(self, name: str) -> "ConfigFields | None":
        """A nested object, or None where the field is absent.

        Raises:
            InputError: not an object.
        """
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise InputError(f"{self.place}: {name} is {value!r}; expected an object")
        return ConfigFields(cast("Mapping[str, Any]", value), f"{self.place}: {name}")

    def _checked_integer(self, name: str) -> int:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{self.place}: {name} is {value!r}; expected a whole number above 0")
        return value


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
    | attn_config | attention_other_setting | layer_group_size | lightning | retention
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
    if name.startswith("cla_") and fields.values.get("use_cla") is False:  # Hunyuan's sharing across layers
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
