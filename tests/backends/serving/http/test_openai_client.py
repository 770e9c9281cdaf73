"""The official `openai` client gets what it expects."""

import threading
import time

import numpy as np
import pytest

openai = pytest.importorskip("openai", reason="these tests are the openai client's")


def text_of(token_ids, letters):
    return letters.decode(list(token_ids), skip_special_tokens=True)


def test_a_completion_is_the_models_own_continuation(make_server, alone, letters):
    client = make_server().openai()
    prompt = letters.encode("Once upon a time")
    answer = client.completions.create(model="honest", prompt="Once upon a time", max_tokens=12, temperature=0)
    expected = alone(prompt, 12, [60])
    assert answer.choices[0].text == text_of(expected, letters)
    assert answer.choices[0].finish_reason == ("stop" if expected[-1] == 60 else "length")
    assert (answer.object, answer.model) == ("text_completion", "honest")
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(expected)
    assert answer.usage.total_tokens == len(prompt) + len(expected)
    assert answer._request_id == answer.id


def test_a_second_completion_reports_the_tokens_that_it_found_in_the_cache(make_server):
    client = make_server().openai()
    ask = {"model": "honest", "prompt": "Once upon a time", "max_tokens": 3, "temperature": 0}
    cold, hit = client.completions.create(**ask), client.completions.create(**ask)
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert hit.usage.prompt_tokens_details.cached_tokens == 12  # whole blocks of 4, and one token is left to compute
    assert hit.choices[0].text == cold.choices[0].text


def test_a_conversation_goes_through_the_chat_template(make_server, alone, letters):
    client = make_server().openai()
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]},
    ]
    answer = client.chat.completions.create(model="honest", messages=messages, max_completion_tokens=8, temperature=0)
    plain = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    prompt = letters.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == text_of(alone(prompt, 8, [60]), letters)
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.object == "chat.completion"


@pytest.mark.parametrize("includes_usage", [False, True])
def test_a_chat_stream_adds_up_to_the_whole_answer(make_server, includes_usage):
    client = make_server().openai()
    ask = {"model": "honest", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 10, "temperature": 0}
    whole = client.chat.completions.create(**ask)
    extra = {"stream_options": {"include_usage": True}} if includes_usage else {}
    chunks = list(client.chat.completions.create(**ask, stream=True, **extra))
    with_choices = [chunk for chunk in chunks if chunk.choices]
    assert with_choices[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in with_choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in with_choices[:-1]] == [None] * (len(with_choices) - 1)
    assert with_choices[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    if includes_usage:
        assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 8
        assert all(chunk.usage is None for chunk in chunks[:-1])
    else:
        assert all(chunk.usage is None for chunk in chunks)


def test_a_completion_stream_adds_up_to_the_whole_answer(make_server):
    client = make_server().openai()
    ask = {"model": "honest", "prompt": "abc", "max_tokens": 10, "temperature": 0}
    whole = client.completions.create(**ask)
    chunks = list(client.completions.create(**ask, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_the_asynchronous_client_streams_many_answers_at_once(make_server, alone, letters):
    import asyncio

    from openai import AsyncOpenAI

    running = make_server()

    async def ask(client, prompt):
        stream = await client.completions.create(
            model="honest", prompt=prompt, max_tokens=9, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all():
        async with AsyncOpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, prompt) for prompt in prompts))

    prompts = [f"{letter} prompt of its own" for letter in "abcdefghij"]
    expected = [text_of(alone(letters.encode(prompt), 9, [60]), letters) for prompt in prompts]
    assert asyncio.run(ask_all()) == expected


def test_a_list_of_prompts_and_n_give_choices_in_order(make_server, alone, letters):
    client = make_server().openai()
    prompts = [letters.encode("abc"), letters.encode("xyz")]
    answer = client.completions.create(model="honest", prompt=prompts, n=2, max_tokens=4, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    texts = [text_of(alone(prompt, 4, [60]), letters) for prompt in prompts for _ in range(2)]
    assert [choice.text for choice in answer.choices] == texts
    assert answer.usage.prompt_tokens == 6  # each prompt once
    assert answer.usage.completion_tokens == sum(len(alone(prompt, 4, [60])) for prompt in prompts) * 2


def test_a_seed_makes_an_answer_repeatable_and_its_choices_different(make_server):
    client = make_server().openai()
    ask = {"model": "honest", "prompt": "abc", "n": 3, "max_tokens": 12, "temperature": 1.5, "seed": -7}
    first, second = client.completions.create(**ask), client.completions.create(**ask)
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices]
    assert len(set(texts)) == 3


def test_a_stop_text_ends_the_answer_before_it(make_server):
    client = make_server().openai()
    ask = {"model": "honest", "prompt": "abc", "max_tokens": 20, "temperature": 0}
    whole = client.completions.create(**ask).choices[0].text
    stop = whole[3:5]
    answer = client.completions.create(**ask, stop=[stop, "never"]).choices[0]
    assert (answer.text, answer.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_logprobs_of_a_completion_match_its_tokens(make_server):
    client = make_server().openai()
    answer = client.completions.create(model="honest", prompt="abc", max_tokens=5, temperature=0, logprobs=3)
    logprobs, text = answer.choices[0].logprobs, answer.choices[0].text
    assert "".join(logprobs.tokens) == text
    assert logprobs.text_offset == [0, 1, 2, 3, 4]
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert len(top) == 3 and max(top.values()) == top[token] == logprob < 0


def test_logprobs_of_a_chat_stream_match_its_tokens(make_server):
    client = make_server().openai()
    stream = client.chat.completions.create(
        model="honest", messages=[{"role": "user", "content": "hi"}], max_tokens=5, temperature=0, logprobs=True,
        top_logprobs=2, stream=True,
    )  # fmt: skip
    parts = [chunk.choices[0] for chunk in stream]
    tokens = [token for part in parts if part.logprobs for token in part.logprobs.content]
    assert "".join(token.token for token in tokens) == "".join(part.delta.content or "" for part in parts)
    assert all(len(token.top_logprobs) == 2 and token.top_logprobs[0].logprob == token.logprob for token in tokens)


def test_logprobs_of_what_the_model_never_says_are_numbers_too(make_server):
    running = make_server()
    never = np.where(np.arange(61) == 3, np.float32(0), np.float32("-inf"))
    running.engine._runner._answer = lambda _row, _length: never
    client = running.openai()
    ask = {"model": "honest", "max_tokens": 2, "temperature": 0}
    completion = client.completions.create(**ask, prompt="abc", logprobs=2).choices[0]
    assert [sorted(top.values()) for top in completion.logprobs.top_logprobs] == [[-9999, 0]] * 2
    messages = [{"role": "user", "content": "hi"}]
    stream = client.chat.completions.create(**ask, messages=messages, logprobs=True, top_logprobs=2, stream=True)
    tokens = [token for chunk in stream if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content]
    assert [[top.logprob for top in token.top_logprobs] for token in tokens] == [[0, -9999]] * 2
    banned = client.completions.create(**ask, prompt="abc", logprobs=0, logit_bias={"3": -100}).choices[0]
    assert (banned.text, banned.logprobs.token_logprobs) == ("dd", [0, 0])


def test_without_max_tokens_a_chat_may_fill_what_fits(make_server, alone, letters):
    # 5 usable blocks of 4 tokens hold 20, fewer than the model's 64.
    running = make_server(num_blocks=6)
    answer = running.openai().chat.completions.create(
        model="honest", messages=[{"role": "user", "content": "hi"}], temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.total_tokens == 20
    assert answer.choices[0].finish_reason == "length"


def test_models_are_listed_and_found_by_name(make_server):
    client = make_server(model_names=("honest", "alias")).openai()
    assert [model.id for model in client.models.list()] == ["honest", "alias"]
    assert client.models.retrieve("alias").id == "alias"
    assert client.completions.create(model="alias", prompt="a", max_tokens=1).model == "alias"
    with pytest.raises(openai.NotFoundError, match="honest, alias"):
        client.models.retrieve("gpt-4")


def test_an_unknown_model_is_not_found(make_server):
    with pytest.raises(openai.NotFoundError) as caught:
        make_server().openai().completions.create(model="gpt-4", prompt="a")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_a_missing_or_wrong_api_key_is_refused_and_health_needs_none(make_server):
    running = make_server(api_keys=("right", "also right"))
    assert running.openai("also right").completions.create(model="honest", prompt="a", max_tokens=1).choices
    with pytest.raises(openai.AuthenticationError, match="Authorization: Bearer"):
        running.openai("wrong").models.list()
    status, headers, _ = running.post("/v1/completions", {"prompt": "a"})
    assert (status, headers["www-authenticate"]) == (401, "Bearer")
    assert running.get("/health")[0] == 200


@pytest.mark.parametrize(
    ("one", "other", "shares"),
    [
        (("key-1", None), ("key-1", None), True),
        (("key-1", None), ("key-2", None), False),
        (("key-1", "salt"), ("key-1", "salt"), True),
        (("key-1", "salt"), ("key-2", "salt"), False),
        (("key-1", "salt"), ("key-1", None), False),
        (("key-1", "salt"), ("key-1", "pepper"), False),
    ],
)
def test_tenants_share_no_cached_prefix(make_server, one, other, shares):
    running = make_server(api_keys=("key-1", "key-2"))

    def cached_tokens(key, salt):
        extra = {} if salt is None else {"cache_salt": salt}
        ask = {"model": "honest", "prompt": "Once upon a time", "max_tokens": 1, "extra_body": extra}
        return running.openai(key).completions.create(**ask).usage.prompt_tokens_details.cached_tokens

    assert cached_tokens(*one) == 0
    assert cached_tokens(*other) == (12 if shares else 0)


def test_keys_may_share_prefixes_where_the_operator_says_so(make_server):
    running = make_server(api_keys=("key-1", "key-2"), isolates_api_keys=False)
    found = [
        running.openai(key)
        .completions.create(model="honest", prompt="Once upon a time", max_tokens=1)
        .usage.prompt_tokens_details.cached_tokens
        for key in ("key-1", "key-2")
    ]
    assert found == [0, 12]


def test_priorities_are_served_in_their_order(make_server):
    running = make_server(policy="priority", max_num_seqs=1)
    client = running.openai()

    def ends_of_an_attempt():
        """The order of the ends, or None if the first request did not run until both others waited."""
        ends = []

        def ask(priority, max_tokens):
            ask = {"prompt": "a", "max_tokens": max_tokens, "extra_body": {"priority": priority, "ignore_eos": True}}
            client.completions.create(model="honest", **ask)
            ends.append(priority)

        threads = [threading.Thread(target=ask, args=each) for each in ((0, 60), (9, 60), (1, 4))]
        for thread in threads:
            thread.start()
            time.sleep(0.02)
        waited = False
        while any(thread.is_alive() for thread in threads):
            stats = running.engine.stats
            waited = waited or (stats.num_queued == 2 and stats.num_running == 1 and not ends)
            time.sleep(0.0005)
        return ends if waited else None

    attempts = (ends_of_an_attempt() for _ in range(50))
    ends = next(ends for ends in attempts if ends is not None)
    assert ends.index(1) < ends.index(9)
