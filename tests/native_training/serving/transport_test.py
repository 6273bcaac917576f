"""How kernels of a serving process find and call other servers.

Also tests of `agent_resolver` and `push_rows`.
"""

from __future__ import annotations

import threading
import unittest
from concurrent import futures
from unittest import mock

import grpc
import numpy as np
import tensorflow as tf

from monolith.agent_service import agent_service_pb2, agent_service_pb2_grpc
from monolith.native_training.runtime.parameter_sync import (
  parameter_sync_pb2,
  prediction_service_pb2,
)
from monolith.native_training.serving import agent_resolver, push_rows, push_versions, transport
from tests.free_ports import get_free_port
from tests.wait_until import wait_until


class _Replica(grpc.GenericRpcHandler):
  """A prediction service that remembers the names it was asked for, and who asked."""

  def __init__(self, port=0, answers=None, metadata=None):
    self.names, self.peers = [], set()
    self._metadata = metadata
    self._answers = answers
    self._server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[self])
    self.address = f"localhost:{self._server.add_insecure_port(f'localhost:{port}')}"
    self._server.start()

  def service(self, details):
    if details.method == push_versions.METADATA_METHOD and self._metadata is not None:
      return grpc.unary_unary_rpc_method_handler(lambda data, context: self._metadata)
    # Others are answered with UNIMPLEMENTED, as by a server without metadata.
    is_predict = details.method == transport.PREDICT_METHOD
    return grpc.unary_unary_rpc_method_handler(self._predict) if is_predict else None

  def _predict(self, data, context):
    self.peers.add(context.peer())
    if self._answers is not None:
      self._answers.wait(60)
    self.names.append(prediction_service_pb2.PredictRequest.FromString(data).model_spec.name)
    return b""

  def stop(self):
    self._server.stop(None).wait()


class _Agent(agent_service_pb2_grpc.AgentServiceServicer):
  def __init__(self, services):
    self.services, self.calls = services, 0
    self._server = grpc.server(futures.ThreadPoolExecutor(2))
    agent_service_pb2_grpc.add_AgentServiceServicer_to_server(self, self._server)
    self.port = self._server.add_insecure_port("localhost:0")
    self._server.start()

  def HeartBeat(self, request, context):  # noqa: N802
    self.calls += 1
    response = agent_service_pb2.HeartBeatResponse()
    if request.server_type == agent_service_pb2.PS:
      for key, addresses in self.services.items():
        response.addresses[key].address.extend(addresses)
    return response

  def stop(self):
    self._server.stop(None).wait()


def _predict(task=1, deadline_millis=60000):
  request = prediction_service_pb2.PredictRequest()
  request.model_spec.name = f"clicks:ps_{task}"
  call = f"{task}\n{deadline_millis}\nps_{task}".encode()
  return transport._predict_call(request.SerializeToString(), call)


class PredictTest(unittest.TestCase):
  def setUp(self):
    super().setUp()
    self.addCleanup(transport.set_remote_predict_resolver, None)

  def serve(self, **kwargs):
    replica = _Replica(**kwargs)
    self.addCleanup(replica.stop)
    return replica

  def ask(self, services):
    agent = _Agent(services)
    self.addCleanup(agent.stop)
    self.enterContextOf(mock.patch.dict("os.environ", {"PORT2": str(agent.port)}))
    return agent

  def enterContextOf(self, context):  # noqa: N802
    context.__enter__()
    self.addCleanup(context.__exit__, None, None, None)

  def test_the_kind_of_keys_decides_the_name(self):
    for key, name in (("ps:1", "ps_1"), ("clicks:ps_1", "clicks:ps_1")):
      replica = self.serve()
      self.ask({key: [replica.address]})
      _predict()
      self.assertEqual(replica.names, [name])
      transport.set_remote_predict_resolver(None)

  def test_the_agent_is_asked_once_in_a_while(self):
    replica = self.serve()
    agent = self.ask({"ps:1": [replica.address]})
    for _ in range(5):
      _predict()
    self.assertEqual(agent.calls, 2)  # Once for PS, once for DENSE.

  def test_an_agent_that_is_away_changes_nothing(self):
    replica = self.serve()
    agent = self.ask({"ps:1": [replica.address]})
    _predict()
    agent.stop()
    with mock.patch.object(agent_resolver, "_ASK_AGAIN_SECS", 0):
      _predict()
    self.assertEqual(replica.names, ["ps_1", "ps_1"])

  def test_another_replica_answers_for_one_that_is_dead(self):
    replica = self.serve()
    transport.set_remote_predict_resolver(
      lambda *_: [f"localhost:{get_free_port()}", replica.address]
    )
    for _ in range(4):
      _predict()
    self.assertEqual(len(replica.names), 4)

  def test_another_replica_answers_for_one_that_stands_still(self):
    answers = threading.Event()
    still, alive = self.serve(answers=answers), self.serve()
    self.addCleanup(answers.set)
    transport.set_remote_predict_resolver(lambda *_: [still.address, alive.address])
    # One after the other has the first turn. Half of the time is for the one that stands still, and
    # the other half must do for a call on a busy machine.
    for _ in range(2):
      _predict(deadline_millis=10000)
    answers.set()
    self.assertEqual(len(alive.names), 2)

  def test_without_a_living_replica_both_are_named(self):
    dead = [f"localhost:{get_free_port()}" for _ in range(3)]
    transport.set_remote_predict_resolver(lambda *_: dead)
    with self.assertRaises(transport.HostError) as caught:
      _predict()
    self.assertEqual(caught.exception.code, grpc.StatusCode.UNAVAILABLE.value[0])
    self.assertEqual(sum(address in str(caught.exception) for address in dead), 2)

  def test_the_agent_is_asked_again_when_all_it_knew_fail(self):
    dead, alive = f"localhost:{get_free_port()}", self.serve()
    agent = self.ask({"ps:1": [dead]})
    with self.assertRaises(transport.HostError):
      _predict()
    agent.services = {"ps:1": [alive.address]}
    wait_until(lambda: self.try_predict() is not None)
    self.assertEqual(len(alive.names), 1)

  def try_predict(self):
    try:
      return _predict()
    except transport.HostError:
      return None

  def test_a_replica_that_an_answer_lacks_is_still_tried(self):
    dead, alive = f"localhost:{get_free_port()}", self.serve()
    agent = self.ask({"clicks:ps_1": [alive.address]})
    _predict()
    agent.services = {"clicks:ps_1": [dead]}
    with mock.patch.object(agent_resolver, "_ASK_AGAIN_SECS", 0):
      _predict()
      agent.services = {}
      _predict()
    self.assertEqual(alive.names, ["clicks:ps_1"] * 3)

  def test_the_deadline_of_the_op_is_that_of_the_call(self):
    answers = threading.Event()
    replica = self.serve(answers=answers)
    transport.set_remote_predict_resolver(lambda *_: [replica.address])
    with self.assertRaises(transport.HostError) as caught:
      _predict(deadline_millis=200)
    answers.set()
    self.assertEqual(caught.exception.code, grpc.StatusCode.DEADLINE_EXCEEDED.value[0])

  def test_dense_by_old_name(self):
    find_key = agent_resolver.find_key
    self.assertEqual(find_key({"dense:0": []}, "clicks:dense_0", "dense_0"), ("dense:0", "dense_0"))
    self.assertEqual(
      find_key({"clicks:ps_0": []}, "clicks:dense_0", "dense_0"),
      ("clicks:dense_0", "clicks:dense_0"),
    )


class PushTest(unittest.TestCase):
  def push(self, address):
    request = parameter_sync_pb2.PushRequest(model_name="m", signature_name="s")
    request.delta_hash_tables.add(unique_id="t", dim_size=1, fids=[1], embeddings=[2.0])
    config = parameter_sync_pb2.ClientConfig(targets=[address], timeout_in_ms=20000)
    (response,) = transport.push(request, config).responses
    return response.status_code

  def test_channels_stay_open_from_push_to_push(self):
    replica = _Replica()
    self.addCleanup(replica.stop)
    for _ in range(3):
      self.assertEqual(self.push(replica.address), 0)
    self.assertEqual(len(replica.peers), 1)

  def test_metadata_that_cannot_be_read_gets_the_plain_call(self):
    replica = _Replica(metadata=b"\xff\xff\xff")
    self.addCleanup(replica.stop)
    self.assertEqual(self.push(replica.address), 0)
    self.assertEqual(replica.names, ["m"])

  def test_a_replica_that_comes_back_is_found(self):
    port = get_free_port()
    first = _Replica(port=port)
    self.assertEqual(self.push(first.address), 0)
    first.stop()
    self.assertNotEqual(self.push(first.address), 0)
    second = _Replica(port=port)
    self.addCleanup(second.stop)
    wait_until(lambda: self.push(second.address) == 0, poll_secs=0.2)
    self.assertEqual(second.names[:1], ["m"])


class PushRowsTest(unittest.TestCase):
  def delta(self, ids, values, **fields):
    return push_rows.Delta(fids=ids, embeddings=values, **fields)

  def test_rows_are_what_the_message_says(self):
    ids = [0, 1, 127, 128, 300, 2**62, -1, -(2**63), 2**63 - 1, 1, 1]
    values = np.arange(len(ids) * 3, dtype=np.float32) - 7.25
    rows = push_rows.decode(self.delta(ids, values, unique_id="t\x18%", dim_size=3))

    self.assertEqual((rows.unique_id, rows.ids.dtype), ("t\x18%", np.int64))
    np.testing.assert_array_equal(rows.ids, ids)
    np.testing.assert_array_equal(rows.values, values.reshape(-1, 3))
    self.assertEqual(rows.num_bytes, len(ids) * (8 + 3 * 4))

  def test_random_messages(self):
    draw = np.random.default_rng(7)
    for _ in range(50):
      dim, size = (int(n) for n in draw.integers(0, 5, 2))
      ids = draw.integers(-(2**63), 2**63 - 1, size) >> draw.integers(0, 63, size)
      values = draw.standard_normal(size * dim).astype(np.float32)
      rows = push_rows.decode(self.delta(ids.tolist(), values, unique_id="t", dim_size=dim))
      np.testing.assert_array_equal(rows.ids, ids)
      np.testing.assert_array_equal(rows.values, values.reshape(size, dim))

  def test_nothing(self):
    for fields in ({}, {"dim_size": 4}, {"unique_id": "t"}):
      rows = push_rows.decode(self.delta([], [], **fields))
      self.assertEqual((rows.ids.size, rows.values.size), (0, 0))

  def test_sizes_that_do_not_fit(self):
    for ids, values, dim in (
      ([1], [], 1),
      ([1, 2], [1.0] * 3, 2),
      ([], [1.0], 1),
      ([1], [1.0], -1),
    ):
      with self.assertRaisesRegex(ValueError, "'t' has . values for . ids of"):
        push_rows.decode(self.delta(ids, values, unique_id="t", dim_size=dim))
    with self.assertRaises(ValueError):
      push_rows.decode(self.delta([], [], dim_size=-2))

  def test_fields_of_a_newer_client_are_not_taken_for_rows(self):
    data = self.delta([1], [2.0], unique_id="t", dim_size=1).SerializeToString()
    for unknown in (b"\x7d" + b"\x00" * 4, b"\x78\x01"):
      with self.assertRaisesRegex(ValueError, "not where they should be"):
        push_rows.decode(push_rows.Delta.FromString(data + unknown))

  def test_parts_have_all_rows_once(self):
    ids = np.arange(7)
    rows = push_rows.TableRows("t", ids, ids[:, None].astype(np.float32))
    for parts in (1, 2, 3, 7, 10):
      split = [rows.part(i, parts) for i in range(parts)]
      np.testing.assert_array_equal(np.concatenate([part.ids for part in split]), ids)
      np.testing.assert_array_equal(np.concatenate([part.values for part in split]), rows.values)
      self.assertLessEqual(max(p.ids.size for p in split) - min(p.ids.size for p in split), 1)

  def test_tensors(self):
    for array in (
      np.arange(6, dtype=np.int64).reshape(2, 3),
      np.zeros([0, 4], np.float32),
      np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2],
    ):
      np.testing.assert_array_equal(tf.make_ndarray(push_rows.to_tensor_proto(array)), array)


if __name__ == "__main__":
  unittest.main()
