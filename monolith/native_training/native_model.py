"""`MonolithModel`: the class most model authors derive from.

  class Ranking(MonolithModel):
    def input_fn(self, mode):
      return tf.data.Dataset...                   # dicts; sparse ids are int64 RaggedTensors

    def model_fn(self, features, mode):
      for name in ("user", "item"):
        self.create_embedding_feature_column(name)
      vectors = self.lookup_embedding_slice(["user", "item"], "vec", 16, out_type="concat")
      logits = tf.squeeze(tf.keras.layers.Dense(1)(vectors), 1)
      loss, pred = get_sigmoid_loss_and_pred("ctr", logits, features["label"], None, mode=mode)
      optimizer = tf.compat.v1.train.AdagradOptimizer(0.05)
      return EstimatorSpec(features["label"], pred, "ctr", loss, optimizer)

    def serving_input_receiver_fn(self):
      ...                                         # graph_estimator.ServingInputReceiver

  Estimator(Ranking(), RunConfig(is_local=True, model_dir="model")).train(steps=100)

The public names of `entry` and `feature` and the losses of heads can be imported from here, too.

Differences from ByteDance's Monolith: losses, hooks and extra outputs belong to the graph they were
added in; the default of an occurrence threshold is `default_occurrence_threshold`; `share_slot`
writes each feature under its own name; the default optimizer of a slice learns under a loss that is
a mean. Rough sort is left out.

The file is long because it is one class and its base, whose methods share the state of a graph.
"""

from __future__ import annotations

import abc
import copy
import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from idl.matrix.proto import example_pb2
from monolith.core import hyperparams
from monolith.native_training import (
  device_utils,
  embedding_combiners,
  entry,
  feature,
  feature_utils,
  file_ops,
  gflags_utils,
  graph_estimator,
  graph_utils,
  native_task,
  native_task_context,
)
from monolith.native_training.data import feature_list as feature_lists
from monolith.native_training.data import feature_utils as data_feature_utils
from monolith.native_training.data import utils as data_utils
from monolith.native_training.entry import *  # noqa: F403
from monolith.native_training.feature import *  # noqa: F403
from monolith.native_training.graph import export_context
from monolith.native_training.losses.head_losses import (  # noqa: F401
  get_sigmoid_loss_and_pred,
  get_softmax_loss_and_pred,
)
from monolith.native_training.metric import file_metric_hook, metric_hook, streaming
from monolith.native_training.metric import utils as metric_utils
from monolith.native_training.metric.heads import (
  EVALUATION_COLLECTION,
  HEADS_COLLECTION,
  EvaluatedHead,
  Evaluation,
  Head,
)
from monolith.native_training.model_dump import dump_utils
from monolith.native_training.models import outputs as model_outputs
from monolith.native_training.models import shown_loss
from monolith.native_training.models.device_ctx import DeviceCtxType, MonolithDeviceCtx
from monolith.native_training.models.outputs import ModelOutputs
from monolith.native_training.models.spec import EstimatorSpec  # noqa: F401

_TRAIN = graph_estimator.ModeKeys.TRAIN
_EVAL = graph_estimator.ModeKeys.EVAL
_PREDICT = graph_estimator.ModeKeys.PREDICT

_DEEP_INSIGHT_OP = "deep_insight_op"
_SIGNATURE_NAME = "signature_name"
# Attribute of a graph that holds the parts added by models.
_GRAPH_STATES = "_monolith_model_states"

_OUT_TYPES = {
  "concat": example_pb2.OutType.CONCAT,
  "stack": example_pb2.OutType.STACK,
  "addn": example_pb2.OutType.ADDN,
  "add_n": example_pb2.OutType.ADDN,
}


class _GraphState:
  """The losses, hooks and outputs that a model added to one graph."""

  def __init__(self) -> None:
    self.losses: list[tf.Tensor] = []
    self.training_hooks: list[tf.compat.v1.train.SessionRunHook] = []
    self.export_outputs: dict[str, graph_estimator.ExportOutput] = {}
    self.output_names: set[str] = set()
    self.metrics: dict[str, streaming.Metric] = {}


class MonolithBaseModel(native_task.NativeTask, abc.ABC):
  """A task with methods to write: `input_fn`, `model_fn`, and for exports
  `serving_input_receiver_fn`.

  Params can be read and written as attributes of the model.

  Attributes:
    fs_dict: name -> slot.
    fc_dict: feature name -> column.
    slice_dict: feature or shared name -> slice name -> slice.
    layout_dict: layout name -> its `OutConfig`.
    dump_utils: for models that record themselves; it records nothing.
  """

  @classmethod
  def params(cls) -> hyperparams.InstantiableParams:
    p = super().params()
    p.define("output_path", None, "Folder of text files with predictions.")
    p.define("output_fields", None, "Features that go into them, separated by commas.")
    p.define("delimiter", "\t", "Between the columns of such a file.")
    p.define("file_name", "", "Name of an input file.")
    p.define("enable_grads_and_vars_summary", False, "Whether to summarise gradients.")
    p.define("dense_weight_decay", 0.0, "Weight decay of dense variables.")
    p.define("clip_norm", 1000.0, "Limit of the global norm of gradients.")
    p.define("sparse_norm_warmup_steps", None, "Steps in which the limit for embeddings grows.")
    p.define("default_occurrence_threshold", 0, "Threshold of features without one of their own.")
    return p

  def __init__(self, params: hyperparams.Params):
    super().__init__(params)
    self.enable_sync_training = bool(gflags_utils.read_flag("enable_sync_training", False))
    self.layout_dict: dict[str, example_pb2.OutConfig] = {}
    self.dump_utils = dump_utils.DumpUtils()
    self.clean()

  def __getattr__(self, name: str) -> Any:
    params = self.__dict__.get("p")
    if params is not None and name in params:
      return params[name]
    return super().__getattr__(name)

  def __setattr__(self, name: str, value: Any) -> None:
    params = self.__dict__.get("p")
    if params is not None and name in params:
      params[name] = value
    else:
      super().__setattr__(name, value)

  def __deepcopy__(self, memo: dict[int, Any]) -> MonolithBaseModel:
    result = type(self).__new__(type(self))
    memo[id(self)] = result
    for name, value in self.__dict__.items():
      result.__dict__[name] = value if name == "dump_utils" else copy.deepcopy(value, memo)
    return result

  def instantiate(self) -> MonolithBaseModel:
    """Returns the model itself, so that it can be given where params are wanted."""
    return self

  @property
  def batch_size(self) -> int:
    """Is the batch size of the current mode; setting it sets those of training and evaluation."""
    params = self.p.eval if self.p.mode == _EVAL else self.p.train
    return params.per_replica_batch_size

  @batch_size.setter
  def batch_size(self, value: int) -> None:
    self.p.train.per_replica_batch_size = value
    self.p.eval.per_replica_batch_size = value

  @abc.abstractmethod
  def input_fn(self, mode: str) -> tf.data.Dataset:
    """Returns the dataset of a `graph_estimator.ModeKeys` mode, of dicts of features."""

  @abc.abstractmethod
  def model_fn(self, features: dict[str, Any], mode: str) -> Any:
    """Returns an `EstimatorSpec`, or label, loss and prediction."""

  def serving_input_receiver_fn(self) -> graph_estimator.ServingInputReceiver:
    """Returns the inputs of an exported model, and the features made of them.

    A model that is never exported needs none.
    """
    raise NotImplementedError(
      f"{type(self).__name__} has no serving_input_receiver_fn, which an export needs: it says "
      "what the exported model is fed"
    )

  @property
  def _graph_state(self) -> _GraphState:
    # Kept with the graph, not with the model: it holds tensors of the graph.
    graph = tf.compat.v1.get_default_graph()
    if not hasattr(graph, _GRAPH_STATES):
      setattr(graph, _GRAPH_STATES, weakref.WeakKeyDictionary())
    return getattr(graph, _GRAPH_STATES).setdefault(self, _GraphState())

  @property
  def losses(self) -> list[tf.Tensor]:
    """Returns the terms that were added to the loss in the default graph."""
    return self._graph_state.losses

  @losses.setter
  def losses(self, losses: Sequence[tf.Tensor]) -> None:
    self._graph_state.losses = list(losses)

  def add_loss(self, losses: tf.Tensor | Sequence[tf.Tensor]) -> None:
    """Adds a term to the loss that `model_fn` returns."""
    self.losses.extend(losses if isinstance(losses, (list, tuple)) else [losses])

  @property
  def training_hooks(self) -> list[tf.compat.v1.train.SessionRunHook]:
    """The hooks that were added in the default graph."""
    return self._graph_state.training_hooks

  def add_training_hook(self, hook: tf.compat.v1.train.SessionRunHook) -> None:
    """Adds a hook, unless it sends or writes metrics and there is one of that kind already.

    A second one would repeat every message.
    """
    for kind in (metric_hook.KafkaMetricHook, file_metric_hook.FileMetricHook):
      if isinstance(hook, kind) and any(isinstance(h, kind) for h in self.training_hooks):
        return
    self.training_hooks.append(hook)

  def add_metric(self, name: str, metric: streaming.Metric | tf.Tensor) -> None:
    """Adds a metric to the result of `Estimator.evaluate`.

    Args:
      name: its name there and in TensorBoard.
      metric: a value and its update op, like the result of `tf.compat.v1.metrics`; or a tensor of
        one value per example or batch, whose mean is computed.

    Raises:
      KeyError: the name is taken.
    """
    metrics = self._graph_state.metrics
    if name in metrics:
      raise KeyError(f"metric {name!r} exists: give each its own name, there are {sorted(metrics)}")
    if isinstance(metric, tf.Tensor):
      metric = tf.compat.v1.metrics.mean(metric)
    metrics[name] = metric

  def add_extra_output(
    self,
    name: str,
    outputs: tf.Tensor | dict[str, tf.Tensor],
    head_name: str | None = None,
    head_type: str | None = None,
  ) -> None:
    """Exports another signature.

    Args:
      name: the signature's name.
      outputs: a tensor, or tensors by name.
      head_name: unused, for callers that give one.
      head_type: unused, for callers that give one.

    Raises:
      KeyError: the name is taken.
    """
    del head_name, head_type
    state = self._graph_state
    if name in state.output_names:
      raise KeyError(f"key {name} exists!")
    state.output_names.add(name)
    tf.compat.v1.add_to_collection(_SIGNATURE_NAME, name)
    if export_context.is_exporting():
      state.export_outputs[name] = graph_estimator.PredictOutput(outputs)

  def add_layout(
    self,
    name: str,
    slice_list: Sequence[tuple[str, feature.FeatureSlice]],
    out_type: str | None,
    shape_list: Sequence[Sequence[int | None]],
  ) -> None:
    """Declares the content of a fused layout.

    Args:
      name: the layout's name.
      slice_list: features and slices of their rows.
      out_type: `concat`, `stack`, `addn`, or another text for a tensor per slice.
      shape_list: the tensors' shapes; the first dimension is replaced by the batch size.
    """
    config = example_pb2.OutConfig(
      out_type=_OUT_TYPES.get((out_type or "").lower(), example_pb2.OutType.NONE)
    )
    for feature_name, feature_slice in slice_list:
      config.slice_configs.add(
        feature_name=feature_name, start=feature_slice.start, end=feature_slice.end
      )
    for shape in shape_list:
      config.shape.add(dims=[-1, *shape[1:]])
    self.layout_dict[name] = config

  def is_fused_layout(self) -> bool:
    """Returns whether embeddings come from fused layouts, which the driver decides."""
    return self.ctx.layout_factory is not None

  def clean(self) -> None:
    """Forgets slots, columns and slices, which belong to one run of the model function."""
    self.fs_dict: dict[str, feature.FeatureSlot] = {}
    self.fc_dict: dict[str, feature.FeatureColumn] = {}
    self.slice_dict: dict[str, dict[str, feature.FeatureSlice]] = {}

  def create_input_fn(self, mode: str) -> Callable[[], tf.data.Dataset]:
    def input_fn() -> tf.data.Dataset:
      with MonolithDeviceCtx(DeviceCtxType.INPUT_FN):
        return self.input_fn(mode)

    return input_fn

  def create_serving_input_receiver_fn(self) -> Callable[[], Any] | None:
    """Returns a function that makes the receiver; `None` if the model has none."""
    own = type(self).serving_input_receiver_fn
    if own is MonolithBaseModel.serving_input_receiver_fn:
      return None

    def serving_input_receiver_fn() -> graph_estimator.ServingInputReceiver:
      with MonolithDeviceCtx(DeviceCtxType.INPUT_RECEIVER_FN):
        return self.serving_input_receiver_fn()

    return serving_input_receiver_fn

  def create_model_fn(self) -> Callable[..., graph_estimator.EstimatorSpec]:
    """Returns the function that the driver calls.

    It raises `ValueError` for a mode of the driver other than training and prediction,
    `AssertionError` if the parts of the result of `model_fn` do not match, and `Exception` if the
    result has an unknown type or no optimizer for dense variables.
    """
    self.clean()

    def model_fn(
      features: dict[str, Any], mode: str, config: Any = None
    ) -> graph_estimator.EstimatorSpec:
      # The function may run again, in another graph.
      self.clean()
      with device_utils.maybe_device_if_allowed("/device:GPU:0"):
        global_step = tf.compat.v1.train.get_or_create_global_step()
      real_mode = self._real_mode(mode)
      with MonolithDeviceCtx(DeviceCtxType.MODEL_FN):
        result = self.model_fn(features, real_mode)
      outputs = model_outputs.normalise(
        result,
        self.p.metrics.deep_insight_target,
        getattr(self, "_default_dense_optimizer", None),
      )
      if self.losses and outputs.loss is not None:
        outputs = outputs._replace(loss=outputs.loss + tf.add_n(self.losses))
      if real_mode == _PREDICT:
        return self._predict_spec(features, outputs)
      if mode == _EVAL:
        return self._eval_spec(features, outputs)
      train_ops = self._metric_ops(features, outputs)
      for head, label, pred, is_class in zip(
        outputs.heads, outputs.labels, outputs.preds, outputs.classification
      ):
        if label is not None and is_class:
          tf.compat.v1.add_to_collection(HEADS_COLLECTION, Head(head, label, pred))
      if real_mode == _EVAL:
        train_ops += outputs.preds
        self._collect_evaluation(outputs)
        if self.p.output_path:
          train_ops.append(self._write_predictions(features, outputs))
      else:
        train_ops.append(self._train_op(outputs, global_step))
        graph_utils.add_batch_norm_into_update_ops()
        train_ops += tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.UPDATE_OPS)
      return graph_estimator.EstimatorSpec(
        mode,
        loss=outputs.loss,
        train_op=tf.group(*train_ops),
        training_hooks=list(self.training_hooks),
      )

    return model_fn

  def _real_mode(self, mode: str) -> str:
    if mode == _PREDICT:
      return mode
    # An evaluation of the driver comes either as the training of a model whose own mode is
    # evaluation, or, where its metrics are wanted, as what it is.
    if mode == _TRAIN or mode == _EVAL == self.p.mode:
      return self.p.mode
    raise ValueError(f"model_fn got mode {mode!r}, want {_TRAIN!r} or {_PREDICT!r}")

  def _collect_evaluation(self, outputs: ModelOutputs) -> None:
    """Stores the metrics to compute in the graph, for a worker that evaluates."""
    heads = tuple(
      EvaluatedHead(head, label, pred, is_class)
      for head, label, pred, is_class in zip(
        outputs.heads, outputs.labels, outputs.preds, outputs.classification
      )
      if label is not None
    )
    if outputs.loss is None or not outputs.preds or not outputs.preds[0].shape.rank:
      return
    batch_size = tf.shape(outputs.preds[0])[0]
    loss = shown_loss.per_example(outputs.loss, batch_size)
    tf.compat.v1.add_to_collection(EVALUATION_COLLECTION, Evaluation(loss, batch_size, heads))

  def _eval_spec(
    self, features: dict[str, Any], outputs: ModelOutputs
  ) -> graph_estimator.EstimatorSpec:
    """Returns the metrics of an evaluation: those of each head, and those of `add_metric`."""
    metrics = {**model_outputs.eval_metrics(outputs), **self._graph_state.metrics}
    ops = self._metric_ops(features, outputs)
    if self.p.output_path:
      ops.append(self._write_predictions(features, outputs))
    batch_size = tf.shape(outputs.preds[0])[0] if outputs.preds[0].shape.rank else None
    # They run with the mean loss, which is updated with every batch.
    with tf.control_dependencies([op for op in ops if op is not None]):
      loss = tf.identity(shown_loss.per_example(outputs.loss, batch_size), name="eval_loss")
    return graph_estimator.EstimatorSpec(
      _EVAL,
      loss=loss,
      eval_metric_ops=metrics,
      evaluation_hooks=list(self.training_hooks),
    )

  def _predict_spec(
    self, features: dict[str, Any], outputs: ModelOutputs
  ) -> graph_estimator.EstimatorSpec:
    predictions = outputs.predictions
    export_outputs = None
    if export_context.is_exporting():
      extra = self._graph_state.export_outputs
      if extra:
        default = tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY
        export_outputs = {default: graph_estimator.PredictOutput(predictions), **extra}
    elif self.p.output_path:
      with tf.control_dependencies([self._write_predictions(features, outputs)]):
        predictions = tf.nest.map_structure(tf.identity, predictions)
    return graph_estimator.EstimatorSpec(
      _PREDICT,
      predictions=predictions,
      export_outputs=export_outputs,
      training_hooks=list(self.training_hooks),
      prediction_hooks=list(self.training_hooks),
    )

  def _write_predictions(self, features: dict[str, Any], outputs: ModelOutputs) -> tf.Operation:
    """Appends a line per example to this worker's file."""
    fields = [field.strip() for field in (self.p.output_fields or "").split(",")]
    columns = [model_outputs.as_text(features[field]) for field in fields if field]
    order = list(range(len(outputs.preds)))
    if outputs.is_dict:
      order = sorted(order, key=outputs.heads.__getitem__)
    columns += [model_outputs.as_text(outputs.preds[i]) for i in order]
    lines = tf.strings.join([tf.strings.join(columns, separator=self.p.delimiter), "\n"])
    worker_index = native_task_context.get().worker_index
    tf.io.gfile.makedirs(self.p.output_path)
    file = file_ops.WritableFile(f"{self.p.output_path}/part-{worker_index:05d}")
    self.add_training_hook(file_ops.FileCloseHook([file]))
    return file.append(tf.strings.reduce_join(lines))

  def _metric_ops(self, features: dict[str, Any], outputs: ModelOutputs) -> list[Any]:
    ops: list[Any] = []
    if not gflags_utils.read_flag("disable_native_metrics", True):
      for head, label, pred, classification in zip(
        outputs.heads, outputs.labels, outputs.preds, outputs.classification
      ):
        if label is not None:
          ops += model_outputs.native_metric_ops(head, label, pred, classification)
    metrics = self.p.metrics
    is_wanted = (
      metrics.enable_deep_insight or metrics.enable_kafka_metrics or metrics.enable_file_metrics
    )
    if is_wanted and metrics.deep_insight_sample_ratio > 0:
      ops.append(self._deep_insight_op(features, outputs))
    return ops

  def _deep_insight_op(self, features: dict[str, Any], outputs: ModelOutputs) -> Any:
    metrics = self.p.metrics
    if outputs.is_single:
      heads: dict[str, Any] = {
        "labels": model_outputs.flat_floats(outputs.labels[0], outputs.preds[0]),
        "preds": model_outputs.flat_floats(outputs.preds[0], outputs.preds[0]),
        "target": outputs.heads[0],
      }
    else:
      heads = {
        "labels_list": [
          model_outputs.flat_floats(label, pred)
          for label, pred in zip(outputs.labels, outputs.preds)
        ],
        "preds_list": [model_outputs.flat_floats(pred, pred) for pred in outputs.preds],
        "targets": outputs.heads,
      }
    op = metric_utils.write_deep_insight(
      features=features,
      sample_ratio=metrics.deep_insight_sample_ratio,
      model_name=metrics.deep_insight_name or "",
      extra_fields_keys=metrics.extra_fields_keys,
      enable_kafka_metrics=metrics.enable_kafka_metrics or metrics.enable_file_metrics,
      dump_filename=metrics.dump_filename or None,
      **heads,
    )
    tf.compat.v1.add_to_collection(_DEEP_INSIGHT_OP, op)
    if isinstance(op, tf.Tensor):
      if metrics.enable_kafka_metrics:
        self.add_training_hook(metric_hook.KafkaMetricHook(op))
      if metrics.enable_file_metrics:
        self.add_training_hook(
          file_metric_hook.FileMetricHook(
            op,
            worker_id=native_task_context.get().worker_index,
            parse_fn=metrics.parse_fn,
            key_fn=metrics.key_fn,
            layout_fn=metrics.layout_fn,
            base_name=metrics.file_base_name,
            file_ext=metrics.file_ext,
          )
        )
    return op

  def _train_op(self, outputs: ModelOutputs, global_step: tf.Variable) -> tf.Operation:
    if outputs.optimizer is None:
      raise Exception(
        "dense_optimizer not found! model_fn returned no optimizer for the dense variables: return "
        "EstimatorSpec(..., optimizer=tf.compat.v1.train.AdagradOptimizer(0.05)), or with a tuple "
        "set self._default_dense_optimizer"
      )
    if export_context.is_dry_run_or_exporting():
      return tf.no_op()  # A dry run is after what features there are: gradients add none.
    return feature_utils.apply_gradients_with_var_optimizer(
      self.ctx,
      self.fc_dict.values(),
      outputs.optimizer,
      outputs.loss,
      clip_type=feature_utils.GradClipType.ClipByGlobalNorm,
      clip_norm=self.p.clip_norm,
      dense_weight_decay=self.p.dense_weight_decay,
      global_step=global_step,
      grads_and_vars_summary=self.p.enable_grads_and_vars_summary,
      gradient_histograms=True,
      sparse_norm_warmup_steps=self.p.sparse_norm_warmup_steps,
      is_fused_layout=self.is_fused_layout(),
      use_allreduce=self.enable_sync_training,
    )


class MonolithModel(MonolithBaseModel):
  """A model with sparse features, which declares columns and looks up slices of their rows.

  Args:
    params: the params; by default those of the class.
  """

  @classmethod
  def params(cls) -> hyperparams.InstantiableParams:
    p = super().params()
    p.define("feature_list", None, "File with the list of features.")
    return p

  def __init__(self, params: hyperparams.Params | None = None):
    super().__init__(type(self).params() if params is None else params)

  def create_embedding_feature_column(
    self,
    feature_name: str | int | feature.FeatureColumn,
    occurrence_threshold: int | None = None,
    expire_time: int = feature.DEFAULT_EXPIRE_TIME,
    max_seq_length: int = 0,
    shared_name: str | None = None,
    combiner: str | embedding_combiners.Combiner | None = None,
    admit_after: int | None = None,
    expire_after: int | str | None = None,
  ) -> feature.FeatureColumn:
    """Declares a feature that has rows in a table.

    Args:
      feature_name: its name or slot.
      occurrence_threshold: the first batches with an id, this many, only count it; the next one
        makes its row. By default the param `default_occurrence_threshold`.
      expire_time: days after which an unused row expires.
      max_seq_length: for a sequence, the number of its first ids that are kept; 0 otherwise.
      shared_name: the feature whose rows this one shares.
      combiner: how the ids of an example are pooled: `"reduce_sum"`, `"reduce_mean"`, `"first_n"`
        or an object. By default the sum, or the sequence if `max_seq_length` is not 0.
      admit_after: another name of `occurrence_threshold`.
      expire_after: another way to give `expire_time`: days, or a text such as "30d" or "4w".

    Returns:
      The column; later calls with this name return the same one.

    Raises:
      ValueError: the combiner is unknown, a sequence has no length, a threshold or an expiry is out
        of range or given twice, or differs between columns that share rows.
    """
    name, slot_id = _name_and_slot(feature_name)
    occurrence_threshold, expire_time = feature.resolve_admission(
      name, occurrence_threshold, expire_time, admit_after, expire_after
    )
    if name in self.fc_dict:
      column = self.fc_dict[name]
      _check_admission(column.feature_slot, name, occurrence_threshold, expire_time)
      return column
    column_combiner = _make_combiner(combiner, max_seq_length)  # Raises before a slot is there.
    if shared_name is not None and shared_name in self.fc_dict:
      slot = self.fc_dict[shared_name].feature_slot
    else:
      slot_name = shared_name or name
      if slot_name not in self.fs_dict:
        if shared_name is not None:
          _, slot_id = _name_and_slot(shared_name)
        if occurrence_threshold is None:
          occurrence_threshold = self.p.default_occurrence_threshold
        self.fs_dict[slot_name] = self.ctx.create_feature_slot(
          self._get_fs_conf(slot_name, slot_id, occurrence_threshold, expire_time)
        )
      slot = self.fs_dict[slot_name]
    _check_admission(slot, name, occurrence_threshold, expire_time)
    column = feature.FeatureColumn(slot, name, column_combiner)
    self.fc_dict[name] = column
    return column

  def _get_fs_conf(
    self, shared_name: str, slot: int | None, occurrence_threshold: int | None, expire_time: int
  ) -> feature.FeatureSlotConfig:
    """Returns a slot without bias; `train.use_gpu_emb_table` puts its table on the GPU."""
    on_gpu = self.p.train.use_gpu_emb_table
    return feature.FeatureSlotConfig(
      name=shared_name,
      has_bias=False,
      slot_id=slot,
      occurrence_threshold=occurrence_threshold,
      expire_time=expire_time,
      hashtable_config=entry.GpucucoHashTableConfig() if on_gpu else entry.CuckooHashTableConfig(),
      default_vec_optimizer=_default_optimizer(),
    )

  def lookup_embedding_slice(
    self,
    features: Sequence[Any] | Mapping[Any, int],
    slice_name: str,
    slice_dim: int | None = None,
    initializer: entry.Initializer | None = None,
    optimizer: entry.Optimizer | None = None,
    compressor: entry.Compressor | None = None,
    learning_rate_fn: entry.LearningRate | None = None,
    group_out_type: str = "add_n",
    out_type: str | None = None,
  ) -> list[tf.Tensor] | tf.Tensor:
    """Looks up a slice of the rows of several features.

    Args:
      features: names, slots or columns, all with `slice_dim`; pairs of one of these and its
        dimension, or a dict of them; or groups, lists of slots, all with `slice_dim`.
      slice_name: the slice's name; features that share rows share slices of the same name.
      slice_dim: the dimension of each slice.
      initializer, compressor, learning_rate_fn: the slice's, by default the slot's.
      optimizer: the slice's; by default Adagrad with a rate of 0.05 and an accumulator near 0, for
        losses that are means and losses that are sums.
      group_out_type: how a group is joined: `"add_n"` or `"concat"`.
      out_type: `"concat"`, `"stack"`, both along axis 1, or `"add_n"`; by default a list.

    Returns:
      `[batch, dim]` for each feature or group, or one tensor.

    Raises:
      ValueError: `features` has another form, or has groups in a fused layout.
    """
    names, dims, groups = _names_and_dims(features, slice_dim)
    layout_name = f"{slice_name}_{_md5_of(features)}"
    if self.is_fused_layout():
      if groups is not None:
        raise ValueError("groups of features are not supported in a fused layout")
      # Tables identify the slices of the dry run by the order in which they were added.
      for name, dim in zip(names, dims):
        self._get_slice(name, slice_name, dim, initializer, optimizer, compressor, learning_rate_fn)
      factory = self.ctx.layout_factory
      assert factory is not None
      return factory.get_layout(layout_name)

    columns, slices = [], []
    for name, dim in zip(names, dims):
      columns.append(self.create_embedding_feature_column(name))
      slices.append(
        self._get_slice(name, slice_name, dim, initializer, optimizer, compressor, learning_rate_fn)
      )
    tensors = [column.embedding_lookup(s) for column, s in zip(columns, slices)]
    self._declare_layout(layout_name, columns, slices, dims, out_type)
    if groups is not None:
      iterator = iter(tensors)
      tensors = [_pool([next(iterator) for _ in range(size)], group_out_type) for size in groups]
    return tensors if out_type is None else _pool(tensors, out_type)

  def _get_slice(
    self, name: Any, slice_name: str, dim: int, *settings: Any
  ) -> feature.FeatureSlice:
    slot = self.create_embedding_feature_column(name).feature_slot
    slices = self.slice_dict.setdefault(slot.name, {})
    if slice_name not in slices:
      initializer, optimizer, compressor, learning_rate_fn = settings
      slices[slice_name] = slot.add_feature_slice(
        dim,
        initializer=initializer,
        optimizer=optimizer,
        compressor=compressor,
        learning_rate_fn=learning_rate_fn,
      )
    return slices[slice_name]

  def _declare_layout(
    self,
    name: str,
    columns: Sequence[feature.FeatureColumn],
    slices: Sequence[feature.FeatureSlice],
    dims: Sequence[int],
    out_type: str | None,
  ) -> None:
    kind = _OUT_TYPES.get((out_type or "").lower(), example_pb2.OutType.NONE)
    if kind == example_pb2.OutType.CONCAT:
      shapes: list[list[int]] = [[-1, sum(dims)]]
    elif kind == example_pb2.OutType.STACK:
      shapes = [[-1, len(dims), dims[0]]]
    elif kind == example_pb2.OutType.ADDN:
      shapes = [[-1, dims[0]]]
    else:
      shapes = [
        [-1, column.combiner.max_seq_length, dim] if column.combiner.max_seq_length else [-1, dim]
        for column, dim in zip(columns, dims)
      ]
    pairs = [(column.feature_name, s) for column, s in zip(columns, slices)]
    self.add_layout(name, pairs, out_type, shapes)

  def share_slot(
    self,
    features: dict[str, tf.RaggedTensor] | None = None,
    share_meta: Mapping[str, tuple[bool, int]] | None = None,
    variant_type: str = "example",
    suffix: str = "share",
  ) -> dict[str, tf.RaggedTensor] | Callable[[tf.Tensor], tf.Tensor]:
    """Moves features to the rows of other slots.

    Args:
      features: parsed features, which are changed; `None` for samples that are not parsed yet.
      share_meta: name -> (in place, slot); otherwise the result is called `<name>_<suffix>`.
      variant_type: the type of samples that are not parsed yet.
      suffix: the suffix of features that are not replaced in place.

    Returns:
      The features; if `features` is `None`, a function for `tf.data.Dataset.map`.
    """
    share_meta = dict(share_meta or {})
    shared = {
      name: name if inplace else f"{name}_{suffix}" for name, (inplace, _) in share_meta.items()
    }
    data_utils.register_slots({shared[name]: slot for name, (_, slot) in share_meta.items()})
    if features is None:
      return lambda variant: data_feature_utils.switch_slot_batch(
        variant, share_meta, variant_type=variant_type, suffix=suffix
      )
    for name, (_, slot) in share_meta.items():
      features[shared[name]] = data_feature_utils.switch_slot(features[name], slot)
    return features


def _check_admission(
  slot: feature.FeatureSlot, name: str, occurrence_threshold: int | None, expire_time: int
) -> None:
  """Refuses limits that differ from those with which the rows were declared before."""
  has = (slot.occurrence_threshold, slot.expire_time)
  wants = (
    occurrence_threshold or has[0],
    has[1] if expire_time == feature.DEFAULT_EXPIRE_TIME else expire_time,
  )
  if wants != has:
    raise ValueError(
      f"feature {name!r} asks for an occurrence threshold of {wants[0]} and {wants[1]} days, "
      f"but the rows of slot {slot.name!r} were declared with {has[0]} and {has[1]}: rows have one "
      "of each, so give it where the slot is declared first"
    )


def _name_and_slot(item: str | int | feature.FeatureColumn) -> tuple[str, int | None]:
  if isinstance(item, feature.FeatureColumn):
    return item.feature_name, None
  return feature_lists.get_feature_name_and_slot(item)


def _default_optimizer() -> entry.Optimizer:
  """Returns the optimizer of slices whose lookup names none.

  A slot's own default, Adagrad with a rate of 0.001 and an accumulator of 1, hardly moves rows
  under a loss that is a mean, whose gradients are divided by the batch size. With an accumulator
  near 0 the size of gradients does not matter.
  """
  return entry.AdagradOptimizer(learning_rate=0.05, initial_accumulator_value=1e-10)


def _make_combiner(
  combiner: str | embedding_combiners.Combiner | None, max_seq_length: int
) -> embedding_combiners.Combiner:
  if isinstance(combiner, embedding_combiners.Combiner):
    return combiner
  if combiner is None:
    combiner = "first_n" if max_seq_length > 0 else "reduce_sum"
  if combiner == "reduce_sum":
    return feature.FeatureColumn.reduce_sum()
  if combiner == "reduce_mean":
    return feature.FeatureColumn.reduce_mean()
  if combiner == "first_n":
    if max_seq_length <= 0:
      raise ValueError(f"combiner is 'first_n' and max_seq_length {max_seq_length}, want more")
    return feature.FeatureColumn.first_n(max_seq_length)
  raise ValueError(f"combiner is {combiner!r}, want reduce_sum, reduce_mean or first_n")


def _names_and_dims(
  features: Any, slice_dim: int | None
) -> tuple[list[Any], list[int], list[int] | None]:
  """Returns the features, their dimensions, and the sizes of groups, if any."""
  error = ValueError(
    f"ValueError for features: features is {features!r} and slice_dim {slice_dim!r}, want a list "
    "of names, slots or columns with a slice_dim; a list of (name, dim); a dict name -> dim; or a "
    "list of lists of slots with a slice_dim"
  )
  if isinstance(features, Mapping):
    return list(features), list(features.values()), None
  if not isinstance(features, (list, tuple)) or not features:
    raise error
  kinds = (str, int, feature.FeatureColumn)
  if all(isinstance(item, kinds) for item in features):
    if slice_dim is None:
      raise error
    return list(features), [slice_dim] * len(features), None
  if not all(isinstance(item, (list, tuple)) for item in features):
    raise error
  if slice_dim is not None and all(
    item and all(isinstance(slot, int) for slot in item) for item in features
  ):
    slots = [slot for group in features for slot in group]
    return slots, [slice_dim] * len(slots), [len(group) for group in features]
  if all(
    len(item) == 2 and isinstance(item[0], kinds) and isinstance(item[1], int) for item in features
  ):
    names, dims = zip(*features)
    return list(names), list(dims), None
  raise error


def _md5_of(features: Any) -> str:
  # The column's name, not its address, which would differ between runs of the model function.
  names = (
    item.feature_name if isinstance(item, feature.FeatureColumn) else str(item) for item in features
  )
  text = ",".join(sorted(names))
  return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def _pool(tensors: Sequence[tf.Tensor], out_type: str) -> tf.Tensor:
  if out_type == "concat":
    return tf.concat(tensors, axis=1)
  if out_type == "stack":
    return tf.stack(tensors, axis=1)
  if out_type in ("add_n", "addn"):
    return tf.add_n(tensors)
  raise ValueError(f"out_type is {out_type!r}, want concat, stack or add_n")
