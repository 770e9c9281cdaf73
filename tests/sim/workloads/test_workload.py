"""Built-in workloads: the same bytes for the same seed, and the shape of what they resemble."""

import hashlib
import os
import subprocess
import sys
from statistics import fmean, median

import attrs
import pytest
from kvledger.core.errors import InputError
from kvledger.sim.cache.lru_curve import lru_curve
from kvledger.sim.cache.prompt_blocks import read_prompt_blocks
from kvledger.sim.random_draws import Draws
from kvledger.sim.traces import Trace
from kvledger.sim.workloads.builtin import open_workload, workloads

NAMES = ("conversation", "sharegpt", "code", "agentic", "multi-turn")
# SHA-256 of the first 500 requests at seed 0. They change only when a workload is changed on purpose.
REFERENCE_DIGESTS = {
    "conversation": "83fffe0e586b96233f5b1dcae61329c213db907f45c02523c6d30343e99a952f",
    "sharegpt": "251cab1ade62ec6d1ac39805cb4b2e74bb4fe9e3b5259b85d8ad2fd3803f79d3",
    "code": "aa26446f41258f6bdbc842ffd81d1139362b67a88d98ed914dcaf3bfd552b22e",
    "agentic": "99c2e15376001b622fdcd00b38e26fbb26e5c157cc0392c8e03e9b13c87936e1",
    "multi-turn": "f5f5eb28ae5b10c03b2bad467cc62f32f8c8b6572fb68a2d6a74bdf2cfff4692",
}
# The public conversation trace, by LRU share of blocks.
CONVERSATION_CURVE = {1_000: 0.0445, 5_000: 0.1118, 10_000: 0.2116, 30_000: 0.3257, 50_000: 0.3546, None: 0.3664}


def digest(name: str, seed: int = 0) -> str:
    return hashlib.sha256(repr(list(open_workload(name, seed=seed, limit=500))).encode()).hexdigest()


@pytest.fixture(scope="module", params=[0, 1, 2], ids=lambda seed: f"seed{seed}")
def conversation(request):
    workload = open_workload("conversation", seed=request.param)
    return workload, list(workload)


def test_the_built_in_workloads_are_these():
    assert workloads.names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_one_seed_gives_the_published_requests(name):
    assert digest(name) == REFERENCE_DIGESTS[name]


@pytest.mark.parametrize("name", NAMES)
def test_another_seed_gives_other_requests(name):
    assert digest(name, seed=1) != digest(name, seed=0)


@pytest.mark.parametrize("hash_seed", ["0", "12345"])
def test_another_process_gives_the_same_requests_whatever_its_hash_seed(hash_seed):
    program = (
        "import hashlib; from kvledger.sim.workloads.builtin import open_workload; "
        "print(hashlib.sha256(repr(list(open_workload('agentic', seed=7, limit=500))).encode()).hexdigest())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == digest("agentic", seed=7)


@pytest.mark.parametrize("name", NAMES)
def test_a_workload_is_a_trace_that_can_be_read_again(name):
    workload = open_workload(name, limit=50)
    assert isinstance(workload, Trace)
    assert list(workload) == list(workload)
    assert workload.info.num_requests == 50


@pytest.mark.parametrize("name", NAMES)
def test_requests_are_in_order_with_as_many_ids_as_blocks(name):
    workload = open_workload(name, limit=2_000)
    block_size = workload.info.trace_block_size
    parents: dict[int, int] = {}
    latest = 0.0
    for request in workload:
        assert request.arrival_s >= latest
        latest = request.arrival_s
        assert request.input_length >= 1
        assert request.output_length >= 1
        if block_size is None:
            assert request.hash_ids is None
        else:
            assert request.hash_ids is not None
            assert len(request.hash_ids) == -(-request.input_length // block_size)
            for parent, hash_id in zip((-1, *request.hash_ids), request.hash_ids, strict=False):
                assert parents.setdefault(hash_id, parent) == parent, "one id, one parent"


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_and_every_parameter_are_stated(name):
    info = open_workload(name, seed=3).info
    assert info.workload is not None
    assert info.workload["seed"] == 3
    assert info.workload["parameters"] == attrs.asdict(workloads.get(name)().parameters)


def test_the_window_is_cut_and_rebased():
    everything = list(open_workload("code", limit=30))
    cut = list(open_workload("code", skip_first=10, limit=20, rate_scale=2.0))
    assert [each.input_length for each in cut] == [each.input_length for each in everything[10:]]
    assert cut[0].arrival_s == 0.0
    assert cut[-1].arrival_s == pytest.approx((everything[-1].arrival_s - everything[10].arrival_s) / 2)


def test_a_duration_ends_the_stream():
    requests = list(open_workload("sharegpt", duration_s=60.0))
    assert 80 <= len(requests) <= 170, "120 on average"
    assert requests[-1].arrival_s < 60.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "chat"}, "unknown workload 'chat'; known: conversation, sharegpt, code, agentic, multi-turn"),
        ({"name": "code", "limit": 0}, "--limit is 0"),
        ({"name": "code", "duration_s": 0.0}, "duration is 0.0 s; it must be above 0"),
    ],
)
def test_an_option_out_of_range_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        open_workload(**options)


def test_a_window_past_the_end_is_an_error():
    with pytest.raises(InputError, match="--skip-first 1,000 leaves nothing: workload sharegpt holds"):
        list(open_workload("sharegpt", duration_s=10.0, skip_first=1_000))


@pytest.mark.parametrize("num_blocks", CONVERSATION_CURVE, ids=lambda n: str(n or "infinite"))
def test_conversation_reuses_blocks_as_the_public_trace_does(conversation, num_blocks):
    prompts = read_prompt_blocks(conversation[0])
    curve = lru_curve(prompts)
    point = curve.infinite if num_blocks is None else curve.at(num_blocks)
    assert point.hit_blocks / prompts.num_block_events == pytest.approx(CONVERSATION_CURVE[num_blocks], abs=0.025)


def test_conversation_has_the_public_trace_s_lengths(conversation):
    _, requests = conversation
    inputs = sorted(request.input_length for request in requests)
    outputs = sorted(request.output_length for request in requests)
    assert fmean(inputs) == pytest.approx(12_035, rel=0.04)
    assert fmean(outputs) == pytest.approx(342.6, rel=0.02)
    assert median(inputs) == pytest.approx(6_909, rel=0.06)
    assert median(outputs) == pytest.approx(350, rel=0.03)
    n = len(inputs)
    assert inputs[n // 10] == pytest.approx(964, rel=0.06)
    assert inputs[n * 9 // 10] == pytest.approx(27_367, rel=0.1)
    assert outputs[n * 9 // 10] == pytest.approx(597, rel=0.04)


def test_conversation_arrives_in_bursts_every_three_seconds_for_an_hour(conversation):
    workload, requests = conversation
    assert len(requests) / 3_537 == pytest.approx(3.4, abs=0.1)
    assert len({request.arrival_s for request in requests}) == pytest.approx(1_180, abs=2)
    assert workload.info.window.duration_s == pytest.approx(3_537, abs=6)


@pytest.mark.parametrize(("name", "mean_input", "mean_output"), [("sharegpt", 161.31, 337.99), ("code", 2_047.8, 27.9)])
def test_single_request_workloads_have_the_published_mean_lengths(name, mean_input, mean_output):
    workload = open_workload(name, limit=20_000)
    requests = list(workload)
    assert fmean(request.input_length for request in requests) == pytest.approx(mean_input, rel=0.02)
    assert fmean(request.output_length for request in requests) == pytest.approx(mean_output, rel=0.03)
    assert not workload.info.claims_reuse
    assert "no reuse can be claimed" in workload.info.notes()[0]


def test_sharegpt_stays_within_its_limits():
    requests = list(open_workload("sharegpt", limit=20_000))
    assert max(request.input_length for request in requests) == 1_024
    assert max(request.input_length + request.output_length for request in requests) <= 2_048


def test_code_has_the_public_trace_s_shape():
    inputs = sorted(request.input_length for request in open_workload("code", limit=20_000))
    assert inputs[-1] == 7_437, "prompts are cut at the longest"
    assert inputs[len(inputs) // 2] == pytest.approx(1_469, rel=0.05)
    assert inputs[len(inputs) * 8 // 10] == pytest.approx(3_192, rel=0.12)


def test_agentic_resends_what_came_before():
    prompts = read_prompt_blocks(open_workload("agentic", limit=1_500))
    share = lru_curve(prompts).infinite.hit_blocks / prompts.num_block_events
    assert share == pytest.approx(0.95, abs=0.04), "24 public sessions: 95 % of blocks were asked for before"
    assert prompts.input_tokens / prompts.num_requests == pytest.approx(85_700, rel=0.25)


def test_draws_follow_the_distributions_that_they_are_named_after():
    draws = Draws(5)
    n = 20_000
    assert median(draws.lognormal(50.0, 1.5) for _ in range(n)) == pytest.approx(50.0, rel=0.05)
    assert fmean(draws.exponential(7.0) for _ in range(n)) == pytest.approx(7.0, rel=0.03)
    for shape in (0.5, 1.32, 9.0):
        values = [draws.gamma(shape, 10.0) for _ in range(n)]
        assert fmean(values) == pytest.approx(10.0, rel=0.04)
        assert fmean((value - 10.0) ** 2 for value in values) == pytest.approx(100.0 / shape, rel=0.1)
    assert fmean(draws.beta(1.65, 3.4) for _ in range(n)) == pytest.approx(1.65 / 5.05, rel=0.03)
    assert fmean(draws.happens(0.3) for _ in range(n)) == pytest.approx(0.3, rel=0.05)
