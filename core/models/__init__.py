"""Reads what a model's layers store and how many parameters it has, from a config.json or the built-in catalogue."""
