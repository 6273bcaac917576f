"""A SavedModel in a session of its own, and calls of its signatures."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import grpc
import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, meta_graph_pb2
from tensorflow.python.saved_model import loader_impl

# Loads the ops of exported models, and gives them a way to call other servers.
from monolith.native_training.serving import transport  # noqa: F401
from monolith.serving.errors import ServingError, from_exception, invalid

DEFAULT_SIGNATURE = tf.compat.v1.saved_model.signature_constants.DEFAULT_SERVING_SIGNATURE_DEF_KEY
_GRAPH_FILES = ("saved_model.pb", "saved_model.pbtxt")
# Signatures times choices of outputs: more than any client needs, few enough to keep.
_MAX_CALLABLES = 256


class Signature:
  """One signature of a loaded model.

  Args:
    name: its name.
    definition: what the model says about it.
  """

  def __init__(self, name: str, definition: meta_graph_pb2.SignatureDef):
    self.name = name
    self.definition = definition
    # Sorted, so that arrays can be passed by position.
    self.inputs = {key: definition.inputs[key] for key in sorted(definition.inputs)}
    self.outputs = {key: definition.outputs[key] for key in sorted(definition.outputs)}
    self._dtypes = {key: tf.dtypes.as_dtype(info.dtype) for key, info in self.inputs.items()}
    # Plain tuples: comparing TensorShapes would cost a fifth of a small request's time.
    self._numpy_dtypes = {key: np.dtype(d.as_numpy_dtype) for key, d in self._dtypes.items()}
    self._dims = {
      key: None
      if info.tensor_shape.unknown_rank
      else tuple(dim.size for dim in info.tensor_shape.dim)
      for key, info in self.inputs.items()
    }

  def dtype(self, key: str) -> tf.DType:
    """Returns the type of an input."""
    return self._dtypes[key]

  def check_inputs(self, inputs: Mapping[str, np.ndarray]) -> None:
    """Compares a request's arrays with what the signature wants.

    Raises:
      ServingError: INVALID_ARGUMENT, inputs are missing, unknown, or of another type or shape.
    """
    self.check_names(inputs)
    for key, array in inputs.items():
      if array.dtype != self._numpy_dtypes[key]:
        have = tf.string if array.dtype == object else tf.dtypes.as_dtype(array.dtype)
        raise invalid(
          f"input {key!r} of signature {self.name!r} is {have.name}, want {self._dtypes[key].name}"
        )
      dims = self._dims[key]
      if dims is not None and (
        len(dims) != array.ndim
        or any(want not in (-1, have) for want, have in zip(dims, array.shape))
      ):
        raise invalid(
          f"input {key!r} of signature {self.name!r} has shape {list(array.shape)}, want "
          f"{list(dims)}"
        )

  def check_names(self, names: Mapping[str, object]) -> None:
    """Raises INVALID_ARGUMENT unless exactly the signature's inputs are named."""
    missing = sorted(set(self.inputs) - set(names))
    surplus = sorted(set(names) - set(self.inputs))
    if missing or surplus:
      raise invalid(
        f"signature {self.name!r} takes {sorted(self.inputs)}: missing {missing}, "
        f"surplus {surplus[:16]}"
      )

  def select_outputs(self, wanted: Sequence[str]) -> tuple[str, ...]:
    """Returns the outputs to compute: those wanted, all if none are named.

    Raises:
      ServingError: INVALID_ARGUMENT, one is unknown or named twice.
    """
    if not wanted:
      return tuple(self.outputs)
    unknown = sorted(set(wanted) - set(self.outputs))
    if unknown or len(set(wanted)) != len(wanted):
      raise invalid(
        f"output_filter is {list(wanted)[:16]}, want different ones of {sorted(self.outputs)}, the "
        f"outputs of signature {self.name!r}"
      )
    return tuple(sorted(wanted))


class FollowerSample(NamedTuple):
  """One figure of a follower, for metrics.

  Attributes:
    name: the metric's name; without `_total` for a counter.
    meaning: one sentence.
    shard: which part of the log it is about.
    value: the figure.
    is_counter: whether it only grows.
  """

  name: str
  meaning: str
  shard: int
  value: float
  is_counter: bool = False


class Follower(Protocol):
  """Keeps a loaded model as new as the training that it comes from."""

  @property
  def is_caught_up(self) -> bool:
    """Whether the model may answer."""

  @property
  def reason(self) -> str:
    """Why it is not caught up, or cannot go on; empty while all is well."""

  def start(self, on_change: Callable[[], None]) -> None:
    """Begins; `on_change` is called when one of the above has changed."""

  def samples(self) -> Sequence[FollowerSample]:
    """Returns what metrics tell."""

  def close(self) -> None:
    """Ends it; the model is not changed any more."""


class RunGate:
  """Lets many threads run a model, or one change it while none does."""

  def __init__(self) -> None:
    self._changed = threading.Condition()
    self._running = 0
    self._writers = 0

  def __enter__(self) -> None:
    with self._changed:
      # A writer that waits goes first: requests never stop coming.
      while self._writers:
        self._changed.wait()
      self._running += 1

  def __exit__(self, *_: object) -> None:
    with self._changed:
      self._running -= 1
      if self._writers and not self._running:
        self._changed.notify_all()

  @contextlib.contextmanager
  def closed(self) -> Iterator[None]:
    """Waits for runs that are under way, and lets none begin meanwhile."""
    with self._changed:
      self._writers += 1
      try:
        self._changed.wait_for(lambda: not self._running)
        yield
      finally:
        self._writers -= 1
        self._changed.notify_all()


class Servable:
  """A loaded model. Calls are thread-safe; `close` only when none is under way.

  Args:
    path: folder of the SavedModel.
    tags: which of its graphs.
    session_config: threads and devices of its session.
    remote_timeout_ms: limit of the model's calls of other servers; None: what the export says.

  Attributes:
    path: folder of the SavedModel.
    session: holds its variables and tables.
    follower: what keeps them new; None for a model that stays as it was exported.

  Raises:
    ServingError: the folder holds no model that can be loaded; the message names it.
  """

  def __init__(
    self,
    path: str,
    tags: Sequence[str] = ("serve",),
    session_config: object | None = None,
    remote_timeout_ms: int | None = None,
  ):
    self.path = path
    if not any(tf.io.gfile.exists(os.path.join(path, name)) for name in _GRAPH_FILES):
      raise ServingError(
        grpc.StatusCode.NOT_FOUND, f"{path} is not a SavedModel: it has no {_GRAPH_FILES[0]}"
      )
    graph = tf.Graph()
    self.session = tf.compat.v1.Session(graph=graph, config=session_config)
    self.follower: Follower | None = None
    self._gate: RunGate | None = None
    self._lock = threading.Lock()
    self._callables: dict[tuple[str, tuple[str, ...]], Callable] = {}
    try:
      with graph.as_default():
        loader = loader_impl.SavedModelLoader(path)
        if remote_timeout_ms is not None:
          _set_remote_timeout(loader.get_meta_graph_def_from_tags(list(tags)), remote_timeout_ms)
        meta_graph = loader.load(self.session, list(tags))
      self.signatures = {
        name: Signature(name, definition)
        for name, definition in meta_graph.signature_def.items()
        if not name.startswith("__saved_model")  # what TensorFlow keeps for itself
      }
      self._check_tensors(graph)
    except Exception as error:  # Whatever a torn or foreign file makes TensorFlow say.
      self.session.close()
      reason = from_exception(error)
      code = reason.code
      if code == grpc.StatusCode.INTERNAL:  # an exception without a code of its own
        code = grpc.StatusCode.DATA_LOSS
      raise ServingError(code, f"cannot load {path}: {reason}") from error

  def signature(self, name: str) -> Signature:
    """Returns the signature of that name, the default one for an empty name.

    Raises:
      ServingError: INVALID_ARGUMENT, there is none.
    """
    found = self.signatures.get(name or DEFAULT_SIGNATURE)
    if found is None:
      raise invalid(
        f"the model has no signature {(name or DEFAULT_SIGNATURE)!r}, only "
        f"{sorted(self.signatures)}"
      )
    return found

  def run(
    self, signature: Signature, inputs: Mapping[str, np.ndarray], outputs: tuple[str, ...]
  ) -> dict[str, np.ndarray]:
    """Runs a signature once.

    Args:
      signature: one of this model.
      inputs: array by name; `signature.check_inputs` passed.
      outputs: names, sorted, as `signature.select_outputs` returns them.

    Returns:
      Array by name of the output.

    Raises:
      tf.errors.OpError: the graph failed.
    """
    call = self._callables.get((signature.name, outputs)) or self._make(signature, outputs)
    arguments = [inputs[key] for key in signature.inputs]
    if self._gate is None:
      return dict(zip(outputs, call(*arguments)))
    with self._gate:
      return dict(zip(outputs, call(*arguments)))

  def make_gate(self) -> RunGate:
    """Returns what every run passes through from now on; to be called before the first one."""
    if self._gate is None:
      self._gate = RunGate()
    return self._gate

  def close(self) -> None:
    """Frees the session with its variables and tables."""
    if self.follower is not None:
      self.follower.close()
    self._callables.clear()
    self.session.close()

  def _make(self, signature: Signature, outputs: tuple[str, ...]) -> Callable:
    options = config_pb2.CallableOptions(
      feed=[info.name for info in signature.inputs.values()],
      fetch=[signature.outputs[key].name for key in outputs],
    )
    with self._lock:
      # Half the cost of `Session.run`, which looks every tensor up by name again.
      call = self.session._make_callable_from_options(options)
      if len(self._callables) >= _MAX_CALLABLES:
        self._callables.pop(next(iter(self._callables)))
      self._callables[signature.name, outputs] = call
    return call

  def _check_tensors(self, graph: tf.Graph) -> None:
    """Raises ValueError or KeyError if a signature names what the graph does not have."""
    for signature in self.signatures.values():
      for infos in (signature.inputs, signature.outputs):
        for key, info in infos.items():
          if info.WhichOneof("encoding") != "name":
            raise ValueError(
              f"{key!r} of signature {signature.name!r} is not a plain tensor, which clients could "
              "send or read"
            )
          graph.get_tensor_by_name(info.name)


def _set_remote_timeout(meta_graph: meta_graph_pb2.MetaGraphDef, timeout_ms: int) -> None:
  """Changes how long a graph waits for other servers, which an export cannot know."""
  graph = meta_graph.graph_def
  for nodes in (graph.node, *(function.node_def for function in graph.library.function)):
    for node in nodes:
      if node.op == "TfServingRemotePredict":
        node.attr["max_rpc_deadline_millis"].i = timeout_ms
