"""What a history is played on: the pool, the groups of layers, the rules that are switched on. Plain data."""

import math
from typing import Any, Literal, TypeAlias

import attrs

KindName: TypeAlias = Literal["full", "sliding", "chunked", "compressed", "state"]


@attrs.frozen
class GroupShape:
    """One group of layers, described by what its tokens attend to.

    Attributes:
        kind: "full", "sliding" (a window), "chunked" (the own chunk), "compressed" (one stored state covers several
            tokens) or "state" (only the state after the previous token; a step leaves it in the block where its known
            tokens end, and null blocks in those that it runs past).
        block_size: tokens a block.
        span: tokens of the window, of a chunk, or of one compressed state; 0 where the kind has none.
    """

    kind: KindName
    block_size: int
    span: int = 0

    def attends_from(self, position: int) -> int:
        """The first position that the token at `position` attends to; it attends to all from there on."""
        match self.kind:
            case "sliding":
                return max(0, position - self.span + 1)
            case "chunked":
                return position // self.span * self.span
            case "state":
                return max(0, position - 1)
            case _:
                return 0

    def first_taken(self, num_known: int) -> int:
        """The first table entry that takes a block where a step's known tokens, drafts apart, end at `num_known`."""
        return (num_known - 1) // self.block_size if self.kind == "state" else 0

    @property
    def attends_to_all(self) -> bool:
        """Whether nothing ever falls out of what the next token attends to."""
        return self.kind in ("full", "compressed")


@attrs.frozen
class Scenario:
    """Everything that a manager is made from.

    Attributes:
        num_blocks: blocks of the pool, the reserved null block included.
        groups: groups of layers; they share the pool.
        max_model_len: tokens of the longest request.
        max_num_reqs: requests that hold blocks at the same time.
        enable_caching: whether prefixes are found again.
        use_eagle: whether a hit gives its last block back.
        retention_interval: as in `AllocatorConfig`.
        watermark_blocks: blocks that an admission leaves free when the history asks for it.
        release: as in `AllocatorConfig`.
        orphans: as in `AllocatorConfig`.
        eviction: the name of the eviction order.
    """

    num_blocks: int
    groups: tuple[GroupShape, ...] = (GroupShape("full", 4),)
    max_model_len: int = 256
    max_num_reqs: int = 8
    enable_caching: bool = True
    use_eagle: bool = False
    retention_interval: int | None = None
    watermark_blocks: int = 0
    release: str = "immediate"
    orphans: str = "keep"
    eviction: str = "lru"

    @property
    def block_size(self) -> int:
        """Tokens a block of the first group: the only one, for most managers."""
        return self.groups[0].block_size

    @property
    def alignment(self) -> int:
        """Hits are multiples of this many tokens."""
        return math.lcm(*[group.block_size for group in self.groups])

    @property
    def num_usable_blocks(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    def to_json(self) -> dict[str, Any]:
        """The scenario as JSON values."""
        return attrs.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Scenario":
        """The scenario that `to_json` wrote."""
        groups = tuple([GroupShape(**group) for group in data["groups"]])
        return cls(**{**data, "groups": groups})

    def to_source(self) -> str:
        """A Python expression that makes this scenario, without the fields that have their default."""
        defaults = {field.name: field.default for field in attrs.fields(Scenario)}
        given = {name: getattr(self, name) for name in defaults if getattr(self, name) != defaults[name]}
        return f"Scenario({', '.join([f'{name}={value!r}' for name, value in given.items()])})"
