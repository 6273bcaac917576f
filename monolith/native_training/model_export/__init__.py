"""Writes SavedModels. Layer: export."""
