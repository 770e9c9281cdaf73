"""docs/serve.md says what is served, and serves what it says."""

import re
from pathlib import Path

import pytest
from kvledger.backends.serving.http.requests import (
    OF_CHAT,
    OF_COMPLETIONS,
    PASSED_OVER,
    ChatCompletionRequest,
    CompletionRequest,
    StreamOptions,
)
from prometheus_client.parser import text_string_to_metric_families

PAGE = (Path(__file__).parents[4] / "docs" / "serve.md").read_text()


def test_the_table_of_parameters_is_complete():
    table = PAGE.partition("| served | by default |")[2].partition("\n\n")[0]
    named = {
        name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1] if "|" in row else "")
    }
    fields = set(CompletionRequest.model_fields) | set(ChatCompletionRequest.model_fields)
    assert named == fields - {"prompt", "messages"}
    assert "include_usage" in StreamOptions.model_fields


def test_no_parameter_is_both_served_and_refused():
    for served, refused in ((CompletionRequest, OF_COMPLETIONS), (ChatCompletionRequest, OF_CHAT)):
        assert not set(served.model_fields) & set(refused)
        assert not PASSED_OVER & (set(served.model_fields) | set(refused))


def test_every_field_that_is_passed_over_is_on_the_page():
    assert [name for name in PASSED_OVER if f"`{name}`" not in PAGE] == []


def test_every_parameter_of_the_openai_client_is_served_passed_over_or_refused_with_a_reason():
    pytest.importorskip("openai", reason="its parameters are compared")
    from typing import get_type_hints

    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_create_params

    for params, served, refused in (
        (completion_create_params, CompletionRequest, OF_COMPLETIONS),
        (chat_create_params, ChatCompletionRequest, OF_CHAT),
    ):
        known = set(get_type_hints(params.CompletionCreateParamsBase)) | {"stream"}
        assert known - set(served.model_fields) - set(refused) - PASSED_OVER == set()


def test_every_metric_of_the_page_is_there(make_server):
    text = make_server().metrics.text().decode()
    families = {family.name.removesuffix("_total") for family in text_string_to_metric_families(text)}
    named = re.findall(r"`((?:vllm|kvledger):\w+)`", PAGE.partition("## Metrics")[2])
    assert len(named) > 20
    assert {name.removesuffix("_total") for name in named} <= families


def test_every_option_of_the_page_is_one_of_the_command():
    from inspect import signature

    from kvledger.sim.commands.serve import serve

    options = {f"--{name.replace('_', '-')}" for name in signature(serve).parameters}
    named = set(re.findall(r"--[a-z][a-z-]+", PAGE)) - {"--no-isolate-api-keys"}
    assert named <= options, named - options
