"""Feature slots, slices and columns: how a TPU task declares its embeddings.

A *slot* is one vocabulary. A *slice* of a slot is one embedding table over it: bias, if any, is
slice 0, the vectors follow. A *column* is one feature of an example whose ids belong to a slot.

    slot 1, bias + dim 4          table_1_0 [vocab, 1]   table_1_1 [vocab, 4]
    column "user" of slot 1       features  user_0       user_1

The model's `logits_fn` runs twice. In the first pass there are no features: a lookup creates a
placeholder, which records that the column uses the slice. `Env.finalize` ends that pass. In the
second pass, after `Env.set_tpu_features`, a lookup returns the embedding that arrived for it; the
slots that are built then are not registered again.

With `merge_vector` the vector slices of a slot become one table of the summed dimension, and the
embeddings that arrive are split again.

Differences from ByteDance's Monolith: `is_finalized` is the flag; QR lookups work; 3-D columns can
have a bias, merged vectors and random out-of-vocabulary rows; the sequence mask is int32 in both
passes.
"""

from typing import Any, Callable, Optional

import tensorflow as tf

from monolith import _tensorflow
from monolith.core import hyperparams

# The size of a slot that is missing from the vocabulary.
DEFAULT_VOCAB_SIZE = 1

# An embedding whose L2 norm is smaller belongs to no id of the vocabulary.
_OOV_NORM = 1e-10

_Initializer = Callable[..., Any]
_LearningRateFn = Optional[Callable[[Any], Any]]

_tpu_embedding: Any = _tensorflow.import_tpu_embedding()
_BIAS_OPTIMIZER = _tpu_embedding.FtrlParameters(learning_rate=0.01)
_BIAS_INITIALIZER = tf.compat.v1.zeros_initializer()
_VECTOR_OPTIMIZER = _tpu_embedding.AdagradParameters(learning_rate=0.01)
_VECTOR_INITIALIZER = tf.compat.v1.random_uniform_initializer(-0.001, 0.001)


class FeatureSlice:
  """One embedding table of a slot. Two slices are equal only if they are the same object."""

  def __init__(
    self,
    feature_slot: "FeatureSlot",
    dim: int,
    slice_index: int,
    optimizer: Any = None,
    initializer: Optional[_Initializer] = None,
    learning_rate_fn: _LearningRateFn = None,
  ):
    self._feature_slot = feature_slot
    self._dim = dim
    self._slice_index = slice_index
    self._optimizer = optimizer
    self._initializer = initializer
    self._learning_rate_fn = learning_rate_fn

  def __repr__(self) -> str:
    return f"[FeatureSlice][slot_{self._feature_slot.slot_id()}][{self._slice_index}]"

  def __hash__(self) -> int:
    return hash((self._feature_slot.slot_id(), self._slice_index))

  def __eq__(self, other: Any) -> bool:
    return self is other

  @property
  def dim(self) -> int:
    return self._dim

  @property
  def slice_index(self) -> int:
    return self._slice_index

  @property
  def optimizer(self) -> Any:
    return self._optimizer

  @property
  def initializer(self) -> Optional[_Initializer]:
    return self._initializer

  @property
  def learning_rate_fn(self) -> _LearningRateFn:
    return self._learning_rate_fn


class FeatureSlot:
  """A vocabulary and its tables. Registers itself with the environment."""

  def __init__(
    self,
    env: "Env",
    slot_id: int,
    has_bias: bool = False,
    bias_optimizer: Any = _BIAS_OPTIMIZER,
    bias_initializer: _Initializer = _BIAS_INITIALIZER,
    bias_learning_rate_fn: _LearningRateFn = None,
    default_vec_optimizer: Any = _VECTOR_OPTIMIZER,
    default_vec_initializer: _Initializer = _VECTOR_INITIALIZER,
    default_vec_learning_rate_fn: _LearningRateFn = None,
    occurrence_threshold: Optional[int] = None,
    expire_time: Optional[int] = None,
  ):
    """Args:
      env: the task's environment.
      slot_id: key of the vocabulary.
      has_bias: whether slice 0 is a bias of dimension 1.
      bias_optimizer: TPU optimization parameters of the bias.
      bias_initializer: its initializer.
      bias_learning_rate_fn: global step to learning rate; None: that of the optimizer.
      default_vec_optimizer: optimizer of vector slices that name none.
      default_vec_initializer: initializer of vector slices that name none.
      default_vec_learning_rate_fn: learning rate of vector slices that name none.
      occurrence_threshold: kept for the model's own use.
      expire_time: kept for the model's own use.

    Raises:
      AssertionError: the slot exists already.
    """
    self._env = env
    self._slot_id = slot_id
    self._has_bias = has_bias
    self._bias_optimizer = bias_optimizer
    self._bias_initializer = bias_initializer
    self._bias_learning_rate_fn = bias_learning_rate_fn
    self._default_vec_optimizer = default_vec_optimizer
    self._default_vec_initializer = default_vec_initializer
    self._default_vec_learning_rate_fn = default_vec_learning_rate_fn
    self._occurrence_threshold = occurrence_threshold
    self._expire_time = expire_time
    self._feature_slices: list[FeatureSlice] = []
    self._merged_feature_slices: list[FeatureSlice] = []
    self._feature_columns: list[FeatureColumnV1] = []
    if has_bias:
      self._feature_slices.append(
        FeatureSlice(self, 1, 0, bias_optimizer, bias_initializer, bias_learning_rate_fn)
      )
    env.set_feature_slot(slot_id, self)

  def get_env(self) -> "Env":
    return self._env

  def slot_id(self) -> int:
    return self._slot_id

  def has_bias(self) -> bool:
    return self._has_bias

  def add_feature_slice(
    self,
    dim: int,
    optimizer: Any = None,
    initializer: Optional[_Initializer] = None,
    learning_rate_fn: _LearningRateFn = None,
  ) -> FeatureSlice:
    """Adds a table of dimension `dim`; what is None comes from the slot's defaults."""
    return self._add_slice(self._feature_slices, dim, optimizer, initializer, learning_rate_fn)

  def add_merged_feature_slice(
    self,
    dim: int,
    optimizer: Any = None,
    initializer: Optional[_Initializer] = None,
    learning_rate_fn: _LearningRateFn = None,
  ) -> FeatureSlice:
    """Adds a table in which vector slices were merged; `Env.finalize` does so."""
    return self._add_slice(
      self._merged_feature_slices, dim, optimizer, initializer, learning_rate_fn
    )

  def _add_slice(
    self,
    slices: list[FeatureSlice],
    dim: int,
    optimizer: Any,
    initializer: Optional[_Initializer],
    learning_rate_fn: _LearningRateFn,
  ) -> FeatureSlice:
    feature_slice = FeatureSlice(
      self,
      dim,
      len(slices),
      self._default_vec_optimizer if optimizer is None else optimizer,
      self._default_vec_initializer if initializer is None else initializer,
      self._default_vec_learning_rate_fn if learning_rate_fn is None else learning_rate_fn,
    )
    slices.append(feature_slice)
    return feature_slice

  def _add_feature_column(self, column: "FeatureColumnV1") -> None:
    self._feature_columns.append(column)

  @property
  def bias_optimizer(self) -> Any:
    return self._bias_optimizer

  @property
  def bias_initializer(self) -> _Initializer:
    return self._bias_initializer

  @property
  def bias_learning_rate_fn(self) -> _LearningRateFn:
    return self._bias_learning_rate_fn

  @property
  def default_vec_optimizer(self) -> Any:
    return self._default_vec_optimizer

  @property
  def default_vec_initializer(self) -> _Initializer:
    return self._default_vec_initializer

  @property
  def default_vec_learning_rate_fn(self) -> _LearningRateFn:
    return self._default_vec_learning_rate_fn

  @property
  def occurrence_threshold(self) -> Optional[int]:
    return self._occurrence_threshold

  @property
  def expire_time(self) -> Optional[int]:
    return self._expire_time

  @property
  def feature_slices(self) -> list[FeatureSlice]:
    return self._feature_slices

  @property
  def merged_feature_slices(self) -> list[FeatureSlice]:
    return self._merged_feature_slices

  @property
  def feature_columns(self) -> list["FeatureColumnV1"]:
    return self._feature_columns

  @property
  def vector_slices(self) -> list[FeatureSlice]:
    """The slices without the bias."""
    return self._feature_slices[1:] if self._has_bias else self._feature_slices


class FeatureColumnV1:
  """A feature whose embeddings are summed per example: lookups give `[batch, dim]`."""

  def __init__(self, feature_slot: FeatureSlot, fc_name: str):
    self._feature_slot = feature_slot
    self._fc_name = fc_name
    self._feature_slice_to_tf_placeholder: dict[FeatureSlice, tf.Tensor] = {}
    self._merged_feature_slice_to_tf_placeholder: dict[FeatureSlice, tf.Tensor] = {}
    self._bias: Optional[tf.Tensor] = None
    feature_slot._add_feature_column(self)
    if feature_slot.has_bias():
      self._bias = self._lookup(feature_slot.feature_slices[0])

  def get_env(self) -> "Env":
    return self._feature_slot.get_env()

  @property
  def feature_slot(self) -> FeatureSlot:
    return self._feature_slot

  @property
  def fc_name(self) -> str:
    return self._fc_name

  @property
  def feature_slice_to_tf_placeholder(self) -> dict[FeatureSlice, tf.Tensor]:
    """The tables this column reads: the merged ones with `merge_vector`."""
    if self.get_env().merge_vector:
      return self._merged_feature_slice_to_tf_placeholder
    return self._feature_slice_to_tf_placeholder

  def get_bias(self) -> tf.Tensor:
    """Returns the bias.

    Raises:
      AssertionError: the slot has none.
    """
    assert (
      self._feature_slot.has_bias()
    ), f"Slot {self._feature_slot.slot_id()} of column {self._fc_name} has no bias"
    return self._bias

  def embedding_lookup(
    self,
    feature_slice: FeatureSlice,
    init_minval_for_oov: Optional[float] = None,
    init_maxval_for_oov: Optional[float] = None,
  ) -> tf.Tensor:
    """Looks the column's ids up in a slice.

    Args:
      feature_slice: a slice of the column's slot.
      init_minval_for_oov: with `use_random_init_embedding_for_oov`, zero embeddings are replaced by
        random ones from here ...
      init_maxval_for_oov: ... to here.

    Returns:
      Float `[batch, dim]`: a placeholder in the first pass.

    Raises:
      AssertionError: the slice belongs to another slot.
      KeyError: the second pass lacks the embedding.
    """
    return self._lookup(feature_slice, init_minval_for_oov, init_maxval_for_oov)

  def _lookup(
    self,
    feature_slice: FeatureSlice,
    init_minval_for_oov: Optional[float] = None,
    init_maxval_for_oov: Optional[float] = None,
  ) -> tf.Tensor:
    assert feature_slice._feature_slot.slot_id() == self._feature_slot.slot_id(), (
      f"{feature_slice} is not a slice of slot {self._feature_slot.slot_id()} "
      f"of column {self._fc_name}"
    )
    env = self.get_env()
    if env._tpu_features is None:
      placeholders = self._feature_slice_to_tf_placeholder
      if feature_slice not in placeholders:
        placeholders[feature_slice] = self._create_placeholder(feature_slice)
      return placeholders[feature_slice]

    embedding = env._get_embedding(self._feature_slot, self._fc_name, feature_slice.slice_index)
    if env.use_random_init_embedding_for_oov and init_minval_for_oov is not None:
      return _replace_oov(embedding, init_minval_for_oov, init_maxval_for_oov)
    return embedding

  def _create_placeholder(self, feature_slice: FeatureSlice) -> tf.Tensor:
    return tf.compat.v1.placeholder(tf.float32, [None, feature_slice.dim])

  def _create_merged_placeholders(self) -> None:
    """Records that the column reads every merged slice of its slot."""
    for feature_slice in self._feature_slot.merged_feature_slices:
      placeholder = self._feature_slice_to_tf_placeholder.get(feature_slice)
      if placeholder is None:
        placeholder = self._create_placeholder(feature_slice)
      self._merged_feature_slice_to_tf_placeholder[feature_slice] = placeholder


class FeatureColumn3D(FeatureColumnV1):
  """A sequence feature: lookups give `[batch, max_seq_length, dim]`."""

  def __init__(self, feature_slot: FeatureSlot, max_seq_length: int, fc_name: str):
    self._max_seq_length = max_seq_length
    super().__init__(feature_slot, fc_name)

  @property
  def max_seq_length(self) -> int:
    return self._max_seq_length

  def embedding_lookup(
    self,
    feature_slice: FeatureSlice,
    max_seq_length: Optional[int] = None,
    init_minval_for_oov: Optional[float] = None,
    init_maxval_for_oov: Optional[float] = None,
  ) -> tf.Tensor:
    """Looks the column's sequences up in a slice, `[batch, max_seq_length, dim]`.

    Args:
      feature_slice: a slice of the column's slot.
      max_seq_length: ignored, the column's own counts.
      init_minval_for_oov: with `use_random_init_embedding_for_oov`, zero embeddings are replaced by
        random ones from here ...
      init_maxval_for_oov: ... to here.
    """
    del max_seq_length
    return self._lookup(feature_slice, init_minval_for_oov, init_maxval_for_oov)

  def size_tensor_lookup(self) -> tf.Tensor:
    """Returns int32 `[batch, max_seq_length]`, 1 where the sequence has an element."""
    features = self.get_env()._tpu_features
    if features is None:
      return tf.compat.v1.placeholder(tf.int32, [None, self._max_seq_length])
    row_lengths = _get_feature(features, f"{self._fc_name}_0_row_lengths")
    return tf.sequence_mask(row_lengths, self._max_seq_length, dtype=tf.int32)

  def _create_placeholder(self, feature_slice: FeatureSlice) -> tf.Tensor:
    return tf.compat.v1.placeholder(tf.float32, [None, self._max_seq_length, feature_slice.dim])


class Env:
  """Holds the state that the slots and columns of a task share."""

  def __init__(self, vocab_size_dict: dict[int, int], params: hyperparams.Params):
    """Args:
    vocab_size_dict: slot id to vocabulary size.
    params: needs `qr_multi_hashing`, `qr_hashing_threshold`, `qr_collision_rate`,
      `use_random_init_embedding_for_oov` and `merge_vector`.
    """
    self._vocab_size_dict = vocab_size_dict
    self._slot_id_to_feature_slot: dict[int, FeatureSlot] = {}
    self._tpu_features: Optional[dict[str, Any]] = None
    self._is_finalized = False
    self.set_params(params)

  def set_params(self, params: hyperparams.Params) -> None:
    self._qr_multi_hashing = params.qr_multi_hashing
    self._qr_hashing_threshold = params.qr_hashing_threshold
    self._qr_collision_rate = params.qr_collision_rate
    self._use_random_init_embedding_for_oov = params.use_random_init_embedding_for_oov
    self._merge_vector = params.merge_vector

  def set_feature_slot(self, slot_id: int, feature_slot: FeatureSlot) -> None:
    """Registers a slot; after `finalize` nothing is registered any more.

    Raises:
      AssertionError: the slot exists already.
    """
    if self._is_finalized:
      return
    assert (
      slot_id not in self._slot_id_to_feature_slot
    ), f"Feature slot with id: {slot_id} can not be created more than once."
    self._slot_id_to_feature_slot[slot_id] = feature_slot

  def set_tpu_features(self, tpu_features: dict[str, Any]) -> None:
    """Starts the second pass. With `merge_vector` the dict gains the split embeddings."""
    self._tpu_features = tpu_features
    if self._merge_vector:
      for slot in self._slot_id_to_feature_slot.values():
        self._split_merged_embedding(slot)

  def is_finalized(self) -> bool:
    return self._is_finalized

  def finalize(self) -> None:
    """Ends the first pass and, with `merge_vector`, merges the vector slices of each slot.

    Raises:
      AssertionError: it was called before.
    """
    assert not self._is_finalized, "Env can't be finalized more than once"
    self._is_finalized = True
    if self._merge_vector:
      self._merge_vector_in_same_slot()

  @property
  def vocab_size_dict(self) -> dict[int, int]:
    return self._vocab_size_dict

  @property
  def slot_id_to_feature_slot(self) -> dict[int, FeatureSlot]:
    assert self._is_finalized, "Slots are complete only after Env.finalize()"
    return self._slot_id_to_feature_slot

  @property
  def features(self) -> Optional[dict[str, Any]]:
    assert self._is_finalized, "There are no features before Env.finalize()"
    return self._tpu_features

  @property
  def merge_vector(self) -> bool:
    return self._merge_vector

  @property
  def use_random_init_embedding_for_oov(self) -> bool:
    return self._use_random_init_embedding_for_oov

  def vocab_size(self, slot_id: int) -> int:
    """Returns the vocabulary size of a slot, `DEFAULT_VOCAB_SIZE` when it is unknown."""
    return self._vocab_size_dict.get(slot_id, DEFAULT_VOCAB_SIZE)

  def uses_qr(self, slot_id: int) -> bool:
    """Tells whether the tables of a slot are split into a remainder and a quotient table."""
    return self._qr_multi_hashing and self.vocab_size(slot_id) > self._qr_hashing_threshold

  def qr_sizes(self, slot_id: int) -> tuple[int, int]:
    """Returns the rows of the remainder and of the quotient table of a slot."""
    rate = self._qr_collision_rate
    return self.vocab_size(slot_id) // rate + 1, rate + 1

  @property
  def _slot_to_dims(self) -> dict[int, list[int]]:
    return {
      slot_id: [feature_slice.dim for feature_slice in slot.feature_slices]
      for slot_id, slot in self._slot_id_to_feature_slot.items()
    }

  @property
  def _slot_to_merged_dims(self) -> dict[int, list[int]]:
    return {
      slot_id: [feature_slice.dim for feature_slice in slot.merged_feature_slices]
      for slot_id, slot in self._slot_id_to_feature_slot.items()
    }

  def _get_embedding(self, slot: FeatureSlot, fc_name: str, slice_index: int) -> tf.Tensor:
    """Returns the embedding of a column and an unmerged slice in the second pass."""
    key = f"{fc_name}_{slice_index}"
    if self._merge_vector or not self.uses_qr(slot.slot_id()):
      return _get_feature(self._tpu_features, key)
    return self._get_arrived(slot, key)

  def _get_arrived(self, slot: FeatureSlot, key: str) -> tf.Tensor:
    """Returns the embedding of a table as it arrived, both parts added up under QR hashing."""
    if not self.uses_qr(slot.slot_id()):
      return _get_feature(self._tpu_features, key)
    remainder = _get_feature(self._tpu_features, f"{key}_0")
    return remainder + _get_feature(self._tpu_features, f"{key}_1")

  def _merge_vector_in_same_slot(self) -> None:
    for slot in self._slot_id_to_feature_slot.values():
      if slot.has_bias():
        slot._merged_feature_slices.append(slot.feature_slices[0])
      if slot.vector_slices:
        slot.add_merged_feature_slice(sum(s.dim for s in slot.vector_slices))
      for column in slot.feature_columns:
        column._create_merged_placeholders()

  def _split_merged_embedding(self, slot: FeatureSlot) -> None:
    for column in slot.feature_columns:
      if slot.has_bias() and self.uses_qr(slot.slot_id()):
        key = f"{column.fc_name}_0"
        self._tpu_features[key] = self._get_arrived(slot, key)
      if not slot.vector_slices:
        continue
      merged_index = 1 if slot.has_bias() else 0
      merged = self._get_arrived(slot, f"{column.fc_name}_{merged_index}")
      parts = tf.split(merged, [s.dim for s in slot.vector_slices], axis=-1)
      for feature_slice, part in zip(slot.vector_slices, parts):
        self._tpu_features[f"{column.fc_name}_{feature_slice.slice_index}"] = part


def _get_feature(features: dict[str, Any], key: str) -> tf.Tensor:
  if key not in features:
    raise KeyError(f"There is no feature {key}; there are {sorted(features)}")
  return features[key]


def _replace_oov(embedding: tf.Tensor, minval: float, maxval: Optional[float]) -> tf.Tensor:
  """Replaces zero rows of `[..., dim]` by random ones."""
  assert maxval is not None, "init_maxval_for_oov is None though init_minval_for_oov is given"
  norms = tf.norm(embedding, axis=-1, keepdims=True)
  shape = tf.shape(embedding)
  noise = tf.random.uniform(shape, minval, maxval, dtype=embedding.dtype)
  return tf.where(tf.broadcast_to(norms < _OOV_NORM, shape), noise, embedding)
