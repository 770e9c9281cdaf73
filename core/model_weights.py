"""The parameters of a model, matrix by matrix: how many, who may quantise them, and how tensor parallelism divides
them.

Counts are those of the architectures themselves (golden/model_geometry.jsonl). Each group also says how wide its
activations are, since the peak of a step follows from the same matrices.
"""

from collections.abc import Iterable
from enum import StrEnum

import attrs

from .parallel_shards import kv_heads_per_rank


class WeightKind(StrEnum):
    """What a group of parameters is; quantisation schemes choose by it."""

    EMBEDDING = "embedding"
    LM_HEAD = "lm_head"
    ATTENTION = "attention"
    MLP = "mlp"
    EXPERT = "expert"
    OTHER = "other"  # norms, biases, routers, gates: never quantised


class Sharding(StrEnum):
    """What tensor parallelism does to a group."""

    SPLIT = "split"
    KV_HEADS = "kv_heads"  # split over KV heads, replicated once there are more ranks than heads
    REPLICATED = "replicated"


@attrs.frozen(kw_only=True)
class WeightGroup:
    """Parameters of one matrix (or of a few that are alike).

    Attributes:
        name: the matrix.
        parameters: of the whole group.
        kind: see `WeightKind`.
        sharding: see `Sharding`.
        num_kv_heads: for `KV_HEADS`.
        width: activation elements a token of this matrix: what a column-parallel one puts out, what a row-parallel
            one takes in. Divided like the parameters. For experts: those that one token visits.
    """

    name: str
    parameters: int
    kind: WeightKind
    sharding: Sharding = Sharding.SPLIT
    num_kv_heads: int | None = None
    width: int = 0

    def on_rank(self, tensor_parallel_size: int) -> int:
        """Parameters that one tensor-parallel rank holds.

        Raises:
            InputError: KV heads that can be neither split nor replicated evenly.
        """
        return self._shard(self.parameters, tensor_parallel_size)

    def width_on_rank(self, tensor_parallel_size: int) -> int:
        """Activation elements a token on one rank."""
        return self._shard(self.width, tensor_parallel_size)

    def _shard(self, amount: int, tensor_parallel_size: int) -> int:
        if self.sharding is Sharding.REPLICATED:
            return amount
        if self.sharding is Sharding.KV_HEADS and self.num_kv_heads is not None:
            return amount // self.num_kv_heads * kv_heads_per_rank(self.num_kv_heads, tensor_parallel_size)
        return -(-amount // tensor_parallel_size)


Groups = tuple[WeightGroup, ...]


@attrs.frozen(kw_only=True)
class ModelWeights:
    """All parameters of a model, in the order of its layers.

    Attributes:
        embeddings: held by the first pipeline stage.
        layers: held by the stage of the layer.
        head: final norm and output matrix, held by the last stage.
        tied: the output matrix is the input embedding; a last stage that is not the first holds a copy.
        left_out: parts of the checkpoint that are not counted (a vision encoder), by name.
    """

    embeddings: Groups
    layers: tuple[Groups, ...]
    head: Groups
    tied: bool
    left_out: tuple[str, ...] = ()

    @property
    def all_groups(self) -> Iterable[WeightGroup]:
        """Every group once."""
        yield from self.embeddings
        for layer in self.layers:
            yield from layer
        yield from self.head

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, tied ones once."""
        return sum(group.parameters for group in self.all_groups)

    def on_stage(self, first_layer: int, num_layers: int) -> Groups:
        """Groups of one pipeline stage, before tensor parallelism."""
        is_first = first_layer == 0
        is_last = first_layer + num_layers == len(self.layers)
        groups: list[WeightGroup] = []
        if is_first or (is_last and self.tied):
            groups.extend(self.embeddings if is_first else (g for g in self.embeddings if g.name == "embed_tokens"))
        for layer in self.layers[first_layer : first_layer + num_layers]:
            groups.extend(layer)
        if is_last:
            groups.extend(self.head)
        return tuple(groups)


def column(name: str, kind: WeightKind, size_in: int, size_out: int) -> WeightGroup:
    """A matrix whose output is divided over ranks."""
    return WeightGroup(name=name, parameters=size_in * size_out, kind=kind, width=size_out)


def row(name: str, kind: WeightKind, size_in: int, size_out: int) -> WeightGroup:
    """A matrix whose input is divided over ranks."""
    return WeightGroup(name=name, parameters=size_in * size_out, kind=kind, width=size_in)


def whole(name: str, kind: WeightKind, size_in: int, size_out: int) -> WeightGroup:
    """A matrix that every rank holds."""
    return WeightGroup(
        name=name, parameters=size_in * size_out, kind=kind, sharding=Sharding.REPLICATED, width=size_out
    )


def vector(name: str, parameters: int) -> WeightGroup:
    """Norm weights, biases and other parameters that every rank holds in full precision."""
    return WeightGroup(name=name, parameters=parameters, kind=WeightKind.OTHER, sharding=Sharding.REPLICATED)


def kv_column(name: str, size_in: int, num_kv_heads: int, head_size: int) -> WeightGroup:
    """The key or value projection."""
    return WeightGroup(
        name=name,
        parameters=size_in * num_kv_heads * head_size,
        kind=WeightKind.ATTENTION,
        sharding=Sharding.KV_HEADS,
        num_kv_heads=num_kv_heads,
        width=num_kv_heads * head_size,
    )


@attrs.frozen(kw_only=True)
class AttentionShape:
    """The shape of a layer's attention with separate queries, keys and values.

    Attributes:
        qk_norm: parameters of query and key norms.
        q_outputs: query projections in one matrix (2 where an output gate is computed beside the queries).
        shared_kv: False: keys and values of its own; True: it reads another layer's.
        value_is_key: values are the keys' projection.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: int = 0
    q_outputs: int = 1
    shared_kv: bool = False
    value_is_key: bool = False

    def groups(self) -> Groups:
        """Projections, biases and norms."""
        kind = WeightKind.ATTENTION
        query_width = self.num_heads * self.head_size * self.q_outputs
        groups = [column("q_proj", kind, self.hidden_size, query_width)]
        if not self.shared_kv:
            groups.append(kv_column("k_proj", self.hidden_size, self.num_kv_heads, self.head_size))
            if not self.value_is_key:
                groups.append(kv_column("v_proj", self.hidden_size, self.num_kv_heads, self.head_size_v))
        groups.append(row("o_proj", kind, self.num_heads * self.head_size_v, self.hidden_size))
        bias = (query_width + self.num_kv_heads * (self.head_size + self.head_size_v)) if self.qkv_bias else 0
        bias += self.hidden_size if self.output_bias else 0
        extra = bias + self.qk_norm
        return (*groups, vector("attention biases and norms", extra)) if extra else tuple(groups)


def gated_mlp(hidden_size: int, intermediate_size: int, bias: bool = False) -> Groups:
    """Gate, up and down projections."""
    groups = (
        column("gate_up_proj", WeightKind.MLP, hidden_size, 2 * intermediate_size),
        row("down_proj", WeightKind.MLP, intermediate_size, hidden_size),
    )
    return (*groups, vector("mlp biases", 2 * intermediate_size + hidden_size)) if bias else groups


def plain_mlp(hidden_size: int, intermediate_size: int) -> Groups:
    """Up and down projections with biases (GPT-2, OPT, Phi)."""
    return (
        column("fc1", WeightKind.MLP, hidden_size, intermediate_size),
        row("fc2", WeightKind.MLP, intermediate_size, hidden_size),
        vector("mlp biases", intermediate_size + hidden_size),
    )


def experts(hidden_size: int, intermediate_size: int, num_experts: int, num_experts_per_tok: int) -> Groups:
    """Routed gated experts and the router."""
    per_expert = hidden_size * intermediate_size
    kind = WeightKind.EXPERT
    return (
        WeightGroup(
            name="experts.gate_up_proj",
            parameters=2 * num_experts * per_expert,
            kind=kind,
            width=2 * num_experts_per_tok * intermediate_size,
        ),
        WeightGroup(
            name="experts.down_proj",
            parameters=num_experts * per_expert,
            kind=kind,
            width=num_experts_per_tok * intermediate_size,
        ),
        # Each visited expert's output is kept until they are summed, so its width counts beside the router's matrix.
        attrs.evolve(vector("router", hidden_size * num_experts), width=num_experts_per_tok * hidden_size),
    )


def embedding(name: str, vocab_size: int, hidden_size: int) -> WeightGroup:
    """An embedding table, divided over ranks by rows."""
    return WeightGroup(name=name, parameters=vocab_size * hidden_size, kind=WeightKind.EMBEDDING)


def lm_head(vocab_size: int, hidden_size: int) -> WeightGroup:
    """The output matrix."""
    return WeightGroup(name="lm_head", parameters=vocab_size * hidden_size, kind=WeightKind.LM_HEAD)
