"""Searches over runs: sweeps, comparisons of two configurations, block sizes, fleet sizes, better eviction."""
