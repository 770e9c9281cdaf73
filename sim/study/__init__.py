"""Runs the main job, a study of one trace on one deployment, and writes its answer in sentences."""
