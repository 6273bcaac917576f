"""Files that workers share out. Layer: data."""
