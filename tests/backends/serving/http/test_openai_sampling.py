"""What the official `openai` client asks of sampling is what the definitions give, over the honest model."""

import pytest

pytest.importorskip("openai", reason="these tests are the openai client's")

import attrs
from kvledger.backends.serving.sampling import settings as settings_module
from kvledger.backends.serving.sampling.settings import SamplingSettings, TokenRules

from tests.backends.serving.cache_reader import Context
from tests.backends.serving.plain_sampling import log_probabilities, outputs_alone

END = 60
PROMPT = "Once upon a time"
HELLO = [{"role": "user", "content": "hello"}]


def defined(prompt_ids, settings):
    """Output tokens by definition, and the model's log probabilities of all tokens before each."""
    tokens, logits = outputs_alone(Context().forward, settings, prompt_ids, ending=[END])
    return tokens, [log_probabilities(row) for row in logits]


def shown(token_ids, settings, letters):
    """The text of an output; a token that ends it has none."""
    token_ids = token_ids[:-1] if token_ids[-1] in {END, *settings.stop_token_ids} else token_ids
    return letters.decode(token_ids)


# Fields of the client itself, and what only other servers know as well.
ASKED = [
    ({"presence_penalty": 1.5}, {}),
    ({"presence_penalty": -2, "temperature": 0}, {}),
    ({"frequency_penalty": 0.8, "temperature": 0}, {}),
    ({"logit_bias": {"5": 4, "20": -100}, "temperature": 0}, {}),
    ({"logit_bias": {"5": 3.5}, "temperature": 0.7, "top_p": 0.8}, {}),
    ({}, {"repetition_penalty": 1.7}),
    ({"temperature": 0}, {"repetition_penalty": 0.6}),
    ({}, {"min_p": 0.2}),
    ({"temperature": 0}, {"min_tokens": 9, "stop_token_ids": list(range(0, 40, 3))}),
    (
        {"presence_penalty": 0.4, "frequency_penalty": -0.3, "logit_bias": {"8": 2}, "temperature": 1.2, "top_p": 0.95},
        {"repetition_penalty": 1.1, "min_p": 0.01, "top_k": 30, "min_tokens": 2, "stop_token_ids": [1]},
    ),
]


def settings_of(named, extra):
    bias = {int(token): bias for token, bias in named.get("logit_bias", {}).items()}
    return SamplingSettings(max_tokens=12, seed=41, **{**named, "logit_bias": bias}, **extra)


@pytest.mark.parametrize(("named", "extra"), ASKED)
def test_a_completion_is_what_the_definitions_give(make_server, letters, named, extra):
    client = make_server().openai()
    answer = client.completions.create(model="honest", prompt=PROMPT, max_tokens=12, seed=41, **named, extra_body=extra)
    settings = settings_of(named, extra)
    tokens, _ = defined(letters.encode(PROMPT), settings)
    assert answer.choices[0].text == shown(tokens, settings, letters)
    assert answer.usage.completion_tokens == len(tokens)


def test_a_conversation_and_its_stream_are_too(make_server, letters):
    client = make_server().openai()
    named, extra = ASKED[-1]
    ask = {"model": "honest", "messages": HELLO, "max_tokens": 12, "seed": 41, **named, "extra_body": extra}
    prompt_ids = letters.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=False)
    tokens, _ = defined(prompt_ids, settings_of(named, extra))
    expected = shown(tokens, settings_of(named, extra), letters)
    assert client.chat.completions.create(**ask).choices[0].message.content == expected
    parts = client.chat.completions.create(**ask, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_chat_are_the_models_own_whatever_penalties_do(make_server, letters, stream):
    client = make_server().openai()
    named, extra = ASKED[-1]
    answer = client.chat.completions.create(
        model="honest", messages=HELLO, max_tokens=12, seed=41, **named, extra_body=extra, logprobs=True,
        top_logprobs=4, stream=stream,
    )  # fmt: skip
    parts = [part.choices[0] for part in answer] if stream else [answer.choices[0]]
    found = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
    prompt_ids = letters.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=False)
    tokens, expected = defined(prompt_ids, settings_of(named, extra))
    assert [entry.token for entry in found] == [letters.decode([token]) for token in tokens]
    for entry, token, of_all in zip(found, tokens, expected, strict=True):
        assert entry.logprob == pytest.approx(of_all[token], abs=1e-5)
        assert bytes(entry.bytes).decode() == entry.token
        likeliest = sorted(range(61), key=lambda other: -of_all[other])[:4]
        assert [each.token for each in entry.top_logprobs] == [letters.decode([other]) for other in likeliest]
        assert [each.logprob for each in entry.top_logprobs] == pytest.approx(
            [of_all[other] for other in likeliest], abs=1e-5
        )


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_completion_have_its_shape(make_server, letters, stream):
    client = make_server().openai()
    ask = {"model": "honest", "prompt": PROMPT, "max_tokens": 10, "temperature": 1.1, "seed": 9, "logprobs": 2}
    answer = client.completions.create(**ask, stream=stream)
    parts = [part.choices[0] for part in answer] if stream else [answer.choices[0]]
    tokens, expected = defined(letters.encode(PROMPT), SamplingSettings(max_tokens=10, temperature=1.1, seed=9))
    names = [letters.decode([token]) for token in tokens]
    assert [name for part in parts for name in part.logprobs.tokens] == names
    assert [offset for part in parts for offset in part.logprobs.text_offset] == list(range(len(tokens)))
    assert [value for part in parts for value in part.logprobs.token_logprobs] == pytest.approx(
        [of_all[token] for of_all, token in zip(expected, tokens, strict=True)], abs=1e-5
    )
    likeliest = [top for part in parts for top in part.logprobs.top_logprobs]
    for top, name, of_all in zip(likeliest, names, expected, strict=True):
        best = sorted(range(61), key=lambda other: -of_all[other])[:2]
        assert set(top) == {name, *(letters.decode([other]) for other in best)}  # the chosen one beside the two


def test_the_choices_of_n_are_what_their_seeds_give_one_by_one(make_server, letters):
    running = make_server()
    named, extra = ASKED[-1]
    ask = {"model": "honest", "prompt": PROMPT, "max_tokens": 12, "seed": 41, **named, "extra_body": extra}
    answer = running.openai().completions.create(**ask, n=4, logprobs=0)
    for place, choice in enumerate(answer.choices):
        settings = attrs.evolve(settings_of(named, extra), seed=41 + place)
        tokens, expected = defined(letters.encode(PROMPT), settings)
        assert choice.text == shown(tokens, settings, letters)
        assert choice.logprobs.token_logprobs == pytest.approx(
            [of_all[token] for of_all, token in zip(expected, tokens, strict=True)], abs=1e-5
        )
    assert len({choice.text for choice in answer.choices}) == 4
    assert answer.usage.prompt_tokens == len(letters.encode(PROMPT))


def test_no_stop_text_ends_an_answer_before_its_least_tokens(make_server, letters):
    client = make_server().openai()
    ask = {"model": "honest", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**ask).choices[0].text
    stops = [whole[1:3], whole[7:9]]
    assert client.completions.create(**ask, stop=stops).choices[0].text == whole[:1]
    ask["extra_body"] = {"ignore_eos": True, "min_tokens": 4}
    assert client.completions.create(**ask, stop=stops).choices[0].text == whole[:7]
    # A token is a letter here: the text of the fourth one is before the end of the least tokens, and no stop text.
    assert client.completions.create(**ask, stop=whole[3]).choices[0].text == whole[:4] + whole[4:].split(whole[3])[0]
    ask["extra_body"]["min_tokens"] = 3
    assert client.completions.create(**ask, stop=whole[3]).choices[0].text == whole[:3] + whole[3:].split(whole[3])[0]


def test_lists_of_tokens_are_looked_at_once_however_many_prompts_and_choices_there_are(make_server, monkeypatch):
    looked_at, look_at = [], settings_module._token_id
    made, make = [], TokenRules.of
    monkeypatch.setattr(
        settings_module, "_token_id", lambda value, name: looked_at.append(value) or look_at(value, name)
    )
    monkeypatch.setattr(TokenRules, "of", lambda settings, ends: made.append(settings) or make(settings, ends))
    body = {"prompt": ["a", "b", "c"], "n": 7, "seed": 1, "max_tokens": 2, "stop_token_ids": [1, 2] * 50}
    assert make_server().post("/v1/completions", {**body, "logit_bias": {"3": 1}})[0] == 200
    assert (len(looked_at), len(made)) == (101, 1)
