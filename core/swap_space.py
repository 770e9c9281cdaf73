"""Host memory for the blocks of preempted requests: a count of blocks, no content."""


class SwapSpace:
    """Which preempted requests have a copy in host memory, and how many of their tokens it holds."""

    def __init__(self, num_blocks: int) -> None:
        self._num_free_blocks = num_blocks
        self._kept: dict[str, tuple[int, int]] = {}

    def keep(self, request_id: str, num_tokens: int, num_blocks: int) -> bool:
        """Take a copy of a request's blocks; False if there is no room, or nothing to keep."""
        if not num_tokens or num_blocks > self._num_free_blocks:
            return False
        self._kept[request_id] = num_tokens, num_blocks
        self._num_free_blocks -= num_blocks
        return True

    def num_tokens_of(self, request_id: str) -> int:
        """Tokens, from the first one on, that the copy of a request holds; 0 without a copy."""
        return self._kept.get(request_id, (0, 0))[0]

    def drop(self, request_id: str) -> None:
        """Forget a request's copy, if there is one."""
        _, num_blocks = self._kept.pop(request_id, (0, 0))
        self._num_free_blocks += num_blocks
