import contextlib
import random
import socket as real_socket
import threading
import time
import unittest
from unittest import mock

from monolith.native_training import net_utils
from tests.free_ports import get_free_port

_FAILED_TIME = 0
_DEAD_SET = set()
_LOCK = threading.Lock()
# Keeps the specified behaviour, `connect` takes up to twice the timeout, but fast.
_TIMEOUT = 0.05


class FakeSocket:
  """Stands in for `socket.socket` and has nothing but what the checker may use."""

  def __init__(self, family, kind):
    self._timeout = None

  def settimeout(self, timeout):
    self._timeout = timeout

  def connect(self, addr):
    global _FAILED_TIME
    seconds = random.uniform(0, 2 * self._timeout)
    time.sleep(seconds)
    if seconds > self._timeout:
      ip, port = addr
      with _LOCK:
        _FAILED_TIME += 1
        _DEAD_SET.add(f"{ip}:{port}")
      raise real_socket.timeout("timed out")

  def close(self):
    pass


def _listen(family, host):
  server = real_socket.socket(family, real_socket.SOCK_STREAM)
  server.bind((host, 0))
  server.listen()
  return server, server.getsockname()[1]


class PublicAddressTest(unittest.TestCase):
  def test_private_addresses_are_not_public(self):
    for addr in (
      "127.0.0.1:80", "10.1.2.3:80", "192.168.0.1:0", "172.16.9.9:5", "169.254.1.1:2", "[::1]:80",
      "[fe80::1]:80", "[fd00::1]:80", "localhost:80", "100.64.0.1:80", "nothing.invalid:80", "",
    ):  # fmt: skip
      self.assertFalse(net_utils.is_public_address(addr), addr)

  def test_other_addresses_are_public(self):
    for addr in ("8.8.8.8:80", "[2001:4860:4860::8888]:80", "8.8.8.8"):
      self.assertTrue(net_utils.is_public_address(addr), addr)

  def test_all_interfaces_are_those_of_the_host(self):
    for addr in ("0.0.0.0:80", "[::]:80"):
      for ip, public in (("8.8.8.8", True), ("10.0.0.1", False)):
        with mock.patch.object(net_utils, "get_local_ip", return_value=ip):
          self.assertEqual(net_utils.is_public_address(addr), public)

  def test_warns_once_and_only_of_public_addresses(self):
    with mock.patch.object(net_utils, "_warned_of_public_address", False):
      with (
        self.assertNoLogs("absl", "WARNING")
        if hasattr(self, "assertNoLogs")
        else (contextlib.nullcontext())
      ):
        net_utils.warn_if_public("127.0.0.1:80", "ps 0")
      with self.assertLogs("absl", "WARNING") as logs:
        net_utils.warn_if_public("8.8.8.8:80", "ps 0")
        net_utils.warn_if_public("8.8.8.8:81", "ps 1")
    self.assertEqual(len(logs.output), 1)
    self.assertIn("ps 0 listens on 8.8.8.8:80", logs.output[0])
    self.assertIn("docs/security.md", logs.output[0])


class NetUtilsTest(unittest.TestCase):
  def test_basic(self):
    addrs = {f"localhost:{port}" for port in range(1001, 1006)}

    with mock.patch("monolith.native_training.net_utils.socket.socket", FakeSocket):
      checker = net_utils.NodeAliveChecker(list(addrs), timeout=_TIMEOUT)

    self.assertSetEqual(set(checker.get_addrs()), addrs)
    self.assertEqual(len(checker.get_alive_nodes()), 5 - _FAILED_TIME)
    self.assertEqual(len(checker.get_dead_nodes()), _FAILED_TIME)
    self.assertSetEqual(set(checker.get_alive_nodes()), addrs - _DEAD_SET)
    self.assertSetEqual(set(checker.get_dead_nodes()), _DEAD_SET)
    self.assertEqual(checker.all_nodes_alive(), _FAILED_TIME == 0)

  def test_concat_ip_and_port(self):
    self.assertEqual(net_utils.concat_ip_and_port("10.0.0.1", 10), "10.0.0.1:10")
    self.assertEqual(net_utils.concat_ip_and_port("localhost", 10), "localhost:10")
    self.assertEqual(net_utils.concat_ip_and_port("::1", 10), "[::1]:10")
    self.assertEqual(net_utils.concat_ip_and_port("[::1]", 10), "[::1]:10")

  def test_get_local_server_addr(self):
    self.assertIsNotNone(net_utils.get_local_server_addr(10))

  def test_real_sockets(self):
    server, port = _listen(real_socket.AF_INET, "127.0.0.1")
    closed_port = get_free_port()

    with server:
      checker = net_utils.NodeAliveChecker([f"127.0.0.1:{port}", f"127.0.0.1:{closed_port}"])

    self.assertEqual(checker.get_alive_nodes(), [f"127.0.0.1:{port}"])
    self.assertEqual(checker.get_dead_nodes(), [f"127.0.0.1:{closed_port}"])
    self.assertFalse(checker.all_nodes_alive())

  def test_real_ipv6_with_brackets(self):
    try:
      server, port = _listen(real_socket.AF_INET6, "::1")
    except OSError as e:
      self.skipTest(f"needs IPv6 on loopback: {e}")

    with server:
      checker = net_utils.NodeAliveChecker([f"[::1]:{port}"])

    self.assertEqual(checker.get_alive_nodes(), [f"[::1]:{port}"])

  def test_unusable_addresses_are_dead(self):
    addrs = ["no_port", "host.invalid:80", "127.0.0.1:70000", "127.0.0.1:-1", "127.0.0.1:x", ""]

    checker = net_utils.NodeAliveChecker(addrs, timeout=5)

    self.assertSetEqual(set(checker.get_dead_nodes()), set(addrs))

  def test_one_attempt_for_each_address(self):
    attempts = []

    class CountingSocket(FakeSocket):
      def connect(self, addr):
        with _LOCK:
          attempts.append(addr)
        raise ConnectionRefusedError

    addrs = [f"10.0.0.{i}:1" for i in range(50)]
    with mock.patch("monolith.native_training.net_utils.socket.socket", CountingSocket):
      net_utils.NodeAliveChecker(addrs, num_thread=7)

    self.assertCountEqual(attempts, [(f"10.0.0.{i}", 1) for i in range(50)])

  def test_no_addresses(self):
    checker = net_utils.NodeAliveChecker([])

    self.assertTrue(checker.all_nodes_alive())
    self.assertEqual(checker.get_addrs(), [])

  def test_no_thread_is_an_error(self):
    with self.assertRaisesRegex(ValueError, "num_thread is 0"):
      net_utils.NodeAliveChecker(["a:1"], num_thread=0)

  def test_is_ipv6_address(self):
    self.assertTrue(net_utils.is_ipv6_address("2001:db8::1"))
    for ip in ("[::1]", "127.0.0.1", "localhost", "", "::g"):
      self.assertFalse(net_utils.is_ipv6_address(ip), ip)

  def test_local_ip_falls_back_to_loopback(self):
    families = []

    def fail(*args, family=0, **kwargs):
      families.append(family)
      raise real_socket.gaierror

    with mock.patch("monolith.native_training.net_utils.socket.getaddrinfo", fail):
      self.assertEqual(net_utils.get_local_ip(), "127.0.0.1")
      self.assertTrue(net_utils.is_ipv4_supported())
    self.assertEqual(families[:2], [0, real_socket.AF_INET6])

  def test_split_host_and_port(self):
    self.assertEqual(net_utils.split_host_and_port("h:1"), ("h", 1))
    self.assertEqual(net_utils.split_host_and_port("[::1]:65535"), ("::1", 65535))
    for addr in ("", "h", "h:", ":1", "h:x", "h:65536", "h:-1", "::1:80", "[h]:1", "[::1]"):
      with self.assertRaises(ValueError) as context:
        net_utils.split_host_and_port(addr)
      self.assertIn(repr(addr), str(context.exception))

  def test_address_family(self):
    self.assertEqual(net_utils.AddressFamily.IPV4, "ipv4")
    self.assertEqual(net_utils.AddressFamily.IPV6, "ipv6")


if __name__ == "__main__":
  unittest.main()
