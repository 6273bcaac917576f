"""Real-time training: from an action to a changed answer of every serving replica, in seconds."""
