"""The row log: what training writes to Kafka, and what serving reads, so that rows stay fresh.

`row_log` says what a batch of rows is, `dense_sets` the same of dense variables, `topics` where
they go, `kafka_client` how a broker is spoken to, `sync_state` from where a reader goes on.
"""
