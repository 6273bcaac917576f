"""From a loss to a train op: gradients of dense variables and embeddings, clipped and applied.

    loss -> gradients -> clip -> all-reduce (dense only, synchronous training) -> apply

Clipping looks at the gradients of this rank only, before they are averaged.

`control_ops` and `dense_opt_ops`, lists of the default graph, are the ops that a synchronous table
waits for: the exchange of its gradients starts after the first (the fused dense all-reduce is under
way), the update of its rows after the second (dense variables are up to date).
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, TypeVar, Union

import tensorflow as tf

from monolith.native_training import clip_ops, device_utils, env_utils, hvd_lib
from monolith.native_training.ops import flat_buffer_ops as aligned_flat_ops
from monolith.native_training.tables import step_order

Gradient = Union[tf.Tensor, tf.IndexedSlices]
_OptionalGradient = TypeVar("_OptionalGradient", Gradient, Optional[Gradient])

# The number of values of all gradients together in a default histogram.
_HISTOGRAM_VALUES = 1 << 14

_GRAPH_LISTS = {
  "control_ops": step_order.control_ops,
  "dense_opt_ops": step_order.dense_opt_ops,
}


def __getattr__(name: str) -> list[tf.Operation]:
  if name in _GRAPH_LISTS:
    return _GRAPH_LISTS[name]()
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class GradClipType(enum.Enum):
  """Ways to clip gradients."""

  ClipByNorm = 1
  ClipByGlobalNorm = 2
  ClipByValue = 3
  ClipByDenseAndSparse = 4
  NoClip = 5


def allreduce_cond(
  grads: Sequence[_OptionalGradient], scale: tf.Tensor | float = 1
) -> Sequence[_OptionalGradient]:
  """Averages gradients over all ranks.

  The environment variable `MONOLITH_WITH_ALLREDUCE_FUSION` chooses how: `one` sends all of them as
  one buffer, `grouped` submits them together, any other value one by one.
  `MONOLITH_WITH_ALLREDUCE_FP16` sends half precision.

  Args:
    grads: tensors or slices; `None` stays `None`.
    scale: scalar, multiplies them first.

  Returns:
    The averages, in the same order.

  Raises:
    RuntimeError: the fusion is `multi`, which was removed.
  """
  fusion = os.environ.get("MONOLITH_WITH_ALLREDUCE_FUSION", "")
  if fusion == "multi":
    raise RuntimeError("Support for multi is dropped. Please use 'one' as the fusion strategy")
  if all(grad is None for grad in grads):
    return grads
  with _allreduce_device():
    return _allreduce(grads, scale, fusion)


def _allreduce_device() -> contextlib.AbstractContextManager:
  """Returns the scope of collectives: the current one, or the CPU if they have no kernels there."""
  if device_utils.within_placement_context_of("GPU") and not hvd_lib.has_gpu_kernels():
    return tf.device("/device:CPU:0")
  return contextlib.nullcontext()


def _allreduce(
  grads: Sequence[Gradient | None], scale: tf.Tensor | float, fusion: str
) -> list[Gradient | None]:
  together = [i for i, grad in enumerate(grads) if _can_fuse(grad)] if fusion else []
  result = list(grads)
  if fusion == "one" and together:
    reduced = _allreduce_as_one([grads[i] for i in together], scale)
  elif fusion == "grouped" and together:
    reduced = hvd_lib.grouped_allreduce(
      [_multiply(grads[i], scale) for i in together], **_allreduce_kwargs()
    )
  else:
    together, reduced = [], []
  for i, grad in zip(together, reduced):
    result[i] = grad
  for i, grad in enumerate(grads):
    if grad is not None and i not in together:
      result[i] = hvd_lib.allreduce(
        _multiply(grad, scale), name=f"hvd_ar_{i}", **_allreduce_kwargs()
      )
  return result


def _allreduce_kwargs() -> dict[str, Any]:
  compression = hvd_lib.lib.Compression
  use_fp16 = env_utils.get_bool("MONOLITH_WITH_ALLREDUCE_FP16")
  return {
    "op": hvd_lib.lib.Average,
    "compression": compression.fp16 if use_fp16 else compression.none,
  }


def _can_fuse(grad: Gradient | None) -> bool:
  # Slices are not fused: as dense tensors they would be as large as their variable.
  return isinstance(grad, tf.Tensor) and grad.dtype == tf.float32


def _allreduce_as_one(grads: list[tf.Tensor], scale: tf.Tensor | float) -> list[tf.Tensor]:
  with tf.device("/device:CPU:0"):
    flat = aligned_flat_ops.aligned_flat_concat(grads, tf.cast(scale, tf.float32))
  step_order.control_ops().append(flat.op)
  reduced = hvd_lib.allreduce(flat, name="hvd_ar_fuse_one", **_allreduce_kwargs())
  with tf.device("/device:CPU:0"):
    return aligned_flat_ops.aligned_flat_split(grads, reduced)


def _multiply(grad: Gradient, scale: tf.Tensor | float) -> Gradient:
  if isinstance(scale, (int, float)) and scale == 1:
    return grad
  return _map_values(grad, lambda values: values * tf.cast(scale, values.dtype))


def _map_values(grad: Gradient, function: Any) -> Gradient:
  """Applies a function to the values of a gradient of either kind."""
  if isinstance(grad, tf.IndexedSlices):
    return tf.IndexedSlices(function(grad.values), grad.indices, grad.dense_shape)
  return function(grad)


def _will_allreduce(use_allreduce: bool) -> bool:
  return (
    use_allreduce and hvd_lib.is_enabled() and not env_utils.get_bool("MONOLITH_SKIP_ALLREDUCE")
  )


class _Target(NamedTuple):
  """A variable or embedding that the loss is differentiated by.

  Attributes:
    grad: its gradient.
    var: a dense variable, or a looked-up embedding or layout.
    name: feature name and name of the tensor, or name of the variable.
  """

  grad: Gradient
  var: Any
  name: str


class _Clipped(NamedTuple):
  """Gradients after clipping.

  Attributes:
    dense: the variables' gradients.
    sparse: the embeddings' gradients.
    dense_scale: a factor that is still to be applied to the dense ones.
    sparse_scale: a factor that is still to be applied to the sparse ones.
  """

  dense: list[Gradient]
  sparse: list[Gradient]
  dense_scale: tf.Tensor | float = 1
  sparse_scale: tf.Tensor | float = 1


def apply_gradients_with_var_optimizer(
  ctx: Any,
  feature_columns: Iterable[Any],
  var_opt: tf.compat.v1.train.Optimizer,
  loss: tf.Tensor,
  clip_type: GradClipType = GradClipType.ClipByGlobalNorm,
  clip_norm: float | None = None,
  global_step: tf.Variable | None = None,
  grads_and_vars_summary: bool = False,
  use_allreduce: bool = False,
  ue_gradient_check: bool = False,
  ue_fc_names: Sequence[str] | None = None,
  ue_euclidean_norm_threshold: float = 0.0,
  dense_weight_decay: float = 0.0,
  features: Mapping[str, tf.Tensor] | None = None,
  sparse_clip_norm: float | None = None,
  sparse_norm_warmup_steps: int | None = None,
  dense_reduce_mean: bool = False,
  batch_size: int | tf.Tensor = 1,
  is_fused_layout: bool = False,
  gradient_histograms: bool = False,
) -> tf.Operation:
  """Returns the train op of a loss.

  Args:
    ctx: the task's `NativeContext`.
    feature_columns: the columns whose embeddings are trained.
    var_opt: the optimizer of dense variables without an `optimizer` of their own.
    loss: scalar.
    clip_type: how gradients are clipped; not at all if `clip_norm` is `None`.
    clip_norm: the limit of the norm.
    global_step: incremented after all updates; `None` to leave it alone.
    grads_and_vars_summary: whether to write summaries of variables and gradients.
    use_allreduce: whether ranks average their dense gradients.
    ue_gradient_check: whether to drop the gradients of targets named in `ue_fc_names`, or called
      `uue`, while the feature of that name is small.
    ue_fc_names: names of features, which are also part of the targets' names.
    ue_euclidean_norm_threshold: a feature whose norm is not above it is small.
    dense_weight_decay: times the variable is added to the averaged gradient.
    features: the batch, for the check.
    sparse_clip_norm: the limit for embeddings, `clip_norm` by default.
    sparse_norm_warmup_steps: the limit for embeddings grows from 0 during that many steps.
    dense_reduce_mean: whether to divide dense gradients by `batch_size`.
    batch_size: number of examples.
    is_fused_layout: whether embeddings are the layouts of `ctx.layout_factory`.
    gradient_histograms: whether to summarise samples of the gradients, which costs next to nothing.

  Raises:
    AssertionError: `var_opt` is of another kind.
    KeyError: a feature of the check is missing.
  """
  assert isinstance(
    var_opt, tf.compat.v1.train.Optimizer
  ), f"var_opt is {var_opt!r}, want a tf.compat.v1.train.Optimizer"
  with device_utils.maybe_device_if_allowed("/device:GPU:0"):
    dense, sparse = _compute_gradients(ctx, list(feature_columns), var_opt, loss, is_fused_layout)
    if not dense and not sparse:
      return tf.no_op()
    if ue_gradient_check:
      check = (ue_fc_names or (), features or {}, ue_euclidean_norm_threshold)
      dense = [_drop_small_users(target, *check) for target in dense]
      sparse = [_drop_small_users(target, *check) for target in sparse]
    if dense_reduce_mean:
      dense = [
        target._replace(grad=_multiply(target.grad, 1.0 / tf.cast(batch_size, tf.float32)))
        for target in dense
      ]
    will_allreduce = _will_allreduce(use_allreduce)
    clipped = _clip(
      [target.grad for target in dense],
      [target.grad for target in sparse],
      clip_type,
      clip_norm,
      sparse_clip_norm,
      warmup=_get_warmup(global_step, sparse_norm_warmup_steps),
      # If a later op multiplies anyway, two factors are computed instead of all gradients.
      is_deferred=will_allreduce
      and not grads_and_vars_summary
      and not is_fused_layout
      and device_utils.within_placement_context_of("GPU"),
    )
    if grads_and_vars_summary:
      with tf.device("/device:CPU:0"):
        _add_summaries(
          [target._replace(grad=grad) for target, grad in zip(dense, clipped.dense)],
          [target._replace(grad=grad) for target, grad in zip(sparse, clipped.sparse)],
        )
    elif gradient_histograms:
      _add_histogram("dense_gradients", clipped.dense)
      _add_histogram("embedding_gradients", clipped.sparse)
    dense_grads = clipped.dense
    if will_allreduce:
      dense_grads = list(allreduce_cond(dense_grads, clipped.dense_scale))
    train_ops = _apply_dense(
      ctx, var_opt, dense_grads, [target.var for target in dense], dense_weight_decay
    )
    if sparse:
      with tf.device("/device:CPU:0"):
        train_ops.append(
          ctx.apply_embedding_gradients(
            [(grad, target.var) for grad, target in zip(clipped.sparse, sparse)],
            clipped.sparse_scale,
          )
        )
    if global_step is not None:
      # Ops that need the step of this batch read it before it moves.
      step_device = tf.device(global_step.device or "/device:CPU:0")
      with step_device, tf.control_dependencies([*train_ops, tf.identity(global_step)]):
        train_ops.append(
          ctx.add_async_function(
            lambda: tf.compat.v1.assign_add(global_step, 1), queue_name="global_step_queue"
          )
        )
    return tf.group(*train_ops)


def apply_gradients(
  ctx: Any,
  var_opt: tf.compat.v1.train.Optimizer,
  loss: tf.Tensor,
  clip_type: GradClipType = GradClipType.ClipByGlobalNorm,
  clip_norm: float | None = None,
  dense_weight_decay: float = 0.0,
  global_step: tf.Variable | None = None,
  use_allreduce: bool = False,
) -> tf.Operation:
  """Returns the train op of a loss of a fused-layout run, with fewer options.

  Args:
    ctx: the task's `NativeContext`.
    var_opt: for the dense variables.
    loss: scalar.
    clip_type: how gradients are clipped.
    clip_norm: the limit; no clipping if it is `None` or not positive.
    dense_weight_decay: times the variable is added to the gradient.
    global_step: incremented with the variables; `None` for no step.
    use_allreduce: whether ranks average their dense gradients.

  Raises:
    Exception: `clip_norm` is positive and `clip_type` is neither a norm nor the global norm.
  """
  dense, sparse = _compute_gradients(ctx, [], var_opt, loss, is_fused_layout=True)
  dense_grads = [target.grad for target in dense]
  sparse_grads = [target.grad for target in sparse]
  if clip_norm is not None and clip_norm > 0:
    if clip_type not in (GradClipType.ClipByGlobalNorm, GradClipType.ClipByNorm):
      raise Exception(f"{clip_type} is not supported yet!")
    clipped = _clip(dense_grads, sparse_grads, clip_type, clip_norm)
    dense_grads, sparse_grads = clipped.dense, clipped.sparse
  if _will_allreduce(use_allreduce):
    dense_grads = list(allreduce_cond(dense_grads))
  variables = [target.var for target in dense]
  dense_grads = _add_weight_decay(dense_grads, variables, dense_weight_decay)
  train_ops = []
  if sparse:
    with tf.device("/device:CPU:0"):
      train_ops.append(
        ctx.apply_embedding_gradients(
          [(grad, target.var) for grad, target in zip(sparse_grads, sparse)]
        )
      )
  # The tables read the step, which moves with the variables.
  with tf.control_dependencies(list(train_ops)):
    if variables:
      dense_op = var_opt.apply_gradients(list(zip(dense_grads, variables)), global_step=global_step)
      step_order.dense_opt_ops().append(dense_op)
      train_ops.append(dense_op)
    elif global_step is not None:
      train_ops.append(tf.compat.v1.assign_add(global_step, 1))
  return tf.group(*train_ops)


def _compute_gradients(
  ctx: Any,
  feature_columns: list[Any],
  var_opt: tf.compat.v1.train.Optimizer,
  loss: tf.Tensor,
  is_fused_layout: bool,
) -> tuple[list[_Target], list[_Target]]:
  """Returns the dense and the sparse targets that have a gradient."""
  variables = list(tf.compat.v1.trainable_variables())
  if is_fused_layout:
    names_and_embeddings = [("", layout) for layout in ctx.layout_factory.flattened_layout()]
  else:
    names_and_embeddings = [
      (column.feature_name, column.get_all_embeddings_concat()) for column in feature_columns
    ]
  # By identity: variables and tensors may compare element by element.
  embeddings = {id(embedding): (name, embedding) for name, embedding in names_and_embeddings}
  targets = variables + [embedding for _, embedding in embeddings.values()]
  if not targets:
    return [], []
  pairs = var_opt.compute_gradients(loss, targets, colocate_gradients_with_ops=True)
  dense = [
    _Target(grad, var, var.name) for grad, var in pairs[: len(variables)] if grad is not None
  ]
  sparse = []
  for (grad, var), (name, _) in zip(pairs[len(variables) :], embeddings.values()):
    if grad is None and is_fused_layout:
      grad = tf.zeros_like(var)
    if grad is not None:
      sparse.append(_Target(tf.convert_to_tensor(grad), var, f"{name} {var.name}".strip()))
  return dense, sparse


def _drop_small_users(
  target: _Target, names: Sequence[str], features: Mapping[str, tf.Tensor], threshold: float
) -> _Target:
  """Makes the gradient of a target 0 while one of the features it belongs to is small."""
  matching = [name for name in names if name in target.name]
  if not matching and "uue" in target.name:
    matching = list(names)
  for name in matching:
    if name not in features:
      raise KeyError(f"ue_fc_names has {name!r}, but features has only {sorted(features)}")
    norm = tf.linalg.norm(tf.cast(features[name], tf.float32))
    factor = tf.cast(norm > threshold, tf.float32)
    target = target._replace(grad=_multiply(target.grad, factor))
  return target


def _get_warmup(global_step: tf.Variable | None, steps: int | None) -> tf.Tensor | None:
  if not steps:
    return None
  if global_step is None:
    global_step = tf.compat.v1.train.get_or_create_global_step()
  return tf.minimum(tf.cast(global_step, tf.float32) / float(steps), 1.0)


def _clip(
  dense: list[Gradient],
  sparse: list[Gradient],
  clip_type: GradClipType,
  clip_norm: float | None,
  sparse_clip_norm: float | None = None,
  warmup: tf.Tensor | None = None,
  is_deferred: bool = False,
) -> _Clipped:
  """Clips gradients, or computes the factors that clip them."""
  if clip_norm is None or clip_type == GradClipType.NoClip:
    return _Clipped(dense, sparse)
  if clip_type == GradClipType.ClipByValue:
    return _Clipped(
      *(
        [_map_values(g, lambda v: tf.clip_by_value(v, -clip_norm, clip_norm)) for g in grads]
        for grads in (dense, sparse)
      )
    )
  if clip_type == GradClipType.ClipByNorm:
    return _Clipped(*([tf.clip_by_norm(g, clip_norm) for g in grads] for grads in (dense, sparse)))
  dense_scale: tf.Tensor | float = 1
  sparse_scale: tf.Tensor | float = 1
  if clip_type == GradClipType.ClipByGlobalNorm:
    norm = _norm_with_summary(dense + sparse, "global_gradient_norm")
    sparse_limit = sparse_clip_norm or clip_norm
    if warmup is not None:
      sparse_limit = sparse_limit * warmup
    dense_scale = _scale_to(clip_norm, norm)
    sparse_scale = _scale_to(sparse_limit, norm)
  else:
    if dense:
      dense_scale = _scale_to(clip_norm, _norm_with_summary(dense, "global_gradient_norm/dense"))
    if sparse:
      norm = _norm_with_summary(sparse, "global_gradient_norm/sparse")
      if sparse_clip_norm:
        sparse_scale = _scale_to(sparse_clip_norm, norm)
  if is_deferred:
    return _Clipped(dense, sparse, dense_scale, sparse_scale)
  return _Clipped(
    [_multiply(grad, dense_scale) for grad in dense],
    [_multiply(grad, sparse_scale) for grad in sparse],
  )


def _norm_with_summary(grads: list[Gradient], name: str) -> tf.Tensor:
  can_fuse = all(isinstance(g, tf.Tensor) and g.dtype == tf.float32 for g in grads)
  if can_fuse and device_utils.within_placement_context_of("GPU"):
    norm = clip_ops._global_norm(grads)
  else:
    norm = tf.linalg.global_norm(grads)
  with tf.device("/device:CPU:0"):
    tf.compat.v1.summary.scalar(name, norm)
  return norm


def _scale_to(limit: tf.Tensor | float, norm: tf.Tensor) -> tf.Tensor:
  """Returns `min(limit / norm, 1)`; 1 where there is nothing to scale."""
  return tf.where(tf.equal(norm, 0.0), 1.0, tf.minimum(limit / norm, 1.0))


def _add_weight_decay(
  grads: Sequence[Gradient], variables: Sequence[tf.Variable], weight_decay: float
) -> list[Gradient]:
  if not weight_decay:
    return list(grads)
  return [tf.convert_to_tensor(grad) + weight_decay * var for grad, var in zip(grads, variables)]


def _apply_dense(
  ctx: Any,
  var_opt: tf.compat.v1.train.Optimizer,
  grads: Sequence[Gradient],
  variables: list[tf.Variable],
  weight_decay: float,
) -> list[tf.Operation]:
  """Updates each variable with its own optimizer or with the common one."""
  grads = _add_weight_decay(grads, variables, weight_decay)
  groups: dict[int, tuple[Any, list[tuple[Any, tf.Variable]]]] = {}
  for grad, var in zip(grads, variables):
    optimizer = getattr(var, "optimizer", None) or var_opt
    groups.setdefault(id(optimizer), (optimizer, []))[1].append((_to_tuple(grad), var))
  ops = []
  for optimizer, pairs in groups.values():

    def apply(pairs: list[tuple[Any, tf.Variable]], optimizer: Any = optimizer) -> tf.Operation:
      return optimizer.apply_gradients([(_from_tuple(grad), var) for grad, var in pairs])

    ops.append(ctx.add_async_function(apply, (pairs,), queue_name="dense_opt_queue"))
  step_order.dense_opt_ops().extend(ops)
  return ops


def _to_tuple(grad: Gradient) -> Any:
  """Returns slices as a tuple, which can travel through a queue."""
  if isinstance(grad, tf.IndexedSlices):
    return (grad.values, grad.indices, grad.dense_shape)
  return grad


def _from_tuple(grad: Any) -> Gradient:
  return tf.IndexedSlices(*grad) if isinstance(grad, tuple) else grad


def _add_histogram(name: str, grads: Sequence[Gradient]) -> None:
  """Adds one histogram of the first values of each gradient."""
  if not grads:
    return
  size = max(1, _HISTOGRAM_VALUES // len(grads))
  with tf.device("/device:CPU:0"):
    values = [grad.values if isinstance(grad, tf.IndexedSlices) else grad for grad in grads]
    sampled = [tf.cast(tf.reshape(value, [-1])[:size], tf.float32) for value in values]
    together = tf.concat(sampled, axis=0)
    # The op fails for values that are not finite, which is not for a histogram to decide.
    # `boolean_mask` would build ten times as many ops.
    finite = tf.gather_nd(together, tf.where(tf.math.is_finite(together)))
    tf.compat.v1.summary.histogram(name, finite)


def _add_summaries(dense: list[_Target], sparse: list[_Target]) -> None:
  """Adds summaries of variables and gradients."""
  summary = tf.compat.v1.summary
  with tf.device("/device:CPU:0"):
    if dense:
      grads = [tf.reshape(tf.convert_to_tensor(target.grad), [-1]) for target in dense]
      sizes = [tf.size(grad) for grad in grads]
      summary.histogram("variable_gradient", tf.concat(grads, axis=0))
      summary.histogram("dense_grad_sizes", sizes)
      summary.scalar("dense_grad_total_size", tf.add_n(sizes))
      summary.scalar("dense_grad_total_num", len(grads))
      for target, grad in zip(dense, grads):
        name = target.name.replace(":", "_")
        summary.scalar(f"trainable_variable_norm/{name}", tf.linalg.norm(target.var))
        summary.histogram(f"trainable_variable/{name}", target.var)
        summary.scalar(f"gradient_norm/{name}", tf.linalg.norm(grad))
        summary.histogram(f"gradient/{name}", grad)
    for target in sparse:
      feature_name = target.name.partition(" ")[0].replace(":", "_")
      summary.histogram(f"{feature_name}_gradient", target.grad)
