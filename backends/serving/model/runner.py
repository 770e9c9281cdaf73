"""Runs a transformers model on a whole continuous batch at once: prefill chunks and decodes side by side.

    runner = ModelRunner(model, backend, tokens)
    backend.runner = runner                       # submit launches it, collect finishes it

On a CPU the kernels are the plain-torch twins, on a GPU Triton's, and decode steps can be captured in CUDA graphs
(`ModelRunner.capture`).
"""

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from ....core.errors import InputError, MisuseError
from ....core.models.geometry import ModelGeometry
from ....core.types import ScheduledStep, TokenBatch
from ...cuda.backend import CudaBackend
from ...cuda.graphs import GraphCapturer
from ...cuda.staging import on_device
from ...cuda.step_runner import FinishStep
from .attention import BATCH_KEYWORD, PagedBatch, register_paged_attention
from .decode_graphs import DecodeGraphs, checked_capture_sizes
from .served_model import LengthLimit, length_limit, served_layers, transformers_geometry

# With this method some models check their first and last token in every forward pass, to warn of padding without a
# mask. A flat batch has no padding, and the check waits for the device.
_PADDING_CHECK = "warn_if_padding_and_no_attention_mask"
# Tokens of a chunk that one attention program can process at once, for any heads.
QUERY_TILES = (1, 2, 4, 8, 16)


def _num_reqs_of_most_programs(num_tokens: int, max_num_reqs: int, tile: int) -> int:
    """Return the number of requests that `num_tokens` must be divided among so that attention needs the most programs.

    A program takes `tile` tokens; every request has as many programs as the mean one fills.
    """
    return max(range(1, max_num_reqs + 1), key=lambda num_reqs: num_reqs * -(-num_tokens // (num_reqs * tile)))


@attrs.frozen(eq=False)
class StepTokens:
    """The tokens that a step computes.

    Attributes:
        token_ids: int64 `[num_tokens]`, in batch order.
        sampled: int64 `[num_sampled]`, positions in the batch, ascending, of the requests that get a next token: those
            whose last known token is among `token_ids`. Only these get logits.
    """

    token_ids: NDArray[np.int64]
    sampled: NDArray[np.int64]


class RequestTokens(Protocol):
    """Knows the tokens of the requests and chooses the next ones (a live engine)."""

    def step_tokens(self, step: ScheduledStep) -> StepTokens:
        """Return the tokens of a step's batch."""
        ...

    def sample(self, step: ScheduledStep, tokens: StepTokens, logits: torch.Tensor) -> FinishStep:
        """Start choosing the next tokens from logits `[num_sampled, vocab_size]`, without waiting for the device.

        Returns:
            A function that waits for them; `collect` calls it once. The `stopped` of its `StepOutputs` ends requests.
        """
        ...


class ModelRunner:
    """Runs a causal language model on a backend's pool; a `StepRunner` once it has `RequestTokens`.

    It puts the model into evaluation mode and replaces its attention by the registered one, so that the model no longer
    runs alone (see `release_model`).

    Attributes:
        model: the transformers model.
        backend: the model's layers write and read its pool.
        tokens: knows the requests' tokens; None: not set yet.
        geometry: the model's geometry.
        length_limit: the longest request.
        graphs: captured decode steps; None: every step runs eagerly.
    """

    def __init__(self, model: Any, backend: CudaBackend, tokens: RequestTokens | None = None) -> None:
        """Connect a model to a backend.

        Args:
            model: a transformers causal language model on the backend's device.
            backend: initialized with a plan of the model's layers (`kv_cache_config`).
            tokens: knows the tokens; may be set later, `run` does not need it.

        Raises:
            InputError: the model cannot be served, is on another device than the backend, or has layers that are not in
                the backend's plan.
        """
        self.model = model
        self.backend = backend
        self.tokens = tokens
        self.geometry: ModelGeometry = transformers_geometry(model)
        self.length_limit: LengthLimit = length_limit(model, self.geometry.max_position_embeddings)
        self.graphs: DecodeGraphs | None = None
        self._layers = served_layers(self.geometry)
        self._check(model)
        self._own_attention: str = model.config._attn_implementation
        for module in model.modules():
            if hasattr(module, _PADDING_CHECK):
                setattr(module, _PADDING_CHECK, lambda _input_ids, _attention_mask: None)
        model.eval()
        model.set_attn_implementation(register_paged_attention())

    def _check(self, model: Any) -> None:
        name = type(model).__name__
        if not getattr(model, "_supports_attention_backend", False):
            raise InputError(
                f"{name} does not let its attention be replaced (no _supports_attention_backend); serve another model, "
                "or give it a LedgerCache, which needs no such thing"
            )
        if "logits_to_keep" not in inspect.signature(model.forward).parameters:
            raise InputError(
                f"{name} has no logits_to_keep, so it cannot compute logits for some tokens only; give a causal "
                "language model"
            )
        if model.device != self.backend.device and model.device.type != self.backend.device.type:
            raise InputError(f"{name} is on {model.device} and the backend on {self.backend.device}; move one of them")
        missing = [layer.name for layer in self._layers if layer.name not in self.backend.layers]
        if missing:
            raise InputError(
                f"the backend has no cache for {', '.join(missing)} of {name}; initialize it with kv_cache_config of "
                "this model"
            )

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self.geometry.vocab_size

    def release_model(self) -> None:
        """Restore the model's own attention."""
        self.model.set_attn_implementation(self._own_attention)
        for module in self.model.modules():
            vars(module).pop(_PADDING_CHECK, None)

    def launch(self, step: ScheduledStep) -> FinishStep:
        """Run the step's batch and start choosing its next tokens; never waits for a GPU.

        Raises:
            MisuseError: `tokens` is None.
            InputError: the step has draft tokens.
        """
        if self.tokens is None:
            raise MisuseError("the runner does not know the requests' tokens; set its `tokens` first")
        if step.num_draft_tokens is not None and step.num_draft_tokens.any():
            raise InputError("a step with draft tokens; set num_speculative_tokens to 0: nothing verifies drafts here")
        tokens = self.tokens.step_tokens(step)
        logits = self.run(tokens.token_ids, step.batch, tokens.sampled)
        return self.tokens.sample(step, tokens, logits)

    @torch.no_grad()
    def run(self, token_ids: NDArray[np.int64], batch: TokenBatch, sampled: NDArray[np.int64]) -> torch.Tensor:
        """One forward pass.

        Args:
            token_ids: int64 `[num_tokens]`, in batch order.
            batch: their requests and positions; their slots are computed here unless they are known.
            sampled: int64 `[num_sampled]`, positions in the batch, ascending, of the requests whose last token needs
                logits.

        Returns:
            `[num_sampled, vocab_size]` on the device, in the model's dtype; if decode steps are captured, the next one
            overwrites them.

        Raises:
            InputError: another number of tokens than the batch has, or positions that the model does not have.
            MisuseError: a layer of the model did not use the registered attention.
        """
        if len(token_ids) != batch.num_tokens:
            raise InputError(f"{len(token_ids)} token ids for a batch of {batch.num_tokens} tokens")
        longest = int((batch.first_positions + batch.counts).max(initial=0))
        self.length_limit.check(longest, "a request's length")
        self.backend.slot_mapping(batch)
        size = None if self.graphs is None else self.graphs.size_for(batch)
        if self.graphs is not None and size is not None:
            logits = self.graphs.replay(size, token_ids)
            return logits if len(sampled) == len(logits) else logits[self._to_device(sampled)]
        last_tokens = batch.query_start_loc()[1:][sampled] - 1
        return self._forward(
            self._to_device(token_ids),
            self._to_device(batch.positions()),
            len(batch.rows),
            logits_to_keep=self._to_device(last_tokens),
        )

    @torch.no_grad()
    def warm_up(self) -> None:
        """Run the model on padding, so that every kernel, that of attention too, is compiled before the first request.

        Kernels are compiled for the model's heads, windows, softcaps and dtypes, and attention once with splits along
        the sequence and once without: the step with the fewest tokens splits if any step does, and the steps with the
        most programs do not split if any step does not. Useful on a GPU only: elsewhere nothing is compiled, and it
        takes as long as several of the largest steps. The backend's tables must exist (`create_tables`), and no step
        may be in flight. The cache is unchanged.
        """
        max_num_tokens = self.backend.slots.shape[1]
        most = min(len(self.backend.inputs.rows), max_num_tokens)
        shapes = {(1, 1), (most, most)}
        shapes |= {(max_num_tokens, _num_reqs_of_most_programs(max_num_tokens, most, tile)) for tile in QUERY_TILES}
        nothing = np.zeros(0, dtype=np.int64)
        self.backend.slot_mapping(TokenBatch(nothing, nothing, nothing))
        for num_tokens, num_reqs in sorted(shapes):
            padding = self._to_device(np.zeros(num_tokens, dtype=np.int64))
            self._forward(padding, padding, num_reqs, logits_to_keep=padding[:1])

    @torch.no_grad()
    def capture(self, sizes: Sequence[int], capturer: GraphCapturer) -> DecodeGraphs:
        """Capture decode steps; from now on a step of single tokens, of at most the largest size, is replayed.

        The backend's tables must exist (`create_tables`), and no step may be in flight.

        Args:
            sizes: numbers of requests, at most `max_num_reqs` and `max_num_batched_tokens` of the pool.
            capturer: `CudaGraphs()` on a GPU.

        Raises:
            InputError: a size that no decode step can have, or a model whose step cannot be captured.
        """
        room = min(len(self.backend.inputs.rows), self.backend.slots.shape[1])
        ladder = checked_capture_sizes(sizes, room)
        graphs = self.empty_graphs(ladder[-1], capturer)
        for size in reversed(ladder):
            graphs.capture(size)
        self.graphs = graphs
        return graphs

    def empty_graphs(self, max_num_reqs: int, capturer: GraphCapturer) -> DecodeGraphs:
        """Make graphs for decode steps of up to `max_num_reqs` requests. Nothing is captured; `run` ignores them."""
        return DecodeGraphs(self._decode, self.backend, capturer, max_num_reqs=max_num_reqs)

    def _decode(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._forward(token_ids, positions, len(token_ids), logits_to_keep=0)

    def _forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, num_reqs: int, logits_to_keep: torch.Tensor | int
    ) -> torch.Tensor:
        """Return the logits of the tokens at `logits_to_keep`, int64 `[num_sampled]`, of a prepared batch; 0: all."""
        paged = PagedBatch(self.backend, self._layers, num_reqs)
        output = self.model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logits_to_keep,
            **{BATCH_KEYWORD: paged},
        )
        if paged.num_layers_done != len(self._layers):
            raise MisuseError(
                f"{paged.num_layers_done} of {len(self._layers)} layers attended through the pool; "
                f"{type(self.model).__name__} computes attention in another way, so its output is wrong"
            )
        return output.logits[0]

    def _to_device(self, values: NDArray[np.int64]) -> torch.Tensor:
        return on_device(np.asarray(values, dtype=np.int64), self.backend.device)
