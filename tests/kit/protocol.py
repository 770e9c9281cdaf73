"""What a block manager offers to be tested, and how it says that it refuses something.

Only `allocate`, `free` and `view` are required. Every further method is a capability: the kit looks whether it is
there, and plays the histories that the manager can play.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import attrs
from kvledger.testing.scenario import KindName, Scenario
from kvledger.testing.view import AllocatorView


class RefusedError(Exception):
    """The manager refuses a command because a rule was broken (double free, stale match). Nothing has changed."""


class NeverFitsError(Exception):
    """The manager refuses a command because it could not be carried out in an empty pool. Nothing has changed."""


class FactoryError(Exception):
    """The factory made no manager from a scenario that it says it supports."""


@attrs.frozen
class FoundPrefix:
    """What a lookup returns.

    Attributes:
        num_hit_tokens: tokens whose content need not be computed again.
        handle: whatever the manager wants back in `allocate`.
        blocks: by group and logical index, 0 where a group skips; None if the manager does not tell.
    """

    num_hit_tokens: int
    handle: Any = None
    blocks: tuple[tuple[int, ...], ...] | None = None


@attrs.frozen
class Placement:
    """Where one request goes on.

    Attributes:
        request_id: whose tokens.
        tokens: every token known so far, prompt and output.
        start: the position of the first new token; below the placed ones after rejected drafts or a crop.
        num_new_tokens: tokens that need slots from `start` on (behind a hit, if one is adopted). Those behind the
            known tokens are drafts: they must never be found by anybody.
        num_external_tokens: tokens before the new ones, behind the hit, whose content is copied in from elsewhere; they
            need slots as well. Without new tokens behind them their content comes before the request's next command,
            and until then they must not be found.
    """

    request_id: str
    tokens: Sequence[int]
    start: int
    num_new_tokens: int
    num_external_tokens: int = 0


@attrs.frozen
class Limits:
    """What a placement must leave room for; all 0 unless the manager supports it.

    Attributes:
        num_lookahead_tokens: further slots that must exist behind the new tokens, up to max_model_len.
        reserved_blocks: free blocks that must stay free.
        use_watermark: whether the scenario's `watermark_blocks` must stay free as well.
    """

    num_lookahead_tokens: int = 0
    reserved_blocks: int = 0
    use_watermark: bool = False


class AllocatorUnderTest(Protocol):
    """The least that a block manager offers. `RefusedError` and `NeverFitsError` are its ways to say no for good."""

    def allocate(self, placement: Placement, found: FoundPrefix | None, limits: Limits) -> bool:
        """Give a request slots, adopting what a lookup found. False: not now, and nothing has changed."""
        ...

    def free(self, request_id: str) -> None:
        """Give back everything that the request holds."""
        ...

    def view(self) -> AllocatorView:
        """The state, to be looked at."""
        ...


# Optional methods, with the signatures that the kit calls them with.
CAPABILITIES = {
    "match": "match(request_id: str, tokens: Sequence[int]) -> FoundPrefix",
    "can_admit": "can_admit(request_id, tokens, found: FoundPrefix | None, limits: Limits) -> bool",
    "append": "append(placements: Sequence[Placement], limits: Limits) -> bool  (all of them or none)",
    "release_out_of_window": "release_out_of_window(request_id: str, num_computed_tokens: int) -> None",
    "truncate": "truncate(request_id: str, num_tokens: int) -> None",
    "fork": "fork(parent_id: str, child_id: str, tokens: Sequence[int]) -> None",
    "preempt": "preempt(request_id: str) -> None",
    "abort": "abort(request_id: str) -> None",
    "evict": "evict(blocks: Sequence[int]) -> None",
    "reset": "reset() -> None  (RefusedError while blocks are in use)",
    "release_blocks": "release_blocks(blocks: Sequence[int]) -> None  (the pool's own release, to be misused)",
    "rebuild": "rebuild() -> tuple[Any, Any]  (the state, and the state that the events so far rebuild)",
}

ManagerFactory: TypeAlias = Callable[[Scenario], AllocatorUnderTest]


def capabilities_of(manager: AllocatorUnderTest) -> frozenset[str]:
    """The optional methods that a manager has."""
    return frozenset([name for name in CAPABILITIES if callable(getattr(manager, name, None))])


def _names(value: Any) -> frozenset[str]:
    return frozenset(value)


@attrs.frozen
class Supports:
    """Which scenarios and arguments a manager is made for; put one on the factory as `make.supports`.

    Attributes:
        kinds: group kinds.
        max_groups: groups that share the pool.
        block_sizes: block sizes that it can have; empty: any.
        options: of "eagle", "external" (tokens), "async_loads" (external tokens without new ones), "retention",
            "lookahead", "drafts", "rollback", "reserved", "watermark", "deferred", "drop_orphans", "no_caching",
            "ordered" (`view().free` is in eviction order), "tail_first" (under "lru", what a request gives back stands
            in it last block first, and of several groups the first one first), "refuses_for_good" (`NeverFitsError`
            from `allocate`): what else it understands.
        evictions: names of eviction orders.
        waived: names of invariants that the manager does not promise; say why beside it.
    """

    kinds: frozenset[KindName] = attrs.field(default=frozenset({"full"}), converter=frozenset[Any])
    max_groups: int = 1
    block_sizes: tuple[int, ...] = ()
    options: frozenset[str] = attrs.field(default=frozenset(), converter=_names)
    evictions: tuple[str, ...] = ("lru",)
    waived: frozenset[str] = attrs.field(default=frozenset(), converter=_names)

    def allows(self, scenario: Scenario) -> bool:
        """Whether the manager is made for this scenario."""
        wanted = {
            "eagle": scenario.use_eagle,
            "retention": scenario.retention_interval is not None,
            "watermark": scenario.watermark_blocks > 0,
            "deferred": scenario.release == "deferred",
            "drop_orphans": scenario.orphans == "drop",
            "no_caching": not scenario.enable_caching,
        }
        return (
            len(scenario.groups) <= self.max_groups
            and all(group.kind in self.kinds for group in scenario.groups)
            and all(not self.block_sizes or group.block_size in self.block_sizes for group in scenario.groups)
            and scenario.eviction in self.evictions
            and all(name in self.options for name, on in wanted.items() if on)
        )


_SUPPORTS = "supports"
Made = TypeVar("Made", bound=Callable[[Scenario], Any])


def supporting(supports: Supports) -> Callable[[Made], Made]:
    """Say on a factory what its managers are made for.

    @supporting(Supports(options=["lookahead"]))
    def make(scenario): ...
    """

    def mark(make: Made) -> Made:
        setattr(make, _SUPPORTS, supports)
        return make

    return mark


def supports_of(make: ManagerFactory) -> Supports:
    """What the factory says that it supports; else one group of full attention and nothing special."""
    return getattr(make, _SUPPORTS, None) or Supports()


def name_of(make: ManagerFactory) -> str:
    """`module:name`, as the option `--kvledger-allocator` takes it."""
    return f"{make.__module__}:{getattr(make, '__qualname__', type(make).__qualname__)}"
