"""A SavedModel in a session of its own, and calls of its signatures."""

from __future__ import annotations

import os
from collections.abc import Mapping

import grpc
import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import meta_graph_pb2
from tensorflow.python.saved_model import loader_impl

# Loads the ops of exported models, and gives them a way to call other servers.
from monolith.native_training.serving import transport  # noqa: F401
from monolith.serving.errors import ServingError, from_exception, invalid

DEFAULT_SIGNATURE = tf.compat.v1.saved_model.signature_constants.DEFAULT_SERVING_SIGNATURE_DEF_KEY
_GRAPH_FILES = ("saved_model.pb", "saved_model.pbtxt")


class Signature:
  """One signature of a loaded model.

  Args:
    name: its name.
    definition: the signature in the SavedModel or in the metadata of a server.
  """

  def __init__(self, name: str, definition: meta_graph_pb2.SignatureDef):
    self.name = name
    self.inputs = {key: definition.inputs[key] for key in sorted(definition.inputs)}
    self.outputs = {key: definition.outputs[key] for key in sorted(definition.outputs)}

  def dtype(self, key: str) -> tf.DType:
    """Returns the type of an input."""
    return tf.dtypes.as_dtype(self.inputs[key].dtype)

  def check_inputs(self, inputs: Mapping[str, np.ndarray]) -> None:
    """Compares a request's arrays with what the signature wants.

    Raises:
      ServingError: INVALID_ARGUMENT, inputs are missing, unknown, or of another type or shape.
    """
    self.check_names(inputs)
    for key, array in inputs.items():
      have, want = tf.dtypes.as_dtype(array.dtype), self.dtype(key)
      if have != want:
        raise invalid(f"input {key!r} of signature {self.name!r} is {have.name}, want {want.name}")
      shape = tf.TensorShape(self.inputs[key].tensor_shape)
      if not shape.is_compatible_with(array.shape):
        raise invalid(
          f"input {key!r} of signature {self.name!r} has shape {list(array.shape)}, want {shape}"
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


class Servable:
  """A SavedModel in a session of its own.

  Args:
    path: folder of the SavedModel.

  Attributes:
    path: folder of the SavedModel.
    session: holds its variables and tables.
    signatures: by name.

  Raises:
    ServingError: the folder holds no model that can be loaded; the message names it.
  """

  def __init__(self, path: str):
    self.path = path
    if not any(tf.io.gfile.exists(os.path.join(path, name)) for name in _GRAPH_FILES):
      raise ServingError(
        grpc.StatusCode.NOT_FOUND, f"{path} is not a SavedModel: it has no {_GRAPH_FILES[0]}"
      )
    graph = tf.Graph()
    self.session = tf.compat.v1.Session(graph=graph)
    try:
      with graph.as_default():
        meta_graph = loader_impl.SavedModelLoader(path).load(self.session, ["serve"])
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

  def run(self, signature: Signature, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Runs a signature of this model; returns array by name of the output.

    Raises:
      ServingError: the inputs do not fit the signature, or the graph failed.
    """
    signature.check_inputs(inputs)
    feeds = {info.name: inputs[key] for key, info in signature.inputs.items()}
    try:
      return self.session.run({key: info.name for key, info in signature.outputs.items()}, feeds)
    except Exception as error:
      raise from_exception(error) from error

  def close(self) -> None:
    """Frees the session with its variables and tables."""
    self.session.close()

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
