"""Metrics: sums in the graph, and where they are sent. Layer: graph."""
