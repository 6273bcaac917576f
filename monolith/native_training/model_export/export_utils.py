"""Moves a part of an exported model into a graph of its own, served by another process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from monolith.native_training import distributed_serving_ops, nested_tensors
from monolith.native_training.graph import export_context

# Called through the module, so that tests can replace it.
remote_predict = distributed_serving_ops.remote_predict


def _key(name: str) -> str:
  """Returns a tensor's name as key of a signature."""
  return name.replace(":", "_")


class RemotePredictHelper:
  """A function of tensors as a signature of the default graph, and the call of it from elsewhere.

  Args:
    name: the signature's name.
    input_tensors: any structure of tensors, usually of another graph.
    remote_func: called here, with placeholders instead of the tensors.

  Raises:
    AssertionError: two inputs or two outputs have the same name.
  """

  def __init__(self, name: str, input_tensors: Any, remote_func: Callable[[Any], Any]):
    self._name = name
    self._input_tensors = input_tensors
    nested_inputs = nested_tensors.NestedTensors(input_tensors)
    tensors = nested_inputs.get_tensors()
    self._input_keys = _unique([_key(tensor.name) for tensor in tensors])
    placeholders = [
      tf.compat.v1.placeholder(tensor.dtype, tensor.shape, name=f"{key}_remote_input_ph")
      for key, tensor in zip(self._input_keys, tensors)
    ]
    outputs = remote_func(nested_inputs.get_nested_result(placeholders))
    self._nested_outputs = nested_tensors.NestedTensors(outputs)
    self._output_tensors = self._nested_outputs.get_tensors()
    self._output_keys = _unique([_key(tensor.name) for tensor in self._output_tensors])
    export_ctx = export_context.get_current_export_ctx()
    assert export_ctx is not None, "a remote call is exported outside of an export"
    export_ctx.add_signature(
      tf.compat.v1.get_default_graph(),
      name,
      dict(zip(self._input_keys, placeholders)),
      dict(zip(self._output_keys, self._output_tensors)),
    )

  def call_remote_predict(
    self,
    model_name: str,
    input_tensors: Any = None,
    old_model_name: str | None = None,
    task: int = 0,
  ) -> Any:
    """Calls the function from the default graph.

    Args:
      model_name: the name under which the other graph is served.
      input_tensors: tensors in the structure that the constructor got; those by default.
      old_model_name: a further name of that model.
      task: which server of it.

    Returns:
      What the function returned, with tensors of this graph.
    """
    if input_tensors is None:
      input_tensors = self._input_tensors
    tensors = nested_tensors.NestedTensors(input_tensors).get_tensors()
    if len(tensors) != len(self._input_keys):
      raise ValueError(f"{len(tensors)} input tensors, want {len(self._input_keys)}")
    results = remote_predict(
      self._input_keys,
      tensors,
      self._output_keys,
      model_name=model_name,
      task=task,
      old_model_name=old_model_name,
      output_types=[tensor.dtype for tensor in self._output_tensors],
      signature_name=self._name,
    )
    for result, tensor in zip(results, self._output_tensors):
      result.set_shape(tensor.shape)
    return self._nested_outputs.get_nested_result(list(results))


def _unique(keys: list[str]) -> list[str]:
  assert len(set(keys)) == len(keys), f"names collide: {sorted(keys)}"
  return keys
