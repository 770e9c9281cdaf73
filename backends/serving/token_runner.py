"""What a live engine needs of a model."""

from typing import Protocol

from ...core.types import ScheduledStep
from ..cuda_backend import CudaBackend
from ..step_runner import FinishStep
from .length_limit import LengthLimit
from .model_runner import RequestTokens


class TokenRunner(Protocol):
    """A model on a backend's pool that asks for tokens and hands over logits: `ModelRunner`.

    Attributes:
        backend: whose pool it writes and reads.
        length_limit: how long a request may be.
        tokens: set by the engine.
    """

    backend: CudaBackend
    length_limit: LengthLimit
    tokens: RequestTokens | None

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        ...

    def launch(self, step: ScheduledStep) -> FinishStep:
        """See `StepRunner`."""
        ...
