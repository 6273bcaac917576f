"""Asks a server of `demos.export`'s model for scores of random samples.

python -m monolith.native_training.demos.predictor_client --server=localhost:8500
"""

from __future__ import annotations

import numpy as np
from absl import app, flags

from monolith.native_training.demos import predictor
from monolith.serving.scorer import RemoteScorer

FLAGS = flags.FLAGS

# Other programs that import this one may have flags of these names.
if "server" not in FLAGS:
  flags.DEFINE_string("server", "localhost:8500", "host:port of the server's gRPC")
if "model_name" not in FLAGS:
  flags.DEFINE_string("model_name", "default", "which model of the server")
if "signature_name" not in FLAGS:
  flags.DEFINE_string("signature_name", "serving_default", "which signature")


def predict(
  server: str, model_name: str, signature_name: str, batch_size: int
) -> dict[str, np.ndarray]:
  """Asks for the scores of random samples.

  Args:
    server: `host:port` of the server's gRPC.
    model_name: which model.
    signature_name: which signature; it takes serialized Instances as `instances`.
    batch_size: how many samples.

  Returns:
    Output by name.

  Raises:
    ServingError: what the server answered, or that it cannot be reached.
  """
  scorer = RemoteScorer(server, model_name, signature_name)
  try:
    return scorer.score({"instances": predictor.random_instances(batch_size)})
  finally:
    scorer.close()


def main(_: list[str]) -> None:
  outputs = predict(FLAGS.server, FLAGS.model_name, FLAGS.signature_name, FLAGS.batch_size)
  for name, output in outputs.items():
    print(name, output)


if __name__ == "__main__":
  app.run(main)
