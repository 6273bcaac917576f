"""Messages of several layers. Layer: base."""
