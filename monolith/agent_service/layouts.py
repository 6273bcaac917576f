"""Reads and writes which models a group of serving processes shall serve.

/<bzid>/saved_models/<model>/<sub graph>     where a sub graph is, and which versions to serve
/<bzid>/layouts/<layout>/<model>:<sub graph> the layout has it
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

from absl import logging

from monolith.agent_service import expressions, names, zk_nodes
from monolith.agent_service.bindings import SavedModel
from monolith.agent_service.json_node import JsonNode


@dataclasses.dataclass
class SavedModelDeployConfig(JsonNode):
  """Says how to serve a sub graph.

  Attributes:
    model_base_path: the folder of its versions.
    version_policy: as for `gen_model_config`.
  """

  model_base_path: str | None = None
  version_policy: str | None = None


Layout = list[tuple[SavedModel, SavedModelDeployConfig]]


class LayoutWatch:
  """Tells a function what a layout says, at first and whenever that changes.

  Args:
    zk: a started client.
    bzid: business the models belong to.
    path: the layout's node.
    callback: called with the whole layout. What it raises is logged, and it is called again later.
  """

  def __init__(self, zk: Any, bzid: str, path: str, callback: Callable[[Layout], None]):
    self._zk = zk
    self._bzid = bzid
    self._path = path
    self._callback = callback
    self._lock = threading.RLock()
    self._last: Layout | None = None
    self._generation = 0

  def watch(self) -> None:
    """Starts to follow, or starts again after a lost session."""
    with self._lock:
      self._generation += 1
      generation = self._generation

    def on_children(children: list[str]) -> bool | None:
      if generation != self._generation:
        return False
      try:
        self._tell(children)
      except Exception:  # A watch whose function raises is dropped.
        logging.exception("Cannot follow layout %s, trying again later", self._path)
      return None

    self._zk.ensure_path(self._path)
    self._zk.ChildrenWatch(self._path, on_children)

  def refresh(self, lost: bool) -> None:
    """Reads the layout again."""
    if lost:
      self.watch()
    self._tell(zk_nodes.read_children(self._zk, self._path))

  def _tell(self, children: Sequence[str]) -> None:
    layout: Layout = []
    for child in sorted(children):
      model_name, colon, sub_graph = child.rpartition(":")
      if not colon:
        logging.error("Layout %s has %r, want <model>:<sub graph>", self._path, child)
        continue
      saved_model = SavedModel(model_name, sub_graph)
      config = read_deploy_config(self._zk, self._bzid, saved_model)
      if config is None:
        logging.error("Layout %s has %s, which nobody declared", self._path, saved_model)
        continue
      layout.append((saved_model, config))
    with self._lock:
      if layout != self._last:
        self._callback(layout)
        self._last = layout


def saved_model_path(bzid: str, saved_model: SavedModel) -> str:
  return f"/{bzid}/saved_models/{saved_model.model_name}/{saved_model.sub_graph}"


def read_deploy_config(
  zk: Any, bzid: str, saved_model: SavedModel
) -> SavedModelDeployConfig | None:
  """Returns how a sub graph was declared, `None` if it was not, or makes no sense."""
  data = zk_nodes.read_node(zk, saved_model_path(bzid, saved_model))
  if not data:
    return None
  try:
    return SavedModelDeployConfig.deserialize(data)
  except (ValueError, TypeError) as error:
    logging.error("Ignoring the declaration of %s: %r", saved_model, error)
    return None


class LayoutFilter:
  """Decides which sub graphs of a layout a process serves.

  A filter is `<match>;<condition>`: `ps_{i};i % ${shard_num} == ${shard_id}`. Its condition is
  computed for names that match as a whole; one filter that holds accepts, no filters accept all.

  Args:
    filters: the filters.
    shard_id: the value of `${shard_id}`.
    shard_num: the value of `${shard_num}`.

  Raises:
    ValueError: a filter has no condition, or its match is no pattern.
  """

  def __init__(self, filters: Sequence[str] | None, shard_id: int, shard_num: int):
    self._filters = []
    for text in filters or ():
      match, semicolon, condition = text.partition(";")
      if not semicolon or not condition.strip():
        raise ValueError(f"layout filter is {text!r}, want <match>;<condition>")
      for name, value in (("shard_id", shard_id), ("shard_num", shard_num)):
        condition = condition.replace(f"${{{name}}}", f"({value})")
      regex = re.compile(names.normalize_regex(match.strip()))
      # A condition that cannot be computed is found now, not when the layout changes.
      expressions.evaluate(condition, dict.fromkeys(regex.groupindex, 1))
      self._filters.append((regex, condition))

  def accepts(self, sub_graph: str) -> bool:
    if not self._filters:
      return True
    for regex, condition in self._filters:
      match = regex.fullmatch(sub_graph)
      if match is None:
        continue
      groups = {name: int(text) for name, text in match.groupdict().items() if text is not None}
      try:
        if expressions.evaluate(condition, groups):
          return True
      except ValueError as error:
        logging.error("Layout filter for %s: %s", sub_graph, error)
    return False
