"""Runs transformers models on the pool: loading, attention through block tables, CUDA graphs, and the profiled step."""
