"""Runs real-time training on one machine, hurts it, and measures what was promised.

`demo` starts everything; `broker` finds or starts a Kafka broker, `generator` plays the users,
`system` holds the processes, `faults` hurts them, `monitor` and `page` show what happens.
"""
