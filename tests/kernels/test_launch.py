"""Widths and warps of a launch, what is imported when, and what is said where Triton cannot run."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

torch = pytest.importorskip("torch", reason="kernels need torch")

from kvledger.kernels.launch import next_power_of_2, num_lanes_for, num_warps_for, vector_elements  # noqa: E402

pytestmark = pytest.mark.torch


def rows(num_tokens: int, size: int, stride: int, offset: int = 0) -> torch.Tensor:
    """Rows of bfloat16 in an allocation that begins at a multiple of 64 bytes."""
    return torch.zeros(num_tokens * stride + offset + size, dtype=torch.bfloat16).as_strided(
        (num_tokens, size), (stride, 1), offset
    )


@pytest.mark.parametrize(
    ("tensor", "elements"),
    [
        pytest.param(rows(3, 128, 128), 8, id="dense rows"),
        pytest.param(rows(3, 120, 768), 8, id="a slice of wider rows"),
        pytest.param(rows(3, 120, 1032), 8, id="a stride of 8 times an odd number"),
        pytest.param(rows(3, 128, 132), 4, id="a stride of 4 times an odd number"),
        pytest.param(rows(3, 128, 128, offset=4), 4, id="an address 8 bytes off"),
        pytest.param(rows(3, 100, 128), 4, id="a last access that would leave the row"),
        pytest.param(rows(3, 128, 128, offset=1), 1, id="an odd address"),
        pytest.param(rows(3, 128, 128).view(torch.uint8), 16, id="bytes"),
    ],
)
def test_an_access_is_as_wide_as_address_strides_and_size_allow(tensor: torch.Tensor, elements: int) -> None:
    assert vector_elements(tensor) == elements
    assert vector_elements(tensor, tensor[1:]) == elements


@pytest.mark.parametrize(
    ("num_elements", "item_bytes", "warp_size", "num_warps"),
    [(1024, 2, 32, 4), (1024, 1, 32, 2), (512, 2, 32, 2), (128, 2, 32, 1), (1 << 15, 2, 32, 8), (1024, 2, 64, 2)],
)
def test_every_thread_moves_16_bytes_of_the_narrower_side(
    num_elements: int, item_bytes: int, warp_size: int, num_warps: int
) -> None:
    assert num_warps_for(num_elements, item_bytes, warp_size) == num_warps


def test_lanes_are_as_many_as_the_work_fills_and_a_grid_allows() -> None:
    assert [num_lanes_for(count, 8) for count in (0, 1, 8, 9, 1 << 30)] == [1, 1, 1, 2, 65_535]


def test_tiles_are_powers_of_two() -> None:
    assert [next_power_of_2(number) for number in (0, 1, 2, 3, 80, 128, 129)] == [1, 1, 2, 4, 128, 128, 256]


def printed(program: str) -> str:
    """What a fresh interpreter prints; Triton's own interpreter is off."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    return done.stdout.strip()


def test_nothing_heavy_is_imported_before_it_is_asked_for() -> None:
    loaded = "[name for name in ('torch', 'triton') if name in sys.modules]"
    assert printed(f"import sys, kvledger.kernels; print({loaded})") == "[]"
    assert printed(f"import sys; from kvledger.kernels import TorchKernels; print({loaded})") == "['torch']"


def test_an_unknown_name_is_an_attribute_error() -> None:
    from kvledger import kernels

    assert set(kernels.__all__) >= {"Kernels", "TorchKernels", "TritonKernels"}
    with pytest.raises(AttributeError, match=r"'kvledger\.kernels' has no attribute 'CudaKernels'"):
        _ = kernels.CudaKernels


@pytest.mark.parametrize(("package", "name"), [("torch", "TorchKernels"), ("triton", "TritonKernels")])
def test_what_needs_a_missing_package_says_how_to_get_it(package: str, name: str) -> None:
    program = (
        f"import sys, kvledger.kernels as k\nsys.modules['{package}'] = None\n"
        f"try: k.{name}\nexcept ModuleNotFoundError as e: print(e)"
    )
    assert printed(program) == f"{name} needs {package}, which is not installed: pip install 'kvledger[cuda]'"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_and_without_the_interpreter_the_way_out_is_named() -> None:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    program = (
        "from kvledger.kernels import TritonKernels as T, KernelInputError as E\ntry: T()\nexcept E as e: print(e)"
    )
    assert "Triton finds no GPU" in printed(program)
    assert "use TorchKernels, or set TRITON_INTERPRET=1" in printed(program)
