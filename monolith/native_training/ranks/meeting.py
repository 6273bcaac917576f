"""How ranks find one another where no library does it for them.

`TF_CONFIG` names all addresses. Otherwise ranks meet at `MASTER_ADDR` and `MASTER_PORT`, as
PyTorch's launchers and operators set them: rank 0 listens there, unless what started the ranks
already does, as `ranks.local` and `torchrun`.
"""

from __future__ import annotations

import errno
import importlib
import ipaddress
import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from monolith.native_training.settings import rank_environment

# How long ranks wait for the last one to come.
MEET_SECS = 120.0

_RETRY_SECS = 0.2
_HELLO_SECS = 10.0
# An address on the machine of rank 0, by whatever name a rank knows that machine.
_WITH_MASTER = ""


class MeetingError(RuntimeError):
  """Not all ranks came."""


class Meeting(Protocol):
  """Holds what all ranks say to one another before they start."""

  def gather(self, text: str) -> list[str]:
    """Returns the texts of all ranks, in their order. All call it equally often."""


def serve(listener: socket.socket, size: int, timeout: float = MEET_SECS) -> None:
  """Passes texts between ranks until one leaves; closes the listener when all are there.

  Args:
    listener: a socket that listens.
    size: how many ranks there are.
    timeout: how long they may take to come.
  """
  peers: dict[int, _Lines] = {}
  deadline = time.monotonic() + timeout
  with listener:
    while len(peers) < size:
      listener.settimeout(max(0.01, deadline - time.monotonic()))
      try:
        connection, _ = listener.accept()
      except OSError:
        missing = sorted(set(range(size)) - set(peers))
        _answer(peers, error=f"ranks {missing} of {size} did not come within {timeout:.0f} s")
        break
      _welcome(_Lines(connection), size, peers)
  while len(peers) == size:
    texts = [peers[rank].read(None) for rank in range(size)]
    if None in texts:
      break
    _answer(peers, texts=texts)
  for peer in peers.values():
    peer.close()


def join(
  host: str, port: int, rank: int, size: int, timeout: float = MEET_SECS
) -> tuple[Meeting, str]:
  """Comes to the meeting, and as rank 0 holds it unless somebody does.

  Returns:
    The meeting, and the address under which other machines see this one: empty if it is that of
    the meeting.

  Raises:
    MeetingError: there is no meeting, or not all come to it; or rank 0 may not listen there.
  """
  refusal: OSError | None = None
  if rank == 0:
    try:
      threading.Thread(
        target=serve, args=(_listen(port), size, timeout), name="rank_meeting", daemon=True
      ).start()
    except OSError as error:
      if error.errno != errno.EADDRINUSE:
        refusal = error
  try:
    # Who started the ranks may hold the meeting where this process may not, and does so already.
    connection = _connect(host, port, timeout if refusal is None else 0)
  except MeetingError:
    if refusal is None:
      raise
    raise MeetingError(f"Rank 0 cannot listen at port {port} (MASTER_PORT): {refusal}") from refusal
  own, theirs = connection.getsockname()[0], connection.getpeername()[0]
  # The master's own name is often one of loopback there: it means nothing to other machines.
  is_with_master = own == theirs or ipaddress.ip_address(_plain(own)).is_loopback
  address = _WITH_MASTER if is_with_master else _plain(own)
  if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
    connection.close()
    return _TorchMeeting(host, port, rank, size, timeout), address
  # Rank 0 tells the others who is missing, which takes it as long as they may wait.
  meeting = _TcpMeeting(_Lines(connection), f"{host}:{port}", timeout + _HELLO_SECS)
  meeting.say_hello(rank, size)
  return meeting, address


def start_servers(
  meeting: Meeting,
  address: str,
  host: str,
  rank: int,
  start: Callable[[list[str]], Any],
) -> tuple[list[str], Any]:
  """Starts a server in every rank, on ports that are free.

  Args:
    meeting: of the ranks.
    address: of this rank, empty for `host`.
    host: the machine of the meeting, as this rank calls it.
    rank: of this process.
    start: starts this rank's server, given the addresses of all of them.

  Returns:
    The addresses by rank, and what `start` returned.

  Raises:
    MeetingError: the ports of some rank were taken again and again.
  """
  errors: list[str] = []
  for _ in range(5):
    said = meeting.gather(json.dumps([address, _free_port()]))
    places = [json.loads(text) for text in said]
    addresses = [_join_address(name or host, port) for name, port in places]
    server, error = None, ""
    try:
      server = start(addresses)
    except Exception as e:  # Whatever it is, the other ranks have to know.
      error = f"rank {rank}: {e}"
    # Somebody else may have taken a port meanwhile: then all try others.
    errors = [error for error in meeting.gather(error) if error]
    if not errors:
      return addresses, server
  raise MeetingError(f"The servers of the ranks could not be started: {'; '.join(errors)}")


def wait_for_servers(addresses: Sequence[str], timeout: float = MEET_SECS) -> None:
  """Waits until all of these servers accept connections.

  Raises:
    MeetingError: some do not.
  """
  deadline = time.monotonic() + timeout
  missing = dict(enumerate(addresses))
  while missing:
    for rank, address in list(missing.items()):
      host, port = address.rsplit(":", 1)
      try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        del missing[rank]
      except OSError:
        pass
    if missing and time.monotonic() > deadline:
      raise MeetingError(
        f"Ranks {sorted(missing)} did not come within {timeout:.0f} s: nothing listens at "
        f"{', '.join(missing.values())}, which {rank_environment.TF_CONFIG} names"
      )
    if missing:
      time.sleep(_RETRY_SECS)


class _Lines:
  """A connection that carries lines of JSON."""

  def __init__(self, connection: socket.socket):
    self._connection = connection
    self._file = connection.makefile("rb")

  def read(self, timeout: float | None) -> Any:
    """Returns what came, `None` if that is nothing of ours."""
    self._connection.settimeout(timeout)
    try:
      line = self._file.readline(1 << 20)
      return json.loads(line) if line.endswith(b"\n") else None
    except (OSError, ValueError):
      return None

  def is_gone(self) -> bool:
    """Tells whether the other side has closed the connection, also behind what was not read yet."""
    poll = select.poll()
    poll.register(self._connection, getattr(select, "POLLRDHUP", 0))
    return bool(poll.poll(0))

  def write(self, value: Any) -> None:
    try:
      self._connection.sendall(json.dumps(value).encode() + b"\n")
    except OSError:
      pass  # To read from it will fail too.

  def close(self) -> None:
    self._file.close()
    self._connection.close()


class _TcpMeeting:
  """The meeting that `serve` holds."""

  def __init__(self, lines: _Lines, where: str, timeout: float):
    self._lines = lines
    self._where = where
    self._timeout = timeout

  def say_hello(self, rank: int, size: int) -> None:
    self._lines.write({"rank": rank, "size": size})

  def gather(self, text: str) -> list[str]:
    self._lines.write(text)
    answer = self._lines.read(self._timeout)
    if not isinstance(answer, dict):
      raise MeetingError(
        f"The ranks' meeting at {self._where} ended: a rank is gone, or what listens there is "
        "something else"
      )
    if "error" in answer:
      raise MeetingError(f"The ranks' meeting at {self._where} failed: {answer['error']}")
    return answer["texts"]


class _TorchMeeting:
  """A meeting in the store of `torchrun`, which listens where ranks are to meet."""

  def __init__(self, host: str, port: int, rank: int, size: int, timeout: float):
    import datetime

    distributed = importlib.import_module("torch.distributed")
    seconds = datetime.timedelta(seconds=timeout)
    self._store = distributed.TCPStore(host, port, size, False, timeout=seconds)
    self._rank, self._size = rank, size
    # Keys of ranks that were started again are others.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    self._prefix = f"monolith/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{restart}"
    self._count = 0

  def gather(self, text: str) -> list[str]:
    self._count += 1
    prefix = f"{self._prefix}/{self._count}"
    self._store.set(f"{prefix}/{self._rank}", text)
    try:
      return [self._store.get(f"{prefix}/{rank}").decode() for rank in range(self._size)]
    except RuntimeError as error:
      raise MeetingError(f"Not all of {self._size} ranks came: {error}") from error


def _welcome(peer: _Lines, size: int, peers: dict[int, _Lines]) -> None:
  """Lets a rank in, or says why not."""
  hello = peer.read(_HELLO_SECS)
  error = None
  if not isinstance(hello, dict) or not isinstance(hello.get("rank"), int):
    peer.close()  # Something else, which has no business here.
    return
  if hello.get("size") != size:
    error = f"rank {hello['rank']} says that there are {hello.get('size')} ranks, others say {size}"
  elif not 0 <= hello["rank"] < size:
    error = f"there is no rank {hello['rank']} of {size}"
  elif hello["rank"] in peers and not peers[hello["rank"]].is_gone():
    error = f"there are two ranks {hello['rank']}"
  if error is not None:
    peer.write({"error": error})
    peer.close()
    return
  if hello["rank"] in peers:  # It was started again before all were there.
    peers[hello["rank"]].close()
  peers[hello["rank"]] = peer


def _answer(peers: dict[int, _Lines], **answer: Any) -> None:
  for peer in peers.values():
    peer.write(answer)


def _listen(port: int) -> socket.socket:
  """Returns a socket that listens on all interfaces.

  Raises:
    OSError: somebody does already, or this process may not.
  """
  if socket.has_dualstack_ipv6():
    family, is_dual = socket.AF_INET6, True
  else:
    family, is_dual = socket.AF_INET, False
  return socket.create_server(("", port), family=family, dualstack_ipv6=is_dual)


def _connect(host: str, port: int, timeout: float) -> socket.socket:
  deadline = time.monotonic() + timeout
  while True:
    try:
      return socket.create_connection((host, port), timeout=_HELLO_SECS)
    except OSError as error:
      if time.monotonic() > deadline:
        raise MeetingError(
          f"No rank 0 listens at {host}:{port} within {timeout:.0f} s ({error}): MASTER_ADDR and "
          "MASTER_PORT have to be those of its machine, on all ranks"
        ) from error
    time.sleep(_RETRY_SECS)


def _free_port() -> int:
  with socket.socket() as probe:
    probe.bind(("", 0))
    return probe.getsockname()[1]


def _plain(host: str) -> str:
  """Returns an IPv4 address as such also where a socket of both kinds saw it."""
  return host[len("::ffff:") :] if host.startswith("::ffff:") else host


def _join_address(host: str, port: int) -> str:
  return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
