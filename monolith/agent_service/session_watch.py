"""Doing something again whenever a ZooKeeper session was lost, and now and then."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from absl import logging
from kazoo.protocol.states import KazooState


class SessionWatch:
  """Calls a function after every lost session and at least every `interval_secs`.

  Listeners of a client must not block, so the function runs in a thread of its own. What it raises
  is logged and it is tried again: ZooKeeper may be away for long, and the thread never ends by it.

  Args:
    zk: the client.
    refresh: called with True after a lost session, with False for a round by time.
    name: name of the thread.
    interval_secs: time between rounds while nothing happens.
    retry_secs: time until a round that failed is tried again.
  """

  def __init__(
    self,
    zk: Any,
    refresh: Callable[[bool], None],
    name: str,
    interval_secs: float = 60,
    retry_secs: float = 10,
  ):
    self._zk = zk
    self._refresh = refresh
    self._name = name
    self._interval_secs = interval_secs
    self._retry_secs = retry_secs
    self._wake = threading.Event()
    self._lost = False
    self._stopped = False
    self._thread: threading.Thread | None = None
    self.failures = 0

  def start(self) -> None:
    self._stopped = False
    self._zk.add_listener(self._on_state)
    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
    self._thread.start()

  def stop(self) -> None:
    """Ends the thread; a round under way is given a second."""
    self._stopped = True
    self._wake.set()
    if hasattr(self._zk, "remove_listener"):
      self._zk.remove_listener(self._on_state)
    if self._thread is not None and self._thread is not threading.current_thread():
      # A call to a ZooKeeper that is away returns only when the client is stopped.
      self._thread.join(timeout=1)
    self._thread = None

  def _on_state(self, state: str) -> None:
    if state == KazooState.LOST:
      self._lost = True
    elif state == KazooState.CONNECTED and self._lost:
      self._wake.set()

  def _run(self) -> None:
    wait_secs = self._interval_secs
    while True:
      self._wake.wait(wait_secs)
      if self._stopped:
        return
      self._wake.clear()
      lost, self._lost = self._lost, False
      try:
        self._refresh(lost)
        wait_secs = self._interval_secs
      except Exception as error:
        # Whatever it is: the next round tries again.
        self.failures += 1
        self._lost = self._lost or lost
        wait_secs = self._retry_secs
        if not self._stopped:
          logging.warning("%s: %r, trying again in %s s", self._name, error, wait_secs)
