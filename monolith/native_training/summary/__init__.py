"""Summaries of a run, and its report. Layer: models."""
