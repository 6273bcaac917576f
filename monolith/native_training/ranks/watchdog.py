"""Notices that a rank of synchronous training is gone, and ends the others.

A rank whose peer dies in the middle of an exchange may wait forever: the library that carries out
the exchange gives up, but does not tell the step that waits for it. So the ranks also keep plain
connections, all to rank 0, which say nothing. When one breaks and training does not end by itself
soon after, the process is ended.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from absl import logging

from monolith.native_training import hvd_lib, yarn_runtime

# How long training that lost a rank may take to end by itself.
GRACE_SECS = 15.0

_CONNECT_SECS = 60.0
# A machine that is switched off says nothing: noticed after 6 * 5 seconds, and up to 10 more. One
# that is away for twenty is not lost.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6}
_BYE = b"bye"
_ADDRESS_BYTES = 64


class Watchdog:
  """Watches the other ranks from `start` to `stop`.

  Args:
    describe: returns what to tell the operator besides which rank is gone.
    grace_secs: how long training may take to end by itself.
  """

  def __init__(self, describe: Callable[[], str] = lambda: "", grace_secs: float = GRACE_SECS):
    self._describe = describe
    self._grace_secs = grace_secs
    self._rank = hvd_lib.rank()
    self._size = hvd_lib.size()
    # By rank of the peer: all of them on rank 0, only rank 0 on the others.
    self._peers: dict[int, socket.socket] = {}
    self._stopped = threading.Event()
    self._lost: int | None = None
    self._has_lost = threading.Event()
    self._wake_reader, self._wake_writer = socket.socketpair()
    self._thread: threading.Thread | None = None

  @property
  def lost_rank(self) -> int | None:
    """The rank that is gone, as far as this rank knows."""
    return self._lost

  def start(self) -> None:
    """Connects the ranks, which all call it at the same point.

    Raises:
      OSError: a rank cannot be reached.
    """
    if self._size == 1:
      return
    if self._rank == 0:
      self._accept()
    else:
      self._connect()
    for peer in self._peers.values():
      _keep_alive(peer)
    self._thread = threading.Thread(target=self._watch, name="sync_watchdog", daemon=True)
    self._thread.start()

  def stop(self, has_failed: bool = False) -> None:
    """Ends the watch.

    Args:
      has_failed: let the others end too. Otherwise this rank says goodbye first, and that it leaves
        is no error.
    """
    self._stopped.set()
    for peer in self._peers.values():
      try:
        if not has_failed:
          peer.sendall(_BYE)
      except OSError:
        pass
    self._wake_writer.send(b"x")
    if self._thread is not None:
      self._thread.join()
    for peer in [*self._peers.values(), self._wake_reader, self._wake_writer]:
      peer.close()

  def wait_until_lost(self, timeout: float) -> None:
    """Waits until a rank is known to be gone, but not longer than `timeout` seconds."""
    if self._size > 1:
      self._has_lost.wait(timeout)

  def message(self) -> str:
    """Returns which rank is gone and what to do."""
    return (
      f"Rank {self._rank} lost rank {self._lost}: its process ended, or its machine cannot be "
      f"reached. {self._describe()}"
    ).strip()

  def _accept(self) -> None:
    is_local = hvd_lib.local_size() == self._size
    host = "127.0.0.1" if is_local else yarn_runtime.get_local_host()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as server:
      server.bind((host if is_local else "", 0))
      server.listen(self._size)
      server.settimeout(_CONNECT_SECS)
      _share_address(f"{server.getsockname()[1]} {host}")
      while len(self._peers) < self._size - 1:
        peer, _ = server.accept()
        peer.settimeout(_CONNECT_SECS)
        self._peers[int.from_bytes(peer.recv(4, socket.MSG_WAITALL), "little")] = peer

  def _connect(self) -> None:
    port, host = _share_address("").split(" ")
    peer = socket.create_connection((host, int(port)), timeout=_CONNECT_SECS)
    peer.sendall(self._rank.to_bytes(4, "little"))
    self._peers[0] = peer

  def _watch(self) -> None:
    watched = dict(self._peers)
    while watched and not self._stopped.is_set():
      ready, _, _ = select.select([self._wake_reader, *watched.values()], [], [])
      for rank, peer in list(watched.items()):
        if peer in ready:
          del watched[rank]
          if not _said_bye(peer) and not self._stopped.is_set():
            self._end(rank)
            return

  def _end(self, rank: int) -> None:
    self._lost = rank
    self._has_lost.set()
    logging.error(self.message())
    # On rank 0 this tells the others.
    for peer in self._peers.values():
      try:
        peer.shutdown(socket.SHUT_RDWR)
      except OSError:
        pass
    if not self._stopped.wait(self._grace_secs):
      # The training thread waits inside an op that will never finish; no exception reaches it.
      print(self.message(), file=sys.stderr, flush=True)
      logging.flush()
      os._exit(1)


def _share_address(address: str) -> str:
  """Returns the address that rank 0 gives."""
  encoded = np.zeros(_ADDRESS_BYTES, np.uint8)
  raw = np.frombuffer(address.encode(), np.uint8)
  encoded[: len(raw)] = raw
  with tf.Graph().as_default(), tf.device("/device:CPU:0"):
    shared = hvd_lib.broadcast(tf.constant(encoded), 0, name="monolith_watchdog_address")
    with tf.compat.v1.Session() as session:
      return bytes(session.run(shared)).rstrip(b"\0").decode()


def _keep_alive(peer: socket.socket) -> None:
  peer.settimeout(None)
  peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
  for name, value in _KEEPALIVE.items():
    if hasattr(socket, name):
      peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _said_bye(peer: socket.socket) -> bool:
  try:
    return peer.recv(len(_BYE), socket.MSG_WAITALL) == _BYE
  except OSError:
    return False
