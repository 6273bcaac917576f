"""Facts that a process knows about itself. Layer: base."""
