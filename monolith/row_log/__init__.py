"""The row log, which training writes to Kafka and serving reads, so that rows stay fresh.

`row_log` has batches of rows, `dense_sets` sets of dense variables, `topics` their topics,
`kafka_client` the clients of brokers, and `sync_state` the positions of readers.
"""
