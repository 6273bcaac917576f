"""Ranks that watch each other over real connections, all in this process."""

import queue
import socket
import threading
from unittest import mock

from absl.testing import absltest

from monolith.native_training import hvd_lib
from monolith.native_training.ranks import watchdog

_WAIT_SECS = 120


class WatchdogTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self._address = queue.Queue()
    self._exits = queue.Queue()
    self._started = []

  def _start(self, size, grace_secs=_WAIT_SECS):
    """Starts one watchdog per rank, which find one another as by a broadcast of rank 0."""

    def share_address(address):
      if address:
        for _ in range(size - 1):
          self._address.put(address)
        return address
      return self._address.get(timeout=_WAIT_SECS)

    for name, value in (
      ("_share_address", share_address),
      ("os", mock.Mock(_exit=self._exits.put)),
    ):
      patch = mock.patch.object(watchdog, name, value)
      patch.start()
      self.addCleanup(patch.stop)
    dogs = []
    for rank in range(size):
      with mock.patch.object(hvd_lib, "rank", lambda rank=rank: rank, create=True), \
          mock.patch.object(hvd_lib, "size", lambda: size, create=True):  # fmt: skip
        dogs.append(watchdog.Watchdog(lambda: "Start again.", grace_secs))
    with mock.patch.object(hvd_lib, "local_size", lambda: size, create=True):
      threads = [threading.Thread(target=dog.start) for dog in dogs]
      for thread in threads:
        thread.start()
      for thread in threads:
        thread.join(_WAIT_SECS)
    return dogs

  def _break(self, dog):
    """Ends the connections of a rank as the end of its process would."""
    for peer in dog._peers.values():
      peer.shutdown(socket.SHUT_RDWR)

  def test_goodbye_is_no_loss(self):
    dogs = self._start(3)

    for dog in reversed(dogs):
      dog.stop()

    self.assertEqual([dog.lost_rank for dog in dogs], [None] * 3)
    self.assertTrue(self._exits.empty())

  def test_all_learn_that_a_rank_is_gone(self):
    dogs = self._start(3)

    self._break(dogs[2])

    for dog in dogs[:2]:
      dog.wait_until_lost(_WAIT_SECS)
    # Rank 0 saw it, and told the others by leaving them.
    self.assertEqual([dog.lost_rank for dog in dogs[:2]], [2, 0])
    self.assertEqual(
      dogs[0].message(),
      "Rank 0 lost rank 2: its process ended, or its machine cannot be reached. Start again.",
    )
    for dog in dogs:
      dog.stop(has_failed=True)
    self.assertTrue(self._exits.empty())

  def test_process_that_does_not_end_by_itself_is_ended(self):
    dogs = self._start(2, grace_secs=0.0)

    self._break(dogs[1])

    self.assertEqual(self._exits.get(timeout=_WAIT_SECS), 1)
    for dog in dogs:
      dog.stop(has_failed=True)

  def test_failure_of_this_rank_ends_the_others(self):
    dogs = self._start(2)

    dogs[0].stop(has_failed=True)

    dogs[1].wait_until_lost(_WAIT_SECS)
    self.assertEqual(dogs[1].lost_rank, 0)
    dogs[1].stop(has_failed=True)

  def test_one_rank_watches_nothing(self):
    (dog,) = self._start(1)

    dog.wait_until_lost(_WAIT_SECS)
    dog.stop()

    self.assertIsNone(dog.lost_rank)


if __name__ == "__main__":
  absltest.main()
