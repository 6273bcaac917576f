"""Discovery through files, for processes of one machine or with a common file system."""

from __future__ import annotations

import os

from absl import logging

from monolith.native_training import service_discovery


class HostServiceDiscovery(service_discovery.ServiceDiscovery):
  """Discovery through files `<base>/<name>/<index>` that hold addresses.

  Args:
    base_path: a folder that all processes see.
  """

  def __init__(self, base_path: str):
    self._base_path = base_path

  def register(self, name: str, index: int, addr: str) -> None:
    folder = os.path.join(self._base_path, name)
    os.makedirs(folder, exist_ok=True)
    # Readers must never see half an address.
    temporary = os.path.join(self._base_path, f"{name}_{index}_{os.getpid()}")
    with open(temporary, "w") as f:
      f.write(addr)
    os.replace(temporary, os.path.join(folder, str(index)))
    logging.info("%s %d is at %s", name, index, addr)

  def deregister(self, name: str, index: int, addr: str) -> None:
    os.remove(os.path.join(self._base_path, name, str(index)))

  def query(self, name: str) -> dict[int, str]:
    folder = os.path.join(self._base_path, name)
    addrs = {}
    if os.path.isdir(folder):
      for index in os.listdir(folder):
        with open(os.path.join(folder, index)) as f:
          addrs[int(index)] = f.read()
    return addrs
