"""Names what a SavedModel takes, for Keras models with ragged or sparse inputs.

Keras names the inputs of `serving_default` after the model's, but not if one of them is ragged or
sparse: `args_0`, `args_0_1` and so on say neither which input nor which part of it is meant. With
tables in the model they are called:

    input             parts
    dense  "film"     film
    ragged "history"  history, all its values; history_row_splits, where each example begins
    sparse "tags"     tags, its values; tags_indices; tags_dense_shape

so a request over REST is `{"inputs": {"film": ["tea"], "history": [7, 9], "history_row_splits": [0,
2]}}`. Deeper ragged inputs have history_row_splits_1 and so on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from monolith.keras import table as tables


def name_inputs(trace: Callable[..., Any]) -> Callable[..., Any]:
  """Returns Keras's `trace_model_call`, with names for all parts of ragged and sparse inputs.

  Args:
    trace: Keras's function from a model to the concrete function that it exports.
  """

  @functools.wraps(trace)
  def traced(model: tf.keras.Model, input_signature: Any = None) -> Any:
    function = trace(model, input_signature)
    (inputs, *others), keywords = function.structured_input_signature
    has_tables = any(tables.table_of(weight) is not None for weight in model.weights)
    is_plain = all(isinstance(spec, tf.TensorSpec) for spec in tf.nest.flatten(inputs))
    if not has_tables or is_plain or others or keywords or input_signature is not None:
      return function
    return _with_names(function, inputs, _input_names(model, inputs))

  return traced


def _input_names(model: tf.keras.Model, inputs: Any) -> list[str]:
  """Returns the names of a model's inputs, in the order in which TensorFlow flattens them."""
  names = getattr(model, "input_names", None)
  if names:
    return list(names)
  if isinstance(inputs, Mapping) and not any(tf.nest.is_nested(spec) for spec in inputs.values()):
    return sorted(inputs)
  return [f"input_{i + 1}" for i in range(len(tf.nest.flatten(inputs)))]


def _with_names(function: Any, inputs: Any, names: list[str]) -> Any:
  """Returns a function of named tensors that calls one of `inputs`."""
  arguments = {}
  for name, spec in zip(names, tf.nest.flatten(inputs)):
    parts = tf.nest.flatten(spec, expand_composites=True)
    for part_name, part in zip(_part_names(name, spec), parts):
      arguments[part_name] = tf.TensorSpec(part.shape, part.dtype, part_name)

  @tf.function
  def serve(**components: tf.Tensor) -> Any:
    parts = [components[name] for name in arguments]
    return function(tf.nest.pack_sequence_as(inputs, parts, expand_composites=True))

  return serve.get_concrete_function(**arguments)


def _part_names(name: str, spec: tf.TypeSpec) -> list[str]:
  if isinstance(spec, tf.RaggedTensorSpec):
    splits = [f"{name}_row_splits{f'_{i}' if i else ''}" for i in range(spec.ragged_rank)]
    return [name, *splits]
  if isinstance(spec, tf.SparseTensorSpec):
    return [f"{name}_indices", name, f"{name}_dense_shape"]
  return [name]
