"""All processes of the demo: who they are, how they start, and how one of them is hurt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

from monolith.agent_service.ports import find_free_port
from monolith.row_log import topics
from monolith.serving import model_server

from examples.realtime import broker
from examples.realtime.freshness import Client
from examples.realtime.options import MODEL, DemoOptions
from examples.realtime.processes import DEAD, RUNNING, Command, Supervisor, child_pids
from examples.realtime.serving_directory import ServingDirectory
from examples.realtime.zookeeper import LocalZooKeeper

ENTRY = "entry"
NEVER = "never"
PARTITIONS = 2
# Lateness covers a broker that is away: what one producer sends then may be behind another's by as
# much. Only negatives wait for it.
WINDOW_SECS, LATENESS_SECS, SAMPLE_RATE = 20.0, 15.0, 0.5
_BZID = "demo"
_START_SECS = 300
_CONTROLLER_SECS = 120
_PS_CALL_MS = 2000
_COMPARED_NICENESS = 10
_LOADS, _LOAD_AGAIN_MICROS = 1000, 500_000


class System:
  """The processes.

  Args:
    options: what the demo does.
    folder: where everything is kept.
    tell: called with what is being waited for.

  Raises:
    FileNotFoundError: the model server is not built.
  """

  def __init__(self, options: DemoOptions, folder: pathlib.Path, tell: Callable[[str], None]):
    self._options = options
    self._folder = folder
    self._tell = tell
    self._model_dir = folder / "model"
    self.broker = broker.make_broker(folder / "broker")
    self._zookeeper: LocalZooKeeper | None = None
    if not (isinstance(self.broker, broker.LocalBroker) and self.broker.zookeeper):
      self._zookeeper = LocalZooKeeper(folder / "zookeeper", broker.fetch_kafka())
    self.supervisor = Supervisor(folder / "logs")
    model_server.find_binary()  # now, not when everything else runs
    self._server = [sys.executable, "-m", "monolith.serving.model_server"]
    self.directory = ServingDirectory(_BZID, self.zookeeper_address, MODEL)
    self.joiner_port, self.trainer_port = find_free_port(), find_free_port()
    self.entries = [f"entry_{i}" for i in range(options.replicas)]
    # Who holds tables in serving.
    self.holders = [f"tables_{i}" for i in range(options.replicas) if options.num_ps]
    self.holders = self.holders or self.entries
    self._compared_ports = {
      **{f"{secs:g} s": find_free_port() for secs in options.slow_sync_secs()},
      NEVER: find_free_port(),
    }

  @property
  def zookeeper_address(self) -> str:
    """`host:port` of the ZooKeeper in which agents register."""
    if self._zookeeper is not None:
      return self._zookeeper.address
    assert isinstance(self.broker, broker.LocalBroker)
    return self.broker.zookeeper

  @property
  def topics(self) -> dict[str, int]:
    """All topics, and how many partitions they have."""
    return {
      topics.IMPRESSIONS: PARTITIONS,
      topics.ACTIONS: PARTITIONS,
      topics.SAMPLES: PARTITIONS,
      topics.rows_topic(MODEL): max(1, self._options.num_ps),
      topics.dense_topic(MODEL): 1,
    }

  # Starting.

  def start(self) -> None:
    """Starts everything and waits until all replicas serve.

    Raises:
      TimeoutError: a process is not ready in time; the message has its output.
      examples.realtime.broker.BrokerError: no broker can be had.
    """
    self._tell(f"starting broker and ZooKeeper; {self._server[-1]} will answer requests")
    self.start_servers()
    self.broker.create_topics(self.topics)
    options = self._options
    self._add(
      "generator",
      "examples.realtime.generator",
      *(f"--rate={options.rate}", f"--turn_secs={options.turn_secs}"),
    )
    self._add(
      "joiner",
      "monolith.realtime.joiner",
      *(f"--window_secs={WINDOW_SECS:g}", "--partitions=all"),
      *(f"--lateness_secs={LATENESS_SECS:g}", f"--sample_rate={SAMPLE_RATE:g}"),
      f"--metrics_port={self.joiner_port}",
    )
    self._add_trainers()
    self._tell("waiting for an export of what was learnt")
    self.supervisor.wait_for("the second export", self._has_exports, _START_SECS, "trainer")
    self._add_agents()
    self._add_compared()
    self._publish_model()
    self.directory.start()
    self._wait_for_serving()

  def start_servers(self) -> None:
    """Starts broker and ZooKeeper where they do not run."""
    if self._zookeeper is not None:
      self._zookeeper.start()
    self.broker.start()

  def stop(self) -> None:
    """Ends everything."""
    self.directory.stop()
    self.supervisor.stop()
    self.broker.stop()
    if self._zookeeper is not None:
      self._zookeeper.kill()

  def _add(self, name: str, module: str, *flags: str) -> None:
    arguments = [sys.executable, "-m", module, f"--kafka_servers={self.broker.servers}", *flags]
    self.supervisor.add(Command(name, arguments, _environment()))

  def _add_trainers(self) -> None:
    options = self._options
    shared = [
      *(f"--model_dir={self._model_dir}", f"--model_name={MODEL}", "--publish"),
      *(f"--sync_secs={options.sync_secs}", "--dense_sync_secs=5"),
      *(f"--save_secs={options.save_secs}", f"--num_ps={options.num_ps}"),
      "--task=examples.realtime.model:DemoModel",
      f"--digest_secs={options.digest_secs}",
    ]
    role = ["--role=local"]
    if options.num_ps:
      # A folder, so that training needs no ZooKeeper: its end must not touch it.
      shared.append(f"--discovery={self._folder / 'discovery'}")
      role = ["--role=worker"]
    for i in range(options.num_ps):
      self._add(
        f"trainer_ps_{i}", "monolith.realtime.trainer", "--role=ps", f"--index={i}", *shared
      )
    metrics = f"--metrics_port={self.trainer_port}"
    self._add("trainer", "monolith.realtime.trainer", *role, metrics, *shared)

  def _add_agents(self) -> None:
    """Starts an agent per replica, which starts its server when it knows what to serve."""
    server = [*self._server, "--bind_address=127.0.0.1"]
    server.append(f"--row_log_servers={self.broker.servers}")
    filters = {name: "entry;1" for name in self.entries}
    if self._options.num_ps:
      filters.update({name: "ps_{i};1" for name in self.holders})
    for name, layout_filter in filters.items():
      conf = self._folder / f"{name}.conf"
      conf.write_text(
        f"bzid {_BZID}\ndeploy_type unified\nagent_version 3\n"
        f"zk_servers {self.zookeeper_address}\nlayout_pattern {MODEL}\n"
        f"layout_filters {layout_filter}\n"
        # The row log keeps it new, so it looks for exports when it starts and never again.
        f"file_system_poll_wait_seconds 0\nfetch_ps_timeout_ms {_PS_CALL_MS}\n"
        # An entry is loaded when the servers of its tables answer; they start at the same time.
        f"max_num_load_retries {_LOADS}\nload_retry_interval_micros {_LOAD_AGAIN_MICROS}\n"
      )
      arguments = [sys.executable, "-m", "monolith.agent_service.agent", f"--conf={conf}"]
      arguments += ["--host=127.0.0.1", f"--tfs_log={self._folder / 'logs' / name}.log"]
      environment = {"MY_POD_NAME": name, "MONOLITH_SERVING_COMMAND": shlex.join(server)}
      command = Command(f"agent_{name}", arguments, {**_environment(), **environment}, _PORTS)
      self.supervisor.add(command)

  def _add_compared(self) -> None:
    """Starts servers that are synced seldom or never, each with all parts of the model."""
    parts = [ENTRY, *(f"ps_{i}" for i in range(self._options.num_ps))]
    config = self._folder / "compared.config"
    config.write_text(
      "model_config_list {\n"
      + "".join(
        f'  config {{ name: "{MODEL}:{part}" base_path: "{self._exports(part)}" '
        'model_platform: "tensorflow" }\n'
        for part in parts
      )
      + "}\n"
    )
    for name, rest_port in self._compared_ports.items():
      port = find_free_port()
      arguments = [*self._server, f"--port={port}"]
      arguments += [f"--rest_api_port={rest_port}", f"--model_config_file={config}"]
      arguments += ["--file_system_poll_wait_seconds=0", f"--fetch_ps_timeout_ms={_PS_CALL_MS}"]
      arguments.append(f"--max_num_load_retries={_LOADS}")
      arguments.append(f"--load_retry_interval_micros={_LOAD_AGAIN_MICROS}")
      addresses = [f"{MODEL}:{part}=127.0.0.1:{port}" for part in parts if part != ENTRY]
      if addresses:
        arguments.append(f"--ps_address={','.join(addresses)}")
      if name != NEVER:
        arguments.append(f"--row_log_servers={self.broker.servers}")
        arguments.append(f"--row_log_interval_secs={name.split()[0]}")
      process = f"synced_{name}".replace(" ", "_")
      # Nobody waits for them: what is there for its AUC alone leaves the cores to the others.
      command = Command(process, arguments, _environment(), niceness=_COMPARED_NICENESS)
      self.supervisor.add(command)

  def _publish_model(self) -> None:
    """Tells agents through ZooKeeper what to serve, with the operator's commands."""
    control = [sys.executable, "-m", "monolith.agent_service.agent_controller"]
    control += [f"--bzid={_BZID}", f"--zk_servers={self.zookeeper_address}"]
    exports = f"--export_base={self._model_dir / 'exported_models'}"
    for words in (
      ["--cmd=decl", exports, f"--model_name={MODEL}"],
      ["--cmd=pub", f"--layout={MODEL}", f"--model_name={MODEL}:*"],
    ):
      done = subprocess.run(
        [*control, *words],
        capture_output=True,
        text=True,
        timeout=_CONTROLLER_SECS,
        env={**os.environ, **_environment()},
      )
      if done.returncode:
        raise TimeoutError(f"{words} failed: {done.stdout}{done.stderr}")

  def _wait_for_serving(self) -> None:
    for part, names in self._parts().items():
      self._tell(f"waiting until ZooKeeper has the replicas of {part}")
      self.supervisor.wait_for(
        f"replicas of {part} in ZooKeeper",
        functools.partial(self._are_registered, part, names),
        _START_SECS,
        *(f"agent_{name}" for name in names),
      )
    for name in self._compared_ports:
      client = self.compared_clients()[name]
      process = f"synced_{name}".replace(" ", "_")
      self._tell(f"waiting for {process}")
      self.supervisor.wait_for(f"{process} to serve", client.is_available, _START_SECS, process)

  def _are_registered(self, part: str, names: Sequence[str]) -> bool:
    return set(names) <= set(self.directory.registered(part))

  def _parts(self) -> dict[str, list[str]]:
    """Returns sub graph -> the replicas that serve it."""
    return {ENTRY: self.entries, **{f"ps_{i}": self.holders for i in range(self._options.num_ps)}}

  def _exports(self, part: str) -> pathlib.Path:
    return self._model_dir / "exported_models" / part

  def _has_exports(self) -> bool:
    """Returns whether each part was exported twice: the first time nothing was learnt yet."""
    return all(
      len(list(self._exports(part).glob("*/saved_model.pb"))) >= 2 for part in self._parts()
    )

  # Asking.

  def entry_client(self, name: str) -> Client:
    """Returns a client of one entry, which finds it through ZooKeeper."""
    return Client(lambda: self._locate(ENTRY, name), f"{MODEL}:{ENTRY}")

  def holder_client(self, name: str) -> Client:
    """Returns a client of a replica that holds tables."""
    part = "ps_0" if self._options.num_ps else ENTRY
    return Client(lambda: self._locate(part, name), f"{MODEL}:{part}")

  def compared_clients(self) -> dict[str, Client]:
    """Returns clients of the servers that are synced seldom or never."""
    return {
      name: Client(lambda port=port: f"127.0.0.1:{port}", f"{MODEL}:{ENTRY}")  # type: ignore
      for name, port in self._compared_ports.items()
    }

  def find_entries(self) -> tuple[list[str], list[str]]:
    """Returns the addresses of entries to ask, and of those that were there just now."""
    registered, former = self.directory.find(ENTRY)
    return list(registered.values()), list(former.values())

  def _locate(self, part: str, name: str) -> str | None:
    registered, former = self.directory.find(part)
    return registered.get(name) or former.get(name)

  # Hurting.

  def targets(self) -> list[str]:
    """Returns the names of all processes of the system: agents, their servers, and the rest."""
    names = ["joiner", "trainer", *(f"trainer_ps_{i}" for i in range(self._options.num_ps))]
    replicas = dict.fromkeys([*self.holders, *self.entries])
    names += [*replicas, *(f"agent_{name}" for name in replicas), "generator"]
    if isinstance(self.broker, broker.LocalBroker):
      names.append("broker")
    return [*names, "zookeeper"]

  def pid(self, target: str) -> int | None:
    """Returns the process id of a target while it lives."""
    if target in ("broker", "zookeeper"):
      if target == "zookeeper" and self._zookeeper is not None:
        return self._zookeeper.pid
      assert isinstance(self.broker, broker.LocalBroker)
      return self.broker.pids().get(target)
    if f"agent_{target}" in self.supervisor.names():
      agent = self.supervisor[f"agent_{target}"].pid
      return next(iter(child_pids(agent)), None) if agent is not None else None
    return self.supervisor[target].pid

  def kill(self, target: str) -> None:
    """Ends one process with SIGKILL, and no other."""
    if target == "broker":
      assert isinstance(self.broker, broker.LocalBroker)
      self.broker.kill_broker()
    elif target == "zookeeper" and self._zookeeper is not None:
      self._zookeeper.kill()
    elif target == "zookeeper":
      assert isinstance(self.broker, broker.LocalBroker)
      self.broker.kill_zookeeper()
    else:
      _send(self.pid(target), signal.SIGKILL)

  def kill_all(self) -> None:
    """Ends all processes with SIGKILL, as nearly at once as possible."""
    # A server is found through its agent, which may be dead by then.
    pids = [self.pid(target) for target in self.targets() if target not in ("broker", "zookeeper")]
    for pid in pids:
      _send(pid, signal.SIGKILL)
    for target in self.targets()[len(pids) :]:
      self.kill(target)

  def stand_still(self, target: str, secs: float) -> None:
    """Stops one process, and lets it run on after this many seconds."""
    pid = self.pid(target)
    _send(pid, signal.SIGSTOP)
    try:
      time.sleep(secs)
    finally:
      _send(pid, signal.SIGCONT)

  def states(self) -> dict[str, dict[str, object]]:
    """Returns state, process id and number of starts of all processes by name."""
    states = self.supervisor.states()
    for name in [n for n in states if n.startswith("agent_")]:
      server = name[len("agent_") :]
      pid = self.pid(server)
      states[server] = {
        "state": RUNNING if pid else DEAD,
        "pid": pid,
        "starts": states[name]["starts"],
      }
    for name in ("zookeeper", "broker"):
      if name == "zookeeper" or isinstance(self.broker, broker.LocalBroker):
        pid = self.pid(name)
        states[name] = {"state": RUNNING if pid else DEAD, "pid": pid, "starts": 1}
    return states


# An agent takes ports from these variables: those of this process are not for it.
_PORTS = ("PORT", *(f"PORT{i}" for i in range(2, 11)))


def _environment() -> dict[str, str]:
  return {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1"}


def _send(pid: int | None, number: signal.Signals) -> None:
  if pid is not None:
    try:
      os.kill(pid, number)
    except ProcessLookupError:
      pass
