"""The bench of live serving, run in small on a clock of Python: three ways to serve give the same tokens."""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="live serving needs torch")
pytest.importorskip("transformers", reason="real models need transformers")

from kvledger.sim.latency.fitted import BASE, FittedLatency, MeasuredSteps  # noqa: E402

from bench import live_contenders, live_timing  # noqa: E402
from bench import test_gpu_live as bench  # noqa: E402
from tests.backends.serving.real_models import alone, tiny_model  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a card the benches run as they are"),
]

NUM_TOKENS = 9
STEP_S = 0.25


class TurnClock:
    """One token takes a second, each further one `STEP_S` more; runs for one token and for all come in turn."""

    def __init__(self):
        self.reads, self.time_s = 0, 0.0

    def now_s(self):
        self.reads += 1
        if self.reads % 4 == 2:
            self.time_s += 1.0
        if self.reads % 4 == 0:
            self.time_s += 1.0 + STEP_S * (NUM_TOKENS - 1)
        return self.time_s


@pytest.fixture
def served(monkeypatch):
    monkeypatch.setattr(live_contenders, "MAX_BATCHED_TOKENS", 64)
    monkeypatch.setattr(bench, "REQUESTS", (3,))
    monkeypatch.setattr(bench, "PROMPT_TOKENS", 12)
    monkeypatch.setattr(bench, "OUTPUT_TOKENS", NUM_TOKENS)
    monkeypatch.setattr(bench, "ROUNDS", 2)
    monkeypatch.setattr(bench, "LEAST_REQUESTS_FOR_STEPS", 3)
    model = tiny_model("llama")
    model.set_attn_implementation("sdpa")
    told = []
    return SimpleNamespace(
        model=model, contenders=live_contenders, timing=live_timing, clock=TurnClock(), told=told, tell=told.append
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_throughput_is_told_of_every_contender_and_their_tokens_are_alike(served) -> None:
    bench.test_decode_throughput_beside_transformers_own_serving(served, 3)
    (table,) = served.told
    rows = table.splitlines()[2:]
    names = ["LiveEngine ", "LiveEngine, eager", "transformers' continuous batching (", "generate (sdpa)"]
    assert [row.startswith(name) for row, name in zip(rows, names, strict=True)] == [True] * 4
    for row in rows:
        assert row.split()[-6:] == ["3", "12", "250.000", "1.00", "x", "100%"]
    assert served.model.config._attn_implementation == "sdpa"


def test_every_contender_yields_what_each_prompt_yields_alone(served) -> None:
    prompts = bench.prompts_of(97, [5, 12, 1, 30])
    expected = [alone(tiny_model("llama"), prompt, 11) for prompt in prompts]
    limits = {"max_num_seqs": 4, "max_model_len": 41}
    for contender in (
        live_contenders.LiveContender(served.model, **limits),
        live_contenders.TransformersBatching(served.model, **limits),
        live_contenders.PlainGenerate(served.model),
    ):
        try:
            for _ in range(2):
                assert contender.generate(prompts, 11) == expected, contender.name
        finally:
            contender.close()


@pytest.mark.parametrize("is_predictable", [True, False])
def test_step_times_are_held_to_a_calibrated_model(served, is_predictable, monkeypatch) -> None:
    truth = FittedLatency({BASE: 2e-3, "num_prefill_tokens": 30e-6, "num_decode_tokens": 80e-6}, 0)
    take = live_contenders.LiveContender.take_steps

    def steps_of_a_card(live):
        steps = take(live)
        seconds = steps.predicted(truth)
        if not is_predictable:
            seconds = seconds * np.random.default_rng(0).uniform(0.2, 5, len(steps))
        return MeasuredSteps(steps.loads, seconds)

    monkeypatch.setattr(live_contenders.LiveContender, "take_steps", steps_of_a_card)
    if is_predictable:
        bench.test_a_calibrated_model_predicts_steps_that_it_has_not_seen(served)
        assert "required: at most 15%" in served.told[0] and "decode, 2 to 3 tokens" in served.told[0]
    else:
        with pytest.raises(AssertionError, match="% off"):
            bench.test_a_calibrated_model_predicts_steps_that_it_has_not_seen(served)


def contender(name, generate):
    return SimpleNamespace(name=name, generate=generate, close=lambda: None)


def prompt_after(num_tokens):
    return lambda prompts, count: [[1] * min(count, num_tokens)] * len(prompts)


def refuse():
    raise OSError("no kernel to be had")


def test_a_contender_that_fails_is_named_and_the_others_are_measured(monkeypatch) -> None:
    monkeypatch.setattr(live_timing, "_timed", lambda clock, run: (float(len(out := run()) and len(out[0])), out))
    contest = live_timing.Contest(
        {
            "whole": lambda: contender("whole", prompt_after(9)),
            "early": lambda: contender("early", prompt_after(4)),
            "absent": refuse,
        }
    )
    decodings = contest.decode_in_turn(TurnClock(), [[1], [2]], num_tokens=5, rounds=2)
    assert [(each.name, each.one_s, each.all_s) for each in decodings] == [("whole", (1.0, 1.0), (5.0, 5.0))]
    assert contest.failures == {
        "absent": "OSError: no kernel to be had",
        "early": "ValueError: early did not produce 5 tokens of each request",
    }
    table = live_timing.throughput_table(decodings, contest.failures)
    assert table.splitlines()[2].startswith("whole ")
    assert table.splitlines()[3:] == [
        "absent failed: OSError: no kernel to be had",
        "early failed: ValueError: early did not produce 5 tokens of each request",
    ]


def test_a_contender_that_cannot_start_leaves_the_model_attending_as_before(served, monkeypatch) -> None:
    from transformers.generation.continuous_batching import ContinuousBatchingManager

    monkeypatch.setattr(ContinuousBatchingManager, "warmup", lambda self: refuse())
    with pytest.raises(OSError, match="no kernel to be had"):
        live_contenders.TransformersBatching(served.model, max_num_seqs=1, max_model_len=8)
    assert served.model.config._attn_implementation == "sdpa"


def test_a_bench_whose_contender_fails_tells_the_others_figures_and_fails(served, monkeypatch) -> None:
    monkeypatch.setattr(live_contenders, "TransformersBatching", lambda *_, **__: refuse())
    with pytest.raises(AssertionError, match="no kernel to be had"):
        bench.test_decode_throughput_beside_transformers_own_serving(served, 3)
    assert "\nLiveEngine, eager " in served.told[0]
    assert "transformers' continuous batching failed: OSError: no kernel to be had" in served.told[0]


def test_a_contender_that_takes_no_time_gives_no_figure() -> None:
    timeless = live_timing.Decoding(
        name="timeless", num_reqs=1, num_tokens=2, one_s=(1.0,), all_s=(1.0,), outputs=[[1, 2]]
    )
    with pytest.raises(ValueError, match="nothing to divide"):
        _ = timeless.tokens_per_s


def test_agreement_counts_tokens_up_to_the_first_difference() -> None:
    def decoding(outputs):
        return live_timing.Decoding(name="", num_reqs=2, num_tokens=3, one_s=(1,), all_s=(2,), outputs=outputs)

    assert decoding([[1, 2, 3], [4, 5, 6]]).agreement(decoding([[1, 2, 3], [4, 0, 6]])) == pytest.approx(4 / 6)


def test_without_a_card_nothing_is_measured_or_printed(pytestconfig, capsys) -> None:
    with pytest.raises(pytest.skip.Exception, match="no CUDA device to measure on"):
        inspect.unwrap(bench.served)(pytestconfig)
    assert capsys.readouterr().out == ""
