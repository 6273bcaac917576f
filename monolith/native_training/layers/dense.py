"""A dense layer whose kernel can be normalised, partitioned, and have its own optimizer."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.ops import variable_scope

from monolith import _tensorflow
from monolith.native_training import utils
from monolith.native_training.layers import advanced_activations
from monolith.native_training.layers import utils as layer_utils

keras: Any = _tensorflow.import_keras()

_EPSILON = 1e-6
_MONITOR_NAME = "inactive_relu_count_moving_avg"


@utils.with_params
class Dense(keras.layers.Layer):
  """`y = act(x K + b)`: `[..., D]` to `[..., units]`.

  Args:
    units: width of the output.
    activation: a name, a layer or a function, as `advanced_activations.get` takes it.
    use_bias: whether there is `b`.
    kernel_initializer: initializer of the kernel.
    bias_initializer: initializer of the bias.
    kernel_regularizer: regularizer of the kernel.
    bias_regularizer: regularizer of the bias.
    allow_kernel_norm: divide each column of the kernel by its norm.
    kernel_norm_trainable: then multiply it by a trainable number, its norm in the beginning.
    partitioner: partitioner of the kernel, by default that of the enclosing variable scope.
    inactive_relu_monitor: with a relu, keep a moving average of how many examples of a batch each
      unit is silent for.
    inactive_relu_monitor_decay: weight of the newest batch in that average.
    optimizer: applies the gradients of this layer's variables instead of the model's optimizer.
  """

  def __init__(
    self,
    units: int,
    activation: Any = None,
    use_bias: bool = True,
    kernel_initializer: Any = "glorot_uniform",
    bias_initializer: Any = "zeros",
    kernel_regularizer: Any = None,
    bias_regularizer: Any = None,
    allow_kernel_norm: bool = False,
    kernel_norm_trainable: bool = False,
    partitioner: Any = None,
    inactive_relu_monitor: bool = False,
    inactive_relu_monitor_decay: float = 0.1,
    optimizer: Any = None,
    **kwargs: Any,
  ):
    if "input_shape" not in kwargs and "input_dim" in kwargs:
      kwargs["input_shape"] = (kwargs.pop("input_dim"),)
    super().__init__(**kwargs)
    self.units = int(units)
    self.activation = advanced_activations.get(activation)
    self.use_bias = use_bias
    self.kernel_initializer = keras.initializers.get(kernel_initializer)
    self.bias_initializer = keras.initializers.get(bias_initializer)
    self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
    self.bias_regularizer = keras.regularizers.get(bias_regularizer)
    self.allow_kernel_norm = allow_kernel_norm
    self.kernel_norm_trainable = kernel_norm_trainable
    self.partitioner = partitioner
    self.inactive_relu_monitor = inactive_relu_monitor
    self.inactive_relu_monitor_decay = inactive_relu_monitor_decay
    self.optimizer = optimizer
    self.input_spec = keras.layers.InputSpec(min_ndim=2)

  def build(self, input_shape: Any) -> None:
    """Creates the variables.

    Raises:
      TypeError: the layer is not one of floats.
      ValueError: the last dimension is unknown.
    """
    dtype = tf.as_dtype(self.dtype or keras.backend.floatx())
    if not (dtype.is_floating or dtype.is_complex):
      raise TypeError(f"Unable to build `Dense` layer with non-floating point dtype {dtype}")
    last_dim = tf.compat.dimension_value(tf.TensorShape(input_shape)[-1])
    if last_dim is None:
      raise ValueError(
        "The last dimension of the inputs to `Dense` should be defined. Found `None`."
      )
    self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: last_dim})
    initial = layer_utils.new_initializer(self.kernel_initializer)(
      [last_dim, self.units], dtype=dtype
    )
    self.kernel_var = self._get_variable("kernel", initial)
    # The parts, if there are several: so Keras finds them.
    self._kernel_parts = _parts(self.kernel_var)
    if self.kernel_regularizer is not None:
      self.add_loss(lambda: self.kernel_regularizer(tf.convert_to_tensor(self.kernel_var)))
    self.trainable_kernel_norm = None
    if self.allow_kernel_norm and self.kernel_norm_trainable:
      self.trainable_kernel_norm = self._get_variable(
        "trainable_kernel_norm", tf.norm(initial, axis=0)
      )
      self._norm_parts = _parts(self.trainable_kernel_norm)
    self.bias = None
    if self.use_bias:
      self.bias = self.add_weight(
        "bias",
        shape=[self.units],
        initializer=layer_utils.new_initializer(self.bias_initializer),
        regularizer=self.bias_regularizer,
        dtype=dtype,
        trainable=True,
      )
      self.bias.optimizer = self.optimizer
    if self._is_monitored():
      self._inactive_count = self._get_variable(
        _MONITOR_NAME,
        tf.zeros([self.units], dtype),
        trainable=False,
        collections=[
          tf.compat.v1.GraphKeys.METRIC_VARIABLES,
          tf.compat.v1.GraphKeys.GLOBAL_VARIABLES,
        ],
      )
    super().build(input_shape)

  def _is_monitored(self) -> bool:
    return self.inactive_relu_monitor and isinstance(self.activation, keras.layers.ReLU)

  def _get_variable(self, name: str, initial: tf.Tensor, **kwargs: Any) -> Any:
    """Returns the variable of that name in the scope that is called like the name scope."""
    enclosing = tf.compat.v1.get_variable_scope()
    partitioner = self.partitioner or enclosing.partitioner
    scope = variable_scope.VariableScope(
      reuse=tf.compat.v1.AUTO_REUSE,
      name=tf.get_current_name_scope(),
      use_resource=True,
      partitioner=partitioner if kwargs.get("trainable", True) else None,
    )
    with tf.compat.v1.variable_scope(scope, auxiliary_name_scope=False):
      variable = tf.compat.v1.get_variable(name, initializer=initial, **kwargs)
    for part in _parts(variable):
      part.optimizer = self.optimizer
    return variable

  @property
  def kernel(self) -> tf.Tensor:
    """The effective kernel; the raw one is `kernel_var`."""
    kernel = tf.convert_to_tensor(self.kernel_var)
    if self.allow_kernel_norm:
      kernel = tf.nn.l2_normalize(kernel, axis=0, epsilon=_EPSILON)
    if self.trainable_kernel_norm is not None:
      kernel = kernel * tf.convert_to_tensor(self.trainable_kernel_norm)
    return kernel

  def call(self, inputs: tf.Tensor) -> tf.Tensor:
    outputs = tf.tensordot(inputs, self.kernel, [[inputs.shape.rank - 1], [0]])
    outputs.set_shape([*inputs.shape[:-1], self.units])
    if self.bias is not None:
      outputs = tf.nn.bias_add(outputs, self.bias)
    if self.activation is not None:
      outputs = self.activation(outputs)
    return self._count_inactive(outputs) if self._is_monitored() else outputs

  def _count_inactive(self, outputs: tf.Tensor) -> tf.Tensor:
    silent = tf.cast(tf.equal(outputs, 0), outputs.dtype)
    count = tf.reduce_sum(tf.reshape(silent, [-1, self.units]), axis=0)
    decay = self.inactive_relu_monitor_decay
    average = self._inactive_count.assign((1 - decay) * self._inactive_count + decay * count)
    tf.compat.v1.summary.histogram(_MONITOR_NAME, average)
    with tf.control_dependencies([average]):
      return tf.identity(outputs)

  def compute_output_shape(self, input_shape: Any) -> tf.TensorShape:
    return tf.TensorShape(input_shape)[:-1].concatenate(self.units)

  def get_config(self) -> dict[str, Any]:
    return {
      **super().get_config(),
      "units": self.units,
      "activation": advanced_activations.serialize(self.activation),
      "use_bias": self.use_bias,
      "kernel_initializer": layer_utils.serialize_initializer(self.kernel_initializer),
      "bias_initializer": layer_utils.serialize_initializer(self.bias_initializer),
      "kernel_regularizer": layer_utils.serialize_regularizer(self.kernel_regularizer),
      "bias_regularizer": layer_utils.serialize_regularizer(self.bias_regularizer),
      "allow_kernel_norm": self.allow_kernel_norm,
      "kernel_norm_trainable": self.kernel_norm_trainable,
      "partitioner": self.partitioner,
      "inactive_relu_monitor": self.inactive_relu_monitor,
      "inactive_relu_monitor_decay": self.inactive_relu_monitor_decay,
      "optimizer": self.optimizer,
    }


def _parts(variable: Any) -> list[tf.Variable]:
  """Returns the variables of a variable that may be partitioned."""
  return [variable] if isinstance(variable, tf.Variable) else list(variable)
