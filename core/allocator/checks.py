"""What a command refuses before it changes anything: rows that no request holds, wrong positions, counts below 0."""

from typing import NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, MisuseError
from ..events import FreeReason
from ..ledger.state import LedgerState
from ..types import Request, largest, smallest
from .config import AllocatorConfig

Rows: TypeAlias = NDArray[np.int64]
IntOrEach: TypeAlias = int | NDArray[np.int64]

_NO_TIMES: NDArray[np.intp] = np.empty(0, dtype=np.intp)

# The other reasons belong to `release_out_of_window` and `truncate`, which free a part of the request.
REASONS_TO_FREE_ALL = (FreeReason.FINISHED, FreeReason.PREEMPTED, FreeReason.ABORTED)


class CommandChecks:
    """Checks the arguments of commands. Each check raises before the first event, so a refusal changes nothing."""

    def __init__(self, config: AllocatorConfig, state: LedgerState) -> None:
        self._config = config
        self._state = state

    def rows(self, rows: Rows) -> None:
        """Raise `MisuseError` unless the rows are distinct and held. Fancy indexing alone would wrap -1."""
        try:
            times = np.bincount(rows, minlength=self._config.max_num_reqs)
        except ValueError:
            times = _NO_TIMES
        if len(times) != self._config.max_num_reqs:
            row = int(rows.min()) if int(rows.min()) < 0 else int(rows.max())
            raise MisuseError(f"no row {row}: rows are 0 to {self._config.max_num_reqs - 1}")
        held = self._state.row_is_held[rows]
        if len(rows) and not (held.item(held.argmin()) and times.item(times.argmax()) == 1):
            row = int((times > self._state.row_is_held).argmax())
            if self._state.row_is_held[row]:
                raise MisuseError(f"row {row} is named {int(times[row])} times in one batch; name each request once")
            raise MisuseError(f"row {row} is held by no request: it was never allocated, or freed already")

    def counts(self, new: IntOrEach, drafts: IntOrEach = 0, lookahead: int = 0, reserved: int = 0) -> None:
        """Raise `InputError` unless each row gets at least one new token and no count is below 0."""
        fewest_new = new if isinstance(new, int) else smallest(new) if len(new) else 1
        if isinstance(drafts, int) and 0 <= drafts <= fewest_new >= 1 and lookahead >= 0 and reserved >= 0:
            return
        if np.count_nonzero(np.less(new, 1)):
            raise InputError(f"num_new_tokens must be at least 1, not {int(np.min(new))}")
        if np.count_nonzero(np.less(drafts, 0)) or np.count_nonzero(np.greater(drafts, new)):
            raise InputError(f"num_draft_tokens {drafts} must be within 0 and num_new_tokens {new}")
        if lookahead < 0 or reserved < 0:
            raise InputError(f"num_lookahead_tokens {lookahead} and reserved_blocks {reserved} must not be below 0")

    def steps(self, num_steps: int, placed: NDArray[np.int64]) -> None:
        """Raise `InputError` unless there is at least one step, and room for all steps behind the placed tokens."""
        if num_steps < 1:
            raise InputError(f"num_steps must be at least 1, not {num_steps}")
        room = self._config.max_model_len - largest(placed) if len(placed) else num_steps
        if num_steps > room:
            raise InputError(
                f"num_steps {num_steps}: max_model_len {self._config.max_model_len} leaves room for {room}"
            )

    def external(self, request: Request, num_hit_tokens: int, num_external_tokens: int) -> None:
        """Raise `InputError` unless external tokens leave at least one known token to compute."""
        if num_external_tokens < 0 or num_hit_tokens + num_external_tokens >= request.num_tokens:
            raise InputError(
                f"request {request.request_id!r} has {request.num_tokens} tokens; a hit of {num_hit_tokens} and "
                f"{num_external_tokens} external ones must leave one to be computed"
            )

    def start(self, row: int | None, request_id: str, start: int) -> None:
        """Raise `MisuseError` unless a request can continue at `start`.

        That is so within its placed tokens, if it still holds everything that its next token attends to.
        """
        placed = 0 if row is None else self._state.placed[row]
        if not 0 <= start <= placed:
            raise MisuseError(f"request {request_id!r} cannot continue at position {start}: {placed} tokens are placed")
        if row is not None and start < placed:
            self.still_attended(row, request_id, start)

    def still_attended(self, row: int, request_id: str, start: int) -> None:
        """Raise `MisuseError` if a block that position `start` attends to has gone out of window."""
        for kind, skipped in zip(self._config.groups, self._state.skipped, strict=True):
            gone = skipped[row] * kind.block_size
            if kind.num_skipped_tokens(start) < gone:
                raise MisuseError(
                    f"request {request_id!r} cannot go back to {start} tokens: {kind} has released the first {gone}, "
                    "which the next token would attend to"
                )
        for group, table in enumerate(self._state.tables):
            index = (start - 1) // table.block_size
            if table.keeps_states and start and not table.block(row, index):
                raise MisuseError(
                    f"request {request_id!r} cannot go back to {start} tokens: the step that computed the last of them "
                    f"went on, and left no state in block {index} of group {group}"
                )

    def starts(self, rows: Rows, first: NDArray[np.int64], placed: NDArray[np.int64]) -> None:
        """Do the check `start` for a batch."""
        for place in np.flatnonzero(first != placed).tolist():
            row = int(rows[place])
            self.start(row, str(self._state.request_of[row]), int(first[place]))

    @staticmethod
    def refuse_reason(reason: FreeReason) -> NoReturn:
        """Raise `InputError` for a reason that is not one for freeing all of a request's blocks."""
        raise InputError(
            f"a request is freed because it is {', '.join(sorted(REASONS_TO_FREE_ALL))}, not {reason}; "
            "release_out_of_window and truncate free a part"
        )
