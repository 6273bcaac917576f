"""Hands looked-up embeddings to a model's slots, and carries gradients back to the tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from monolith.native_training import device_utils, feature, prefetch_queue, utils
from monolith.native_training.data import stream_positions
from monolith.native_training.driver import pooled_steps
from monolith.native_training.tables import gradient_checks, pooling, protocols, ps_transfer

POSTPUSH_QUEUE_NAME = "postpush_queue"


def get_req_time(features: Mapping[str, Any]) -> tf.Tensor | None:
  """Returns the time of request of a batch, `features["req_time"][0]`; `None` without it."""
  return features["req_time"][0] if "req_time" in features else None


def _carry_back(
  grads_and_vars: feature.GradsAndVars, embeddings: Mapping[str, tf.Tensor]
) -> list[tf.Tensor | None]:
  """Returns the gradient of each embedding, `None` where nothing depends on it.

  Args:
    grads_and_vars: pairs of a gradient and an embedding, or what was computed from embeddings.
    embeddings: what was looked up; none depends on another.
  """
  # tf.gradients would take a missing gradient for ones.
  pairs = [(grad, var) for grad, var in grads_and_vars if grad is not None]
  known = {id(var): grad for grad, var in pairs}
  if len(known) == len(pairs) and known.keys() <= set(map(id, embeddings.values())):
    return [known.get(id(embedding)) for embedding in embeddings.values()]
  return utils.propagate_back_gradients(pairs, embeddings.values())


def _are_on_gpu(embeddings: Mapping[str, tf.Tensor]) -> bool:
  """Returns whether embeddings come from tables on a GPU, which set the device of their results."""
  return bool(embeddings) and all("GPU" in tensor.device for tensor in embeddings.values())


def _gradients_after(
  embeddings: Iterable[tf.Tensor], name_to_gradient: dict[str, tf.Tensor]
) -> dict[str, tf.Tensor]:
  """Returns the gradients, one of which waits for the rows of the step; see `_step_after`."""
  name, gradient = next(iter(name_to_gradient.items()))
  with tf.control_dependencies(list(embeddings)):
    return {**name_to_gradient, name: tf.identity(gradient)}


def _step_after(embeddings: Iterable[tf.Tensor]) -> tf.Tensor:
  """Returns the value of the global step, once the rows of the step are there.

  Every update takes it, which orders the update after the lookup. Gradients alone do not: that of a
  sum does not depend on the rows.
  """
  # Read now: an asynchronous update runs in a later step.
  step = tf.identity(tf.compat.v1.train.get_or_create_global_step())
  with tf.control_dependencies(list(embeddings)):
    return tf.identity(step)


def _check_gradients(
  names: Sequence[str], gradients: Sequence[tf.Tensor | None]
) -> dict[str, tf.Tensor]:
  """Returns feature name -> checked gradient, without those that are `None`."""
  known = {name: grad for name, grad in zip(names, gradients) if grad is not None}
  checked = gradient_checks.check_gradients(
    [f"feature {name}" for name in known], list(known.values())
  )
  return dict(zip(known, checked))


class _CpuFeatureFactory(feature.FeatureFactoryFromEmbeddings):
  """The factory of local training and of training on parameter servers.

  Args:
    hash_table: the tables that take the gradients.
    embedding_ids: feature name -> ragged ids that were looked up.
    embeddings: feature name -> `[ids, dim]`.
    embedding_slices: what `create_embedding_slices` returned.
    req_time: when the batch was requested.
    async_function_mgr: runs the push.
    async_push: whether the push of a step runs during the next one.
    stream_batch: the position of the stream after the batch; the push records it.
    pooled_step: pools rows ahead of the step; `None` where the step does.
  """

  def __init__(
    self,
    hash_table: protocols.TableGroup,
    embedding_ids: dict[str, tf.RaggedTensor],
    embeddings: dict[str, tf.Tensor],
    embedding_slices: dict[pooling.SliceKey, tf.Tensor],
    req_time: tf.Tensor | None,
    async_function_mgr: prefetch_queue.AsyncFunctionMgr,
    async_push: bool = False,
    stream_batch: stream_positions.StreamBatch | None = None,
    pooled_step: pooled_steps.PooledStep | None = None,
  ):
    super().__init__(embeddings, embedding_slices)
    self._hash_table = hash_table
    self._embedding_ids = embedding_ids
    self._embeddings = embeddings
    self._req_time = req_time
    self._async_function_mgr = async_function_mgr
    self._async_push = async_push
    self._stream_batch = stream_batch
    self._is_stream_moved = False
    self._pooled_step = pooled_step

  def apply_gradients(
    self, grads_and_vars: feature.GradsAndVars, req_time: tf.Tensor | None = None, scale: Any = 1
  ) -> tf.Operation:
    """Returns the op that updates the tables, or hands the update to the next step.

    Args:
      grads_and_vars: pairs of a gradient and a looked-up embedding, or what was computed from it.
      req_time: when the batch was requested; by default what the constructor was given.
      scale: ignored.
    """
    del scale
    names = list(self._embeddings)
    gradients = _carry_back(grads_and_vars, self._embeddings)
    pooled = pooled_steps.PooledGradients([], [])
    if self._pooled_step is not None:
      pooled = self._pooled_step.find_gradients(
        {name: gradient for name, gradient in zip(names, gradients) if gradient is not None}
      )
    pooled_names = pooled.features()
    gradients = [
      None if name in pooled_names else gradient for name, gradient in zip(names, gradients)
    ]
    # The kernels of tables on a GPU check by themselves; here, gradients would have to be copied.
    is_on_gpu = _are_on_gpu(self._embeddings)
    name_to_gradient = (
      {name: gradient for name, gradient in zip(names, gradients) if gradient is not None}
      if is_on_gpu
      else _check_gradients(names, gradients)
    )
    pooled_gradients = gradient_checks.check_pooled_gradients(
      pooled.gradients,
      [f"feature {name}" for name in pooled_names],
      pooling.to_numbers(pooled.parts, pooled_names),
    )
    # A model may apply gradients in several calls, but the batch's samples count once.
    stream_batch = None if self._is_stream_moved else self._stream_batch
    self._is_stream_moved = True
    if not name_to_gradient and not pooled_names:
      if stream_batch is None:
        return tf.no_op()
      return stream_positions.get().move_after(None, stream_batch)
    name_to_ids = {name: self._embedding_ids[name].values for name in name_to_gradient}
    pooled_ids = {name: self._embedding_ids[name] for name in pooled_names}
    if is_on_gpu:
      # The step is on the host, and must not wait for the GPU.
      global_step = _step_after([])
      name_to_gradient = _gradients_after(self._embeddings.values(), name_to_gradient)
    elif self._pooled_step is not None:
      # Rows come out of a queue together with their ids.
      global_step = _step_after([ids.values for ids in self._embedding_ids.values()][:1])
    else:
      global_step = _step_after(self._embeddings.values())
    req_time = self._req_time if req_time is None else req_time

    def push(
      name_to_ids: Mapping[str, tf.Tensor],
      name_to_gradient: Mapping[str, tf.Tensor],
      pooled_ids: Mapping[str, tf.RaggedTensor],
      pooled_gradients: Sequence[tf.Tensor],
      id_split: protocols.IdSplit | None,
      global_step: tf.Tensor,
      req_time: tf.Tensor | None,
      stream_batch: dict[str, tf.Tensor] | None,
    ) -> tf.Operation:
      self._hash_table.set_id_split(name_to_ids, id_split)
      batch, lacks = None, []
      if stream_batch is not None:
        batch = stream_positions.StreamBatch(**stream_batch)
        lacks = stream_positions.get().lacks(batch)
      with ps_transfer.write_only_if(lacks):
        hash_table = self._hash_table
        if pooled_ids and self._pooled_step is not None:
          hash_table = self._pooled_step.apply_gradients(
            pooled_ids, pooled_gradients, pooled.parts, global_step, req_time
          )
        if name_to_ids:
          hash_table = hash_table.apply_gradients(
            {name: (ids, name_to_gradient[name]) for name, ids in name_to_ids.items()},
            global_step,
            req_time=req_time,
          )
        push_op = hash_table.as_op()
      if batch is None:
        return push_op
      # In the other order, a server that dies in between would lose the batch.
      return stream_positions.get().move_after(push_op, batch, lacks)

    id_split = self._hash_table.get_id_split(name_to_ids)
    return self._async_function_mgr.add_async_function(
      push,
      (
        name_to_ids,
        name_to_gradient,
        pooled_ids,
        pooled_gradients,
        id_split,
        global_step,
        req_time,
        None if stream_batch is None else stream_batch._asdict(),
      ),
      is_async=self._async_push,
      queue_name=POSTPUSH_QUEUE_NAME,
    )


class _FusedCpuFeatureFactory(feature.FeatureFactoryFromEmbeddings):
  """The factory of synchronous training, where tables remember the ids of a lookup themselves.

  Args:
    hash_table: the tables that take the gradients.
    name_to_embeddings: feature name -> `[ids, dim]`.
    name_to_embedding_slices: what `create_embedding_slices` returned.
    req_time: when the batch was requested.
    auxiliary_bundle: the tensors that the lookup left for the update.
    use_native_multi_hash_table: whether slots were not merged into tables.
  """

  def __init__(
    self,
    hash_table: protocols.ReorderedGroup,
    name_to_embeddings: dict[str, tf.Tensor],
    name_to_embedding_slices: dict[pooling.SliceKey, tf.Tensor],
    req_time: tf.Tensor | None,
    auxiliary_bundle: dict[str, tf.Tensor],
    use_native_multi_hash_table: bool,
  ):
    super().__init__(name_to_embeddings, name_to_embedding_slices)
    self._hash_table = hash_table
    self._name_to_embeddings = name_to_embeddings
    self._req_time = req_time
    self._auxiliary_bundle = auxiliary_bundle
    self._use_native_multi_hash_table = use_native_multi_hash_table

  def apply_gradients(
    self, grads_and_vars: feature.GradsAndVars, req_time: tf.Tensor | None = None, scale: Any = 1
  ) -> tf.Operation:
    """Returns the op that updates the tables; `scale` multiplies the gradients."""
    names = list(self._name_to_embeddings)
    with device_utils.maybe_device_if_allowed("/device:GPU:0"):
      gradients = _carry_back(grads_and_vars, self._name_to_embeddings)
    if all(gradient is None for gradient in gradients):
      return tf.no_op()
    # Gradients are matched with rows by their order, so none may be left out.
    gradients = [
      tf.zeros_like(self._name_to_embeddings[name]) if gradient is None else gradient
      for name, gradient in zip(names, gradients)
    ]
    name_to_gradient = _check_gradients(names, gradients)
    global_step = _step_after(self._name_to_embeddings.values())
    kwargs = {} if self._use_native_multi_hash_table else {"skip_merge_id": True}
    return self._hash_table.apply_gradients(
      name_to_gradient,
      auxiliary_bundle=self._auxiliary_bundle,
      global_step=global_step,
      req_time=self._req_time if req_time is None else req_time,
      scale=scale,
      **kwargs,
    ).as_op()
