"""Figures for Prometheus under vLLM's metric names."""
