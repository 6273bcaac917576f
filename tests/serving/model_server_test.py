"""Clients of a model server get a session's answers, and an error for everything else."""

import json
import os
import queue
import random
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import unittest

import grpc
import numpy as np
import tensorflow as tf
from google.protobuf import (
  descriptor_pb2,
  descriptor_pool,
  json_format,
  message_factory,
  text_format,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import proto_reflection_descriptor_database, reflection_pb2
from tensorflow_serving.apis import (
  classification_pb2,
  get_model_metadata_pb2,
  get_model_status_pb2,
  inference_pb2,
  model_management_pb2,
  model_pb2,
  regression_pb2,
)
from tensorflow_serving.config import model_server_config_pb2

from tests.serving import saved_models, server_process
from tests.wait_until import wait_until

tf.compat.v1.disable_eager_execution()

Code = grpc.StatusCode
_X = np.array([[0.1, 0.7], [-3.25, 1e-7], [np.inf, 1.0]], np.float32)
_K = np.array([1, -(1 << 60) - 1, 9007199254740993], np.int64)


class ModelServerTest(unittest.TestCase):
  """One server for all tests; every test adds the models that it needs."""

  @classmethod
  def setUpClass(cls):
    cls.folder = tempfile.mkdtemp()
    cls.addClassCleanup(shutil.rmtree, cls.folder)
    cls.configs = {}
    cls.model_folder = saved_models.write_scale_model(f"{cls.folder}/m", 1, 2.5)
    config_file = f"{cls.folder}/models.config"
    with open(config_file, "w") as stream:
      stream.write(text_format.MessageToString(cls._config_of("m")))
    cls.server = server_process.ServerProcess(f"--model_config_file={config_file}")
    cls.addClassCleanup(cls.server.stop)
    cls.server.wait_until_listening().wait_until_available("m")

  @classmethod
  def _config_of(cls, name, policy="", labels=None):
    config = text_format.Parse(policy, model_server_config_pb2.ModelConfig())
    config.name, config.base_path = name, f"{cls.folder}/{name}"
    config.model_platform = "tensorflow"
    for label, version in (labels or {}).items():
      config.version_labels[label] = version
    cls.configs[name] = config
    whole = model_server_config_pb2.ModelServerConfig()
    whole.model_config_list.config.extend(cls.configs.values())
    return whole

  def tearDown(self):
    self.server.check_alive()
    # Whatever a test did, the first model answers.
    self.assertEqual(self._predict("m", x=_X, k=_K).model_spec.version.value, 1)

  def _reload(self, config):
    request = model_management_pb2.ReloadConfigRequest(config=config)
    return self.server.models.HandleReloadConfigRequest(request, timeout=60)

  def _add(self, name, policy="", labels=None):
    return self._reload(self._config_of(name, policy, labels))

  def _predict(self, name, signature="", **inputs):
    request = saved_models.make_request(name, signature, **inputs)
    return self.server.prediction.Predict(request, timeout=60)

  def _scale(self, name, version=None, label=None):
    request = saved_models.make_request(name, "scale", x=_X)
    if version is not None:
      request.model_spec.version.value = version
    if label is not None:
      request.model_spec.version_label = label
    return self.server.prediction.Predict(request, timeout=60).outputs["scale"].float_val[0]

  def _states(self, name):
    request = get_model_status_pb2.GetModelStatusRequest(model_spec=model_pb2.ModelSpec(name=name))
    response = self.server.models.GetModelStatus(request, timeout=60)
    state = get_model_status_pb2.ModelVersionStatus.State
    return {s.version: (state.Name(s.state), s.status) for s in response.model_version_status}

  def _assert_code(self, code, call, *words):
    with self.assertRaises(grpc.RpcError) as caught:
      call()
    self.assertEqual(caught.exception.code(), code, caught.exception.details())
    for word in words:
      self.assertIn(word, caught.exception.details())

  # ---- answers ----

  def test_answers_are_those_of_a_session(self):
    wanted = saved_models.run_session(self.model_folder, "serving_default", x=_X, k=_K)

    response = self._predict("m", x=_X, k=_K)

    self.assertEqual(response.model_spec.name, "m")
    self.assertEqual(response.model_spec.signature_name, "serving_default")
    self.assertEqual(set(response.outputs), {"y", "k2"})
    for key, array in wanted.items():
      answer = tf.make_ndarray(response.outputs[key])
      self.assertEqual(answer.dtype, array.dtype)
      self.assertEqual(answer.tobytes(), array.tobytes())
    # Clients of TensorFlow Serving read the fields of the type.
    self.assertEqual(len(response.outputs["y"].float_val), 3)
    self.assertEqual(list(response.outputs["k2"].int64_val), wanted["k2"].tolist())

  def test_every_form_of_a_tensor_is_understood(self):
    request = saved_models.make_request("m", x=_X[:2], k=_K[:2])
    self.assertTrue(request.inputs["x"].tensor_content)
    wanted = self.server.prediction.Predict(request)
    request.inputs["x"].ClearField("tensor_content")
    request.inputs["x"].float_val.extend(_X[:2].ravel().tolist())
    self.assertEqual(self.server.prediction.Predict(request), wanted)

    # One value stands for all.
    request.inputs["x"].ClearField("float_val")
    request.inputs["x"].float_val.append(1.0)
    answer = self.server.prediction.Predict(request)
    self.assertEqual(list(answer.outputs["y"].float_val), [5.0, 5.0])

    # None stands for zeros.
    request.inputs["x"].ClearField("float_val")
    answer = self.server.prediction.Predict(request)
    self.assertEqual(list(answer.outputs["y"].float_val), [0.0, 0.0])

  def test_only_wanted_outputs_are_sent(self):
    request = saved_models.make_request("m", x=_X, k=_K)
    request.output_filter.append("k2")
    self.assertEqual(list(self.server.prediction.Predict(request).outputs), ["k2"])
    request.output_filter.append("z")
    self._assert_code(
      Code.INVALID_ARGUMENT, lambda: self.server.prediction.Predict(request), "'z'", "'y'"
    )

  def test_strings(self):
    response = self._predict("m", "echo", s=np.array([b"\xff\x00", b""], object))
    self.assertEqual(list(response.outputs["echo_bytes"].string_val), [b"\xff\x00", b""])

  def test_empty_batch(self):
    response = self._predict("m", x=np.zeros([0, 2], np.float32), k=np.zeros([0], np.int64))
    self.assertEqual(tf.make_ndarray(response.outputs["y"]).shape, (0,))

  def test_metadata(self):
    request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
    request.model_spec.name = "m"
    response = self.server.prediction.GetModelMetadata(request)
    signatures = get_model_metadata_pb2.SignatureDefMap()
    self.assertTrue(response.metadata["signature_def"].Unpack(signatures))
    self.assertEqual(response.model_spec.version.value, 1)
    inputs = signatures.signature_def["serving_default"].inputs
    self.assertEqual(inputs["k"].dtype, tf.int64.as_datatype_enum)
    self.assertEqual([dim.size for dim in inputs["x"].tensor_shape.dim], [-1, 2])

    request.metadata_field[0] = "weights"
    self._assert_code(
      Code.INVALID_ARGUMENT,
      lambda: self.server.prediction.GetModelMetadata(request),
      "metadata_field",
    )

  def test_health(self):
    stub = health_pb2_grpc.HealthStub(self.server.channel)
    check = lambda name: stub.Check(health_pb2.HealthCheckRequest(service=name)).status  # noqa: E731
    self.assertEqual(check("m"), health_pb2.HealthCheckResponse.SERVING)
    self._assert_code(Code.NOT_FOUND, lambda: check("nobody"))
    self._config_of("nothing_there")
    self.assertRaises(grpc.RpcError, self._reload, self._config_of("nothing_there"))
    self.assertEqual(check("nothing_there"), health_pb2.HealthCheckResponse.NOT_SERVING)
    self.assertEqual(check(""), health_pb2.HealthCheckResponse.NOT_SERVING)
    del self.configs["nothing_there"]
    self._add("m")
    self.assertEqual(check(""), health_pb2.HealthCheckResponse.SERVING)

  def test_health_is_watched(self):
    states = health_pb2.HealthCheckResponse
    request = health_pb2.HealthCheckRequest(service="watched")
    saved_models.write_scale_model(f"{self.folder}/watched", 1, 2.0)
    with grpc.insecure_channel(self.server.address) as channel:
      watch = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=120)
      self.assertEqual(next(watch).status, states.SERVICE_UNKNOWN)
      self._add("watched")
      # A state may be told twice, and that the model is there before it answers.
      while (told := next(watch).status) != states.SERVING:
        self.assertIn(told, (states.SERVICE_UNKNOWN, states.NOT_SERVING))
      del self.configs["watched"]
      self._add("m")
      while (told := next(watch).status) != states.SERVICE_UNKNOWN:
        self.assertIn(told, (states.SERVING, states.NOT_SERVING))
      watch.cancel()

  def test_reflection(self):
    for package in ("grpc.reflection.v1", "grpc.reflection.v1alpha"):
      with self.subTest(package):
        self._check_reflection(f"/{package}.ServerReflection/ServerReflectionInfo")

  def _check_reflection(self, path):
    asked = queue.Queue()
    answers = self.server.channel.stream_stream(
      path,
      reflection_pb2.ServerReflectionRequest.SerializeToString,
      reflection_pb2.ServerReflectionResponse.FromString,
    )(iter(asked.get, None), timeout=60)

    def ask(**request):
      # Answered while the stream is open: tools ask for the next file when they know this one.
      asked.put(reflection_pb2.ServerReflectionRequest(host="h", **request))
      answer = next(answers)
      self.assertEqual(
        answer.original_request, reflection_pb2.ServerReflectionRequest(host="h", **request)
      )
      return answer

    services = ask(list_services="").list_services_response.service
    self.assertLessEqual(
      {
        "tensorflow.serving.PredictionService",
        "tensorflow.serving.ModelService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
      },
      {service.name for service in services},
    )
    for service in services:
      files = ask(file_containing_symbol=service.name).file_descriptor_response
      file = descriptor_pb2.FileDescriptorProto.FromString(files.file_descriptor_proto[0])
      again = ask(file_by_filename=file.name).file_descriptor_response
      self.assertEqual(again.file_descriptor_proto[0], files.file_descriptor_proto[0])
      self.assertIn(service.name, {f"{file.package}.{s.name}" for s in file.service})
    missing = ask(file_containing_symbol="tensorflow.serving.Nothing").error_response
    self.assertEqual(missing.error_code, Code.NOT_FOUND.value[0])
    asked.put(None)
    self.assertEqual(list(answers), [])
    self.assertEqual(answers.code(), Code.OK)

  def test_a_client_that_knows_the_address_only(self):
    """Finds the messages by reflection, as grpcurl does, and asks with them."""
    pool = descriptor_pool.DescriptorPool(
      proto_reflection_descriptor_database.ProtoReflectionDescriptorDatabase(self.server.channel)
    )

    def call(service, method, **fields):
      found = pool.FindServiceByName(f"tensorflow.serving.{service}").FindMethodByName(method)
      request, response = (
        message_factory.GetMessageClass(kind) for kind in (found.input_type, found.output_type)
      )
      return self.server.channel.unary_unary(
        f"/tensorflow.serving.{service}/{method}",
        request.SerializeToString,
        response.FromString,
      )(json_format.ParseDict(fields, request()), timeout=60)

    x = {
      "dtype": "DT_FLOAT",
      "tensorShape": {"dim": [{"size": 1}, {"size": 2}]},
      "floatVal": [1, 3],
    }
    spec = {"name": "m", "version": "1", "signatureName": "one"}
    answer = call("PredictionService", "Predict", modelSpec=spec, inputs={"x": x})
    self.assertEqual(list(answer.outputs["y"].float_val), [10.0])
    metadata = call(
      "PredictionService", "GetModelMetadata", modelSpec=spec, metadataField=["signature_def"]
    ).metadata["signature_def"]
    signatures = message_factory.GetMessageClass(
      pool.FindMessageTypeByName("tensorflow.serving.SignatureDefMap")
    )()
    self.assertTrue(metadata.Unpack(signatures))
    self.assertEqual(list(signatures.signature_def["one"].inputs), ["x"])
    states = call("ModelService", "GetModelStatus", modelSpec=spec).model_version_status
    self.assertEqual([(s.version, s.state) for s in states], [(1, 30)])
    config = {"name": "m", "basePath": f"{self.folder}/m", "modelVersionPolicy": {"specific": {}}}
    config["modelVersionPolicy"]["specific"]["versions"] = ["1"]
    config = {"modelConfigList": {"config": [config]}}
    call("ModelService", "HandleReloadConfigRequest", config=config)
    self._add("m")

  # ---- errors ----

  def test_unknown_models_versions_and_labels(self):
    self._assert_code(Code.NOT_FOUND, lambda: self._predict("nobody", x=_X, k=_K), "nobody")
    self._assert_code(Code.NOT_FOUND, lambda: self._predict("", x=_X, k=_K))
    self._assert_code(Code.NOT_FOUND, lambda: self._scale("m", version=7), "m", "7")
    self._assert_code(Code.NOT_FOUND, lambda: self._scale("m", label="best"), "m", "best")
    self._assert_code(Code.NOT_FOUND, lambda: self._states("nobody"), "nobody")

  def test_requests_that_do_not_fit_the_signature(self):
    invalid = Code.INVALID_ARGUMENT
    self._assert_code(invalid, lambda: self._predict("m", x=_X), "'k'", "missing")
    self._assert_code(invalid, lambda: self._predict("m", x=_X, k=_K, q=_K), "'q'", "surplus")
    self._assert_code(invalid, lambda: self._predict("m", "nothing", x=_X), "nothing", "one")
    self._assert_code(
      invalid, lambda: self._predict("m", x=_X, k=_K.astype(np.int32)), "'k'", "int32", "int64"
    )
    self._assert_code(invalid, lambda: self._predict("m", x=_X[0], k=_K), "'x'", "[2]")

  def test_an_error_of_the_graph_keeps_its_code(self):
    self._assert_code(
      Code.INVALID_ARGUMENT, lambda: self._predict("m", "boom", k=_K), "no k is right"
    )

  def test_deadline(self):
    request = saved_models.make_request("m", "slow", loops=np.int64(200_000))
    self._assert_code(
      Code.DEADLINE_EXCEEDED, lambda: self.server.prediction.Predict(request, timeout=0.001)
    )

  def test_methods_that_are_not_exported(self):
    stub = self.server.prediction
    spec = model_pb2.ModelSpec(name="m")
    task = inference_pb2.InferenceTask(model_spec=spec, method_name="tensorflow/serving/classify")
    for method, request in (
      (stub.Classify, classification_pb2.ClassificationRequest(model_spec=spec)),
      (stub.Regress, regression_pb2.RegressionRequest(model_spec=spec)),
      (stub.MultiInference, inference_pb2.MultiInferenceRequest(tasks=[task])),
    ):
      self._assert_code(
        Code.UNIMPLEMENTED, lambda method=method, request=request: method(request, timeout=60)
      )

  def test_malformed_messages(self):
    for service, method in (
      ("PredictionService", "Predict"),
      ("PredictionService", "GetModelMetadata"),
      ("ModelService", "GetModelStatus"),
      ("ModelService", "HandleReloadConfigRequest"),
    ):
      call = self.server.channel.unary_unary(f"/tensorflow.serving.{service}/{method}")
      self._assert_code(
        Code.INVALID_ARGUMENT, lambda call=call: call(b"\x0a\xff\xff\xff\xff\x07x", timeout=60)
      )

  def test_hostile_tensors(self):
    def change(function):
      request = saved_models.make_request("m", x=_X, k=_K)
      function(request.inputs["x"])
      self._assert_code(
        Code.INVALID_ARGUMENT, lambda: self.server.prediction.Predict(request, timeout=60), "'x'"
      )

    def set_size(size, keep_content=False):
      def function(tensor):
        tensor.tensor_shape.dim[0].size = size
        if not keep_content:
          tensor.ClearField("tensor_content")
          tensor.float_val.append(1)

      return function

    for size in (1 << 40, 1 << 62, (1 << 63) - 1, -1, -(1 << 63)):
      change(set_size(size))
      change(set_size(size, keep_content=True))
    change(lambda tensor: tensor.tensor_shape.dim.extend([tensor.tensor_shape.dim[0]] * 300))
    change(lambda tensor: setattr(tensor.tensor_shape, "unknown_rank", True))
    change(lambda tensor: setattr(tensor, "tensor_content", b"123"))
    change(lambda tensor: setattr(tensor, "dtype", tf.resource.as_datatype_enum))
    change(lambda tensor: setattr(tensor, "dtype", tf.variant.as_datatype_enum))
    change(lambda tensor: setattr(tensor, "dtype", 0))
    change(lambda tensor: setattr(tensor, "dtype", 9999))

  def test_random_bytes(self):
    rng = random.Random(7)
    good = saved_models.make_request("m", x=_X, k=_K).SerializeToString()
    call = self.server.channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
    codes = set()
    for _ in range(300):
      data = bytearray(good)
      for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] = rng.randrange(256)
      try:
        call(bytes(data[: rng.choice([len(data), rng.randrange(len(data))])]), timeout=60)
      except grpc.RpcError as error:
        codes.add(error.code())
    self.assertLessEqual(codes, {Code.INVALID_ARGUMENT, Code.NOT_FOUND}, codes)
    self.assertIn(Code.INVALID_ARGUMENT, codes)

  def test_compressed_messages(self):
    wanted = self._scale("m")
    call = self.server.channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
    x = np.zeros([100_000, 2], np.float32)
    request = saved_models.make_request("m", "one", x=x)
    for compression in (grpc.Compression.Gzip, grpc.Compression.NoCompression):
      answer = self.server.prediction.Predict(request, timeout=60, compression=compression)
      self.assertEqual(tf.make_ndarray(answer.outputs["y"]).tolist(), x.sum(1).tolist())
    # A message of 64 KiB that becomes one beyond the limit.
    self._assert_code(
      Code.RESOURCE_EXHAUSTED,
      lambda: call(bytes(65 << 20), timeout=60, compression=grpc.Compression.Gzip),
    )
    self.assertEqual(self._scale("m"), wanted)

  def test_oversized_messages(self):
    call = self.server.channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
    self._assert_code(Code.RESOURCE_EXHAUSTED, lambda: call(bytes(65 << 20), timeout=60))

  def test_other_protocols_on_the_ports(self):
    for port in (self.server.port, self.server.rest_port):
      for data in (
        b"\x00" * 100,
        b"GET " + b"/" * 100_000,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nxxxx",
      ):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
          try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
              pass
          except OSError:
            pass  # closed on us, which is an answer too

  # ---- versions ----

  def test_a_new_version_takes_over_without_a_failed_request(self):
    saved_models.write_scale_model(f"{self.folder}/swap", 1, 1.0)
    self._add("swap")
    seen, errors, stop = set(), [], threading.Event()

    def ask():
      while not stop.is_set():
        try:
          seen.add(self._scale("swap"))
        except grpc.RpcError as error:
          errors.append(error)
          return

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
      thread.start()
    try:
      saved_models.write_scale_model(f"{self.folder}/swap", 2, 2.0)
      wait_until(lambda: 2.0 in seen or errors)
      wait_until(lambda: self._states("swap")[1][0] == "END" or errors)
    finally:
      stop.set()
      for thread in threads:
        thread.join()
    self.assertEqual((errors, seen), ([], {1.0, 2.0}))
    self.assertEqual(self._states("swap")[2][0], "AVAILABLE")
    self._assert_code(Code.NOT_FOUND, lambda: self._scale("swap", version=1))

  def test_models_come_and_go_without_a_failed_request(self):
    saved_models.write_scale_model(f"{self.folder}/guest", 1, 4.0)
    answers, errors, stop = [], [], threading.Event()

    def ask():
      while not stop.is_set():
        try:
          answers.append(self._scale("m"))
        except grpc.RpcError as error:
          errors.append(error)
          return

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
      thread.start()
    try:
      for _ in range(3):
        seen = len(answers)
        self._add("guest")
        self.assertEqual(self._scale("guest"), 4.0)
        del self.configs["guest"]
        self._add("m")
        self._assert_code(Code.NOT_FOUND, lambda: self._scale("guest"), "guest")
        wait_until(lambda seen=seen: len(answers) > seen + 5 or errors)
    finally:
      stop.set()
      for thread in threads:
        thread.join()
    self.assertEqual((errors, set(answers)), ([], {2.5}))

  def test_a_reload_waits_for_a_model_that_is_still_unloaded(self):
    saved_models.write_scale_model(f"{self.folder}/busy", 1, 3.0)
    request = saved_models.make_request("busy", "slow", loops=np.int64(100_000))

    def is_back_while_it_answers():
      self._add("busy")
      asked = self.server.prediction.Predict.future(request, timeout=60)
      del self.configs["busy"]
      self._add("m")
      self._add("busy")
      self.assertEqual(self._scale("busy"), 3.0)
      # Else the request came after the model had gone.
      return asked.code() == Code.OK

    wait_until(is_back_while_it_answers)

  def test_a_torn_export_is_refused_and_the_old_version_goes_on(self):
    saved_models.write_scale_model(f"{self.folder}/torn", 1, 1.0)
    self._add("torn")
    torn = f"{self.folder}/torn/2"
    shutil.copytree(f"{self.folder}/torn/1", f"{torn}.tmp")
    graph = f"{torn}.tmp/saved_model.pb"
    size = os.path.getsize(graph)
    os.truncate(graph, size // 2)
    os.rename(f"{torn}.tmp", torn)

    wait_until(lambda: self._states("torn").get(2, ("", None))[0] == "END")

    status = self._states("torn")[2][1]
    self.assertNotEqual(status.error_code, 0)
    self.assertIn(torn, status.error_message)
    wait_until(lambda: torn in self.server.log())
    self.assertEqual(self._scale("torn"), 1.0)
    self._assert_code(Code.FAILED_PRECONDITION, lambda: self._scale("torn", version=2), torn)

    # A version that was copied too slowly is loaded when it is complete.
    shutil.copyfile(f"{self.folder}/torn/1/saved_model.pb", graph.replace(".tmp", ""))
    self.server.wait_until_available("torn", 2)

  def test_foreign_folders_are_refused(self):
    for version, make in enumerate(
      (
        os.makedirs,
        lambda path: (os.makedirs(path), open(f"{path}/saved_model.pb", "wb").close()),
        lambda path: (os.makedirs(path), shutil.copy(__file__, f"{path}/saved_model.pb")),
        lambda path: shutil.copytree(
          self.model_folder, path, ignore=shutil.ignore_patterns("variables.data*")
        ),
      ),
      1,
    ):
      with self.subTest(version):
        name = f"foreign{version}"
        path = f"{self.folder}/{name}/5"
        make(path)
        self._assert_code(Code.FAILED_PRECONDITION, lambda name=name: self._add(name), path)
        self.assertEqual(self._states(name)[5][0], "END")
        self._assert_code(
          Code.FAILED_PRECONDITION, lambda name=name: self._predict(name, x=_X, k=_K), path
        )
        body = {"signature_name": "one", "instances": [[1, 2]]}
        status, answer = self.server.post(f"/v1/models/{name}:predict", body)
        self.assertEqual((status, path in answer["error"]), (412, True), answer)
        del self.configs[name]
        self._add("m")

  def test_versions_are_numbered_folders(self):
    base = f"{self.folder}/numbered"
    whole = saved_models.write_scale_model(base, 1, 1.0)
    for name in ("20", "003", "tmp", "4x", "1" * 20):
      shutil.copytree(whole, f"{base}/{name}")
    open(f"{base}/5", "w").close()

    self._add("numbered", "model_version_policy { all {} }")

    self.assertEqual(sorted(self._states("numbered")), [1, 3, 20])

  def test_policies_and_labels(self):
    base = f"{self.folder}/policy"
    for version in (1, 2, 10):
      saved_models.write_scale_model(base, version, version)
    os.makedirs(f"{base}/temp-11")

    def available():
      try:
        states = self._states("policy")
      except grpc.RpcError as error:
        self.assertEqual(error.code(), Code.NOT_FOUND)
        return set()
      return {version for version, (state, _) in states.items() if state == "AVAILABLE"}

    self._add("policy", "model_version_policy { all {} }", {"old": 1, "new": 10})
    self.assertEqual(available(), {1, 2, 10})
    self.assertEqual([self._scale("policy", label=label) for label in ("old", "new")], [1, 10])
    self.assertEqual(self._scale("policy", version=2), 2)
    self.assertEqual(self._scale("policy"), 10)

    self._add("policy", "model_version_policy { specific { versions: 1 versions: 2 } }")
    wait_until(lambda: available() == {1, 2})
    self.assertEqual(self._scale("policy"), 2)

    self._add("policy", "model_version_policy { latest { num_versions: 2 } }")
    wait_until(lambda: available() == {2, 10})

    # A label must name what answers; the configuration before it goes on.
    self._assert_code(
      Code.FAILED_PRECONDITION,
      lambda: self._add("policy", "model_version_policy { all {} }", {"new": 77}),
      "77",
    )
    del self.configs["policy"]
    self._add("m")
    wait_until(lambda: not available())
    self._assert_code(Code.NOT_FOUND, lambda: self._scale("policy"), "policy")

  def test_a_path_of_a_file_system(self):
    saved_models.write_scale_model(f"{self.folder}/far", 3, 3.0)
    saved_models.write_scale_model(f"{self.folder}/far", 4, 4.0)
    self._config_of("far", "model_version_policy { latest { num_versions: 1 } }")
    self.configs["far"].base_path = f"file://{self.folder}/far"
    self._add("m")
    self.assertEqual((self._scale("far"), list(self._states("far"))), (4.0, [4]))
    saved_models.write_scale_model(f"{self.folder}/far", 5, 5.0)
    wait_until(lambda: self._scale("far") == 5.0)

  def test_warm_up(self):
    base = f"{self.folder}/warm"
    folder = saved_models.write_scale_model(base, 1, 1.0)
    saved_models.write_warmup(folder, saved_models.make_request("warm", "one", x=_X))
    self._add("warm")
    self.assertEqual(self._scale("warm"), 1.0)

    # A model that refuses its own warm-up requests does not take over.
    folder = saved_models.write_scale_model(f"{self.folder}/cold", 2, 2.0)
    saved_models.write_warmup(folder, saved_models.make_request("warm", "one", k=_K))
    os.rename(folder, f"{base}/2")
    wait_until(lambda: self._states("warm").get(2, ("", None))[0] == "END")
    self.assertIn(f"{base}/2/assets.extra", self._states("warm")[2][1].error_message)
    self.assertEqual(self._scale("warm"), 1.0)

  def test_bad_configurations_change_nothing(self):
    for text in (
      "",
      "model_config_list { config { name: 'a' base_path: 'relative' } }",
      "model_config_list { config { name: '' base_path: '/a' } }",
      "model_config_list { config { name: 'a' base_path: '/a' model_platform: 'torch' } }",
      "model_config_list { config { name: 'a' base_path: '/a' } "
      "config { name: 'a' base_path: '/b' } }",
    ):
      config = text_format.Parse(text, model_server_config_pb2.ModelServerConfig())
      self._assert_code(Code.INVALID_ARGUMENT, lambda config=config: self._reload(config))
    self.assertEqual(self._scale("m"), 2.5)

  # ---- HTTP ----

  def test_rest_predict(self):
    path = "/v1/models/m:predict"
    rows = [{"x": [0.5, 1], "k": 9007199254740993}, {"x": [0, 0.1], "k": -2}]
    wanted = [{"y": 3.75, "k2": 18014398509481986}, {"y": 0.25, "k2": -4}]
    for where in (path, "/v1/models/m/versions/1:predict"):
      self.assertEqual(self.server.post(where, {"instances": rows}), (200, {"predictions": wanted}))
    columns = {"x": [[0.5, 1], [0, 0.1]], "k": [1, 2]}
    self.assertEqual(
      self.server.post(path, {"inputs": columns}),
      (200, {"outputs": {"y": [3.75, 0.25], "k2": [2, 4]}}),
    )
    one = {"signature_name": "one", "instances": [[0.5, 1]]}
    self.assertEqual(self.server.post(path, one), (200, {"predictions": [3.75]}))
    text = {"signature_name": "text", "inputs": ["ü", {"b64": "YWJj"}]}
    self.assertEqual(self.server.post(path, text), (200, {"outputs": ["a ü", "a abc"]}))
    echo = {"signature_name": "echo", "instances": [{"b64": "/wA="}, {"s": "abc"}]}
    self.assertEqual(self.server.post(path, echo)[0], 400)
    echo["instances"] = [{"s": {"b64": "/wA="}}, {"s": "abc"}]
    self.assertEqual(
      self.server.post(path, echo), (200, {"predictions": [{"b64": "/wA="}, {"b64": "YWJj"}]})
    )

  def test_rest_floats_read_back_as_the_same_bits(self):
    x = np.random.RandomState(3).randn(100, 2).astype(np.float32)
    wanted = saved_models.run_session(self.model_folder, "one", x=x)["y"]
    body = {"signature_name": "one", "instances": x.tolist()}
    status, answer = self.server.post("/v1/models/m:predict", body)
    self.assertEqual(status, 200)
    self.assertEqual(np.array(answer["predictions"], np.float32).tobytes(), wanted.tobytes())

  def test_rest_errors(self):
    path = "/v1/models/m:predict"
    good = {"x": [0.5, 1], "k": 1}
    for status, where, document in (
      (404, "/v1/models/nobody:predict", {"instances": [good]}),
      (404, "/v1/models/m/versions/9:predict", {"instances": [good]}),
      (404, "/v1/models/m/labels/best:predict", {"instances": [good]}),
      (404, "/elsewhere", {}),
      (400, "/v1/models/m", {}),
      (400, "/v1/models/m/versions/x:predict", {"instances": [good]}),
      (501, "/v1/models/m:classify", {}),
      (501, "/v1/models/m:regress", {}),
      (400, path, b"{"),
      (400, path, b"\xff\xfe"),
      (400, path, b"[" * 100_000),
      (400, path, []),
      (400, path, {}),
      (400, path, {"instances": [], "inputs": []}),
      (400, path, {"instances": []}),
      (400, path, {"instances": [good], "colour": 1}),
      (400, path, {"instances": [good], "signature_name": 3}),
      (400, path, {"instances": [good], "signature_name": "nothing"}),
      (400, path, {"instances": [{"x": [0.5, 1]}]}),
      (400, path, {"instances": [good, {"x": [0.5, 1]}]}),
      (400, path, {"instances": [{**good, "q": 1}]}),
      (400, path, {"instances": [good, {"x": [0.5], "k": 1}]}),
      (400, path, {"instances": [{"x": [0.5, 1, 2], "k": 1}]}),
      (400, path, {"instances": [{"x": [0.5, "1"], "k": 1}]}),
      (400, path, {"instances": [{"x": [0.5, None], "k": 1}]}),
      (400, path, {"instances": [{"x": [0.5, True], "k": 1}]}),
      (400, path, {"instances": [{"x": [0.5, 1], "k": 1.0}]}),
      (400, path, {"instances": [{"x": [0.5, 1], "k": 1 << 63}]}),
      (400, path, {"signature_name": "text", "inputs": [1]}),
      (400, path, {"signature_name": "text", "inputs": [{"b64": "!"}]}),
      (400, path, {"signature_name": "text", "inputs": [3]}),
      (400, path, b'{"signature_name": "text", "inputs": ["\\ud800"]}'),
      (400, path, {"instances": [good], "inputs": {"x": [[1, 2]], "k": [1]}}),
      (400, path, {"inputs": {"x": [[1, 2], [3]], "k": [1, 2]}}),
      (400, path, {"signature_name": "scale", "instances": [[1, 2], [3, 4]]}),
      (400, path, {"signature_name": "boom", "inputs": [1]}),
    ):
      with self.subTest(where=where, document=str(document)[:80]):
        answered, answer = self.server.post(where, document)
        self.assertEqual(answered, status, answer)
        self.assertEqual(list(answer), ["error"])
        self.assertTrue(answer["error"])

  def test_rest_refuses_a_large_body(self):
    try:
      status, _ = self.server.http("/v1/models/m:predict", b" " * (65 << 20))
    except OSError as error:  # It hung up before all of it was sent, or before the answer was read.
      self.assertIsInstance(getattr(error, "reason", error), ConnectionError)
    else:
      self.assertEqual(status, 413)

  def test_rest_status_and_metadata(self):
    status, answer = self.server.get("/v1/models/m")
    self.assertEqual(status, 200)
    self.assertEqual(
      answer["model_version_status"],
      [
        {
          "version": "1",
          "state": "AVAILABLE",
          "status": {"error_code": "OK", "error_message": ""},
        }
      ],
    )
    self.assertEqual(self.server.get("/v1/models/nobody")[0], 404)
    self.assertEqual(self.server.get("/v1/models/m/versions/2")[0], 404)
    status, answer = self.server.get("/v1/models/m/metadata")
    self.assertEqual((status, answer["model_spec"]["version"]), (200, "1"))
    signature = answer["metadata"]["signature_def"]["signature_def"]["serving_default"]
    self.assertEqual(signature["inputs"]["x"]["dtype"], "DT_FLOAT")
    self.assertEqual(signature["inputs"]["x"]["tensor_shape"]["dim"][1]["size"], "2")

  def test_curl(self):
    curl = shutil.which("curl")
    if curl is None:
      self.skipTest("curl is not installed")
    body = '{"signature_name": "one", "instances": [[1, 1]]}'
    url = f"http://127.0.0.1:{self.server.rest_port}/v1/models/m:predict"
    answer = subprocess.check_output([curl, "-sS", "--noproxy", "*", "-d", body, url], text=True)
    self.assertEqual(json.loads(answer), {"predictions": [5.0]})

  def test_metrics(self):
    self._predict("m", x=_X, k=_K)
    self._assert_code(Code.NOT_FOUND, lambda: self._predict("made up", x=_X, k=_K))
    status, body = self.server.http("/monitoring/prometheus/metrics")
    text = body.decode()
    self.assertEqual(status, 200)
    values = {
      (name, *sorted(labels.split(","))): float(value)
      for name, labels, value in re.findall(r"^(\w+)\{(.*)\} (\S+)$", text, re.MULTILINE)
    }
    requests = "monolith_serving_requests_total"
    self.assertGreater(values[requests, 'code="OK"', 'method="Predict"', 'model="m"'], 0)
    self.assertGreater(values[requests, 'code="NOT_FOUND"', 'method="Predict"', 'model=""'], 0)
    state = ("monolith_serving_model_state", 'model="m"', 'state="AVAILABLE"', 'version="1"')
    self.assertEqual(values[state], 1)
    seconds = "monolith_serving_request_seconds_count"
    self.assertGreater(values[seconds, 'method="Predict"', 'model="m"'], 0)
    self._states("m")
    text = self.server.http("/monitoring/prometheus/metrics")[1].decode()
    self.assertIn('method="GetModelStatus",model="m"', text)
    for name in ("cpu_seconds_total", "resident_memory_bytes", "open_fds"):
      (value,) = re.findall(rf"^process_{name} (\S+)$", text, re.MULTILINE)
      self.assertGreater(float(value), 0)
    self.assertNotIn("made up", text)  # or clients could fill the memory with names

  def test_listens_on_loopback_only(self):
    try:
      with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; asks which address would be used
        host = probe.getsockname()[0]
    except OSError:
      self.skipTest("there is no interface but loopback")
    if host.startswith("127."):
      self.skipTest("there is no interface but loopback")
    for port in (self.server.port, self.server.rest_port):
      with self.assertRaises(OSError):
        socket.create_connection((host, port), timeout=5)


if __name__ == "__main__":
  unittest.main()
