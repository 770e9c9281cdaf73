"""What all architectures are read with: heads and head sizes, per-layer types, and the frame of a decoder's weights."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import attrs

from ..errors import InputError
from .layer_cache import AttentionCache, LayerCaches
from .weights import Groups, ModelWeights, embedding, lm_head, vector

# Reading a Hugging Face config.json: every field typed, every missing or wrong field named with its place.


@attrs.frozen
class ConfigFields:
    """A config's mapping with the place it came from (`config.json`, `config.json: text_config`)."""

    values: Mapping[str, Any]
    place: str

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def integer(self, name: str, *aliases: str) -> int:
        """A whole number above 0.

        Raises:
            InputError: absent, or of another type.
        """
        return self.integers(name)[0] if not aliases or self.has(name) else self._aliased(name, aliases)

    def integers(self, *names: str) -> tuple[int, ...]:
        """Whole numbers above 0, all of them required.

        Raises:
            InputError: names every one that is missing, or the first that is of another type.
        """
        missing = [name for name in names if not self.has(name)]
        if missing:
            raise InputError(f"{self.place}: missing {', '.join(missing)}, which nothing else says")
        return tuple(self._checked_integer(name) for name in names)

    def integer_or(self, name: str, default: int) -> int:
        """A whole number above 0, or what the architecture defines where the field is absent or null."""
        return self._checked_integer(name) if self.has(name) else default

    def optional_integer(self, name: str) -> int | None:
        """A whole number above 0, or None where the field is absent or null."""
        return self._checked_integer(name) if self.has(name) else None

    def flag(self, name: str, default: bool) -> bool:
        """True or false, or what the architecture defines where the field is absent."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InputError(f"{self.place}: {name} is {value!r}; expected true or false")
        return value

    def text(self, name: str) -> str | None:
        """A string, or None where the field is absent or null."""
        value = self.values.get(name)
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
        return tuple(str(item) for item in items)

    def items(self, name: str) -> tuple[Any, ...]:
        """A list of anything.

        Raises:
            InputError: absent, or not a list.
        """
        value = self.values.get(name)
        if value is None:
            raise InputError(f"{self.place}: missing {name}, which nothing else says")
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise InputError(f"{self.place}: {name} is {value!r}; expected a list")
        return tuple(cast("Sequence[Any]", value))

    def section(self, name: str) -> "ConfigFields | None":
        """A nested object, or None where the field is absent or null.

        Raises:
            InputError: not an object.
        """
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise InputError(f"{self.place}: {name} is {value!r}; expected an object")
        return ConfigFields(cast("Mapping[str, Any]", value), f"{self.place}: {name}")

    def _aliased(self, name: str, aliases: Sequence[str]) -> int:
        for alias in aliases:
            if self.has(alias):
                return self._checked_integer(alias)
        raise InputError(f"{self.place}: missing {' or '.join((name, *aliases))}, which nothing else says")

    def _checked_integer(self, name: str) -> int:
        value = self.values[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{self.place}: {name} is {value!r}; expected a whole number above 0")
        return value


def per_layer_types(fields: ConfigFields, num_layers: int, name: str = "layer_types") -> tuple[str, ...] | None:
    """The first `num_layers` entries of a per-layer list of strings, or None where the config has none.

    Entries beyond the layers describe draft layers, which hold no cache of the main model.

    Raises:
        InputError: the list is shorter than the layers.
    """
    if not fields.has(name):
        return None
    types = fields.text_list(name)
    if len(types) < num_layers:
        raise InputError(f"{fields.place}: {name} has {len(types)} entries for {num_layers} layers")
    return types[:num_layers]


@attrs.frozen(kw_only=True)
class Architecture:
    """How one architecture is read.

    Attributes:
        caches: what each layer stores; needs only the fields that decide it.
        weights: the parameters; needs more fields. None: not known here, for the reason in `weights_unknown`.
        weights_unknown: what stands in the way of counting them.
        left_out: parts of the checkpoint that `weights` does not count.
        class_defaults: what a field means that a config of this architecture leaves out, where its own class says so
        and
            it is not what other architectures mean (a checkpoint's config omits fields that equal these).
        hybrid_manager: False where vLLM sizes windowed layers like full ones by default (Llama 4's chunks).
    """

    caches: Callable[[ConfigFields], LayerCaches]
    weights: Callable[[ConfigFields], ModelWeights] | None
    weights_unknown: str = ""
    left_out: tuple[str, ...] = ()
    class_defaults: Mapping[str, int] = attrs.field(factory=dict[str, int])
    hybrid_manager: bool = True


@attrs.frozen(kw_only=True)
class Heads:
    """Query heads, KV heads, and the sizes of a key and a value vector."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int


def read_heads(fields: ConfigFields) -> Heads:
    """Heads of a decoder; an explicit head_dim wins over hidden_size / num_attention_heads.

    Raises:
        InputError: a field is missing, or hidden_size is no multiple of the heads and no head_dim is given.
    """
    num_heads = fields.integer("num_attention_heads", "n_head")
    head_size = fields.optional_integer("head_dim")
    if head_size is None:
        hidden_size = fields.integer("hidden_size", "n_embd")
        if hidden_size % num_heads:
            raise InputError(
                f"{fields.place}: hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads};"
                " give head_dim"
            )
        head_size = hidden_size // num_heads
    return Heads(
        num_heads=num_heads,
        num_kv_heads=fields.integer_or("num_key_value_heads", num_heads),
        head_size=head_size,
        head_size_v=fields.integer_or("v_head_dim", head_size),
    )


def num_layers(fields: ConfigFields) -> int:
    """Layers of the decoder, draft layers not counted."""
    return fields.integer("num_hidden_layers", "n_layer")


def layer_types(fields: ConfigFields, default: Callable[[int], str]) -> tuple[str, ...]:
    """The type of each layer: from the config's own list, else as the architecture lays them out."""
    listed = per_layer_types(fields, num_layers(fields))
    return listed if listed is not None else tuple(default(index) for index in range(num_layers(fields)))


def every_nth_full(fields: ConfigFields, pattern_field: str, default_pattern: int) -> Callable[[int], str]:
    """Every n-th layer is full, the others slide; n from `pattern_field` where the config has it."""
    pattern = fields.integer_or(pattern_field, default_pattern)
    return lambda index: "sliding_attention" if (index + 1) % pattern else "full_attention"


def window(fields: ConfigFields) -> int:
    """The sliding window, which layers that slide cannot do without."""
    return fields.integer("sliding_window", "sliding_window_size")


def attention_caches(fields: ConfigFields, types: Sequence[str]) -> LayerCaches:
    """Full and sliding layers of equal heads and sizes.

    Raises:
        InputError: a type that is neither, or sliding layers without a window.
    """
    heads = read_heads(fields)
    full = AttentionCache(num_kv_heads=heads.num_kv_heads, head_size=heads.head_size, head_size_v=heads.head_size_v)
    caches: list[tuple[AttentionCache, ...]] = []
    for index, kind in enumerate(types):
        if kind == "full_attention":
            caches.append((full,))
        elif kind == "sliding_attention":
            caches.append((attrs.evolve(full, sliding_window=window(fields)),))
        else:
            raise InputError(
                f"{fields.place}: layer_types[{index}] is {kind!r}; this architecture has full_attention and"
                " sliding_attention layers"
            )
    return tuple(caches)


def decoder(
    fields: ConfigFields,
    layer: Callable[[int], Groups],
    *,
    tied_by_default: bool,
    final_norm: int | None = None,
    more_embeddings: Groups = (),
    more_head: Groups = (),
) -> ModelWeights:
    """Embedding, layers, final norm and output matrix.

    Args:
        fields: the config.
        layer: parameters of the layer of that index.
        tied_by_default: whether the output matrix is the embedding where the config does not say.
        final_norm: parameters of the last norm; None: one per hidden unit.
        more_embeddings: further tables that the first stage holds.
        more_head: further parameters that the last stage holds.
    """
    vocab_size = fields.integer("vocab_size")
    hidden_size = fields.integer("hidden_size", "n_embd")
    tied = fields.flag("tie_word_embeddings", tied_by_default)
    norm = vector("final norm", hidden_size if final_norm is None else final_norm)
    head = (norm, *more_head) if tied else (norm, *more_head, lm_head(vocab_size, hidden_size))
    return ModelWeights(
        embeddings=(embedding("embed_tokens", vocab_size, hidden_size), *more_embeddings),
        layers=tuple(layer(index) for index in range(num_layers(fields))),
        head=head,
        tied=tied,
    )
