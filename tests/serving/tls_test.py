"""TLS of a model server (`--ssl_config_file`)."""

from __future__ import annotations

import ctypes
import json
import pathlib
import shutil
import socket
import ssl
import tempfile
import unittest

import grpc
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import prediction_service_pb2_grpc

from tests.serving import certificates, saved_models, server_process
from tests.wait_until import wait_until

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()

_X = np.ones([1, 2], np.float32)


@unittest.skipUnless(shutil.which("openssl"), "openssl is not installed")
class TlsTest(unittest.TestCase):
  """One server that takes every client, and one that takes those of an authority."""

  @classmethod
  def setUpClass(cls):
    cls.folder = tempfile.mkdtemp()
    cls.addClassCleanup(shutil.rmtree, cls.folder)
    cls.texts = certificates.write(cls.folder)
    saved_models.write_scale_model(f"{cls.folder}/m", 1, 1.0)
    own = {"server_key": cls.texts["server.key"], "server_cert": cls.texts["server.crt"]}
    cls.open = cls._start("open", own)
    mutual = {**own, "custom_ca": cls.texts["ca.crt"], "client_verify": True}
    cls.mutual = cls._start("mutual", mutual)
    for server in (cls.open, cls.mutual):
      cls.addClassCleanup(server.stop)
    for server in (cls.open, cls.mutual):
      wait_until(lambda server=server: cls._is_up(server))
      server.wait_until_available("m")

  @classmethod
  def _write(cls, name, config):
    path = pathlib.Path(cls.folder, name)
    path.write_text("\n".join(f"{key}: {json.dumps(value)}" for key, value in config.items()))
    return path

  @classmethod
  def _start(cls, name, config):
    return server_process.ServerProcess(
      "--model_name=m",
      f"--model_base_path={cls.folder}/m",
      f"--ssl_config_file={cls._write(name, config)}",
    )

  @classmethod
  def _is_up(cls, server):
    server.check_alive()
    try:
      return server.http("/monitoring/prometheus/metrics")[0] == 200
    except OSError:
      return False

  def tearDown(self):
    for server in (self.open, self.mutual):
      server.check_alive()

  def _ask(self, server, x=_X, authority="ca", client=None):
    """Returns the answer to a client that believes an authority and may have a certificate."""
    own = (None, None)
    if client is not None:
      own = (self.texts[f"{client}.key"].encode(), self.texts[f"{client}.crt"].encode())
    credentials = grpc.ssl_channel_credentials(self.texts[f"{authority}.crt"].encode(), *own)
    options = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", -1)]
    with grpc.secure_channel(f"localhost:{server.port}", credentials, options) as channel:
      stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
      request = saved_models.make_request("m", "one", x=x)
      return tf.make_ndarray(stub.Predict(request, timeout=60).outputs["y"])

  def _assert_refused(self, ask, *arguments, **options):
    with self.assertRaises(grpc.RpcError) as caught:
      ask(*arguments, **options)
    self.assertEqual(caught.exception.code(), grpc.StatusCode.UNAVAILABLE)

  def test_answers(self):
    self.assertEqual(self._ask(self.open).tolist(), [2.0])
    # Many records of TLS, both ways.
    x = np.random.RandomState(1).randn(300_000, 2).astype(np.float32)
    np.testing.assert_array_equal(self._ask(self.open, x), x.sum(1))
    self.assertEqual(self._ask(self.mutual, client="client").tolist(), [2.0])

  def test_who_is_not_known_is_refused(self):
    self._assert_refused(self._ask, self.open, authority="other")  # by the client
    self._assert_refused(self._ask, self.mutual)
    self._assert_refused(self._ask, self.mutual, client="stranger")

  def test_nothing_is_answered_in_the_clear(self):
    for server in (self.open, self.mutual):
      request = saved_models.make_request("m", "one", x=_X)
      self._assert_refused(server.prediction.Predict, request, timeout=60)

  def test_protocols(self):
    def connect(**settings):
      context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
      context.load_verify_locations(cadata=self.texts["ca.crt"])
      context.set_alpn_protocols(settings.pop("alpn", ["h2"]))
      for name, value in settings.items():
        setattr(context, name, value)
      with socket.create_connection(("localhost", self.open.port), timeout=60) as connection:
        with context.wrap_socket(connection, server_hostname="localhost") as secure:
          return secure.selected_alpn_protocol(), secure.version()

    self.assertEqual(connect(), ("h2", "TLSv1.3"))
    self.assertEqual(connect(alpn=["http/1.1", "h2"])[0], "h2")
    self.assertEqual(connect(maximum_version=ssl.TLSVersion.TLSv1_2), ("h2", "TLSv1.2"))

  def test_other_bytes_on_the_port(self):
    for data in (
      b"\x00" * 100,
      b"\x16\x03\x01\xff\xff" + b"\x01" * 70_000,
      b"\x15\x03\x03\0\2\2\0",
    ):
      with socket.create_connection(("localhost", self.open.port), timeout=60) as connection:
        try:
          connection.sendall(data)
          connection.shutdown(socket.SHUT_WR)
          while connection.recv(65536):
            pass
        except OSError:
          pass  # closed on us, which is an answer too
    self.assertEqual(self._ask(self.open).tolist(), [2.0])

  def test_requests_for_new_keys_whose_answers_are_not_read(self):
    try:
      library = ctypes.CDLL("libssl.so.3")
    except OSError:
      self.skipTest("Python's own module asks for no new keys, and OpenSSL 3 is not there")
    pointer = ctypes.c_void_p
    for name, result, *arguments in (
      ("TLS_client_method", pointer),
      ("SSL_CTX_new", pointer, pointer),
      ("SSL_CTX_free", None, pointer),
      ("SSL_new", pointer, pointer),
      ("SSL_free", None, pointer),
      ("SSL_set_alpn_protos", ctypes.c_int, pointer, ctypes.c_char_p, ctypes.c_uint),
      ("SSL_set_fd", ctypes.c_int, pointer, ctypes.c_int),
      ("SSL_connect", ctypes.c_int, pointer),
      ("SSL_write", ctypes.c_int, pointer, ctypes.c_char_p, ctypes.c_int),
      ("SSL_key_update", ctypes.c_int, pointer, ctypes.c_int),
      ("SSL_do_handshake", ctypes.c_int, pointer),
    ):
      getattr(library, name).restype = result
      getattr(library, name).argtypes = arguments
    context = library.SSL_CTX_new(library.TLS_client_method())
    self.addCleanup(library.SSL_CTX_free, context)
    secure = library.SSL_new(context)
    self.addCleanup(library.SSL_free, secure)
    with socket.socket() as connection:
      # So little room that the answers stay where they are made.
      connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
      connection.connect(("127.0.0.1", self.open.port))
      library.SSL_set_fd(secure, connection.fileno())
      library.SSL_set_alpn_protos(secure, b"\x02h2", 3)
      self.assertEqual(library.SSL_connect(secure), 1)
      preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
      self.assertEqual(library.SSL_write(secure, preface, len(preface)), len(preface))
      # Each is SSL_KEY_UPDATE_REQUESTED, which takes 27 bytes, as its answer does.
      count = 300_000
      for _ in range(count):
        if library.SSL_key_update(secure, 1) != 1 or library.SSL_do_handshake(secure) != 1:
          break
      received = 0
      connection.settimeout(5)
      try:
        while answers := connection.recv(1 << 20):
          received += len(answers)
      except OSError:
        pass
    # Not more than the system's buffer has beside the server's.
    self.assertLess(received, 27 * count * 3 // 4)
    self.assertEqual(self._ask(self.open).tolist(), [2.0])

  def test_files_that_cannot_be_used_are_named(self):
    own = {"server_key": self.texts["server.key"], "server_cert": self.texts["server.crt"]}
    for name, config, word in (
      ("no_key", {"server_cert": own["server_cert"]}, "server_key"),
      ("no_certificate", {"server_key": own["server_key"]}, "server_cert"),
      ("nobody", {**own, "client_verify": True}, "custom_ca"),
      ("unknown", {**own, "colour": "red"}, "colour"),
    ):
      with self.subTest(name):
        path = self._write(name, config)
        status, text = server_process.run(
          f"--model_base_path={self.folder}/m", f"--ssl_config_file={path}"
        )
        self.assertEqual(status, 1, text)
        self.assertIn(str(path), text)
        self.assertIn(word, text)


if __name__ == "__main__":
  unittest.main()
