"""How long an engine step takes: latency models, the GPUs they know, and their calibration to measured steps."""

from . import kernels, linear, roofline, table  # noqa: F401 - fills the registry of latency models
