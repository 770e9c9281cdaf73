"""The OpenAI-compatible HTTP server on a live engine."""
