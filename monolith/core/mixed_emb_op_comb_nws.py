"""Embedding-size search: each step trains one sampled size per slot.

A slot has several candidate sizes; its embeddings of all sizes arrive side by side:

    slot a, sizes 2 3     slot b, sizes 1 4
    [a a | a a a          | b | b b b b]          input, T = 10
    [0 0 | a a a          | b | 0 0 0 0]          output, had 3 and 1 been sampled

Differences from ByteDance's Monolith: any number of sizes per slot, 0 included, instead of exactly
two. Distillation from a teacher is not supported.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import numpy as np
import tensorflow as tf

from monolith import _tensorflow

keras = _tensorflow.import_keras()


class ArchSummaries(NamedTuple):
  """Holds the result of `MixedEmbedOpComb.get_summaries`."""

  arch_entropy: tf.Tensor
  expected_emb_dims: tf.Tensor
  arch_weights_after_softmax_list: list[tuple[str, tf.Tensor]]


class MixedEmbedOpComb(keras.layers.Layer):
  """Masks all but one size per slot: `[batch, T]` to `[batch, T]`."""

  def __init__(
    self,
    slot_names: Sequence[str],
    embedding_size_choices_list: Sequence[Sequence[int]],
    warmup_steps: int,
    pretraining_steps: int,
    teacher_embedding_sizes_list: Optional[Sequence[int]] = None,
    distillation_mask: bool = False,
    **kwargs: Any,
  ):
    """Args:
      slot_names: names of the slots.
      embedding_size_choices_list: for each slot its candidate sizes.
      warmup_steps: kept for the caller's schedules.
      pretraining_steps: before this global step sizes are sampled uniformly, afterwards by the
        learnt weights.
      teacher_embedding_sizes_list: not supported.
      distillation_mask: not supported.
      **kwargs: what Keras takes.

    Raises:
      ValueError: the lists differ in length, or a slot has no size.
      NotImplementedError: a teacher is given.
    """
    super().__init__(**kwargs)
    if len(slot_names) != len(embedding_size_choices_list):
      raise ValueError(
        f"There are {len(slot_names)} slot_names, but {len(embedding_size_choices_list)} entries "
        "in embedding_size_choices_list"
      )
    for name, sizes in zip(slot_names, embedding_size_choices_list):
      if not sizes or min(sizes) < 0:
        raise ValueError(f"Slot {name} has embedding sizes {list(sizes)}, want some, none negative")
    if teacher_embedding_sizes_list is not None or distillation_mask:
      raise NotImplementedError("Distillation from a teacher is not supported")
    self._slot_names = list(slot_names)
    self._choices_list = [list(sizes) for sizes in embedding_size_choices_list]
    self._warmup_steps = warmup_steps
    self._pretraining_steps = pretraining_steps
    self._arch_embedding_weights = None

  def build(self, input_shape: Any) -> None:
    """Creates the architecture weights.

    Raises:
      AssertionError: the last dimension is not the sum of all sizes.
    """
    total = sum(sum(sizes) for sizes in self._choices_list)
    width = tf.compat.dimension_value(tf.TensorShape(input_shape)[-1])
    assert width == total, f"The input has {width} columns, the embedding sizes add up to {total}"
    self._arch_embedding_weights = self.add_weight(
      name="arch_embedding_weights",
      shape=[sum(len(sizes) for sizes in self._choices_list)],
      initializer=keras.initializers.RandomUniform(-1e-3, 1e-3),
      trainable=True,
    )
    super().build(input_shape)

  def call(self, inputs: tf.Tensor) -> tf.Tensor:
    global_step = tf.cast(tf.compat.v1.train.get_or_create_global_step(), tf.int64)
    is_pretraining = global_step < self._pretraining_steps
    masks = []
    for sizes, weights in zip(self._choices_list, self._softmax_weights()):
      uniform = tf.fill([len(sizes)], tf.constant(1.0 / len(sizes), weights.dtype))
      probabilities = tf.where(is_pretraining, uniform, weights)
      choice = tf.random.categorical(tf.math.log(probabilities)[tf.newaxis], 1)[0, 0]
      # The value is 1; its gradient is that of the sampled weight.
      straight_through = 1.0 + (weights - tf.stop_gradient(weights))
      mask = tf.one_hot(choice, len(sizes), dtype=weights.dtype) * straight_through
      masks.append(tf.repeat(mask, sizes))
    return inputs * tf.cast(tf.concat(masks, axis=0), inputs.dtype)

  def get_arch_embedding_weights(self) -> tf.Variable:
    """Returns the weights of all choices, slot by slot, before the softmax."""
    return self._arch_embedding_weights

  def get_summaries(self) -> ArchSummaries:
    """Returns the entropy of the choices, the expected total size and the choices' weights."""
    entropy = expected = tf.constant(0.0)
    named = []
    for name, sizes, weights in zip(self._slot_names, self._choices_list, self._softmax_weights()):
      entropy -= tf.reduce_sum(tf.math.xlogy(weights, weights))
      expected += tf.reduce_sum(weights * np.asarray(sizes, np.float32))
      for i, size in enumerate(sizes):
        named.append((f"arch_embedding_weights_after_softmax/{name}_{size}", weights[i]))
    return ArchSummaries(entropy, expected, named)

  def _softmax_weights(self) -> list[tf.Tensor]:
    counts = [len(sizes) for sizes in self._choices_list]
    parts = tf.split(tf.convert_to_tensor(self._arch_embedding_weights), counts)
    return [tf.nn.softmax(part) for part in parts]


class TeacherEmbeddingTransform(keras.layers.Layer):
  """Maps each block of a teacher's embeddings linearly to the largest size of its slot.

  `[batch, sum of teacher sizes]` to `[batch, sum of largest sizes]`.
  """

  def __init__(
    self,
    max_choice_per_embedding: Sequence[int],
    teacher_embedding_sizes_list: Sequence[int],
    **kwargs: Any,
  ):
    super().__init__(**kwargs)
    if len(max_choice_per_embedding) != len(teacher_embedding_sizes_list):
      raise ValueError(
        f"There are {len(max_choice_per_embedding)} entries in max_choice_per_embedding, but "
        f"{len(teacher_embedding_sizes_list)} in teacher_embedding_sizes_list"
      )
    self._max_choices = list(max_choice_per_embedding)
    self._teacher_sizes = list(teacher_embedding_sizes_list)
    self._kernels: list[tf.Variable] = []

  def build(self, input_shape: Any) -> None:
    width = tf.compat.dimension_value(tf.TensorShape(input_shape)[-1])
    total = sum(self._teacher_sizes)
    assert width == total, f"The input has {width} columns, the teacher sizes add up to {total}"
    self._kernels = [
      self.add_weight(name=f"transform_{i}", shape=[rows, columns], trainable=True)
      for i, (rows, columns) in enumerate(zip(self._teacher_sizes, self._max_choices))
    ]
    super().build(input_shape)

  def call(self, inputs: tf.Tensor) -> tf.Tensor:
    blocks = tf.split(inputs, self._teacher_sizes, axis=1)
    return tf.concat([tf.matmul(b, k) for b, k in zip(blocks, self._kernels)], axis=1)
