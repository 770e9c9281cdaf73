"""How long the requests of a live engine may be: what its scheduler can ever hold, asked before a request is made."""

from ...core.errors import DoesNotFitError
from ...core.scheduler import Scheduler
from ...core.types import Request


class RequestLengths:
    """The bounds on prompt and output, as the scheduler's limits and the pool give them.

    Attributes:
        num_tokens: of prompt and output at most; the last output token is never computed, and not counted.
        num_prompt_tokens: of a prompt at most.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        """Made once; neither limits nor pool change."""
        self._scheduler = scheduler
        self.num_tokens = scheduler.allocator.max_fitting_tokens()
        self.num_prompt_tokens = self.num_tokens
        if not scheduler.config.enable_chunked_prefill:
            self.num_prompt_tokens = min(self.num_tokens, scheduler.config.max_num_batched_tokens)

    def check(self, request: Request) -> None:
        """Refuse what can never be held, and count it as rejected.

        Raises:
            DoesNotFitError: with the numbers.
        """
        try:
            self._scheduler.check_fits(request)
        except DoesNotFitError:
            self._scheduler.stats.num_rejected += 1
            raise

    def most_output_tokens(self, num_prompt_tokens: int) -> int:
        """The largest `max_tokens` behind such a prompt; 0 where the prompt alone is too long."""
        return self.num_tokens + 1 - num_prompt_tokens if num_prompt_tokens <= self.num_prompt_tokens else 0
