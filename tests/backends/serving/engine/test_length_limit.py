"""How long a request may be: as the model was made for, and under longrope as long as neighbours change nothing."""

import attrs
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="live serving needs torch")
pytest.importorskip("transformers", reason="real models need transformers")

from kvledger.backends.serving import EngineOptions, LiveEngine, size_engine, transformers_geometry  # noqa: E402
from kvledger.core import InputError, TokenBatch  # noqa: E402

from tests.backends.serving.real_models import Pool, Service, alone, prompt, tiny_model  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        (ROPE | {"original_max_position_embeddings": 32}, 32),
        (ROPE | {"original_max_position_embeddings": 300}, 256),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}, 256),
    ],
)
def test_a_request_is_no_longer_than_positions_do_not_depend_on_its_neighbours(rope, longest) -> None:
    """Beyond it, longrope would turn the keys of all requests of a step by the longest of them."""
    model = tiny_model("llama", rope_parameters=rope)
    assert transformers_geometry(model).max_position_embeddings == longest
    pool = Pool(model)
    assert pool.runner.length_limit.num_tokens == longest
    reason = "has rotary scaling of the type longrope" if longest == 32 else f"was made for at most {longest} "
    message = (
        f"a request's length is {longest + 1}, and LlamaForCausalLM {reason}.* set max_model_len to {longest} at most"
    )
    with pytest.raises(InputError, match=message):
        batch = TokenBatch(np.array([0]), np.array([longest]), np.array([1]))
        pool.runner.run(np.array([5]), batch, np.array([0]))


def test_requests_of_any_served_length_share_a_batch_under_longrope() -> None:
    rope = {"rope_parameters": ROPE | {"original_max_position_embeddings": 32}}
    service = Service(tiny_model("llama", **rope))
    prompts = {"short": prompt(9, seed=1), "long": prompt(20, seed=2)}
    for name, ids in prompts.items():
        service.submit(name, ids, 12)
    service.run()
    for name, ids in prompts.items():
        assert service.outputs(name) == alone(tiny_model("llama", **rope), ids, 12)


@attrs.frozen
class Loaded:
    model: object


def sized(max_model_len):
    options = EngineOptions(
        max_num_seqs=4, max_num_batched_tokens=64, kv_cache_memory_bytes=1 << 20, max_model_len=max_model_len
    )
    rope = ROPE | {"original_max_position_embeddings": 32}
    return size_engine(lambda: Loaded(tiny_model("llama", rope_parameters=rope)), options, device="cpu")


REFUSAL = (
    r"max_model_len is 64, and LlamaForCausalLM has rotary scaling of the type longrope, which is served up to its "
    r"original length of 32 tokens \(original_max_position_embeddings\).* set max_model_len to 32 at most, or serve a "
    r"model whose positions are scaled alike at every length"
)


def test_a_longer_request_under_longrope_is_refused_with_its_name_the_length_and_the_way_out() -> None:
    with pytest.raises(InputError, match=REFUSAL):
        sized(max_model_len=64)
    found = sized(max_model_len=32)
    longer = attrs.evolve(found.allocator, max_model_len=64)
    with pytest.raises(InputError, match=REFUSAL):
        LiveEngine(found.runner, allocator=longer, scheduler=found.scheduler)


def test_who_asks_for_no_length_is_told_that_longrope_makes_it_shorter() -> None:
    found = sized(max_model_len=None)
    assert found.allocator.max_model_len == 32
    (warning,) = found.warnings
    assert warning.startswith("LlamaForCausalLM has rotary scaling of the type longrope, which is served up to")
    assert f"Warning: {warning}" in found.lines()
    assert sized(max_model_len=32).warnings == ()
