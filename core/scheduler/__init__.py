"""Continuous batching: which requests run, wait, are admitted or preempted in each step, and the engine loop."""
