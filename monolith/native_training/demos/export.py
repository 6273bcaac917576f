"""Exports the FFM model of `model.py`.

  python -m monolith.native_training.demos.export --model_dir=… --export_base=…

The exported model reads serialized `Instance`s, whose slots 0 to 5 are the model's six features.
"""

from __future__ import annotations

import tensorflow as tf
from absl import app, flags

from monolith.native_training import cpu_training, graph_estimator, model
from monolith.native_training.data.training_instance.python import parse_instance_ops
from monolith.native_training.graph import export_context
from monolith.native_training.input import slot_to_key
from monolith.native_training.model_export import saved_model_exporters

FLAGS = flags.FLAGS

# Other programs that import this one may have flags of these names.
if "num_ps" not in FLAGS:
  flags.DEFINE_integer("num_ps", 5, "parameter servers of the training run")
if "model_dir" not in FLAGS:
  flags.DEFINE_string("model_dir", None, "where the checkpoints are")
if "export_base" not in FLAGS:
  flags.DEFINE_string("export_base", None, "where the exported models go")
if "export_mode" not in FLAGS:
  flags.DEFINE_enum_class(
    "export_mode",
    export_context.ExportMode.DISTRIBUTED,
    export_context.ExportMode,
    "one model (standalone), or one per parameter server and one for the rest (distributed)",
  )

_BATCH_SIZE = 64


def export_saved_model(
  model_dir: str, export_base: str, num_ps: int, export_mode: export_context.ExportMode
) -> bytes | dict[str, bytes]:
  """Exports the newest checkpoint of a trained `TestFFMModel`.

  Args:
    model_dir: where the checkpoints are.
    export_base: where the exported models go.
    num_ps: parameter servers of the training run.
    export_mode: `STANDALONE` or `DISTRIBUTED`.

  Returns:
    The folder of the model; if distributed, graph name -> folder.

  Raises:
    ValueError: another `export_mode`, or no checkpoint that fits.
  """
  params = model.TestFFMModel.params()
  params.name = "demo_export"
  params.train.per_replica_batch_size = _BATCH_SIZE
  training = cpu_training.CpuTraining(
    cpu_training.CpuTrainingConfig(num_ps=num_ps), params.instantiate()
  )
  if export_mode == export_context.ExportMode.STANDALONE:
    exporter_cls = saved_model_exporters.StandaloneExporter
  elif export_mode == export_context.ExportMode.DISTRIBUTED:
    exporter_cls = saved_model_exporters.DistributedExporter
  else:
    raise ValueError(f"Invalid export_mode: {export_mode}")
  exporter = exporter_cls(
    training.create_model_fn(), model_dir, export_base, shared_embedding=False, num_ps=num_ps
  )
  return exporter.export_saved_model(_serving_input_receiver_fn)


def _serving_input_receiver_fn() -> graph_estimator.ServingInputReceiver:
  instances = tf.compat.v1.placeholder(tf.string, [None], name="instances")
  slots = range(model._NUM_SLOTS)
  parsed = parse_instance_ops.parse_instances(
    instances,
    fidv1_features=list(slots),
    fidv2_features=None,
    misc_float_features=[],
    misc_int64_features=[],
  )
  features = {slot_to_key(slot): parsed[f"slot_{slot}"] for slot in slots}
  return graph_estimator.ServingInputReceiver(features, {"instances": instances})


def main(_: list[str]) -> None:
  tf.compat.v1.disable_eager_execution()
  export_saved_model(FLAGS.model_dir, FLAGS.export_base, FLAGS.num_ps, FLAGS.export_mode)


if __name__ == "__main__":
  app.run(main)
