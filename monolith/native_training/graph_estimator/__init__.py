"""Estimator of a model function: builds a graph and runs it in monitored sessions.

TensorFlow had these names in `tf.estimator` up to version 2.15. User code may still pass objects of
that package: specs, receivers, configurations and warm-start settings. Session hooks are those of
`tf.compat.v1.train`.

Most programs use `monolith.estimator`, which is built on the driver, which is built on this.
"""

from monolith.native_training.graph_estimator.estimator import Estimator
from monolith.native_training.graph_estimator.inputs import DatasetInitializerHook
from monolith.native_training.graph_estimator.receivers import (
  ServingInputReceiver,
  TensorServingInputReceiver,
  build_parsing_serving_input_receiver_fn,
  build_raw_serving_input_receiver_fn,
)
from monolith.native_training.graph_estimator.run_config import RunConfig
from monolith.native_training.graph_estimator.spec import (
  ClassificationOutput,
  EstimatorSpec,
  ExportOutput,
  ModeKeys,
  PredictOutput,
  RegressionOutput,
)
from monolith.native_training.graph_estimator.training import (
  EvalSpec,
  TrainSpec,
  train_and_evaluate,
)
from monolith.native_training.graph_estimator.warm_start import WarmStartSettings

__all__ = [
  "ClassificationOutput",
  "DatasetInitializerHook",
  "Estimator",
  "EstimatorSpec",
  "EvalSpec",
  "ExportOutput",
  "ModeKeys",
  "PredictOutput",
  "RegressionOutput",
  "RunConfig",
  "ServingInputReceiver",
  "TensorServingInputReceiver",
  "TrainSpec",
  "WarmStartSettings",
  "build_parsing_serving_input_receiver_fn",
  "build_raw_serving_input_receiver_fn",
  "train_and_evaluate",
]
