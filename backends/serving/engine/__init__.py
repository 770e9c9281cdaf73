"""The live engine: takes requests from any thread, sizes and drives the model, and records the run."""
