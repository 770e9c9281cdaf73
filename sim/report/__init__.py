"""Prints and draws results: console tables, plots, the HTML page of a study. Only commands import it."""
