"""Gated recurrent units whose update gate is, or is scaled by, an attention score."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from monolith import _tensorflow
from monolith.native_training import utils
from monolith.native_training.layers import advanced_activations
from monolith.native_training.layers import utils as layer_utils

keras: Any = _tensorflow.import_keras()

_ATT_TYPES = ("AGRU", "AUGRU")


def create_ta(name: str, size: int | tf.Tensor, dtype: tf.DType) -> tf.TensorArray:
  """Returns a tensor array."""
  return tf.TensorArray(dtype=dtype, size=size, tensor_array_name=name)


@utils.with_params
class AGRUCell(keras.layers.Layer):
  """One step: `(x [B, D], state [B, u], attention [B, 1] or None)` to `(h, h)`.

  Args:
    units: width u of the state.
    att_type: `AGRU`: the score is the update gate; `AUGRU`: it scales the update gate.
    activation: activation of the candidate, tanh by default.
    initializer: initializer of the kernels, `HeNormal` by default.
    regularizer: regularizer of the kernels.
  """

  def __init__(
    self,
    units: int,
    att_type: str = "AGRU",
    activation: Any = None,
    initializer: Any = None,
    regularizer: Any = None,
    **kwargs: Any,
  ):
    assert att_type.upper() in _ATT_TYPES, f"att_type is {att_type}, want one of {_ATT_TYPES}"
    super().__init__(**kwargs)
    self.units = units
    self.att_type = att_type.upper()
    self.activation = advanced_activations.get("tanh" if activation is None else activation)
    self.initializer = keras.initializers.get("he_normal" if initializer is None else initializer)
    self.regularizer = keras.regularizers.get(regularizer)

  @property
  def state_size(self) -> int:
    return self.units

  @property
  def output_size(self) -> int:
    return self.units

  def zero_state(self, batch_size: int | tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tf.zeros([batch_size, self.units], dtype)

  def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    # Keras finds no shapes where one of the inputs has none.
    if isinstance(inputs, (list, tuple)) and len(inputs) == 3 and inputs[2] is None:
      inputs = inputs[:2]
    return super().__call__(inputs, *args, **kwargs)

  def build(self, input_shape: Any) -> None:
    # Inputs that come as three arguments show only the shape of x.
    x_shape = input_shape if isinstance(input_shape, tf.TensorShape) else input_shape[0]
    width = layer_utils.check_dim(tf.TensorShape(x_shape)[-1]) + self.units

    def add(name: str, shape: list[int], initializer: Any, regularizer: Any = None) -> tf.Variable:
      return self.add_weight(
        name, shape=shape, initializer=initializer, regularizer=regularizer, trainable=True
      )

    kernel = (layer_utils.new_initializer(self.initializer), self.regularizer)
    self._gates_kernel = add("gates/kernel", [width, 2 * self.units], *kernel)
    self._gates_bias = add("gates/bias", [2 * self.units], "ones")
    kernel = (layer_utils.new_initializer(self.initializer), self.regularizer)
    self._candidate_kernel = add("candidate/kernel", [width, self.units], *kernel)
    self._candidate_bias = add("candidate/bias", [self.units], "ones")
    super().build(input_shape)

  def call(
    self, inputs: Any, state: tf.Tensor | None = None, attention: tf.Tensor | None = None
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the new state, twice.

    Args:
      inputs: x, or all of x, state and, if there is one, the attention score.
      state: the state, unless it is among `inputs`.
      attention: the attention score, unless it is among `inputs`.
    """
    x = inputs
    if state is None:
      x, state, *rest = inputs
      attention = rest[0] if rest else attention
    gates = tf.matmul(tf.concat([x, state], axis=1), self._gates_kernel) + self._gates_bias
    reset, update = tf.split(tf.sigmoid(gates), 2, axis=1)
    candidate = self.activation(
      tf.matmul(tf.concat([x, reset * state], axis=1), self._candidate_kernel)
      + self._candidate_bias
    )
    if attention is None:
      new_state = (1 - update) * state + update * candidate
    elif self.att_type == "AGRU":
      new_state = (1 - attention) * state + attention * candidate
    else:
      update = (1 - attention) * update
      new_state = update * state + (1 - update) * candidate
    return new_state, new_state

  def get_config(self) -> dict[str, Any]:
    return {
      **super().get_config(),
      "units": self.units,
      "att_type": self.att_type,
      "activation": advanced_activations.serialize(self.activation),
      "initializer": layer_utils.serialize_initializer(self.initializer),
      "regularizer": layer_utils.serialize_regularizer(self.regularizer),
    }


def static_rnn_with_attention(
  cell: AGRUCell, inputs: tf.Tensor, att_scores: tf.Tensor, init_state: tf.Tensor | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
  """Runs a cell over a sequence of static length, step by step in the graph.

  Args:
    cell: the cell.
    inputs: `[B, T, D]`.
    att_scores: `[B, T]`.
    init_state: `[B, u]`, zeros by default.

  Returns:
    The outputs `[B, T, u]` and the last state.
  """
  assert isinstance(cell, AGRUCell), f"cell is {cell!r}, want an AGRUCell"
  state = _initial_state(cell, inputs, init_state)
  outputs = []
  for x, score in zip(tf.unstack(inputs, axis=1), tf.unstack(att_scores, axis=1)):
    output, state = cell((x, state, tf.expand_dims(score, 1)))
    outputs.append(output)
  return tf.stack(outputs, axis=1), state


def dynamic_rnn_with_attention(
  cell: AGRUCell,
  inputs: tf.Tensor,
  att_scores: tf.Tensor,
  parallel_iterations: int = 1,
  swap_memory: bool = True,
  init_state: tf.Tensor | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
  """Runs a cell over a sequence as `static_rnn_with_attention` does, in a loop."""
  assert isinstance(cell, AGRUCell), f"cell is {cell!r}, want an AGRUCell"
  state = _initial_state(cell, inputs, init_state)
  if not cell.built:
    # Variables of a loop must exist before it.
    with tf.name_scope(cell.name):
      cell.build([inputs[:, 0].shape, state.shape, None])
  length = layer_utils.dim_size(inputs, 1)
  xs = create_ta("input", length, inputs.dtype).unstack(tf.transpose(inputs, [1, 0, 2]))
  scores = create_ta("att_scores", length, att_scores.dtype).unstack(tf.transpose(att_scores))
  outputs = create_ta("output", length, inputs.dtype)

  def step(time: tf.Tensor, state: tf.Tensor, outputs: tf.TensorArray) -> Any:
    output, new_state = cell((xs.read(time), state, tf.expand_dims(scores.read(time), 1)))
    new_state.set_shape(state.shape)
    return time + 1, new_state, outputs.write(time, output)

  _, state, outputs = tf.while_loop(
    lambda time, *_: time < length,
    step,
    (tf.constant(0), state, outputs),
    parallel_iterations=parallel_iterations,
    swap_memory=swap_memory,
  )
  result = tf.transpose(outputs.stack(), [1, 0, 2])
  result.set_shape([inputs.shape[0], inputs.shape[1], cell.units])
  return result, state


def _initial_state(cell: AGRUCell, inputs: tf.Tensor, init_state: tf.Tensor | None) -> tf.Tensor:
  if init_state is not None:
    return init_state
  return cell.zero_state(layer_utils.dim_size(inputs, 0), inputs.dtype)
