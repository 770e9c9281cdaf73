"""Every kernel compiled ahead of time, for cards that are not here: widths of memory accesses, spills, local memory.

The real wrappers are called with CPU tensors under a driver without a device (`fake_driver.py`), one process a target,
so that the binary is the one that this exact call would launch.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.machine_code import parse_amdgcn, parse_sass

# Neither is imported here: Triton decides at its import whether this process interprets.
MISSING = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
pytestmark = [pytest.mark.torch, pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")]

ROOT = Path(__file__).parents[2]
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
NVIDIA = ("sm_80", "sm_90", "sm_100")
KERNELS = {
    "reshape_and_cache_kernel",
    "concat_and_cache_mla_kernel",
    "slot_mapping_kernel",
    "copy_blocks_kernel",
    "gather_cache_kernel",
    "paged_attention_kernel",
    "merge_splits_kernel",
}
# Rows of these lie so that 16 bytes can be moved at a time, and nothing else is stored or, beside scalars, loaded.
WIDE_EVERYWHERE = ("write flash 8x128", "write packed 8x128", "write MLA 512+64", "gather flash 8x128")
WIDE_QUANTISED = ("write flash 8x128 to e4m3", "write flash 8x128 to e5m2")
WIDE_ON_SM_90 = (
    "write flash, heads first 8x128",
    "write interleaved 8x128",
    "write qkv slices 8x128",
    "write flash 8x128, page 17",
    "write flash 8x64",
    "write flash 8x80",
    "write flash 8x256",
    "write flash 3x64",
    "write flash 8x128 fp32",
    "write MLA 512+64 to e4m3",
    "gather packed 8x128",
    "gather flash 8x128 from e4m3",
    "gather MLA 512+64",
    "attend packed 32/8x64",
    "attend flash 32/8x128 from e4m3",
    "attend flash 64/8x256, window, softcap",
    "attend flash 32/8x128, a chunk",
)
Compiled = dict[str, dict[str, Any]]


def compile_ahead(target: str, cache: Path, *which: str) -> Compiled:
    """The calls for a target, in a process that does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_ahead", target, *which],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"compiling for {target} failed:\n{done.stderr[-4000:]}"
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Target -> what was compiled for it, each once."""
    known: dict[str, Compiled] = {}

    def get(target: str) -> Compiled:
        if target not in known:
            known[target] = compile_ahead(target, tmp_path_factory.mktemp(target))
        return known[target]

    return get


def widths(outcome: dict[str, Any]) -> tuple[set[int], set[int]]:
    """Widths in bytes of a call's loads and stores."""
    assert "launches" in outcome, f"refused: {outcome.get('refused')}"
    loads, stores = (
        {int(width) for launch in outcome["launches"] for width in launch[kind]} for kind in ("loads", "stores")
    )
    return loads, stores


def not_wide(name: str, outcome: dict[str, Any]) -> list[str]:
    """What is wrong with a call whose rows allow 16 bytes at a time.

    Beside its rows a kernel loads scalars: a slot and pointers in 8 bytes, table entries and scales in 4.
    """
    loads, stores = widths(outcome)
    wrong = [] if 16 in loads and loads <= {4, 8, 16} else [f"{name}: loads of {sorted(loads)} bytes"]
    return wrong if stores == {16} else [*wrong, f"{name}: stores of {sorted(stores)} bytes"]


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_for_every_target(compiled: Any, target: str) -> None:
    launched = {launch["kernel"] for outcome in compiled(target).values() for launch in outcome.get("launches", ())}
    assert launched >= KERNELS


@pytest.mark.parametrize("target", TARGETS)
def test_each_call_is_one_launch_for_all_groups_and_all_layers_and_attention_in_splits_two(
    compiled: Any, target: str
) -> None:
    counts = {name: len(outcome["launches"]) for name, outcome in compiled(target).items() if "launches" in outcome}
    assert {name: count for name, count in counts.items() if count != 1} == {
        name: 2 for name in counts if "split" in name
    }


@pytest.mark.parametrize("target", TARGETS)
def test_a_kept_launch_gives_the_launcher_what_tritons_own_path_gave_it(compiled: Any, target: str) -> None:
    outcomes = compiled(target)
    assert [name for name, outcome in outcomes.items() if not outcome.get("repeats", "refused" in outcome)] == []


def spills(outcomes: Compiled) -> list[str]:
    """Which launches use local memory."""
    return [
        f"{name}: {launch['local_accesses']} accesses to {launch['local_bytes']} bytes"
        for name, outcome in outcomes.items()
        for launch in outcome.get("launches", ())
        if launch["local_accesses"] or launch["local_bytes"]
    ]


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_spills_and_nothing_uses_local_memory(compiled: Any, target: str) -> None:
    assert not spills(compiled(target))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_attention_spills_at_no_head_size_whole_or_split(target: str, tmp_path: Path) -> None:
    outcomes = compile_ahead(target, tmp_path, "heads")
    assert len(outcomes) == 36
    assert not spills(outcomes)


@pytest.mark.parametrize("target", TARGETS)
def test_rows_are_moved_16_bytes_at_a_time(compiled: Any, target: str) -> None:
    names = WIDE_EVERYWHERE + (WIDE_ON_SM_90 if target == "sm_90" else ())
    outcomes = compiled(target)
    wrong = [problem for name in names for problem in not_wide(name, outcomes[name])]
    assert not wrong


@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx942"])
def test_a_write_that_quantises_to_8_bits_loads_and_stores_16_bytes_at_a_time(compiled: Any, target: str) -> None:
    wrong = [problem for name in WIDE_QUANTISED for problem in not_wide(name, compiled(target)[name])]
    assert not wrong


def test_e4m3_is_refused_on_sm_80_with_the_reason_and_e5m2_is_not(compiled: Any) -> None:
    outcomes = compiled("sm_80")
    assert {name for name, outcome in outcomes.items() if "refused" in outcome} == {"write flash 8x128 to e4m3"}
    reason = outcomes["write flash 8x128 to e4m3"]["refused"]
    assert "needs compute capability 8.9 and this GPU has 8.0" in reason
    assert "fp8_e5m2" in reason
    assert not not_wide("e5m2", outcomes["write flash 8x128 to e5m2"])


@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx942"])
def test_no_other_target_refuses_anything(compiled: Any, target: str) -> None:
    assert not [name for name, outcome in compiled(target).items() if "refused" in outcome]


@pytest.mark.parametrize("target", TARGETS)
def test_blocks_are_copied_16_bytes_at_a_time(compiled: Any, target: str) -> None:
    assert not not_wide("copy", compiled(target)["copy blocks 8x128"])


@pytest.mark.parametrize("target", NVIDIA)
def test_a_classic_cache_gets_wide_keys_and_wide_values_of_neighbours(compiled: Any, target: str) -> None:
    # One token alone has values an element at a time: neighbours within its head lie a block apart in this layout.
    (launch,) = compiled(target)["write classic 8x128"]["launches"]
    assert {int(width) for width in launch["loads"]} <= {8, 16}
    assert {int(width) for width in launch["stores"]} == {2, 16}
    # A key's, and the values of each of the eight heads.
    assert launch["stores"]["16"] >= 9


def test_values_of_neighbours_are_stored_by_as_many_heads_at_a_time_as_give_every_thread_16_bytes(
    compiled: Any,
) -> None:
    (launch,) = compiled("sm_90")["write classic 32x64"]["launches"]
    assert launch["num_warps"] == 8
    assert set(launch["stores"]) == {"2", "16"}
    assert launch["stores"]["16"] == 1 + 32 * 64 * 8 * 2 // (8 * 32 * 16)


@pytest.mark.parametrize("target", TARGETS)
def test_a_classic_cache_in_which_neighbours_are_not_aligned_gets_narrow_values(compiled: Any, target: str) -> None:
    # On AMD's cards even aligned ones do: their compiler takes no hint on a computed address.
    (launch,) = compiled(target)["write classic 8x128, page 20"]["launches"]
    assert {int(width) for width in launch["stores"]} == {2, 16}
    assert launch["stores"]["16"] < 9


@pytest.mark.parametrize("target", NVIDIA)
def test_attention_reads_the_cache_16_bytes_at_a_time(compiled: Any, target: str) -> None:
    assert not not_wide("attention", compiled(target)["attend flash 32/8x128"])


@pytest.mark.parametrize("target", NVIDIA)
@pytest.mark.parametrize("call", ["attend flash 32/8x128", "attend flash 32/8x128, split"])
def test_a_step_of_attention_asks_for_keys_and_values_at_once(compiled: Any, target: str, call: str) -> None:
    launch = compiled(target)[call]["launches"][0]
    assert launch["loads_before_product"] == launch["loads"]["16"]


@pytest.mark.parametrize("target", TARGETS)
def test_slots_are_stored_whole(compiled: Any, target: str) -> None:
    _, stores = widths(compiled(target)["slot mapping"])
    assert min(stores) >= 8


@pytest.mark.parametrize("target", NVIDIA)
def test_slot_mapping_divides_in_64_bits_only_where_a_table_has_so_many_positions(compiled: Any, target: str) -> None:
    narrow, wide = (compiled(target)[f"slot mapping{what}"]["launches"][0] for what in ("", ", 2^32 positions"))
    assert narrow["wide_divisions"] == 0 < wide["wide_divisions"]


def test_rows_that_are_8_bytes_off_are_read_8_bytes_at_a_time_and_stored_wide(compiled: Any) -> None:
    assert widths(compiled("sm_90")["write rows 8 bytes off 8x128"]) == ({8}, {16})


def test_one_head_is_too_short_for_a_warp_of_16_byte_accesses(compiled: Any) -> None:
    assert widths(compiled("sm_90")["write flash 1x128"]) == ({8}, {8})


@pytest.mark.parametrize("target", NVIDIA)
def test_the_check_sees_that_a_tile_of_1024_at_16_warps_is_moved_4_bytes_at_a_time(compiled: Any, target: str) -> None:
    name = "fixed tile, 16 warps"
    assert widths(compiled(target)[name]) == ({4, 8}, {4})
    assert len(not_wide(name, compiled(target)[name])) == 2


@pytest.mark.parametrize("target", NVIDIA)
def test_the_same_kernel_at_4_warps_is_moved_16_bytes_at_a_time(compiled: Any, target: str) -> None:
    assert not not_wide("fixed tile, 4 warps", compiled(target)["fixed tile, 4 warps"])


# -- the readers of machine code ---------------------------------------------------------------------------------------

SASS = """
        /*0070*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;   /* 0x0004060402048981 */
        /*0080*/                   LDG.E.U16.CONSTANT R8, desc[UR4][R2.64] ;
        /*0090*/               @P1 LDGSTS.E.BYPASS.128 [R0], desc[UR4][R2.64] ;
        /*0098*/                   HMMA.16816.F32.BF16 R36, R36, R28, RZ ;
        /*00a0*/                   LDG.E R9, desc[UR4][R2.64] ;
        /*00b0*/                   LDL.64 R9, [R1] ;
        /*00c0*/                   LDS.128 R9, [R1] ;
        /*00d0*/                   STG.E.64 desc[UR4][R2.64], R4 ;
        /*00e0*/                   I2F.U64.RP R38, R36 ;
 Function k:
  REG:40 STACK:8 SHARED:0 LOCAL:4 CONSTANT[0]:560 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
AMD = """
\tglobal_load_dwordx4 v[0:3], v4, s[0:1]
\tbuffer_load_ushort v4, v5, s[0:3], 0 offen
\tglobal_store_dwordx2 v4, v[0:1], s[0:1]
\tbuffer_store_byte v4, v5, s[0:3], 0 offen
\tscratch_store_dword off, v1, off
    .private_segment_fixed_size: 16
    .sgpr_spill_count: 5
    .vgpr_count:     37
    .vgpr_spill_count: 3
"""


def test_sass_is_read_by_opcode_and_width() -> None:
    code = parse_sass(SASS)
    assert (code.loads, code.loads_before_product) == ({16: 2, 2: 1, 4: 1}, 1)
    assert code.stores == {8: 1}
    assert (code.local_accesses, code.local_bytes, code.registers, code.wide_divisions) == (1, 12, 40, 1)


def test_amd_assembly_is_read_by_opcode_and_width() -> None:
    code = parse_amdgcn(AMD)
    assert code.loads == {16: 1, 2: 1}
    assert code.stores == {8: 1, 1: 1}
    assert (code.local_accesses, code.local_bytes, code.registers) == (4, 16, 37)


@pytest.mark.parametrize("reader", [parse_sass, parse_amdgcn])
def test_output_that_is_no_machine_code_is_not_taken_for_a_kernel_without_memory(reader: Any) -> None:
    with pytest.raises(ValueError, match="among 5 characters"):
        reader("error")
