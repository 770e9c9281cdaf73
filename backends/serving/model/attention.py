"""Attention for transformers models that writes to the pool and reads it through block tables, without a gather.

A whole continuous batch (decodes and prefill chunks of many requests) is one flat row of tokens. The model calls this
attention by the name registered in transformers' `AttentionInterface`. No mask function is registered under the name:
transformers then makes no mask, and the kernel needs none.
"""

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from ....core.errors import InputError, MisuseError
from ...cuda.backend import CudaBackend
from .served_model import ServedLayer

ATTENTION_NAME = "kvledger"
BATCH_KEYWORD = "paged_batch"

# Arguments that models pass to every attention function and that have no effect here: keys already have positions.
_WITHOUT_EFFECT = frozenset(
    {
        "position_ids",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
    }
)


@attrs.define(eq=False)
class PagedBatch:
    """The batch of one forward pass, passed through the model as the keyword `paged_batch`."""

    backend: CudaBackend  # has prepared the batch's slots and tables
    layers: Sequence[ServedLayer]  # the model's layers in order
    num_reqs: int  # number of requests in the batch
    num_layers_done: int = 0  # layers that have written and attended so far


def register_paged_attention() -> str:
    """Register the attention with transformers (repeated calls are harmless).

    Returns:
        The name for `model.set_attn_implementation`.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
    return ATTENTION_NAME


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    paged_batch: PagedBatch | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Store the batch's keys and values, then attend over the pool.

    Args:
        module: the attention layer; has `layer_idx`.
        query: `[1, num_q_heads, num_tokens, head_size]` of the flat batch.
        key: `[1, num_kv_heads, num_tokens, head_size]`, positions applied.
        value: `[1, num_kv_heads, num_tokens, head_size_v]`.
        attention_mask: must be None; causality follows from the batch.
        scaling: factor of the scores; None: head_size ** -0.5.
        dropout: must be 0.
        sliding_window: the layer's window; must be the plan's.
        softcap: scores become softcap * tanh(score / softcap).
        paged_batch: the batch that `ModelRunner` passes to the model.
        others: further arguments of the model.

    Returns:
        `[1, num_tokens, num_q_heads, head_size_v]`, and None for the weights.

    Raises:
        MisuseError: `ModelRunner` did not run the model.
        InputError: the model asks for another kind of attention (a mask, dropout, attention sinks, another window).
    """
    if paged_batch is None:
        raise MisuseError(
            f"attention {ATTENTION_NAME!r} reads the pool of a backend; run the model through ModelRunner, or give it "
            "another attention with model.set_attn_implementation"
        )
    layer = paged_batch.layers[int(module.layer_idx)]  # pyright: ignore[reportArgumentType]
    _refuse_other_attention(layer, module, attention_mask, dropout, sliding_window, others)
    paged_batch.backend.write_kv(layer.name, key[0].transpose(0, 1), value[0].transpose(0, 1))
    output = paged_batch.backend.attend(
        layer.name,
        query[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        num_reqs=paged_batch.num_reqs,
        window=layer.window,
        softcap=softcap,
    )
    paged_batch.num_layers_done += 1
    return output.unsqueeze(0), None


def _refuse_other_attention(
    layer: ServedLayer,
    module: torch.nn.Module,
    attention_mask: torch.Tensor | None,
    dropout: float,
    sliding_window: int | None,
    others: dict[str, Any],
) -> None:
    wrong: list[str] = []
    if attention_mask is not None:
        wrong.append("an attention mask")
    if dropout:
        wrong.append(f"dropout {dropout}")
    if not getattr(module, "is_causal", True):
        wrong.append("attention to later tokens")
    if sliding_window is not None and sliding_window != layer.window:
        wrong.append(f"a window of {sliding_window} tokens where the plan has {layer.window}")
    wrong += [name for name, given in others.items() if given is not None and name not in _WITHOUT_EFFECT]
    if wrong:
        raise InputError(
            f"{type(module).__name__} of layer {layer.name} asks for {', '.join(wrong)}; paged attention is causal, "
            "with the plan's window, a scale and a softcap"
        )
