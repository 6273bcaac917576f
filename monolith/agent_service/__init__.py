"""Agents: which process serves what, and where it is. Layer: cluster."""
