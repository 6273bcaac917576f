"""Builds graphs and runs sessions. Layer: graph."""
