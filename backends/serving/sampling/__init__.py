"""Chooses output tokens from logits, and turns them into text up to a stop text."""
