"""What does as the events say: the simulated backend, and (with torch) the CUDA backend."""

from ..core.types import Backend
from .sim_backend import ContextRank, SimBackend

__all__ = ["Backend", "ContextRank", "SimBackend"]
