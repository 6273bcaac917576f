"""Trains on events while they happen, and serves what was learnt seconds later.

`events` says what the messages are; how a broker is spoken to, and the log of changed rows, are in
`monolith.row_log`. Each stage is a command of its own: `joiner`, `trainer`. A demo that runs all of
them on one machine, with a broker and users, is in `examples/realtime`.
"""
