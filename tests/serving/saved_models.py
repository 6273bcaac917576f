"""Small SavedModels to serve."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2, prediction_log_pb2


def write_scale_model(base: str, version: int, scale: float) -> str:
  """Writes a model that answers `y = sum of x * scale`, `k2 = 2 k` and `text = prefix + s`.

  Its signature `slow` counts to `loops`, `boom` fails, `echo` returns bytes, `scale` no batch.

  Returns:
    The folder of the version.
  """
  folder = os.path.join(base, str(version))
  v1 = tf.compat.v1
  with tf.Graph().as_default(), v1.Session() as session:
    x = v1.placeholder(tf.float32, [None, 2], name="x")
    k = v1.placeholder(tf.int64, [None], name="k")
    s = v1.placeholder(tf.string, [None], name="s")
    weight = v1.get_variable("weight", initializer=float(scale))
    y = tf.reduce_sum(x, 1) * weight
    loops = v1.placeholder(tf.int64, [], name="loops")
    slow = tf.while_loop(lambda i: i < loops, lambda i: i + 1, [tf.constant(0, tf.int64)])
    with tf.control_dependencies([tf.debugging.Assert(tf.size(k) < 0, ["no k is right:", k])]):
      boom = tf.identity(k)
    session.run(v1.global_variables_initializer())
    signatures = {
      "serving_default": ({"x": x, "k": k}, {"y": y, "k2": k * 2}),
      "text": ({"s": s}, {"text": tf.constant("a ") + s}),
      "echo": ({"s": s}, {"echo_bytes": tf.identity(s)}),
      "one": ({"x": x}, {"y": y}),
      "slow": ({"loops": loops}, {"loops": slow[0]}),
      "boom": ({"k": k}, {"k": boom}),
      "scale": ({"x": x}, {"scale": weight.read_value()}),
    }
    builder = v1.saved_model.Builder(folder + ".tmp")
    builder.add_meta_graph_and_variables(
      session,
      ["serve"],
      signature_def_map={
        name: v1.saved_model.predict_signature_def(inputs, outputs)
        for name, (inputs, outputs) in signatures.items()
      },
    )
    builder.save()
  os.rename(folder + ".tmp", folder)
  return folder


def write_model(folder: str, signature: Callable[[], tuple[dict, dict]]) -> str:
  """Saves the model that `signature() -> (inputs, outputs)` builds; returns its folder."""
  return write_signatures(folder, lambda: {"serving_default": signature()})


def write_signatures(folder: str, signatures: Callable[[], dict[str, tuple[dict, dict]]]) -> str:
  """Saves the model that `signatures() -> {name: (inputs, outputs)}` builds."""
  v1 = tf.compat.v1
  with tf.Graph().as_default(), v1.Session() as session:
    definitions = {
      name: v1.saved_model.predict_signature_def(inputs, outputs)
      for name, (inputs, outputs) in signatures().items()
    }
    builder = v1.saved_model.Builder(folder)
    builder.add_meta_graph_and_variables(session, ["serve"], signature_def_map=definitions)
    builder.save()
  return folder


def write_sum_model(folder: str) -> str:
  """Saves a model that sums pairs."""

  def signature():
    x = tf.compat.v1.placeholder(tf.float32, [None, 2])
    return {"x": x}, {"y": tf.reduce_sum(x, 1)}

  return write_model(folder, signature)


def write_entry_model(folder: str) -> str:
  """Saves a model that asks `ps_0` for the sums of pairs and doubles them."""
  # Loads the op library, which most tests do without.
  from monolith.native_training import distributed_serving_ops

  def signature():
    x = tf.compat.v1.placeholder(tf.float32, [None, 2])
    (y,) = distributed_serving_ops.remote_predict(
      ["x"],
      [x],
      ["y"],
      model_name="clicks:ps_0",
      task=0,
      old_model_name="ps_0",
      max_rpc_deadline_millis=20_000,
      output_types=[tf.float32],
      signature_name="serving_default",
    )
    return {"x": x}, {"y": y * 2}

  return write_model(folder, signature)


def write_string_model(folder: str) -> str:
  """Writes a model that answers with strings and their lengths."""

  def signatures():
    s = tf.compat.v1.placeholder(tf.string, [None], "s")
    return {"serving_default": ({"s": s}, {"n": tf.strings.length(s), "t": tf.identity(s)})}

  return write_signatures(folder, signatures)


def make_request(
  model: str, signature: str = "", **inputs: np.ndarray
) -> predict_pb2.PredictRequest:
  """Returns a request for a model."""
  request = predict_pb2.PredictRequest()
  request.model_spec.name = model
  request.model_spec.signature_name = signature
  for name, value in inputs.items():
    request.inputs[name].CopyFrom(tf.make_tensor_proto(value))
  return request


def write_warmup(folder: str, *requests: predict_pb2.PredictRequest) -> None:
  """Puts warm-up requests into the folder of a version."""
  os.makedirs(os.path.join(folder, "assets.extra"))
  path = os.path.join(folder, "assets.extra", "tf_serving_warmup_requests")
  with tf.io.TFRecordWriter(path) as writer:
    for request in requests:
      log = prediction_log_pb2.PredictionLog()
      log.predict_log.request.CopyFrom(request)
      writer.write(log.SerializeToString())


def run_session(folder: str, signature: str, **inputs: np.ndarray) -> dict[str, np.ndarray]:
  """Returns what a session answers with the model of a folder."""
  with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    model = tf.compat.v1.saved_model.load(session, ["serve"], folder)
    definition = model.signature_def[signature]
    return session.run(
      {key: info.name for key, info in definition.outputs.items()},
      {definition.inputs[key].name: value for key, value in inputs.items()},
    )
