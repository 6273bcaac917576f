"""Requests that do not come to their end are given up, on time, over HTTP/1.1 and HTTP/2.

All cases run at the same time, so that the file takes as long as the longest deadline, a minute.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import tempfile
import time
import unittest
from collections.abc import Iterator
from concurrent import futures

import numpy as np
import pytest
import tensorflow as tf

from tests.serving import saved_models, server_process

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()

# As docs/native_server.md has them, in seconds.
_HEADER, _STALL, _REQUEST = 10, 30, 60
# Between two bytes of a client that drips.
_PAUSE = 2
_X = np.array([[0.5, 0.25]], np.float32)
_BODY = json.dumps({"instances": _X.tolist()}).encode()
_REQUEST_BYTES = saved_models.make_request("m", x=_X).SerializeToString()
_MESSAGE = struct.pack(">BI", 0, len(_REQUEST_BYTES)) + _REQUEST_BYTES
_HEAD = b"POST /v1/models/m:predict HTTP/1.1\r\nHost: a\r\n"


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
  return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _fields() -> bytes:
  """Returns the header block of a call."""
  fields = {
    ":method": "POST",
    ":scheme": "http",
    ":path": "/tensorflow.serving.PredictionService/Predict",
    ":authority": "a",
    "te": "trailers",
    "content-type": "application/grpc",
  }
  return b"".join(
    b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    for name, value in fields.items()
  )


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0)
_DATA, _HEADERS, _RESET, _SETTINGS, _PING = 0, 1, 3, 4, 6
_END_STREAM, _END_HEADERS = 1, 4


def _window(size: int) -> bytes:
  """Returns the frame that lets the other side send so much to each stream."""
  return _frame(_SETTINGS, 0, 0, struct.pack(">HI", 4, size))


def _frames(connection: socket.socket) -> Iterator[tuple[int, int, int, bytes]]:
  """Yields kind, flags, stream and payload of what a server sends."""
  data = b""
  while True:
    while len(data) < 9 or len(data) < 9 + int.from_bytes(data[:3], "big"):
      if not (received := connection.recv(65536)):
        return
      data += received
    end = 9 + int.from_bytes(data[:3], "big")
    yield (*struct.unpack(">BBI", data[3:9]), data[9:end])
    data = data[end:]


def _drip(connection: socket.socket, pieces: list[bytes]) -> None:
  """Sends pieces with pauses, until the other side does not take more."""
  with contextlib.suppress(OSError):
    for piece in pieces:
      time.sleep(_PAUSE)
      connection.sendall(piece)


class DeadlinesTest(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    saved_models.write_sum_model(f"{folder}/m/1")
    cls.server = cls.enterClassContext(
      server_process.ServerProcess("--model_name=m", f"--model_base_path={folder}/m")
    ).wait_until_listening()
    cls.server.wait_until_available("m")

  def _connect(self, port: int) -> socket.socket:
    # Twice the longest deadline: a server that keeps a connection is an error.
    return socket.create_connection(("127.0.0.1", port), timeout=2 * _REQUEST)

  def _wait_for_end(self, port: int, sent: bytes, drips: list[bytes]) -> float:
    """Returns after how many seconds a connection is closed."""
    start = time.monotonic()
    with self._connect(port) as connection, futures.ThreadPoolExecutor(1) as pool:
      connection.sendall(sent)
      pool.submit(_drip, connection, drips)
      with contextlib.suppress(ConnectionError):
        while connection.recv(65536):
          pass
      seconds = time.monotonic() - start
      # Ends what drips.
      with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    return seconds

  def _rest(self, sent: bytes, drips: list[bytes]) -> float:
    return self._wait_for_end(self.server.rest_port, sent, drips)

  def _grpc(self, sent: bytes, drips: list[bytes]) -> float:
    return self._wait_for_end(self.server.port, sent, drips)

  def _grpc_stream(self, sent: bytes, drips: list[bytes]) -> float:
    """Returns after how many seconds a call is reset, and checks that its connection goes on."""
    start = time.monotonic()
    with self._connect(self.server.port) as connection, futures.ThreadPoolExecutor(1) as pool:
      connection.sendall(_PREFACE + sent)
      dripping = pool.submit(_drip, connection, drips)
      frames = _frames(connection)
      next(frame for frame in frames if frame[0] == _RESET and frame[2] == 1)
      seconds = time.monotonic() - start
      dripping.result()
      connection.sendall(
        _frame(_HEADERS, _END_HEADERS, 3, _fields()) + _frame(_DATA, _END_STREAM, 3, _MESSAGE)
      )
      next(frame for frame in frames if frame[0] == _DATA and frame[2] == 3)
    return seconds

  def _slow_rest(self) -> bytes:
    """Returns the answer to a request that takes half of the time that it may."""
    body = [_BODY[i : i + 1] for i in range(len(_BODY))][: _REQUEST // 2 // _PAUSE - 1]
    rest = _BODY[len(body) :]
    with self._connect(self.server.rest_port) as connection:
      connection.sendall(_HEAD + b"Content-Length: %d\r\n\r\n" % len(_BODY))
      _drip(connection, [*body, rest])
      return connection.recv(65536)

  def _slow_grpc(self) -> bytes:
    """Returns the answer to a call that takes half of the time that it may."""
    count = _REQUEST // 2 // _PAUSE - 1
    pieces = [_frame(_DATA, 0, 1, _MESSAGE[i : i + 1]) for i in range(count)]
    with self._connect(self.server.port) as connection:
      connection.sendall(_PREFACE + _frame(_HEADERS, _END_HEADERS, 1, _fields()))
      _drip(connection, [*pieces, _frame(_DATA, _END_STREAM, 1, _MESSAGE[count:])])
      return next(payload for kind, _, _, payload in _frames(connection) if kind == _DATA)

  def test_unfinished_requests_are_given_up_and_slow_ones_answered(self):
    call = _frame(_HEADERS, _END_HEADERS, 1, _fields())
    post = _HEAD + b"Content-Length: 1000\r\n\r\n"
    drips = _REQUEST // _PAUSE + 5
    # name -> how it ends, what is sent at once, what is sent then with pauses, how long that goes.
    cases = {
      "HTTP/1.1, header stops": (self._rest, _HEAD, [], _HEADER),
      "HTTP/1.1, header drips": (self._rest, _HEAD, [b"a"] * drips, _HEADER),
      "HTTP/1.1, body stops": (self._rest, post + b"{", [], _STALL),
      "HTTP/1.1, body drips": (self._rest, post, [b" "] * drips, _REQUEST),
      "HTTP/2, preface stops": (self._grpc, _PREFACE[:10], [], _HEADER),
      "HTTP/2, settings do not come": (self._grpc, _PREFACE[:24], [], _HEADER),
      "HTTP/2, header stops": (
        self._grpc,
        _PREFACE + _frame(_HEADERS, 0, 1, _fields()[:20]),
        [],
        _HEADER,
      ),
      "HTTP/2, body stops": (
        self._grpc_stream,
        call + _frame(_DATA, 0, 1, _MESSAGE[:9]),
        [],
        _STALL,
      ),
      "HTTP/2, body drips": (
        self._grpc_stream,
        call + _frame(_DATA, 0, 1, struct.pack(">BI", 0, 1000)),
        [_frame(_DATA, 0, 1, b"a")] * drips,
        _REQUEST,
      ),
      # The connection is busy all the time, but not with the answer.
      "HTTP/2, answer is not read": (
        self._grpc_stream,
        _window(0) + call + _frame(_DATA, _END_STREAM, 1, _MESSAGE),
        [_frame(_PING, 0, 0, bytes(8))] * drips + [_window(65535)],
        2 * _STALL,
      ),
    }
    with futures.ThreadPoolExecutor(len(cases) + 2) as pool:
      slow_rest, slow_grpc = pool.submit(self._slow_rest), pool.submit(self._slow_grpc)
      waits = {name: pool.submit(case[0], *case[1:3]) for name, case in cases.items()}
      for name, (_, _, _, seconds) in cases.items():
        with self.subTest(name):
          # Not before; one that does not end at all is an error of the socket.
          self.assertGreaterEqual(waits[name].result(), seconds)
    self.assertIn(b"0.75", slow_rest.result())
    self.assertIn(np.float32(0.75).tobytes(), slow_grpc.result())
    self.server.check_alive()


if __name__ == "__main__":
  unittest.main()
