"""The ZooKeeper in memory behaves as kazoo's client does."""

import unittest

from kazoo.exceptions import NodeExistsError, NoNodeError, NotEmptyError

from monolith.agent_service.mocked_zkclient import FakeKazooClient


class FakeKazooClientTest(unittest.TestCase):
  def setUp(self):
    self.zk = FakeKazooClient("ignored:1")
    self.zk.start()
    self.addCleanup(self.zk.close)

  def test_nodes(self):
    with self.assertRaises(NoNodeError):
      self.zk.create("/a/b", b"x")
    self.assertEqual(self.zk.create("/a/b", b"x", makepath=True), "/a/b")
    with self.assertRaises(NodeExistsError):
      self.zk.create("/a/b")
    value, stat = self.zk.get("/a/b")
    self.assertEqual((value, stat.version, stat.data_length), (b"x", 0, 1))
    self.assertEqual(self.zk.set("/a/b", b"yy").version, 1)
    self.assertEqual(self.zk.get("/a/b")[0], b"yy")
    self.assertIsNone(self.zk.exists("/a/c"))
    self.assertEqual(self.zk.exists("/a").children_count, 1)
    for call in (self.zk.get, self.zk.get_children, self.zk.delete):
      with self.assertRaises(NoNodeError):
        call("/nowhere")
    with self.assertRaises(NoNodeError):
      self.zk.set("/nowhere", b"")

  def test_children_and_delete(self):
    self.zk.ensure_path("/a/b/c")
    self.zk.ensure_path("/a/d")
    self.assertEqual(self.zk.get_children("/a"), ["b", "d"])
    children, stat = self.zk.get_children("/a", True)
    self.assertEqual((children, stat.numChildren), (["b", "d"], 2))
    with self.assertRaises(NotEmptyError):
      self.zk.delete("/a", False)
    self.zk.delete("/a/d", recursive=False)
    self.zk.delete("/a")
    self.assertIsNone(self.zk.exists("/a/b/c"))

  def test_sequence_and_include_data(self):
    self.zk.ensure_path("/q")
    self.assertEqual(self.zk.create("/q/n-", sequence=True), "/q/n-0000000000")
    path, stat = self.zk.create("/q/n-", b"x", sequence=True, include_data=True)
    self.assertEqual((path, stat.version), ("/q/n-0000000001", 0))

  def test_ephemeral_nodes_end_with_the_session(self):
    self.zk.create("/a/b", ephemeral=True, makepath=True)
    self.zk.stop()
    self.assertIsNone(self.zk.exists("/a/b"))
    self.assertIsNotNone(self.zk.exists("/a"))

  def test_children_watch(self):
    seen = []
    self.zk.ChildrenWatch("/a", seen.append)
    self.assertEqual(seen, [])
    self.zk.ensure_path("/a/b")
    self.zk.create("/a/c")
    self.zk.delete("/a/b")
    self.assertEqual(seen, [[], ["b"], ["b", "c"], ["c"]])
    late = []
    self.zk.ChildrenWatch("/a", late.append)
    self.assertEqual(late, [["c"]])

  def test_data_watch(self):
    seen = []

    @self.zk.DataWatch("/a")
    def with_event(data, stat, event):
      seen.append((data, stat and stat.version, event and event.type))

    two_arguments = []
    self.zk.create("/a", b"1")
    self.zk.DataWatch("/a", lambda data, stat: two_arguments.append(data))
    self.zk.set("/a", b"2")
    self.zk.delete("/a")
    self.assertEqual(seen, [(b"1", 0, "CREATED"), (b"2", 1, "CHANGED"), (None, None, "DELETED")])
    self.assertEqual(two_arguments, [b"1", b"2", None])

  def test_a_watch_that_returns_false_ends(self):
    seen = []

    def once(children):
      seen.append(children)
      return False

    self.zk.ensure_path("/a")
    self.zk.ChildrenWatch("/a", once)
    self.zk.ensure_path("/a/b")
    self.assertEqual(seen, [[]])

  def test_a_watch_may_use_the_client(self):
    def read(children):
      for child in children:
        self.zk.DataWatch(f"/a/{child}", lambda data, stat: values.append(data))

    values = []
    self.zk.ensure_path("/a")
    self.zk.ChildrenWatch("/a", read)
    self.zk.create("/a/x", b"1")
    self.assertEqual(values, [b"1"])

  def test_retry_election_listener(self):
    self.zk.add_listener(lambda state: None)
    self.assertEqual(self.zk.retry(lambda a, b=0: a + b, 1, b=2), 3)
    election = self.zk.Election("/election", "me")
    self.assertEqual(election.run(lambda x: x, 5), 5)
    self.assertEqual(election.contenders(), ["me"])
    election.cancel()


if __name__ == "__main__":
  unittest.main()
