"""A token-granular manager, as radix caches have it: pages of one token, cached when a request ends, no null page."""

from collections.abc import Sequence

from kvledger.testing import AllocatorView, FoundPrefix, Limits, Placement, RefusedError, Scenario, Supports, supporting

Prefix = tuple[int, ...]


class TokenManager:
    """Every token has a page. What has ended stays findable by its prefix until its pages are needed."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.clean = list(range(scenario.num_usable_blocks))
        self.cached: dict[Prefix, int] = {}  # the one used longest ago first
        self.ref_cnt = [0] * scenario.num_usable_blocks
        self.tables: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}

    def match(self, request_id: str, tokens: Sequence[int]) -> FoundPrefix:
        hit = 0
        while hit < len(tokens) - 1 and tuple(tokens[: hit + 1]) in self.cached:
            hit += 1
        return FoundPrefix(hit, tuple(tokens[:hit]))

    def allocate(self, placement: Placement, found: FoundPrefix | None, limits: Limits) -> bool:
        name, prefix = placement.request_id, found.handle if found else ()
        if prefix and (name in self.tables or prefix not in self.cached):
            raise RefusedError("the prefix is not cached any more, or the request holds pages already")
        if name not in self.tables and len(self.tables) == self.scenario.max_num_reqs:
            raise RefusedError("too many requests")
        hits = [self.cached[prefix[: i + 1]] for i in range(len(prefix))]
        evictable = [page for page in self.cached.values() if not self.ref_cnt[page] and page not in hits]
        if placement.num_new_tokens > len(self.clean) + len(evictable):
            return False
        table = self.tables.setdefault(name, [])
        for page in hits:
            self.ref_cnt[page] += 1
        table += hits
        start = len(table)
        for _ in range(placement.num_new_tokens):
            page = self.clean.pop() if self.clean else self.evict_one()
            self.ref_cnt[page] = 1
            table.append(page)
        self.tokens[name] = list(placement.tokens[: start + placement.num_new_tokens])
        return True

    def evict_one(self) -> int:
        """The deepest prefix that nobody uses among those used longest ago: none behind it is left alone."""
        unused = [prefix for prefix, page in self.cached.items() if not self.ref_cnt[page]]
        inner = {prefix[:-1] for prefix in self.cached}
        return self.cached.pop(next(prefix for prefix in unused if prefix not in inner))

    def free(self, request_id: str) -> None:
        if request_id not in self.tables:
            raise RefusedError("it holds nothing")
        tokens = self.tokens.pop(request_id)
        for i, page in enumerate(self.tables.pop(request_id)):
            self.ref_cnt[page] -= 1
            prefix = tuple(tokens[: i + 1])
            if prefix not in self.cached:
                self.cached[prefix] = page
            elif self.cached[prefix] != page and not self.ref_cnt[page]:
                self.clean.append(page)  # somebody else has cached the same content before

    def view(self) -> AllocatorView:
        return AllocatorView(
            num_blocks=self.scenario.num_usable_blocks,
            tables={name: [list(table)] for name, table in self.tables.items()},
            free=[*self.clean, *[page for page in self.cached.values() if not self.ref_cnt[page]]],
            null_block=None,
            ref_cnt=self.ref_cnt,
            keyed={page: (0, prefix) for prefix, page in self.cached.items()},
            found={(0, prefix): [page] for prefix, page in self.cached.items()},
            key_prefix=tuple,
        )


# A request's tokens become findable when it ends, not while it runs.
@supporting(Supports(block_sizes=(1,), waived=["complete_blocks_are_found", "prompts_are_found_again"]))
def make(scenario: Scenario) -> TokenManager:
    return TokenManager(scenario)
