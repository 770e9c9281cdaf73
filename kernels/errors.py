"""What a kernel refuses."""


class KernelInputError(ValueError):
    """A tensor that a kernel cannot take: its shape, strides, dtype, device or (in checked mode) its content.

    The message names the argument, what it is and what it must be. Nothing has been written.
    """
