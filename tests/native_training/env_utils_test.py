import contextlib
import io
import os
import unittest
from unittest import mock

from monolith.native_training import env_utils


class EnvUtilsTest(unittest.TestCase):
  def test_generate_psm_from_uuid(self):
    self.assertEqual(env_utils.generate_psm_from_uuid("some-uuid"), "some-uuid")

  def test_zk_auth_data_is_not_printed(self):
    out = io.StringIO()
    with mock.patch.dict(os.environ, {"ZK_AUTH": "user:secret"}), \
        contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):  # fmt: skip
      self.assertEqual(env_utils.get_zk_auth_data(), [("digest", "user:secret")])
    self.assertNotIn("secret", out.getvalue())

  def test_no_zk_auth_data(self):
    with mock.patch.dict(os.environ):
      os.environ.pop("ZK_AUTH", None)
      self.assertIsNone(env_utils.get_zk_auth_data())

  def test_switches_and_numbers(self):
    for text, want in (("", False), ("0", False), (" False ", False), ("1", True), ("True", True)):
      with mock.patch.dict(os.environ, {"MONOLITH_TEST": text}):
        self.assertEqual(env_utils.get_bool("MONOLITH_TEST"), want, text)
    with mock.patch.dict(os.environ, {"MONOLITH_TEST": "-12"}):
      self.assertEqual(env_utils.get_int("MONOLITH_TEST", 3), -12)
    with mock.patch.dict(os.environ, {"MONOLITH_TEST": ""}):
      self.assertEqual(env_utils.get_int("MONOLITH_TEST", 3), 3)
    with mock.patch.dict(os.environ, {"MONOLITH_TEST": "many"}):
      with self.assertRaisesRegex(ValueError, "MONOLITH_TEST is 'many', want a whole number"):
        env_utils.get_int("MONOLITH_TEST", 3)

  def test_setup_hdfs_env_changes_nothing(self):
    before = dict(os.environ)
    self.assertIsNone(env_utils.setup_hdfs_env())
    self.assertEqual(dict(os.environ), before)


if __name__ == "__main__":
  unittest.main()
