"""The next token: refused settings, the distribution that draws follow, and what a draw does not depend on."""

import attrs
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="live serving needs torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from kvledger.backends.serving import SamplingSettings  # noqa: E402
from kvledger.backends.serving.errors import SettingError  # noqa: E402
from kvledger.backends.serving.sampling import logit_adjustments  # noqa: E402
from kvledger.backends.serving.sampling.logit_adjustments import LogitAdjuster, adjusted_logits  # noqa: E402
from kvledger.backends.serving.sampling.sampling import NextToken, choose_tokens, seed_of_request, uniform  # noqa: E402
from kvledger.backends.serving.sampling.settings import (  # noqa: E402
    MAX_TOP_K,
    TokenRules,
)

from tests.backends.serving.recorded_graphs import CaptureError, Recording  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"temperature": 10**400}, "temperature is 1000"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 1 << 63}, "top_k is 9223372036854775808; it must be 0 .all tokens. or at most 9223372036854775807"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 1 << 64}, "seed is 18446744073709551616"),
        ({"stop": ("end", "")}, "a stop text is empty"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"min_tokens": -1}, "min_tokens is -1; it must be 0 to max_tokens 5"),
        ({"min_tokens": 6}, "min_tokens is 6; it must be 0 to max_tokens 5"),
        ({"min_p": -0.1}, "min_p is -0.1; it must be 0 .all tokens. to 1"),
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"min_p": float("nan")}, "min_p is nan"),
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1; it must be -2 to 2"),
        ({"presence_penalty": float("nan")}, "presence_penalty is nan"),
        ({"frequency_penalty": -2.1}, "frequency_penalty is -2.1; it must be -2 to 2"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; it must be 0.001 to 1000 .1: none."),
        ({"repetition_penalty": 1001}, "repetition_penalty is 1001"),
        ({"logit_bias": {3: 1, 7: 100.5}}, "logit_bias of token 7 is 100.5; it must be -100 to 100"),
        ({"logit_bias": {3: float("nan")}}, "logit_bias of token 3 is nan"),
        ({"logit_bias": [(3, 1), (4, 0), (3, 2)]}, "logit_bias of token 3 is given twice, 1 and 2; give one"),
        ({"logit_bias": {3.5: 1}}, "logit_bias holds 3.5; token ids are whole numbers"),
        ({"stop": ["end", 3]}, "stop holds 3; give texts, or token ids as stop_token_ids"),
        ({"max_tokens": 2.5}, "max_tokens is 2.5; it must be a whole number"),
        ({"max_tokens": None}, "max_tokens is None; it must be a whole number"),
        ({"min_tokens": "2"}, "min_tokens is '2'; it must be a whole number"),
        ({"top_k": 2.0}, "top_k is 2.0; it must be a whole number"),
        ({"seed": 1.5}, "seed is 1.5; it must be a whole number"),
        ({"logprobs": 1.5}, "logprobs is 1.5; it must be a whole number"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids holds 'a'; token ids are whole numbers"),
    ],
)
def test_settings_that_make_no_sense_are_refused_with_the_value(wrong, message) -> None:
    with pytest.raises(SettingError, match=message) as caught:
        SamplingSettings(**{"max_tokens": 5} | wrong)
    assert caught.value.setting == next(iter(wrong))


def test_whole_numbers_may_be_those_of_numpy() -> None:
    names = ("max_tokens", "min_tokens", "top_k", "seed", "logprobs")
    each = SamplingSettings(**dict.fromkeys(names, np.int64(3)))
    assert {type(getattr(each, name)) for name in names} == {int}


def test_one_stop_text_may_be_given_without_a_list() -> None:
    assert SamplingSettings(max_tokens=1, stop="\n\n").stop == ("\n\n",)


def test_a_draw_is_a_fixed_function_of_seed_and_index() -> None:
    assert [uniform(7, 0), uniform(7, 1), uniform(8, 0)] == [0.7283479541790343, 0.8033384902111143, 0.8637418676020681]
    draws = [uniform(seed, index) for seed in range(20) for index in range(50)]
    assert len(set(draws)) == 1000 and all(0 <= draw < 1 for draw in draws)
    assert abs(np.mean(draws) - 0.5) < 0.03 and abs(np.var(draws) - 1 / 12) < 0.01
    assert len({seed_of_request(0, ordinal) for ordinal in range(1000)}) == 1000


def choose(logits, *each, draws=None):
    rows = torch.tensor(logits, dtype=torch.float32)
    draws = [0.5] * len(each) if draws is None else draws
    return choose_tokens(rows, [NextToken(*row, None) for row in zip(each, draws, strict=True)]).wait()


def test_greedy_takes_the_likeliest_token_and_the_first_of_equals() -> None:
    greedy = SamplingSettings(max_tokens=1, temperature=0, top_k=1, top_p=0.1)
    found = choose([[0.0, 3.0, 1.0], [2.0, 2.0, 1.0]], greedy, greedy)
    assert [each.token_id for each in found] == [1, 0]


@pytest.mark.parametrize(
    ("given_settings", "expected"),
    [
        ({"temperature": 1.0}, [0.5, 0.3, 0.15, 0.05]),
        ({"temperature": 0.5}, [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
        ({"top_k": 2}, [0.625, 0.375, 0, 0]),
        ({"top_k": 9}, [0.5, 0.3, 0.15, 0.05]),
        ({"top_k": MAX_TOP_K}, [0.5, 0.3, 0.15, 0.05]),
        ({"top_p": 0.5}, [1, 0, 0, 0]),
        ({"top_p": 0.51}, [0.625, 0.375, 0, 0]),
        ({"top_p": 0.001}, [1, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.8}, [0.625, 0.375, 0, 0]),  # of what top_k left, 0.5 and 0.3 are 0.842
        ({"top_k": 3, "top_p": 0.85}, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        ({"min_p": 0.05}, [0.5, 0.3, 0.15, 0.05]),
        ({"min_p": 0.2}, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        ({"min_p": 0.59}, [0.625, 0.375, 0, 0]),
        ({"min_p": 1}, [1, 0, 0, 0]),
        # Behind temperature the third is 0.548 as likely as the first.
        ({"min_p": 0.5, "temperature": 2.0}, [0.4306, 0.3336, 0.2358, 0]),
        ({"min_p": 0.2, "top_p": 0.8}, [0.625, 0.375, 0, 0]),  # of what min_p left, 0.5 and 0.3 are 0.842
        ({"min_p": 0.2, "top_k": 2}, [0.625, 0.375, 0, 0]),
    ],
)
def test_draws_divide_the_unit_interval_as_the_settings_say(given_settings, expected) -> None:
    """Evenly spaced draws hit each token in proportion to its probability."""
    count = 4000
    each = SamplingSettings(max_tokens=1, **given_settings)
    # The likeliest token is not the first one, so that order and likelihood differ.
    order = [2, 0, 3, 1]
    row = np.empty(4)
    row[order] = np.log([0.5, 0.3, 0.15, 0.05])
    draws = [(place + 0.5) / count for place in range(count)]
    found = choose([row.tolist()] * count, *[each] * count, draws=draws)
    shares = np.bincount([token.token_id for token in found], minlength=4)[order] / count
    assert np.abs(shares - expected).max() <= 2 / count


def test_tokens_of_no_probability_are_never_drawn() -> None:
    nothing = -float("inf")
    for draw in (0.0, 0.5, uniform_max()):
        for each in (SamplingSettings(max_tokens=1), SamplingSettings(max_tokens=1, top_p=0.999)):
            (token,) = choose([[nothing, 0.0, 0.0, nothing]], each, draws=[draw])
            assert token.token_id in (1, 2)


def test_settings_with_another_seed_share_everything_else() -> None:
    settings = SamplingSettings(max_tokens=3, seed=1, stop=["end"], stop_token_ids=[3, 1, 3], logit_bias={2: 1})
    other = settings.with_seed(9)
    assert settings.stop_token_ids == (3, 1)
    assert (settings.seed, other) == (1, attrs.evolve(settings, seed=9))
    assert other.shares_token_rules(settings)
    for change in (
        {"ignore_eos": True},
        {"min_tokens": 2},
        {"stop": ["."]},
        {"stop_token_ids": [3]},
        {"logit_bias": {}},
    ):
        assert not attrs.evolve(settings, **change).shares_token_rules(settings)


def uniform_max():
    return ((1 << 52) - 1) / (1 << 52)


PROMPT, OUTPUT = [5, 6, 6, 7], [6, 8, 8]


def adjuster_of(settings):
    """Of a request that has produced `OUTPUT`."""
    adjuster = LogitAdjuster(settings, np.array(PROMPT), TokenRules.of(settings, [1, 2]))
    for token_id in OUTPUT:
        adjuster.add(token_id)
    return adjuster


ROW_SETTINGS = st.builds(
    SamplingSettings,
    max_tokens=st.just(9),
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 3.0]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 40]),
    min_p=st.sampled_from([0.0, 0.0, 0.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.8]),
    logit_bias=st.dictionaries(st.integers(0, 36), st.floats(-100, 100), max_size=3),
    min_tokens=st.sampled_from([0, 9]),
    logprobs=st.sampled_from([None, 0, 2]),
)


@given(
    rows=st.lists(st.tuples(st.integers(0, 10**6), ROW_SETTINGS, st.floats(0, uniform_max())), min_size=1, max_size=8),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=80, deadline=None)
def test_a_row_is_drawn_alike_alone_and_among_any_neighbours(rows, dtype) -> None:
    logits = torch.stack([torch.from_numpy(np.random.default_rng(seed).normal(0, 3, 37)) for seed, _, _ in rows])
    logits = logits.to(dtype)
    wanted = [NextToken(each, draw, adjuster_of(each).next(len(OUTPUT))) for _, each, draw in rows]
    together = choose_tokens(logits, wanted).wait()
    alone = [choose_tokens(logits[i : i + 1], wanted[i : i + 1]).wait()[0] for i in range(len(rows))]
    assert together == alone


def test_log_probabilities_are_the_models_before_temperature_and_truncation() -> None:
    row = [0.3, 2.0, -1.0, 1.5]
    of_all = torch.log_softmax(torch.tensor(row), dim=-1).tolist()
    each = SamplingSettings(max_tokens=1, temperature=0.2, top_k=1, logprobs=2)
    (token,) = choose([row], each)
    assert token.token_id == 1 and token.logprob == pytest.approx(of_all[1])
    assert token.top_logprobs == ((1, pytest.approx(of_all[1])), (3, pytest.approx(of_all[3])))
    (bare,) = choose([row], SamplingSettings(max_tokens=1, logprobs=0))
    assert bare.logprob == pytest.approx(of_all[bare.token_id]) and bare.top_logprobs == ()
    (none,) = choose([row], SamplingSettings(max_tokens=1))
    assert none.logprob is None


def test_choosing_asks_the_device_for_no_value_before_it_is_waited_for() -> None:
    every = SamplingSettings(
        max_tokens=9, min_tokens=9, top_p=0.9, top_k=5, min_p=0.1, presence_penalty=1, frequency_penalty=1,
        repetition_penalty=1.2, logit_bias={3: 1}, logprobs=2,
    )  # fmt: skip
    settings = [every, attrs.evolve(every, temperature=0), SamplingSettings(max_tokens=9), every]
    wanted = [NextToken(each, 0.5, adjuster_of(each).next(len(OUTPUT))) for each in settings]
    logits = torch.randn(4, 37, generator=torch.Generator().manual_seed(0))
    with Recording(sends_values=True) as recording:
        chosen = choose_tokens(logits, wanted)
    assert len(recording.operations) > 30
    assert [token.token_id for token in chosen.wait()] == [
        token.token_id for token in choose_tokens(logits, wanted).wait()
    ]
    with pytest.raises(CaptureError, match="waits for the device"), Recording(sends_values=True):
        choose_tokens(logits, wanted).wait()


def test_any_number_of_seen_tokens_is_penalized_in_parts(monkeypatch) -> None:
    each = SamplingSettings(max_tokens=9, temperature=0, repetition_penalty=2, logit_bias={1: 3, 2: 4}, min_tokens=5)
    logits = torch.randn(6, 37, generator=torch.Generator().manual_seed(0))
    adjustments = [adjuster_of(each).next(len(OUTPUT)) if row % 3 else None for row in range(6)]
    whole = adjusted_logits(logits, adjustments)
    monkeypatch.setattr(logit_adjustments, "MAX_ENTRIES", 1)
    assert torch.equal(adjusted_logits(logits, adjustments), whole)
    assert torch.equal(whole[[0, 3]], logits[[0, 3]].double()) and not torch.equal(whole[1], logits[1].double())


def test_logits_stay_as_they_are() -> None:
    each = SamplingSettings(max_tokens=9, repetition_penalty=2, logit_bias={1: 3}, min_tokens=5)
    logits = torch.randn(2, 37, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before = logits.clone()
    adjusted_logits(logits, [adjuster_of(each).next(0), None])
    assert torch.equal(logits, before)


def test_a_step_that_samples_nobody_chooses_nothing() -> None:
    assert choose_tokens(torch.empty(0, 5), []).wait() == []
