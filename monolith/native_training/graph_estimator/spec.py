"""Defines the result of a model function, and the modes in which it is called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf
from tensorflow.python.saved_model.model_utils import export_output, export_utils

from monolith import _tensorflow

ClassificationOutput = export_output.ClassificationOutput
ExportOutput = export_output.ExportOutput
PredictOutput = export_output.PredictOutput
RegressionOutput = export_output.RegressionOutput


class ModeKeys:
  """The modes of a model function. They are plain strings."""

  TRAIN = "train"
  EVAL = "eval"
  PREDICT = "infer"


class _Fields(NamedTuple):
  mode: str
  predictions: Any
  loss: tf.Tensor | None
  train_op: tf.Tensor | tf.Operation | None
  eval_metric_ops: Mapping[str, Any]
  export_outputs: Mapping[str, Any] | None
  training_chief_hooks: tuple[tf.compat.v1.train.SessionRunHook, ...]
  training_hooks: tuple[tf.compat.v1.train.SessionRunHook, ...]
  scaffold: tf.compat.v1.train.Scaffold
  evaluation_hooks: tuple[tf.compat.v1.train.SessionRunHook, ...]
  prediction_hooks: tuple[tf.compat.v1.train.SessionRunHook, ...]


if TYPE_CHECKING:
  _Base = _Fields
else:
  # Where `tf.estimator` exists, its Estimator takes nothing but its own class and those below it.
  _Base = type("_Base", (_Fields, *_tensorflow.original_estimator_class("EstimatorSpec")), {})


class EstimatorSpec(_Base):
  """Holds the result of a model function.

  Attributes:
    mode: a mode of `ModeKeys`.
    predictions: a tensor, or a dict of tensors; needed in PREDICT mode.
    loss: what is trained, a scalar; needed in TRAIN and EVAL mode.
    train_op: makes one step; needed in TRAIN mode.
    eval_metric_ops: name -> (value, update op), or a metric of Keras.
    export_outputs: signature name -> `ExportOutput`; in PREDICT mode the predictions by default.
    training_chief_hooks: hooks of the chief's training session.
    training_hooks: hooks of every training session.
    scaffold: how variables are initialized, saved and restored.
    evaluation_hooks: hooks of evaluations.
    prediction_hooks: hooks of predictions.
  """

  __slots__ = ()

  def __new__(
    cls,
    mode: str,
    predictions: Any = None,
    loss: tf.Tensor | None = None,
    train_op: tf.Tensor | tf.Operation | None = None,
    eval_metric_ops: Mapping[str, Any] | None = None,
    export_outputs: Mapping[str, Any] | None = None,
    training_chief_hooks: Iterable[tf.compat.v1.train.SessionRunHook] | None = None,
    training_hooks: Iterable[tf.compat.v1.train.SessionRunHook] | None = None,
    scaffold: tf.compat.v1.train.Scaffold | None = None,
    evaluation_hooks: Iterable[tf.compat.v1.train.SessionRunHook] | None = None,
    prediction_hooks: Iterable[tf.compat.v1.train.SessionRunHook] | None = None,
  ) -> EstimatorSpec:
    """Checks what the mode needs.

    Raises:
      ValueError: something that the mode needs is missing, or the loss is no scalar.
      TypeError: something has another type.
    """
    if predictions is None and mode == ModeKeys.PREDICT:
      raise ValueError("Missing predictions: a model function must return them in PREDICT mode.")
    if train_op is None and mode == ModeKeys.TRAIN:
      raise ValueError("Missing train_op: a model function must return one in TRAIN mode.")
    if scaffold is None:
      scaffold = tf.compat.v1.train.Scaffold()
    elif not isinstance(scaffold, tf.compat.v1.train.Scaffold):
      raise TypeError(f"scaffold is {scaffold!r}, want a tf.compat.v1.train.Scaffold")
    if mode == ModeKeys.PREDICT:
      export_outputs = export_utils.get_export_outputs(export_outputs, predictions)
    # Not through the base's, which takes fields of the class that it has beside it.
    return tuple.__new__(
      cls,
      (
        mode,
        _check_predictions(predictions),
        _check_loss(loss, mode),
        _check_train_op(train_op),
        _check_metrics(eval_metric_ops),
        export_outputs,
        _check_hooks("training_chief_hooks", training_chief_hooks),
        _check_hooks("training_hooks", training_hooks),
        scaffold,
        _check_hooks("evaluation_hooks", evaluation_hooks),
        _check_hooks("prediction_hooks", prediction_hooks),
      ),
    )

  def _replace(self, **fields: Any) -> EstimatorSpec:
    """Returns a copy with other fields.

    Raises:
      ValueError: the mode is to be another one, or a field does not fit it.
    """
    if fields.get("mode", self.mode) != self.mode:
      raise ValueError(f"the mode is {self.mode!r}, which cannot become {fields['mode']!r}")
    return EstimatorSpec(**{**dict(zip(self._fields, self)), **fields})


def check(spec: Any) -> Any:
  """Returns what a model function has returned, if it is usable.

  Raises:
    ValueError: it is neither an `EstimatorSpec` nor `tf.estimator`'s.
  """
  missing = [name for name in _Fields._fields if not hasattr(spec, name)]
  if missing:
    raise ValueError(f"model_fn should return an EstimatorSpec, but has returned {spec!r}")
  return spec


def _check_loss(loss: Any, mode: str) -> tf.Tensor | None:
  if loss is None:
    if mode in (ModeKeys.TRAIN, ModeKeys.EVAL):
      raise ValueError(f"Missing loss: a model function must return one in mode {mode!r}.")
    return None
  loss = tf.convert_to_tensor(loss)
  if loss.shape.num_elements() not in (None, 1):
    raise ValueError(f"Loss must be scalar, but is {loss}")
  # Metrics and curves take scalars.
  return loss if loss.shape.rank == 0 else tf.reshape(loss, [])


def _check_predictions(predictions: Any) -> Any:
  if predictions is None:
    return {}
  tensors = predictions if isinstance(predictions, Mapping) else {"predictions": predictions}
  for name, tensor in tensors.items():
    if not tf.is_tensor(tensor):
      raise TypeError(f"{name} of the predictions is {tensor!r}, want a tensor")
  return predictions


def _check_train_op(train_op: Any) -> tf.Tensor | tf.Operation | None:
  if train_op is None or isinstance(train_op, tf.Operation):
    return train_op
  if not tf.is_tensor(train_op):
    raise TypeError(f"train_op is {train_op!r}, want an operation or a tensor")
  return train_op.op if isinstance(train_op, tf.Variable) else train_op


def _check_metrics(metrics: Mapping[str, Any] | None) -> Mapping[str, Any]:
  if metrics is None:
    return {}
  if not isinstance(metrics, Mapping):
    raise TypeError(f"eval_metric_ops is {metrics!r}, want a dict of metrics by name")
  local_variables = tf.compat.v1.get_collection_ref(tf.compat.v1.GraphKeys.LOCAL_VARIABLES)
  for name, metric in metrics.items():
    if is_keras_metric(metric):
      # Its variables start anew in every session, as those of tf.compat.v1.metrics do.
      known = {id(variable) for variable in local_variables}
      local_variables += [v for v in metric.variables if id(v) not in known]
    elif not isinstance(metric, (tuple, list)) or len(metric) != 2:
      raise TypeError(
        f"The metric {name!r} is {metric!r}, want (value, update op) or a metric of Keras"
      )
  return metrics


def is_keras_metric(metric: Any) -> bool:
  """Tells whether a metric is an object of Keras, of any version."""
  return callable(getattr(metric, "result", None)) and hasattr(metric, "updates")


def _check_hooks(
  what: str, hooks: Iterable[tf.compat.v1.train.SessionRunHook] | None
) -> tuple[tf.compat.v1.train.SessionRunHook, ...]:
  hooks = tuple(hooks or ())
  for hook in hooks:
    if not isinstance(hook, tf.compat.v1.train.SessionRunHook):
      raise TypeError(f"{what} has {hook!r}, want SessionRunHooks")
  return hooks
