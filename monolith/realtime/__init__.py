"""Trains on events while they happen, and serves what was learnt seconds later.

`events` says what the messages are, `broker` starts a broker; how one is spoken to, and the log of
changed rows, are in `monolith.row_log`. Each stage is a command of its own: `generator`, `joiner`,
`trainer`; `demo` runs all of them on one machine.
"""
