"""Penalties, biases and log probabilities over real models: what each request yields is its definition, token for
token, with the model's own cache and nobody beside it, whoever it shared batches, blocks and a tight pool with.
"""

import attrs
import pytest

torch = pytest.importorskip("torch", reason="live serving needs torch")
pytest.importorskip("transformers", reason="real models need transformers")

from kvledger.backends.serving import SamplingSettings  # noqa: E402
from kvledger.kernels import TorchKernels  # noqa: E402

from tests.backends.serving.plain_sampling import log_probabilities, outputs_alone  # noqa: E402
from tests.backends.serving.real_models import VOCAB_SIZE, Alone, prompt, tight_engine, tiny_model  # noqa: E402
from tests.backends.serving.recorded_graphs import RecordedGraphs, RecordedKernels  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

END = 5
FIFTEEN = SamplingSettings(max_tokens=15, seed=3, logprobs=3)
# Each setting alone, in both directions, and all together.
KINDS = [
    {"temperature": 0, "presence_penalty": 1.7},
    {"temperature": 0, "presence_penalty": -1.0},
    {"temperature": 0, "frequency_penalty": 0.9},
    {"temperature": 0.7, "frequency_penalty": -0.4},
    {"temperature": 0, "repetition_penalty": 1.6},
    {"temperature": 1.2, "repetition_penalty": 0.8},
    {"temperature": 0, "logit_bias": {9: 4.5, 40: -100, 3: 2}},
    {"temperature": 0.9, "logit_bias": {9: 2.5, 40: 3}, "top_k": 5},
    {"temperature": 1.5, "min_p": 0.3},
    {"temperature": 0, "min_tokens": 12, "stop_token_ids": range(0, 60, 2)},
    {
        "temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.3, "min_p": 0.05,
        "top_p": 0.9, "top_k": 40, "logit_bias": {7: 1.5, 8: -2}, "min_tokens": 4, "stop_token_ids": [11, 12, 13],
    },
]  # fmt: skip


def work_of(seed):
    """A prompt and settings of every kind; half of the prompts begin alike."""
    return [
        (prompt(14, seed=70)[: 14 * (place % 2)] + prompt(6 + place, seed=seed + place), attrs.evolve(FIFTEEN, **kind))
        for place, kind in enumerate(KINDS)
    ]


def assert_is_as_defined(model, request, prompt_ids, settings):
    """Tokens are equal, and log probabilities are close: batches change the last bits of logits."""
    result, deltas = request.result(timeout_s=120), list(request)
    tokens, logits = outputs_alone(Alone(model).forward, settings, prompt_ids, ending=[END])
    assert list(result.token_ids) == tokens, settings
    for delta, token, row in zip(deltas, tokens, logits, strict=True):
        expected = log_probabilities(row)
        assert delta.logprob == pytest.approx(expected[token], abs=1e-4)
        assert [value for _, value in delta.top_logprobs] == pytest.approx(sorted(expected)[:-4:-1], abs=1e-4)
        assert all(value == pytest.approx(expected[other], abs=1e-4) for other, value in delta.top_logprobs)


@pytest.fixture
def engine(family):
    """An engine with little room: chunks of 16 tokens, and a pool that cannot hold all requests at once."""
    with tight_engine(tiny_model(family), eos_token_ids=[END]) as engine:
        yield engine
    assert engine.allocator.pool.num_held_blocks == 0


def test_every_setting_is_its_definition_in_any_company(family, engine):
    model = tiny_model(family)
    work = work_of(seed=71)
    requests = [engine.submit(*each) for each in work]
    for request, each in zip(requests, work, strict=True):
        assert_is_as_defined(model, request, *each)
    assert engine.stats.scheduler.num_preemptions > 0
    # What was computed before is found, and changes nothing.
    for each in (work[1], work[5], work[10]):
        engine.submit(*each).result(60)
        again = engine.submit(*each)
        assert_is_as_defined(model, again, *each)
        assert again.stats.num_cached_tokens > 0


@pytest.mark.parametrize("family", ["llama", "mistral-windowed"])
def test_a_preempted_request_goes_on_with_its_counts(engine, family):
    """Whose penalties are of 12 tokens or more, most of them from before it lost its blocks."""
    settings = attrs.evolve(FIFTEEN, temperature=0, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2)
    work = [(prompt(9, seed=place), settings) for place in range(6)]
    requests = [engine.submit(*each) for each in work]
    for request, each in zip(requests, work, strict=True):
        assert_is_as_defined(tiny_model(family), request, *each)
    assert max(request.stats.num_preemptions for request in requests) > 0


def test_samples_of_one_prompt_share_its_blocks_and_are_each_what_they_are_alone(engine, family):
    model = tiny_model(family)
    settings = [attrs.evolve(FIFTEEN, seed=seed, **KINDS[-1]) for seed in range(4)]
    prompts = [prompt(13, seed=80), prompt(22, seed=81)]
    samples = [engine.submit_samples(each, settings) for each in prompts]
    for prompt_ids, requests in zip(prompts, samples, strict=True):
        for request, each in zip(requests, settings, strict=True):
            assert_is_as_defined(model, request, prompt_ids, each)
    assert engine.stats.scheduler.num_preemptions > 0 or family.startswith("mistral")


def test_a_captured_decode_step_freezes_nothing_of_it():
    kernels = RecordedKernels(TorchKernels())
    with tight_engine(
        tiny_model("llama"), eos_token_ids=[END], kernels=kernels, capturer=RecordedGraphs(kernels)
    ) as engine:
        work = work_of(seed=90)
        requests = [engine.submit(*each) for each in work]
        work += [(prompt(9, seed=91), attrs.evolve(FIFTEEN, seed=seed, **KINDS[-1])) for seed in range(3)]
        requests += engine.submit_samples(work[-1][0], [settings for _, settings in work[-3:]])
        for request, each in zip(requests, work, strict=True):
            assert_is_as_defined(tiny_model("llama"), request, *each)
        assert engine.graphs.num_replays > 20


def test_the_definitions_differ_from_doing_nothing():
    """So that equality above proves something: every kind changes the output of the same prompt."""
    prompt_ids = prompt(20, seed=71)
    for place, kind in enumerate(KINDS):
        settings = attrs.evolve(FIFTEEN, **kind)
        plain = SamplingSettings(
            max_tokens=15, seed=3, temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p
        )
        with_it, _ = outputs_alone(Alone(tiny_model("llama")).forward, settings, prompt_ids, [END])
        without, _ = outputs_alone(Alone(tiny_model("llama")).forward, plain, prompt_ids)
        assert with_it != without, place


@pytest.mark.parametrize("family", ["llama"])
def test_a_token_that_may_not_come_yet_never_comes_however_likely_it_is(engine):
    likely = {END: 100}
    early = engine.submit(prompt(5), SamplingSettings(max_tokens=9, temperature=0, logit_bias=likely)).result(60)
    assert (early.token_ids, early.finish_reason) == ((END,), "stop")
    late = SamplingSettings(max_tokens=9, temperature=0, logit_bias=likely, min_tokens=6)
    result = engine.submit(prompt(5), late).result(60)
    assert len(result.token_ids) == 7 and result.token_ids[-1] == END and END not in result.token_ids[:-1]


@pytest.mark.parametrize("family", ["llama"])
def test_a_bias_bans_a_token_or_forces_it(engine):
    ban = SamplingSettings(max_tokens=12, seed=1, logit_bias=dict.fromkeys(range(50), -100))
    assert min(engine.submit(prompt(5), ban).result(60).token_ids) >= 50
    force = SamplingSettings(max_tokens=5, seed=1, logit_bias={77: 100})
    assert engine.submit(prompt(5), force).result(60).token_ids == (77,) * 5
    assert VOCAB_SIZE == 97
