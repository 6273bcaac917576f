"""Messages between training and serving. Layer: ops."""
