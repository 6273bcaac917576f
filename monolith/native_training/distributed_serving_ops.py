"""Tables and serving: pushing updated rows to serving replicas, and predicting remotely.

While training, every parameter server pushes the rows that were touched since the last push:

  client = ParameterSyncClient(parameter_sync_client_from_config(name_suffix="0"))
  table = hash_table_from_config(config, sync_client=client.handle)
  push = client.create_sync_op(config_placeholder)   # fed with refresh_sync_config(backend, 0)

Differences from ByteDance's Monolith: pushing from a dummy client gives an empty result; rows that
did not reach every target are part of the next push again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from monolith.agent_service import backends
from monolith.native_training import utils
from monolith.native_training.runtime.ops import gen_monolith_ops
from monolith.native_training.runtime.parameter_sync import parameter_sync_pb2
from monolith.native_training.serving import transport as serving_transport

gen_distributed_serving_ops = gen_monolith_ops

# Sends what the ops of this module hand over; importing it installs it in this process.
set_remote_predict_resolver = serving_transport.set_remote_predict_resolver

_SYNC_SIGNATURE = "hashtable_assign"
_SYNC_TIMEOUT_MS = 3000


def remote_predict(
  input_tensor_alias: Sequence[str],
  input_tensors: Sequence[tf.Tensor],
  output_tensor_alias: Sequence[str],
  model_name: str,
  task: int,
  old_model_name: str | None,
  model_version: int = -1,
  fail_op_on_rpc_error: bool = True,
  max_rpc_deadline_millis: int = 30,
  output_types: Sequence[tf.DType] | None = None,
  name: str | None = None,
  signature_name: str = "serving_default",
) -> list[tf.Tensor]:
  """Calls a signature of another model, which TensorFlow Serving serves.

  Args:
    input_tensor_alias: names of the signature's inputs, one per tensor.
    input_tensors: its inputs.
    output_tensor_alias: names of the wanted outputs.
    model_name: which model.
    task: index of the parameter server, -1 if the model is not one.
    old_model_name: name of the model in exports of earlier versions.
    model_version: -1 for the newest.
    fail_op_on_rpc_error: whether an error of the call is an error of the op.
    max_rpc_deadline_millis: how long the call may take.
    output_types: dtypes of the outputs.
    name: name of the op.
    signature_name: which signature.

  Returns:
    One tensor per output, of unknown shape.

  Raises:
    ValueError: `model_name` is `None`.
  """
  if model_name is None:
    raise ValueError("model_name must be specified.")
  return gen_distributed_serving_ops.tf_serving_remote_predict(
    input_tensor_alias,
    input_tensors,
    output_tensor_alias,
    model_name=model_name,
    task=task,
    old_model_name=old_model_name or "",
    model_version=model_version,
    fail_op_on_rpc_error=fail_op_on_rpc_error,
    max_rpc_deadline_millis=max_rpc_deadline_millis,
    output_types=output_types,
    signature_name=signature_name,
    name=name,
  )[2]


def create_parameter_sync_clients(ps_num: int) -> list[tf.Tensor]:
  """Returns one client per parameter server, on its device; a single local one for `ps_num` 0."""
  if ps_num == 0:
    return [parameter_sync_client_from_config()]
  clients = []
  for i in range(ps_num):
    with tf.device(utils.ps_device(i)):
      clients.append(parameter_sync_client_from_config(name_suffix=str(i)))
  return clients


def parameter_sync_client_from_config(
  config: parameter_sync_pb2.ClientConfig | None = None, name_suffix: str = ""
) -> tf.Tensor:
  """Returns the handle of a client that remembers which rows of its tables are touched.

  Args:
    config: where to push to.
    name_suffix: clients of the same suffix are one.
  """
  return gen_distributed_serving_ops.monolith_parameter_sync_client(
    config=b"" if config is None else config.SerializeToString(),
    shared_name=f"MonolithSyncClient_{name_suffix}",
  )


def create_dummy_sync_client() -> tf.Tensor:
  """Returns the handle of a client that has nothing to push to."""
  return gen_distributed_serving_ops.monolith_dummy_sync_client(
    shared_name="MonolithDummySyncClient"
  )


def create_dummy_sync_server(address: str) -> tf.Tensor:
  """Returns the handle of a server that accepts every push.

  Args:
    address: `host:port`; port 0 picks a free one.
  """
  return gen_distributed_serving_ops.monolith_dummy_sync_server(address=address)


def refresh_sync_config(sync_backend: backends.SyncBackend, ps_index: int) -> bytes:
  """Asks who serves a parameter server's tables.

  Args:
    sync_backend: knows the serving replicas.
    ps_index: index of the parameter server.

  Returns:
    A serialized `ClientConfig` for `ParameterSyncClient.create_sync_op`.
  """
  model_name, targets = sync_backend.get_sync_targets(f"ps_{ps_index}")
  config = parameter_sync_pb2.ClientConfig(
    model_name=model_name,
    signature_name=_SYNC_SIGNATURE,
    timeout_in_ms=_SYNC_TIMEOUT_MS,
    targets=list(targets),
  )
  if isinstance(targets, Mapping):
    config.targets_extra_info.extend(targets.values())
  return config.SerializeToString()


class ParameterSyncClient:
  """A client and its pushes.

  Args:
    client: what `parameter_sync_client_from_config` returned.
  """

  def __init__(self, client: tf.Tensor):
    self._client = client

  def create_sync_op(self, config_str: bytes | tf.Tensor) -> tf.Tensor:
    """Pushes what was touched since the last push.

    Args:
      config_str: a serialized `ClientConfig`; its targets replace those of the push before.

    Returns:
      String `[1]`, JSON of a `PushResult`.
    """
    return gen_distributed_serving_ops.monolith_parameter_sync(self._client, config_str)

  def as_op(self, name: str | None = None) -> tf.Operation:
    """Returns the op that creates the client."""
    with tf.control_dependencies([self._client]):
      return tf.no_op(name=name)

  @property
  def handle(self) -> tf.Tensor:
    return self._client


class DummySyncServer:
  """A server in this process that accepts every push.

  Args:
    address: `host:port`; port 0 picks a free one.
  """

  def __init__(self, address: str):
    self._server = create_dummy_sync_server(address)

  def get_port(self) -> tf.Tensor:
    """Returns the port it listens on, int32 `[1]`."""
    return gen_distributed_serving_ops.monolith_dummy_sync_server_get_port(self._server)

  def shutdown(self) -> tf.Tensor:
    """Returns an int64 to run: the server then listens no more."""
    return gen_distributed_serving_ops.monolith_dummy_sync_server_shutdown(self._server)

  def as_op(self, name: str | None = None) -> tf.Operation:
    """Returns the op that starts the server."""
    with tf.control_dependencies([self._server]):
      return tf.no_op(name=name)

  @property
  def handle(self) -> tf.Tensor:
    return self._server
