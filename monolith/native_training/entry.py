"""Configuration of a table's rows: optimizers, initializers, compressors, and the table itself.

Every class turns itself into its protobuf message with `as_proto()`. An argument left `None` leaves
the field unset, so that the message's own default applies:

  segment = CombineAsSegment(16, ZerosInitializer(), AdagradOptimizer(0.01), Fp16Compressor())

The dataclasses are compared and hashed by identity (`eq=False`), because they serve as defaults of
other dataclasses' fields, which must be hashable.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Union

from google.protobuf import message

from monolith.native_training.monolith_export import monolith_export
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2

if TYPE_CHECKING:
  import tensorflow as tf

# Names that `native_model` offers in turn.
__all__ = [
  "AdaGradWithGroupLassoOptimizer",
  "AdadeltaOptimizer",
  "AdagradOptimizer",
  "AdamOptimizer",
  "AmsgradOptimizer",
  "BatchSoftmaxInitializer",
  "BatchSoftmaxOptimizer",
  "CombineAsSegment",
  "Compressor",
  "ConstantsInitializer",
  "CuckooHashTableConfig",
  "DynamicWdAdagradOptimizer",
  "FTRLWithGroupSparsityOptimizer",
  "FixedR8Compressor",
  "Fp16Compressor",
  "Fp32Compressor",
  "FtrlOptimizer",
  "GpucucoHashTableConfig",
  "HashTableConfig",
  "HashTableConfigInstance",
  "Initializer",
  "LearningRate",
  "MomentumOptimizer",
  "MovingAverageOptimizer",
  "OneBitCompressor",
  "Optimizer",
  "RandomUniformInitializer",
  "RmspropOptimizer",
  "RmspropV2Optimizer",
  "SgdOptimizer",
  "StochasticRoundingFloat16OptimizerWrapper",
  "ZerosInitializer",
]

LearningRate = Union[float, Callable[[], Any]]


class Optimizer(abc.ABC):
  """Describes how a gradient changes the values and the state of a segment."""

  @abc.abstractmethod
  def as_proto(self) -> embedding_hash_table_pb2.OptimizerConfig:
    """Returns the optimizer's configuration."""


class Initializer(abc.ABC):
  """Sets the first values of a segment of a new row."""

  @abc.abstractmethod
  def as_proto(self) -> embedding_hash_table_pb2.InitializerConfig:
    """Returns the initializer's configuration."""


class Compressor(abc.ABC):
  """Describes how a segment is stored in a serving table."""

  @abc.abstractmethod
  def as_proto(self) -> embedding_hash_table_pb2.FloatCompressorConfig:
    """Returns the compressor's configuration."""


class HashTableConfig(abc.ABC):
  """The kind of table and its own settings."""

  @abc.abstractmethod
  def mutate_table(self, table_config: embedding_hash_table_pb2.EmbeddingHashTableConfig) -> None:
    """Writes the settings into `table_config`."""


class _OneofConfig:
  """A dataclass that is one member of the `type` of a message; its fields are the member's.

  A field that is `None` leaves the message's own default.

  Attributes:
    _message: the message that `as_proto` returns.
    _member: the member of its `type`, present even when all fields are `None`.
    _proto_names: dataclass field -> the member's field, where the two differ.
  """

  _message: ClassVar[type[message.Message]]
  _member: ClassVar[str]
  _proto_names: ClassVar[Mapping[str, str]] = {}

  def as_proto(self) -> Any:
    """Returns the configuration as `_message`."""
    proto = self._message()
    member = getattr(proto, self._member)
    member.SetInParent()
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if value is not None:
        setattr(member, self._proto_names.get(field.name, field.name), value)
    return proto


class _OneofOptimizer(_OneofConfig, Optimizer):
  _message = embedding_hash_table_pb2.OptimizerConfig
  _proto_names = {
    "l1_regularization": "l1_regularization_strength",
    "l2_regularization": "l2_regularization_strength",
  }


class _OneofInitializer(_OneofConfig, Initializer):
  _message = embedding_hash_table_pb2.InitializerConfig


class _OneofCompressor(_OneofConfig, Compressor):
  _message = embedding_hash_table_pb2.FloatCompressorConfig


@monolith_export
@dataclasses.dataclass(eq=False)
class SgdOptimizer(_OneofOptimizer):
  """Plain gradient descent."""

  _member = "sgd"

  learning_rate: float | None = None


@monolith_export
@dataclasses.dataclass(eq=False)
class AdagradOptimizer(_OneofOptimizer):
  """Adagrad, with optional compression of the accumulator and weight decay."""

  _member = "adagrad"

  learning_rate: float | None = None
  initial_accumulator_value: float | None = None
  hessian_compression_times: int = 1
  warmup_steps: int = 0
  weight_decay_factor: float = 0.0


@monolith_export
@dataclasses.dataclass(eq=False)
class AdadeltaOptimizer(_OneofOptimizer):
  """Adadelta."""

  _member = "adadelta"

  learning_rate: float | None = None
  weight_decay_factor: float = 0.0
  averaging_ratio: float = 0.9
  epsilon: float = 0.01
  warmup_steps: int = 0


@monolith_export
@dataclasses.dataclass(eq=False)
class AdamOptimizer(_OneofOptimizer):
  """Adam, with bias correction kept per row.

  Attributes:
    decay_by_step: the second moment of a row decays with every global step, and its bias correction
      counts them, as Keras's Adam has it: rows that are seldom updated take larger steps. Tables on
      GPUs do not have it.
  """

  _member = "adam"

  learning_rate: float | None = None
  beta1: float = 0.9
  beta2: float = 0.99
  use_beta1_warmup: bool = False
  weight_decay_factor: float = 0.0
  use_nesterov: bool = False
  epsilon: float = 0.01
  warmup_steps: int = 0
  decay_by_step: bool | None = None


@dataclasses.dataclass(eq=False)
class AmsgradOptimizer(_OneofOptimizer):
  """Adam with a second moment that never shrinks."""

  _member = "amsgrad"

  learning_rate: float | None = None
  beta1: float = 0.9
  beta2: float = 0.99
  weight_decay_factor: float = 0.0
  use_nesterov: bool = False
  epsilon: float = 0.01
  warmup_steps: int = 0


@monolith_export
@dataclasses.dataclass(eq=False)
class BatchSoftmaxOptimizer(_OneofOptimizer):
  """Estimates how many steps lie between two occurrences of an id."""

  _member = "batch_softmax"

  learning_rate: float | None = None


@monolith_export
@dataclasses.dataclass(eq=False)
class MomentumOptimizer(_OneofOptimizer):
  """Gradient descent with momentum."""

  _member = "momentum"

  learning_rate: float | None = None
  weight_decay_factor: float = 0.0
  use_nesterov: bool = False
  momentum: float = 0.9
  warmup_steps: int = 0


@dataclasses.dataclass(eq=False)
class MovingAverageOptimizer(_OneofOptimizer):
  """Keeps a moving average of what it is given as gradient."""

  _member = "moving_average"

  momentum: float = 0.9


@monolith_export
@dataclasses.dataclass(eq=False)
class RmspropOptimizer(_OneofOptimizer):
  """RMSProp."""

  _member = "rmsprop"

  learning_rate: float | None = None
  weight_decay_factor: float = 0.0
  momentum: float = 0.9


@monolith_export
class RmspropV2Optimizer(RmspropOptimizer):
  """RMSProp whose accumulator is not scaled by `1 - momentum`."""

  _member = "rmspropv2"


@monolith_export
@dataclasses.dataclass(eq=False)
class FtrlOptimizer(_OneofOptimizer):
  """Follow the regularized leader."""

  _member = "ftrl"

  learning_rate: float | None = None
  initial_accumulator_value: float | None = None
  beta: float | None = None
  warmup_steps: int = 0
  l1_regularization: float | None = None
  l2_regularization: float | None = None


class FTRLWithGroupSparsityOptimizer(FtrlOptimizer):
  """FTRL whose first-order regularization zeroes whole rows."""

  _member = "group_ftrl"


@monolith_export
@dataclasses.dataclass(eq=False)
class AdaGradWithGroupLassoOptimizer(_OneofOptimizer):
  """Adagrad with one accumulator per row and group lasso."""

  _member = "group_adagrad"

  learning_rate: float | None = None
  beta: float | None = None
  initial_accumulator_value: float | None = None
  l2_regularization: float | None = None
  weight_decay_factor: float = 0.0
  warmup_steps: int = 0


@dataclasses.dataclass(eq=False)
class DynamicWdAdagradOptimizer(_OneofOptimizer):
  """Adagrad whose weight decay depends on how long a row has not been updated."""

  _member = "dynamic_wd_adagrad"

  learning_rate: float | None = None
  initial_accumulator_value: float | None = None
  hessian_compression_times: int = 1
  warmup_steps: int = 0
  weight_decay_factor: float = 0.0
  decouple_weight_decay: bool = True
  enable_dynamic_wd: bool = True
  flip_direction: bool = True
  dynamic_wd_temperature: float = 1.0


@dataclasses.dataclass(eq=False)
class StochasticRoundingFloat16OptimizerWrapper(Optimizer):
  """Rounds the wrapped optimizer's result to float16, up or down at random."""

  optimizer: Optimizer

  def as_proto(self) -> embedding_hash_table_pb2.OptimizerConfig:
    proto = self.optimizer.as_proto()
    proto.stochastic_rounding_float16 = True
    return proto


@monolith_export
@dataclasses.dataclass(eq=False)
class ZerosInitializer(_OneofInitializer):
  """New values are 0."""

  _member = "zeros"


@monolith_export
@dataclasses.dataclass(eq=False)
class ConstantsInitializer(_OneofInitializer):
  """New values are `constant`."""

  _member = "constants"

  constant: float


@dataclasses.dataclass(eq=False)
class RandomUniformInitializer(_OneofInitializer):
  """New values are drawn uniformly from `[minval, maxval)`."""

  _member = "random_uniform"

  minval: float | None = None
  maxval: float | None = None


@dataclasses.dataclass(eq=False)
class BatchSoftmaxInitializer(Initializer):
  """The first guess of the interval that `BatchSoftmaxOptimizer` estimates.

  Raises:
    ValueError: `init_step_interval` is below 1.
  """

  init_step_interval: float

  def __post_init__(self) -> None:
    if self.init_step_interval < 1:
      raise ValueError(f"init_step_interval should be >= 1, while got {self.init_step_interval}")

  def as_proto(self) -> embedding_hash_table_pb2.InitializerConfig:
    return ConstantsInitializer(self.init_step_interval).as_proto()


@monolith_export
@dataclasses.dataclass(eq=False)
class OneBitCompressor(_OneofCompressor):
  """One bit per value."""

  _member = "one_bit"

  step_size: int = 200
  amplitude: float = 0.05


@monolith_export
@dataclasses.dataclass(eq=False)
class FixedR8Compressor(_OneofCompressor):
  """Eight bits per value, linear over `[-fixed_range, fixed_range]`."""

  _member = "fixed_r8"
  _proto_names = {"fixed_range": "r"}

  fixed_range: float = 1.0


@monolith_export
@dataclasses.dataclass(eq=False)
class Fp16Compressor(_OneofCompressor):
  """Half precision."""

  _member = "fp16"


@monolith_export
@dataclasses.dataclass(eq=False)
class Fp32Compressor(_OneofCompressor):
  """No compression."""

  _member = "fp32"


@dataclasses.dataclass(eq=False)
class CuckooHashTableConfig(HashTableConfig):
  """The collisionless table.

  Args:
    initial_capacity: rows to make room for at once.
    feature_evict_every_n_hours: if positive, erase expired rows in the background this often.
  """

  initial_capacity: int = 1
  feature_evict_every_n_hours: int = 0

  def mutate_table(self, table_config: embedding_hash_table_pb2.EmbeddingHashTableConfig) -> None:
    table_config.initial_capacity = self.initial_capacity
    table_config.cuckoo.SetInParent()
    if self.feature_evict_every_n_hours > 0:
      table_config.enable_feature_eviction = True
      table_config.feature_evict_every_n_hours = self.feature_evict_every_n_hours


@dataclasses.dataclass(eq=False)
class GpucucoHashTableConfig(HashTableConfig):
  """The collisionless table in the memory of a GPU, where it is placed: `/device:GPU:0`.

  Args:
    initial_capacity: rows to make room for at once.
    feature_evict_every_n_hours: if positive, erase expired rows in the background this often.
  """

  initial_capacity: int = 1
  feature_evict_every_n_hours: int = 0

  def mutate_table(self, table_config: embedding_hash_table_pb2.EmbeddingHashTableConfig) -> None:
    CuckooHashTableConfig(self.initial_capacity, self.feature_evict_every_n_hours).mutate_table(
      table_config
    )
    table_config.gpucuco.SetInParent()


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
    """Returns the key by which slots are merged: equal configurations have equal strings."""
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
    """Returns the argument of `set_learning_rate_tensor`."""
    return self._learning_rate_tensor

  def set_learning_rate_tensor(self, learning_rate_tensor: tf.Tensor) -> None:
    self._learning_rate_tensor = learning_rate_tensor

  def call_learning_rate_fns(self) -> tf.Tensor:
    """Returns the learning rates as one float32 vector `[segments]`.

    Raises:
      Exception: there are none.
    """
    import tensorflow as tf  # late: tables of other frameworks take these configurations, too

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
