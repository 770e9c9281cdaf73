"""The live engine on a card, beside transformers' own serving, on one model in one run: `make gpu PYTHON=python3`.

The model is a Llama of 1.2 billion random weights in bfloat16, or the folder that KVLEDGER_BENCH_MODEL names. Without a
card nothing is printed and every bench skips.
"""

import gc
import os
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.gpu_card import card_modules, describe_card, show

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

REQUESTS = (1, 32, 128)
PROMPT_TOKENS = 128
OUTPUT_TOKENS = 128
ROUNDS = 3
LEAST_REQUESTS_FOR_STEPS = 64
MOST_STEP_ERROR = 0.15


@pytest.fixture(scope="module")
def served(pytestconfig: pytest.Config) -> Any:
    """The model on the card; what is measured is told at once, since a later bench may be cut off."""
    torch, triton = card_modules()
    pytest.importorskip("transformers", reason="the live engine serves transformers' models")
    from bench import live_contenders, live_timing

    return SimpleNamespace(
        model=bench_model("cuda"),
        contenders=live_contenders,
        timing=live_timing,
        clock=live_timing.CardClock(torch),
        tell=lambda text: show(pytestconfig, f"{describe_card(torch, triton)}\n{text}"),
    )


def bench_model(device: str) -> Any:
    """The model that all contenders run, attending by `sdpa`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = os.environ.get("KVLEDGER_BENCH_MODEL")
    if folder:
        from kvledger.backends.serving.model.loading import load_model

        return load_model(folder, device=device).model
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def prompts_of(vocab_size: int, lengths: list[int]) -> list[list[int]]:
    """Random prompts of these lengths, without token 0, which pads."""
    random = np.random.default_rng(0)
    return [random.integers(1, vocab_size, length).tolist() for length in lengths]


@pytest.mark.parametrize("num_reqs", REQUESTS)
def test_decode_throughput_beside_transformers_own_serving(served: Any, num_reqs: int) -> None:
    limits = {"max_num_seqs": num_reqs, "max_model_len": PROMPT_TOKENS + OUTPUT_TOKENS}
    live, ways = served.contenders.LiveContender, served.contenders
    prompts = prompts_of(served.model.config.vocab_size, [PROMPT_TOKENS] * num_reqs)
    contest = served.timing.Contest(
        {
            "LiveEngine": partial(live, served.model, **limits),
            "LiveEngine, eager": partial(live, served.model, **limits, enforce_eager=True),
            "transformers' continuous batching": partial(ways.TransformersBatching, served.model, **limits),
            "generate": partial(ways.PlainGenerate, served.model),
        }
    )
    try:
        decodings = contest.decode_in_turn(served.clock, prompts, num_tokens=OUTPUT_TOKENS, rounds=ROUNDS)
    finally:
        contest.close()
        gc.collect()  # a pool and its graphs go with their engine
    served.tell(served.timing.throughput_table(decodings, contest.failures))
    assert not contest.failures
    assert all(each.tokens_per_s > 0 for each in decodings)


def test_a_calibrated_model_predicts_steps_that_it_has_not_seen(served: Any) -> None:
    from kvledger.sim.logs.live_report import live_report

    random = np.random.default_rng(1)
    longest = 4 * (PROMPT_TOKENS + OUTPUT_TOKENS)
    live = served.contenders.LiveContender(served.model, max_num_seqs=max(REQUESTS), max_model_len=longest)
    lengths = random.integers(1, longest // 2, 4 * max(*REQUESTS, LEAST_REQUESTS_FOR_STEPS)).tolist()
    counts = random.integers(2, longest // 2, len(lengths)).tolist()
    prompts = prompts_of(served.model.config.vocab_size, lengths)
    try:
        live.generate_each(prompts[: len(prompts) // 4], counts[: len(prompts) // 4])
        live.take_steps()  # the first steps of each kind compile and allocate
        live.generate_each(prompts, counts)
        report = live_report(live.take_steps())
    finally:
        live.close()
    best = report.best
    rows = [
        f"  {row['kind']:<36}{row['steps']:>7}{row['measured_ms']:>12.3f}{row['predicted_ms']:>12.3f}"
        f"{row['step_error_pct']:>9.1f} %"
        for row in report.rows()
    ]
    served.tell(
        "\n".join(
            [
                f"step times of {len(report.steps):,} steps, calibrated ({best.name}): {best.error_unseen:.1%} off on"
                f" steps that were not seen; required: at most {MOST_STEP_ERROR:.0%}",
                f"  {'steps that compute':<36}{'steps':>7}{'measured ms':>12}{'predicted':>12}{'of a step':>11}",
                *rows,
            ]
        )
    )
    assert best.error_unseen <= MOST_STEP_ERROR, f"{best.error_unseen:.1%} off"
