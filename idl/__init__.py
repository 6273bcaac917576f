"""Messages that data files and other programs share."""
