"""The heart of the project: for any history, simulated and real memory are the same, slot for slot and byte for byte.

SimBackend, CudaBackend and the kit's oracle compute every slot on their own; what is compared is read back from the
device. The plain-torch twins cover every layout in every example, and beside them a drawn one with 8-bit elements.
Triton's interpreter runs the real kernels, at about a millisecond a token and layer, so it takes one layout an example,
and fewer and shorter examples.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest

torch = pytest.importorskip("torch", reason="real memory needs torch")

from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from kvledger.backends.context_rank import ContextRank  # noqa: E402
from kvledger.backends.cuda.backend import CudaBackend  # noqa: E402
from kvledger.backends.cuda.layout import CacheArrangement  # noqa: E402
from kvledger.core.planner.layout import KVCacheLayout  # noqa: E402
from kvledger.testing import KitFailure, LedgerAdapter, Scenario, ledger_supports  # noqa: E402
from kvledger.testing.choices import Chooser, choose_scenario, pick  # noqa: E402
from kvledger.testing.strategies import Drawn  # noqa: E402

from tests.kernels.kernel_sets import kernel_set  # noqa: E402
from tests.properties.same_slots import FP8_VARIANTS, VARIANTS, MakeBackend, SameSlots, Variant  # noqa: E402
from tests.properties.slot_histories import MakeWitness, play_commands, play_engine, shortened  # noqa: E402

pytestmark = pytest.mark.torch

COMMAND_EXAMPLES = 140
ENGINE_EXAMPLES = 60
CONTEXT_EXAMPLES = 60
INTERPRETER_EXAMPLES = {"bf16": 8, "fp8_e4m3": 3, "fp8_e5m2": 3}

Scale = Callable[[int], int]


def example_settings(max_examples: int) -> settings:
    """Failing histories are shortened command by command, which takes seconds where shrinking choices takes minutes.

    Where a test counts what its histories hold, a seed fixes them: else each edit of the test would draw others.
    """
    return settings(
        max_examples=max_examples,
        phases=(Phase.explicit, Phase.generate),
        derandomize=True,
        database=None,
        deadline=None,
        print_blob=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


def witnesses(
    variants: Sequence[Variant] = VARIANTS,
    make_backend: MakeBackend = CudaBackend,
    context: ContextRank | None = None,
    device: str = "cpu",
) -> MakeWitness:
    """Makes the witness of a history."""

    def make(scenario: Scenario, ledger: LedgerAdapter) -> SameSlots:
        return SameSlots(scenario.groups, ledger.log.created, variants, make_backend, context, device)

    return make


def play_and_shorten(chooser: Chooser, scenario: Scenario, make_witness: MakeWitness, num_rules: int) -> SameSlots:
    try:
        return play_commands(chooser, scenario, make_witness, num_rules)
    except KitFailure as failure:
        raise shortened(failure, make_witness, budget_s=10) from None


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    """More threads only wait for each other on tensors of this size."""
    torch.set_num_threads(1)


def test_after_any_history_of_commands(kit_histories: Scale) -> None:
    seen: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    in_8_bits: set[str] = set()

    @seed(0)
    @example_settings(kit_histories(COMMAND_EXAMPLES))
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        chooser = Drawn(data.draw)
        scenario, fp8 = choose_scenario(chooser, ledger_supports()), pick(chooser, FP8_VARIANTS)
        witness = play_and_shorten(chooser, scenario, witnesses((*VARIANTS, fp8)), chooser.integer(5, 35))
        seen.update([*witness.seen, *{f"group of {group.kind}" for group in scenario.groups}])
        in_8_bits.add(str(fp8))
        seen["several groups"] += len(scenario.groups) > 1
        totals.update(written=witness.num_tokens, read=witness.num_read)

    check()
    for what in (
        *("shared prefix", "fork", "copy on write", "preemption", "truncation", "eviction", "out of window"),
        *("group of sliding", "group of chunked", "several groups"),
    ):
        assert seen[what] >= COMMAND_EXAMPLES // 35, f"only {seen[what]} examples with {what}: {seen}"
    assert len(in_8_bits) >= len(FP8_VARIANTS) // 2, in_8_bits
    assert totals["written"] > 20 * COMMAND_EXAMPLES
    assert totals["read"] > 20 * COMMAND_EXAMPLES


def test_after_any_steps_of_an_engine(kit_histories: Scale) -> None:
    """Many commands a step: chunked prefills, admissions and preemptions beside each other, rejected drafts."""
    seen: Counter[str] = Counter()

    @seed(4)
    @example_settings(kit_histories(ENGINE_EXAMPLES))
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        chooser = Drawn(data.draw)
        scenario, fp8 = choose_scenario(chooser, ledger_supports()), pick(chooser, FP8_VARIANTS)
        witness = play_engine(chooser, scenario, witnesses((*VARIANTS, fp8)), chooser.integer(5, 30))
        seen.update(witness.seen.keys())

    check()
    for what in ("shared prefix", "preemption", "eviction", "out of window"):
        assert seen[what], f"no example with {what}: {seen}"


@pytest.mark.parametrize("ranks", [2, 4])
def test_on_each_rank_of_decode_context_parallelism(ranks: int, kit_histories: Scale) -> None:
    """Blocks of 8, 16 and 32 tokens divide into the ranks' stripes; a rank stores its own tokens and no others."""
    supports = ledger_supports(kinds=("full", "sliding", "chunked"), block_sizes=(8, 16, 32))
    variants = (Variant(KVCacheLayout.BHLNC), Variant(KVCacheLayout.LBNHC, CacheArrangement.FLASH_NHD))
    seen: Counter[str] = Counter()

    @example_settings(kit_histories(CONTEXT_EXAMPLES))
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        chooser = Drawn(data.draw)
        scenario = choose_scenario(chooser, supports)
        context = ContextRank(chooser.integer(0, ranks - 1), ranks, chooser.integer(1, 2))
        make_witness = witnesses(variants, context=context)
        seen.update(play_and_shorten(chooser, scenario, make_witness, chooser.integer(5, 30)).seen.keys())

    check()
    assert seen["fork"] and seen["copy on write"] and seen["preemption"], seen


@pytest.mark.parametrize("dtype", INTERPRETER_EXAMPLES)
def test_with_the_triton_kernels_one_layout_an_example(dtype: str, kit_histories: Scale) -> None:
    """Compiled on a GPU machine, interpreted elsewhere, where a token of a layer takes about a millisecond."""
    kernels = kernel_set("triton")
    supports = ledger_supports(block_sizes=(4, 5, 8), max_groups=2)
    variants = [variant for variant in (*VARIANTS, *FP8_VARIANTS) if variant.dtype == dtype]
    used: set[str] = set()

    def make_backend(**settings: Any) -> CudaBackend:
        return CudaBackend(**settings, kernels=kernels)

    @example_settings(kit_histories(INTERPRETER_EXAMPLES[dtype]))
    @given(data=st.data(), variant=st.sampled_from(variants))
    def check(data: st.DataObject, variant: Variant) -> None:
        chooser = Drawn(data.draw)
        scenario = attrs.evolve(choose_scenario(chooser, supports), max_model_len=40)
        used.add(str(variant))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        play_commands(chooser, scenario, witnesses((variant,), make_backend, device=device), 8)

    check()
    assert len(used) >= INTERPRETER_EXAMPLES[dtype] // 2, used
