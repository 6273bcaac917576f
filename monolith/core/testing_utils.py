"""`layer_test`: checks a Keras layer end to end. For tests only."""

import inspect
import random
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops

from monolith import _tensorflow

keras = _tensorflow.import_keras()

# Tests written for older TensorFlow releases call `ops.convert_to_tensor_v2`, which is gone.
if not hasattr(ops, "convert_to_tensor_v2"):
  ops.convert_to_tensor_v2 = tf.convert_to_tensor


def layer_test(
  layer_cls: type,
  kwargs: Optional[dict[str, Any]] = None,
  input_shape: Optional[Sequence[Optional[int]]] = None,
  input_dtype: Any = None,
  input_data: Any = None,
  expected_output: Any = None,
  expected_output_dtype: Any = None,
  expected_output_shape: Optional[Sequence[Optional[int]]] = None,
  validate_training: bool = True,
  adapt_data: Any = None,
  custom_objects: Any = None,
  test_harness: Any = None,
) -> np.ndarray:
  """Builds a layer, wraps it in a functional model, and compares its claims with its results.

  Args:
    layer_cls: the layer's class.
    kwargs: arguments of its constructor.
    input_shape: shape of the input, batch included; an unknown size is drawn from 1 to 3.
    input_dtype: dtype of the input; that of `input_data`, else float32.
    input_data: the input; random when None.
    expected_output: if given, the values the layer must produce.
    expected_output_dtype: dtype of the output; that of the input when None.
    expected_output_shape: if given, the static shape of the output, None where unknown.
    validate_training: accepted, unused.
    adapt_data: if given, passed to the layer's `adapt` first.
    custom_objects: accepted, unused.
    test_harness: a `tf.test.TestCase` whose comparison is to be used.

  Returns:
    The predicted array.

  Raises:
    ValueError: neither data nor a shape was given.
    AssertionError: a check failed; the text starts with `When testing layer`.
  """
  del validate_training, custom_objects
  kwargs = dict(kwargs or {})
  if input_data is None:
    if input_shape is None:
      raise ValueError("input_shape is None")
    input_dtype = tf.as_dtype(input_dtype or "float32").name
    input_data = _random_data(input_shape, input_dtype)
  else:
    input_shape = input_data.shape if input_shape is None else input_shape
    input_dtype = tf.as_dtype(input_dtype or input_data.dtype).name
  expected_output_dtype = tf.as_dtype(expected_output_dtype or input_dtype).name

  layer = layer_cls(**kwargs)
  if adapt_data is not None:
    layer.adapt(adapt_data)
  layer.set_weights(layer.get_weights())
  if "weights" in inspect.signature(layer_cls.__init__).parameters:
    layer = layer_cls(**{**kwargs, "weights": layer.get_weights()})

  x = keras.layers.Input(shape=tuple(input_shape[1:]), dtype=input_dtype)
  y = layer(x)
  about = f"When testing layer {layer_cls.__name__}, for input {x}, kwargs={kwargs}: "
  _check(
    y.dtype.base_dtype.name == expected_output_dtype,
    f"{about}found output dtype {y.dtype.base_dtype.name}, want {expected_output_dtype}",
  )
  if expected_output_shape is not None:
    _check_shape(about, "output", y.shape.as_list(), tf.TensorShape(expected_output_shape))

  model = keras.models.Model(x, y)
  computed_shape = tf.TensorShape(layer.compute_output_shape(tf.TensorShape(input_shape)))
  signature = layer.compute_output_signature(tf.TensorSpec(shape=input_shape, dtype=input_dtype))
  actual_output = model.predict(input_data)

  _check_shape(about, "predicted", actual_output.shape, computed_shape)
  _check_shape(about, "predicted", actual_output.shape, signature.shape)
  _check(
    signature.dtype == tf.as_dtype(actual_output.dtype),
    f"{about}compute_output_signature has dtype {signature.dtype}, predicted {actual_output.dtype}",
  )
  weights = model.get_weights()
  model.set_weights(weights)
  for before, after in zip(weights, model.get_weights()):
    np.testing.assert_array_equal(before, after, err_msg=f"{about}weights changed")
  if expected_output is not None:
    _check_values(about, actual_output, expected_output, test_harness)
  return actual_output


def _random_data(shape: Sequence[Optional[int]], dtype: str) -> np.ndarray:
  sizes = [random.randint(1, 3) if size is None else size for size in shape]
  data = 10 * np.random.random(sizes)
  if tf.as_dtype(dtype).is_floating:
    data -= 0.5
  return data.astype(dtype)


def _check(condition: bool, message: str) -> None:
  if not condition:
    raise AssertionError(message)


def _check_shape(about: str, what: str, shape: Any, want: tf.TensorShape) -> None:
  _check(want.is_compatible_with(list(shape)), f"{about}{what} shape {tuple(shape)}, want {want}")


def _check_values(about: str, actual: np.ndarray, expected: Any, test_harness: Any) -> None:
  if np.asarray(expected).dtype.kind in "OSU":
    np.testing.assert_array_equal(actual, expected, err_msg=about)
    return
  try:
    if test_harness is not None:
      test_harness.assertAllClose(actual, expected, rtol=1e-3, atol=1e-6)
    else:
      np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-6)
  except AssertionError as error:
    raise AssertionError(f"{about}{error}") from error
