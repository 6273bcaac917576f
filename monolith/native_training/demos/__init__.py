"""Programs to start from. Layer: runners."""
