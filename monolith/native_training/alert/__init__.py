"""Alerts of a training run. Layer: driver."""
