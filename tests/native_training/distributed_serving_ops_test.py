"""Pushing touched rows to servers that really listen, and remote prediction."""

import json
from concurrent import futures

import grpc
import numpy as np
import tensorflow as tf
from google.protobuf import json_format
from tensorflow.core.framework import tensor_pb2
from tensorflow.python.ops import resources

from monolith.agent_service import backends, data_def, mocked_zkclient, replica_manager
from monolith.agent_service import utils as agent_utils
from monolith.native_training import (
  distributed_serving_ops,
  hash_table_ops,
  multi_hash_table_ops,
  test_utils,
)
from monolith.native_training.runtime.parameter_sync import (
  parameter_sync_pb2,
  prediction_service_pb2,
)
from monolith.native_training.serving import transport as serving_transport
from tests.free_ports import get_free_port

tf.compat.v1.disable_eager_execution()


class RecordingServer:
  """A prediction service that remembers its requests, with tensors as arrays."""

  def __init__(self, answer=None):
    self.requests = []
    self._answer = answer or {}
    self._server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[self])
    self.address = f"localhost:{self._server.add_insecure_port('localhost:0')}"
    self._server.start()

  def service(self, details):
    if details.method == "/tensorflow.serving.PredictionService/Predict":
      return grpc.unary_unary_rpc_method_handler(self._predict)
    return None

  def _predict(self, data, context):
    request = prediction_service_pb2.PredictRequest.FromString(data)
    inputs = {
      alias: tf.make_ndarray(tensor_pb2.TensorProto.FromString(value))
      for alias, value in request.inputs.items()
    }
    self.requests.append((request.model_spec, inputs))
    response = prediction_service_pb2.PredictResponse()
    for alias, value in self._answer.items():
      response.outputs[alias] = tf.make_tensor_proto(value).SerializeToString()
    return response.SerializeToString()

  def stop(self):
    self._server.stop(None).wait()


class ParameterSyncTest(tf.test.TestCase):
  def serve(self, **kwargs):
    server = RecordingServer(**kwargs)
    self.addCleanup(server.stop)
    return server

  def config(self, *targets, timeout_in_ms=60000):
    return parameter_sync_pb2.ClientConfig(
      model_name="model",
      signature_name="hashtable_assign",
      targets=targets,
      timeout_in_ms=timeout_in_ms,
    ).SerializeToString()

  def test_parameter_sync_client(self):
    with self.session() as session:
      servers = [distributed_serving_ops.DummySyncServer("localhost:0") for _ in range(2)]
      ports = session.run([server.get_port() for server in servers])
      self.assertEqual([port.shape for port in ports], [(1,), (1,)])
      config = parameter_sync_pb2.ClientConfig(
        targets=[f"localhost:{port[0]}" for port in ports], timeout_in_ms=60000
      )
      client = distributed_serving_ops.ParameterSyncClient(
        distributed_serving_ops.parameter_sync_client_from_config(config)
      )
      session.run(client.as_op())
      table = hash_table_ops.test_hash_table(3, learning_rate=0.1, sync_client=client.handle)
      ids = tf.constant([0, 0, 1], tf.int64)
      table = table.apply_gradients(ids, -tf.ones([3, 3]), tf.constant(0, tf.int64))
      rows = session.run(table.lookup([0, 1]))
      result = session.run(client.create_sync_op(config.SerializeToString()))
      again = session.run(client.create_sync_op(config.SerializeToString()))
      session.run([server.shutdown() for server in servers])

    self.assertAllClose(rows, [[0.2] * 3, [0.1] * 3])
    self.assertEqual(result.shape, (1,))
    result = json_format.Parse(result[0], parameter_sync_pb2.PushResult())
    self.assertCountEqual([r.target for r in result.responses], config.targets)
    self.assertEqual([(r.status_code, r.update_num) for r in result.responses], [(0, 2)] * 2)
    self.assertEqual(json.loads(again[0]), {})

  def test_refresh_sync_config_1(self):
    zk = mocked_zkclient.FakeKazooClient()
    zk.start()
    config = agent_utils.AgentConfig(
      bzid="demo", base_name="test_ffm_model", deploy_type="ps", num_ps=5
    )
    watcher = replica_manager.ReplicaWatcher(zk, config)
    watcher.watch_data()
    self.addCleanup(watcher.stop)
    meta = data_def.ReplicaMeta(
      address="localhost:8500", stat=agent_utils.ModelState.AVAILABLE, server_type="ps", task=1
    )
    zk.create("/demo/service/test_ffm_model/ps:1/0", meta.serialize(), makepath=True)

    serialized = distributed_serving_ops.refresh_sync_config(watcher.to_sync_wrapper(), 1)

    result = parameter_sync_pb2.ClientConfig.FromString(serialized)
    self.assertEqual(result.model_name, "ps_1")
    self.assertEqual(result.targets, ["localhost:8500"])
    self.assertEqual(result.signature_name, "hashtable_assign")
    self.assertEqual(result.timeout_in_ms, 3000)
    self.assertLen(result.targets_extra_info, 1)
    self.assertEqual(result.targets_extra_info[0].replica_id, 0)
    self.assertFalse(result.targets_extra_info[0].HasField("idc"))

  def test_refresh_sync_config_2(self):
    backend = backends.ZKBackend("demo", zk_servers="127.0.0.1:9999")
    backend._zk = mocked_zkclient.FakeKazooClient()
    backend.start()
    self.addCleanup(backend.stop)
    backend.subscribe_model("test_ffm_model")
    container = backends.Container("default", "asdf")
    backend.report_service_info(container, backends.ContainerServiceInfo(grpc="localhost:8888"))
    backend.sync_available_saved_models(container, {backends.SavedModel("test_ffm_model", "ps_1")})

    serialized = distributed_serving_ops.refresh_sync_config(backend, 1)

    result = parameter_sync_pb2.ClientConfig.FromString(serialized)
    self.assertEqual(result.model_name, "test_ffm_model:ps_1")
    self.assertEqual(result.targets, ["localhost:8888"])
    self.assertEmpty(result.targets_extra_info)

  def test_what_single_tables_send(self):
    server = self.serve()
    with self.session() as session:
      handle = distributed_serving_ops.parameter_sync_client_from_config(name_suffix="single")
      client = distributed_serving_ops.ParameterSyncClient(handle)
      one = hash_table_ops.test_hash_table(1, name_suffix="one", sync_client=handle)
      two = hash_table_ops.test_hash_table(2, name_suffix="two", sync_client=handle)
      step = tf.constant(0, tf.int64)
      session.run(one.apply_gradients([7, -7], [[-1.0], [-2.0]], step).as_op())
      session.run(two.apply_gradients([5], [[-3.0, -4.0]], step).as_op())
      session.run(client.create_sync_op(self.config(server.address)))
      # An assignment is no news for serving.
      session.run(one.assign([7], [[9.0]]).as_op())
      session.run(two.apply_gradients([5], [[-2.0, -2.0]], step).as_op())
      session.run(client.create_sync_op(self.config(server.address)))

    (spec, inputs), (_, second) = server.requests
    self.assertEqual((spec.name, spec.signature_name), ("model", "hashtable_assign"))
    rows = dict(zip(inputs["MonolithHashTable_one_id"], inputs["MonolithHashTable_one_value"]))
    self.assertEqual({k: v.tolist() for k, v in rows.items()}, {7: [1.0], -7: [2.0]})
    self.assertAllEqual(inputs["MonolithHashTable_two_value"], [[3, 4]])
    self.assertCountEqual(second, ["MonolithHashTable_two_id", "MonolithHashTable_two_value"])
    self.assertAllEqual(second["MonolithHashTable_two_value"], [[5, 6]])

  def test_what_a_native_table_sends(self):
    server = self.serve()
    with self.session() as session:
      handle = distributed_serving_ops.parameter_sync_client_from_config(name_suffix="native")
      client = distributed_serving_ops.ParameterSyncClient(handle)
      configs = {name: test_utils.generate_test_hash_table_config(2) for name in "abc"}
      table = multi_hash_table_ops.MultiHashTable.from_configs(
        configs, sync_client=handle, name_suffix="pushed"
      )
      session.run(resources.initialize_resources(resources.shared_resources()))
      grads = {"c": ([3], [[-1.0, -2.0]]), "a": ([4], [[-3.0, -4.0]])}
      session.run(table.apply_gradients(grads, tf.constant(0, tf.int64)).as_op())
      session.run(client.create_sync_op(self.config(server.address)))

    ((spec, inputs),) = server.requests
    self.assertEqual(spec.signature_name, "MonolithMultiHashTable_pushed/raw_assign")
    self.assertAllEqual(inputs["id"], [4, 3])
    self.assertAllEqual(inputs["id_split"], [0, 1, 1, 2])
    self.assertAllEqual(inputs["flat_value"], [3, 4, 1, 2])

  def test_a_client_serves_single_tables_or_one_group(self):
    with self.session() as session:
      handle = distributed_serving_ops.parameter_sync_client_from_config(name_suffix="mixed")
      table = hash_table_ops.test_hash_table(1, name_suffix="mixed", sync_client=handle)
      session.run(table.as_op())
      multi_hash_table_ops.MultiHashTable.from_configs(
        {"a": test_utils.generate_test_hash_table_config(1)},
        sync_client=handle,
        name_suffix="mixed",
      )
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "single table"):
        session.run(resources.initialize_resources(resources.shared_resources()))

  def test_a_dummy_client_pushes_nothing(self):
    server = self.serve()
    with self.session() as session:
      handle = distributed_serving_ops.create_dummy_sync_client()
      table = hash_table_ops.test_hash_table(1, name_suffix="dummy", sync_client=handle)
      session.run(table.apply_gradients([1], [[1.0]], tf.constant(0, tf.int64)).as_op())
      client = distributed_serving_ops.ParameterSyncClient(handle)

      result = session.run(client.create_sync_op(self.config(server.address)))
    self.assertEqual(json.loads(result[0]), {})
    self.assertEmpty(server.requests)

  def test_a_dead_target_is_named_and_the_others_are_served(self):
    server, dead_address = self.serve(), f"localhost:{get_free_port()}"
    with self.session() as session:
      handle = distributed_serving_ops.parameter_sync_client_from_config(name_suffix="dead")
      table = hash_table_ops.test_hash_table(1, name_suffix="dead", sync_client=handle)
      session.run(table.apply_gradients([1], [[1.0]], tf.constant(0, tf.int64)).as_op())
      client = distributed_serving_ops.ParameterSyncClient(handle)
      config = self.config(dead_address, server.address)
      result = session.run(client.create_sync_op(config))

    responses = json.loads(result[0])["responses"]
    self.assertEqual([r["target"] for r in responses], [dead_address, server.address])
    self.assertNotEqual(responses[0]["status_code"], 0)
    self.assertTrue(responses[0]["error_message"])
    self.assertEqual(responses[1]["update_num"], 1)
    self.assertLen(server.requests, 1)

  def test_rows_that_did_not_reach_a_target_are_pushed_again(self):
    server, dead_address = self.serve(), f"localhost:{get_free_port()}"
    with self.session() as session:
      handle = distributed_serving_ops.parameter_sync_client_from_config(name_suffix="again")
      table = hash_table_ops.test_hash_table(1, name_suffix="again", sync_client=handle)
      step = tf.constant(0, tf.int64)
      client = distributed_serving_ops.ParameterSyncClient(handle)
      push_to_dead = client.create_sync_op(self.config(dead_address))
      push = client.create_sync_op(self.config(server.address))
      session.run(table.apply_gradients([1, 2], [[-1.0], [-2.0]], step).as_op())
      session.run(push_to_dead)
      session.run(table.apply_gradients([2, 3], [[-5.0], [-3.0]], step).as_op())
      session.run(push)
      nothing_left = session.run(push)

    ((_, inputs),) = server.requests
    rows = dict(zip(inputs["MonolithHashTable_again_id"], inputs["MonolithHashTable_again_value"]))
    # With the values of now, not of then.
    self.assertEqual({k: v.tolist() for k, v in rows.items()}, {1: [1.0], 2: [7.0], 3: [3.0]})
    self.assertEqual(json.loads(nothing_left[0]), {})

  def test_bad_config(self):
    with self.session() as session:
      handle = distributed_serving_ops.parameter_sync_client_from_config(name_suffix="bad")
      client = distributed_serving_ops.ParameterSyncClient(handle)
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "no serialized ClientConfig"):
        session.run(client.create_sync_op(b"\xff\xff\xff"))

  def test_clients_are_on_their_servers(self):
    with tf.Graph().as_default():
      clients = distributed_serving_ops.create_parameter_sync_clients(2)
      self.assertEqual(
        [client.op.get_attr("shared_name") for client in clients],
        [b"MonolithSyncClient_0", b"MonolithSyncClient_1"],
      )
      self.assertEqual(clients[1].device, "/job:ps/task:1/device:CPU:0")
    with tf.Graph().as_default():
      (client,) = distributed_serving_ops.create_parameter_sync_clients(0)
      self.assertEqual(client.op.get_attr("shared_name"), b"MonolithSyncClient_")
      self.assertEqual(client.device, "")


class MakePredictRequestsTest(tf.test.TestCase):
  def _request(self, n, multi):
    request = parameter_sync_pb2.PushRequest(model_name="m", signature_name="s", timeout_in_ms=7)
    tables = request.delta_multi_hash_tables if multi else request.delta_hash_tables
    for name, count in (("a", n), ("b", 1)):
      tables.add(
        unique_id=name, dim_size=2, fids=range(count), embeddings=np.arange(2 * count) * 0.5
      )
    return request

  def _inputs(self, call):
    return {
      alias: tf.make_ndarray(tensor_pb2.TensorProto.FromString(value))
      for alias, value in call.inputs.items()
    }

  def test_small_pushes_are_one_call(self):
    (call,) = serving_transport.make_predict_requests(self._request(3, multi=False))
    self.assertEqual((call.model_spec.name, call.model_spec.signature_name), ("m", "s"))
    inputs = self._inputs(call)
    self.assertCountEqual(inputs, ["a_id", "a_value", "b_id", "b_value"])
    self.assertAllEqual(inputs["a_id"], [0, 1, 2])
    self.assertAllEqual(inputs["a_value"], [[0, 0.5], [1, 1.5], [2, 2.5]])
    empty = parameter_sync_pb2.PushRequest(model_name="m")
    self.assertEqual(serving_transport.make_predict_requests(empty), [])

  def test_parts(self):
    request = self._request(100, multi=True)
    calls = serving_transport.make_predict_requests(request, max_bytes=101 * 16 // 3 + 1)

    parts = [self._inputs(call) for call in calls]
    self.assertEqual([len(part["id"]) for part in parts], [33, 33, 35])
    self.assertAllEqual([part["id_split"].tolist() for part in parts],
                        [[0, 33, 33], [0, 33, 33], [0, 34, 35]])  # fmt: skip
    ids = np.concatenate([part["id"][: part["id_split"][1]] for part in parts])
    self.assertAllEqual(ids, np.arange(100))
    values = np.concatenate([part["flat_value"][: 2 * part["id_split"][1]] for part in parts])
    self.assertAllClose(values, np.arange(200) * 0.5)

  def test_every_id_and_value_survives(self):
    ids = np.concatenate([
      [0, 1, 127, 128, -1, -128, 2**63 - 1, -(2**63), 0x18, 0x25, 0x1818181818, 2**14, 2**56 - 1],
      np.random.RandomState(0).randint(-(2**62), 2**62, 1000),
    ])  # fmt: skip
    bits = np.random.RandomState(1).randint(0, 256, ids.size * 3 * 4).astype(np.uint8)
    values = np.nan_to_num(bits.view(np.float32).reshape(-1, 3))
    values[0] = [np.inf, -0.0, np.float32(1e-45)]
    request = parameter_sync_pb2.PushRequest(model_name="m")
    request.delta_hash_tables.add(
      unique_id="\x18%t", dim_size=3, fids=ids.tolist(), embeddings=values.reshape(-1).tolist()
    )
    request.delta_hash_tables.add(dim_size=3)
    (call,) = serving_transport.make_predict_requests(request)
    inputs = self._inputs(call)
    self.assertAllEqual(inputs["\x18%t_id"], ids)
    self.assertEqual(inputs["\x18%t_value"].tobytes(), values.tobytes())
    self.assertEqual(inputs["_value"].shape, (0, 3))

  def test_rows_of_another_width(self):
    request = self._request(3, multi=False)
    request.delta_hash_tables[0].dim_size = 3
    with self.assertRaisesRegex(ValueError, "'a' has 6 values for 3 ids of 3"):
      serving_transport.make_predict_requests(request)

  def test_messages_are_those_of_tensorflow_serving(self):
    try:
      from tensorflow_serving.apis import predict_pb2
    except ImportError:
      self.skipTest("needs tensorflow-serving-api")
    (request,) = serving_transport.make_predict_requests(self._request(2, multi=False))
    request.model_spec.version.value = 5

    theirs = predict_pb2.PredictRequest.FromString(request.SerializeToString())
    self.assertEqual(theirs.model_spec.name, "m")
    self.assertEqual(theirs.model_spec.version.value, 5)
    self.assertEqual(theirs.model_spec.signature_name, "s")
    self.assertAllEqual(tf.make_ndarray(theirs.inputs["a_value"]), [[0, 0.5], [1, 1.5]])
    ours = prediction_service_pb2.PredictRequest.FromString(theirs.SerializeToString())
    self.assertEqual(ours, request)


class RemotePredictTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.addCleanup(distributed_serving_ops.set_remote_predict_resolver, None)

  def predict(self, model_name="model:ps_3", **kwargs):
    return distributed_serving_ops.remote_predict(
      ["x", "s"],
      [tf.constant([1, 2], tf.int64), tf.constant(["text"])],
      ["y"],
      model_name=model_name,
      task=3,
      old_model_name=None,
      output_types=[tf.float32],
      signature_name="lookup",
      **{"max_rpc_deadline_millis": 60000, **kwargs},
    )

  def test_model_name_is_required(self):
    with self.assertRaisesRegex(ValueError, "^model_name must be specified.$"):
      self.predict(model_name=None)

  def test_call(self):
    server = RecordingServer({"y": np.array([[0.5, 1.5]], np.float32)})
    self.addCleanup(server.stop)
    asked = []

    def resolver(*args):
      asked.append(args)
      return [server.address]

    distributed_serving_ops.set_remote_predict_resolver(resolver)
    with self.session() as session:
      (y,) = session.run(self.predict(model_version=9))

    self.assertAllEqual(y, [[0.5, 1.5]])
    self.assertEqual(asked, [("model:ps_3", "", 3)])
    ((spec, inputs),) = server.requests
    self.assertEqual((spec.name, spec.version.value), ("model:ps_3", 9))
    self.assertEqual(spec.signature_name, "lookup")
    self.assertAllEqual(inputs["x"], [1, 2])
    self.assertAllEqual(inputs["s"], [b"text"])

  def test_errors_name_the_server(self):
    address = f"localhost:{get_free_port()}"
    distributed_serving_ops.set_remote_predict_resolver(lambda *_: [address])
    with self.session() as session:
      with self.assertRaisesRegex(tf.errors.UnavailableError, address):
        session.run(self.predict())
      op = self.predict(fail_op_on_rpc_error=False)[0].op
      code, message, y = session.run(list(op.outputs))

    self.assertEqual(code, grpc.StatusCode.UNAVAILABLE.value[0])
    self.assertIn(address, message.decode())
    self.assertEmpty(y)

  def test_wrong_answers(self):
    for answer, error, text in (
      ({"z": np.float32(1)}, tf.errors.NotFoundError, "no output 'y'"),
      ({"y": np.int64(1)}, tf.errors.InvalidArgumentError, "'y' is int64, want float"),
    ):
      server = RecordingServer(answer)
      self.addCleanup(server.stop)
      distributed_serving_ops.set_remote_predict_resolver(lambda *_, s=server: [s.address])
      with self.session() as session, self.assertRaisesRegex(error, text):
        session.run(self.predict())

  def test_without_resolver_or_replica(self):
    with self.session() as session:
      with self.assertRaisesRegex(tf.errors.UnimplementedError, "set_remote_predict_resolver"):
        session.run(self.predict())
      distributed_serving_ops.set_remote_predict_resolver(lambda *_: [])
      with self.assertRaisesRegex(tf.errors.UnavailableError, "no replica"):
        session.run(self.predict())


if __name__ == "__main__":
  tf.test.main()
