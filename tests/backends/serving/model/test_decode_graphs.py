"""Captured decode steps: whatever the history, their tokens are those of the eager run, and padding touches nothing."""

import functools

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="live serving needs torch")
pytest.importorskip("transformers", reason="real models need transformers")

from kvledger.backends.cuda.graphs import CudaGraphs  # noqa: E402
from kvledger.backends.serving.model.decode_graphs import decode_capture_sizes  # noqa: E402
from kvledger.core import InputError, TokenBatch  # noqa: E402
from kvledger.kernels import TorchKernels  # noqa: E402
from kvledger.kernels.launch import Launch  # noqa: E402

from tests.backends.serving.model_families import FAMILIES  # noqa: E402
from tests.backends.serving.real_models import (  # noqa: E402
    Pool,
    Service,
    alone,
    prompt,
    sampled,
    tiny_model,
)
from tests.backends.serving.recorded_graphs import RecordedGraphs, RecordedKernels, Recording  # noqa: E402
from tests.kernels.kernel_sets import device, kernel_set  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

SIZES = (1, 2, 4, 6)


def recorded(make, model, kernels=None, sizes=SIZES, **settings):
    """A pool or service whose decode steps are captured: in CUDA graphs on a GPU, recorded on a CPU."""
    if model.device.type == "cuda":
        made = make(model, **settings)
        capturer = CudaGraphs()
    else:
        kernels = RecordedKernels(TorchKernels()) if kernels is None else kernels
        made = make(model, kernels=kernels, **settings)
        capturer = RecordedGraphs(kernels)
    runner = made.runner if isinstance(made, Pool) else made.pool.runner
    runner.capture(sizes, capturer)
    return made


@functools.lru_cache
def reference(family, prompt_ids, num_tokens, seed):
    """What a family's model yields alone; computed once for all tests."""
    return alone(tiny_model(family), list(prompt_ids), num_tokens, *([] if seed is None else [sampled(seed)]))


def play(service, family, seed, num_requests=7, with_aborts=True):
    """A random history of arrivals (some share a prefix), of any length, and of neighbours that leave."""
    random = np.random.default_rng(seed)
    work, arrivals, leavers, aborted = {}, {}, {}, set()
    for number in range(num_requests):
        ids = prompt(12, seed=99)[: 12 * int(random.integers(2))] + prompt(int(random.integers(1, 25)), seed=number)
        draws = None if random.integers(2) else int(random.integers(100))
        work[str(number)] = (tuple(ids), int(random.integers(1, 24)), draws)
        arrivals.setdefault(int(random.integers(25)) if number else 0, []).append(str(number))
        if with_aborts and not random.integers(5):
            leavers.setdefault(int(random.integers(30)), []).append(str(number))

    def submit(name):
        ids, num_tokens, draws = work[name]
        service.submit(name, list(ids), num_tokens, *([] if draws is None else [sampled(draws)]))

    def between_steps(num_steps):
        for name in arrivals.pop(num_steps, []):
            submit(name)
        for name in leavers.pop(num_steps, []):
            if name in service.requests and service.scheduler.abort(name):
                aborted.add(name)

    between_steps(0)
    service.run(between_steps)
    while arrivals:  # nothing was left to do before their time came
        between_steps(min(arrivals))
        service.run(between_steps)
    assert service.pool.is_empty
    for name, each in work.items():
        outputs = service.outputs(name)
        assert outputs == reference(family, *each)[: len(outputs)], name
        assert len(outputs) == each[1] or name in aborted


def assert_any_history_is_right(family, seed):
    service = recorded(Service, tiny_model(family), max_num_batched_tokens=18, num_blocks=80)
    play(service, family, seed)
    graphs = service.pool.runner.graphs
    assert graphs.num_replays > 5
    assert service.num_steps > graphs.num_replays, "prompts are computed eagerly"


def test_any_history_yields_what_each_request_yields_alone(family):
    assert_any_history_is_right(family, seed=0)


@pytest.mark.parametrize("seed", range(1, 5))
def test_so_do_more_of_them(seed):
    assert_any_history_is_right("llama", seed)


def test_requests_that_are_preempted_and_recomputed(family):
    num_blocks = {"mistral-windowed": 11, "gemma2-windowed": 28, "gemma3-windowed": 28}.get(family.split()[0], 16)
    model, limits = tiny_model(family), {"max_model_len": 60, "max_num_batched_tokens": 12, "num_blocks": num_blocks}
    service = recorded(Service, model, scheduler={"reserve_full_sequence": False}, **limits)
    play(service, family, seed=11, with_aborts=False)
    assert service.scheduler.stats.num_preemptions >= 1
    assert service.pool.runner.graphs.num_replays > 5


def test_a_captured_run_takes_the_steps_of_the_eager_run():
    eager = Service(tiny_model("llama"), max_num_batched_tokens=18)
    captured = recorded(Service, tiny_model("llama"), max_num_batched_tokens=18)
    for service in (eager, captured):
        play(service, "llama", seed=5)
    assert captured.num_steps == eager.num_steps and captured.tokens == eager.tokens
    assert [commit.events for commit in captured.pool.log] == [commit.events for commit in eager.pool.log]


def decoding_pool(num_reqs, **settings):
    """A pool in which so many requests have computed their prompts, and the next token of each."""
    pool = recorded(Pool, tiny_model("llama"), **settings)
    work = {str(number): prompt(5 + number, seed=number) for number in range(num_reqs)}
    return pool, {name: [int(row.argmax())] for name, row in pool.forward(work).items()}


@pytest.mark.parametrize(("num_reqs", "size"), [(1, 1), (3, 4), (5, 6), (6, 6)])
def test_a_step_is_padded_to_the_next_captured_size(num_reqs, size, monkeypatch):
    pool, work = decoding_pool(num_reqs)
    graphs, used = pool.runner.graphs, []
    replay = graphs.replay
    monkeypatch.setattr(graphs, "replay", lambda size, token_ids: (used.append(size), replay(size, token_ids))[1])
    pool.forward(work)
    assert used == [size]


@pytest.mark.parametrize("work", [{"0": [5, 6], "1": [7]}, {str(number): [5] for number in range(7)}])
def test_other_steps_run_eagerly(work):
    pool, _ = decoding_pool(7)
    assert pool.runner.graphs.num_replays == 0
    pool.forward(work)
    assert pool.runner.graphs.num_replays == 0


def test_a_prompt_s_last_token_alone_is_replayed_like_a_decode():
    pool = recorded(Pool, tiny_model("llama"))
    ids = prompt(9, seed=3)
    pool.forward({"a": ids[:8]})
    logits = pool.forward({"a": ids[8:]})["a"]
    assert pool.runner.graphs.num_replays == 1
    assert int(logits.argmax()) == alone(tiny_model("llama"), ids, 1)[0]


def test_padding_writes_nothing_but_the_slots_of_the_live_tokens():
    pool, work = decoding_pool(3)
    before = pool.backend.raw.clone()
    pool.forward(work)
    assert pool.runner.graphs.num_replays == 1
    pages = [cache.view for cache in pool.backend.layers.values()]
    slots = pool.backend.slots[0, :3].tolist()
    assert pool.backend.slots[0, 3:].unique().tolist() == [-1]
    after = pool.backend.raw.clone()
    for page in pages:
        for slot in slots:
            assert page[slot // 4, :, slot % 4].abs().sum() > 0
            page[slot // 4, :, slot % 4] = 0
    assert torch.equal(pool.backend.raw, before)
    assert not torch.equal(after, before)


def test_what_padding_holds_changes_no_live_row():
    pool, work = decoding_pool(3)
    graphs = pool.runner.graphs
    rows = np.array([pool.allocator.row_of(name) for name in work])
    logits = torch.stack(list(pool.forward(work).values())).clone()
    graphs._token_ids[3:] = 77
    # The null block is what padding's table entries would name.
    for cache in pool.backend.layers.values():
        cache.view[0] = 1e4
    firsts = pool.allocator.state.num_placed[rows] - 1
    batch = TokenBatch(rows, firsts, np.ones(3, dtype=np.int64))
    again = pool.runner.run(np.array([ids[0] for ids in work.values()]), batch, np.arange(3))
    assert graphs.num_replays == 2
    assert torch.equal(again, logits)


def test_logits_of_some_rows_are_those_of_the_sampled_ones():
    pool, work = decoding_pool(3)
    full = torch.stack(list(pool.forward(work).values())).clone()
    rows = np.array([pool.allocator.row_of(name) for name in work])
    batch = TokenBatch(rows, pool.allocator.state.num_placed[rows] - 1, np.ones(3, dtype=np.int64))
    ids = np.array([ids[0] for ids in work.values()])
    assert torch.equal(pool.runner.run(ids, batch, np.array([0, 2])), full[[0, 2]])
    assert pool.runner.run(ids, batch, np.array([], dtype=np.int64)).shape == (0, pool.runner.vocab_size)


# -- the proof has teeth: what is frozen in a capture is seen ----------------------------------------------------------


class FreezingKernels(RecordedKernels):
    """One argument of one kernel is what it was in the capture."""

    def __init__(self, kernels, kernel, argument):
        super().__init__(kernels)
        self._frozen = kernel, argument

    def __getattr__(self, name):
        call = super().__getattr__(name)
        kernel, argument = self._frozen

        def freeze(**arguments):
            if self.recording is not None:
                arguments[argument] = self.recording.frozen(arguments[argument])
            return call(**arguments)

        return freeze if name == kernel else call


@pytest.mark.parametrize(
    ("kernel", "argument"),
    [
        ("reshape_and_cache", "slot_mapping"),
        ("paged_attention", "block_table"),
        ("paged_attention", "rows"),
        ("paged_attention", "query_start_loc"),
        ("paged_attention", "seq_lens"),
    ],
)
def test_a_value_that_a_kernel_does_not_read_on_the_device_gives_other_tokens(kernel, argument):
    kernels = FreezingKernels(TorchKernels(), kernel, argument)
    service = recorded(Service, tiny_model("llama"), kernels)
    service.submit("a", prompt(9), 20)
    service.run()
    assert service.outputs("a") != reference("llama", tuple(prompt(9)), 20, None)


@pytest.mark.parametrize("frozen", ["token_ids", "positions"])
def test_a_value_that_the_model_does_not_read_on_the_device_gives_other_tokens(frozen, monkeypatch):
    from kvledger.backends.serving import ModelRunner

    kernels, decode = RecordedKernels(TorchKernels()), ModelRunner._decode

    def frozen_decode(self, **inputs):
        if kernels.recording is not None:
            inputs[frozen] = kernels.recording.frozen(inputs[frozen])
        return decode(self, **inputs)

    monkeypatch.setattr(ModelRunner, "_decode", lambda self, ids, at: frozen_decode(self, token_ids=ids, positions=at))
    service = recorded(Service, tiny_model("llama"), kernels)
    service.submit("a", prompt(9), 20)
    service.run()
    assert service.outputs("a") != reference("llama", tuple(prompt(9)), 20, None)


@pytest.mark.parametrize(
    ("waits", "what"),
    [
        (lambda positions: int(positions.max()), "waits for the device"),
        (lambda positions: positions.nonzero(), "waits for the device"),
        (lambda positions: positions[positions > 0], "waits for the device"),
        (lambda positions: torch.tensor([1, 2]), "sent to the device"),
    ],
)
def test_a_step_that_waits_for_the_device_cannot_be_captured(waits, what, monkeypatch):
    from kvledger.backends.serving import ModelRunner

    decode = ModelRunner._decode
    monkeypatch.setattr(
        ModelRunner, "_decode", lambda self, ids, positions: (waits(positions), decode(self, ids, positions))[1]
    )
    with pytest.raises(InputError, match=rf"decode step of 6 requests cannot be captured .*{what}.* set enforce_eager"):
        recorded(Pool, tiny_model("llama"))


@pytest.mark.parametrize("family", FAMILIES)
def test_no_step_outside_a_graph_waits_for_the_device_either(family):
    kernels = RecordedKernels(TorchKernels())
    pool = Pool(tiny_model(family), kernels=kernels)
    recording = kernels.recording = Recording(sends_values=True)
    with recording:
        pool.forward({"a": prompt(9), "b": prompt(4)})
        pool.forward({"a": [0], "b": prompt(3), "c": prompt(5)})
    assert len(recording.operations) > 100


def test_a_model_that_decides_by_values_is_refused_and_runs_eagerly_on():
    scaling = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}
    model = tiny_model("llama", **scaling)
    kernels = RecordedKernels(TorchKernels())
    pool = Pool(model, kernels=kernels)
    with pytest.raises(InputError, match="set enforce_eager"):
        pool.runner.capture(SIZES, RecordedGraphs(kernels))
    assert pool.runner.graphs is None
    ids = prompt(9)
    assert int(pool.forward({"a": ids})["a"].argmax()) == alone(tiny_model("llama", **scaling), ids, 1)[0]


# -- the kernels of a GPU ---------------------------------------------------------------------------------------------


def test_triton_s_launches_are_the_same_for_every_batch_of_a_size(monkeypatch):
    """Each launch with its grid and its numbers is frozen, and no Python around it waits for the device."""
    if device().type == "cuda":
        pytest.skip("a GPU captures them itself, in the tests above")

    class Launches:
        recording = None

    launches, launch = Launches(), Launch.__call__

    def recorded_launch(self, grid, pointers, *numbers):
        if launches.recording is None:
            return launch(self, grid, pointers, *numbers)
        return launches.recording.kernel(launch, self, grid, pointers, *numbers)

    monkeypatch.setattr(Launch, "__call__", recorded_launch)
    pool = Pool(tiny_model("gemma2-windowed"), kernels=kernel_set("triton"))
    pool.runner.capture([2], RecordedGraphs(launches))
    eager = Pool(tiny_model("gemma2-windowed"), kernels=kernel_set("torch"))
    work = {"a": prompt(11, seed=50), "b": prompt(3, seed=51)}
    for _ in range(6):
        logits, expected = pool.forward(work), eager.forward(work)
        for name, row in logits.items():
            torch.testing.assert_close(row, expected[name], atol=1e-4, rtol=1e-4)
        work = {name: [int(row.argmax())] for name, row in expected.items()}
    assert pool.runner.graphs.num_replays == 5


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_the_ladder_is_vllm_s_up_to_the_requests_of_a_step():
    assert decode_capture_sizes(1) == (1,)
    assert decode_capture_sizes(5) == (1, 2, 4, 5)
    assert decode_capture_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert decode_capture_sizes(256) == (1, 2, 4, *range(8, 257, 8))
    assert decode_capture_sizes(1000)[-3:] == (480, 496, 512)


@pytest.mark.parametrize("sizes", [[], [0, 1], [1, 9], [-1]])
def test_a_size_that_no_decode_step_has_is_refused(sizes):
    with pytest.raises(InputError, match="numbers of requests from 1 to max_num_seqs 8"):
        recorded(Pool, tiny_model("llama"), sizes=sizes)
