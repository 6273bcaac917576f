"""`NativeTask`: what a model author writes and the driver trains.

class MyTask(NativeTask):
  def create_input_fn(self, mode):
    return lambda: tf.data.Dataset...          # dict of ragged int64 ids and dense tensors

  def create_model_fn(self):
    def model_fn(features, mode, config):
      slot = self.ctx.create_feature_slot(FeatureSlotConfig(name="user"))
      ...
      return graph_estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)
    return model_fn
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from monolith.core import base_task, hyperparams
from monolith.native_training import feature, graph_estimator, prefetch_queue
from monolith.native_training.graph import export_context


class NativeContext:
  """The driver's side of a task: makes slots and takes gradients.

  Args:
    feature_factory: makes slots in ordinary runs.
    async_function_mgr: runs functions asynchronously.
    layout_factory: makes slots in fused-layout runs; it wins over `feature_factory`.

  Raises:
    ValueError: both factories are given.
  """

  def __init__(
    self,
    feature_factory: feature.FeatureFactory | None = None,
    async_function_mgr: prefetch_queue.AsyncFunctionMgr | None = None,
    layout_factory: feature.EmbeddingLayoutFactory | None = None,
  ):
    if feature_factory is not None and layout_factory is not None:
      raise ValueError("Cannot set feature_factory and layout_factory in the same time")
    self.feature_factory = feature_factory
    self.async_function_mgr = async_function_mgr
    self.layout_factory = layout_factory

  def create_feature_slot(self, config: feature.FeatureSlotConfig) -> feature.FeatureSlot:
    """Returns a new slot."""
    factory = self.layout_factory or self.feature_factory
    return factory.create_feature_slot(config)

  def apply_embedding_gradients(
    self, grads_and_vars: feature.GradsAndVars, scale: Any = 1
  ) -> tf.Operation:
    """Returns the op that updates the tables.

    Args:
      grads_and_vars: pairs of a gradient and what `FeatureColumn.get_all_embeddings_concat`
        returned; in fused-layout runs, of a gradient and a layout tensor.
      scale: multiplies the gradients in fused-layout and synchronous runs.
    """
    if self.layout_factory:
      if isinstance(scale, int) and scale == 1:
        return self.layout_factory.apply_gradients(grads_and_vars)
      return self.layout_factory.apply_gradients(grads_and_vars, grad_scale=scale)
    return self.feature_factory.apply_gradients(grads_and_vars, scale=scale)

  def add_async_function(
    self,
    target: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    is_async: bool | None = None,
    queue_name: str = "async_queue",
  ) -> tf.Operation:
    """Runs `target(*args, **kwargs)` in the graph, one step later if asynchronous."""
    return self.async_function_mgr.add_async_function(
      target, args, kwargs, is_async=is_async, queue_name=queue_name
    )


class NativeTask(base_task.BaseTask, abc.ABC):
  """A task that trains on the library's own tables.

  Attributes:
    p: the params the task was built from.
    ctx: the `NativeContext` that the driver fills in.
  """

  @classmethod
  def params(cls) -> hyperparams.InstantiableParams:
    p = super().params()
    p.define("mode", graph_estimator.ModeKeys.TRAIN, "A graph_estimator.ModeKeys mode.")
    _define_metrics(p)
    _define_train(p)
    _define_serving(p)
    return p

  def __init__(self, params: hyperparams.Params):
    super().__init__(params)
    self.p = params
    self._ctx = NativeContext()

  @property
  def ctx(self) -> NativeContext:
    return self._ctx

  @abc.abstractmethod
  def create_input_fn(self, mode: str) -> Callable[[], tf.data.Dataset]:
    """Returns a function that makes the dataset of a `graph_estimator.ModeKeys` mode."""

  @abc.abstractmethod
  def create_model_fn(self) -> Callable[..., graph_estimator.EstimatorSpec]:
    """Returns `model_fn(features, mode, config)`, called with keyword arguments."""

  def create_serving_input_receiver_fn(self) -> Callable[[], Any] | None:
    """Returns a function that makes a `ServingInputReceiver`; `None` when nothing is exported."""
    return None


def _define_metrics(p: hyperparams.Params) -> None:
  p.define("metrics", hyperparams.Params(), "What is measured while training.")
  m = p.metrics
  m.define("enable_deep_insight", False, "Whether to write deep-insight messages.")
  m.define("deep_insight_target", "ctr_head", "Their target.")
  m.define("deep_insight_name", None, "Their model name.")
  m.define("deep_insight_sample_ratio", 0.01, "The share of examples they cover.")
  m.define("extra_fields_keys", [], "Features that go into them.")
  m.define("enable_throughput_hook", True, "Whether to report steps per second.")
  m.define("enable_kafka_metrics", False, "Whether the messages go to Kafka.")
  m.define("enable_tf2_profiler_hook", True, "Whether to profile some steps.")
  m.define("enable_file_metrics", False, "Whether the messages go to files.")
  m.define("file_base_name", "/vepfs/jaguar_deepinsight_results", "Their folder.")
  m.define("file_ext", "txt", "Their extension.")
  m.define("parse_fn", None, "How a message becomes an object.")
  m.define("key_fn", None, "Which file an object goes to.")
  m.define("layout_fn", None, "How an object becomes a line.")
  m.define("dump_filename", "", "Also write the messages as TFRecords to this file.")
  m.define("use_data_service", False, "Whether tf.data service feeds the training.")


def _define_train(p: hyperparams.Params) -> None:
  t = p.train
  t.define("max_pending_seconds_for_barrier", 30, "How long a save waits for workers to pause.")
  t.define("slow_start_steps", 0, "Later workers wait this many steps times ln(1 + index).")
  t.define("sample_bias", 0.0, "Bias that corrects for negative sampling.")
  t.define("use_gpu_emb_table", False, "Whether tables live on the GPU.")
  t.define("use_fountain", False, "Unused: a data service that is not public.")
  t.define("fountain_zk_host", "", "Unused: belongs to `use_fountain`.")
  t.define("fountain_model_name", "", "Unused: belongs to `use_fountain`.")
  t.define("fountain_parse_on_server", False, "Unused: belongs to `use_fountain`.")
  t.define("fountain_precompute_value_rowids", False, "Unused: belongs to `use_fountain`.")


def _define_serving(p: hyperparams.Params) -> None:
  p.define("serving", hyperparams.Params(), "How the model is exported.")
  s = p.serving
  s.define("export_with_gpu_allowed", False, "Whether exported graphs may name GPUs.")
  s.define("export_with_cleared_entry_devices", False, "Whether the entry graph names no device.")
  s.define("export_when_saving", False, "Whether each checkpoint is exported.")
  s.define("export_dir_base", "exported_models", "Folder of the exports, below the model's.")
  s.define("export_mode", export_context.ExportMode.DISTRIBUTED, "One SavedModel or several.")
  s.define("shared_embedding", True, "Whether exports share one copy of the tables' files.")
  s.define("with_remote_gpu", False, "Whether the dense part is served by a GPU process.")
