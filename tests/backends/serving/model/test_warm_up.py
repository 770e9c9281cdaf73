"""After the warm-up no step meets a kernel that is not compiled yet: counted by what Triton compiles separately.

Which launches there are does not depend on what they compute, so here they compute nothing.
"""

import pytest

torch = pytest.importorskip("torch", reason="live serving needs torch")
pytest.importorskip("transformers", reason="real models need transformers")

from kvledger.kernels import attention_launches  # noqa: E402
from kvledger.kernels.launch import Launch  # noqa: E402

from tests.backends.serving.model_families import FAMILIES  # noqa: E402
from tests.backends.serving.real_models import Pool, prompt, tiny_model  # noqa: E402
from tests.kernels.kernel_sets import kernel_set  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def triton(monkeypatch):
    """Triton's kernels with nothing launched so far; small pools split too."""
    kernels = type(kernel_set("triton"))()
    monkeypatch.setattr(Launch, "__call__", lambda launch, grid, pointers, *numbers: None)
    monkeypatch.setattr(attention_launches, "FILLING_PROGRAMS", 24)
    monkeypatch.setattr(attention_launches, "MIN_SPLIT_KEYS", 32)
    return kernels


def variants(kernels):
    """What is compiled separately: a kernel with its constants and warps, for these dtypes."""
    return {
        (
            launch.kernel.__name__,
            tuple(launch.constants.items()),
            launch.num_warps,
            frozenset(each for each in flat(key) if isinstance(each, torch.dtype)),
        )
        for key, launch in kernels._launches._launches.items()
    }


def flat(key):
    for each in key:
        if isinstance(each, tuple):
            yield from flat(each)
        else:
            yield each


def work_of_any_kind(pool):
    """Prompts alone, in chunks, in company, behind a hit; decodes of one request and of all."""
    ids = {name: prompt(5 + 11 * place, seed=place) for place, name in enumerate("abcdef")}
    pool.forward({"a": ids["a"]})
    pool.forward({"a": [1]})
    pool.forward({"b": ids["b"][:7], "a": [2]})
    pool.forward({"b": ids["b"][7:], "c": ids["c"][:1]})
    pool.forward({"d": ids["d"]})
    pool.forward({"e": ids["e"], "c": ids["c"][1:14]})
    pool.forward({name: [3] for name in "abcde"})
    pool.fork("a", "g")
    pool.forward({name: [4] for name in "abcdeg"})
    pool.forward({"f": ids["f"], "g": [5]})


@pytest.mark.parametrize("family", FAMILIES)
def test_no_step_compiles_what_the_warm_up_has_not(triton, family):
    pool = Pool(tiny_model(family), kernels=triton)
    pool.backend.warm_up()
    pool.runner.warm_up()
    warm = variants(triton)
    assert "paged_attention_kernel" in {name for name, *_ in warm}
    work_of_any_kind(pool)
    assert variants(triton) == warm


def test_attention_without_splits_is_warm_even_if_only_a_step_of_some_requests_has_none(triton, monkeypatch):
    """64 tokens are 14 programs a key head for 7 requests of at most 8, fewer for any other number, and 42 fill."""
    monkeypatch.setattr(attention_launches, "FILLING_PROGRAMS", 42)
    pool = Pool(tiny_model("llama"), kernels=triton, max_num_batched_tokens=64, max_num_reqs=8)
    pool.backend.warm_up()
    pool.runner.warm_up()
    warm = variants(triton)
    pool.forward({str(place): prompt(9 if place < 6 else 10, seed=place) for place in range(7)})
    assert variants(triton) == warm
    splits = {dict(constants)["MIN_SPLIT_KEYS"] for name, constants, *_ in warm if name == "paged_attention_kernel"}
    assert splits == {0, 32}


def test_the_count_sees_what_the_backend_alone_leaves_cold(triton):
    pool = Pool(tiny_model("gemma2-windowed"), kernels=triton)
    pool.backend.warm_up()
    warm = variants(triton)
    work_of_any_kind(pool)
    cold = variants(triton) - warm
    attention = [dict(constants) for name, constants, *_ in cold if name == "paged_attention_kernel"]
    assert {name for name, *_ in cold} == {"paged_attention_kernel", "merge_splits_kernel"}
    assert {(each["WINDOW"], each["MIN_SPLIT_KEYS"]) for each in attention} == {(0, 0), (0, 32), (10, 0)}


def test_warming_up_changes_nothing_that_requests_see(family):
    warm, cold = Pool(tiny_model(family)), Pool(tiny_model(family))
    for pool in (warm, cold):
        pool.forward({"a": prompt(9)})
    before = warm.backend.raw.clone()
    warm.runner.warm_up()
    assert torch.equal(warm.backend.raw, before)
    assert torch.equal(warm.forward({"a": [5]})["a"], cold.forward({"a": [5]})["a"])
