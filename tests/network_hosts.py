"""Hosts in network namespaces, as if they were machines of a cluster.

A bridge joins them, or, where frames are to come late or to be lost, a process of this module: few
kernels have `netem`.
"""

from __future__ import annotations

import collections
import contextlib
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import unittest
from collections.abc import Sequence

# Constants of <linux/if_packet.h>. Frames come and go with what the kernel has left to do in them,
# so the forwarder needs neither to compute checksums nor to cut what is longer than a frame.
_SOL_PACKET, _PACKET_VNET_HDR = 263, 15
_VNET_HEADER_BYTES = 10
_ETH_P_ALL = 3
_LONGEST_FRAME = 1 << 17
_BUFFER_BYTES = 1 << 24


class NetworkHosts:
  """Some hosts with addresses of their own; the network of this machine stays as it is.

  Args:
    count: how many.
    delay_seconds: how long a frame takes from one to another.
    loss: which share of the frames does not arrive.

  Attributes:
    addresses: of the hosts.

  Raises:
    unittest.SkipTest: this process may not make namespaces, or has no `ip`.
  """

  def __init__(self, count: int, delay_seconds: float = 0, loss: float = 0) -> None:
    self._name = f"mono{random.SystemRandom().randrange(1 << 24):06x}"
    self._switch = f"{self._name}s"
    self._made: list[str] = []
    self._forwarder: subprocess.Popen[bytes] | None = None
    subnet = random.SystemRandom().randrange(256)
    self.addresses = [f"10.213.{subnet}.{i + 1}" for i in range(count)]
    try:
      self._make(count, has_bridge=not delay_seconds and not loss)
      if delay_seconds or loss:
        self._start_forwarder(count, delay_seconds, loss)
    except BaseException:
      self.close()
      raise

  def _make(self, count: int, has_bridge: bool) -> None:
    if os.getuid() != 0 or shutil.which("ip") is None:
      raise unittest.SkipTest("network namespaces need root and iproute2")
    switch = self._switch
    try:
      self._ip("netns", "add", switch)
    except subprocess.CalledProcessError as e:
      raise unittest.SkipTest(f"no network namespaces here: {e.stderr}") from e
    self._made.append(switch)
    if has_bridge:
      self._ip("-n", switch, "link", "add", "bridge", "type", "bridge")
      self._ip("-n", switch, "link", "set", "bridge", "up")
    for i in range(count):
      host = f"{self._name}{i}"
      self._ip("netns", "add", host)
      self._made.append(host)
      self._ip(
        "-n", host, "link", "add", "net", "type", "veth", "peer", f"host{i}", "netns", switch
      )
      if has_bridge:
        self.join(i)
      self._ip("-n", switch, "link", "set", f"host{i}", "up")
      self._ip("-n", host, "address", "add", f"{self.addresses[i]}/24", "dev", "net")
      for link in ("lo", "net"):
        self._ip("-n", host, "link", "set", link, "up")

  def _start_forwarder(self, count: int, delay_seconds: float, loss: float) -> None:
    links = [f"host{i}" for i in range(count)]
    self._forwarder = subprocess.Popen(
      ["ip", "netns", "exec", self._switch, sys.executable, __file__]
      + [str(delay_seconds), str(loss), *links],
      stdout=subprocess.PIPE,
    )
    assert self._forwarder.stdout is not None
    if self._forwarder.stdout.readline() != b"ready\n":
      raise RuntimeError("the forwarder of frames has ended")

  def _ip(self, *arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)

  def prefix(self, host: int) -> Sequence[str]:
    """Returns what has to stand before a command that is to run on a host."""
    return ["ip", "netns", "exec", f"{self._name}{host}"]

  def cut(self, host: int) -> None:
    """Takes a host off the bridge: what it sends and what is sent to it is lost without a word."""
    self._ip("-n", self._switch, "link", "set", f"host{host}", "nomaster")

  def join(self, host: int) -> None:
    """Brings a host to the bridge."""
    self._ip("-n", self._switch, "link", "set", f"host{host}", "master", "bridge")

  def close(self) -> None:
    """Removes the hosts, and ends what still runs on them, as on one that was cut off."""
    if self._forwarder is not None:
      self._forwarder.kill()
      self._forwarder.communicate()
    for name in self._made:
      found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
      for pid in found.stdout.split():
        with contextlib.suppress(ProcessLookupError):
          os.kill(int(pid), signal.SIGKILL)
      subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def forward(links: Sequence[str], delay_seconds: float, loss: float) -> None:
  """Passes frames between links, late, and not all of them, until the process is killed."""
  sockets: list[socket.socket] = []
  for link in links:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    for buffer in (socket.SO_RCVBUF, socket.SO_SNDBUF):
      port.setsockopt(socket.SOL_SOCKET, buffer, _BUFFER_BYTES)
    port.setblocking(False)
    port.bind((link, _ETH_P_ALL))
    sockets.append(port)
  print("ready", flush=True)
  choice = random.Random(0)
  places: dict[bytes, socket.socket] = {}
  waiting: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()
  while True:
    timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
    for port in select.select(sockets, [], [], timeout)[0]:
      frame, (_, _, kind, *_) = port.recvfrom(_LONGEST_FRAME)
      if kind == socket.PACKET_OUTGOING:
        continue
      target, source = frame[_VNET_HEADER_BYTES:][:6], frame[_VNET_HEADER_BYTES:][6:12]
      places[source] = port
      if choice.random() < loss:
        continue
      when = time.monotonic() + delay_seconds
      found = places.get(target)
      for other in sockets if found is None else [found]:
        if other is not port:
          waiting.append((when, other, frame))
    while waiting and waiting[0][0] <= time.monotonic():
      _, port, frame = waiting.popleft()
      try:
        port.send(frame)
      except BlockingIOError:
        pass  # lost, as in a full queue


if __name__ == "__main__":
  forward(sys.argv[3:], float(sys.argv[1]), float(sys.argv[2]))
