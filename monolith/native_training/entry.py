"""Configuration of a table's rows: optimizers, initializers, compressors, and the table itself.

Every class turns itself into its protobuf message with `as_proto()`. An argument left `None` leaves
the field unset, so that the message's own default applies:

  segment = CombineAsSegment(16, ZerosInitializer(), AdagradOptimizer(0.01), Fp16Compressor())

The classes are compared and hashed by identity: they serve as defaults of dataclass fields.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, Union

import tensorflow as tf
from google.protobuf import message

from monolith.native_training.monolith_export import monolith_export
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2

LearningRate = Union[float, Callable[[], Any]]


def _fill(target: message.Message, **values: Any) -> None:
  """Marks `target` as present and sets the fields whose value is not `None`."""
  target.SetInParent()
  for name, value in values.items():
    if value is not None:
      setattr(target, name, value)


class Optimizer(abc.ABC):
  """How a gradient changes the values and the state of a segment."""

  @abc.abstractmethod
  def as_proto(self) -> embedding_hash_table_pb2.OptimizerConfig:
    """Returns the optimizer's configuration."""


class Initializer(abc.ABC):
  """What a new row's segment holds."""

  @abc.abstractmethod
  def as_proto(self) -> embedding_hash_table_pb2.InitializerConfig:
    """Returns the initializer's configuration."""


class Compressor(abc.ABC):
  """How a segment is stored in a serving table."""

  @abc.abstractmethod
  def as_proto(self) -> embedding_hash_table_pb2.FloatCompressorConfig:
    """Returns the compressor's configuration."""


class HashTableConfig(abc.ABC):
  """The kind of table and its own settings."""

  @abc.abstractmethod
  def mutate_table(self, table_config: embedding_hash_table_pb2.EmbeddingHashTableConfig) -> None:
    """Writes the settings into `table_config`."""


class _FieldsOptimizer(Optimizer):
  """An optimizer whose attributes are fields of one member of `OptimizerConfig.type`."""

  _member: str

  def __init__(self, **fields: Any):
    self._fields = fields

  def as_proto(self) -> embedding_hash_table_pb2.OptimizerConfig:
    proto = embedding_hash_table_pb2.OptimizerConfig()
    _fill(getattr(proto, self._member), **self._fields)
    return proto


@monolith_export
class SgdOptimizer(_FieldsOptimizer):
  """Plain gradient descent."""

  _member = "sgd"

  def __init__(self, learning_rate: float | None = None):
    super().__init__(learning_rate=learning_rate)


@monolith_export
class AdagradOptimizer(_FieldsOptimizer):
  """Adagrad, with optional compression of the accumulator and weight decay."""

  _member = "adagrad"

  def __init__(
    self,
    learning_rate: float | None = None,
    initial_accumulator_value: float | None = None,
    hessian_compression_times: int = 1,
    warmup_steps: int = 0,
    weight_decay_factor: float = 0.0,
  ):
    super().__init__(
      learning_rate=learning_rate,
      initial_accumulator_value=initial_accumulator_value,
      hessian_compression_times=hessian_compression_times,
      warmup_steps=warmup_steps,
      weight_decay_factor=weight_decay_factor,
    )


@monolith_export
class AdadeltaOptimizer(_FieldsOptimizer):
  """Adadelta."""

  _member = "adadelta"

  def __init__(
    self,
    learning_rate: float | None = None,
    weight_decay_factor: float = 0.0,
    averaging_ratio: float = 0.9,
    epsilon: float = 0.01,
    warmup_steps: int = 0,
  ):
    super().__init__(
      learning_rate=learning_rate,
      weight_decay_factor=weight_decay_factor,
      averaging_ratio=averaging_ratio,
      epsilon=epsilon,
      warmup_steps=warmup_steps,
    )


@monolith_export
class AdamOptimizer(_FieldsOptimizer):
  """Adam, with bias correction kept per row."""

  _member = "adam"

  def __init__(
    self,
    learning_rate: float | None = None,
    beta1: float = 0.9,
    beta2: float = 0.99,
    use_beta1_warmup: bool = False,
    weight_decay_factor: float = 0.0,
    use_nesterov: bool = False,
    epsilon: float = 0.01,
    warmup_steps: int = 0,
  ):
    super().__init__(
      learning_rate=learning_rate,
      beta1=beta1,
      beta2=beta2,
      use_beta1_warmup=use_beta1_warmup,
      weight_decay_factor=weight_decay_factor,
      use_nesterov=use_nesterov,
      epsilon=epsilon,
      warmup_steps=warmup_steps,
    )


class AmsgradOptimizer(_FieldsOptimizer):
  """Adam with a second moment that never shrinks."""

  _member = "amsgrad"

  def __init__(
    self,
    learning_rate: float | None = None,
    beta1: float = 0.9,
    beta2: float = 0.99,
    weight_decay_factor: float = 0.0,
    use_nesterov: bool = False,
    epsilon: float = 0.01,
    warmup_steps: int = 0,
  ):
    super().__init__(
      learning_rate=learning_rate,
      beta1=beta1,
      beta2=beta2,
      weight_decay_factor=weight_decay_factor,
      use_nesterov=use_nesterov,
      epsilon=epsilon,
      warmup_steps=warmup_steps,
    )


@monolith_export
class BatchSoftmaxOptimizer(_FieldsOptimizer):
  """Estimates how many steps lie between two occurrences of an id."""

  _member = "batch_softmax"

  def __init__(self, learning_rate: float | None = None):
    super().__init__(learning_rate=learning_rate)


@monolith_export
class MomentumOptimizer(_FieldsOptimizer):
  """Gradient descent with momentum."""

  _member = "momentum"

  def __init__(
    self,
    learning_rate: float | None = None,
    weight_decay_factor: float = 0.0,
    use_nesterov: bool = False,
    momentum: float = 0.9,
    warmup_steps: int = 0,
  ):
    super().__init__(
      learning_rate=learning_rate,
      weight_decay_factor=weight_decay_factor,
      use_nesterov=use_nesterov,
      momentum=momentum,
      warmup_steps=warmup_steps,
    )


class MovingAverageOptimizer(_FieldsOptimizer):
  """Keeps a moving average of what it is given as gradient."""

  _member = "moving_average"

  def __init__(self, momentum: float = 0.9):
    super().__init__(momentum=momentum)


@monolith_export
class RmspropOptimizer(_FieldsOptimizer):
  """RMSProp."""

  _member = "rmsprop"

  def __init__(
    self,
    learning_rate: float | None = None,
    weight_decay_factor: float = 0.0,
    momentum: float = 0.9,
  ):
    super().__init__(
      learning_rate=learning_rate, weight_decay_factor=weight_decay_factor, momentum=momentum
    )


@monolith_export
class RmspropV2Optimizer(RmspropOptimizer):
  """RMSProp whose accumulator is not scaled by `1 - momentum`."""

  _member = "rmspropv2"


@monolith_export
class FtrlOptimizer(_FieldsOptimizer):
  """Follow the regularized leader."""

  _member = "ftrl"

  def __init__(
    self,
    learning_rate: float | None = None,
    initial_accumulator_value: float | None = None,
    beta: float | None = None,
    warmup_steps: int = 0,
    l1_regularization: float | None = None,
    l2_regularization: float | None = None,
  ):
    super().__init__(
      learning_rate=learning_rate,
      initial_accumulator_value=initial_accumulator_value,
      beta=beta,
      warmup_steps=warmup_steps,
      l1_regularization_strength=l1_regularization,
      l2_regularization_strength=l2_regularization,
    )


class FTRLWithGroupSparsityOptimizer(FtrlOptimizer):
  """FTRL whose first-order regularization zeroes whole rows."""

  _member = "group_ftrl"


@monolith_export
class AdaGradWithGroupLassoOptimizer(_FieldsOptimizer):
  """Adagrad with one accumulator per row and group lasso."""

  _member = "group_adagrad"

  def __init__(
    self,
    learning_rate: float | None = None,
    beta: float | None = None,
    initial_accumulator_value: float | None = None,
    l2_regularization: float | None = None,
    weight_decay_factor: float = 0.0,
    warmup_steps: int = 0,
  ):
    super().__init__(
      learning_rate=learning_rate,
      beta=beta,
      initial_accumulator_value=initial_accumulator_value,
      l2_regularization_strength=l2_regularization,
      weight_decay_factor=weight_decay_factor,
      warmup_steps=warmup_steps,
    )


class DynamicWdAdagradOptimizer(_FieldsOptimizer):
  """Adagrad whose weight decay depends on how long a row has not been updated."""

  _member = "dynamic_wd_adagrad"

  def __init__(
    self,
    learning_rate: float | None = None,
    initial_accumulator_value: float | None = None,
    hessian_compression_times: int = 1,
    warmup_steps: int = 0,
    weight_decay_factor: float = 0.0,
    decouple_weight_decay: bool = True,
    enable_dynamic_wd: bool = True,
    flip_direction: bool = True,
    dynamic_wd_temperature: float = 1.0,
  ):
    super().__init__(
      learning_rate=learning_rate,
      initial_accumulator_value=initial_accumulator_value,
      hessian_compression_times=hessian_compression_times,
      warmup_steps=warmup_steps,
      weight_decay_factor=weight_decay_factor,
      decouple_weight_decay=decouple_weight_decay,
      enable_dynamic_wd=enable_dynamic_wd,
      flip_direction=flip_direction,
      dynamic_wd_temperature=dynamic_wd_temperature,
    )


class StochasticRoundingFloat16OptimizerWrapper(Optimizer):
  """Rounds the wrapped optimizer's result to float16, up or down at random."""

  def __init__(self, optimizer: Optimizer):
    self._optimizer = optimizer

  def as_proto(self) -> embedding_hash_table_pb2.OptimizerConfig:
    proto = self._optimizer.as_proto()
    proto.stochastic_rounding_float16 = True
    return proto


@monolith_export
class ZerosInitializer(Initializer):
  """New values are 0."""

  def as_proto(self) -> embedding_hash_table_pb2.InitializerConfig:
    proto = embedding_hash_table_pb2.InitializerConfig()
    _fill(proto.zeros)
    return proto


@monolith_export
class ConstantsInitializer(Initializer):
  """New values are `constant`."""

  def __init__(self, constant: float):
    self._constant = constant

  def as_proto(self) -> embedding_hash_table_pb2.InitializerConfig:
    proto = embedding_hash_table_pb2.InitializerConfig()
    _fill(proto.constants, constant=self._constant)
    return proto


class RandomUniformInitializer(Initializer):
  """New values are drawn uniformly from `[minval, maxval)`."""

  def __init__(self, minval: float | None = None, maxval: float | None = None):
    self._minval = minval
    self._maxval = maxval

  def as_proto(self) -> embedding_hash_table_pb2.InitializerConfig:
    proto = embedding_hash_table_pb2.InitializerConfig()
    _fill(proto.random_uniform, minval=self._minval, maxval=self._maxval)
    return proto


class BatchSoftmaxInitializer(Initializer):
  """The first guess of the interval that `BatchSoftmaxOptimizer` estimates.

  Raises:
    ValueError: `init_step_interval` is below 1.
  """

  def __init__(self, init_step_interval: float):
    if init_step_interval < 1:
      raise ValueError(f"init_step_interval should be >= 1, while got {init_step_interval}")
    self._init_step_interval = init_step_interval

  def as_proto(self) -> embedding_hash_table_pb2.InitializerConfig:
    return ConstantsInitializer(self._init_step_interval).as_proto()


@monolith_export
class OneBitCompressor(Compressor):
  """One bit per value."""

  def __init__(self, step_size: int = 200, amplitude: float = 0.05):
    self._step_size = step_size
    self._amplitude = amplitude

  def as_proto(self) -> embedding_hash_table_pb2.FloatCompressorConfig:
    proto = embedding_hash_table_pb2.FloatCompressorConfig()
    _fill(proto.one_bit, step_size=self._step_size, amplitude=self._amplitude)
    return proto


@monolith_export
class FixedR8Compressor(Compressor):
  """Eight bits per value, linear over `[-fixed_range, fixed_range]`."""

  def __init__(self, fixed_range: float = 1.0):
    self._fixed_range = fixed_range

  def as_proto(self) -> embedding_hash_table_pb2.FloatCompressorConfig:
    proto = embedding_hash_table_pb2.FloatCompressorConfig()
    _fill(proto.fixed_r8, r=self._fixed_range)
    return proto


@monolith_export
class Fp16Compressor(Compressor):
  """Half precision."""

  def as_proto(self) -> embedding_hash_table_pb2.FloatCompressorConfig:
    proto = embedding_hash_table_pb2.FloatCompressorConfig()
    _fill(proto.fp16)
    return proto


@monolith_export
class Fp32Compressor(Compressor):
  """No compression."""

  def as_proto(self) -> embedding_hash_table_pb2.FloatCompressorConfig:
    proto = embedding_hash_table_pb2.FloatCompressorConfig()
    _fill(proto.fp32)
    return proto


class CuckooHashTableConfig(HashTableConfig):
  """The collisionless table.

  Args:
    initial_capacity: rows to make room for at once.
    feature_evict_every_n_hours: if positive, erase expired rows in the background this often.
  """

  def __init__(self, initial_capacity: int = 1, feature_evict_every_n_hours: int = 0):
    self._initial_capacity = initial_capacity
    self._feature_evict_every_n_hours = feature_evict_every_n_hours

  def mutate_table(self, table_config: embedding_hash_table_pb2.EmbeddingHashTableConfig) -> None:
    table_config.initial_capacity = self._initial_capacity
    table_config.cuckoo.SetInParent()
    if self._feature_evict_every_n_hours > 0:
      table_config.enable_feature_eviction = True
      table_config.feature_evict_every_n_hours = self._feature_evict_every_n_hours


class HashTableConfigInstance:
  """A table's configuration together with one learning rate per segment.

  Args:
    table_config: the table.
    learning_rate_fns: per segment a number, or a callable that returns a scalar tensor.
    extra_restore_names: further names under which a checkpoint may hold the table.
  """

  def __init__(
    self,
    table_config: embedding_hash_table_pb2.EmbeddingHashTableConfig,
    learning_rate_fns: Sequence[LearningRate],
    extra_restore_names: Sequence[str] | None = None,
  ):
    self._table_config = table_config
    self._learning_rate_fns = learning_rate_fns
    self._learning_rate_tensor: tf.Tensor | None = None
    self.extra_restore_names = list(extra_restore_names or [])

  def __str__(self) -> str:
    """The key by which slots are merged: equal configurations have equal strings."""
    return "TableConfigPB: {}, LearningRateFns: [{}]".format(
      self._table_config.SerializeToString(deterministic=True),
      ", ".join(str(fn) for fn in self._learning_rate_fns),
    )

  @property
  def table_config(self) -> embedding_hash_table_pb2.EmbeddingHashTableConfig:
    return self._table_config

  @property
  def learning_rate_fns(self) -> Sequence[LearningRate]:
    return self._learning_rate_fns

  @property
  def learning_rate_tensor(self) -> tf.Tensor | None:
    """What `set_learning_rate_tensor` was given."""
    return self._learning_rate_tensor

  def set_learning_rate_tensor(self, learning_rate_tensor: tf.Tensor) -> None:
    self._learning_rate_tensor = learning_rate_tensor

  def call_learning_rate_fns(self) -> tf.Tensor:
    """Returns the learning rates as one float32 vector `[segments]`.

    Raises:
      Exception: there are none.
    """
    with tf.name_scope("learning_rate"):
      return tf.stack(
        [tf.cast(rate, dtype=tf.float32) for rate in self.call_learning_rate_fns_fewer_ops()]
      )

  def call_learning_rate_fns_fewer_ops(self) -> list[Any]:
    """Returns the learning rates as numbers and tensors, unstacked.

    Raises:
      Exception: there are none.
    """
    if not self._learning_rate_fns:
      raise Exception("Learning_rate_fns must be not empty.")
    return [fn() if callable(fn) else fn for fn in self._learning_rate_fns]


def CombineAsSegment(
  dim_size: int,
  initializer: Initializer | embedding_hash_table_pb2.InitializerConfig,
  optimizer: Optimizer | embedding_hash_table_pb2.OptimizerConfig,
  compressor: Compressor | embedding_hash_table_pb2.FloatCompressorConfig,
) -> embedding_hash_table_pb2.EntryConfig.Segment:
  """Returns a segment of `dim_size` values; each part is an object of this module or its proto."""

  def as_proto(config: Any) -> message.Message:
    return config.as_proto() if hasattr(config, "as_proto") else config

  segment = embedding_hash_table_pb2.EntryConfig.Segment()
  segment.dim_size = dim_size
  segment.init_config.CopyFrom(as_proto(initializer))
  segment.opt_config.CopyFrom(as_proto(optimizer))
  segment.comp_config.CopyFrom(as_proto(compressor))
  return segment
