"""Field report S03: with n choices a stream holds one finish reason for each index, however they end."""

# ruff: noqa: F401, F811 (fixtures are imported by name)

from collections import Counter

import pytest

from tests.field.served_streams import (
    CHAT,
    COMPLETIONS,
    choices_of,
    letters,
    make_engine,
    make_server,
    stream,
    texts_of,
)

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "more", [{}, {"ignore_eos": False, "stop": ["e", "a", " "]}, {"logprobs": 2}], ids=["length", "stop", "logprobs"]
)
def test_s03_each_index_ends_once_and_sends_nothing_after(make_server, path, more):
    if path == CHAT and "logprobs" in more:
        more = {"logprobs": True, "top_logprobs": 2}
    running = make_server()
    for seed in range(4):
        chunks = list(choices_of(stream(running, path, n=3, temperature=1, seed=seed, max_tokens=9, **more)))
        ends = [place for place, each in enumerate(chunks) if each["finish_reason"] is not None]
        assert Counter(chunks[place]["index"] for place in ends) == {0: 1, 1: 1, 2: 1}
        for place in ends:
            assert not texts_of(chunks[place])
            assert all(each["index"] != chunks[place]["index"] for each in chunks[place + 1 :])


def test_s03_several_prompts_have_an_end_for_each_choice_of_each(make_server):
    chunks = list(choices_of(stream(make_server(), COMPLETIONS, prompt=["ab", "cd"], n=2, temperature=1)))
    assert sorted(each["index"] for each in chunks if each["finish_reason"]) == [0, 1, 2, 3]
