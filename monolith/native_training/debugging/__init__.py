"""Looks into a training run. Layer: driver."""
