"""Ranks that meet over real connections, all in this process."""

import concurrent.futures
import errno
import os
import socket
import sys
import threading
import types
import unittest
from unittest import mock

from monolith.native_training.ranks import meeting

_WAIT_SECS = 120


def _listener():
  return socket.create_server(("127.0.0.1", 0))


def _port_of(listener):
  return listener.getsockname()[1]


def _in_threads(function, count):
  """Returns what `function(rank)` returns or raises, called in a thread for every rank."""
  with concurrent.futures.ThreadPoolExecutor(count) as pool:
    futures = [pool.submit(function, rank) for rank in range(count)]
    return [future.exception() or future.result() for future in futures]


class MeetingTest(unittest.TestCase):
  def _serve(self, size, timeout=_WAIT_SECS):
    """Holds a meeting as a launcher does; returns its port."""
    listener = _listener()
    port = _port_of(listener)
    thread = threading.Thread(target=meeting.serve, args=(listener, size, timeout))
    thread.start()
    self.addCleanup(thread.join)
    return port

  def test_all_hear_what_all_say(self):
    port = self._serve(3)

    def join(rank):
      own, address = meeting.join("localhost", port, rank, 3)
      said = [own.gather(f"{rank} says {turn}") for turn in range(2)]
      own._lines.close()
      return address, said

    for address, said in _in_threads(join, 3):
      # On the machine of the meeting.
      self.assertEqual(address, "")
      self.assertEqual(said, [[f"{rank} says {turn}" for rank in range(3)] for turn in range(2)])

  def test_rank_0_holds_the_meeting_if_nobody_else_does(self):
    with _listener() as listener:
      port = _port_of(listener)

    def join(rank):
      own, _ = meeting.join("127.0.0.1", port, rank, 2)
      said = own.gather(str(rank))
      own._lines.close()
      return said

    self.assertEqual(_in_threads(join, 2), [["0", "1"]] * 2)

  def test_who_is_missing(self):
    port = self._serve(3, timeout=0.5)

    def join(rank):
      own, _ = meeting.join("127.0.0.1", port, [0, 2][rank], 3, timeout=_WAIT_SECS)
      return own.gather("here")

    for error in _in_threads(join, 2):
      self.assertIsInstance(error, meeting.MeetingError)
      self.assertIn("ranks [1] of 3 did not come within", str(error))

  def test_who_does_not_belong_there(self):
    port = self._serve(2)
    with socket.create_connection(("127.0.0.1", port)) as stranger:
      stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
      self.assertEqual(stranger.recv(1), b"")
    for rank, size, message in (
      (0, 3, "rank 0 says that there are 3 ranks, others say 2"),
      (2, 2, "there is no rank 2 of 2"),
    ):
      with self.assertRaisesRegex(meeting.MeetingError, message):
        # As rank 1 would, which holds no meeting.
        own = meeting._TcpMeeting(
          meeting._Lines(meeting._connect("127.0.0.1", port, _WAIT_SECS)), "here", _WAIT_SECS
        )
        own.say_hello(rank, size)
        own.gather("x")

    def join(rank):
      own, _ = meeting.join("127.0.0.1", port, rank, 2)
      said = own.gather(str(rank))
      own._lines.close()
      return said

    self.assertEqual(_in_threads(join, 2), [["0", "1"]] * 2)

  def test_a_rank_that_is_started_again_before_all_are_there_takes_its_place(self):
    port = self._serve(2)
    died, _ = meeting.join("127.0.0.1", port, 1, 2)
    died._lines.write("said before it died")
    died._lines.close()
    # In the order in which they come.
    again = [meeting.join("127.0.0.1", port, rank, 2)[0] for rank in (1, 0)][::-1]

    def gather(rank):
      said = again[rank].gather(str(rank))
      again[rank]._lines.close()
      return said

    self.assertEqual(_in_threads(gather, 2), [["0", "1"]] * 2)

  def test_there_is_one_rank_of_each_number(self):
    port = self._serve(2)
    first, _ = meeting.join("127.0.0.1", port, 1, 2)
    second, _ = meeting.join("127.0.0.1", port, 1, 2)
    with self.assertRaisesRegex(meeting.MeetingError, "there are two ranks 1"):
      second.gather("x")
    first._lines.close()
    second._lines.close()
    own, _ = meeting.join("127.0.0.1", port, 0, 2)
    with self.assertRaisesRegex(meeting.MeetingError, "a rank is gone"):
      own.gather("x")

  def test_a_rank_that_leaves_ends_the_meeting(self):
    port = self._serve(2)
    first, second = _in_threads(lambda rank: meeting.join("127.0.0.1", port, rank, 2)[0], 2)
    second._lines.close()
    with self.assertRaisesRegex(meeting.MeetingError, "a rank is gone"):
      first.gather("x")

  def test_nobody_listens(self):
    with _listener() as listener:
      port = _port_of(listener)
    with self.assertRaisesRegex(meeting.MeetingError, "MASTER_ADDR and MASTER_PORT have to be"):
      meeting.join("127.0.0.1", port, 1, 2, timeout=0)

  def test_a_name_of_loopback_is_that_of_the_master(self):
    # Debian's /etc/hosts gives a machine's own name the address 127.0.1.1.
    with _listener() as listener:
      port = _port_of(listener)

    def join(rank):
      own, address = meeting.join(["127.0.1.1", "127.0.0.1"][rank], port, rank, 2)
      said = own.gather(address)
      own._lines.close()
      return said

    self.assertEqual(_in_threads(join, 2), [["", ""]] * 2)

  def test_rank_0_says_why_it_does_not_listen(self):
    with _listener() as listener:
      port = _port_of(listener)
    error = OSError(errno.EACCES, os.strerror(errno.EACCES))
    with mock.patch.object(meeting, "_listen", side_effect=error):
      with self.assertRaisesRegex(meeting.MeetingError, rf"port {port} \(MASTER_PORT\): .*denied"):
        meeting.join("127.0.0.1", port, 0, 2)
      # Who started the ranks may be allowed to.
      port = self._serve(1)
      own, _ = meeting.join("127.0.0.1", port, 0, 1)
      self.assertEqual(own.gather("x"), ["x"])
      own._lines.close()

  def test_torchruns_store(self):
    """The agent of `torchrun` listens there with a store of its own."""
    values, changed = {}, threading.Condition()

    class Store:
      def __init__(self, host, port, size, is_master, timeout):
        assert not is_master

      def set(self, key, value):
        with changed:
          values[key] = value.encode()
          changed.notify_all()

      def get(self, key):
        with changed:
          if not changed.wait_for(lambda: key in values, timeout=1):
            raise RuntimeError("timed out")
          return values[key]

    module = types.ModuleType("torch.distributed")
    module.TCPStore = Store
    with (
      _listener() as listener,
      mock.patch.dict(
        sys.modules, {"torch": types.ModuleType("torch"), "torch.distributed": module}
      ),
      mock.patch.dict(os.environ, {"TORCHELASTIC_USE_AGENT_STORE": "True"}),
    ):
      port = _port_of(listener)
      meetings = [meeting.join("127.0.0.1", port, rank, 2)[0] for rank in range(2)]
      for _ in range(2):
        said = _in_threads(lambda rank: meetings[rank].gather(str(rank)), 2)
        self.assertEqual(said, [["0", "1"]] * 2)
      with self.assertRaisesRegex(meeting.MeetingError, "Not all of 2 ranks came"):
        meetings[0].gather("alone")


class _Said:
  """A meeting of one rank."""

  def gather(self, text):
    return [text]


class ServersTest(unittest.TestCase):
  def test_a_port_that_is_taken_is_not_taken_again(self):
    tried = []

    def start(addresses):
      tried.append(addresses)
      if len(tried) < 3:
        raise OSError("in use")
      return "server"

    addresses, server = meeting.start_servers(_Said(), "", "10.0.0.7", 0, start)
    self.assertEqual(server, "server")
    self.assertEqual(addresses, tried[2])
    self.assertEqual(addresses[0].rsplit(":", 1)[0], "10.0.0.7")

  def test_a_server_that_cannot_be_started(self):
    def start(addresses):
      raise OSError("not here")

    with self.assertRaisesRegex(meeting.MeetingError, "rank 0: not here"):
      meeting.start_servers(_Said(), "::1", "", 0, start)

  def test_wait_for_servers(self):
    with _listener() as listener:
      address = f"127.0.0.1:{_port_of(listener)}"
      meeting.wait_for_servers([address])
    with self.assertRaisesRegex(meeting.MeetingError, r"Ranks \[0\] did not come within 0 s"):
      meeting.wait_for_servers([address], timeout=0)


if __name__ == "__main__":
  unittest.main()
