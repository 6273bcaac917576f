"""`BaseEmbeddingHostCall`: scalar metrics and a sampled AUC, from every core to the host.

The AUC inputs are recorded under fixed names, other tensors under names that say how to reduce them
(`_avg`, `_max`, `_sum`). Samples are kept by user: only those whose `uid_bucket` is below
`_RATIO_N * _UID_SAMPLE_RATE` count.

With caching, every core keeps the samples of the last n steps in variables of its own and the host
reads them every n steps, so that steps without a host call are not lost:

    step mod n      1            2            ...  0 (= n)
    variable        [s1 0 .. 0]  [s1 s2 0 ..]      [s1 s2 .. sn]      s: topk samples of one step

The samples of a step are those with the smallest buckets. The variables are in no checkpoint: put
`tpu_var_restore_hooks` among the training hooks.

Differences from ByteDance's Monolith: missing inputs are skipped, one sample is enough, `auc` is
written after its update, variables that are not yet full do not count their empty places.
"""

from typing import Any, Optional

import tensorflow as tf

from monolith.core import base_host_call, tpu_variable

_LABELS = "labels_for_auc_calculation"
_PREDS = "y_pred_for_auc_calculation"
_SAMPLE_RATE = "sample_rate"
_REQ_TIME = "req_time"
_UID_BUCKET = "uid_bucket"
_AUC_INPUTS = (_LABELS, _PREDS, _SAMPLE_RATE, _REQ_TIME, _UID_BUCKET)

_UID = "uid"
_RATIO_N = 1000
_UID_SAMPLE_RATE = 0.01

_DI_SAMPLE_RATES = "di_example_sample_rates"
_DI_LABELS = "di_labels"
_DI_PREDS = "di_preds"
_DI_REQ_TIMES = "di_req_times"

_ACCUMULATED_TIMES = "tpu_variables_accumulated_times"
# AUC input, variable, dtype: topk values of every step ...
_SAMPLE_VARIABLES = (
  (_LABELS, "labels_tpu_variable", tf.float32),
  (_PREDS, "preds_tpu_variable", tf.float32),
  (_UID_BUCKET, "uid_buckets_tpu_variable", tf.int32),
)
# ... or one value.
_STEP_VARIABLES = (
  (_REQ_TIME, "req_times_tpu_variable", tf.int64),
  (_SAMPLE_RATE, "sample_rates_tpu_variable", tf.float32),
)
_TPU_VARIABLES = "monolith_tpu_variables"


class TPUVariableRestoreHook(tf.compat.v1.train.SessionRunHook):
  """Runs an op whenever a session was created."""

  def __init__(self, op: tf.Operation):
    self._op = op

  def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
    del coord
    session.run(self._op)


class BaseEmbeddingHostCall(base_host_call.BaseHostCall):
  """Writes metrics to `<output_dir>/host_call`."""

  def __init__(
    self,
    output_dir: str,
    enable_host_call: bool,
    enable_deepinsight: bool,
    enable_host_call_scalar_metrics: bool,
    enable_caching_with_tpu_var_mode: bool,
    top_k_sampling_num_per_core: int,
    params: dict[str, Any],
  ):
    """Args:
      output_dir: summaries go to its folder `host_call`.
      enable_host_call: overridden by `params["enable_host_call"]`.
      enable_deepinsight: whether the AUC inputs are written too, serialized, as text.
      enable_host_call_scalar_metrics: whether tensors other than the AUC inputs are recorded.
      enable_caching_with_tpu_var_mode: whether samples are cached between host calls; needs scalar
        metrics and a host call interval above 1.
      top_k_sampling_num_per_core: samples that a core caches of each step.
      params: the model function's params: `enable_host_call`, `cpu_test`, `host_call_every_n_steps`
        and, unless `cpu_test`, `context`.

    Raises:
      AssertionError: caching with an interval of 1 or less.
    """
    del enable_host_call
    super().__init__(output_dir, params["enable_host_call"])
    self._enable_deepinsight = enable_deepinsight
    self._enable_scalar_metrics = enable_host_call_scalar_metrics
    self._enable_caching = enable_caching_with_tpu_var_mode
    self._top_k = top_k_sampling_num_per_core
    self._every_n_steps = params["host_call_every_n_steps"]
    self._context = None if params["cpu_test"] else params["context"]
    self._cache_inputs: dict[str, tf.Tensor] = {}
    self._tpu_var_restore_hooks: list[TPUVariableRestoreHook] = []
    if self._enable_caching:
      assert (
        self._every_n_steps > 1
      ), f"Caching needs host_call_every_n_steps > 1, got {self._every_n_steps}"

  @property
  def tpu_var_restore_hooks(self) -> list[TPUVariableRestoreHook]:
    """Hooks that set the cached variables to zero; complete after `generate_host_call_hook`."""
    return self._tpu_var_restore_hooks

  def record_summary_tensor(self, name: str, tensor: Any) -> None:
    """Records a tensor as in the base; without scalar metrics only the AUC inputs."""
    if not self._enable_host_call:
      return
    if name not in _AUC_INPUTS:
      if self._enable_scalar_metrics:
        self._record(name, tensor)
    elif self._enable_caching:
      assert name not in self._cache_inputs, f"Tensor {name} has been recorded already"
      self._cache_inputs[name] = tf.reshape(tensor, [-1])
    else:
      self._record(name, tensor)

  def generate_host_call_hook(self) -> base_host_call.HostCallHook:
    if not self._enable_host_call:
      return None
    if self._enable_caching and self._enable_scalar_metrics and self._cache_inputs:
      self._update_and_record_tpu_variables()
    return self._write_summary_ops, self.compress_tensors()

  # ----------------------------------------------------------------- on the cores

  def _update_and_record_tpu_variables(self) -> None:
    """Adds this step's samples to the variables and records their new values."""
    n = self._every_n_steps
    step = tf.reshape(self._tensors[0], [])
    # The first step of an interval starts with empty variables.
    is_first = tf.equal(tf.math.floormod(step, n), 1)
    counter = self._create_tpu_variable(_ACCUMULATED_TIMES, [], tf.int32)
    count = tf.where(is_first, tf.zeros([], tf.int32), counter.read_value())

    new_values = [(counter, count + 1)]
    top_k, deltas = self._top_k_samples()
    for source, name, dtype in _SAMPLE_VARIABLES:
      if source in deltas:
        new_values.append(
          self._accumulate(name, deltas[source], dtype, top_k * n, count * top_k, is_first)
        )
    for source, name, dtype in _STEP_VARIABLES:
      if source in self._cache_inputs:
        delta = self._cache_inputs[source][:1]
        new_values.append(self._accumulate(name, delta, dtype, n, count, is_first))

    with tf.control_dependencies([variable.assign(value) for variable, value in new_values]):
      for variable, value in new_values:
        self._record(variable.name, tf.identity(value))
    self._tpu_var_restore_hooks.append(
      TPUVariableRestoreHook(tf.group([variable.initializer for variable, _ in new_values]))
    )

  def _top_k_samples(self) -> tuple[int, dict[str, tf.Tensor]]:
    """Returns k and the k samples of this step with the smallest buckets."""
    inputs = {
      source: self._cache_inputs[source]
      for source, _, _ in _SAMPLE_VARIABLES
      if source in self._cache_inputs
    }
    sizes = {source: tf.compat.dimension_value(t.shape[0]) for source, t in inputs.items()}
    if len(set(sizes.values())) > 1 or None in sizes.values():
      raise ValueError(f"Cached tensors have sizes {sizes}, want one static size")
    top_k = min([self._top_k, *sizes.values()])
    if _UID_BUCKET in inputs:
      _, indices = tf.math.top_k(-tf.cast(inputs[_UID_BUCKET], tf.int32), k=top_k)
      return top_k, {source: tf.gather(tensor, indices) for source, tensor in inputs.items()}
    return top_k, {source: tensor[:top_k] for source, tensor in inputs.items()}

  def _accumulate(
    self,
    name: str,
    delta: tf.Tensor,
    dtype: tf.DType,
    size: int,
    offset: tf.Tensor,
    is_first: tf.Tensor,
  ) -> tuple[tpu_variable.ReplicatedVariable, tf.Tensor]:
    variable = self._create_tpu_variable(name, [size], dtype)
    base = variable.read_value()
    base = tf.where(is_first, tf.zeros_like(base), base)
    return variable, self._compute_new_value(base, tf.cast(delta, dtype), offset)

  def _compute_new_value(self, base: tf.Tensor, delta: tf.Tensor, offset: Any) -> tf.Tensor:
    """Returns `base` with `delta` added from index `offset` on, wrapping around at the end.

    Raises:
      AssertionError: they are not vectors of the same dtype.
    """
    base, delta = tf.convert_to_tensor(base), tf.convert_to_tensor(delta)
    assert (
      base.shape.rank == 1 and delta.shape.rank == 1
    ), f"base has shape {base.shape} and delta {delta.shape}, want vectors"
    assert base.dtype == delta.dtype, f"base is {base.dtype}, delta is {delta.dtype}"
    padding = tf.shape(base)[0] - tf.shape(delta)[0]
    return base + tf.roll(tf.pad(delta, [[0, padding]]), shift=offset, axis=0)

  def _create_tpu_variable(
    self, name: str, shape: list[int], dtype: tf.DType
  ) -> tpu_variable.ReplicatedVariable:
    """Creates a variable with a copy on every core, or one copy without a TPU."""
    copies = []
    # Variables live outside of the TPU computation and of its training loop.
    with tf.init_scope():
      for i, device in enumerate(self._core_devices()):
        with tf.device(device):
          copies.append(
            tf.compat.v1.get_variable(
              name if i == 0 else f"{name}/replica_{i}",
              shape=shape,
              dtype=dtype,
              initializer=tf.compat.v1.zeros_initializer(),
              trainable=False,
              use_resource=True,
              collections=[_TPU_VARIABLES],
            )
          )
    return tpu_variable.ReplicatedVariable(name, copies)

  def _core_devices(self) -> list[Optional[str]]:
    if self._context is None:
      return [None]
    devices = []
    for replica in range(self._context.num_replicas):
      host, ordinal = self._context.device_for_replica(replica)
      spec = tf.DeviceSpec.from_string(host)
      devices.append(spec.replace(device_type="TPU", device_index=ordinal).to_string())
    return devices

  # ------------------------------------------------------------------- on the host

  def _write_summary_ops(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
    """Writes everything that was recorded; returns the ops to run."""
    global_step, columns = self.decompress_tensors(tensors)
    recorded = dict(zip(self._tensor_names, columns))
    scalars = {
      name: base_host_call.reduce_scalar(name, column)
      for name, column in recorded.items()
      if name != base_host_call.GLOBAL_STEP and name not in _AUC_INPUTS
    }
    inputs = {name: recorded[name] for name in _AUC_INPUTS if name in recorded}
    if _ACCUMULATED_TIMES in recorded:
      inputs = self._cached_inputs(recorded)
      for name in (_ACCUMULATED_TIMES, *(v for _, v, _ in _SAMPLE_VARIABLES + _STEP_VARIABLES)):
        scalars.pop(name, None)
    texts: dict[str, tf.Tensor] = {}
    self._add_auc_summaries(inputs, scalars, texts)

    summary = tf.compat.v2.summary
    with self._create_file_writer().as_default():
      ops = [summary.scalar(name, value, step=global_step) for name, value in scalars.items()]
      if self._enable_deepinsight:
        for name, value in texts.items():
          ops.append(summary.text(name, tf.io.serialize_tensor(value), step=global_step))
    return ops

  def _cached_inputs(self, recorded: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns the AUC inputs out of the variables, without the places not yet filled."""
    steps = tf.minimum(tf.reshape(recorded[_ACCUMULATED_TIMES], [-1])[0], self._every_n_steps)
    inputs = {}
    for source, name, _ in _SAMPLE_VARIABLES + _STEP_VARIABLES:
      if name in recorded:
        column = recorded[name]  # (cores, n * values per step); n > 1, so it is a matrix
        per_step = tf.shape(column)[1] // self._every_n_steps
        inputs[source] = column[:, : steps * per_step]
    return inputs

  def _add_auc_summaries(
    self,
    inputs: dict[str, tf.Tensor],
    scalars: dict[str, tf.Tensor],
    texts: dict[str, tf.Tensor],
  ) -> None:
    """Adds what follows from the AUC inputs that are there."""
    inputs = {name: tf.reshape(tensor, [-1]) for name, tensor in inputs.items()}
    if _LABELS in inputs and _PREDS in inputs:
      labels = tf.cast(inputs[_LABELS], tf.float32)
      preds = tf.cast(inputs[_PREDS], tf.float32)
      if _UID_BUCKET in inputs:
        limit = int(_RATIO_N * _UID_SAMPLE_RATE)
        sampled = tf.reshape(tf.where(inputs[_UID_BUCKET] < limit), [-1])
        labels, preds = tf.gather(labels, sampled), tf.gather(preds, sampled)
      # The update op's own value is the one that includes this step.
      _, scalars["auc"] = tf.compat.v1.metrics.auc(labels, preds)
      scalars["sampled_labels_variable_avg"] = _mean(labels)
      scalars["sampled_preds_variable_avg"] = _mean(preds)
      texts[_DI_LABELS] = labels
      texts[_DI_PREDS] = preds
    if _REQ_TIME in inputs:
      scalars["req_times_variable_avg"] = _mean(tf.cast(inputs[_REQ_TIME], tf.float32))
      texts[_DI_REQ_TIMES] = inputs[_REQ_TIME]
    if _SAMPLE_RATE in inputs:
      scalars["sample_rates_variable_avg"] = _mean(tf.cast(inputs[_SAMPLE_RATE], tf.float32))
      texts[_DI_SAMPLE_RATES] = inputs[_SAMPLE_RATE]


def _mean(values: tf.Tensor) -> tf.Tensor:
  """Returns the mean of a float vector, 0 if it is empty."""
  count = tf.cast(tf.size(values), values.dtype)
  return tf.math.divide_no_nan(tf.reduce_sum(values), count)
