"""Writes messages about what a model predicted and what was true, one JSON object per example.

There is no network transport: messages are returned and written to a file where asked for.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence

import tensorflow as tf

from monolith.native_training.runtime.ops import gen_monolith_ops as deep_insight_ops

_FEATURE_REQ_TIME = "req_time"
_SAMPLE_RATE = "sample_rate"
_UID = "uid"

_HOSTNAME = socket.gethostname()


def deep_insight_client(
  enable_metrics_counter: bool = False,
  is_fake: bool = False,
  dump_filename: str | None = None,
  container: str = _HOSTNAME,
) -> tf.Tensor:
  """Returns the resource through which messages go.

  Args:
    enable_metrics_counter: emit the number of messages as a metric.
    is_fake: make messages without sending them, which is always so here.
    dump_filename: file that gets one TFRecord per message; its folders are created.
    container: resource container, by default the name of this machine.
  """
  if container == _HOSTNAME:
    # Some hosts have names that TensorFlow does not take for a container.
    container = re.sub(r"[^A-Za-z0-9./-]", "-", container)
  return deep_insight_ops.monolith_create_deep_insight_client(
    enable_metrics_counter=enable_metrics_counter,
    is_fake=is_fake,
    filename=dump_filename or "",
    container=container,
  )


def write_deep_insight(
  deep_insight_client_tensor: tf.Tensor,
  uids: tf.Tensor,
  req_times: tf.Tensor,
  labels: tf.Tensor,
  preds: tf.Tensor,
  sample_rates: tf.Tensor,
  model_name: str,
  target: str = "ctr_head",
  sample_ratio: float = 0.01,
  return_msgs: bool = False,
  use_zero_train_time: bool = False,
) -> tf.Tensor:
  """Writes one message per example about one target.

  Args:
    deep_insight_client_tensor: from `deep_insight_client`.
    uids: int64 `[B]`.
    req_times: int64 `[B]`.
    labels: float32, B elements.
    preds: float32, B elements.
    sample_rates: float32, B elements.
    model_name: goes into the messages.
    target: name of the prediction.
    sample_ratio: what the job asked for; every example makes a message.
    return_msgs: return the messages.
    use_zero_train_time: without effect, messages carry no training time.

  Returns:
    string `[B]`, the messages if `return_msgs`, otherwise empty strings.
  """
  return deep_insight_ops.monolith_write_deep_insight(
    deep_insight_client_tensor,
    uids,
    req_times,
    labels,
    preds,
    sample_rates,
    model_name=model_name,
    target=target,
    sample_ratio=sample_ratio,
    return_msgs=return_msgs,
    use_zero_train_time=use_zero_train_time,
  )


def write_deep_insight_v2(
  deep_insight_client_tensor: tf.Tensor,
  req_times: tf.Tensor,
  labels: tf.Tensor,
  preds: tf.Tensor,
  sample_rates: tf.Tensor,
  extra_fields_values: Sequence[tf.Tensor],
  extra_fields_keys: Sequence[str],
  model_name: str,
  targets: Sequence[str],
  sample_ratio: float = 0.01,
  return_msgs: bool = False,
  use_zero_train_time: bool = False,
) -> tf.Tensor:
  """Writes one message per example about several targets, with extra fields.

  Args:
    deep_insight_client_tensor: from `deep_insight_client`.
    req_times: int64 `[B]`.
    labels: float32 `[targets, B]`.
    preds: float32 `[targets, B]`.
    sample_rates: float32 `[targets, B]`.
    extra_fields_values: `[B]` each; float32, int64 and string go into the messages.
    extra_fields_keys: their names; one is `uid`, int64.
    model_name: goes into the messages.
    targets: names of the predictions.
    sample_ratio: what the job asked for; every example makes a message.
    return_msgs: return the messages.
    use_zero_train_time: without effect, messages carry no training time.

  Returns:
    string `[B]`, the messages if `return_msgs`, otherwise empty strings.
  """
  return deep_insight_ops.monolith_write_deep_insight_v2(
    deep_insight_client_tensor,
    req_times,
    labels,
    preds,
    sample_rates,
    list(extra_fields_values),
    model_name=model_name,
    extra_fields_keys=list(extra_fields_keys),
    targets=list(targets),
    sample_ratio=sample_ratio,
    return_msgs=return_msgs,
    use_zero_train_time=use_zero_train_time,
  )
