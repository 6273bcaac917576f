"""Looks into a training run in progress: values of variables, and rows of tables.

`DebuggingWorker` joins the cluster as one more worker. `create_app` serves it through HTTP; that
alone needs flask.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from absl import app, flags
from google.protobuf import text_format

from monolith import _install
from monolith.native_training import (
  cluster_manager,
  hash_table_ops,
  multi_type_hash_table,
  utils,
)
from monolith.native_training.debugging.messages import (
  FAIL,
  FEATURE_IDS,
  FEATURE_NAMES,
  FEATURES_PATH,
  MSG,
  STATUS,
  SUCCESS,
  VARIABLE_NAMES,
  VARIABLES_PATH,
)
from monolith.native_training.proto import debugging_info_pb2
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2

FLAGS = flags.FLAGS

_GRPC_SCHEME = "grpc://"

if "host" not in FLAGS:
  flags.DEFINE_string("host", "127.0.0.1", "address to listen on")
if "port" not in FLAGS:
  flags.DEFINE_integer("port", 8080, "port to listen on")
if "model_dir" not in FLAGS:
  flags.DEFINE_string("model_dir", None, "model folder of the training run")


class DebuggingWorker:
  """One more worker of a training run on parameter servers.

  Args:
    model_dir: the run's model folder.

  Raises:
    tf.errors.NotFoundError: the run has not written its debugging files.
  """

  def __init__(self, model_dir: str):
    info = debugging_info_pb2.DebuggingInfo()
    with tf.io.gfile.GFile(utils.get_debugging_info_file_name(model_dir), "rb") as f:
      info.ParseFromString(f.read())
    self._num_ps = len(info.cluster.ps_addrs)
    # Only tables of equal configuration were merged; the text of a configuration is enough for it.
    merged = multi_type_hash_table.MergedMultiTypeHashTable(
      {config.feature_name: config.config_str for config in info.feature_name_configs},
      lambda _: None,
    )
    self._feature_to_table = merged.slot_mapping
    self._server = tf.distribute.Server.create_local_server()
    index = max(info.num_workers, 1) - 1
    workers = [f"0.0.0.0:{i}" for i in range(1, index + 1)]
    cluster = {
      "chief": [info.cluster.chief_addr],
      "worker": [*workers, self._server.target[len(_GRPC_SCHEME) :]],
      "ps": list(info.cluster.ps_addrs),
    }
    config = cluster_manager.generate_session_config((cluster, {"type": "worker", "index": index}))
    with tf.Graph().as_default() as self._graph:
      tf.compat.v1.train.import_meta_graph(utils.get_meta_graph_file_name(model_dir))
      self._variables = {
        variable.name: variable
        for key in (tf.compat.v1.GraphKeys.GLOBAL_VARIABLES, tf.compat.v1.GraphKeys.LOCAL_VARIABLES)
        for variable in tf.compat.v1.get_collection(key)
      }
    self._session = tf.compat.v1.Session(self._server.target, graph=self._graph, config=config)

  def fetch_variables(self, variable_names: Iterable[str]) -> dict[str, str]:
    """Returns the values of variables as text; unknown ones are left out.

    Args:
      variable_names: their names in the training graph, such as `global_step:0`.
    """
    known = [name for name in variable_names if name in self._variables]
    with self._graph.as_default():
      values = self._session.run({name: self._variables[name].read_value() for name in known})
    return {name: str(value) for name, value in values.items()}

  def fetch_features(
    self, feature_names: Iterable[str], fids: Iterable[str | int]
  ) -> dict[str, dict[str, str]]:
    """Returns rows of tables that are resources of their own (not of native multi tables).

    Args:
      feature_names: unknown ones are left out.
      fids: as text (`["0", "1"]`) or as integers; those that have no row are left out.

    Returns:
      Feature name -> id, in the words of the caller -> `EntryDump` as text.

    Raises:
      ValueError: an id is not an integer.
    """
    fetches: dict[tuple[str, int], tf.Tensor] = {}
    shards: dict[int, dict[str, int]] = {}
    for fid in fids:
      number = int(fid)
      shard = number % self._num_ps if self._num_ps else 0
      shards.setdefault(shard, {})[str(fid)] = number
    with self._graph.as_default():
      for name in feature_names:
        if name not in self._feature_to_table:
          continue
        for shard, shard_fids in shards.items():
          handle = self._get_table(self._feature_to_table[name], shard)
          fetches[name, shard] = hash_table_ops.hash_table_ops.monolith_hash_table_lookup_entry(
            handle, tf.constant(list(shard_fids.values()), tf.int64)
          )
    result: dict[str, dict[str, str]] = {}
    for (name, shard), entries in self._session.run(fetches).items():
      rows = result.setdefault(name, {})
      for fid, serialized in zip(shards[shard], entries):
        if serialized:
          dump = embedding_hash_table_pb2.EntryDump.FromString(serialized)
          rows[fid] = text_format.MessageToString(dump)
    return result

  def _get_table(self, merged_name: str, shard: int) -> tf.Tensor:
    suffix = f"_{shard}" if self._num_ps else ""
    return self._graph.get_tensor_by_name(f"MonolithHashTable_{merged_name}{suffix}:0")


def create_app(model_dir: str | None = None) -> Any:
  """Returns a flask app: POST `/debugging/variables` and `/debugging/features`.

  Args:
    model_dir: the run's model folder; the flag by default.

  Raises:
    ImportError: flask is not installed.
  """
  try:
    import flask
  except ImportError as error:
    raise ImportError(f"Serving HTTP needs flask: {_install.install_line('debugging')}") from error

  worker = DebuggingWorker(model_dir or FLAGS.model_dir)
  flask_app = flask.Flask(__name__)

  def reply(fetch: Any) -> Any:
    try:
      return flask.jsonify({STATUS: SUCCESS, MSG: json.dumps(fetch())})
    except Exception as e:  # The caller is a person who wants to see what went wrong.
      return flask.jsonify({STATUS: FAIL, MSG: json.dumps(f"{type(e).__name__}: {e}")})

  @flask_app.route(VARIABLES_PATH, methods=["POST"])
  def fetch_variables() -> Any:
    return reply(lambda: worker.fetch_variables(flask.request.get_json()[VARIABLE_NAMES]))

  @flask_app.route(FEATURES_PATH, methods=["POST"])
  def fetch_features() -> Any:
    body = flask.request.get_json()
    return reply(lambda: worker.fetch_features(body[FEATURE_NAMES], body[FEATURE_IDS]))

  return flask_app


def main(unused_argv: list[str]) -> None:
  create_app().run(host=FLAGS.host, port=FLAGS.port)


if __name__ == "__main__":
  app.run(main)
