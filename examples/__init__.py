"""Programs to start from; those of `realtime` import one another."""
