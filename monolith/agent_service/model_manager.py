"""Copies new versions of a model from where they arrive to where a server reads them.

<source>/<name>@<version>/<name>/<sub model>/<version>     arrives
<source>/<name>@<version>.write.done                       is complete
<source>/<name>@<version>.read.lock                        is being read
<receive>/<name>/<sub model>/<version>                     is served
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import time

from absl import logging

from monolith.native_training.metric import cli

_INTERVAL_SECS = 30
_KEPT_VERSIONS = 5
_MAX_WAITING_SECS = 1200
_TEMPORARY = "-temp"


class ModelManager:
  """Looks for new versions every 30 seconds, and copies all sub models of one or none.

  Args:
    model_name: the model.
    source: the folder in which versions arrive.
    receive: the folder from which they are served.
    use_metrics: whether to emit the version.
    interval_secs: time between two looks.
    kept_versions: how many versions stay in `receive`.
    max_waiting_sec: how long `start` waits for the first version.
  """

  def __init__(
    self,
    model_name: str,
    source: str,
    receive: str,
    use_metrics: bool = True,
    interval_secs: float = _INTERVAL_SECS,
    kept_versions: int = _KEPT_VERSIONS,
    max_waiting_sec: float = _MAX_WAITING_SECS,
  ):
    self._model_name = model_name
    self._source = source
    self._receive = receive
    self._interval_secs = interval_secs
    self._kept_versions = kept_versions
    self._max_waiting_sec = max_waiting_sec
    self._metrics = cli.get_cli("monolith.model_manager") if use_metrics else None
    self._stopped = threading.Event()
    self._thread: threading.Thread | None = None

  @property
  def latest_version(self) -> int | None:
    """The newest version that is served, `None` before the first."""
    return max(self._received_versions(), default=None)

  def start(self) -> None:
    """Waits for the first version, then goes on in a thread.

    Raises:
      TimeoutError: none came in time.
    """
    self._remove_temporary()
    deadline = time.monotonic() + self._max_waiting_sec
    while not self._try_update() and self.latest_version is None:
      if time.monotonic() > deadline:
        raise TimeoutError(
          f"no version of {self._model_name} came to {self._source} in {self._max_waiting_sec} s"
        )
      if self._stopped.wait(min(1.0, self._interval_secs)):
        return
    self._thread = threading.Thread(target=self._run, name="model-manager", daemon=True)
    self._thread.start()

  def stop(self) -> None:
    self._stopped.set()
    if self._thread is not None:
      self._thread.join()
      self._thread = None

  def update(self) -> bool:
    """Takes the newest complete version if it is newer than all that are served.

    Returns:
      Whether there was one.

    Raises:
      OSError: it cannot be copied; nothing of it is served then.
    """
    version = max(self._arrived_versions(), default=None)
    latest = self.latest_version
    if version is None or (latest is not None and version <= latest):
      return False
    self._copy(version)
    self._remove_old()
    logging.info("%s has version %d", self._model_name, version)
    if self._metrics is not None:
      self._metrics.emit_store("version", version, {"model_name": self._model_name})
    return True

  def _run(self) -> None:
    while not self._stopped.wait(self._interval_secs):
      self._try_update()

  def _try_update(self) -> bool:
    try:
      return self.update()
    except OSError as error:
      logging.warning("Cannot take a new version of %s: %r", self._model_name, error)
      return False

  def _arrived_versions(self) -> list[int]:
    pattern = re.compile(rf"{re.escape(self._model_name)}@([0-9]+)\.write\.done")
    try:
      names = os.listdir(self._source)
    except FileNotFoundError:
      return []
    # As numbers: version 10 is newer than version 9.
    return [int(match[1]) for match in map(pattern.fullmatch, names) if match]

  def _received_versions(self) -> set[int]:
    """Returns the versions that all sub models have."""
    versions: set[int] | None = None
    for sub_model in self._sub_models(os.path.join(self._receive, self._model_name)):
      names = os.listdir(os.path.join(self._receive, self._model_name, sub_model))
      found = {int(name) for name in names if name.isascii() and name.isdigit()}
      versions = found if versions is None else versions & found
    return versions or set()

  def _copy(self, version: int) -> None:
    arrived = os.path.join(self._source, f"{self._model_name}@{version}")
    folder = os.path.join(arrived, self._model_name)
    lock = f"{arrived}.read.lock"
    moves = []
    with open(lock, "w", encoding="utf-8"):
      pass
    try:
      sub_models = self._sub_models(folder)
      if not sub_models:
        raise FileNotFoundError(f"{folder} has no sub model")
      for sub_model in sub_models:
        source = os.path.join(folder, sub_model, str(version))
        target = os.path.join(self._receive, self._model_name, sub_model, str(version))
        temporary = target + _TEMPORARY
        moves.append((temporary, target))
        shutil.rmtree(temporary, ignore_errors=True)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        shutil.copytree(source, temporary)
      self._move(moves)
    except BaseException:
      for temporary, _ in moves:
        shutil.rmtree(temporary, ignore_errors=True)
      raise
    finally:
      os.remove(lock)

  def _move(self, moves: list[tuple[str, str]]) -> None:
    done: list[str] = []
    try:
      for temporary, target in moves:
        # A torn version of an earlier attempt.
        shutil.rmtree(target, ignore_errors=True)
        os.rename(temporary, target)
        done.append(target)
    except BaseException:
      for target in done:
        shutil.rmtree(target, ignore_errors=True)
      raise

  def _remove_old(self) -> None:
    root = os.path.join(self._receive, self._model_name)
    kept = sorted(self._received_versions())[-self._kept_versions :]
    for sub_model in self._sub_models(root):
      for name in os.listdir(os.path.join(root, sub_model)):
        if name.isascii() and name.isdigit() and kept and int(name) < kept[0]:
          shutil.rmtree(os.path.join(root, sub_model, name), ignore_errors=True)

  def _remove_temporary(self) -> None:
    root = os.path.join(self._receive, self._model_name)
    for sub_model in self._sub_models(root):
      for name in os.listdir(os.path.join(root, sub_model)):
        if name.endswith(_TEMPORARY):
          shutil.rmtree(os.path.join(root, sub_model, name), ignore_errors=True)

  @staticmethod
  def _sub_models(folder: str) -> list[str]:
    if not os.path.isdir(folder):
      return []
    return sorted(n for n in os.listdir(folder) if os.path.isdir(os.path.join(folder, n)))
