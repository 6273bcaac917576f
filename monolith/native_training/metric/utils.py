"""Makes deep insight messages from a model's features, labels and predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from monolith.native_training.metric import deep_insight_ops

_DEFAULT_TARGET = "ctr_head"


def write_deep_insight(
  features: Mapping[str, tf.Tensor],
  sample_ratio: float,
  model_name: str,
  labels: tf.Tensor | None = None,
  preds: tf.Tensor | None = None,
  target: str | None = None,
  targets: Sequence[str] | None = None,
  labels_list: Sequence[tf.Tensor] | None = None,
  preds_list: Sequence[tf.Tensor] | None = None,
  sample_rates_list: Sequence[tf.Tensor] | None = None,
  extra_fields_keys: Sequence[str] = [],  # noqa: B006, copied before it is extended
  enable_deep_insight_metrics: bool = True,
  enable_kafka_metrics: bool = False,
  dump_filename: str | None = None,
) -> tf.Tensor | tf.Operation:
  """Writes one message per example, about one target or about several.

  Args:
    features: needs `req_time`, `uid` and `sample_rate`, of B elements each, and the extra fields.
    sample_ratio: what the job asked for.
    model_name: goes into the messages.
    labels: B labels; of one target.
    preds: B predictions; of one target.
    target: name of the one target, `ctr_head` if None.
    targets: names of several targets; then the lists below are used instead.
    labels_list: B labels for each target.
    preds_list: B predictions for each target.
    sample_rates_list: B sample rates for each target, by default the feature for all of them.
    extra_fields_keys: features that go into the messages; `uid` always does. Only with `targets`.
    enable_deep_insight_metrics: emit the number of messages as a metric.
    enable_kafka_metrics: return the messages, for the hook that sends them.
    dump_filename: file for the messages; they are returned, too.

  Returns:
    string `[B]`, empty strings unless messages are asked for; `tf.no_op()` without `req_time`.

  Raises:
    ValueError: the lists are not as long as `targets`.
  """
  if deep_insight_ops._FEATURE_REQ_TIME not in features:
    return tf.no_op()
  return_msgs = bool(enable_kafka_metrics or dump_filename)
  client = deep_insight_ops.deep_insight_client(
    enable_metrics_counter=enable_deep_insight_metrics,
    is_fake=return_msgs,
    dump_filename=dump_filename,
  )
  req_times = _flat(features[deep_insight_ops._FEATURE_REQ_TIME])
  sample_rates = _flat(features[deep_insight_ops._SAMPLE_RATE])
  if not targets:
    return deep_insight_ops.write_deep_insight(
      deep_insight_client_tensor=client,
      uids=_flat(features[deep_insight_ops._UID]),
      req_times=req_times,
      labels=labels,
      preds=preds,
      sample_rates=sample_rates,
      model_name=model_name,
      target=_DEFAULT_TARGET if target is None else target,
      sample_ratio=sample_ratio,
      return_msgs=return_msgs,
    )

  if sample_rates_list is None:
    sample_rates_list = [sample_rates] * len(targets)
  extra_fields_keys = list(extra_fields_keys)
  if deep_insight_ops._UID not in extra_fields_keys:
    extra_fields_keys.append(deep_insight_ops._UID)
  return deep_insight_ops.write_deep_insight_v2(
    deep_insight_client_tensor=client,
    req_times=req_times,
    labels=_stack("labels_list", labels_list, len(targets)),
    preds=_stack("preds_list", preds_list, len(targets)),
    sample_rates=_stack("sample_rates_list", sample_rates_list, len(targets)),
    extra_fields_values=[_flat(features[key]) for key in extra_fields_keys],
    extra_fields_keys=extra_fields_keys,
    model_name=model_name,
    targets=targets,
    sample_ratio=sample_ratio,
    return_msgs=return_msgs,
  )


def _flat(tensor: tf.Tensor) -> tf.Tensor:
  return tf.reshape(tensor, [-1])


def _stack(name: str, tensors: Sequence[tf.Tensor] | None, num_targets: int) -> tf.Tensor:
  """`[num_targets, B]` of one tensor of B elements per target."""
  if tensors is None or len(tensors) != num_targets:
    found = "None" if tensors is None else f"{len(tensors)} tensors"
    raise ValueError(f"{name} is {found}, want one tensor for each of the {num_targets} targets")
  return tf.stack([tf.cast(_flat(tensor), tf.float32) for tensor in tensors])
