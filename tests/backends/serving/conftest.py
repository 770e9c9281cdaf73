"""Engines over a small deterministic model, and what it produces by its definition."""

import time

import pytest

torch = pytest.importorskip("torch", reason="live serving needs torch")

from kvledger.backends.serving.sampling.sampling import NextToken, choose_tokens, uniform  # noqa: E402

from tests.backends.serving.cache_reader import Text, logits_of, make_reading_engine  # noqa: E402
from tests.backends.serving.model_families import EVERYWHERE  # noqa: E402


@pytest.fixture(params=EVERYWHERE)
def family(request):
    """Every family of models."""
    return request.param


@pytest.fixture(scope="module")
def one_thread():
    """Two threads on two busy cores stall each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_engine():
    """Engines over the honest model; those that still run at the end of a test are shut down."""
    engines = []

    def make(**settings):
        engines.append(make_reading_engine(**settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown(drain=False, timeout_s=20)


@pytest.fixture
def alone():
    """What a greedy request produces by the model's definition, with no cache at all."""

    def outputs(prompt, max_tokens, stop_token_ids=()):
        tokens = list(prompt)
        for _ in range(max_tokens):
            tokens.append(int(logits_of(tokens).argmax()))
            if tokens[-1] in stop_token_ids:
                break
        return tuple(tokens[len(prompt) :])

    return outputs


@pytest.fixture
def drawn_alone():
    """What a request with a seed produces by the definition: the model's answers, and the request's own draws."""

    def outputs(prompt, each):
        tokens = list(prompt)
        for index in range(each.max_tokens):
            logits = torch.from_numpy(logits_of(tokens))[None]
            (chosen,) = choose_tokens(logits, [NextToken(each, uniform(each.seed, index), None)]).wait()
            tokens.append(chosen.token_id)
        return tuple(tokens[len(prompt) :])

    return outputs


@pytest.fixture
def text():
    """A tokenizer."""
    return Text()


@pytest.fixture
def eventually():
    """Wait for something that other threads do."""

    def wait(condition, timeout_s=20.0):
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.001)

    return wait
