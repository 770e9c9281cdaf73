"""Steps as sums of measured kernels: what a step is made of, on several ranks too, and which model is chosen."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvledger.core.deployment.deployment import Deployment
from kvledger.core.errors import InputError
from kvledger.core.models.geometry import load_geometry
from kvledger.core.types import ScheduledStep, StepLoad, TokenBatch, scheduled_seconds
from kvledger.sim.fleet.tiers import TieredLatency
from kvledger.sim.latency.devices import find_device
from kvledger.sim.latency.kernel_factors import CalibratedLatency, KernelFactors
from kvledger.sim.latency.kernel_tables import Curve
from kvledger.sim.latency.kernels import KernelLatency
from kvledger.sim.latency.linear import LinearLatency, SwapLatency
from kvledger.sim.latency.models import LatencyInputs, make_latency
from kvledger.sim.latency.roofline import RooflineLatency

H200 = find_device("H200")
LLAMA = load_geometry("llama-3.1-8b")


class Attention:
    """A decode takes sequences x context, a chunk the square of its tokens plus those before it."""

    def seconds(self, chunks: Sequence[tuple[int, int]], num_sequences: float, context: float) -> tuple[float, float]:
        return num_sequences * context, float(sum(count * count + before for count, before in chunks))


def model(**changed: Any) -> KernelLatency:
    """Products take 1 s a token, experts 10 s a token, the head 100 s a sampled token."""
    return KernelLatency(
        **{
            "by_tokens": {"gemm": Curve((0.0, 1.0), (0.0, 1.0)), "experts": Curve((0.0, 1.0), (0.0, 10.0))},
            "by_sampled": Curve((0.0, 1.0), (0.0, 100.0)),
            "attention": Attention(),
            "factors": KernelFactors(),
            "num_layers": 2,
            "sources": {"gemm": "measured (bfloat16)", "experts": "roofline: no times", "head": "measured (bfloat16)"},
            "description": "a model",
            **changed,
        }
    )


def step_of(chunks: Sequence[tuple[int, int]], contexts: Sequence[int] = (), num_drafts: int = 0) -> ScheduledStep:
    """A step of chunks (tokens, tokens before) and of decodes behind so many tokens, each with drafts."""
    counts = np.array([count for count, _ in chunks] + [1 + num_drafts] * len(contexts), dtype=np.int64)
    firsts = np.array([before for _, before in chunks] + list(contexts), dtype=np.int64)
    prefill = sum(count for count, _ in chunks)
    load = StepLoad(
        prefill,
        int(counts.sum()) - prefill,
        sum(count * before + count * (count + 1) // 2 for count, before in chunks),
        sum((1 + num_drafts) * (context + 1) for context in contexts),
        len(contexts) + len(chunks),
    )
    drafts = np.array([0] * len(chunks) + [num_drafts] * len(contexts), dtype=np.int64) if num_drafts else None
    return ScheduledStep(TokenBatch(np.arange(len(counts)), firsts, counts), load, num_draft_tokens=drafts)


def kernels_of(latency: KernelLatency, step: ScheduledStep) -> dict[str, float]:
    return latency.scheduled_kernels(step, step.load)


def test_a_step_is_the_sum_of_its_kernels() -> None:
    step = step_of([(3, 5)], contexts=[9, 19])
    assert kernels_of(model(), step) == {
        "gemm": 5, "experts": 50, "attention_decode": 2 * 15, "attention_prefill": 9 + 5, "head": 300,
    }  # fmt: skip
    assert model().scheduled_seconds(step, 0, step.load) == 5 + 50 + 30 + 14 + 300


def test_two_prompts_in_one_step_take_less_attention_than_one_of_both_lengths() -> None:
    two, one = step_of([(50, 0), (50, 0)]), step_of([(100, 0)])
    assert two.load.num_prefill_tokens == one.load.num_prefill_tokens
    seconds = [kernels_of(model(), step)["attention_prefill"] for step in (two, one)]
    assert seconds == [2 * 50**2, 100**2]


def test_a_load_alone_is_one_chunk_behind_the_mean_of_the_tokens_before_it() -> None:
    step = step_of([(8, 32)], contexts=[10])
    assert model().step_seconds(step.load) == model().scheduled_seconds(step, 0, step.load)


def test_a_later_step_of_a_macro_step_attends_to_more_tokens() -> None:
    step = step_of([], contexts=[9, 9])
    later = step.load.one_token_later()
    assert model().scheduled_seconds(step, 1, later) - model().scheduled_seconds(step, 0, step.load) == 2


def test_data_parallel_ranks_wait_for_the_longest_chunk_and_experts_see_all_tokens() -> None:
    found = kernels_of(model(data_parallel_size=4), step_of([(60, 0), (20, 0)], contexts=[9] * 8))
    assert found["gemm"] == 60 + 8 / 4
    assert found["experts"] == 10 * 88
    assert found["attention_decode"] == 8 / 4 * 10
    even = kernels_of(model(data_parallel_size=4), step_of([(20, 0)] * 4))
    assert even["gemm"] == 20


def test_a_prompt_of_one_token_on_data_parallel_ranks_is_no_chunk_to_wait_for() -> None:
    step = step_of([(1, 0)])
    assert step.load.num_prefill_tokens == 1
    assert kernels_of(model(data_parallel_size=2), step)["gemm"] == 0.5


def test_pipeline_stages_share_a_step_at_the_pace_of_the_longest() -> None:
    step = step_of([(8, 0)], contexts=[9] * 4)
    alone, staged = kernels_of(model(), step), kernels_of(model(pipeline_parallel_size=2), step)
    for name in ("gemm", "experts", "attention_decode", "attention_prefill", "head"):
        assert staged[name] == alone[name] / 2
    uneven = kernels_of(model(pipeline_parallel_size=2, longest_stage_share=1.25), step)
    assert uneven == {name: 1.25 * seconds for name, seconds in staged.items()}


def test_sequences_that_verify_drafts_read_their_cache_once_and_are_no_chunks() -> None:
    step = step_of([], contexts=[9, 9], num_drafts=3)
    found = kernels_of(model(), step)
    assert found["gemm"] == 8
    assert found["attention_decode"] == 2 * 10
    assert found["attention_prefill"] == 0
    assert kernels_of(model(), step_of([(8, 0)], contexts=[9, 9], num_drafts=3))["attention_prefill"] == 64


def test_wrappers_pass_the_chunks_on() -> None:
    step = step_of([(50, 0), (50, 0)])
    alone = scheduled_seconds(model(), step, 0, step.load)
    swapping = SwapLatency(model(), bytes_per_block=100.0, link_bytes_per_s=50.0)
    load = step.load._replace(num_swapped_blocks=3)
    assert scheduled_seconds(swapping, step, 0, load) == alone + 6

    class Store:
        def take_pending_s(self) -> float:
            return 7.0

    assert scheduled_seconds(TieredLatency(model(), Store()), step, 0, step.load) == alone + 7  # pyright: ignore[reportArgumentType]


def test_the_share_of_measured_kernels_counts_the_factors_of_whole_steps() -> None:
    latency = model(factors=KernelFactors(gemm=2.0, step=0.5, step_s=5.0))
    step = step_of([], contexts=[0])
    seconds = latency.scheduled_seconds(step, 0, step.load)
    assert seconds == 0.5 * (2 + 10 + 1 + 100) + 5
    assert latency.assumptions()["time_in_measured_kernels"] == f"{0.5 * 102 / seconds:.1%} of all steps"
    assert "time_in_measured_kernels" not in model().assumptions()


def deployment(**changed: Any) -> Deployment:
    limits: dict[str, Any] = {"utilization": 0.9, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
    memory = {"total_bytes": H200.total_bytes, "free_bytes": H200.total_bytes}
    return Deployment(**{"geometry": LLAMA, **memory, **limits, **changed})


def inputs(**changed: Any) -> LatencyInputs:
    return LatencyInputs(**{"deployment": deployment(), "device": H200, **changed})


@pytest.mark.usefixtures("kernel_database")
def test_the_model_of_a_deployment_takes_its_kernels_from_the_database() -> None:
    latency = KernelLatency.from_inputs(inputs(deployment=deployment(tensor_parallel_size=2)))
    assert latency.sources == {
        "gemm": "measured (bfloat16)", "elementwise": "roofline: memory traffic", "collectives": "measured",
        "head": "measured (bfloat16)", "attention": "measured (cache of bfloat16)",
    }  # fmt: skip
    assert set(latency.measured) == {"gemm", "attention_decode", "attention_prefill", "collectives", "head"}
    step = step_of([(512, 0)], contexts=[100] * 8)
    # A pair that no server was fitted to has the shared factors and their source.
    assert 0.005 < latency.scheduled_seconds(step, 0, step.load) < 0.1
    assert str(latency.assumptions()["factors_source"]).endswith("none of this model on this device")


@pytest.mark.usefixtures("kernel_database")
def test_whole_experts_on_each_rank_are_asked_for() -> None:
    oss = deployment(tensor_parallel_size=2, geometry=load_geometry("gpt-oss-20b"))
    sliced, whole = (
        KernelLatency.from_inputs(inputs(deployment=oss, enable_expert_parallel=is_whole)) for is_whole in (False, True)
    )
    assert sliced.sources["experts"] == "measured (w4a16_mxfp4) on 1 x 2 ranks, scaled to 2 x 1"
    assert whole.sources["experts"] == "measured (w4a16_mxfp4)"


@pytest.mark.usefixtures("kernel_database")
def test_without_a_name_kernels_are_chosen_where_they_are_installed() -> None:
    assert isinstance(make_latency(None, inputs()), KernelLatency)
    assert isinstance(make_latency(None, inputs(device=find_device("L4"))), RooflineLatency)
    assert isinstance(make_latency("roofline", inputs()), RooflineLatency)
    assert isinstance(make_latency(None, LatencyInputs()), LinearLatency)


@pytest.mark.usefixtures("no_kernel_database")
def test_without_the_database_the_roofline_is_chosen_and_kernels_are_refused() -> None:
    assert isinstance(make_latency(None, inputs()), RooflineLatency)
    with pytest.raises(InputError, match="measured kernel times are not installed: pip install"):
        make_latency("kernels", inputs())


def test_kernels_need_a_model_and_a_device() -> None:
    with pytest.raises(InputError, match="--latency kernels needs --model and --gpu"):
        make_latency("kernels", LatencyInputs())
    with pytest.raises(InputError, match="--latency kernels needs --model and --gpu"):
        make_latency(None, LatencyInputs(kernel_profile="somewhere"))


@pytest.mark.usefixtures("kernel_database")
def test_a_calibration_replaces_the_shipped_factors(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"source": "own runs", "all": {"step_s": 9.0}, "kernels": [], "pairs": []}))
    latency = make_latency(None, inputs(calibration=str(path)))
    assert isinstance(latency, KernelLatency)
    assert latency.factors == KernelFactors(step_s=9.0, source="own runs")


def test_a_calibration_scales_the_steps_of_other_models_and_adds_to_them(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    found = {"step": 2.0, "prefill": 3.0, "step_s": 0.5, "prefill_step_s": 0.25}
    path.write_text(json.dumps({"source": "own runs", "all": found, "kernels": [], "pairs": []}))
    plain, calibrated = (make_latency("roofline", inputs(calibration=each)) for each in (None, str(path)))
    for step in (step_of([], contexts=[9]), step_of([(64, 0)]), step_of([(600, 0)])):
        seconds, is_uncaptured = plain.step_seconds(step.load), step.load.num_tokens > 512
        expected = 3 * (seconds + 0.25) + 0.5 if is_uncaptured else 2 * seconds + 0.5
        assert calibrated.step_seconds(step.load) == pytest.approx(expected)
        assert scheduled_seconds(calibrated, step, 0, step.load) == calibrated.step_seconds(step.load)
    assert calibrated.assumptions()["calibration"] == "own runs"


@pytest.mark.parametrize("name", ["kernels", "roofline"])
def test_a_calibration_that_is_missing_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere.json: No such file"):
        make_latency(name, inputs(calibration=str(tmp_path / "nowhere.json")))


def test_a_profile_has_no_effect_on_other_models() -> None:
    with pytest.raises(InputError, match=r"--kernel-profile here has no effect on --latency linear"):
        make_latency("linear", inputs(kernel_profile="here"))


@pytest.mark.parametrize("name", ["roofline", "linear"])
def test_whole_experts_on_each_rank_have_no_effect_on_other_models(name: str) -> None:
    with pytest.raises(InputError, match=rf"--enable-expert-parallel has no effect on --latency {name}"):
        make_latency(name, inputs(enable_expert_parallel=True))


@pytest.mark.usefixtures("kernel_database")
def test_a_context_on_several_ranks_is_timed_by_the_roofline_alone() -> None:
    split = inputs(deployment=deployment(tensor_parallel_size=16, decode_context_parallel_size=2))
    assert isinstance(make_latency(None, split), RooflineLatency)
    with pytest.raises(InputError, match="--decode-context-parallel-size 2: use --latency roofline"):
        make_latency("kernels", split)


@pytest.mark.parametrize("changed", [{"enable_expert_parallel": True}, {"deployment": {"pipeline_parallel_size": 2}}])
def test_a_profile_of_one_stage_is_not_taken_for_another(changed: dict[str, Any], tmp_path: Path) -> None:
    changed = {name: deployment(**each) if isinstance(each, dict) else each for name, each in changed.items()}
    with pytest.raises(InputError, match="holds the kernels of one stage"):
        make_latency("kernels", inputs(kernel_profile=str(tmp_path), **changed))


@pytest.mark.parametrize(("enforce_eager", "factor"), [(True, 3.0), (False, 2.0)])
def test_a_calibration_takes_the_captured_steps_from_the_model(enforce_eager: bool, factor: float) -> None:
    inner = RooflineLatency.for_model(LLAMA, H200, max_num_seqs=64, enforce_eager=enforce_eager)
    calibrated = CalibratedLatency.of(inner, KernelFactors(step=2.0, prefill=3.0))
    load = StepLoad(0, 8, 0, 8_000, 8)
    assert calibrated.step_seconds(load) == pytest.approx(factor * inner.step_seconds(load))
