"""Writes the files of a run: tables, Prometheus and OpenMetrics text, traces for Perfetto."""
