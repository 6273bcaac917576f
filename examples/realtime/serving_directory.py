"""Tells clients where the replicas of a model are, from what agents say in ZooKeeper."""

from __future__ import annotations

import threading
import time

from monolith.agent_service.backends import SavedModel, ZKBackend

# A replica that is gone from ZooKeeper may only have lost its session, as all of them do when
# ZooKeeper was away: so long it is worth a try.
_REMEMBER_SECS = 60.0


class ServingDirectory:
  """Knows the REST addresses of the replicas of one model, also while ZooKeeper is away.

  Args:
    bzid: business the model belongs to.
    zk_servers: comma-joined addresses of ZooKeeper.
    model: the model.
  """

  def __init__(self, bzid: str, zk_servers: str, model: str):
    self._backend = ZKBackend(bzid, zk_servers)
    self._model = model
    self._lock = threading.Lock()
    # Sub graph -> replica -> (address, when it was last there).
    self._seen: dict[str, dict[str, tuple[str, float]]] = {}

  def start(self) -> None:
    """Connects, and follows the model from now on.

    Raises:
      kazoo.handlers.threading.KazooTimeoutError: no ZooKeeper answers.
    """
    self._backend.subscribe_model(self._model)
    self._backend.start()

  def stop(self) -> None:
    """Leaves ZooKeeper."""
    self._backend.stop()

  def registered(self, sub_graph: str) -> dict[str, str]:
    """Returns replica -> `host:port` of those that say now that they serve a sub graph."""
    services = self._backend.get_services(SavedModel(self._model, sub_graph))
    return {
      container.ctx_id: info.http for container, info in services.items() if info.http is not None
    }

  def find(self, sub_graph: str) -> tuple[dict[str, str], dict[str, str]]:
    """Returns replica -> `host:port`: those that are registered, and those that were just now."""
    now = time.monotonic()
    registered = self.registered(sub_graph)
    with self._lock:
      seen = self._seen.setdefault(sub_graph, {})
      seen.update({name: (address, now) for name, address in registered.items()})
      former = {
        name: address
        for name, (address, when) in seen.items()
        if name not in registered and now - when < _REMEMBER_SECS
      }
    return registered, former
