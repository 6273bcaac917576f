"""The models of a server and the life of their versions.

    START -> LOADING -> AVAILABLE -> UNLOADING -> END
                 \\-> END with an error, until it is tried again

A version that follows a log of changes is LOADING until it has caught up with it; its status says
how far it is, and why it cannot go on.
A version that is no longer wanted is unloaded when a wanted one is AVAILABLE and none is being
loaded, so a model that answers goes on answering. Requests hold the version that they use; it is
closed after the last one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent import futures

import grpc
from absl import logging
from tensorflow_serving.apis import get_model_status_pb2, model_pb2

from monolith.serving import version_scan
from monolith.serving.errors import ServingError, from_exception
from monolith.serving.model_config import ModelConfig
from monolith.serving.servable import Follower, Servable

State = get_model_status_pb2.ModelVersionStatus.State
START, LOADING, AVAILABLE = State.START, State.LOADING, State.AVAILABLE
UNLOADING, END = State.UNLOADING, State.END

# How many ended versions a status tells of: a server that lives for months sees thousands.
_MAX_ENDED = 16


class _Version:
  """One version of a model; what is in it changes under the manager's lock."""

  def __init__(self, number: int, path: str):
    self.number = number
    self.path = path
    self.state = START
    self.error: ServingError | None = None
    self.servable: Servable | None = None
    # Loaded, and not yet to be asked.
    self.catching_up: Servable | None = None
    # Why it is not as new as it should be.
    self.note = ""
    self.in_flight = 0
    self.attempts = 0
    self.retry_at = 0.0
    self.failed_files: tuple = ()


class _Model:
  """What is wanted of a model, and what there is."""

  def __init__(self, config: ModelConfig):
    self.config = config
    self.removed = False
    # Whether the log says that there is nothing in its folder.
    self.empty = False
    self.wanted: dict[int, str] = {}
    self.versions: dict[int, _Version] = {}
    # Refused labels of a new configuration do not take the place of these.
    self.labels: dict[str, int] = {}

  def in_state(self, *states: int) -> list[_Version]:
    return [version for version in self.versions.values() if version.state in states]


class Lease:
  """A version in use: a context manager that holds it until the request is answered."""

  def __init__(self, manager: ModelManager, name: str, version: _Version):
    self._manager = manager
    self._version = version
    self.name = name
    self.number = version.number
    self.servable: Servable = version.servable  # type: ignore[assignment]

  def __enter__(self) -> Lease:
    return self

  def __exit__(self, *_: object) -> None:
    self._manager._release(self._version)


class ModelManager:
  """Loads, switches and unloads versions. Thread-safe.

  Args:
    load: makes a servable of a folder, warm-up included; raises what it wants.
    max_load_retries: how often a version that failed is tried again.
    retry_secs: how long after.
    load_threads: how many versions load at a time.
    unload_threads: how many are closed at a time.
    allow_labels_for_unavailable: whether a label may name a version that does not answer.
  """

  def __init__(
    self,
    load: Callable[[str], Servable],
    max_load_retries: int = 5,
    retry_secs: float = 60,
    load_threads: int = 1,
    unload_threads: int = 1,
    allow_labels_for_unavailable: bool = False,
  ):
    self._load = load
    self._max_load_retries = max_load_retries
    self._retry_secs = retry_secs
    self._allow_labels_for_unavailable = allow_labels_for_unavailable
    self._changed = threading.Condition(threading.RLock())
    self._models: dict[str, _Model] = {}
    self._loaders = futures.ThreadPoolExecutor(max(1, load_threads), "load")
    self._unloaders = futures.ThreadPoolExecutor(max(1, unload_threads), "unload")
    # One configuration after the other, one scan after the other.
    self._config_lock = threading.Lock()
    self._scan_lock = threading.Lock()
    self._closed = False
    self._listeners: list[Callable[[dict[str, bool]], None]] = []

  def add_listener(self, listener: Callable[[dict[str, bool]], None]) -> None:
    """Has `listener` told of `availability` now and after every change; it must not wait."""
    with self._changed:
      self._listeners.append(listener)
      listener(self.availability())

  # ---- what is wanted ----

  def set_models(self, configs: Mapping[str, ModelConfig]) -> None:
    """Replaces the configuration; returns at once, before new models are loaded."""
    with self._changed:
      for name, model in self._models.items():
        if name not in configs:
          model.removed = True
          model.wanted = {}
          self._reconcile(name, model)
      for name, config in configs.items():
        model = self._models.setdefault(name, _Model(config))
        model.config = config
        model.removed = False
    self.poll()

  def reload(self, configs: Mapping[str, ModelConfig], timeout_secs: float) -> None:
    """Replaces the configuration and waits for it.

    Raises:
      ServingError: a model has no version that answers, a label names one that does not, or time is
        up. The configuration holds nevertheless, but for the labels of that model.
    """
    with self._config_lock:
      self.set_models(configs)
      if not self.wait_until_settled(configs, timeout_secs):
        raise ServingError(
          grpc.StatusCode.DEADLINE_EXCEEDED, f"models still load after {timeout_secs:.0f} s"
        )
      errors = []
      with self._changed:
        for name in configs:
          model = self._models.get(name)
          if model is not None and not model.in_state(AVAILABLE):
            errors.append(str(self._why_unavailable(name, model)))
        errors += self._set_labels()
    if errors:
      raise ServingError(grpc.StatusCode.FAILED_PRECONDITION, "; ".join(errors))

  def poll(self) -> None:
    """Looks into the folders of all models, and starts what is to be done."""
    with self._scan_lock:
      with self._changed:
        if self._closed:
          return
        models = [(name, model) for name, model in self._models.items() if not model.removed]
      for name, model in models:
        config = model.config
        found = version_scan.list_versions(config.base_path)
        if bool(found) == model.empty:
          model.empty = not found
          if not found:
            logging.warning(
              "No versions of model %r under base path %s: it is missing, or no folder in it is "
              "called by a number",
              name,
              config.base_path,
            )
        wanted = version_scan.select_versions(config.model_version_policy, found)
        files = {number: version_scan.fingerprint(path) for number, path in wanted.items()}
        with self._changed:
          if model.removed or model.config is not config:
            continue
          # A folder that vanished, or cannot be read now, is no reason to stop answering.
          if wanted:
            model.wanted = wanted
          for number in model.wanted:
            version = model.versions.get(number)
            if version is not None and version.error and number in files:
              if version.failed_files != files[number]:
                version.attempts, version.retry_at = 0, 0.0
                version.failed_files = files[number]
          self._reconcile(name, model)
      with self._changed:
        self._set_labels()

  # ---- what there is ----

  def lease(self, spec: model_pb2.ModelSpec) -> Lease:
    """Returns the version that a request names, to be used in a `with` statement.

    Raises:
      ServingError: NOT_FOUND, there is no such model, version or label; FAILED_PRECONDITION, it
        does not answer now.
    """
    with self._changed:
      model = self._models.get(spec.name)
      if model is None or (model.removed and not model.in_state(AVAILABLE)):
        raise ServingError(
          grpc.StatusCode.NOT_FOUND, f"Servable not found for request: Latest({spec.name})"
        )
      choice = spec.WhichOneof("version_choice")
      if choice is None:
        available = model.in_state(AVAILABLE)
        if not available:
          raise self._why_unavailable(spec.name, model)
        version = max(available, key=lambda v: v.number)
      else:
        number = self._chosen_number(spec, model)
        found = model.versions.get(number)
        if found is None or (found.state in (UNLOADING, END) and not found.error):
          raise ServingError(
            grpc.StatusCode.NOT_FOUND,
            f"Servable not found for request: Specific({spec.name}, {number})",
          )
        if found.state != AVAILABLE:
          raise self._why_unavailable(spec.name, model, found)
        version = found
      version.in_flight += 1
      return Lease(self, spec.name, version)

  def status(self, spec: model_pb2.ModelSpec) -> list[get_model_status_pb2.ModelVersionStatus]:
    """Returns the states of a model's versions, newest first; of one, if the request names it.

    Raises:
      ServingError: NOT_FOUND, there is no such model, version or label.
    """
    with self._changed:
      model = self._models.get(spec.name)
      if model is None or not model.versions:
        raise ServingError(
          grpc.StatusCode.NOT_FOUND, f"Could not find any versions of model {spec.name}"
        )
      numbers = sorted(model.versions, reverse=True)
      if spec.WhichOneof("version_choice") is not None:
        number = self._chosen_number(spec, model)
        if number not in model.versions:
          raise ServingError(
            grpc.StatusCode.NOT_FOUND, f"Could not find version {number} of model {spec.name}"
          )
        numbers = [number]
      return [_to_status(model.versions[number]) for number in numbers]

  def knows(self, name: str) -> bool:
    """Whether a model of that name is configured."""
    with self._changed:
      return name in self._models and not self._models[name].removed

  def availability(self) -> dict[str, bool]:
    """Returns for each configured model whether it answers."""
    with self._changed:
      return {
        name: bool(model.in_state(AVAILABLE))
        for name, model in self._models.items()
        if not model.removed
      }

  def states(self) -> list[tuple[str, int, str]]:
    """Returns (model, version, name of the state) of all versions that have not ended well."""
    with self._changed:
      return [
        (name, version.number, State.Name(version.state))
        for name, model in self._models.items()
        for version in model.versions.values()
        if version.state != END or version.error
      ]

  def followers(self) -> list[tuple[str, Follower]]:
    """Returns for each model that follows a log what its newest loaded version does."""
    found: list[tuple[str, Follower]] = []
    with self._changed:
      for name, model in self._models.items():
        loaded = [v for v in model.in_state(AVAILABLE) if v.servable]
        loaded = loaded or [v for v in model.in_state(LOADING) if v.catching_up]
        if loaded:
          newest = max(loaded, key=lambda version: version.number)
          servable = newest.servable or newest.catching_up
          if servable is not None and servable.follower is not None:
            found.append((name, servable.follower))
    return found

  def wait_until_settled(self, names: Mapping[str, object], timeout_secs: float) -> bool:
    """Returns whether, within that time, no version of these models is left to be loaded."""

    def loads(model: _Model) -> bool:
      # One that is wanted again is loaded as soon as it is unloaded.
      again = any(version.number in model.wanted for version in model.in_state(UNLOADING))
      return again or bool(model.in_state(START, LOADING))

    def settled() -> bool:
      return self._closed or not any(
        loads(self._models[name]) for name in names if name in self._models
      )

    with self._changed:
      return self._changed.wait_for(settled, timeout_secs)

  def close(self) -> None:
    """Unloads everything, after the requests that are under way."""
    with self._changed:
      self._closed = True
      for name, model in self._models.items():
        model.removed, model.wanted = True, {}
        self._reconcile(name, model)
      self._changed.notify_all()
    self._loaders.shutdown(wait=True)
    with self._changed:
      for name, model in self._models.items():
        self._reconcile(name, model)  # what was loading until now
    self._unloaders.shutdown(wait=True)

  # ---- transitions, under the lock ----

  def _reconcile(self, name: str, model: _Model) -> None:
    now = time.monotonic()
    for number, path in model.wanted.items():
      version = model.versions.get(number)
      if version is None or (version.state == END and not version.error):
        model.versions[number] = version = _Version(number, path)
        self._loaders.submit(self._load_version, name, model, version)
      elif version.error and version.retry_at <= now:
        if version.attempts <= self._max_load_retries or version.path != path:
          version.state, version.error, version.path = START, None, path
          self._loaders.submit(self._load_version, name, model, version)
    wanted = [version for n, version in model.versions.items() if n in model.wanted]
    settled = not any(version.state in (START, LOADING) for version in wanted)
    answers = any(version.state == AVAILABLE for version in wanted)
    for version in model.in_state(LOADING):
      if version.catching_up and version.number not in model.wanted:
        version.servable, version.catching_up = version.catching_up, None
        version.state, version.note = UNLOADING, ""
        self._unloaders.submit(self._unload_version, name, model, version)
    for version in model.in_state(AVAILABLE):
      if version.number not in model.wanted and (model.removed or (settled and answers)):
        version.state, version.note = UNLOADING, ""
        self._unloaders.submit(self._unload_version, name, model, version)
    self._forget_ended(model)
    self._notify()

  def _load_version(self, name: str, model: _Model, version: _Version) -> None:
    with self._changed:
      if version.number not in model.wanted:  # changed while it waited
        version.state = END
        self._notify()
        return
      version.state = LOADING
      version.attempts += 1
    servable, error = None, None
    files = version_scan.fingerprint(version.path)
    logging.info("Loading version %d of model %s from %s", version.number, name, version.path)
    try:
      servable = self._load(version.path)
    except Exception as e:  # A file can make TensorFlow raise anything; the server goes on.
      error = from_exception(e)
      logging.error(
        "Cannot load version %d of model %s from %s: %s", version.number, name, version.path, error
      )
    with self._changed:
      if servable is not None and servable.follower is not None:
        version.catching_up = servable
        servable.follower.start(lambda: self._note_progress(name, model, version))
      elif servable is not None:
        self._set_available(name, version, servable)
      else:
        version.error, version.state = error, END
        version.retry_at = time.monotonic() + self._retry_secs
        version.failed_files = files
        if version.attempts <= self._max_load_retries:
          self._retry_later(name, model)
      if not self._closed:
        self._reconcile(name, model)
      self._notify()

  def _retry_later(self, name: str, model: _Model) -> None:
    """Tries again what failed, also where nobody looks for new versions."""

    def retry() -> None:
      with self._changed:
        if not self._closed:
          self._reconcile(name, model)

    timer = threading.Timer(self._retry_secs, retry)
    timer.daemon = True
    timer.start()

  def _set_available(self, name: str, version: _Version, servable: Servable) -> None:
    version.servable, version.state = servable, AVAILABLE
    self._set_labels()
    logging.info("Version %d of model %s is available", version.number, name)

  def _note_progress(self, name: str, model: _Model, version: _Version) -> None:
    """Is called by the follower of a version, from its thread."""
    with self._changed:
      servable = version.catching_up or version.servable
      if version.state not in (LOADING, AVAILABLE) or not servable or not servable.follower:
        return
      version.note = servable.follower.reason
      if version.catching_up is not None and servable.follower.is_caught_up:
        version.catching_up = None
        self._set_available(name, version, servable)
        if not self._closed:
          self._reconcile(name, model)
      self._notify()

  def _unload_version(self, name: str, model: _Model, version: _Version) -> None:
    with self._changed:
      self._changed.wait_for(lambda: version.in_flight == 0)
      servable, version.servable = version.servable, None
    if servable is not None:
      servable.close()
    logging.info("Version %d of model %s is unloaded", version.number, name)
    with self._changed:
      version.state = END
      if not self._closed:
        self._reconcile(name, model)  # It may be wanted again.
      self._notify()

  def _release(self, version: _Version) -> None:
    with self._changed:
      version.in_flight -= 1
      if version.in_flight == 0 and version.state == UNLOADING:
        self._changed.notify_all()

  def _notify(self) -> None:
    self._changed.notify_all()
    available = self.availability()
    for listener in self._listeners:
      listener(available)

  def _forget_ended(self, model: _Model) -> None:
    ended = [v.number for v in model.in_state(END) if v.number not in model.wanted]
    for number in sorted(ended)[: max(0, len(ended) - _MAX_ENDED)]:
      del model.versions[number]

  def _set_labels(self) -> list[str]:
    """Takes the labels of the configurations over; returns why some could not be."""
    errors = []
    for name, model in self._models.items():
      if model.removed:
        continue
      labels = dict(model.config.version_labels)
      unavailable = {
        label: number
        for label, number in labels.items()
        if number not in {version.number for version in model.in_state(AVAILABLE)}
      }
      if unavailable and not self._allow_labels_for_unavailable:
        errors.append(f"labels {unavailable} of model {name} name versions that are not available")
      else:
        model.labels = labels
    return errors

  def _chosen_number(self, spec: model_pb2.ModelSpec, model: _Model) -> int:
    if spec.WhichOneof("version_choice") == "version":
      return spec.version.value
    if spec.version_label not in model.labels:
      raise ServingError(
        grpc.StatusCode.NOT_FOUND, f"Model {spec.name} has no version labelled {spec.version_label}"
      )
    return model.labels[spec.version_label]

  def _why_unavailable(
    self, name: str, model: _Model, version: _Version | None = None
  ) -> ServingError:
    versions = [version] if version else sorted(model.versions.values(), key=lambda v: -v.number)
    told = [
      f"version {v.number} is {State.Name(v.state)}"
      + (f" ({v.error or v.note})" if v.error or v.note else "")
      for v in versions[:3]
    ]
    reason = "; ".join(told) or f"there is no version in {model.config.base_path}"
    return ServingError(
      grpc.StatusCode.FAILED_PRECONDITION, f"Model {name} is not available: {reason}"
    )


def _to_status(version: _Version) -> get_model_status_pb2.ModelVersionStatus:
  status = get_model_status_pb2.ModelVersionStatus(version=version.number, state=version.state)
  if version.error:
    status.status.error_code = version.error.code.value[0]
    status.status.error_message = str(version.error)
  elif version.note:
    status.status.error_code = grpc.StatusCode.UNAVAILABLE.value[0]
    status.status.error_message = version.note
  else:
    status.status.error_code = 0
  return status
