"""A stack of dense layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from monolith import _tensorflow
from monolith.core import hyperparams
from monolith.native_training import utils
from monolith.native_training.layers import advanced_activations
from monolith.native_training.layers import utils as layer_utils
from monolith.native_training.layers.dense_options import DenseOptions
from monolith.native_training.summary import summary_ops

keras: Any = _tensorflow.import_keras()
_BatchNormalization = _tensorflow.import_keras_v1().layers.BatchNormalization


@utils.with_params
class MLP(keras.layers.Layer):
  """Dense layers one after the other, each with an activation.

  Args:
    output_dims: widths of the layers.
    activations: `None` for relu after all but the last; a list with one per layer; or one for all
      but the last.
    initializers: initializers of the kernels, one for all or one per layer; `None` is
      `glorot_uniform`.
    kernel_regularizer: regularizer of the kernels.
    use_weight_norm: divide each column of a kernel by its norm.
    use_learnable_weight_norm: then multiply it by a trainable number, its norm in the beginning.
    use_bias: whether the layers have biases.
    bias_regularizer: regularizer of the biases.
    enable_batch_normalization: normalize the input, and the output of all layers but the last.
    batch_normalization_momentum: weight of the past in the moving mean and variance.
    batch_normalization_renorm: whether training uses the moving mean and variance too.
    batch_normalization_renorm_clipping: the most that `renorm` may correct: `rmax`, `rmin`, `dmax`.
    batch_normalization_renorm_momentum: weight of the past in what `renorm` uses.
  """

  def __init__(
    self,
    output_dims: Sequence[int],
    activations: Any = None,
    initializers: Any = None,
    kernel_regularizer: Any = None,
    use_weight_norm: bool = True,
    use_learnable_weight_norm: bool = True,
    use_bias: bool = True,
    bias_regularizer: Any = None,
    enable_batch_normalization: bool = False,
    batch_normalization_momentum: float = 0.99,
    batch_normalization_renorm: bool = False,
    batch_normalization_renorm_clipping: Any = None,
    batch_normalization_renorm_momentum: float = 0.99,
    **kwargs: Any,
  ):
    super().__init__(**kwargs)
    self.output_dims = list(output_dims)
    count = len(self.output_dims)
    self.activations = expand_activations(activations, count)
    self.initializers = [
      keras.initializers.get(initializer or "glorot_uniform")
      for initializer in utils.extend_as_list(initializers, count)
    ]
    self._options = DenseOptions(
      kernel_regularizer=kernel_regularizer,
      use_weight_norm=use_weight_norm,
      use_learnable_weight_norm=use_learnable_weight_norm,
      use_bias=use_bias,
      bias_regularizer=bias_regularizer,
      enable_batch_normalization=enable_batch_normalization,
      batch_normalization_momentum=batch_normalization_momentum,
      batch_normalization_renorm=batch_normalization_renorm,
      batch_normalization_renorm_clipping=batch_normalization_renorm_clipping,
      batch_normalization_renorm_momentum=batch_normalization_renorm_momentum,
    )
    self._stacked_layers = self._create_layers()

  def _create_layers(self) -> list[Any]:
    layers: list[Any] = []
    last = len(self.output_dims) - 1
    if self._options.enable_batch_normalization:
      layers.append(self._options.create_batch_norm("BatchNorm/in"))
    for i, dim in enumerate(self.output_dims):
      layers.append(self._options.create_dense(dim, self.initializers[i], f"dense_{i}"))
      if self._options.enable_batch_normalization and i != last:
        layers.append(self._options.create_batch_norm("BatchNorm/out"))
      if self.activations[i] is not None:
        layers.append(self.activations[i])
    return layers

  def get_layer(self, index: int) -> Any:
    """Returns an element of the stack: a layer, or an activation that is a function."""
    return self._stacked_layers[index]

  def call(
    self,
    inputs: tf.Tensor,
    segment_names: Sequence[str] | None = None,
    segment_sizes: Sequence[int] | None = None,
    group_info: Sequence[Sequence[str]] | None = None,
    label: tf.Tensor | None = None,
    training: Any = None,
  ) -> tf.Tensor:
    """Returns the output of the last layer.

    Args:
      inputs: `[B, E]`.
      segment_names: with `segment_sizes`, write what each feature contributes to the first layer.
      segment_sizes: widths of the features.
      group_info: the features of each group, written along.
      label: `[B]` or `[B, L]`, written along.
      training: whether batch normalization uses, and updates from, the batch.
    """
    x = inputs
    for layer in self._stacked_layers:
      layer_input = x
      x = call_layer(layer, x, training)
      if segment_names and segment_sizes and getattr(layer, "name", "") == "dense_0":
        summary_ops.feature_insight_data(
          layer_input, segment_names, segment_sizes, layer.kernel, group_info, label
        )
    return x

  def get_config(self) -> dict[str, Any]:
    return {
      **super().get_config(),
      "output_dims": self.output_dims,
      "activations": [advanced_activations.serialize(a) for a in self.activations],
      "initializers": [layer_utils.serialize_initializer(i) for i in self.initializers],
      **self._options.get_config(),
    }

  @classmethod
  def from_config(cls, config: dict[str, Any]) -> MLP:
    params = cls.params()
    hyperparams.update_params(params, dict(config))
    return params.instantiate()


def expand_activations(activations: Any, count: int) -> list[Any]:
  """Returns one activation per layer for the argument `activations` of `MLP`.

  Raises:
    AssertionError: a list of another length.
  """
  if isinstance(activations, (list, tuple)):
    assert (
      len(activations) == count
    ), f"there are {len(activations)} activations for {count} layers: {activations}"
    return [advanced_activations.get(activation) for activation in activations]
  activation = "relu" if activations is None else activations
  # A layer with variables cannot be at several places.
  text = advanced_activations.serialize(advanced_activations.get(activation))
  return [advanced_activations.get(text or activation) for _ in range(count - 1)] + [None]


def call_layer(layer: Any, inputs: tf.Tensor, training: Any) -> tf.Tensor:
  """Calls a layer; what a batch normalization updates becomes one of the graph's update ops."""
  if not isinstance(layer, _BatchNormalization) or training is None:
    return layer(inputs)
  outputs = layer(inputs, training=training)
  if not tf.executing_eagerly():
    for update in layer.get_updates_for(inputs) if hasattr(layer, "get_updates_for") else []:
      tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.UPDATE_OPS, update)
  return outputs
