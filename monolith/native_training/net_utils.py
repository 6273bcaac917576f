"""Network helpers: address formatting and parsing, the local IP, and liveness checks.

Importing the module opens no socket and starts no thread.
"""

import ipaddress
import queue
import socket
import threading

from absl import logging

_LOOPBACK_IP = "127.0.0.1"
_MAX_PORT = 65535

_warned_of_public_address = False


class AddressFamily:
  """Names of the two address families."""

  IPV4 = "ipv4"
  IPV6 = "ipv6"


class NodeAliveChecker:
  """Tries once to connect to each address; construction returns when all answers are in.

  Args:
    addrs: `host:port` or `[ipv6]:port` strings. One that cannot be parsed counts as dead.
    timeout: seconds for each connection attempt.
    num_thread: how many addresses are tried at the same time, at least 1.

  Raises:
    ValueError: if `num_thread` is below 1, for then nothing would ever be checked.
  """

  def __init__(self, addrs: list[str], timeout: float = 1, num_thread: int = 10):
    if num_thread < 1:
      raise ValueError(f"num_thread is {num_thread}, want at least 1")
    self._addrs = addrs
    self._timeout = timeout
    self._num_thread = num_thread
    self._lock = threading.Lock()
    self._alive = set()
    self._dead = set()
    self._q = queue.Queue()
    for addr in addrs:
      self._q.put(addr)
    self._start()

  def _ping(self, addr: str) -> None:
    connection = None
    try:
      ip, port = addr.rsplit(":", 1)
      ip = ip.strip("[]")
      family = socket.AF_INET6 if is_ipv6_address(ip) else socket.AF_INET
      connection = socket.socket(family, socket.SOCK_STREAM)
      connection.settimeout(self._timeout)
      connection.connect((ip, int(port)))
      with self._lock:
        self._alive.add(addr)
    # Whatever goes wrong (refused, unresolvable, unparsable), the node cannot be used.
    except Exception as err:
      print(f"cannot connect to {addr}, because {err}")
      with self._lock:
        self._dead.add(addr)
    finally:
      if connection is not None:
        connection.close()

  def _check_open(self) -> None:
    while True:
      try:
        addr = self._q.get_nowait()
      except queue.Empty:
        return
      self._ping(addr)

  def _start(self) -> None:
    threads = [
      threading.Thread(target=self._check_open, daemon=True)
      for _ in range(min(self._num_thread, self._q.qsize()))
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()

  def all_nodes_alive(self) -> bool:
    return not self._dead

  def get_dead_nodes(self) -> list[str]:
    """Returns the addresses that did not answer, in no particular order."""
    return list(self._dead)

  def get_alive_nodes(self) -> list[str]:
    """Returns the addresses that answered, in no particular order."""
    return list(self._alive)

  def get_addrs(self) -> list[str]:
    return self._addrs


def is_ipv6_address(ip: str) -> bool:
  """Tells whether `ip` is an IPv6 literal without brackets; host names are not."""
  try:
    return ipaddress.ip_address(ip).version == 6
  except ValueError:
    return False


def concat_ip_and_port(ip: str, port: int) -> str:
  """Joins host and port, with brackets around an IPv6 literal."""
  if is_ipv6_address(ip):
    return f"[{ip}]:{port}"
  return f"{ip}:{port}"


def check_port_number(port: object, name: str = "port") -> int:
  """Converts a port given as int or text.

  Args:
    port: the value, an int or its decimal text.
    name: what the value is called, for the error message.

  Returns:
    The port, between 0 (let the system choose) and 65535.

  Raises:
    ValueError: if it is not such a number.
  """
  try:
    number = int(port)
  except (TypeError, ValueError):
    raise ValueError(f"{name} is {port!r}, want a port number") from None
  if not 0 <= number <= _MAX_PORT:
    raise ValueError(f"{name} is {number}, want a port between 0 and {_MAX_PORT}")
  return number


def split_host_and_port(addr: str) -> tuple[str, int]:
  """Splits `host:port` or `[ipv6]:port`; the opposite of `concat_ip_and_port`.

  Returns:
    The host without brackets, and the port.

  Raises:
    ValueError: if there is no host, no port or a port out of range, or if an IPv6 literal has
      no brackets, so that its last group and the port cannot be told apart.
  """
  host, colon, port = addr.rpartition(":")
  if not colon or not host or not port:
    raise ValueError(f"address {addr!r} is not host:port")
  if host.startswith("[") and host.endswith("]"):
    host = host[1:-1]
    if not is_ipv6_address(host):
      raise ValueError(f"address {addr!r} has no IPv6 address between its brackets")
  elif ":" in host:
    raise ValueError(f"address {addr!r} is ambiguous, write an IPv6 address as [ip]:port")
  return host, check_port_number(port, f"port of address {addr!r}")


def get_local_ip() -> str:
  """Returns the address of this host's name, or loopback where the name cannot be resolved."""
  for family in (0, socket.AF_INET6):
    try:
      return socket.getaddrinfo(socket.gethostname(), None, family=family)[0][4][0]
    except socket.gaierror:
      continue
  return _LOOPBACK_IP


def is_public_address(addr: str) -> bool:
  """Tells whether strangers may reach `addr`, a `host:port` or a host.

  Returns:
    False for loopback, link-local and private addresses. A name counts as what it resolves to, one
    that does not resolve as not public; the address that means all interfaces as this host's.
  """
  try:
    host = split_host_and_port(addr)[0]
  except ValueError:
    host = addr.strip("[]")
  try:
    found = {ipaddress.ip_address(host)}
  except ValueError:
    try:
      infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
      return False
    found = {ipaddress.ip_address(info[4][0].partition("%")[0]) for info in infos}
  if any(ip.is_unspecified for ip in found):
    found = {ipaddress.ip_address(get_local_ip().partition("%")[0])}
  return any(ip.is_global for ip in found)


def warn_if_public(addr: str, what: str) -> None:
  """Logs, once per process, that `what` listens on `addr` where strangers may reach it."""
  global _warned_of_public_address
  if _warned_of_public_address or not is_public_address(addr):
    return
  _warned_of_public_address = True
  logging.warning(
    "%s listens on %s, which is not a private address: anyone who reaches the port can run any "
    "TensorFlow op here, file writing included. Close it with a firewall or use a private "
    "network: docs/security.md says how.",
    what,
    addr,
  )


def is_ipv4_supported() -> bool:
  return not is_ipv6_address(get_local_ip())


def get_local_server_addr(port: int) -> str:
  """Returns `<local ip>:<port>`; on an IPv4 host that of `gethostbyname(gethostname())`."""
  return concat_ip_and_port(get_local_ip(), port)
