"""Learned hidden unit contributions: dense layers whose units are gated by another input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from monolith import _tensorflow
from monolith.core import hyperparams
from monolith.native_training import utils
from monolith.native_training.layers import advanced_activations
from monolith.native_training.layers import mlp as mlp_lib
from monolith.native_training.layers import utils as layer_utils
from monolith.native_training.layers.dense_options import DenseOptions

keras: Any = _tensorflow.import_keras()

_LHUC_PREFIX = "lhuc_"


@utils.with_params
class LHUCTower(keras.layers.Layer):
  """`h <- block_i(h) * lhuc_i(lhuc_input)`.

  Takes one tensor, or `[dense_input, lhuc_input]`, to `[B, output_dims[-1]]`.

  Args:
    output_dims: widths of the blocks.
    lhuc_output_dims: widths of the gates' MLPs: `None` for none but the output; a list of ints for
      the hidden layers of all; or a list per block, which ends with the width of the block.
    activations: `activations` of an `MLP` with the same `output_dims`.
    initializers: initializers of the blocks' kernels; `None` is `glorot_uniform`.
    **kwargs: arguments of a Keras layer, and `lhuc_<argument of MLP>` for the gates alone.

  The other arguments are those of `MLP`, for blocks and gates.
  """

  def __init__(
    self,
    output_dims: Sequence[int],
    lhuc_output_dims: Sequence[Any] | None = None,
    activations: Any = "relu",
    initializers: Any = None,
    use_bias: bool = True,
    use_weight_norm: bool = True,
    use_learnable_weight_norm: bool = True,
    kernel_regularizer: Any = None,
    bias_regularizer: Any = None,
    enable_batch_normalization: bool = False,
    batch_normalization_momentum: float = 0.99,
    batch_normalization_renorm: bool = False,
    batch_normalization_renorm_clipping: Any = None,
    batch_normalization_renorm_momentum: float = 0.99,
    **kwargs: Any,
  ):
    self._lhuc_kwargs = {
      key[len(_LHUC_PREFIX) :]: kwargs.pop(key)
      for key in list(kwargs)
      if key.startswith(_LHUC_PREFIX)
    }
    super().__init__(**kwargs)
    self.output_dims = list(output_dims)
    self.lhuc_output_dims = self._expand_lhuc_dims(lhuc_output_dims)
    self.activations = mlp_lib.expand_activations(activations, len(self.output_dims))
    self.initializers = [
      keras.initializers.get(initializer or "glorot_uniform")
      for initializer in utils.extend_as_list(initializers, len(self.output_dims))
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
    self._create_blocks()

  def _expand_lhuc_dims(self, dims: Sequence[Any] | None) -> list[list[int]]:
    if dims is None:
      return [[dim] for dim in self.output_dims]
    if all(isinstance(dim, int) for dim in dims):
      return [[*dims, dim] for dim in self.output_dims]
    if not all(isinstance(dim, (list, tuple)) for dim in dims):
      raise Exception("lhuc_output_dims is error")
    assert len(dims) == len(
      self.output_dims
    ), f"lhuc_output_dims has {len(dims)} lists, want {len(self.output_dims)}"
    for gate, dim in zip(dims, self.output_dims):
      assert gate[-1] == dim, "the last dim of lhuc must be identity with dense output"
    return [list(gate) for gate in dims]

  def _create_blocks(self) -> None:
    options = self._options
    last = len(self.output_dims) - 1
    self._input_norm = None
    if options.enable_batch_normalization:
      self._input_norm = options.create_batch_norm("BatchNorm/in")
    self._blocks = []
    self._gates = []
    for i, dim in enumerate(self.output_dims):
      block = [options.create_dense(dim, self.initializers[i], f"layer_{i + 1}/dense")]
      if options.enable_batch_normalization and i != last:
        block.append(options.create_batch_norm(f"layer_{i + 1}/BatchNorm/out"))
      if self.activations[i] is not None:
        block.append(self.activations[i])
      self._blocks.append(block)
      dims = self.lhuc_output_dims[i]
      arguments = {
        "activations": ["relu"] * (len(dims) - 1) + ["sigmoid2"],
        "initializers": self.initializers[i],
        **self.lhuc_params,
      }
      self._gates.append(mlp_lib.MLP(dims, name="lhuc", **arguments))

  @property
  def lhuc_params(self) -> dict[str, Any]:
    """Arguments of the gates' MLPs: those of the blocks, unless `lhuc_<argument>` was given."""
    return {**self._options.as_arguments(), **self._lhuc_kwargs}

  def call(self, inputs: Any, training: Any = None) -> tf.Tensor:
    if isinstance(inputs, (list, tuple)):
      x, lhuc_input = inputs
    else:
      x = lhuc_input = inputs
    if self._input_norm is not None:
      x = mlp_lib.call_layer(self._input_norm, x, training)
    for i, (block, gate) in enumerate(zip(self._blocks, self._gates)):
      with tf.name_scope(f"layer_{i + 1}"):
        for layer in block:
          x = mlp_lib.call_layer(layer, x, training)
        x = x * gate(lhuc_input, training=training)
    return x

  def get_config(self) -> dict[str, Any]:
    return {
      **super().get_config(),
      "output_dims": self.output_dims,
      "lhuc_output_dims": self.lhuc_output_dims,
      "activations": [advanced_activations.serialize(a) for a in self.activations],
      "initializers": [layer_utils.serialize_initializer(i) for i in self.initializers],
      **self._options.get_config(),
      **{f"{_LHUC_PREFIX}{key}": value for key, value in self._lhuc_kwargs.items()},
    }

  @classmethod
  def from_config(cls, config: dict[str, Any]) -> LHUCTower:
    config = dict(config)
    gates = {
      key: config.pop(key)
      for key in list(config)
      if key.startswith(_LHUC_PREFIX) and key != "lhuc_output_dims"
    }
    if gates:
      return cls(**config, **gates)
    params = cls.params()
    hyperparams.update_params(params, config)
    return params.instantiate()
