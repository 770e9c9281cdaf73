"""CUDA graphs without a GPU: a capture is written down operation by operation, and a replay carries out what was.

As in a CUDA graph, a replay runs no Python of the step: each operation gets the very tensors (places in memory) that it
had in the capture, and every number of the host's as it was then. What a capture on a GPU refuses is refused here: to
wait for a value, and to send a list of the host's to the device.
"""

from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CaptureError(RuntimeError):
    """What torch raises on a GPU for an operation that cannot be captured."""


class Recording(TorchDispatchMode):
    """One capture. A kernel is one operation in it, whatever it is made of.

    With `sends_values` lists of the host's may be sent to the device, as outside a capture.
    """

    def __init__(self, sends_values=False):
        super().__init__()
        self.operations = []
        self._sends_values = sends_values
        self._is_in_kernel = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self._is_in_kernel:
            return func(*args, **(kwargs or {}))
        self._refuse(func, args)
        return self._record(func, args, kwargs or {})

    def kernel(self, launch, *args, **kwargs):
        """Launch a kernel: what it reads in memory it reads again in each replay."""
        with self._as_one_operation():
            return self._record(launch, args, kwargs)

    def frozen(self, tensor):
        """What `tensor` holds now, for all replays: what a step does that asks the host."""
        with self._as_one_operation():
            return tensor.clone()

    @contextmanager
    def _as_one_operation(self):
        self._is_in_kernel = True
        try:
            yield
        finally:
            self._is_in_kernel = False

    def _record(self, function, args, kwargs):
        output = function(*args, **kwargs)
        if any(isinstance(value, int | float) for value in tree_leaves(output)):
            raise CaptureError(f"{function} waits for the device")
        self.operations.append((function, args, kwargs, output))
        return output

    def _refuse(self, func, args):
        has_mask = any(isinstance(x, torch.Tensor) and x.dtype is torch.bool for x in tree_leaves(args[1:]))
        depends_on_values = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(func.tags)
        if depends_on_values and ("index" not in func.name() or has_mask):
            raise CaptureError(f"{func} waits for the device")
        if func is torch.ops.aten.lift_fresh.default and args[0].dim() and not self._sends_values:
            raise CaptureError("values of the host are sent to the device")

    def poison(self):
        """Overwrite what the operations computed, so that a replay which leaves one out is seen."""
        for _, args, kwargs, output in self.operations:
            inputs = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if _is_tensor(x)}
            for tensor in filter(_is_tensor, tree_leaves(output)):
                if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in inputs:
                    tensor.fill_(torch.nan)

    @torch.no_grad()
    def replay(self):
        for function, args, kwargs, output in self.operations:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(output), tree_leaves(again), strict=True):
                if _is_tensor(old) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


class RecordedKernels:
    """A kernel set whose calls are operations of the recording in progress, if there is one."""

    def __init__(self, kernels):
        self._kernels = kernels
        self.recording: Recording | None = None

    def __getattr__(self, name):
        method = getattr(self._kernels, name)

        def call(**arguments):
            return method(**arguments) if self.recording is None else self.recording.kernel(method, **arguments)

        return call


class RecordedGraphs:
    """A `GraphCapturer` on a CPU, for backends over `RecordedKernels`."""

    def __init__(self, kernels):
        self.kernels = kernels
        self.recordings = []

    @torch.inference_mode(False)  # in inference mode, operations made of others would be seen whole
    @torch.no_grad()
    def capture(self, run):
        run()
        recording = Recording()
        self.kernels.recording = recording
        try:
            # Models ask torch whether they are being captured, and then leave their own waiting out.
            with mock.patch("torch.cuda.is_current_stream_capturing", return_value=True), recording:
                run()
        finally:
            self.kernels.recording = None
        recording.poison()
        self.recordings.append(recording)
        return recording.replay
