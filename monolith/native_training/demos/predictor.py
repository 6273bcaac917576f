"""Scores random samples with an export of `demos.export`.

  python -m monolith.native_training.demos.predictor --saved_model_path=DIR

`predictor_client` asks a server for the same.
"""

from __future__ import annotations

import random

import numpy as np
import tensorflow as tf
from absl import app, flags

from idl.matrix.proto import proto_parser_pb2
from monolith.native_training import model
from monolith.serving.scorer import LocalScorer

FLAGS = flags.FLAGS

# Other programs that import this one may have flags of these names.
if "saved_model_path" not in FLAGS:
  flags.DEFINE_string("saved_model_path", None, "folder of the SavedModel, or of its versions")
if "signature" not in FLAGS:
  flags.DEFINE_string("signature", "serving_default", "which signature")
if "batch_size" not in FLAGS:
  flags.DEFINE_integer("batch_size", 128, "samples to score")

_MAX_ID = 1 << 20


def random_instances(batch_size: int) -> np.ndarray:
  """Returns serialized Instances with one random id in each slot of the demo model, `[batch]`."""
  instances = np.empty(batch_size, object)
  for i in range(batch_size):
    fids = [(slot << 54) + random.randrange(_MAX_ID) for slot in range(model._NUM_SLOTS)]
    instances[i] = proto_parser_pb2.Instance(fid=fids).SerializeToString()
  return instances


def predict(saved_model_path: str, signature: str, batch_size: int) -> dict[str, np.ndarray]:
  """Scores random samples.

  Args:
    saved_model_path: folder of the SavedModel, or of its versions.
    signature: which signature; it takes serialized Instances as `instances`.
    batch_size: how many samples.

  Returns:
    Output by name.

  Raises:
    ServingError: there is no such model or signature, or it failed.
  """
  scorer = LocalScorer(saved_model_path, signature)
  try:
    return scorer.score({"instances": random_instances(batch_size)})
  finally:
    scorer.close()


def main(_: list[str]) -> None:
  tf.compat.v1.disable_eager_execution()
  for name, output in predict(FLAGS.saved_model_path, FLAGS.signature, FLAGS.batch_size).items():
    print(name, output)


if __name__ == "__main__":
  app.run(main)
