"""Saves and restores files: checkpoints, their savers and hooks. Layer: checkpoints."""
