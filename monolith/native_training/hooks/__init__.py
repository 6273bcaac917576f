"""Hooks of a training run. Layer: driver."""
