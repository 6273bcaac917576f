"""Trains on events while they happen, and serves what was learnt seconds later.

`events` says what the messages are, `topics` where they go, `kafka_client` how a broker is
spoken to, `broker` starts one. Each stage is a command of its own: `generator`, `joiner`,
`trainer`; `demo` runs all of them on one machine.
"""
