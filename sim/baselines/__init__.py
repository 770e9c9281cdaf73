"""Allocators that do not page, as a baseline: how much memory each wastes on the same requests."""
