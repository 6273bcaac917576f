"""Messages of samples."""
