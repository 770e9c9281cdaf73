"""Checks that pass format no text: every call runs them, and nobody reads the text of an error that is not raised."""

import dis
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="kernels need torch")

from kvledger import kernels as package  # noqa: E402
from kvledger.kernels import BlockRegions, KernelInputError, SlotTables, TorchKernels, kv_scale  # noqa: E402

pytestmark = pytest.mark.torch

FOLDER = str(Path(package.__file__).parent)
FORMATS = {"BUILD_STRING", "FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC"}


def formatted_lines(call: Callable[[], Any]) -> list[str]:
    """Where code of the kernels' folder formats an f-string during a call: `file:line`."""
    found: list[str] = []

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and dis.opname[frame.f_code.co_code[frame.f_lasti]] in FORMATS:
            found.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return found


def integers(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def longs(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def calls(dtype: torch.dtype, checked: bool) -> dict[str, Callable[[], Any]]:
    """One call of each kernel that nothing is wrong with; an 8-bit cache has its scales."""
    kernels, model_dtype = TorchKernels(), torch.bfloat16
    scale = None if dtype == model_dtype else kv_scale(0.5, name="k_scale", device="cpu")
    key_cache, value_cache = (torch.zeros(4, 16, 2, 8, dtype=model_dtype).to(dtype) for _ in range(2))
    classic_key = torch.zeros(4, 2, 1, 16, 8, dtype=model_dtype).to(dtype)
    classic_value = torch.zeros(4, 2, 8, 16, dtype=model_dtype).to(dtype)
    latent = torch.zeros(4, 16, 24, dtype=model_dtype).to(dtype)
    rows = torch.zeros(3, 2, 8, dtype=model_dtype)
    caches, scales = {"key_cache": key_cache, "value_cache": value_cache}, {"k_scale": scale, "v_scale": scale}
    classic = {"key_cache": classic_key, "value_cache": classic_value}
    write = {"key": rows, "value": rows, "slot_mapping": longs(17, 18, -1), "checked": checked, **scales}
    table = {"block_table": integers(1, 2, 3, 1).view(2, 2), "rows": integers(0, -1), "checked": checked}
    read = {**table, "cu_seqlens": integers(0, 3, 3), "num_tokens": 3, "first_positions": longs(0, 0)}
    read["dtype"] = model_dtype
    tables = SlotTables.of([table["block_table"]], [16])
    regions = BlockRegions.of([key_cache, value_cache])
    return {
        "slot_mapping": lambda: kernels.compute_slot_mapping(
            tables=tables,
            rows=integers(0, -1),
            query_start_loc=integers(0, 3, 3),
            first_positions=longs(0, 0),
            slot_mapping=torch.zeros(1, 8, dtype=torch.int64),
            checked=checked,
        ),
        "reshape_and_cache": lambda: kernels.reshape_and_cache(**write, **caches),
        "reshape_and_cache_classic": lambda: kernels.reshape_and_cache_classic(**write, **classic),
        "concat_and_cache_mla": lambda: kernels.concat_and_cache_mla(
            kv_c=rows.flatten(1),
            k_pe=rows[:, 0],
            cache=latent,
            slot_mapping=longs(17, 18, -1),
            scale=scale,
            checked=checked,
        ),
        "copy_blocks": lambda: kernels.copy_blocks(caches=regions, sources=longs(1), targets=longs(2), checked=checked),
        "gather_cache": lambda: kernels.gather_cache(**caches, **read, **scales),
        "gather_cache_classic": lambda: kernels.gather_cache_classic(**classic, **read, **scales),
        "gather_mla_cache": lambda: kernels.gather_mla_cache(cache=latent, **read, scale=scale),
        "paged_attention": lambda: kernels.paged_attention(
            query=rows,
            **caches,
            **table,
            query_start_loc=integers(0, 3, 3),
            seq_lens=integers(3, 0),
            scale=0.25,
            window=9,
            softcap=30.0,
            **scales,
        ),
    }


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
def test_a_call_that_passes_its_checks_formats_no_text(dtype: torch.dtype, checked: bool) -> None:
    found = {name: formatted_lines(call) for name, call in calls(dtype, checked).items()}
    assert found == {name: [] for name in found}


def test_formatted_text_would_be_seen() -> None:
    def refused() -> None:
        with pytest.raises(KernelInputError):
            kv_scale(0.0, name="k_scale", device="cpu")

    assert {line.partition(":")[0] for line in formatted_lines(refused)} == {"scales.py"}
