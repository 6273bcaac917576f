"""`Dense`: a Keras dense layer, configured by params, whose kernel can be normalised.

With `allow_kernel_norm` every column of the kernel is divided by its L2 norm, and with
`kernel_norm_trainable` multiplied by a trainable norm that starts at the norm of the initial
column: at the start the effective kernel is the initial kernel.

Differences from ByteDance's Monolith: the kernel variable is listed among the layer's weights;
`kernel` is still the effective kernel.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from monolith import _tensorflow
from monolith.core import base_layer, hyperparams, variance_scaling

keras = _tensorflow.import_keras()

_MIN_SQUARED_NORM = 1e-6


class Dense(keras.layers.Dense, base_layer.BaseLayer):
  """`y = act(x K' + b)`: `[..., D]` to `[..., units]`, `K'` the effective kernel."""

  @classmethod
  def params(cls) -> hyperparams.InstantiableParams:
    p = super().params()
    p.define("units", 512, "Dimension of the output.")
    p.define("activation", None, "Activation, a callable or its Keras name; None is linear.")
    p.define("use_bias", True, "Whether to add a bias.")
    p.define(
      "kernel_initializer",
      variance_scaling.VarianceScaling(mode="fan_avg", distribution="uniform"),
      "Called once with shape and dtype; returns the initial kernel as a concrete array.",
    )
    p.define("bias_initializer", "zeros", "Keras initializer of the bias.")
    p.define("allow_kernel_norm", True, "Whether to normalise the columns of the kernel.")
    p.define("kernel_norm_trainable", True, "Whether the columns have trainable norms.")
    p.define("partitioner", None, "Partitioner of the kernel and of its norms.")
    return p

  def __init__(self, params: hyperparams.Params, **kwargs: Any):
    """Args:
    params: what `params()` returned; its `name` is the prefix of the variables' names.
    **kwargs: what Keras takes: `name`, `dtype`, `input_dim`, ...
    """
    if "input_dim" in kwargs:
      kwargs["input_shape"] = (kwargs.pop("input_dim"),)
    base_layer.BaseLayer.__init__(self, params)
    keras.layers.Dense.__init__(
      self,
      units=params.units,
      activation=params.activation,
      use_bias=params.use_bias,
      kernel_initializer=params.kernel_initializer,
      bias_initializer=params.bias_initializer,
      **kwargs,
    )
    self.p = params
    self.allow_kernel_norm = params.allow_kernel_norm
    self.kernel_norm_trainable = params.kernel_norm_trainable
    self.var_name_prefix = params.name
    self.partitioner = params.partitioner
    self.supports_masking = True

  @property
  def kernel(self) -> tf.Tensor:
    """The effective kernel, `[D, units]`."""
    kernel = _concat(self._kernel_parts)
    if not self.allow_kernel_norm:
      return kernel
    kernel = tf.nn.l2_normalize(kernel, axis=0, epsilon=_MIN_SQUARED_NORM)
    return kernel * _concat(self._norm_parts) if self.kernel_norm_trainable else kernel

  def build(self, input_shape: Any) -> None:
    """Creates the variables.

    Raises:
      TypeError: the layer's dtype is not a float, or the kernel initializer's result not an array.
      ValueError: the last dimension of the input is unknown.
    """
    dtype = tf.as_dtype(self.dtype or keras.backend.floatx())
    if not (dtype.is_floating or dtype.is_complex):
      raise TypeError(f"Unable to build `Dense` layer with non-floating point dtype {dtype}")
    input_dim = tf.compat.dimension_value(tf.TensorShape(input_shape)[-1])
    if input_dim is None:
      raise ValueError(
        "The last dimension of the inputs to `Dense` should be defined. Found `None`."
      )

    shape = [input_dim, self.units]
    initial_kernel = self._initial_kernel(shape, dtype)
    # Attributes that hold lists of variables are tracked by Keras, partitioned variables are not.
    self._kernel_parts = self._create_variable("kernel", initial_kernel)
    if self.allow_kernel_norm and self.kernel_norm_trainable:
      norms = np.linalg.norm(initial_kernel, axis=0)
      self._norm_parts = self._create_variable("trainable_kernel_norm", norms)
    self.bias = None
    if self.use_bias:
      self.bias = self.add_weight(
        name=f"{self.var_name_prefix}/bias",
        shape=[self.units],
        initializer=self.bias_initializer,
        dtype=self.dtype,
        trainable=True,
      )
    self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: input_dim})
    self.built = True

  def fprop(self, inputs: Any) -> tf.Tensor:
    return self.call(inputs)

  def get_config(self) -> dict[str, Any]:
    config = super(keras.layers.Dense, self).get_config()
    config.update(
      units=self.units,
      activation=keras.activations.serialize(self.activation),
      use_bias=self.use_bias,
      kernel_initializer=keras.utils.serialize_keras_object(self.kernel_initializer),
      bias_initializer=keras.initializers.serialize(self.bias_initializer),
      allow_kernel_norm=self.allow_kernel_norm,
      kernel_norm_trainable=self.kernel_norm_trainable,
      partitioner=self.partitioner,
    )
    return config

  def _initial_kernel(self, shape: list[int], dtype: tf.DType) -> np.ndarray:
    value = self.kernel_initializer(shape=shape, dtype=dtype)
    if tf.is_tensor(value):
      if not hasattr(value, "numpy"):
        raise TypeError(
          f"kernel_initializer {self.kernel_initializer} returned the symbolic {value}, want a "
          "concrete array such as monolith.core.variance_scaling.VarianceScaling returns"
        )
      value = value.numpy()
    value = np.asarray(value, dtype=dtype.as_numpy_dtype)
    if list(value.shape) != shape:
      raise ValueError(f"kernel_initializer returned shape {list(value.shape)}, want {shape}")
    return value

  def _create_variable(self, name: str, value: np.ndarray) -> list[tf.Variable]:
    """Creates `<params.name>/<name>`; returns its partitions, one if there is no partitioner."""
    name = f"{self.var_name_prefix}/{name}"
    if self.partitioner is None:
      variable = tf.compat.v1.get_variable(
        name,
        shape=value.shape,
        dtype=tf.as_dtype(value.dtype),
        initializer=lambda shape, dtype=None, partition_info=None: value,
      )
    else:
      variable = tf.compat.v1.get_variable(
        name,
        shape=value.shape,
        dtype=tf.as_dtype(value.dtype),
        initializer=value,
        partitioner=self.partitioner,
      )
    return [variable] if isinstance(variable, tf.Variable) else list(variable)


def _concat(parts: list[tf.Variable]) -> tf.Tensor:
  return tf.convert_to_tensor(parts[0]) if len(parts) == 1 else tf.concat(list(parts), axis=0)
