"""Everything in Python that differs between TensorFlow 2.15 and 2.21, and what comes with them.

| | 2.15 | later |
|---|---|---|
| Estimator | `tf.estimator`, TPUEstimator | gone since 2.16: `graph_estimator` is ours on all |
| Keras | 2, as `tf.keras` | 3; Keras 2 is the package `tf_keras` |
| TPU embeddings | `tensorflow.python.tpu.tpu_embedding` | gone since 2.16 |
| protobuf | 3.20 to 4 | up to 7: fields have no `label` |
| tensorboard | comes along | not with 2.21 |
| Horovod's hook that broadcasts variables | there | gone, as it stands on `tf.estimator` |

No other module asks for a version, and neither does this one: what is there is taken. Nothing is
imported before it is asked for, so that a program without TensorFlow can import this module.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import types
from typing import Any

from monolith import _install

# Names of TensorFlow that the package uses though they are not published, in versions from 2.15 to
# 2.21: module -> names.
PRIVATE_NAMES: dict[str, str] = {
  "tensorflow.core.framework.attr_value_pb2": "AttrValue",
  "tensorflow.core.framework.graph_pb2": "GraphDef",
  "tensorflow.core.framework.tensor_pb2": "TensorProto",
  "tensorflow.core.framework.types_pb2": "DT_STRING",
  "tensorflow.core.protobuf.meta_graph_pb2": "SignatureDef TensorInfo",
  "tensorflow.core.protobuf.rewriter_config_pb2": "RewriterConfig",
  "tensorflow.core.protobuf.saved_model_pb2": "SavedModel",
  "tensorflow.core.protobuf.saver_pb2": "SaverDef",
  "tensorflow.core.util.event_pb2": "Event",
  "tensorflow.python.checkpoint.checkpoint_management": (
    "checkpoint_exists_internal get_checkpoint_state meta_graph_filename "
    "update_checkpoint_state_internal"
  ),
  "tensorflow.python.client.pywrap_tf_session": (
    "TF_DeleteLibraryHandle TF_GetOpList TF_LoadLibrary"
  ),
  "tensorflow.python.client.session": "SessionInterface _FetchMapper",
  "tensorflow.python.data.experimental.ops.data_service_ops": "_from_dataset_id",
  "tensorflow.python.data.experimental.service": (
    "DispatchServer DispatcherConfig WorkerConfig WorkerServer"
  ),
  "tensorflow.python.data.ops.dataset_ops": (
    "DatasetSource DatasetV2 UnaryDataset UnaryUnchangedStructureDataset"
  ),
  "tensorflow.python.data.ops.iterator_ops": "GLOBAL_ITERATORS _IteratorSaveable",
  "tensorflow.python.distribute.tpu_util": "enclosing_tpu_context",
  "tensorflow.python.eager.context": "FunctionCallOptions context eager_mode",
  "tensorflow.python.framework._pywrap_python_op_gen": "GetPythonWrappers",
  "tensorflow.python.framework.auto_control_deps": "AutomaticControlDependencies",
  "tensorflow.python.framework.auto_control_deps_utils": "register_read_only_resource_op",
  "tensorflow.python.framework.device": "canonical_name",
  "tensorflow.python.framework.errors": "AbortedError",
  "tensorflow.python.framework.kernels": "get_registered_kernels_for_op",
  "tensorflow.python.framework.ops": (
    "convert_to_tensor_v2 get_to_proto_function prepend_name_scope register_proto_function "
    "strip_name_scope"
  ),
  "tensorflow.python.lib.io._pywrap_record_io": "RecordIterator RecordWriter RecordWriterOptions",
  "tensorflow.python.lib.io.file_io": "atomic_write_string_to_file",
  "tensorflow.python.ops.control_flow_util": "GraphOrParentsInXlaContext",
  "tensorflow.python.ops.data_flow_ops": (
    "QueueBase _as_name_list _as_shape_list _as_type_list _shared_name"
  ),
  "tensorflow.python.ops.gen_data_flow_ops": "fifo_queue_v2 padding_fifo_queue_v2",
  "tensorflow.python.ops.gen_resource_variable_ops": (
    "assign_add_variable_op assign_sub_variable_op assign_variable_op read_variable_op"
  ),
  "tensorflow.python.ops.ragged.row_partition": "RowPartition _row_partition_factory_key",
  "tensorflow.python.ops.resource_variable_ops": "ResourceVariable",
  "tensorflow.python.ops.resources": "initialize_resources register_resource shared_resources",
  "tensorflow.python.ops.variable_scope": "VariableScope",
  "tensorflow.python.saved_model.loader_impl": "SavedModelLoader",
  "tensorflow.python.saved_model.model_utils.export_output": (
    "ClassificationOutput ExportOutput PredictOutput RegressionOutput"
  ),
  "tensorflow.python.saved_model.model_utils.export_utils": (
    "build_all_signature_defs get_export_outputs get_temp_export_dir get_timestamped_export_dir"
  ),
  "tensorflow.python.saved_model.registration": "register_checkpoint_saver register_serializable",
  "tensorflow.python.tpu.client.client": "",
  "tensorflow.python.trackable.resource": "RestoredResource",
  "tensorflow.python.training.checkpoint_management": "",
  "tensorflow.python.training.checkpoint_state_pb2": "CheckpointState",
  "tensorflow.python.training.device_setter": "STANDARD_PS_OPS",
  "tensorflow.python.training.monitored_session": "_PREEMPTION_ERRORS sm",
  "tensorflow.python.training.py_checkpoint_reader": "NewCheckpointReader",
  "tensorflow.python.training.saver": (
    "BaseSaverBuilder BulkSaverBuilder Saver _wrap_restore_error_with_msg "
    "object_graph_key_mapping saver_from_object_based_checkpoint"
  ),
  "tensorflow.python.training.summary_io": "SummaryWriterCache",
  "tensorflow.python.training.training_util": (
    "GLOBAL_STEP_READ_KEY _get_or_create_global_step_read global_step"
  ),
  "tensorflow.tsl.profiler.protobuf.xplane_pb2": "XSpace",
}

# The same below `tf.__internal__`.
INTERNAL_NAMES = "EagerTensor tracking.AutoTrackable"

_TPU_NEEDS = (
  "{name} is not in this TensorFlow: training on TPU stands on TPUEstimator and TPU embeddings, "
  "which exist up to TensorFlow 2.15. Take that version: pip install 'tensorflow==2.15.*'"
)


def original_estimator_class(name: str) -> tuple[type, ...]:
  """Returns a class of `tf.estimator` as the bases of ours; none where it is gone."""
  module = _import_original("tensorflow_estimator.python.estimator.model_fn")
  return () if module is None else (getattr(module, name),)


def original_receiver_class(name: str) -> tuple[type, ...]:
  """Returns a class of `tf.estimator.export` as the bases of ours; none where it is gone."""
  module = _import_original("tensorflow_estimator.python.estimator.export.export")
  return () if module is None else (getattr(module, name),)


def original_initializer_hooks() -> tuple[type, ...]:
  """Returns the hook of `tf.estimator` that starts datasets; none where it is gone."""
  module = _import_original("tensorflow_estimator.python.estimator.util")
  return () if module is None else (module._DatasetInitializerHook,)


def _import_original(name: str) -> types.ModuleType | None:
  import tensorflow as tf

  # The package of an older TensorFlow may have been left behind; it cannot be imported.
  return importlib.import_module(name) if hasattr(tf, "estimator") else None


def import_tpu_estimator() -> types.ModuleType:
  """Returns TensorFlow's module of TPUEstimator.

  Raises:
    ImportError: this TensorFlow has none.
  """
  return _import_of_2_15("tensorflow_estimator.python.estimator.tpu.tpu_estimator")


def import_tpu_embedding() -> types.ModuleType:
  """Returns TensorFlow's module of TPU embeddings under TPUEstimator.

  Raises:
    ImportError: this TensorFlow has none.
  """
  return _import_of_2_15("tensorflow.python.tpu.tpu_embedding")


def _import_of_2_15(name: str) -> types.ModuleType:
  import tensorflow as tf

  if not hasattr(tf, "estimator"):
    raise ImportError(_TPU_NEEDS.format(name=name))
  return importlib.import_module(name)


def find_broadcast_hook(horovod: Any) -> type | None:
  """Returns Horovod's hook that gives all ranks the variables of one; none where it is gone.

  Args:
    horovod: `horovod.tensorflow`, or a module in its place.
  """
  return getattr(horovod, "BroadcastGlobalVariablesHook", None)


def is_keras_3() -> bool:
  """Tells whether `tf.keras` is Keras 3.

  Raises:
    ImportError: TF_USE_LEGACY_KERAS asks for the package `tf_keras`, which is missing.
  """
  import tensorflow as tf

  try:
    layer = tf.keras.layers.Layer
  except ImportError as e:
    asked = os.environ.get("TF_USE_LEGACY_KERAS", "")
    if asked not in ("1", "true", "True") or importlib.util.find_spec("tf_keras"):
      raise
    raise ImportError(
      f"TF_USE_LEGACY_KERAS={asked} asks for Keras 2, which is missing: {_install_tf_keras()}"
    ) from e
  return not issubclass(layer, tf.Module)  # those of Keras 2 are


def import_keras() -> types.ModuleType:
  """Returns Keras 2, whose layers also work in graphs: `tf.keras`, or the package `tf_keras`.

  Raises:
    ImportError: `tf.keras` is Keras 3, and the package is missing.
  """
  import tensorflow as tf

  return _import_tf_keras("tf_keras") if is_keras_3() else tf.keras


def import_keras_v1() -> types.ModuleType:
  """Returns what `tf.compat.v1.keras` is with Keras 2.

  Raises:
    ImportError: `tf.keras` is Keras 3, and the package `tf_keras` is missing.
  """
  import tensorflow as tf

  if import_keras() is tf.keras:
    return tf.compat.v1.keras
  return _import_tf_keras("tf_keras.api._v1.keras")


def _import_tf_keras(name: str) -> types.ModuleType:
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError as e:
    raise ImportError(
      f"Layers in graphs need Keras 2, and this TensorFlow has Keras 3: {_install_tf_keras()}"
    ) from e


def _install_tf_keras() -> str:
  return f"pip install 'tf-keras=={'.'.join(_install.minor_version_of_tensorflow())}.*'"


def import_keras_saving(name: str) -> types.ModuleType:
  """Returns a module of those with which the Keras of TensorFlow saves.

  Raises:
    ImportError: it is Keras 3.
  """
  import tensorflow as tf

  # `keras` or `tf_keras`: whichever `tf.keras` is.
  package = tf.keras.Model.__module__.partition(".")[0]
  try:
    return importlib.import_module(f"{package}.src.saving.legacy.{name}")
  except ModuleNotFoundError as e:
    raise ImportError(
      f"{package} has no {name}, which Keras 2 saves with: with TensorFlow 2.16 and newer that is "
      "the package tf_keras, and TF_USE_LEGACY_KERAS=1 set before TensorFlow is imported"
    ) from e


def import_keras_state() -> types.ModuleType:
  """Returns the module in which Keras 3 keeps what a thread is doing, such as its name scopes."""
  return importlib.import_module("keras.src.backend.common.global_state")


def import_summary_pb2() -> types.ModuleType:
  """Returns the messages of summaries: tensorboard's, or TensorFlow's where that is missing."""
  try:
    return importlib.import_module("tensorboard.compat.proto.summary_pb2")
  except ModuleNotFoundError:
    return importlib.import_module("tensorflow.core.framework.summary_pb2")


def is_repeated(field: Any) -> bool:
  """Tells whether a field of a protobuf message, given by its descriptor, is a list."""
  if hasattr(field, "is_repeated"):
    return bool(field.is_repeated)
  return field.label == field.LABEL_REPEATED
