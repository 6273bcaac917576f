import datetime
import os
import unittest
from unittest import mock

from kazoo.exceptions import NoAuthError
from kazoo.security import make_digest_acl

from monolith.native_training import zk_utils
from tests.wait_until import wait_until
from tests.zookeeper_server import ZooKeeperServer, require_zookeeper

_IP_VARIABLES = ("MY_HOST_IP", "MY_POD_IP", "MY_HOST_IPV6")


def _env(**values):
  clean = {n: v for n, v in os.environ.items() if n not in (*_IP_VARIABLES, "ZK_AUTH")}
  return mock.patch.dict(os.environ, {**clean, **values}, clear=True)


class DefaultServersTest(unittest.TestCase):
  def test_is_ipv6_only_by_variables(self):
    for values, want in (
      ({"MY_HOST_IP": "10.0.0.1"}, False),
      ({"MY_POD_IP": "10.0.0.1", "MY_HOST_IPV6": "::1"}, False),
      ({"MY_HOST_IPV6": "::1"}, True),
    ):
      with _env(**values):
        self.assertEqual(zk_utils.is_ipv6_only(), want, values)

  def test_is_ipv6_only_by_host_name(self):
    with _env(), mock.patch("socket.gethostbyname", return_value="10.0.0.1"):
      self.assertFalse(zk_utils.is_ipv6_only())
    for error in (OSError, UnicodeError):  # the latter for a name that no host can have
      with _env(), mock.patch("socket.gethostbyname", side_effect=error):
        self.assertTrue(zk_utils.is_ipv6_only())

  def test_no_servers_by_default(self):
    self.assertEqual(zk_utils._PORT, 2181)
    self.assertEqual(zk_utils.default_zk_servers(), "")
    self.assertEqual(zk_utils.default_zk_servers(use_ipv6=True), "")

  def test_servers_of_a_deployment(self):
    with _env(MY_HOST_IP="10.0.0.1"), mock.patch.object(zk_utils, "_HOSTS", ["1.1.1.1", "h"]), \
        mock.patch.object(zk_utils, "_HOSTS_IPV6", ["::1", "::2"]):  # fmt: skip
      self.assertEqual(zk_utils.default_zk_servers(), "1.1.1.1:2181,h:2181")
      self.assertEqual(zk_utils.default_zk_servers(use_ipv6=True), "[::1]:2181,[::2]:2181")

  def test_auth_data_is_injected(self):
    with _env(ZK_AUTH="user:password"):
      self.assertEqual(zk_utils.MonolithKazooClient("h:1").auth_data, {("digest", "user:password")})
      self.assertFalse(zk_utils.MonolithKazooClient("h:1", auth_data=None).auth_data)
    with _env():
      self.assertFalse(zk_utils.MonolithKazooClient("h:1").auth_data)


class StaleJobsTest(unittest.TestCase):
  def test_whatever_keeps_a_job_from_being_deleted_is_left_for_the_next_one(self):
    client = mock.Mock()
    client.get_children.return_value = ([], mock.Mock(mtime=0))
    client.delete.side_effect = RuntimeError("of a client that is being closed")

    zk_utils._delete_if_stale(client, "/monolith/old")

    client.delete.assert_called_once_with("/monolith/old", recursive=True)


class RealZooKeeperTest(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    require_zookeeper()
    cls.server = ZooKeeperServer()
    cls.addClassCleanup(cls.server.close)
    cls.server.start()

  def setUp(self):
    env = _env()
    env.start()
    self.addCleanup(env.stop)
    self.client = self._connect()
    self.client.delete("/monolith", recursive=True)
    self.client.ensure_path("/monolith")

  def _connect(self, **kwargs):
    client = zk_utils.MonolithKazooClient(self.server.hosts, **kwargs)
    self.addCleanup(client.close)
    self.addCleanup(client.stop)
    client.start()
    return client

  def test_authentication(self):
    with _env(ZK_AUTH="user:password"):
      owner = self._connect()
    with _env(ZK_AUTH="user:wrong"):
      stranger = self._connect()
    acl = [make_digest_acl("user", "password", all=True)]
    owner.create("/monolith/secret", b"data", acl=acl)
    self.addCleanup(owner.delete, "/monolith/secret")

    self.assertEqual(owner.get("/monolith/secret")[0], b"data")
    for client in (stranger, self.client):
      with self.assertRaises(NoAuthError):
        client.get("/monolith/secret")
      with self.assertRaises(NoAuthError):
        client.set("/monolith/secret", b"other")

  def test_clear_new_job(self):
    zk_utils.clear_zk_path(self.server.hosts, "job", False)

    self.assertEqual(self.client.get_children("/monolith"), [])

  def test_clear_existing_job(self):
    self.client.create("/monolith/job/ps.0", b"a:1", makepath=True)
    self.client.create("/monolith/job/worker.1", b"b:1", makepath=True)

    with self.assertRaisesRegex(ValueError, r"^there are \[ps.0,worker.1\] in monolith zk path$"):
      zk_utils.clear_zk_path(self.server.hosts, "job", False)
    self.assertIsNotNone(self.client.exists("/monolith/job/ps.0"))

    zk_utils.clear_zk_path(self.server.hosts, "job", True)
    self.assertIsNone(self.client.exists("/monolith/job"))

  def test_clear_keeps_fresh_jobs(self):
    self.client.create("/monolith/other/ps.0", b"a:1", makepath=True)

    zk_utils.clear_zk_path(self.server.hosts, "job", True)

    self.assertIsNotNone(self.client.exists("/monolith/other/ps.0"))

  def test_clear_removes_old_jobs_only(self):
    self.client.create("/monolith/old/ps.0", b"a:1", makepath=True)
    old_secs = self.client.exists("/monolith/old").mtime // 1000
    self.client.create("/monolith/fresh", b"", makepath=True)

    def is_fresh_a_second_younger():
      return self.client.set("/monolith/fresh", b"").mtime // 1000 > old_secs

    wait_until(is_fresh_a_second_younger)
    # Nine weeks after the old node's last change and half a second: the fresh one has until then.
    now = datetime.datetime.fromtimestamp(old_secs + 0.5) + datetime.timedelta(weeks=9)
    clock = mock.Mock(wraps=datetime)
    clock.datetime.fromtimestamp = datetime.datetime.fromtimestamp
    clock.datetime.now = lambda: now
    with mock.patch.object(zk_utils, "datetime", clock):
      zk_utils.clear_zk_path(self.server.hosts, "job", False)

    self.assertEqual(self.client.get_children("/monolith"), ["fresh"])

  def test_clear_goes_on_when_an_old_job_cannot_be_removed(self):
    acl = [make_digest_acl("user", "password", all=True)]
    with _env(ZK_AUTH="user:password"):
      owner = self._connect()
    owner.create("/monolith/a_protected", b"", acl=acl)
    self.addCleanup(owner.delete, "/monolith/a_protected")
    self.client.create("/monolith/b_old", b"", makepath=True)
    clock = mock.Mock(wraps=datetime)
    clock.datetime.fromtimestamp = datetime.datetime.fromtimestamp
    clock.datetime.now = lambda: datetime.datetime.now() + datetime.timedelta(weeks=10)

    with mock.patch.object(zk_utils, "datetime", clock):
      zk_utils.clear_zk_path(self.server.hosts, "job", False)

    self.assertEqual(self.client.get_children("/monolith"), ["a_protected"])

  def test_default_servers_are_used(self):
    with mock.patch.object(zk_utils, "default_zk_servers", return_value=self.server.hosts):
      zk_utils.clear_zk_path(None, "job", False)


if __name__ == "__main__":
  unittest.main()
