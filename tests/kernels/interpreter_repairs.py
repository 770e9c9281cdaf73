"""What Triton's interpreter gets wrong, put right for the tests: float conversions, dot products, loop bounds.

As measured on triton 3.6 to 3.9: casts to bfloat16 truncate, casts to float8_e4m3 lose the carry and do not saturate,
`tl.dot` multiplies the bit patterns of bfloat16, and under NumPy 2.3 or newer a loop over loaded bounds warns or fails.
A GPU rounds to nearest even and saturates (PTX `cvt.rn.satfinite`); so do these.
"""

import os
import sys
from typing import Any

import numpy as np
import torch

UNSIGNED = {
    1: (np.uint8, torch.uint8),
    2: (np.int16, torch.int16),
    4: (np.int32, torch.int32),
    8: (np.int64, torch.int64),
}


def use_interpreter_without_gpu() -> None:
    """Without a GPU, make Triton interpret its kernels in this process, with the repairs.

    The mode is fixed when triton is first imported. Other libraries import it too, so tests/conftest.py already sets
    the variable where it finds no GPU; a subprocess that compiles must drop it again.
    """
    if torch.cuda.is_available():
        return
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported before TRITON_INTERPRET=1 was set: the interpreter would be half on")
    os.environ["TRITON_INTERPRET"] = "1"
    repair_interpreter()


def repair_interpreter() -> None:
    """Replace what is wrong; doing it twice is doing it once."""
    import triton.language as tl
    from triton.runtime import interpreter

    if getattr(interpreter, "is_repaired", False):
        return
    interpreter.is_repaired = True
    _repair_casts(interpreter, tl)
    _repair_dot(interpreter, tl)
    _repair_loop_bounds(interpreter)
    _overflow_in_silence(interpreter)


def _repair_casts(interpreter: Any, tl: Any) -> None:
    dtypes = {
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float32: torch.float32,
        tl.float64: torch.float64,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
    }
    unrepaired = interpreter._convert_float

    def convert(values: Any, from_type: Any, to_type: Any, rounding_mode: Any) -> Any:
        source, target = dtypes.get(from_type), dtypes.get(to_type)
        if source is None or target is None or rounding_mode == interpreter._ir.ROUNDING_MODE.RTZ:
            return unrepaired(values, from_type, to_type, rounding_mode)
        bits = np.array(values, copy=True, order="C").view(UNSIGNED[source.itemsize][0]).reshape(-1)
        numbers = torch.from_numpy(bits).view(source)
        converted = saturated(numbers, target) if target.itemsize == 1 else numbers.to(target)
        raw = converted.view(UNSIGNED[target.itemsize][1]).numpy()
        return raw.view(f"uint{8 * target.itemsize}").reshape(values.shape)

    interpreter._convert_float = convert


def saturated(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Nearest even, clamped to the largest number; NaN becomes the positive NaN, as PTX says."""
    largest = torch.finfo(dtype).max
    wide = numbers.float().clamp(-largest, largest)
    return torch.where(wide.isnan(), torch.nan, wide).to(dtype)


def _repair_dot(interpreter: Any, tl: Any) -> None:
    unrepaired = interpreter.InterpreterBuilder.create_dot

    def as_float32(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        wide = interpreter._convert_float(handle.data, tl.bfloat16, tl.float32, None).view(np.float32)
        return interpreter.TensorHandle(wide, tl.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return unrepaired(self, as_float32(a), as_float32(b), d, *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _repair_loop_bounds(interpreter: Any) -> None:
    unrepaired = interpreter._patch_lang_tensor

    def as_index(self: Any) -> int:
        return int(self.handle.data.reshape(-1)[0])

    def patch(tensor: Any, scope: Any) -> Any:
        patched = unrepaired(tensor, scope)
        scope.set_attr(tensor, "__index__", as_index)
        return patched

    interpreter._patch_lang_tensor = patch


def _overflow_in_silence(interpreter: Any) -> None:
    """Numbers that overflow become infinite, as on a GPU, with no warning of NumPy's."""
    loud = interpreter.GridExecutor.__call__

    def quiet(self: Any, *args: Any, **kwargs: Any) -> Any:
        with np.errstate(all="ignore"):
            return loud(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = quiet
