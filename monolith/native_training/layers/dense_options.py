"""Holds the options of dense layers that `MLP`, `MMoE` and `LHUCTower` share."""

from __future__ import annotations

import dataclasses
from typing import Any

from monolith import _tensorflow
from monolith.native_training.layers import utils as layer_utils
from monolith.native_training.layers.dense import Dense

keras: Any = _tensorflow.import_keras()


@dataclasses.dataclass
class DenseOptions:
  """Kernels, biases and batch normalization of dense layers in a stack.

  Attributes:
    kernel_regularizer: regularizes the kernels.
    use_weight_norm: divide each column of a kernel by its norm.
    use_learnable_weight_norm: then multiply it by a trainable number.
    use_bias: whether the layers have biases.
    bias_regularizer: regularizes the biases.
    enable_batch_normalization: normalize the input, and the output of all layers but the last.
    batch_normalization_momentum: weight of the past in the moving mean and variance.
    batch_normalization_renorm: whether training uses the moving mean and variance too.
    batch_normalization_renorm_clipping: the most that `renorm` may correct: `rmax`, `rmin`, `dmax`.
    batch_normalization_renorm_momentum: weight of the past in what `renorm` uses.
  """

  kernel_regularizer: Any = None
  use_weight_norm: bool = True
  use_learnable_weight_norm: bool = True
  use_bias: bool = True
  bias_regularizer: Any = None
  enable_batch_normalization: bool = False
  batch_normalization_momentum: float = 0.99
  batch_normalization_renorm: bool = False
  batch_normalization_renorm_clipping: Any = None
  batch_normalization_renorm_momentum: float = 0.99

  def __post_init__(self) -> None:
    self.kernel_regularizer = keras.regularizers.get(self.kernel_regularizer)
    self.bias_regularizer = keras.regularizers.get(self.bias_regularizer)

  def create_dense(self, units: int, initializer: Any, name: str) -> Dense:
    """Returns a dense layer without activation."""
    return Dense(
      units,
      use_bias=self.use_bias,
      kernel_initializer=initializer,
      kernel_regularizer=self.kernel_regularizer,
      bias_regularizer=self.bias_regularizer,
      allow_kernel_norm=self.use_weight_norm,
      kernel_norm_trainable=self.use_learnable_weight_norm,
      name=name,
    )

  def create_batch_norm(self, name: str) -> keras.layers.Layer:
    """Returns a batch normalization; only that of version 1 knows renormalization."""
    return _tensorflow.import_keras_v1().layers.BatchNormalization(
      momentum=self.batch_normalization_momentum,
      renorm=self.batch_normalization_renorm,
      renorm_clipping=self.batch_normalization_renorm_clipping,
      renorm_momentum=self.batch_normalization_renorm_momentum,
      name=name,
    )

  def as_arguments(self) -> dict[str, Any]:
    """Returns the options as arguments of `MLP`."""
    return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

  def get_config(self) -> dict[str, Any]:
    """Returns the options as a layer's `get_config` has them."""
    return {
      **self.as_arguments(),
      "kernel_regularizer": layer_utils.serialize_regularizer(self.kernel_regularizer),
      "bias_regularizer": layer_utils.serialize_regularizer(self.bias_regularizer),
    }
