"""Hosts in network namespaces, joined by a bridge, as if they were machines of a cluster."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import unittest
from collections.abc import Sequence


class NetworkHosts:
  """Some hosts with addresses of their own; the network of this machine stays as it is.

  Args:
    count: how many.

  Attributes:
    addresses: of the hosts.

  Raises:
    unittest.SkipTest: this process may not make namespaces, or has no `ip`.
  """

  def __init__(self, count: int) -> None:
    self._name = f"mono{random.SystemRandom().randrange(1 << 24):06x}"
    self._made: list[str] = []
    subnet = random.SystemRandom().randrange(256)
    self.addresses = [f"10.213.{subnet}.{i + 1}" for i in range(count)]
    try:
      self._make(count)
    except BaseException:
      self.close()
      raise

  def _make(self, count: int) -> None:
    if os.getuid() != 0 or shutil.which("ip") is None:
      raise unittest.SkipTest("network namespaces need root and iproute2")
    switch = f"{self._name}s"
    try:
      self._ip("netns", "add", switch)
    except subprocess.CalledProcessError as e:
      raise unittest.SkipTest(f"no network namespaces here: {e.stderr}") from e
    self._made.append(switch)
    self._ip("-n", switch, "link", "add", "bridge", "type", "bridge")
    self._ip("-n", switch, "link", "set", "bridge", "up")
    for i in range(count):
      host = f"{self._name}{i}"
      self._ip("netns", "add", host)
      self._made.append(host)
      self._ip(
        "-n", host, "link", "add", "net", "type", "veth", "peer", f"host{i}", "netns", switch
      )
      self._ip("-n", switch, "link", "set", f"host{i}", "master", "bridge", "up")
      self._ip("-n", host, "address", "add", f"{self.addresses[i]}/24", "dev", "net")
      for link in ("lo", "net"):
        self._ip("-n", host, "link", "set", link, "up")

  def _ip(self, *arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)

  def prefix(self, host: int) -> Sequence[str]:
    """Returns what has to stand before a command that is to run on a host."""
    return ["ip", "netns", "exec", f"{self._name}{host}"]

  def close(self) -> None:
    """Removes the hosts; their processes must have ended."""
    for name in self._made:
      subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
