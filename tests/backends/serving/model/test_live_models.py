"""The live engine over real models: what each request yields is what its model yields alone, whoever else is there."""

import pytest

torch = pytest.importorskip("torch", reason="live serving needs torch")
pytest.importorskip("transformers", reason="real models need transformers")

import attrs  # noqa: E402
from kvledger.backends.serving import SamplingSettings  # noqa: E402
from kvledger.backends.serving.sampling.sampling import NextToken, choose_tokens, uniform  # noqa: E402

from tests.backends.serving.real_models import alone, prompt, tight_engine, tiny_model  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

GREEDY = SamplingSettings(max_tokens=15, temperature=0)
DRAWN = SamplingSettings(max_tokens=15, temperature=0.9, top_p=0.95, top_k=30, seed=7)


@pytest.fixture
def engine(family):
    """An engine with little room: chunks of 16 tokens, and a pool that cannot hold all requests at once."""
    engine = tight_engine(tiny_model(family))
    yield engine
    engine.shutdown(drain=False, timeout_s=60)
    assert engine.allocator.pool.num_held_blocks == 0


def expected(family, prompt_ids, settings):
    """The request alone with the model's own cache, its tokens chosen by the same draws."""

    def choose(logits, index):
        draw = 0.0 if settings.is_greedy else uniform(settings.seed, index)
        return choose_tokens(logits[None], [NextToken(settings, draw, None)]).wait()[0].token_id

    return tuple(alone(tiny_model(family), prompt_ids, settings.max_tokens, choose))


def test_everything_at_once_yields_what_each_request_yields_alone(family, engine):
    work = [
        (prompt(30, seed=60), GREEDY),
        (prompt(30, seed=60)[:26] + prompt(5, seed=61), DRAWN),
        (prompt(3, seed=62), attrs.evolve(DRAWN, seed=8)),
        (prompt(41, seed=63), GREEDY),
        (prompt(17, seed=64), attrs.evolve(DRAWN, top_k=0, seed=9)),
    ]
    neighbour = engine.submit(prompt(22, seed=65), attrs.evolve(GREEDY, max_tokens=40))
    requests = [engine.submit(*each) for each in work]
    for _ in zip(range(5), neighbour, strict=False):
        pass
    neighbour.cancel()
    results = [request.result(timeout_s=120).token_ids for request in requests]
    assert results == [expected(family, *each) for each in work]
    assert len(neighbour.result(timeout_s=60).token_ids) < 40
    turn = [*work[0][0], *results[0], *prompt(4, seed=66)]
    assert engine.submit(turn, GREEDY).result(timeout_s=60).token_ids == expected(family, turn, GREEDY)
