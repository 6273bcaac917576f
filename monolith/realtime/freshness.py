"""Measures how fresh serving is: from a user's action to the answer of every replica that shows it.

A *marked* user exists for one measurement. Before its action it is unknown, and scores exactly as
another unknown user does for the same item; the first answer in which the two differ reflects the
action, whatever else is trained meanwhile.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import http.client
import json
import random
import threading
import time
from collections.abc import Sequence

import numpy as np

from monolith.realtime.generator import FIRST_MARKED_USER, EventSender, World

_POLL_SECS = 0.05
_REQUEST_SECS = 5.0
_LOST_SECS = 60.0
# Users that never act.
_CONTROL_OFFSET = 1 << 41


class Client:
  """Asks one replica over REST.

  Args:
    port: its REST port on loopback.
    model: name of the model.
  """

  def __init__(self, port: int, model: str):
    self._port = port
    self._model = model
    self._connection: http.client.HTTPConnection | None = None

  def scores(self, examples: Sequence[bytes]) -> list[float]:
    """Returns the model's answer to serialized Examples.

    Raises:
      OSError: the replica cannot be reached, or answers with an error.
    """
    body = json.dumps({"instances": [{"b64": base64.b64encode(e).decode()} for e in examples]})
    answer = self._ask("POST", f"/v1/models/{self._model}:predict", body)
    predictions = json.loads(answer)["predictions"]
    return [float(_only(p)) for p in predictions]

  def is_available(self) -> bool:
    """Returns whether a version of the model is served."""
    try:
      states = json.loads(self._ask("GET", f"/v1/models/{self._model}"))["model_version_status"]
    except (OSError, ValueError, KeyError):
      return False
    return any(state.get("state") == "AVAILABLE" for state in states)

  def metrics(self) -> dict[str, float]:
    """Returns the newest value of each metric by name and labels; none if it cannot be reached."""
    try:
      return parse_metrics(self._ask("GET", "/monitoring/prometheus/metrics").decode())
    except OSError:
      return {}

  def _ask(self, method: str, path: str, body: str | None = None) -> bytes:
    try:
      if self._connection is None:
        self._connection = http.client.HTTPConnection(
          "127.0.0.1", self._port, timeout=_REQUEST_SECS
        )
      self._connection.request(method, path, body, {"Content-Type": "application/json"})
      answer = self._connection.getresponse()
      content = answer.read()
    except (OSError, http.client.HTTPException) as error:
      self.close()
      raise ConnectionError(f"replica on port {self._port}: {error}") from error
    if answer.status != 200:
      raise OSError(f"replica on port {self._port} answers {answer.status}: {content[:500]!r}")
    return content

  def close(self) -> None:
    """Closes the connection."""
    if self._connection is not None:
      self._connection.close()
      self._connection = None


def _only(prediction: object) -> object:
  """Returns the number in a prediction, whose output may have a name and one more dimension."""
  while isinstance(prediction, (dict, list)):
    values = list(prediction.values()) if isinstance(prediction, dict) else prediction
    if len(values) != 1:
      raise OSError(f"a prediction has {len(values)} values, want one score")
    prediction = values[0]
  return prediction


def parse_metrics(text: str) -> dict[str, float]:
  """Returns `name{labels} -> value` of a page of Prometheus."""
  found = {}
  for line in text.splitlines():
    name, space, value = line.rpartition(" ")
    if space and not line.startswith("#"):
      try:
        found[name] = float(value)
      except ValueError:
        continue
  return found


@dataclasses.dataclass
class Probe:
  """One marked user.

  Attributes:
    user: its number.
    item: what it clicked on.
    event_time: when, in seconds since 1970.
    seen: replica -> seconds until its answer showed it.
  """

  user: int
  item: int
  event_time: float
  seen: dict[str, float] = dataclasses.field(default_factory=dict)


class FreshnessProber:
  """Sends marked users and waits for them in the answers of replicas.

  Args:
    servers: comma-separated `host:port` of brokers.
    world: makes the examples.
    replicas: name -> (REST port, model).
    every_secs: time between two marked users.
  """

  def __init__(
    self,
    servers: str,
    world: World,
    replicas: dict[str, tuple[int, str]],
    every_secs: float = 0.5,
  ):
    self._sender = EventSender(servers)
    self._world = world
    self._names = list(replicas)
    self._every_secs = every_secs
    self._lock = threading.Lock()
    self._open: list[Probe] = []
    self._done: list[Probe] = []
    self._lost: list[Probe] = []
    self._next_user = FIRST_MARKED_USER + random.SystemRandom().getrandbits(38)
    self._stopping = threading.Event()
    self._threads = [threading.Thread(target=self._send, name="marked users", daemon=True)] + [
      threading.Thread(target=self._poll, args=(name, *where), name=f"probe {name}", daemon=True)
      for name, where in replicas.items()
    ]

  def start(self) -> None:
    """Begins to measure."""
    for thread in self._threads:
      thread.start()

  def stop(self) -> None:
    """Ends the measurement."""
    self._stopping.set()
    for thread in self._threads:
      thread.join()

  def latencies(self, since: float = 0, until: float = float("inf")) -> list[float]:
    """Returns, for each action between two times, the seconds until all replicas showed it."""
    with self._lock:
      return [max(p.seen.values()) for p in self._done if since <= p.event_time < until]

  def num_lost(self) -> int:
    """Returns how many actions were not seen everywhere within a minute."""
    with self._lock:
      return len(self._lost)

  def newest_done(self) -> float:
    """Returns the newest event time that all replicas show, or 0."""
    with self._lock:
      return max((p.event_time for p in self._done), default=0.0)

  def _send(self) -> None:
    while not self._stopping.wait(self._every_secs):
      user, item = self._next_user, random.randrange(self._world.items)
      self._next_user += 1
      request_id = self._sender.impression(self._world, user, item)
      now = time.time()
      self._sender.action(request_id, now)
      self._sender.poll()
      with self._lock:
        self._open.append(Probe(user, item, now))

  def _poll(self, name: str, port: int, model: str) -> None:
    client = Client(port, model)
    while not self._stopping.wait(_POLL_SECS):
      with self._lock:
        waiting = [p for p in self._open if name not in p.seen]
      if not waiting:
        continue
      examples = [
        self._world.example(user, p.item)
        for p in waiting
        for user in (p.user, p.user + _CONTROL_OFFSET)
      ]
      try:
        scores = client.scores(examples)
      except (OSError, ValueError):
        continue
      now = time.time()
      with self._lock:
        for i, probe in enumerate(waiting):
          if scores[2 * i] != scores[2 * i + 1]:
            probe.seen[name] = now - probe.event_time
        self._sort_out(now)
    client.close()

  def _sort_out(self, now: float) -> None:
    still_open = []
    for probe in self._open:
      if len(probe.seen) == len(self._names):
        self._done.append(probe)
      elif now - probe.event_time > _LOST_SECS:
        self._lost.append(probe)
      else:
        still_open.append(probe)
    self._open = still_open


class AucMeter:
  """Asks replicas about users whose taste is known, and keeps the AUC of the last minute.

  Args:
    world: who likes what.
    groups: name -> (REST port, model).
    every_secs: time between two rounds of questions.
  """

  def __init__(self, world: World, groups: dict[str, tuple[int, str]], every_secs: float = 2.0):
    self._world = world
    self._clients = {name: Client(*where) for name, where in groups.items()}
    self._every_secs = every_secs
    self._recent: dict[str, collections.deque[tuple[np.ndarray, np.ndarray]]] = {
      name: collections.deque(maxlen=int(60 / every_secs)) for name in groups
    }
    self._stopping = threading.Event()
    self._thread = threading.Thread(target=self._run, name="auc", daemon=True)

  def start(self) -> None:
    """Begins to ask."""
    self._thread.start()

  def stop(self) -> None:
    """Ends asking."""
    self._stopping.set()
    self._thread.join()

  def auc(self) -> dict[str, float]:
    """Returns the AUC of the last minute by name; none where there was no answer."""
    result = {}
    for name, rounds in self._recent.items():
      if rounds:
        labels, scores = (np.concatenate(parts) for parts in zip(*list(rounds)))
        result[name] = compute_auc(labels, scores)
    return result

  def _run(self) -> None:
    draw = random.Random(0)
    while not self._stopping.wait(self._every_secs):
      now = time.time()
      pairs = []
      for _ in range(64):
        user, item = draw.randrange(self._world.users), draw.randrange(self._world.items)
        if draw.random() < 0.5:
          item = item - item % self._world.genres + self._world.taste(user, now)
        pairs.append((user, item))
      labels = np.array(
        [draw.random() < self._world.click_probability(u, i, now) for u, i in pairs], float
      )
      examples = [self._world.example(u, i) for u, i in pairs]
      for name, client in self._clients.items():
        try:
          self._recent[name].append((labels, np.array(client.scores(examples))))
        except (OSError, ValueError):
          continue


def compute_auc(labels: np.ndarray, scores: np.ndarray) -> float:
  """Returns the share of pairs of a positive and a negative that are in order; ties count half."""
  positive = labels > 0.5
  num_positive, num_negative = int(positive.sum()), int((~positive).sum())
  if not num_positive or not num_negative:
    return float("nan")
  _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
  ranks = (np.cumsum(counts) - (counts - 1) / 2.0)[inverse]
  wins = ranks[positive].sum() - num_positive * (num_positive + 1) / 2
  return float(wins / (num_positive * num_negative))


class RequestLoad:
  """Asks replicas in turn, as a front end would: a request that fails is tried once more elsewhere.

  Args:
    world: makes the examples.
    ports: REST ports of the replicas.
    model: name of the model.
    rate: requests per second.

  Attributes:
    requests: how many were made.
    retried: how many needed a second replica.
    failed: how many had no answer from that, either.
  """

  def __init__(self, world: World, ports: Sequence[int], model: str, rate: float = 20):
    self._world = world
    self._clients = [Client(port, model) for port in ports]
    self._rate = rate
    self.requests = self.retried = self.failed = 0
    self.errors: list[str] = []
    self._stopping = threading.Event()
    self._thread = threading.Thread(target=self._run, name="requests", daemon=True)

  def start(self) -> None:
    """Begins to ask."""
    self._thread.start()

  def stop(self) -> None:
    """Ends asking."""
    self._stopping.set()
    self._thread.join()

  def _run(self) -> None:
    turn = 0
    while not self._stopping.wait(1 / self._rate):
      example = self._world.example(turn % self._world.users, turn % self._world.items)
      turn += 1
      self.requests += 1
      for attempt in range(2):
        client = self._clients[(turn + attempt) % len(self._clients)]
        try:
          client.scores([example])
          break
        except (OSError, ValueError) as error:
          if attempt == 0:
            self.retried += 1
          else:
            self.failed += 1
            self.errors.append(str(error)[:300])
