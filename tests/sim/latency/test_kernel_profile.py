"""Kernels that were profiled layer by layer: the grid between their points, and the folders they come from."""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import pytest
from kvledger.core.errors import InputError
from kvledger.sim.latency.kernel_profile import Grid, KernelProfile

NUM_LAYERS = 2
DENSE = "layer,tokens,time_us\nqkv_proj,1,10\nqkv_proj,101,110\nlayernorm,1,1\nembedding,1,4\nmoe,1,7\n"
PER_SEQUENCE = "layer,sequences,time_us\nlm_head,1,100\nlm_head,11,200\nsampler,1,5\n"


def attention_us(chunk: float, before: float, decodes: float, cached: float) -> float:
    """One layer: a launch, the chunk's own tokens and those before it, and those of the decodes."""
    return 2 + chunk + 0.01 * before * (chunk > 0) + 0.1 * decodes * cached


def attention_rows() -> str:
    rows = ["prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"]
    for chunk, before, decodes, cached in product((0, 16, 64), (0, 256), (0, 1, 9), (0, 128, 1024)):
        if (chunk or decodes) and (not before or chunk) and (bool(decodes) == bool(cached)):
            rows.append(f"{chunk},{before},{decodes},{cached},{attention_us(chunk, before, decodes, cached)}")
    return "\n".join(rows) + "\n"


def write_profile(folder: Path, **changed: str) -> str:
    folder.mkdir(exist_ok=True)
    files = {"dense": DENSE, "per_sequence": PER_SEQUENCE, "attention": attention_rows(), **changed}
    for name, text in files.items():
        (folder / f"{name}.csv").write_text(text)
    return str(folder)


@pytest.fixture
def profile(tmp_path: Path) -> KernelProfile:
    return KernelProfile.read(write_profile(tmp_path / "server"), NUM_LAYERS)


def test_a_grid_is_linear_along_every_axis_on_the_last_slope_above_and_never_below_its_start() -> None:
    grid = Grid.of({point: point[0] + 10 * point[1] for point in product((1, 3), (0, 4))})
    assert grid.at(2, 1) == pytest.approx(12)
    assert grid.at(5, 8) == pytest.approx(85)
    assert grid.at(0, -1) == pytest.approx(1)


def test_an_incomplete_grid_loses_the_values_with_the_fewest_points() -> None:
    points = {point: 1.0 for point in product((1, 2, 3), (1, 2, 3)) if point not in ((3, 2), (3, 3))}
    assert Grid.of(points).axes == ((1, 2), (1, 2, 3))


def test_kernels_of_a_layer_count_for_all_layers_norms_twice_and_those_of_a_step_once(profile: KernelProfile) -> None:
    by_tokens = {name: curve.at(1) * 1e6 for name, curve in profile.by_tokens.items()}
    assert by_tokens == pytest.approx({"gemm": 10 * 2, "elementwise": 1 * 2 * 2 + 4, "experts": 7 * 2})
    assert profile.by_tokens["gemm"].at(51) * 1e6 == pytest.approx(60 * 2)
    assert profile.by_sampled.at(6) * 1e6 == pytest.approx(150 + 5)
    assert profile.source == "profiled (server)"


def seconds_us(
    profile: KernelProfile, chunks: Sequence[tuple[int, int]], sequences: float, context: float
) -> Sequence[float]:
    return [seconds * 1e6 / NUM_LAYERS for seconds in profile.seconds(chunks, sequences, context)]


def test_decodes_alone_are_timed_as_profiled(profile: KernelProfile) -> None:
    assert seconds_us(profile, [], 5, 576) == pytest.approx([attention_us(0, 0, 5, 576), 0])
    assert seconds_us(profile, [], 0, 0) == [0, 0]


def test_a_chunk_beside_decodes_adds_what_both_take_beyond_the_decodes(profile: KernelProfile) -> None:
    decode_us, prefill_us = seconds_us(profile, [(32, 128)], 5, 576)
    assert decode_us == pytest.approx(attention_us(0, 0, 5, 576))
    assert decode_us + prefill_us == pytest.approx(attention_us(32, 128, 5, 576))


def test_further_chunks_add_their_own_time_without_another_launch(profile: KernelProfile) -> None:
    one, two = (seconds_us(profile, [(64, 0), (32, 0)][:count], 0, 0)[1] for count in (1, 2))
    assert one == pytest.approx(attention_us(64, 0, 0, 0))
    assert two == pytest.approx(one + attention_us(32, 0, 0, 0) - attention_us(16, 0, 0, 0))


DENSE_HEAD, SAMPLED_HEAD = "layer,tokens,time_us\n", "layer,sequences,time_us\n"
ATTENTION_HEAD = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n"
BAD: Mapping[str, tuple[dict[str, str], str]] = {
    "a word for a time": (
        {"dense": DENSE_HEAD + "moe,1,fast\n"},
        r"dense.csv:2: time_us is 'fast'; it must be a number",
    ),
    "a missing column": ({"per_sequence": "layer,sequences\nhead,1\n"}, r"sequence.csv:1: the header lacks time_us"),
    "a negative time": ({"dense": DENSE_HEAD + "moe,1,2\nmoe,2,-3\n"}, r"dense.csv:3: time_us is '-3'"),
    "a time without a value": ({"per_sequence": SAMPLED_HEAD + "head,1,nan\n"}, r"sequence.csv:2: time_us is 'nan'"),
    "a short row": ({"dense": DENSE_HEAD + "moe,1\n"}, r"dense.csv:2: time_us is None"),
    "an empty file": ({"dense": DENSE_HEAD}, r"dense.csv: no rows"),
    "only decodes": ({"attention": ATTENTION_HEAD + "0,0,1,16,9\n"}, r"attention.csv: it needs decodes, prompts, and"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_profile_is_refused_with_file_and_line(name: str, tmp_path: Path) -> None:
    changed, said = BAD[name]
    with pytest.raises(InputError, match=said):
        KernelProfile.read(write_profile(tmp_path / "server", **changed), NUM_LAYERS)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere.*No such file"):
        KernelProfile.read(str(tmp_path / "nowhere"), NUM_LAYERS)
