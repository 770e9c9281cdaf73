"""The other cache kinds: one latent vector, compressed states, opaque per-token formats, and fixed states."""

import math
from fractions import Fraction
from typing import ClassVar

import attrs

from .cache_dtype import BITS_PER_ELEMENT, ScaleStorage, canonical_dtype, packed_bytes
from .errors import InputError
from .kv_cache_spec import (
    CellTerm,
    KVCacheSpec,
    every_token_blocks,
    every_token_formula,
    vector_cell_terms,
)
from .serving_limits import ServingLimits
from .validators import non_negative, positive


@attrs.frozen(kw_only=True)
class LatentSpec(KVCacheSpec):
    """A cache of one vector per state, shared by all heads: held whole by every tensor-parallel rank."""

    @property
    def num_head_slots(self) -> int:
        """One slot: the vector serves all heads, so tensor parallelism never divides it."""
        return 1

    @property
    def token_slots_key(self) -> tuple[object, ...]:
        """Every token is kept, as in full attention."""
        return ("full",)

    def max_blocks_per_request(self, limits: ServingLimits) -> int:
        """Blocks of the whole sequence, divided over the DCP ranks."""
        return every_token_blocks(self.block_size, limits)

    def max_blocks_formula(self, limits: ServingLimits) -> str:
        """`max_blocks_per_request` with the numbers substituted."""
        return every_token_formula(self.block_size, limits)

    def states_per_block(self, block_size: int) -> int:
        """One state per token."""
        return block_size

    def floor_bytes(self, num_tokens: int) -> int:
        """Every state is kept."""
        return self.states_per_block(num_tokens) * self.state_content_bytes


@attrs.frozen(kw_only=True)
class MLASpec(LatentSpec):
    """Multi-head latent attention: one latent vector a token, no factor 2 for K and V (DeepSeek V2/V3, Kimi K2).

    Attributes:
        head_size: elements of the latent, kv_lora_rank + qk_rope_head_dim.
        dtype: dtype of the elements.
        scales: scales stored beside quantised elements.
    """

    kind: ClassVar[str] = "mla"

    head_size: int = attrs.field(validator=positive)
    dtype: str = attrs.field(converter=canonical_dtype)
    scales: ScaleStorage | None = None

    @property
    def cell_terms(self) -> tuple[CellTerm, ...]:
        """The latent, and its scales."""
        return vector_cell_terms("latent", (self.head_size,), self.dtype, self.scales)


@attrs.frozen(kw_only=True)
class CompressedStateSpec(LatentSpec):
    """States that each cover several tokens (DeepSeek V4's compressed layers and their indexer).

    Attributes:
        tokens_per_state: tokens that one state covers; divides the block size.
        head_size: elements of one state.
        dtype: dtype of the elements.
        scales: scales stored beside quantised elements.
    """

    kind: ClassVar[str] = "compressed"

    tokens_per_state: int = attrs.field(validator=positive)
    head_size: int = attrs.field(validator=positive)
    dtype: str = attrs.field(converter=canonical_dtype)
    scales: ScaleStorage | None = None

    def __attrs_post_init__(self) -> None:
        if self.block_size % self.tokens_per_state:
            raise InputError(
                f"CompressedStateSpec: a block of {self.block_size} tokens is no whole number of states of "
                f"{self.tokens_per_state} tokens; use a block size that is a multiple of {self.tokens_per_state}"
            )
        super().__attrs_post_init__()

    def states_per_block(self, block_size: int) -> int:
        """One state per `tokens_per_state` complete tokens."""
        return block_size // self.tokens_per_state

    @property
    def cell_terms(self) -> tuple[CellTerm, ...]:
        """The compressed state, and its scales."""
        return vector_cell_terms("compressed state", (self.head_size,), self.dtype, self.scales)

    def _cells_text(self) -> str:
        return f"{self.block_size} tokens / {self.tokens_per_state} tokens a state"


@attrs.frozen(kw_only=True)
class OpaqueSpec(LatentSpec):
    """A packed per-token format known only by its size, e.g. the 656 bytes of DeepSeek's sparse fp8 MLA.

    Attributes:
        opaque_bytes_per_token: bytes that one token takes in this layer, everything included.
    """

    kind: ClassVar[str] = "opaque"

    opaque_bytes_per_token: int = attrs.field(validator=positive)

    @property
    def cell_terms(self) -> tuple[CellTerm, ...]:
        """The packed token as it is."""
        size = self.opaque_bytes_per_token
        return (CellTerm("packed token", size, f"{size} B"),)


@attrs.frozen
class StateArray:
    """One array of a fixed state.

    Attributes:
        shape: elements along each axis, on this rank.
        dtype: dtype of the elements.
        name: what it holds (`conv`, `recurrent`).
        tp_axis: axis that tensor parallelism divides; None: every rank holds the whole array.
    """

    shape: tuple[int, ...] = attrs.field(converter=tuple)
    dtype: str = attrs.field(converter=canonical_dtype)
    name: str = "state"
    tp_axis: int | None = None

    def __attrs_post_init__(self) -> None:
        if not self.shape or any(size < 1 for size in self.shape):
            raise InputError(f"StateArray.shape is {self.shape!r}; every axis must be at least 1")
        if self.tp_axis is not None and not 0 <= self.tp_axis < len(self.shape):
            raise InputError(f"StateArray.tp_axis is {self.tp_axis}; the shape {self.shape!r} has no such axis")

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole array."""
        return packed_bytes(self.dtype, math.prod(self.shape))


@attrs.frozen(kw_only=True)
class MambaLikeSpec(KVCacheSpec):
    """A state of fixed size per sequence (Mamba, gated delta nets, KDA): one page holds one whole state.

    Attributes:
        states: the arrays of one state, on this rank.
        num_speculative_blocks: further states that one request holds for drafted tokens.
    """

    kind: ClassVar[str] = "mamba"

    states: tuple[StateArray, ...] = attrs.field(converter=tuple)
    num_speculative_blocks: int = attrs.field(default=0, validator=non_negative)

    @property
    def num_head_slots(self) -> int:
        """One slot: a page is one state."""
        return 1

    def states_per_block(self, block_size: int) -> int:
        """One state, whatever the number of tokens."""
        return 1

    @property
    def cell_terms(self) -> tuple[CellTerm, ...]:
        """Each array of the state."""
        return tuple(
            CellTerm(
                array.name,
                array.num_bytes,
                f"{' x '.join(str(size) for size in array.shape)} x {BITS_PER_ELEMENT[array.dtype] / 8:g} B "
                f"({array.dtype})",
            )
            for array in self.states
        )

    @property
    def bytes_per_token(self) -> Fraction:
        """A fixed state does not grow with the sequence."""
        return Fraction(0)

    @property
    def token_slots_key(self) -> tuple[object, ...]:
        """State layers of one page size and one number of speculative states need the same slots."""
        return ("mamba", self.num_speculative_blocks, self.page_size_bytes)

    def max_blocks_per_request(self, limits: ServingLimits) -> int:
        """One state; one more in `align` mode for the snapshot; one a block in `all` mode; drafts on top.

        Raises:
            InputError: without `state_cache_mode`.
        """
        if limits.state_cache_mode is None:
            raise InputError("state layers need state_cache_mode: 'none', 'align' or 'all'")
        if limits.state_cache_mode == "all":
            num_states = math.ceil(limits.max_model_len / self.block_size)
        else:
            num_states = 2 if limits.state_cache_mode == "align" else 1
        return num_states + self.num_speculative_blocks

    def max_blocks_formula(self, limits: ServingLimits) -> str:
        """`max_blocks_per_request` with the numbers substituted."""
        num_blocks = self.max_blocks_per_request(limits)
        states = {
            "none": "1 state",
            "align": "1 state + 1 snapshot",
            "all": f"ceil({limits.max_model_len} tokens / {self.block_size}) snapshots",
            None: "",
        }[limits.state_cache_mode]
        return f"{states} + {self.num_speculative_blocks} for drafts = {num_blocks:,}"

    def floor_bytes(self, num_tokens: int) -> int:
        """One state, whatever the number of tokens."""
        return self.state_content_bytes

    def with_block_size(self, block_size: int) -> "MambaLikeSpec":
        """The same state: its page does not depend on the block size."""
        return attrs.evolve(self, block_size=block_size)

    def _cells_text(self) -> str:
        return "1 state"
