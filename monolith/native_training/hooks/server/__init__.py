"""Serves the hooks that a person controls. Layer: driver."""
