"""The error that kernels raise."""


class KernelInputError(ValueError):
    """A kernel cannot take a tensor: its shape, strides, dtype, device or (in checked mode) its content is wrong.

    The message names the argument, describes it and says what it must be. Nothing has been written.
    """
