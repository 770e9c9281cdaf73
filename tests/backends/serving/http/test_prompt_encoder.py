"""Prompts are the tokenizer's own, and what a template refuses is the client's to hear."""

import copy

import pytest
from kvledger.backends.serving.http.errors import ApiError
from kvledger.backends.serving.http.prompt_encoder import PromptEncoder
from kvledger.backends.serving.http.requests import ChatCompletionRequest

CONVERSATION = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hel"},
]


@pytest.fixture
def encoder_with(letters):
    def make(template):
        tokenizer = copy.deepcopy(letters)
        tokenizer.chat_template = template
        return PromptEncoder.beside(tokenizer, 61)

    return make


@pytest.mark.parametrize(
    ("asked", "rendered"),
    [
        ({}, {"add_generation_prompt": True}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        ({"continue_final_message": True}, {"continue_final_message": True}),
        ({"chat_template_kwargs": {"shouts": True}}, {"add_generation_prompt": True, "shouts": True}),
    ],
)
def test_a_conversation_is_what_the_tokenizer_makes_of_it(letters, asked, rendered):
    encoder = PromptEncoder.beside(letters, 61)
    request = ChatCompletionRequest(messages=CONVERSATION, **asked)
    assert encoder.of_conversation(request) == letters.apply_chat_template(CONVERSATION, return_dict=False, **rendered)


def refused(encoder, **asked):
    with pytest.raises(ApiError) as caught:
        encoder.of_conversation(ChatCompletionRequest(messages=CONVERSATION, **asked))
    assert caught.value.status == 400
    return caught.value


def test_a_model_without_a_template_says_so(encoder_with):
    assert refused(encoder_with(None)).code == "no_chat_template"


def test_what_a_template_raises_is_told(encoder_with):
    raising = "{{ raise_exception('system messages are not for this model') }}"
    assert "system messages are not for this model" in str(refused(encoder_with(raising)))
    failing = "{{ messages[0].content + shouts }}"
    assert "template" in str(refused(encoder_with(failing), chat_template_kwargs={"shouts": 3}))


def test_a_template_that_makes_nothing_of_the_messages_is_refused(encoder_with):
    assert "no token" in str(refused(encoder_with("{# nothing #}")))


def test_variables_inside_generation_tags_and_loops_are_known(encoder_with):
    template = (
        "{% for m in messages %}{% generation %}{{ m.content }}{{ mood }}{% endgeneration %}{% break %}{% endfor %}"
    )
    encoder = encoder_with(template)
    request = ChatCompletionRequest(messages=CONVERSATION, chat_template_kwargs={"mood": "x"})
    assert encoder.spell(encoder.of_conversation(request)[-1]).text == "x"
    for name in ("m", "messages", "tokenize", "add_generation_prompt"):
        assert refused(encoder, chat_template_kwargs={name: "x"}).param == f"chat_template_kwargs.{name}"
