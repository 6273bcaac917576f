"""Measures how fresh serving is: from a user's action to the answer of every replica that shows it.

A *marked* user exists for one measurement. Before its action it is unknown, and scores exactly as
another unknown user does for the same item; the first answer in which the two differ reflects the
action, whatever else is trained meanwhile.
"""

from __future__ import annotations

import base64
import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import http.client
import json
import random
import threading
import time
from typing import Any

import numpy as np

from examples.realtime.generator import FIRST_MARKED_USER, EventSender, World
from examples.realtime.stages import Trace, parse_metrics

_POLL_SECS = 0.05
_REQUEST_SECS = 5.0
# A replica that stands still gets so much of a request's time before another one is asked.
_FIRST_TRY_SECS = 2.0
_AVOID_SECS = 1.0
# Users that never act.
_CONTROL_OFFSET = 1 << 41


class Client:
  """Asks one replica over REST.

  Args:
    locate: returns its `host:port`, asked at every request; `None` while it has none.
    model: name of the model.
  """

  def __init__(self, locate: Callable[[], str | None], model: str):
    self._locate = locate
    self._model = model
    self._address: str | None = None
    self._connection: http.client.HTTPConnection | None = None

  def scores(self, examples: Sequence[bytes], timeout_secs: float = _REQUEST_SECS) -> list[float]:
    """Returns the model's answer to serialized Examples.

    Raises:
      OSError: the replica cannot be reached, or answers with an error.
    """
    body = json.dumps({"instances": [{"b64": base64.b64encode(e).decode()} for e in examples]})
    answer = self._ask("POST", f"/v1/models/{self._model}:predict", body, timeout_secs)
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

  def _ask(
    self, method: str, path: str, body: str | None = None, timeout_secs: float = _REQUEST_SECS
  ) -> bytes:
    address = self._locate()
    if address != self._address:
      self.close()
    if address is None:
      raise ConnectionError("nobody says where the replica is")
    self._address = address
    try:
      if self._connection is None:
        self._connection = http.client.HTTPConnection(address)
      self._connection.timeout = timeout_secs
      if self._connection.sock is not None:
        self._connection.sock.settimeout(timeout_secs)
      self._connection.request(method, path, body, {"Content-Type": "application/json"})
      answer = self._connection.getresponse()
      content = answer.read()
    except (OSError, http.client.HTTPException) as error:
      self.close()
      raise ConnectionError(f"replica at {address}: {error!r}") from error
    if answer.status != 200:
      raise OSError(f"replica at {address} answers {answer.status}: {content[:500]!r}")
    return content

  def close(self) -> None:
    """Closes the connection."""
    if self._connection is not None:
      self._connection.close()
      self._connection = None


def _only(prediction: Any) -> Any:
  """Returns the number in a prediction, whose output may have a name and one more dimension."""
  while isinstance(prediction, (dict, list)):
    values = list(prediction.values()) if isinstance(prediction, dict) else prediction
    if len(values) != 1:
      raise OSError(f"a prediction has {len(values)} values, want one score")
    prediction = values[0]
  return prediction


@dataclasses.dataclass
class Probe:
  """One marked user.

  Attributes:
    user: its number.
    item: what it clicked on.
    request_id: the impression's request.
    event_time: when it clicked, in seconds since 1970.
    seen: replica -> seconds until its answer showed it.
    trace: when it passed which stage; `stages` fills it.
  """

  user: int
  item: int
  request_id: str
  event_time: float
  seen: dict[str, float] = dataclasses.field(default_factory=dict)
  trace: Trace = dataclasses.field(default_factory=Trace)

  @property
  def latency(self) -> float:
    """Seconds until all replicas that show it did so."""
    return max(self.seen.values(), default=0.0)


class FreshnessProber:
  """Sends marked users and waits for them in the answers of replicas.

  Args:
    servers: comma-separated `host:port` of brokers.
    world: makes the examples.
    clients: name -> client of each replica, used by nobody else.
    every_secs: time between two marked users.
  """

  def __init__(
    self,
    servers: str,
    world: World,
    clients: Mapping[str, Client],
    every_secs: float = 0.5,
  ):
    self._sender = EventSender(servers)
    self._world = world
    self._names = list(clients)
    self._every_secs = every_secs
    self._lock = threading.Lock()
    self._open: list[Probe] = []
    self._done: list[Probe] = []
    self._next_user = FIRST_MARKED_USER + random.SystemRandom().getrandbits(38)
    self._is_paused = threading.Event()
    self._stopping = threading.Event()
    self._threads = [threading.Thread(target=self._send, name="marked users", daemon=True)] + [
      threading.Thread(target=self._poll, args=(name, client), name=f"probe {name}", daemon=True)
      for name, client in clients.items()
    ]

  def start(self) -> None:
    """Begins to measure."""
    for thread in self._threads:
      thread.start()

  def pause(self) -> None:
    """Sends no more marked users; those on their way are still waited for."""
    self._is_paused.set()

  def stop(self) -> None:
    """Ends the measurement."""
    self._stopping.set()
    for thread in self._threads:
      thread.join()

  def done(self, since: float = 0, until: float = float("inf")) -> list[Probe]:
    """Returns the actions between two times that all replicas show."""
    with self._lock:
      return [p for p in self._done if since <= p.event_time < until]

  def latencies(self, since: float = 0, until: float = float("inf")) -> list[float]:
    """Returns, for each action between two times, the seconds until all replicas showed it."""
    return [probe.latency for probe in self.done(since, until)]

  def open(self) -> list[Probe]:
    """Returns the actions that some replica does not show yet."""
    with self._lock:
      return list(self._open)

  def newest_done(self) -> float:
    """Returns the newest event time that all replicas show, or 0."""
    with self._lock:
      return max((p.event_time for p in self._done), default=0.0)

  def _send(self) -> None:
    while not self._stopping.wait(self._every_secs):
      if self._is_paused.is_set():
        self._sender.poll()
        continue
      user, item = self._next_user, random.randrange(self._world.items)
      self._next_user += 1
      request_id = self._sender.impression(self._world, user, item)
      now = time.time()
      # Known before it is sent: it may be joined at once.
      with self._lock:
        self._open.append(Probe(user, item, request_id, now))
      self._sender.action(request_id, now)
      self._sender.poll()
    self._sender.flush()

  def _poll(self, name: str, client: Client) -> None:
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
        self._done += [p for p in self._open if len(p.seen) == len(self._names)]
        self._open = [p for p in self._open if len(p.seen) < len(self._names)]
    client.close()


class AucMeter:
  """Asks replicas about users whose taste is known, and keeps the AUC of the last minute.

  Args:
    world: who likes what.
    clients: name -> client, used by nobody else.
    every_secs: time between two rounds of questions.
  """

  def __init__(self, world: World, clients: Mapping[str, Client], every_secs: float = 2.0):
    self._world = world
    self._clients = dict(clients)
    self._every_secs = every_secs
    self._recent: dict[str, collections.deque[tuple[np.ndarray, np.ndarray]]] = {
      name: collections.deque(maxlen=int(60 / every_secs)) for name in clients
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
    find: returns `host:port` of replicas, asked at every request: those to ask in turn, and those
      to ask when all others have just failed.
    model: name of the model.
    rate: requests per second.

  Attributes:
    requests: how many were made.
    retried: how many needed a second replica.
    failed: how many had no answer from that, either.
    errors: why.
  """

  def __init__(
    self,
    world: World,
    find: Callable[[], tuple[Sequence[str], Sequence[str]]],
    model: str,
    rate: float = 20,
  ):
    self._world = world
    self._find = find
    self._model = model
    self._rate = rate
    self._clients: dict[str, Client] = {}
    # Address -> when it failed last.
    self._failed: dict[str, float] = {}
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
      turn += 1
      self.requests += 1
      example = self._world.example(turn % self._world.users, turn % self._world.items)
      reasons = []
      for timeout_secs in (_FIRST_TRY_SECS, _REQUEST_SECS):
        address = self._choose(turn)
        if address is None:
          reasons.append("no replica is known")
          continue
        client = self._clients.get(address)
        if client is None:
          client = self._clients[address] = Client(lambda a=address: a, self._model)  # type: ignore
        try:
          client.scores([example], timeout_secs)
          break
        except (OSError, ValueError) as error:
          self._failed[address] = time.monotonic()
          reasons.append(str(error)[:300])
      self.retried += bool(reasons)
      if len(reasons) == 2:
        self.failed += 1
        self.errors.append(" / ".join(reasons))

  def _choose(self, turn: int) -> str | None:
    """Returns the replica whose turn it is; those that failed just now come last."""
    registered, former = self._find()
    start = turn % max(1, len(registered))
    now = time.monotonic()
    ordered = [*registered[start:], *registered[:start], *former]
    # Stable: the others keep their turn. Among those that failed, the one that failed first.
    ordered.sort(key=lambda a: max(0.0, self._failed.get(a, -_AVOID_SECS) + _AVOID_SECS - now))
    return ordered[0] if ordered else None
