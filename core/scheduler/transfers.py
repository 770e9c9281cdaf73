"""Requests whose keys and values are on their way: they hold blocks, and compute nothing yet."""

from collections import deque

import attrs

from ..types import Request


@attrs.frozen(eq=False)
class IncomingTransfer:
    """A request that waits for content from another engine.

    Attributes:
        request: whose.
        row: of the block tables, which it holds already.
        num_found_tokens: where it goes on once the content is there: tokens found here and tokens copied in.
    """

    request: Request
    row: int
    num_found_tokens: int


class IncomingTransfers:
    """Under way, and there but not running yet. Blocks that are being written into stay held, whoever gives up."""

    def __init__(self) -> None:
        self._under_way: dict[str, IncomingTransfer] = {}
        self._aborted: set[str] = set()
        self._there: deque[IncomingTransfer] = deque()

    def __len__(self) -> int:
        """Requests that wait, for content or for a place."""
        return len(self._under_way) + len(self._there)

    def __contains__(self, request_id: str) -> bool:
        """Whether a copy writes into blocks of a request, aborted or not."""
        return request_id in self._under_way or request_id in self._aborted

    @property
    def are_there(self) -> bool:
        """Whether any request could run."""
        return bool(self._there)

    def begin(self, transfer: IncomingTransfer) -> None:
        """Its copy begins."""
        self._under_way[transfer.request.request_id] = transfer

    def end(self, request_id: str) -> bool:
        """Its copy is there; False if the request was aborted meanwhile."""
        if request_id in self._aborted:
            self._aborted.remove(request_id)
            return False
        self._there.append(self._under_way.pop(request_id))
        return True

    def next_there(self) -> IncomingTransfer:
        """Remove and return the one whose content came first."""
        return self._there.popleft()

    def abort(self, request_id: str) -> bool:
        """The request ends; True if its blocks have to stay until the copy has ended."""
        if self._under_way.pop(request_id, None) is not None:
            self._aborted.add(request_id)
            return True
        self._there = deque(one for one in self._there if one.request.request_id != request_id)
        return False
