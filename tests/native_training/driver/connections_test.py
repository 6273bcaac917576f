"""Limits of TCP connections; `tests/reliability/hosts_test.py` loses an answer without them."""

import contextlib
import errno
import os
import socket
import threading
import unittest
from unittest import mock

from monolith.native_training.driver import connections
from tests.wait_until import wait_until


def _limits(connection: socket.socket) -> "tuple[int, int]":
  return (
    connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
    connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
  )


_LIMITED = (1, 1000 * connections.LIMIT_SECS)


@unittest.skipUnless(os.path.isdir("/proc/self/fd"), "needs Linux")
class ConnectionsTest(unittest.TestCase):
  def setUp(self):
    self.stack = contextlib.ExitStack()
    self.addCleanup(self.stack.close)
    self.server = self.stack.enter_context(socket.create_server(("127.0.0.1", 0)))

  def _connect(self) -> "tuple[socket.socket, socket.socket]":
    client = self.stack.enter_context(socket.create_connection(self.server.getsockname()))
    return client, self.stack.enter_context(self.server.accept()[0])

  def test_both_ends_get_limits_once(self):
    ends = self._connect()
    self.assertEqual(_limits(ends[0]), (0, 0))
    known = connections.limit_connections(set())

    for end in ends:
      self.assertEqual(_limits(end), _LIMITED)
      end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)
    later = self._connect()
    found = connections.limit_connections(known)

    self.assertEqual(_limits(ends[0])[0], 0)
    self.assertEqual(_limits(later[1]), _LIMITED)
    self.assertEqual(len(found - known), 2)
    later[0].sendall(b"still there")
    self.assertEqual(later[1].recv(11), b"still there")

  def test_other_sockets_stay_as_they_are(self):
    datagrams = self.stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    pair = [self.stack.enter_context(end) for end in socket.socketpair()]
    connections.limit_connections(set())

    for other in (datagrams, *pair):
      self.assertEqual(other.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), 0)

  def test_limits_that_somebody_has_chosen_stay(self):
    client, _ = self._connect()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 7)
    connections.limit_connections(set())

    self.assertEqual(_limits(client), (1, 0))
    self.assertEqual(client.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE), 7)

  def test_connections_are_found_while_they_are_watched(self):
    with connections.watched():
      self.assertIn("connections", [thread.name for thread in threading.enumerate()])
      client, _ = self._connect()
      wait_until(lambda: _limits(client) == _LIMITED)
      self.assertTrue(client.getblocking())

    self.assertNotIn("connections", [thread.name for thread in threading.enumerate()])

  def test_a_process_without_free_file_numbers_is_watched_on(self):
    full = OSError(errno.EMFILE, "full")
    with (
      mock.patch.object(connections, "_LOOK_SECS", 0.01),
      mock.patch.object(connections.os, "listdir", side_effect=full) as listdir,
      connections.watched(),
    ):
      wait_until(lambda: listdir.call_count > 1)


if __name__ == "__main__":
  unittest.main()
