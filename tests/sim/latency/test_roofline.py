import functools
import pickle

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvledger.core.errors import InputError
from kvledger.core.models.geometry import builtin_geometry
from kvledger.core.types import StepLoad
from kvledger.sim.latency.devices import DeviceFactors, device_factors, devices, find_device
from kvledger.sim.latency.roofline import RooflineLatency
from kvledger.sim.latency.step_work import expert_visit_probabilities, step_work

H100 = find_device("H100")


def _model(name: str = "llama-2-7b", device: str = "H100", **options) -> RooflineLatency:
    return RooflineLatency.for_model(
        builtin_geometry(name), find_device(device), **{"max_num_seqs": 128, "factors": _bare(), **options}
    )


def _bare(**costs: float) -> DeviceFactors:
    """Every efficiency 1 and every fixed cost 0, but for those given."""
    free = {
        field.name: 1.0 if field.name.endswith("_efficiency") else 0.0
        for field in attrs.fields(DeviceFactors)
        if field.name != "source"
    }
    return DeviceFactors(**{**free, **costs}, source="test")


def _decode(num_seqs: int, context: int) -> StepLoad:
    return StepLoad(0, num_seqs, 0, num_seqs * context, num_seqs)


def _prefill(num_tokens: int) -> StepLoad:
    return StepLoad(num_tokens, 0, num_tokens * (num_tokens + 1) // 2, 0, 1)


# -- one GPU, by hand --------------------------------------------------------------------------------------------------


def test_a_small_decode_step_reads_every_weight_and_the_context_once():
    parameters_read = 6_738_415_616 - 32_000 * 4096 - 4096  # neither the embedding nor the final norm
    kv_bytes = 16 * 1_000 * 2 * 32 * 32 * 128 * 2
    expected = (2 * parameters_read + kv_bytes) / 3.35e12
    assert _model().step_seconds(_decode(16, 1_000)) == pytest.approx(expected, rel=1e-9)


def test_a_large_prompt_takes_its_arithmetic_and_attention_grows_with_the_square():
    layers = 32 * (4 * 4096**2 + 3 * 4096 * 11_008)
    attention = 4 * 32 * 4096 * 8_192 * 8_193 / 2
    # The head computes one token: it is bound by its weights.
    expected = (2 * layers * 8_192 + attention) / 989e12 + 2 * 32_000 * 4096 / 3.35e12
    assert _model().step_seconds(_prefill(8_192)) == pytest.approx(expected, rel=1e-9)


def test_a_step_that_samples_nothing_does_not_read_the_output_matrix():
    chunk = StepLoad(4_096, 0, 4_096 * 2_048, 0, 0)
    last = chunk._replace(num_sampled=1)
    difference = _model().step_seconds(last) - _model().step_seconds(chunk)
    assert difference == pytest.approx(2 * 32_000 * 4096 / 3.35e12)


def test_the_few_new_tokens_of_a_long_cached_prompt_still_read_its_cache():
    context = 100_000
    tail = StepLoad(3, 0, 3 * context, 0, 1)
    short = StepLoad(3, 0, 3 * 3, 0, 1)
    read_s = (context - 3) * 2 * 32 * 32 * 128 * 2 / 3.35e12
    assert _model().step_seconds(tail) - _model().step_seconds(short) == pytest.approx(read_s, rel=1e-6)


def test_drafts_share_one_reading_of_their_sequence_s_cache():
    alone, with_drafts = _decode(8, 10_000), StepLoad(0, 32, 0, 32 * 10_000, 8)
    assert _model().step_seconds(with_drafts) == pytest.approx(_model().step_seconds(alone), rel=1e-3)
    assert _model().step_seconds(_decode(32, 10_000)) > 2 * _model().step_seconds(alone)


# -- fixed costs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("costs", "expected_s"),
    [
        ({"step_s": 1e-3}, 1e-3),
        ({"layer_s": 1e-5}, 32 * 1e-5),
        ({"sampler_s_per_logit": 1e-9}, 4 * 32_000 * 1e-9),
        ({"all_reduce_s": 1e-5, "expert_layer_s": 1e-5}, 0.0),
        ({"uncaptured_layer_s": 1e-3}, 0.0),
    ],
)
def test_a_fixed_cost_adds_what_it_says(costs: dict[str, float], expected_s: float):
    load = _decode(4, 100)
    added = _model(factors=_bare(**costs)).step_seconds(load) - _model().step_seconds(load)
    assert added == pytest.approx(expected_s, abs=1e-12)


def test_small_products_pay_for_the_tokens_that_would_fill_the_gpu():
    saturating = _model(factors=_bare(saturation_tokens=64))
    assert saturating.step_seconds(StepLoad(4_096, 0, 0, 0, 0)) == pytest.approx(
        _model().step_seconds(StepLoad(4_096 + 64, 0, 0, 0, 0))
    )


def test_a_step_beyond_the_captured_batches_takes_the_launches_of_all_layers_at_least():
    factors = _bare(uncaptured_layer_s=1e-3)
    assert _model(factors=factors).step_seconds(_prefill(257)) == pytest.approx(32e-3)
    assert _model(factors=factors).step_seconds(_prefill(256)) < 10e-3
    assert _model(factors=factors, enforce_eager=True).step_seconds(_decode(1, 10)) == pytest.approx(32e-3)
    assert _model(factors=factors, max_num_seqs=256).step_seconds(_prefill(257)) < 10e-3


# -- dtypes ------------------------------------------------------------------------------------------------------------


def test_fp8_weights_are_read_and_computed_in_half_the_time():
    assert step_work(
        builtin_geometry("llama-2-7b"), tensor_parallel_size=1, weights_dtype="fp8", kv_cache_dtype="auto"
    ).matrix_bytes == pytest.approx(_model().work.matrix_bytes / 2, rel=1e-3)  # norms keep 16 bits
    chunk = StepLoad(8_192, 0, 0, 0, 0)
    ratio = _model().step_seconds(chunk) / _model(weights_dtype="fp8").step_seconds(chunk)
    assert ratio == pytest.approx(1_979 / 989, rel=1e-6)


def test_fp8_weights_compute_in_16_bits_where_the_gpu_has_no_fp8_units():
    chunk = StepLoad(8_192, 0, 0, 0, 0)
    assert _model(device="A100-80GB", weights_dtype="fp8").step_seconds(chunk) == pytest.approx(
        _model(device="A100-80GB").step_seconds(chunk)
    )


def test_four_bit_weights_are_read_faster_and_computed_no_faster():
    chunk, decode = StepLoad(8_192, 0, 0, 0, 0), _decode(1, 10)
    assert _model(weights_dtype="int4").step_seconds(decode) < _model().step_seconds(decode) / 3
    assert _model(weights_dtype="int4").step_seconds(chunk) == pytest.approx(_model().step_seconds(chunk))


def test_an_fp8_cache_halves_what_decoding_reads():
    def context_s(**options: str) -> float:
        model = _model(**options)
        return model.step_seconds(_decode(8, 2_000)) - model.step_seconds(_decode(8, 1_000))

    assert context_s(kv_cache_dtype="fp8") == pytest.approx(context_s() / 2)


def test_a_quantised_checkpoint_is_read_as_its_config_says():
    assert (
        _model("gpt-oss-20b").work.experts.bytes_per_expert
        < _model("gpt-oss-20b", weights_dtype="bf16").work.experts.bytes_per_expert / 3
    )


# -- several GPUs ------------------------------------------------------------------------------------------------------


def test_tensor_parallelism_divides_weights_and_cache_and_adds_two_all_reduces_a_layer():
    load = _decode(16, 1_000)
    one, two = _model(), _model(tensor_parallel_size=2, factors=_bare(all_reduce_s=1e-5))
    norms = 32 * 2 * 4096 * 2 / 3.35e12  # held whole by every rank
    sent = 64 * 16 * 4096 * 2 / 450e9
    assert two.step_seconds(load) == pytest.approx(one.step_seconds(load) / 2 + norms / 2 + 64 * 1e-5 + sent, rel=1e-9)


def test_latents_are_read_whole_by_every_rank():
    kv = [_model("deepseek-v3", tensor_parallel_size=ranks).work.attention[0].kv_bytes_per_token for ranks in (1, 8)]
    assert kv[0] == kv[1]


def test_more_ranks_than_kv_heads_read_replicated_heads():
    kv = [_model("llama-3.1-70b", tensor_parallel_size=r).work.attention[0].kv_bytes_per_token for r in (1, 8, 16)]
    assert kv == [kv[0], kv[0] / 8, kv[0] / 8]


def test_pipeline_stages_share_arithmetic_but_a_round_still_reads_every_weight():
    decode, prompt = _decode(16, 1_000), _prefill(8_192)
    one, four = _model(), _model(pipeline_parallel_size=4)
    hops = 3 * 4 * 4096 * 2 / 450e9
    weights = (one.work.matrix_bytes + one.work.head_bytes) / 3.35e12
    read = one.step_seconds(decode) - weights
    assert four.step_seconds(decode) == pytest.approx(weights + read / 4 + hops)
    assert four.step_seconds(prompt) < one.step_seconds(prompt) / 3.8


def test_the_longest_pipeline_stage_sets_the_pace():
    geometry = builtin_geometry("gemma-2-9b")  # 42 layers: 10, 11, 11, 10
    model = RooflineLatency.for_model(geometry, H100, max_num_seqs=8, pipeline_parallel_size=4, factors=_bare())
    assert model.longest_stage_share == pytest.approx(4 * 11 / 42)


# -- kinds of models ---------------------------------------------------------------------------------------------------


def test_a_window_bounds_what_decoding_reads():
    windowed, full = _model("mistral-7b-v0.1"), _model("mistral-7b-v0.3")
    assert windowed.step_seconds(_decode(8, 4_096)) == windowed.step_seconds(_decode(8, 30_000))
    assert full.step_seconds(_decode(8, 4_096)) < full.step_seconds(_decode(8, 30_000))


def test_states_cost_a_sequence_the_same_at_every_length():
    model = _model("qwen3.5-9b")
    without = attrs.evolve(model, work=attrs.evolve(model.work, state_bytes_per_sequence=0.0))
    costs = [model.step_seconds(_decode(8, n)) - without.step_seconds(_decode(8, n)) for n in (100, 10_000)]
    assert costs[0] == pytest.approx(8 * model.work.state_bytes_per_sequence / 3.35e12)
    assert costs[1] == pytest.approx(costs[0])


def test_more_tokens_read_more_distinct_experts_until_all_are_read():
    model = _model("mixtral-8x7b")
    bytes_per_expert = model.work.experts.bytes_per_expert
    one, two, many = (
        model.step_seconds(_decode(n, 1)) - model.step_seconds(StepLoad(0, 0, 0, 0, 0)) for n in (1, 2, 100)
    )
    head_s = 2 * 32_000 * 4096 / 3.35e12
    assert one == pytest.approx(2 * bytes_per_expert / 3.35e12 + head_s, rel=1e-3)
    assert two == pytest.approx((2 + 2 * (1 - 2 / 8)) * bytes_per_expert / 3.35e12 + head_s, rel=1e-3)
    assert many == pytest.approx(8 * bytes_per_expert / 3.35e12 + head_s, rel=1e-2)


def test_prompts_longer_than_the_table_of_experts_continue_it():
    model = _model("mixtral-8x7b")
    steps = [model.step_seconds(StepLoad(n, 0, 0, 0, 0)) for n in (1_023, 1_024, 1_025, 1_026)]
    assert np.diff(steps).tolist() == pytest.approx([steps[1] - steps[0]] * 3, rel=1e-2)


@pytest.mark.parametrize("skew", [0.0, 0.8, 3.0])
def test_expected_distinct_experts_agree_with_drawing_them(skew: float):
    experts = _model("qwen3-30b-a3b").work.experts
    visited = expert_visit_probabilities(experts.num_experts, experts.experts_per_token, skew)
    assert visited.sum() == pytest.approx(8) and visited.max() <= 1
    draws = np.random.default_rng(0).random((400, 20, experts.num_experts)) < visited
    distinct = draws.any(axis=1).sum(axis=1).mean()
    assert experts.expected_distinct(np.array([20]), skew)[0] == pytest.approx(distinct, rel=0.02)


_COUNTS = st.integers(min_value=0, max_value=300)


@functools.cache
def _calibrated(name: str, tensor_parallel_size: int, pipeline_parallel_size: int) -> RooflineLatency:
    return RooflineLatency.for_model(
        builtin_geometry(name),
        H100,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        max_num_seqs=128,
    )


@given(
    prefill=_COUNTS,
    decode=_COUNTS,
    context=st.integers(min_value=1, max_value=20_000),
    more=st.integers(min_value=1, max_value=50),
    name=st.sampled_from(["llama-3.1-8b", "mixtral-8x7b", "gpt-oss-20b", "deepseek-v2-lite"]),
    ranks=st.sampled_from([(1, 1), (2, 1), (2, 2)]),
)
def test_more_work_never_takes_less_time(prefill, decode, context, more, name, ranks):
    model = _calibrated(name, *ranks)
    load = StepLoad(prefill, decode, prefill * context, decode * context, decode)
    seconds = model.step_seconds(load)
    assert seconds > 0
    for larger in (
        StepLoad(prefill + more, decode, (prefill + more) * context, decode * context, decode),
        StepLoad(prefill, decode + more, prefill * context, (decode + more) * context, decode + more),
        StepLoad(prefill, decode, prefill * (context + more), decode * (context + more), decode),
    ):
        assert model.step_seconds(larger) >= seconds * (1 - 1e-12)


# -- what is shown, and what is refused --------------------------------------------------------------------------------


def test_the_assumptions_show_every_factor_and_say_where_it_is_from():
    model = _model("mixtral-8x7b", factors=None)
    assumptions = model.assumptions()
    figures = [value for value in assumptions.values() if isinstance(value, float)]
    units = (1.0, 1e3, 1e6, 1e9)
    for field in attrs.fields(DeviceFactors):
        value = getattr(model.factors, field.name)
        if field.name == "source":
            assert assumptions["factors_source"] == value
        else:
            assert any(figure == pytest.approx(value * unit) for figure in figures for unit in units), field.name
    assert "datasheet" in assumptions["device"]
    assert "2 of 8" in assumptions["experts"]


@pytest.mark.parametrize("name", devices())
def test_every_gpu_has_factors_that_say_whether_they_were_measured_there(name: str):
    source = device_factors(find_device(name)).source
    assert source.startswith("H100: " if name == "H100" else f"carried over from the H100 to the {name}")


def test_a_gpu_behind_pcie_waits_longer_for_an_all_reduce():
    latencies = {name: device_factors(device).all_reduce_s for name, device in devices().items()}
    assert latencies["L40S"] > latencies["MI300X"] > latencies["H100"] == latencies["A100-80GB"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama-2-7b", {"max_num_seqs": 0}, "max_num_seqs is 0"),
        ("llama-2-7b", {"weights_dtype": "fp3"}, "fp3"),
        ("llama-2-7b", {"kv_cache_dtype": "fp3"}, "fp3"),
        ("llama-2-7b", {"tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
        ("llama-2-7b", {"pipeline_parallel_size": 33}, "pipeline_parallel_size is 33 for 32 layers"),
        ("qwen2.5-7b", {"tensor_parallel_size": 8}, "28 attention heads cannot be divided"),
        ("kimi-k3", {}, "parameters of Kimi K3 are not known"),
    ],
)
def test_what_cannot_be_modelled_is_refused_with_the_reason(name: str, options: dict, message: str):
    with pytest.raises(InputError, match=message):
        _model(name, **options)


@pytest.mark.parametrize(
    ("name", "value"),
    [("compute_efficiency", 0.0), ("kv_bandwidth_efficiency", 1.1), ("layer_s", -1e-6), ("step_s", float("nan"))],
)
def test_a_factor_out_of_range_is_refused_by_name(name: str, value: float):
    with pytest.raises(InputError, match=name):
        attrs.evolve(DeviceFactors(), **{name: value})


def test_a_model_travels_to_other_processes():
    model = _model("mixtral-8x7b")
    copy = pickle.loads(pickle.dumps(model))
    assert copy == model and copy.step_seconds(_decode(5, 50)) == model.step_seconds(_decode(5, 50))
