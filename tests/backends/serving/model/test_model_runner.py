"""A real model on the pool produces, token for token, what it produces alone with its own cache."""

import functools

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="live serving needs torch")
pytest.importorskip("transformers", reason="real models need transformers")

from kvledger.core import InputError, MisuseError, TokenBatch  # noqa: E402
from kvledger.core.events import BlockCopied  # noqa: E402
from kvledger.core.types import ScheduledStep, StepLoad  # noqa: E402

from tests.backends.serving.model_families import FAMILIES  # noqa: E402
from tests.backends.serving.real_models import (  # noqa: E402
    Alone,
    Pool,
    Service,
    alone,
    assert_close,
    prompt,
    sampled,
    tiny_model,
)
from tests.kernels.kernel_sets import device, kernel_set  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

PROMPTS = {"a": prompt(23, seed=1), "b": prompt(5, seed=2), "c": prompt(37, seed=3), "d": prompt(12, seed=4)}
NUM_TOKENS = {"a": 13, "b": 20, "c": 8, "d": 15}


@functools.lru_cache
def reference(family, prompt_ids, num_tokens):
    """What a family's model yields alone, greedily; computed once for all tests."""
    return alone(tiny_model(family), list(prompt_ids), num_tokens)


def expected(family):
    """What each prompt yields alone, greedily."""
    return {name: reference(family, tuple(PROMPTS[name]), NUM_TOKENS[name]) for name in PROMPTS}


def submit_all(service, choices=None):
    for name in PROMPTS:
        service.submit(name, PROMPTS[name], NUM_TOKENS[name], *([choices[name]] if choices else []))


def assert_outputs(service, outputs):
    assert {name: service.outputs(name) for name in outputs} == outputs
    assert service.pool.is_empty


def test_the_reference_is_what_generate_produces(family):
    model = tiny_model(family)
    ids = torch.tensor([PROMPTS["a"]], device=model.device)
    generated = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    outputs = alone(model, PROMPTS["a"], 16)
    assert outputs == generated[0, len(PROMPTS["a"]) :].tolist()
    assert len(set(outputs)) >= 8, "a model that repeats itself would show nothing"


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_cache_are_bit_equal_where_the_shapes_of_the_forward_passes_are(family):
    reference, pool = Alone(tiny_model(family)), Pool(tiny_model(family))
    ids = PROMPTS["a"]
    for index in range(12):
        theirs, mine = reference.forward(ids), pool.forward({"a": ids})["a"]
        assert torch.equal(mine, theirs), f"logits of step {index}"
        ids = [int(theirs.argmax())]
    for index, layer in enumerate(reference.cache.layers):
        keys, values = pool.cached("a", index, layer.keys.shape[2])
        assert torch.equal(keys, layer.keys[0])
        assert torch.equal(values, layer.values[0])


def test_cache_is_close_where_batching_changes_the_shapes(family):
    pool = Pool(tiny_model(family))
    references = {name: Alone(tiny_model(family)) for name in PROMPTS}
    # Requests join one by one, so that prompts and decodes stand side by side; long prompts come in chunks of 10.
    waiting = {name: [PROMPTS[name][at : at + 10] for at in range(0, len(PROMPTS[name]), 10)] for name in PROMPTS}
    next_ids, joined = {}, []
    for step in range(14):
        joined += list(PROMPTS)[step : step + 1]
        work = {name: waiting[name].pop(0) if waiting[name] else next_ids[name] for name in joined}
        for name, logits in pool.forward(work).items():
            theirs = references[name].forward(work[name])
            assert_close(logits, theirs)
            next_ids[name] = [int(theirs.argmax())]
    for name, reference in references.items():
        for index, layer in enumerate(reference.cache.layers):
            keys, values = pool.cached(name, index, layer.keys.shape[2])
            assert_close(keys, layer.keys[0])
            assert_close(values, layer.values[0])


def test_a_batch_of_requests(family):
    service = Service(tiny_model(family))
    submit_all(service)
    service.run()
    assert_outputs(service, expected(family))


def test_requests_that_arrive_while_others_decode(family):
    service = Service(tiny_model(family))
    service.submit("a", PROMPTS["a"], NUM_TOKENS["a"])
    later = {3: "b", 5: "c", 6: "d"}

    def arrive(num_steps):
        if num_steps in later:
            service.submit(later[num_steps], PROMPTS[later[num_steps]], NUM_TOKENS[later[num_steps]])

    service.run(arrive)
    assert service.mixed_steps >= 3
    assert_outputs(service, expected(family))


def test_sampled_requests_in_a_batch(family):
    choices = {name: sampled(seed) for seed, name in enumerate(PROMPTS)}
    service = Service(tiny_model(family))
    submit_all(service, choices)
    service.run()
    model = tiny_model(family)
    outputs = {name: alone(model, PROMPTS[name], NUM_TOKENS[name], choices[name]) for name in PROMPTS}
    assert outputs != expected(family)
    assert_outputs(service, outputs)


def test_prompts_computed_in_chunks(family):
    service = Service(tiny_model(family), max_num_batched_tokens=9)
    submit_all(service)
    service.run()
    assert service.mixed_steps >= 3
    assert_outputs(service, expected(family))


def test_requests_that_are_preempted_and_recomputed(family):
    # As tight as a pool can be: what windowed layers need does not grow, and groups of layers share one pool.
    num_blocks = {"mistral-windowed": 11, "gemma2-windowed": 28, "gemma3-windowed": 28}.get(
        family.partition(" on ")[0], 16
    )
    scheduler = {"reserve_full_sequence": False}
    service = Service(tiny_model(family), scheduler, num_blocks=num_blocks, max_model_len=60, max_num_batched_tokens=12)
    submit_all(service)
    service.run()
    assert service.scheduler.stats.num_preemptions >= 2
    assert service.scheduler.stats.recomputed_tokens >= 1
    assert_outputs(service, expected(family))


def test_a_hit_equals_a_cold_run(family):
    shared, ends = prompt(24, seed=5), {"first": prompt(3, seed=6), "second": prompt(6, seed=7)}
    service = Service(tiny_model(family))
    for name, end in ends.items():
        service.submit(name, shared + end, 15)
        service.run()
    assert service.requests["first"].num_cached_tokens == 0
    assert service.requests["second"].num_cached_tokens == 24
    cold = Service(tiny_model(family))
    cold.submit("second", shared + ends["second"], 15)
    cold.run()
    assert service.outputs("second") == cold.outputs("second")
    assert_outputs(service, {name: reference(family, tuple(shared + end), 15) for name, end in ends.items()})


def test_the_next_turn_finds_what_was_generated(family):
    service = Service(tiny_model(family))
    service.submit("turn 1", PROMPTS["a"], 16)
    service.run()
    turn_2 = service.tokens["turn 1"] + prompt(5, seed=8)
    service.submit("turn 2", turn_2, 10)
    service.run()
    assert service.requests["turn 2"].num_cached_tokens > len(PROMPTS["a"])
    assert_outputs(service, {"turn 2": alone(tiny_model(family), turn_2, 10)})


def test_two_requests_of_one_prefix_in_the_same_step(family):
    shared = prompt(17, seed=9)
    service = Service(tiny_model(family))
    service.submit("one", shared + prompt(4, seed=10), 12)
    service.submit("two", shared + prompt(6, seed=11), 12)
    service.run()
    # The second one reads, in the very step that computes them, blocks that the first one writes.
    assert service.requests["two"].num_cached_tokens == 16
    ends = {"one": prompt(4, seed=10), "two": prompt(6, seed=11)}
    assert_outputs(service, {name: reference(family, tuple(shared + end), 12) for name, end in ends.items()})


def test_a_fork_goes_its_own_way_and_leaves_its_parent_alone(family):
    pool = Pool(tiny_model(family))
    ids = prompt(18, seed=12)
    tokens = {"parent": list(ids), "child": list(ids)}
    logits = pool.forward({"parent": ids})["parent"]
    pool.fork("parent", "child")
    likeliest = logits.topk(2).indices.tolist()
    next_ids = {"parent": [likeliest[0]], "child": [likeliest[1]]}
    for _ in range(12):
        for name in tokens:
            tokens[name] += next_ids[name]
        next_ids = {name: [int(row.argmax())] for name, row in pool.forward(next_ids).items()}
    assert pool.count(BlockCopied) >= 1
    for name, known in tokens.items():
        assert known[19:] + next_ids[name] == alone(tiny_model(family), known[:19], 12)


def test_a_cancelled_neighbour(family):
    service = Service(tiny_model(family), num_blocks=40)
    submit_all(service)
    cancelled = {4: "b", 7: "c"}
    after = {5: "e", 8: "f"}  # take the blocks that were given back

    def cancel(num_steps):
        if num_steps in cancelled:
            assert service.scheduler.abort(cancelled[num_steps])
        if num_steps in after:
            service.submit(after[num_steps], prompt(20, seed=num_steps), 8)

    service.run(cancel)
    outputs = expected(family)
    assert_outputs(service, {name: outputs[name] for name in ("a", "d")})
    for num_steps, name in after.items():
        assert service.outputs(name) == reference(family, tuple(prompt(20, seed=num_steps)), 8)


@pytest.mark.parametrize("name", ["gemma2-windowed"])
def test_triton_s_kernels_give_the_same_logits(name):
    """Interpreted on a CPU; on a GPU compiled, which all tests of this file run on there."""
    model = tiny_model(f"{name} on {device()}")
    pool = Pool(model, kernels=kernel_set("triton"))
    references = {request_id: Alone(tiny_model(f"{name} on {device()}")) for request_id in "ab"}
    work = {"a": prompt(15, seed=50)}
    for _ in range(3):
        logits = pool.forward(work)
        for request_id, token_ids in work.items():
            assert_close(logits[request_id], references[request_id].forward(token_ids))
        work = {request_id: [int(row.argmax())] for request_id, row in logits.items()}
        work.setdefault("b", prompt(6, seed=51))


def test_logits_are_computed_for_sampled_rows_only():
    pool = Pool(tiny_model("llama"))
    full = pool.forward({"a": PROMPTS["a"], "b": PROMPTS["b"]})
    rows = np.array([pool.allocator.row_of(name) for name in "ab"])
    counts = np.array([len(PROMPTS[name]) for name in "ab"])
    batch = TokenBatch(rows, np.zeros(2, dtype=np.int64), counts)
    ids = np.array(PROMPTS["a"] + PROMPTS["b"])
    only_b = pool.runner.run(ids, batch, np.array([1]))
    assert only_b.shape == (1, pool.runner.vocab_size)
    assert_close(only_b[0], full["b"])
    assert pool.runner.run(ids, batch, np.array([], dtype=np.int64)).shape == (0, pool.runner.vocab_size)


def test_a_model_given_back_runs_by_itself_again():
    model = tiny_model("llama")
    before = alone(model, PROMPTS["a"], 8)
    pool = Pool(model)
    with pytest.raises(MisuseError, match="run the model through ModelRunner"):
        alone(model, PROMPTS["a"], 8)
    pool.runner.release_model()
    pool.runner.release_model()  # a second time is harmless
    assert alone(model, PROMPTS["a"], 8) == before
    assert not any("warn_if_padding_and_no_attention_mask" in vars(module) for module in model.modules())


def test_a_step_that_the_runner_cannot_compute_is_refused_with_the_numbers():
    pool = Pool(tiny_model("gpt2", n_positions=16))
    batch = TokenBatch(np.array([0]), np.array([0]), np.array([17]))
    with pytest.raises(InputError, match="a request's length is 17, and GPT2LMHeadModel was made for at most 16"):
        pool.runner.run(np.arange(17), batch, np.array([0]))
    with pytest.raises(InputError, match="3 token ids for a batch of 17 tokens"):
        pool.runner.run(np.arange(3), batch, np.array([0]))
    step = ScheduledStep(batch, StepLoad(17, 0, 0, 0, 1))
    with pytest.raises(MisuseError, match="set its `tokens` first"):
        pool.runner.launch(step)
