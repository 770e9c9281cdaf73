"""Measures the memory that a server takes at start-up, so that core can size the pool from readings."""
