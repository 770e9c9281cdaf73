"""The same greedy requests on one model, served by three: the live engine, transformers' batching, and `generate`.

Each contender keeps what it needs between runs (pool, graphs), makes the model attend in its own way when its turn
comes, and finds no prefix of an earlier run. Nothing here needs a GPU.
"""

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import numpy as np
import torch
from kvledger.backends.serving import EngineOptions, LiveEngine, SamplingSettings, SizedEngine, size_engine
from kvledger.core.types import ScheduledStep, StepResult
from kvledger.sim.latency.fitted import MeasuredSteps

BLOCK_SIZE = 16
TRANSFORMERS_PAGE_SIZE = 256
# Whoever says nothing for so long will not end.
TRANSFORMERS_PATIENCE_S = 120
# Tokens of one forward pass, for those that can be told.
MAX_BATCHED_TOKENS = 8192
# As the token that ends an output: nothing ends one but its length. None would be the model's own.
NO_TOKEN = -1

Prompts = Sequence[Sequence[int]]


@attrs.frozen(eq=False)
class Loaded:
    """A model that is in memory already, for `size_engine`."""

    model: Any


class Contender(Protocol):
    """Generates for many prompts at once.

    Attributes:
        name: for the table.
    """

    name: str

    def generate(self, prompts: Prompts, num_tokens: int) -> list[list[int]]:
        """Exactly `num_tokens` output tokens of each prompt, greedily; returns when the last one is on the host."""
        ...

    def close(self) -> None:
        """Free what was kept."""
        ...


class LiveContender:
    """`LiveEngine`, sized as `kvledger serve` sizes it.

    Attributes:
        name: for the table.
        sized: what it runs on.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_num_seqs: int,
        max_model_len: int,
        enforce_eager: bool = False,
    ) -> None:
        """Size the pool for `max_num_seqs` requests of the longest length, and start.

        Args:
            model: on its device.
            max_num_seqs: requests of one step.
            max_model_len: prompt and output of one.
            enforce_eager: no graphs.
        """
        self.name = "LiveEngine, eager" if enforce_eager else "LiveEngine"
        self._model = model
        blocks_per_request = -(-max_model_len // BLOCK_SIZE)
        options = EngineOptions(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(MAX_BATCHED_TOKENS, max_num_seqs),
            max_model_len=max_model_len,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=max_num_seqs * blocks_per_request + 1,
            enforce_eager=enforce_eager,
            enable_prefix_caching=False,
        )
        self.sized: SizedEngine[Loaded] = size_engine(lambda: Loaded(model), options, device=model.device)
        self._attention: str = model.config._attn_implementation
        self._loads: list[tuple[int, ...]] = []
        self._seconds: list[float] = []
        self._engine = LiveEngine(
            self.sized.runner, allocator=self.sized.allocator, scheduler=self.sized.scheduler, observers=[self._note]
        )
        self.sized.runner.release_model()

    def _note(self, step: ScheduledStep, result: StepResult, _outcome: object) -> None:
        self._loads.append(tuple(step.load))
        self._seconds.append(result.seconds)

    def generate(self, prompts: Prompts, num_tokens: int) -> list[list[int]]:
        """See `Contender`."""
        return self.generate_each(prompts, [num_tokens] * len(prompts))

    def generate_each(self, prompts: Prompts, num_tokens: Sequence[int]) -> list[list[int]]:
        """Output tokens of each prompt, as many as said of it."""
        attention = self._model.config._attn_implementation
        self._model.set_attn_implementation(self._attention)
        try:
            requests = [
                self._engine.submit(prompt, SamplingSettings(max_tokens=count, temperature=0))
                for prompt, count in zip(prompts, num_tokens, strict=True)
            ]
            return [list(request.result().token_ids) for request in requests]
        finally:
            self._model.set_attn_implementation(attention)

    def take_steps(self) -> MeasuredSteps:
        """The steps since the last call: what each computed, and how long it took."""
        loads, self._loads = self._loads, []
        seconds, self._seconds = self._seconds, []
        return MeasuredSteps(np.array(loads, dtype=np.int64), np.array(seconds))

    def close(self) -> None:
        """See `Contender`."""
        self._engine.shutdown(drain=False)


class TransformersBatching:
    """Transformers' continuous batching, with graphs and kernels as it chooses them.

    Attributes:
        name: for the table.
    """

    def __init__(self, model: Any, *, max_num_seqs: int, max_model_len: int) -> None:
        """Start it, with a cache as large as the live engine's; arguments as of `LiveContender`."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        pages_per_request = -(-max_model_len // TRANSFORMERS_PAGE_SIZE)
        # Renamed in transformers 5.24.
        fields = inspect.signature(ContinuousBatchingConfig).parameters
        page_size: dict[str, Any] = {"page_size" if "page_size" in fields else "block_size": TRANSFORMERS_PAGE_SIZE}
        self._model, self._own_attention = model, model.config._attn_implementation
        try:
            self._manager = model.init_continuous_batching(
                generation_config=GenerationConfig(
                    do_sample=False, max_new_tokens=max_model_len, eos_token_id=NO_TOKEN
                ),
                continuous_batching_config=ContinuousBatchingConfig(
                    **page_size,
                    num_blocks=max_num_seqs * pages_per_request + 1,
                    max_batch_tokens=MAX_BATCHED_TOKENS,
                    max_requests_per_batch=max_num_seqs,
                    allow_block_sharing=False,
                ),
            )
            self._attention: str = model.config._attn_implementation
            self.name = f"transformers' continuous batching ({self._attention})"
            with torch.no_grad():
                self._manager.warmup()
            self._manager.start()
        finally:  # also where it cannot start: the others attend as before
            model.set_attn_implementation(self._own_attention)

    def generate(self, prompts: Prompts, num_tokens: int) -> list[list[int]]:
        """See `Contender`."""
        self._model.set_attn_implementation(self._attention)
        try:
            names = self._manager.add_requests([list(prompt) for prompt in prompts], max_new_tokens=num_tokens)
            outputs: dict[str, list[int]] = {}
            while len(outputs) < len(names):
                result = self._manager.get_result(timeout=TRANSFORMERS_PATIENCE_S)
                if result is None or result.error is not None:
                    raise RuntimeError(f"transformers' continuous batching ended early: {result and result.error}")
                if result.is_finished():
                    outputs[result.request_id] = list(result.generated_tokens)
            return [outputs[name] for name in names]
        finally:
            self._model.set_attn_implementation(self._own_attention)

    def close(self) -> None:
        """See `Contender`."""
        try:
            self._manager.stop(block=True, timeout=TRANSFORMERS_PATIENCE_S)
            self._manager.destroy()
        finally:
            self._model.set_attn_implementation(self._own_attention)


class PlainGenerate:
    """`model.generate` over one batch, padded on the left, with its own cache.

    Attributes:
        name: for the table.
    """

    def __init__(self, model: Any) -> None:
        """Nothing is kept."""
        self.name = f"generate ({model.config._attn_implementation})"
        self._model = model

    def generate(self, prompts: Prompts, num_tokens: int) -> list[list[int]]:
        """See `Contender`."""
        from transformers import GenerationConfig

        longest = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        outputs = self._model.generate(
            ids.to(self._model.device),
            attention_mask=mask.to(self._model.device),
            generation_config=GenerationConfig(
                do_sample=False, max_new_tokens=num_tokens, pad_token_id=0, eos_token_id=NO_TOKEN
            ),
        )
        return outputs[:, longest:].tolist()

    def close(self) -> None:
        """See `Contender`."""
