"""Turns arguments of the Kafka datasets into settings of the client.

Differences from ByteDance's Monolith: values of settings may contain `=`.
"""

from __future__ import annotations

from collections.abc import Sequence

DEFAULT_POLL_BATCH_SIZE = 1024
ENDLESS = -1


def split_list(value: str | Sequence[str] | None) -> list[str]:
  """Returns the non-empty elements of a comma-separated string, or of a sequence."""
  parts = value.split(",") if isinstance(value, str) else value or []
  return [part.strip() for part in parts if part.strip()]


def make_metadata(
  group_id: str,
  servers: str | Sequence[str],
  poll_batch_size: int,
  configuration: str | Sequence[str] | None = None,
  kafka_other_metadata: str | Sequence[str] | None = None,
) -> list[str]:
  """Returns `key=value` entries for the consumer; of equal keys the last counts.

  Raises:
    ValueError: `group_id` or `servers` is empty, `poll_batch_size` is less than 1, or an entry is
      not `key=value`.
  """
  servers = split_list(servers)
  if not group_id:
    raise ValueError("group_id is empty, want the name of a consumer group")
  if not servers:
    raise ValueError("servers is empty, want host:port of at least one broker")
  if poll_batch_size < 1:
    raise ValueError(f"poll_batch_size is {poll_batch_size}, want at least 1")
  return check_metadata(
    [
      *split_list(configuration),
      f"group.id={group_id}",
      f"bootstrap.servers={','.join(servers)}",
      f"batch.num.messages={poll_batch_size}",
      *split_list(kafka_other_metadata),
    ]
  )


def check_metadata(metadata: Sequence[str]) -> list[str]:
  """Returns the entries, all of them `key=value`.

  Raises:
    ValueError: an entry has no `=`, or no key.
  """
  for entry in metadata:
    key, found, _ = entry.partition("=")
    if not found or not key.strip():
      raise ValueError(f"Kafka metadata has {entry!r}, want key=value")
  return list(metadata)


def check_timeouts(message_poll_timeout: int, stream_timeout: int) -> int:
  """Returns the stream timeout to use, in milliseconds: -1, or at least that of a poll.

  Raises:
    ValueError: the stream timeout is below -1, or that of a poll not positive.
  """
  if message_poll_timeout < 1:
    raise ValueError(f"message_poll_timeout is {message_poll_timeout}, want at least 1")
  if stream_timeout < ENDLESS:
    raise ValueError(
      f"stream_timeout is {stream_timeout}, want -1 (endless) or milliseconds of silence"
    )
  return stream_timeout if stream_timeout == ENDLESS else max(stream_timeout, message_poll_timeout)
