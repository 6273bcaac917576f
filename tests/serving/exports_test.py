"""Trained models are served: in one process, and as an entry that asks replicas of its servers.

Covers `native_training/serving/push_versions.py` too.
"""

import glob
import os
import pathlib
import re
import shutil
import tempfile
import threading
import unittest
from concurrent import futures

import grpc
import numpy as np
import pytest
import tensorflow as tf
from absl import flags
from google.protobuf import text_format
from tensorflow_serving.apis import get_model_metadata_pb2
from tensorflow_serving.config import model_server_config_pb2

from monolith.agent_service import agent_service_pb2, agent_service_pb2_grpc
from monolith.native_training.runtime.parameter_sync import parameter_sync_pb2
from monolith.native_training.serving import push_versions, transport
from tests import free_ports
from tests.serving import click_example, saved_models, server_process
from tests.wait_until import wait_until

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()

_USERS = np.array([3, 3, 7, 123456789], np.int64)
_ITEMS = np.array([1, 2, 5, -5], np.int64)


class _Agent(agent_service_pb2_grpc.AgentServiceServicer):
  """Tells where parameter servers are, as the agent beside a serving process does."""

  def __init__(self, addresses):
    self.addresses = addresses

  def HeartBeat(self, request, context):
    response = agent_service_pb2.HeartBeatResponse()
    if request.server_type == agent_service_pb2.PS:
      for index in range(2):
        response.addresses[f"ps:{index}"].address.extend(self.addresses)
    return response


class ExportsTest(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    if not flags.FLAGS.is_parsed():
      flags.FLAGS(["test"])
    cls.folder = tempfile.mkdtemp()
    cls.addClassCleanup(shutil.rmtree, cls.folder)
    cls.alone = click_example.train_and_export(f"{cls.folder}/alone", 0)["entry"]
    cls.parts = click_example.train_and_export(f"{cls.folder}/parts", 2)
    cls.with_dense = click_example.export_with_dense(f"{cls.folder}/parts", 2)
    # Exports are self-contained: nothing of the training runs is needed.
    for name in ("alone", "parts"):
      for path in os.listdir(f"{cls.folder}/{name}"):
        if path.startswith(("model.ckpt", "checkpoint")):
          path = f"{cls.folder}/{name}/{path}"
          shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
    servers = {name: os.path.dirname(path) for name, path in cls.parts.items() if name != "entry"}
    entry = os.path.dirname(cls.parts["entry"])
    dense = {"dense_0": os.path.dirname(cls.with_dense["dense_0"])}
    # One process with all parts, which asks itself.
    port = free_ports.get_free_port()
    addresses = ",".join(f"{name}=127.0.0.1:{port}" for name in (*servers, *dense))
    entries = {"named": entry, "in_three": os.path.dirname(cls.with_dense["entry"])}
    cls.ps = cls._start(
      "a",
      {**servers, **dense, **entries},
      f"--ps_address={addresses}",
      "--fetch_ps_timeout_ms=60000",
      port=port,
    )
    # Only the test that kills it knows it.
    cls.replica = cls._start("b", servers)
    cls.agent = _Agent([cls.ps.address, cls.replica.address])
    port = free_ports.get_free_port()
    agent_server = grpc.server(futures.ThreadPoolExecutor(2))
    agent_service_pb2_grpc.add_AgentServiceServicer_to_server(cls.agent, agent_server)
    agent_server.add_insecure_port(f"localhost:{port}")
    agent_server.start()
    cls.addClassCleanup(agent_server.stop, None)
    cls.entry = cls._start(
      "c",
      {"clicks": entry, "alone": os.path.dirname(cls.alone)},
      "--fetch_ps_timeout_ms=60000",
      environment={"PORT2": str(port)},
    )
    for server in (cls.ps, cls.replica):
      for name in servers:
        server.wait_until_available(name)
    for name in (*dense, *entries):
      cls.ps.wait_until_available(name)
    for name in ("clicks", "alone"):
      cls.entry.wait_until_available(name)

  @classmethod
  def _start(cls, name, models, *flags_of_server, environment=None, port=None):
    config = model_server_config_pb2.ModelServerConfig()
    for model, base_path in models.items():
      config.model_config_list.config.add(
        name=model, base_path=base_path, model_platform="tensorflow"
      )
    path = f"{cls.folder}/{name}.config"
    with open(path, "w") as stream:
      stream.write(text_format.MessageToString(config))
    server = server_process.ServerProcess(
      f"--model_config_file={path}", *flags_of_server, environment=environment, port=port
    )
    cls.addClassCleanup(server.stop)
    return server.wait_until_listening()

  def _ask(self, server, model, **inputs):
    request = saved_models.make_request(model, "", **(inputs or {"user": _USERS, "item": _ITEMS}))
    response = server.prediction.Predict(request, timeout=60)
    return tf.make_ndarray(response.outputs["output"])

  def test_one_process_answers_as_a_session(self):
    wanted = saved_models.run_session(self.alone, "serving_default", user=_USERS, item=_ITEMS)

    answer = self._ask(self.entry, "alone")

    self.assertEqual(answer.tobytes(), wanted["output"].tobytes())
    self.assertEqual(len(set(answer.tolist())), 4)
    status, document = self.entry.post(
      "/v1/models/alone:predict", {"instances": [{"user": 3, "item": 1}]}
    )
    self.assertEqual((status, len(document["predictions"])), (200, 1))

  def test_an_export_with_a_torn_table_is_refused(self):
    before = self._ask(self.entry, "alone")
    base, version = os.path.split(self.alone)
    torn = f"{base}/{int(version) + 1}"
    shutil.copytree(self.alone, f"{torn}.tmp")
    rows = max(pathlib.Path(f"{torn}.tmp", "assets").iterdir(), key=lambda p: p.stat().st_size)
    os.truncate(rows, rows.stat().st_size // 2)
    os.rename(f"{torn}.tmp", torn)

    def status_of_torn():
      states = self.entry.get("/v1/models/alone")[1]["model_version_status"]
      found = [state for state in states if state["version"] == os.path.basename(torn)]
      return found[0] if found and found[0]["state"] == "END" else None

    wait_until(status_of_torn)
    self.assertIn(torn, status_of_torn()["status"]["error_message"])
    self.assertEqual(self._ask(self.entry, "alone").tobytes(), before.tobytes())

  def _assign_signature(self):
    """Returns the name of the signature that sets rows of the model in one process."""
    request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
    request.model_spec.name = "alone"
    metadata = self.entry.prediction.GetModelMetadata(request).metadata["signature_def"]
    signatures = get_model_metadata_pb2.SignatureDefMap()
    metadata.Unpack(signatures)
    (name,) = (key for key in signatures.signature_def if key.endswith("/raw_assign"))
    return name

  def test_one_process_is_kept_fresh(self):
    before = self._ask(self.entry, "alone", user=np.array([11, 12]), item=np.array([5, 5]))
    name = self._assign_signature()

    # Two tables with rows of eight; the same id in both, since either may come first.
    assign = saved_models.make_request(
      "alone",
      name,
      id=np.array([11, 11], np.int64),
      id_split=np.array([0, 1, 2], np.int64),
      flat_value=np.full(16, 9.0, np.float32),
    )
    self.entry.prediction.Predict(assign, timeout=60)

    after = self._ask(self.entry, "alone", user=np.array([11, 12]), item=np.array([5, 5]))
    self.assertNotEqual(after[0], before[0])
    self.assertEqual(after[1], before[1])

  def test_pushes_of_a_process_that_was_replaced_are_refused(self):
    signature = self._assign_signature()
    config = parameter_sync_pb2.ClientConfig(timeout_in_ms=60_000, targets=[self.entry.address])

    def push(value, versions):
      request = parameter_sync_pb2.PushRequest(model_name="alone", signature_name=signature)
      for name in ("first", "second"):
        request.delta_multi_hash_tables.add(
          unique_id=name, dim_size=8, fids=[21], embeddings=[value] * 8
        )
      (response,) = transport.push(request, config, versions).responses
      # Both rows are those that were pushed: whatever was learnt of other ids, answers differ.
      answer = self._ask(self.entry, "alone", user=np.array([21]), item=np.array([21]))
      return response, answer.tobytes()

    old, new = push_versions.PushVersions(1), push_versions.PushVersions(2)
    # Small values: a click's probability must not round to 0 or 1, where all answers are equal.
    before = push(0.01, old)
    after = push(0.02, new)
    refused = push(0.01, old)
    newer = push(0.01, new)

    self.assertEqual([r.status_code for r, _ in (before, after, newer)], [0, 0, 0])
    self.assertNotEqual(before[1], after[1])
    self.assertEqual(refused[0].status_code, grpc.StatusCode.INVALID_ARGUMENT.value[0])
    self.assertIn("not newer", refused[0].error_message)
    self.assertEqual(refused[1], after[1])
    self.assertEqual(newer[1], before[1])

  def test_an_entry_answers_as_a_session(self):
    transport.set_remote_predict_resolver(
      lambda _, old_name, task: transport.ServedModel(old_name, [self.ps.address])
    )
    self.addCleanup(transport.set_remote_predict_resolver, None)
    wanted = saved_models.run_session(
      self.parts["entry"], "serving_default", user=_USERS, item=_ITEMS
    )["output"]

    by_flag = self._ask(self.ps, "named")
    by_agent = self._ask(self.entry, "clicks")

    self.assertEqual(by_flag.tobytes(), wanted.tobytes())
    self.assertEqual(by_agent.tobytes(), wanted.tobytes())
    self.assertEqual(len(set(wanted.tolist())), 4)

  def test_the_dense_part_elsewhere(self):
    wanted = self._ask(self.ps, "named")
    answer = self._ask(self.ps, "in_three")
    np.testing.assert_allclose(answer, wanted, rtol=1e-6)

  def test_the_reader_in_the_document(self):
    text = (server_process.ROOT / "docs" / "serving.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = {}
    exec(program, names)

    files = glob.glob(f"{self.alone}/assets/*-00000-of-00001")
    (data,) = (file for file in files if ".meta-" not in file)
    rows = {
      (table, id): np.array(vector)
      for table, id, vector in names["read_rows"](data[: -len("-00000-of-00001")])
    }

    # The model is a scalar product and a bias: two answers give the bias, twice the same. Not those
    # that are almost sure: a probability near 1 has lost the digits of its logit.
    products = {
      (user, item): 10 * rows["user", user] @ rows["item", item]
      for user in range(10)
      for item in range(10)
      if ("user", user) in rows and ("item", item) in rows
    }
    products = {pair: product for pair, product in products.items() if abs(product) < 4}
    pairs = [min(products, key=products.get), max(products, key=products.get)]
    user, item = np.array(pairs).T
    answer = self._ask(self.entry, "alone", user=user, item=item).astype(np.float64)
    logits = np.log(answer / (1 - answer))
    products = [products[pair] for pair in pairs]
    self.assertGreater(products[1] - products[0], 0.5)
    # Served rows have 16 bits.
    self.assertAlmostEqual(logits[0] - products[0], logits[1] - products[1], 1)

  def test_a_killed_replica_fails_no_request(self):
    answered, errors, stop = [], [], threading.Event()

    def ask():
      while not stop.is_set():
        try:
          self._ask(self.entry, "clicks")
          answered.append(1)
        except grpc.RpcError as error:
          errors.append(error)
          return

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
      thread.start()
    try:
      wait_until(lambda: len(answered) > 20 or errors)
      self.replica.kill()
      seen = len(answered)
      wait_until(lambda: len(answered) > seen + 50 or errors)
    finally:
      stop.set()
      for thread in threads:
        thread.join()
    self.assertEqual(errors, [])


if __name__ == "__main__":
  unittest.main()
