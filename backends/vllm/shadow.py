"""vLLM's manager and ours side by side: vLLM's decides, ours gets the same calls, and the first difference is reported.

vllm serve MODEL --scheduler-cls kvledger.vllm.ShadowAsyncScheduler
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import attrs

from .blocks import LedgerBlocks
from .manager import LedgerManager
from .names import KVCacheManager, scheduling, utils

_CALLS_KEPT = 24


@attrs.frozen
class Divergence:
    """The first call that the two managers answered differently, with the state around it.

    Attributes:
        step: steps that had begun.
        call: the call, with the request and its numbers.
        theirs: vLLM's answer; block ids by group for blocks.
        ours: our answer.
        state: by name, vLLM's and our value: free blocks, the next ones to be taken, the request's block table.
        calls_before: the calls before it, the last one last.
    """

    step: int
    call: str
    theirs: Any
    ours: Any
    state: dict[str, tuple[Any, Any]]
    calls_before: tuple[str, ...]

    def describe(self) -> str:
        """Return the report as lines of text."""
        lines = [f"step {self.step}, {self.call}: vLLM's manager answers {self.theirs}, ours {self.ours}"]
        for name, (theirs, ours) in self.state.items():
            lines.append(f"  {name}: " + (f"{theirs} in both" if theirs == ours else f"vLLM's {theirs}, ours {ours}"))
        return "\n".join([*lines, "  calls before:", *(f"    {call}" for call in self.calls_before)])


class ShadowManager(KVCacheManager):
    """vLLM's own manager, which decides, and a `LedgerManager` that gets the same calls.

    Answers and free blocks are compared after each call; every `check_every` steps also ref counts, keys and the order
    of the free queue. After the first difference the ledger gets no further calls: the states are no longer comparable.

    Attributes:
        ledger_manager: ours.
        divergence: the first difference; None if there is none so far.
        num_calls: compared calls.
        num_checks: comparisons of the whole state.
    """

    def __init__(self, *args: Any, eviction: str, max_num_reqs: int, check_every: int = 100, **kwargs: Any) -> None:
        """Take vLLM's arguments, those of `LedgerManager`, and every how many steps the whole state is compared."""
        super().__init__(*args, **kwargs)
        ours = dict(kwargs, log_stats=False, metrics_collector=None)
        self.ledger_manager = LedgerManager(*args, eviction=eviction, max_num_reqs=max_num_reqs, **ours)
        self.divergence: Divergence | None = None
        self.num_calls = 0
        self.num_checks = 0
        self._step = 0
        self._check_every = check_every
        self._found: dict[str, LedgerBlocks] = {}
        self._calls: deque[str] = deque(maxlen=_CALLS_KEPT)

    # -- the calls ---------------------------------------------------------------------------------------------------

    def get_computed_blocks(self, request: Any) -> Any:
        """Look up in both."""
        theirs = super().get_computed_blocks(request)

        def ours() -> Any:
            blocks, *numbers = self.ledger_manager.get_computed_blocks(request)
            self._found[request.request_id] = blocks
            return blocks.get_block_ids(), *numbers

        self._compare("get_computed_blocks", request, (theirs[0].get_block_ids(), *theirs[1:]), ours)
        return theirs

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Allocate in both."""
        numbers = num_new_tokens, num_new_computed_tokens
        theirs = super().allocate_slots(request, *numbers, new_computed_blocks, *args, **kwargs)

        def ours() -> Any:
            found = None if new_computed_blocks is None else self._found.pop(request.request_id, None)
            blocks = self.ledger_manager.allocate_slots(request, *numbers, found, *args, **kwargs)
            return None if blocks is None else blocks.get_block_ids()

        answer = None if theirs is None else theirs.get_block_ids()
        self._compare("allocate_slots", request, answer, ours, *numbers, *kwargs.items())
        return theirs

    def free(self, request: Any) -> None:
        """Free in both."""
        super().free(request)
        self._compare("free", request, None, lambda: self.ledger_manager.free(request))

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """Register in both."""
        super().cache_blocks(request, num_computed_tokens)
        register = self.ledger_manager.cache_blocks
        self._compare("cache_blocks", request, None, lambda: register(request, num_computed_tokens))

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Drop keys in both."""
        super().evict_blocks(block_ids)
        self._compare("evict_blocks", None, None, lambda: self.ledger_manager.evict_blocks(block_ids), *block_ids)

    def reset_prefix_cache(self) -> bool:
        """Drop all keys in both."""
        done: bool = super().reset_prefix_cache()
        self._compare("reset_prefix_cache", None, done, self.ledger_manager.reset_prefix_cache)
        return done

    def take_events(self) -> list[Any]:
        """Take the KV events of both."""
        theirs: list[Any] = super().take_events()
        if self.enable_kv_cache_events:
            self._compare("take_events", None, theirs, self.ledger_manager.take_events)
        return theirs

    def take_new_block_ids(self) -> list[int]:
        """Take the blocks to fill with zeros from both."""
        theirs: list[int] = super().take_new_block_ids()
        self._compare("take_new_block_ids", None, theirs, self.ledger_manager.take_new_block_ids)
        return theirs

    def new_step_starts(self) -> None:
        """Begin a step in both; compare the whole state if it is time."""
        super().new_step_starts()
        self._step += 1
        self._compare("new_step_starts", None, None, self.ledger_manager.new_step_starts)
        if self.divergence is None and self._step % self._check_every == 0:
            self.check()

    # -- comparing ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Compare ref counts, keys and the free queue of the two pools. O(blocks)."""
        self.num_checks += 1
        pool, ledger = self.block_pool, self.ledger_manager.ledger.pool
        theirs = [
            (block.ref_cnt, block.block_hash and (utils.get_block_hash(block.block_hash), group_of(block)))
            for block in pool.blocks[1:]
        ]
        ours = [
            (count, None if (key := ledger.key_of(block)) is None else (key, ledger.group_of(block)))
            for block, count in enumerate(ledger.ref_cnts()[1:], 1)
        ]
        for block, (their, our) in enumerate(zip(theirs, ours, strict=True), 1):
            if their != our:
                self._report(f"the whole state: ref_cnt and key of block {block}", their, our, None)
                return
        free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        if free != list(ledger.free_queue.order()):
            self._report("the whole state: the free queue", free[:32], ledger.free_queue.order()[:32], None)

    def _compare(self, name: str, request: Any, theirs: Any, ours: Callable[[], Any], *numbers: Any) -> None:
        if self.divergence is not None:
            return
        self.num_calls += 1
        whose = [] if request is None else [f"{request.request_id!r} at {request.num_computed_tokens}"]
        call = f"{name}({', '.join([*whose, *map(str, numbers)])})"
        try:
            answer = ours()
        except Exception as error:  # vLLM's manager decides, so ours must not stop the server
            answer = f"{type(error).__name__}: {error}"
        our_free, their_free = (
            self.ledger_manager.block_pool.get_num_free_blocks(),
            self.block_pool.get_num_free_blocks(),
        )
        if answer != theirs or our_free != their_free:
            self._report(call, theirs, answer, request)
        self._calls.append(call)

    def _report(self, call: str, theirs: Any, ours: Any, request: Any) -> None:
        pool, manager = self.block_pool, self.ledger_manager
        their_queue = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        our_queue = list(manager.ledger.pool.free_queue.order())
        state: dict[str, tuple[Any, Any]] = {
            "free blocks": (len(their_queue), len(our_queue)),
            "next to be taken": (their_queue[:16], our_queue[:16]),
        }
        if request is not None:
            name = request.request_id
            state["block table"] = (self.get_block_ids(name), manager.get_block_ids(name))
        self.divergence = Divergence(self._step, call, theirs, ours, state, tuple(self._calls))
        scheduling.logger.error("kvledger: vLLM's manager and ours differ\n%s", self.divergence.describe())


def group_of(block: Any) -> int:
    """Return the group of the key of one of vLLM's blocks."""
    return utils.get_group_id(block.block_hash)
