"""Assigns processes to places: this machine, hosts, or the tasks of a Slurm or Kubernetes job.

Processes are numbered chief, servers, workers: number 0 is the chief, which is worker 0 of the job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import pathlib
import random
import re
import socket
from collections.abc import Mapping, Sequence

CHIEF, SERVER, WORKER = "chief", "ps", "worker"
LOOPBACK = "127.0.0.1"
_MAX_HOSTS = 100_000
_FIRST_PORT = 10240
_DEFAULT_LAST_PORT = 32767


@dataclasses.dataclass(frozen=True)
class Task:
  """One process of a job.

  Attributes:
    role: "chief", "ps" or "worker", as TF_CONFIG has them.
    index: its number among those of its role.
    address: where it listens, "host:port".
    host: the host on which ssh starts it, "user@host" or "host"; empty for this machine.
  """

  role: str
  index: int
  address: str
  host: str = ""

  @property
  def name(self) -> str:
    """The name of the process in logs: "ps-0"."""
    return f"{self.role}-{self.index}"

  @property
  def title(self) -> str:
    """The name of the process in messages: "ps-0", or "ps-0 on b" where it is on another host."""
    return f"{self.name} on {self.host}" if self.host else self.name

  @property
  def server_type(self) -> str:
    """The value of a program's `--server_type`: "ps" or "worker"."""
    return SERVER if self.role == SERVER else WORKER

  @property
  def worker_index(self) -> int:
    """The value of a program's `--index`: the chief is worker 0, and the others follow it."""
    return self.index + 1 if self.role == WORKER else self.index


@dataclasses.dataclass(frozen=True)
class Job:
  """All processes of a job, in the order of their numbers."""

  tasks: tuple[Task, ...]

  def tf_config(self, task: Task) -> str:
    """Returns the TF_CONFIG of one of them, as JSON."""
    cluster: dict[str, list[str]] = {}
    for other in self.tasks:
      cluster.setdefault(other.role, []).append(other.address)
    return json.dumps({"cluster": cluster, "task": {"type": task.role, "index": task.index}})

  def count(self, *roles: str) -> int:
    """Returns how many processes have one of some roles."""
    return sum(task.role in roles for task in self.tasks)


def _roles(num_ps: int, num_workers: int) -> list[tuple[str, int]]:
  if num_ps < 0 or num_workers < 1:
    raise ValueError(
      f"num_ps is {num_ps} and num_workers {num_workers}, want at least 0 and 1: the chief is one "
      "of the workers"
    )
  if num_workers > 1 and num_ps == 0:
    raise ValueError(
      f"{num_workers} workers share tables on servers only: want num_ps of 1 or more"
    )
  servers = [(SERVER, index) for index in range(num_ps)]
  workers = [(WORKER, index) for index in range(num_workers - 1)]
  return [(CHIEF, 0), *servers, *workers]


def on_this_machine(num_ps: int, num_workers: int) -> Job:
  """Returns a job on loopback, with ports that are free now.

  Raises:
    ValueError: there is no chief, or workers without a server, or no port is free.
  """
  roles = _roles(num_ps, num_workers)
  with contextlib.ExitStack() as stack:
    # All of them together, so that no two are the same.
    ports = [_take_port(stack) for _ in roles]
  return Job(tuple(Task(*role, f"{LOOPBACK}:{port}") for role, port in zip(roles, ports)))


def _take_port(stack: contextlib.ExitStack) -> int:
  """Returns a free port below the range of outgoing connections.

  An outgoing connection could take a port of that range while a process is restarted.
  """
  last = _DEFAULT_LAST_PORT
  with contextlib.suppress(OSError):
    kernel = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
    if int(kernel.split()[0]) > _FIRST_PORT + 1000:
      last = int(kernel.split()[0]) - 1
  for port in random.SystemRandom().sample(range(_FIRST_PORT, last + 1), last + 1 - _FIRST_PORT):
    listener = stack.enter_context(socket.socket())
    with contextlib.suppress(OSError):
      listener.bind((LOOPBACK, port))
      return port
  raise ValueError(f"no port from {_FIRST_PORT} to {last} is free")


def on_hosts(hosts: Sequence[str], num_ps: int, num_workers: int, port: int) -> Job:
  """Returns a job whose servers, and then its workers, are distributed over hosts.

  Args:
    hosts: "host" or "user@host", the chief's first.
    num_ps: parameter servers.
    num_workers: workers, the chief among them.
    port: the port of the first process of a host; the others use the next ones.

  Raises:
    ValueError: there is no host, a host is given twice, or the counts are invalid.
  """
  names = [host.rpartition("@")[2] for host in hosts]
  if not hosts or not all(names) or len(set(names)) != len(names):
    raise ValueError(f"hosts are {list(hosts)}, want one or more, each once")
  used = [0] * len(hosts)
  turn = {SERVER: 0, WORKER: 0}
  tasks = []
  for role, index in _roles(num_ps, num_workers):
    kind = SERVER if role == SERVER else WORKER
    place = turn[kind] % len(hosts)
    turn[kind] += 1
    tasks.append(Task(role, index, _address(names[place], port + used[place]), hosts[place]))
    used[place] += 1
  return Job(tuple(tasks))


def _address(host: str, port: int) -> str:
  if not 0 < port < 1 << 16:
    raise ValueError(f"{host} would listen at port {port}, want 1 to 65535: choose another --port")
  if ":" in host:
    try:
      host = f"[{ipaddress.IPv6Address(host)}]"
    except ValueError:
      raise ValueError(
        f"host {host!r} is neither a name nor an address: --port says where processes listen, and "
        "the port of ssh is a part of --ssh"
      ) from None
  return f"{host}:{port}"


def own_task(
  environment: Mapping[str, str], num_ps: int, num_workers: int, port: int
) -> tuple[Job, Task] | None:
  """Returns the job that Slurm or Kubernetes has started, and this process's task in it.

  Slurm's `srun` starts as many tasks as the job has processes. In Kubernetes, an Indexed Job has as
  many completions, and its pods find one another by the headless service that `MONOLITH_SERVICE`
  names.

  Returns:
    None if neither has started this process.

  Raises:
    ValueError: their settings contradict one another, or the number of processes.
  """
  roles = _roles(num_ps, num_workers)
  if "SLURM_PROCID" in environment and _number(environment, "SLURM_NTASKS", 1) > 1:
    number, hosts = _of_slurm(environment)
  elif "JOB_COMPLETION_INDEX" in environment:
    number, hosts = _of_kubernetes(environment, len(roles))
  else:
    return None
  if len(hosts) != len(roles) or not 0 <= number < len(roles):
    raise ValueError(
      f"this is process {number} of {len(hosts)}, but num_ps {num_ps} and num_workers "
      f"{num_workers} make {len(roles)}: start as many"
    )
  tasks = []
  for i, (role, host) in enumerate(zip(roles, hosts)):
    tasks.append(Task(*role, _address(host, port + hosts[:i].count(host))))
  job = Job(tuple(tasks))
  return job, job.tasks[number]


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
  text = environment.get(name, "" if default is None else str(default))
  if not text.isdecimal():
    raise ValueError(f"{name} is {text!r}, want a number")
  return int(text)


def _of_slurm(environment: Mapping[str, str]) -> tuple[int, list[str]]:
  """Returns this process's number, and the host of each process."""

  def first_of(*names: str) -> str:
    found = next((environment[name] for name in names if environment.get(name)), None)
    if found is None:
      raise ValueError(f"Slurm has set SLURM_PROCID, but none of {', '.join(names)}")
    return found

  nodes = expand_hosts(first_of("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))
  layout = environment.get("SLURM_DISTRIBUTION", "block")
  if layout.split(":")[0].split(",")[0] not in ("block", "*"):
    raise ValueError(f"SLURM_DISTRIBUTION is {layout!r}, want srun --distribution=block")
  text = first_of("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
  counts: list[int] = []
  for part in text.split(","):
    found = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part)
    if not found:
      raise ValueError(f"tasks of Slurm's nodes are {text!r}, want a list like '2(x3),1'")
    counts += [int(found[1])] * int(found[2] or 1)
  if len(counts) != len(nodes):
    raise ValueError(f"Slurm names {len(nodes)} nodes, and the tasks of {len(counts)}")
  hosts = [node for node, count in zip(nodes, counts) for _ in range(count)]
  return _number(environment, "SLURM_PROCID"), hosts


def expand_hosts(text: str) -> list[str]:
  """Returns the hosts of a list as Slurm writes it: "a[1-2,07],b" is a1, a2, a07, b.

  Raises:
    ValueError: it is not such a list.
  """
  hosts: list[str] = []
  rest = text
  while rest:
    found = re.match(r"([A-Za-z0-9._-]*)(?:\[([0-9,-]+)\])?([A-Za-z0-9._-]*)(?:,|$)", rest)
    if not found or not found[0].strip(","):
      raise ValueError(f"hosts of Slurm are {text!r}, want a list like 'node[01-03],login'")
    rest = rest[found.end() :]
    prefix, numbers, suffix = found.groups()
    for part in numbers.split(",") if numbers else [""]:
      if not numbers:
        hosts.append(prefix + suffix)
        continue
      limits = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
      if not limits:
        raise ValueError(f"hosts of Slurm are {text!r}, and {part!r} is no range")
      first, last = int(limits[1]), int(limits[2] or limits[1])
      if last - first >= _MAX_HOSTS:
        raise ValueError(f"hosts of Slurm are {text!r}: more than {_MAX_HOSTS}")
      # "01" stays two digits wide.
      hosts += [f"{prefix}{i:0{len(limits[1])}d}{suffix}" for i in range(first, last + 1)]
  return hosts


def _of_kubernetes(environment: Mapping[str, str], count: int) -> tuple[int, list[str]]:
  """Returns this pod's number, and the name of each pod."""
  number = _number(environment, "JOB_COMPLETION_INDEX")
  pod = environment.get("HOSTNAME", "")
  job, dash, index = pod.rpartition("-")
  if not dash or index != str(number):
    raise ValueError(
      f"HOSTNAME is {pod!r}, want the name of an Indexed Job's pod, which ends with -{number}"
    )
  service = environment.get("MONOLITH_SERVICE", "")
  if not service:
    raise ValueError(
      "MONOLITH_SERVICE is not set: pods of a Job find one another by a headless service, whose "
      "name is also their spec.subdomain"
    )
  return number, [f"{job}-{i}.{service}" for i in range(count)]
