"""Eviction policies, one file each. Importing this package registers the built-in ones in `eviction_policies`."""

# In the order in which help texts and messages name them.
from . import lru, fifo, lfu, s3fifo, sieve, length_aware  # isort: skip

__all__ = ["fifo", "length_aware", "lfu", "lru", "s3fifo", "sieve"]
