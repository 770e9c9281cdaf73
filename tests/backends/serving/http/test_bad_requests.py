"""Every bad request is answered with 4xx in OpenAI's shape, names what is wrong, and reaches no engine."""

import json

import pytest
from kvledger.backends.serving.http.requests import ChatCompletionRequest, CompletionRequest
from pydantic import ValidationError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


def error_of(answer, status):
    """The error of an answer that must have this status and OpenAI's shape."""
    found, headers, body = answer
    assert found == status, body
    assert headers["content-type"].startswith("application/json")
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and b"Traceback" not in body
    return error


FIELDS = [
    ({"prompt": "a", "temperature": "hot"}, "temperature", None),
    ({"prompt": "a", "temperature": -0.1}, "temperature", None),
    ({"prompt": "a", "temperature": 2.5}, "temperature", None),
    ({"prompt": "a", "top_p": 0}, "top_p", None),
    ({"prompt": "a", "top_p": 1.01}, "top_p", None),
    ({"prompt": "a", "top_k": -2}, "top_k", None),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens", None),
    ({"prompt": "a", "max_tokens": 2.0}, "max_tokens", None),
    ({"prompt": "a", "max_tokens": True}, "max_tokens", None),
    ({"prompt": "a", "max_tokens": 10**30}, "max_tokens", None),
    ({"prompt": "a", "max_tokens": 65}, "max_tokens", "context_length_exceeded"),
    ({"prompt": "a" * 70}, "prompt", "context_length_exceeded"),
    ({"prompt": "a" * 70, "max_tokens": 70}, "prompt", "context_length_exceeded"),
    ({"prompt": "a" * 70, "min_tokens": 5}, "prompt", "context_length_exceeded"),
    ({"prompt": "a" * 60, "max_tokens": 6}, "max_tokens", "context_length_exceeded"),
    ({"prompt": ["a", "a" * 65, "a"]}, "prompt", "context_length_exceeded"),
    ({"prompt": "a", "n": 2, "best_of": 1}, "best_of", None),
    ({"prompt": "a", "best_of": 0}, "best_of", None),
    ({"prompt": "a", "best_of": True}, "best_of", None),
    ({"prompt": "a", "n": 0}, "n", None),
    ({"prompt": "a", "n": 33}, "n", None),
    ({"prompt": ["a"] * 33}, "prompt", None),
    ({"prompt": ["a"] * 33, "n": 2}, "prompt", None),
    ({"prompt": ["a"] * 3, "n": 11}, "n", None),
    ({"prompt": "a", "seed": 1 << 63}, "seed", None),
    ({"prompt": "a", "stop": 3}, "stop", None),
    ({"prompt": "a", "stop": [""]}, "stop", None),
    ({"prompt": "a", "stop": ["x"] * 17}, "stop", None),
    ({"prompt": "a", "top_k": 10**30}, "top_k", None),
    ({"prompt": "a", "stop_token_ids": [61]}, "stop_token_ids", None),
    ({"prompt": "a", "min_tokens": -1}, "min_tokens", None),
    ({"prompt": "a", "min_tokens": 17}, "min_tokens", None),  # max_tokens is 16
    ({"prompt": "a", "min_tokens": 1, "stop_token_ids": list(range(61))}, "min_tokens", None),
    ({"prompt": "a", "min_p": 1.1}, "min_p", None),
    ({"prompt": "a", "min_p": "some"}, "min_p", None),
    ({"prompt": "a", "presence_penalty": 2.01}, "presence_penalty", None),
    ({"prompt": "a", "presence_penalty": True}, "presence_penalty", None),
    ({"prompt": "a", "frequency_penalty": -3}, "frequency_penalty", None),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty", None),
    ({"prompt": "a", "repetition_penalty": 10**30}, "repetition_penalty", None),
    ({"prompt": "a", "logit_bias": {"3": 101}}, "logit_bias", None),
    ({"prompt": "a", "logit_bias": {"61": 1}}, "logit_bias", None),
    ({"prompt": "a", "logit_bias": {"10000000000000000000000": 1}}, "logit_bias", None),
    ({"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias", None),
    ({"prompt": "a", "logit_bias": {"3": 1, "03": 2}}, "logit_bias", None),
    ({"prompt": "a", "logit_bias": {"1" * 5_000: 1}}, "logit_bias", None),
    ({"prompt": "a", "logit_bias": {"hello": 1}}, "logit_bias", None),
    ({"prompt": "a", "logit_bias": {"3": "much"}}, "logit_bias.3", None),
    ({"prompt": "a", "logit_bias": [3]}, "logit_bias", None),
    ({"prompt": "a", "logprobs": 21}, "logprobs", None),
    ({"prompt": "a", "stream": "yes"}, "stream", None),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", None),
    ({"prompt": "a", "stream": False, "stream_options": {}}, "stream_options", None),
    (
        {"prompt": "a", "stream": True, "stream_options": {"frequency": 1}},
        "stream_options.frequency",
        "unknown_parameter",
    ),
    ({"prompt": "a", "cache_salt": ""}, "cache_salt", None),
    ({"prompt": "a", "cache_salt": 7}, "cache_salt", None),
    ({"prompt": "a", "priority": 1}, "priority", None),  # the policy is fcfs
    ({"prompt": "a", "priority": 1.5}, "priority", None),
    ({"prompt": ""}, "prompt", None),
    ({"prompt": []}, "prompt", None),
    ({"prompt": [""]}, "prompt", None),
    ({"prompt": [[]]}, "prompt", None),
    ({"prompt": [1, "a"]}, "prompt", None),
    ({"prompt": [1, -1]}, "prompt", None),
    ({"prompt": [61]}, "prompt", None),
    ({"prompt": [10**30]}, "prompt", None),
    ({"prompt": {"text": "a"}}, "prompt", None),
    ({"prompt": None}, "prompt", None),
    ({"prompt": "\ud800"}, "prompt", None),
    ({}, "prompt", "missing_parameter"),
    ({"prompt": "a", "promt": "b"}, "promt", "unknown_parameter"),
    ({"prompt": "a", "": "b"}, "", "unknown_parameter"),
    ({"prompt": "a", "\ud800": "b"}, None, None),
]


@pytest.fixture
def running(make_server):
    return make_server()


def test_a_field_that_is_wrong_is_named(running):
    for body, param, code in FIELDS:
        error = error_of(running.post(COMPLETIONS, body), 400)
        assert (error["param"], error["code"]) == (param, code), (body, error)
        assert error["type"] == "invalid_request_error"
    assert running.engine.stats.scheduler.num_submitted == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": 2.5}, "temperature is 2.5; it must be 0 to 2"),
        ({"temperature": "hot"}, 'temperature is "hot"; it must be a number'),
        ({"max_tokens": 2.0}, "max_tokens is 2.0; it must be a whole number"),
        ({"stream": "yes"}, 'stream is "yes"; it must be true or false'),
        ({"logit_bias": [3]}, "logit_bias: it must be an object"),
        ({"stop_token_ids": "x"}, 'stop_token_ids is "x"; it must be a list'),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0 is -1; it must be 0 or more"),
        ({"cache_salt": ""}, 'cache_salt is ""; it must be text with something in it'),
        ({"cache_salt": "\ud800"}, 'cache_salt is "\\ud800"; it must be text that UTF-8 can carry'),
        ({"": 1}, '"" is no parameter of this endpoint; leave it out'),
        ({"n": 2, "best_of": 1}, "best_of is 1; it must be n 2 or more; leave it out"),
        (
            {"n": 33},
            "1 prompt with n 33 are 33 choices, more than the 32 that may wait at once; send them in several requests",
        ),
        ({"stream_options": {}}, "stream_options has no effect without stream: true; leave it out, or give both"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation is true; it must be false",
        ),
        ({"max_tokens": 0}, "max_tokens is 0; it must be 1 to 2,147,483,648"),
        ({"n": 0}, "n is 0; it must be 1 or more"),
        ({"top_p": 0}, "top_p is 0.0; it must be above 0 and at most 1 (all tokens)"),
        ({"top_k": -2}, "top_k is -2; it must be -1 to 2,147,483,648 (0 and -1: all tokens)"),
        ({"min_p": 1.5}, "min_p is 1.5; it must be 0 (all tokens) to 1"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9; it must be 0 to max_tokens 8"),
        ({"presence_penalty": 3}, "presence_penalty is 3.0; it must be -2 to 2 (0: none)"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0.0; it must be 0.001 to 1000 (1: none)"),
        ({"logit_bias": {"7": -101}}, "logit_bias of token 7 is -101.0; it must be -100 to 100"),
        ({"logit_bias": {"61": 1}}, "logit_bias holds token 61; the model's vocabulary is 0 to 60"),
        ({"logprobs": 21}, "logprobs is 21; it must be 0 to 20"),
        ({"stop_token_ids": [61]}, "stop_token_ids holds token 61; the model's vocabulary is 0 to 60"),
    ],
)
def test_a_value_out_of_its_bounds_is_said_with_the_bounds(running, given, message):
    assert error_of(running.post(COMPLETIONS, {"prompt": "a", **given}), 400)["message"] == message


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (
            COMPLETIONS,
            {"prompt": "a" * 70},
            "prompt",
            "70 tokens in prompt and 1 of output (the least) are too many: a prompt may have 64; shorten it",
        ),
        (
            COMPLETIONS,
            {"prompt": ["a", "a" * 70], "max_tokens": 9},
            "prompt",
            "70 tokens in prompt[1] and 9 of output (max_tokens) are too many: a prompt may have 64; shorten it, and "
            "set max_tokens to what is left",
        ),
        (
            COMPLETIONS,
            {"prompt": "a" * 60, "max_tokens": 6},
            "max_tokens",
            "60 tokens in prompt and 6 of output (max_tokens) are too many: 5 fit behind this prompt; set max_tokens "
            "to 5 at most, or shorten prompt",
        ),
        (
            CHAT,
            {"messages": HELLO, "max_completion_tokens": 60},
            "max_completion_tokens",
            "10 tokens in messages and 60 of output (max_completion_tokens) are too many: 55 fit behind this prompt; "
            "set max_completion_tokens to 55 at most, or shorten messages",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a" * 60}]},
            "messages",
            "65 tokens in messages and 1 of output (the least) are too many: a prompt may have 64; shorten it",
        ),
    ],
)
def test_what_is_too_long_is_said_with_both_counts_and_the_field_to_change(running, path, body, param, message):
    error = error_of(running.post(path, body), 400)
    assert error == {
        "message": message,
        "type": "invalid_request_error",
        "param": param,
        "code": "context_length_exceeded",
    }
    stats = running.engine.stats.scheduler
    assert (stats.num_rejected, stats.num_submitted) == (1, 0)


def test_the_longest_that_is_named_is_served_and_one_more_is_not(make_server):
    for settings, longest in (
        ({}, 64),
        ({"num_blocks": 10}, 36),
        ({"max_num_batched_tokens": 20, "enable_chunked_prefill": False}, 20),
    ):
        running = make_server(**settings)
        assert running.post(COMPLETIONS, {"prompt": [0] * longest, "max_tokens": 1})[0] == 200
        message = error_of(running.post(COMPLETIONS, {"prompt": [0] * (longest + 1), "max_tokens": 1}), 400)["message"]
        assert message.endswith(f"a prompt may have {longest}; shorten it")
        most = running.engine.lengths.most_output_tokens(7)
        assert running.post(COMPLETIONS, {"prompt": [0] * 7, "max_tokens": most})[0] == 200
        message = error_of(running.post(COMPLETIONS, {"prompt": [0] * 7, "max_tokens": most + 1}), 400)["message"]
        assert message.endswith(f"set max_tokens to {most} at most, or shorten prompt")


NOT_SUPPORTED = [
    (COMPLETIONS, "best_of", 2), (COMPLETIONS, "echo", True), (COMPLETIONS, "suffix", "end"),
    (COMPLETIONS, "response_format", {"type": "json_object"}),
    (CHAT, "tools", [{"type": "function"}]), (CHAT, "tool_choice", "required"),
    (CHAT, "functions", [{}]), (CHAT, "function_call", {"name": "f"}),
    (CHAT, "response_format", {"type": "json_object"}),
    (CHAT, "modalities", ["text", "audio"]), (CHAT, "audio", {}), (CHAT, "prediction", {}),
    (CHAT, "reasoning_effort", "low"), (CHAT, "verbosity", "low"), (CHAT, "web_search_options", {}),
    (CHAT, "moderation", {}),
    (CHAT, "response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}),
]  # fmt: skip


def test_a_parameter_that_is_not_served_is_refused_by_name(running):
    for path, name, value in NOT_SUPPORTED:
        needed = {"prompt": "a"} if path == COMPLETIONS else {"messages": HELLO}
        error = error_of(running.post(path, {**needed, name: value}), 400)
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert "leave it out" in error["message"]


def test_a_parameter_that_is_not_served_may_be_given_the_value_that_asks_for_nothing(running):
    assert running.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "n": 2, "best_of": 2})[0] == 200
    neutral = {
        "best_of": 1, "echo": False, "suffix": None, "logit_bias": {}, "frequency_penalty": 0.0,
        "presence_penalty": 0, "user": None, "n": 1, "stream": False, "response_format": {"type": "text"},
    }  # fmt: skip
    assert running.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, **neutral})[0] == 200
    neutral = {
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"],
        "store": False, "service_tier": "auto", "metadata": {}, "logit_bias": None, "frequency_penalty": 0,
    }  # fmt: skip
    assert running.post(CHAT, {"messages": HELLO, "max_tokens": 1, **neutral})[0] == 200


MESSAGES = [
    ([], "messages"),
    ("hello", "messages"),
    (["hello"], "messages.0"),
    ([{"role": "user"}], "messages.0.content"),
    ([{"role": "wizard", "content": "a"}], "messages.0.role"),
    ([{"role": "tool", "content": "a"}], "messages.0.role"),
    ([{"role": "user", "content": None}], "messages.0.content"),
    ([{"role": "user", "content": "\udfff"}], "messages.0.content"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages.0.content"),
    ([{"role": "user", "content": "a", "name": "me"}], "messages.0.name"),
    ([*HELLO, {"role": "assistant", "content": "a", "tool_calls": [{}]}], "messages.1.tool_calls"),
    ([{"role": "user", "content": "a", "weight": 1}], "messages.0.weight"),
]


def test_a_message_that_is_wrong_is_named(running):
    for messages, param in MESSAGES:
        error = error_of(running.post(CHAT, {"messages": messages}), 400)
        assert error["param"] == param, (messages, error)


def test_chat_parameters_that_contradict_each_other_are_refused(running):
    for extra, param in (
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 0, "logprobs": False}, "top_logprobs"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
    ):
        assert error_of(running.post(CHAT, {"messages": HELLO, **extra}), 400)["param"] == param


def test_a_variable_that_the_chat_template_does_not_have_is_refused(running):
    answer = running.post(CHAT, {"messages": HELLO, "chat_template_kwargs": {"whispers": True}})
    error = error_of(answer, 400)
    assert error["param"] == "chat_template_kwargs.whispers" and "shouts" in error["message"]
    plain = running.post(CHAT, {"messages": HELLO, "max_tokens": 1})
    loud = running.post(CHAT, {"messages": HELLO, "max_tokens": 1, "chat_template_kwargs": {"shouts": True}})
    tokens = [json.loads(body)["usage"]["prompt_tokens"] for _, _, body in (plain, loud)]
    assert tokens[1] == tokens[0] + 1


def test_a_body_that_is_no_json_object_is_refused(running):
    for body in (b"", b"{", b'{"prompt": "a",}', b"\xff\xfe", b"[]", b'"a"', b"null", b"[" * 10_000, b'{"a":NaN'):
        error_of(running.post(COMPLETIONS, body), 400)
    error_of(running.post(COMPLETIONS, b'{"prompt": "a", "temperature": NaN}'), 400)
    error_of(running.post(COMPLETIONS, b'{"prompt": "a", "temperature": 1e999}'), 400)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt": "\xff"}', "the body is no UTF-8 text: byte 12 fits nowhere in one"),
        (b'{"x":' + b"[" * 3_000 + b"]" * 3_000 + b"}", "the body nests lists and objects too deeply to be read"),
        (b'{"n":' + b"9" * 5_000 + b"}", "the body holds a whole number with too many digits to be read"),
        (b'{"prompt": "a"', "the body is no JSON: Expecting ',' delimiter at character 14"),
        (b'["a"]', "the body must be a JSON object"),
    ],
    ids=["utf-8", "depth", "digits", "grammar", "object"],
)
def test_why_a_body_cannot_be_read_is_said(running, body, message):
    assert error_of(running.post(COMPLETIONS, body), 400)["message"].startswith(message)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt": "a", "n": 1, "n": 2}', "n"),
        (b'{"prompt": "a", "prompt": "a"}', "prompt"),
        (b'{"prompt": "a", "logit_bias": {"3": 1, "4": 1, "3": 2}}', "3"),
    ],
)
def test_a_field_that_is_given_twice_is_refused_and_not_half_ignored(running, body, param):
    error = error_of(running.post(COMPLETIONS, body), 400)
    assert (error["param"], error["message"]) == (param, f'"{param}" is given twice; give it once')


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatCompletionRequest, {"messages": [{}] * 1_000}),
        (ChatCompletionRequest, {"messages": HELLO, "stop_token_ids": [-1] * 1_000}),
        (CompletionRequest, {"prompt": [-1] * 1_000}),
    ],
)
def test_the_first_thing_that_is_wrong_with_a_list_is_enough(kind, body):
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= 2  # a message may lack both of its fields


def test_another_content_type_is_refused(running):
    for content_type in ("text/plain", "application/x-www-form-urlencoded", None):
        answer = running.post(COMPLETIONS, {"prompt": "a"}, {"content-type": content_type})
        assert "application/json" in error_of(answer, 415)["message"]


def test_a_path_or_method_that_is_not_there_is_refused(running):
    assert error_of(running.post("/v1/embeddings", {}), 404)["code"] == "not_found"
    assert error_of(running.get("/"), 404)["code"] == "not_found"
    assert error_of(running.get(COMPLETIONS), 405)["code"] == "method_not_allowed"
    assert error_of(running.post("/health", {}), 405)["code"] == "method_not_allowed"


def test_an_oversized_body_is_refused_before_it_is_held(make_server):
    running = make_server(max_request_bytes=1_000)
    error = error_of(running.post(COMPLETIONS, {"prompt": "a" * 2_000}), 413)
    assert error["code"] == "request_too_large" and "1,000" in error["message"]
    # Chunked, so that no length is declared.
    with running.connection() as connection:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
        connection.sendall(b"".join(b"200\r\n" + b"a" * 0x200 + b"\r\n" for _ in range(5)) + b"0\r\n\r\n")
        error_of(running.answer(connection), 413)
    # A client that asks first learns it without sending anything.
    with running.connection() as connection:
        connection.sendall(f"{head}content-length: 5000000000\r\nexpect: 100-continue\r\n\r\n".encode())
        error_of(running.answer(connection), 413)
    running.wait_until_idle()


def test_a_body_that_does_not_arrive_is_given_up(make_server):
    running = make_server(body_timeout_s=0.3)
    with running.connection() as connection:
        head = (
            f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
        )
        connection.sendall(head.encode() + b'{"prompt"')
        error = error_of(running.answer(connection), 408)
        assert "9 bytes" in error["message"]
    running.wait_until_idle()


def test_what_is_no_http_is_refused_in_the_same_shape(running):
    for garbage in (
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\n: x\r\n\r\n",
    ):
        with running.connection() as connection:
            connection.sendall(garbage)
            error_of(running.answer(connection), 400)


def test_headers_that_never_end_are_given_up(make_server):
    running = make_server(stall_timeout_s=0.3)
    with running.connection() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost:")
        assert_closed(connection)
    with running.connection() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 20_000)
        assert_closed(connection)


def test_the_most_extreme_values_that_are_taken_are_served(make_server):
    running = make_server(policy="priority")
    for extreme in (
        {"temperature": 5e-324}, {"temperature": 2, "top_p": 5e-324}, {"top_k": 1 << 31}, {"top_k": -1}, {"top_k": 1},
        {"seed": (1 << 63) - 1, "n": 3}, {"seed": -(1 << 63)}, {"priority": -(1 << 31)}, {"priority": (1 << 31) - 1},
        {"logprobs": 20}, {"logprobs": 0}, {"stop": "x" * 5_000}, {"stop": ["a", "b"] * 8}, {"stop_token_ids": [0, 60]},
        {"cache_salt": "s" * 9_000}, {"max_tokens": 64}, {"n": 32, "max_tokens": 1}, {"min_p": 1}, {"min_p": 5e-324},
        {"presence_penalty": 2, "frequency_penalty": 2}, {"presence_penalty": -2, "frequency_penalty": -2},
        {"repetition_penalty": 0.001, "temperature": 5e-324}, {"repetition_penalty": 1000},
        {"logit_bias": {str(token): -100 for token in range(61)}}, {"logit_bias": {"0": 100}},
        {"min_tokens": 3}, {"min_tokens": 3, "stop_token_ids": list(range(59))},
    ):  # fmt: skip
        status, _, body = running.post(COMPLETIONS, {"prompt": [0], "max_tokens": 3, **extreme})
        assert status == 200, (extreme, body)
    assert running.engine.failure is None


def test_a_fault_of_the_server_shows_no_stack_trace(make_server, monkeypatch):
    running = make_server()

    def broken(*_args, **_options):
        raise RuntimeError("a secret of the server")

    monkeypatch.setattr(running.engine, "submit_samples", broken)
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HELLO, "stream": True})):
        error = error_of(running.post(path, body), 500)
        assert error["type"] == "server_error" and "secret" not in error["message"]


def assert_closed(connection):
    """The server ends the connection, orderly or not."""
    try:
        while connection.recv(65536):
            pass
    except (TimeoutError, ConnectionResetError) as error:
        assert isinstance(error, ConnectionResetError)
