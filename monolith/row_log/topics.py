"""Names of the topics between the stages, and their creation."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping

from kazoo.client import KazooClient
from kazoo.exceptions import NodeExistsError

from monolith.row_log import kafka_client
from monolith.row_log.kafka_lib import AdminClient, KafkaError, KafkaException, NewTopic

# Keyed by request id, with equal numbers of partitions: an action meets its impression.
IMPRESSIONS = "impressions"
ACTIONS = "actions"
# Written by the joiner and read by the trainer, keyed by request id.
SAMPLES = "samples"

_POLL_SECS = 0.1


def rows_topic(model: str) -> str:
  """Returns the topic of a model's row log, with one partition per parameter server."""
  return f"rows.{model}"


def dense_topic(model: str) -> str:
  """Returns the topic of a model's dense variables, with one partition."""
  return f"dense.{model}"


def create_topics(
  servers: str, partitions: Mapping[str, int], *, zookeeper: str = "", timeout_secs: float = 30
) -> None:
  """Creates topics, except those that exist, and waits until each has a leader.

  Args:
    servers: comma-separated `host:port` of brokers.
    partitions: topic -> number of partitions.
    zookeeper: `host:port` of the brokers' ZooKeeper, which brokers before 0.10.1 need: they cannot
      be asked to create a topic.
    timeout_secs: how long to wait for leaders.

  Raises:
    ValueError: a topic exists with fewer partitions than asked for, or the brokers are old and no
      ZooKeeper is named.
    TimeoutError: a topic has no leader in time.
    confluent_kafka.KafkaException: the brokers refused.
  """
  features = kafka_client.probe(servers, timeout_secs)
  admin = AdminClient(kafka_client.client_settings(servers))
  existing = admin.list_topics(timeout=timeout_secs).topics
  missing = {name: n for name, n in partitions.items() if name not in existing}
  if missing and features.can_create_topics:
    _create_by_request(admin, missing)
  elif missing:
    if not zookeeper:
      raise ValueError(
        f"topics {sorted(missing)} do not exist, and brokers at {servers} are too old to create "
        "them by request: name their ZooKeeper"
      )
    _create_in_zookeeper(zookeeper, missing)
  _wait_for_leaders(admin, partitions, timeout_secs)


def _create_by_request(admin: AdminClient, missing: Mapping[str, int]) -> None:
  requests = [NewTopic(name, num_partitions=n, replication_factor=1) for name, n in missing.items()]
  for future in admin.create_topics(requests).values():
    try:
      future.result()
    except KafkaException as error:
      if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
        raise


def _create_in_zookeeper(zookeeper: str, missing: Mapping[str, int]) -> None:
  """Writes the nodes that Kafka's own admin tool writes: the controller watches them."""
  client = KazooClient(hosts=zookeeper)
  client.start()
  try:
    brokers = sorted(int(broker) for broker in client.get_children("/brokers/ids"))
    for name, n in missing.items():
      replicas = {str(p): [brokers[p % len(brokers)]] for p in range(n)}
      for path, content in (
        (f"/config/topics/{name}", {"version": 1, "config": {}}),
        (f"/brokers/topics/{name}", {"version": 1, "partitions": replicas}),
      ):
        try:
          client.create(path, json.dumps(content).encode(), makepath=True)
        except NodeExistsError:
          pass
  finally:
    client.stop()
    client.close()


def _wait_for_leaders(admin: AdminClient, partitions: Mapping[str, int], timeout: float) -> None:
  deadline = time.monotonic() + timeout
  while True:
    known = admin.list_topics(timeout=timeout).topics
    led = {
      name: sum(p.leader >= 0 and p.error is None for p in known[name].partitions.values())
      for name in partitions
      if name in known
    }
    if all(led.get(name, 0) >= n for name, n in partitions.items()):
      return
    if time.monotonic() > deadline:
      short = {name: led.get(name, 0) for name, n in partitions.items() if led.get(name, 0) < n}
      raise TimeoutError(f"partitions with a leader: {short}, want {dict(partitions)}")
    time.sleep(_POLL_SECS)
