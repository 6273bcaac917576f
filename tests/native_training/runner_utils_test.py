import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import unittest
from unittest import mock

import tensorflow as tf
from absl import flags
from absl.testing import flagsaver
from google.protobuf import text_format
from kazoo.handlers.threading import KazooTimeoutError
from tensorflow.python.training.checkpoint_state_pb2 import CheckpointState

from monolith.native_training import graph_estimator, runner_utils, service_discovery
from monolith.native_training.monolith_checkpoint_state_pb2 import MonolithCheckpointState
from monolith.native_training.runner_utils import RunnerConfig, get_discovery
from monolith.native_training.service_discovery import (
  ConsulServiceDiscovery,
  MLPServiceDiscovery,
  ServiceDiscoveryType,
  TfConfigServiceDiscovery,
)
from monolith.native_training.zk_utils import MonolithKazooClient
from tests.zookeeper_server import ZooKeeperServer, require_zookeeper

tf.compat.v1.disable_eager_execution()

FLAGS = flags.FLAGS


def _make_checkpoints(folder, steps=(61, 30, 0)):
  """Fills a folder whose `checkpoint` file lists relative names, the latest one first."""
  os.makedirs(folder, exist_ok=True)
  names = [f"model.ckpt-{step}" for step in steps]
  state = CheckpointState(model_checkpoint_path=names[0], all_model_checkpoint_paths=names)
  with open(os.path.join(folder, "checkpoint"), "w") as f:
    f.write(text_format.MessageToString(state))


def _read(path, message):
  with open(path) as f:
    return text_format.Parse(f.read(), message)


class _ImpatientKazooClient(MonolithKazooClient):
  def start(self, timeout=0.5):
    super().start(timeout)


class RunnerUtilsTest(unittest.TestCase):
  def setUp(self):
    saved = flagsaver.save_flag_values()
    self.addCleanup(flagsaver.restore_flag_values, saved)
    self._folder = tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR"))
    self._model_dir = os.path.join(self._folder, "model_dir")
    self._restore_dir = os.path.join(self._folder, "restore_dir")

  def test_get_discovery_local(self):
    conf = RunnerConfig(is_local=True)
    discovery = get_discovery(conf)
    conf.is_local = False
    self.assertIsNone(discovery)

  def test_get_discovery_primus(self):
    tf_config = {
      "cluster": {"chief": ["h0:1"], "ps": ["h1:1"], "worker": ["h2:1", "h3:1"]},
      "task": {"type": "worker", "index": 1},
    }
    conf = RunnerConfig(discovery_type=ServiceDiscoveryType.PRIMUS, tf_config=json.dumps(tf_config))

    discovery = get_discovery(conf)

    self.assertIsInstance(discovery, TfConfigServiceDiscovery)
    self.assertEqual((conf.server_type, conf.index), ("worker", 2))

  def test_get_discovery_primus_malformed(self):
    for tf_config in (None, "", "{", "[]", '{"cluster": {}}', '{"cluster": {"ps": ["a:1"]}}'):
      conf = RunnerConfig(discovery_type=ServiceDiscoveryType.PRIMUS, tf_config=tf_config)
      with self.assertRaisesRegex(ValueError, "(?i)tf_config"):
        get_discovery(conf)

  def test_get_discovery_consul(self):
    conf = RunnerConfig(discovery_type=ServiceDiscoveryType.CONSUL)
    self.assertIsInstance(get_discovery(conf, psm="test_psm"), ConsulServiceDiscovery)

  def test_get_discovery_mlp(self):
    conf = RunnerConfig(discovery_type=ServiceDiscoveryType.MLP)
    self.assertIsInstance(get_discovery(conf), MLPServiceDiscovery)

  def test_get_discovery_zk(self):
    conf = RunnerConfig(discovery_type=ServiceDiscoveryType.ZK, zk_server="127.0.0.1:0")
    with mock.patch.object(service_discovery, "MonolithKazooClient", _ImpatientKazooClient):
      with self.assertRaises(KazooTimeoutError):
        get_discovery(conf)

  def test_monolith_discovery_with_zookeeper(self):
    require_zookeeper()
    with ZooKeeperServer() as server:
      conf = RunnerConfig(
        discovery_type=ServiceDiscoveryType.ZK, zk_server=server.hosts, deep_insight_name="job"
      )
      with runner_utils.monolith_discovery(conf) as discovery:
        discovery.register("ps", 0, "h:1")
        client = MonolithKazooClient(server.hosts)
        self.addCleanup(client.close)
        self.addCleanup(client.stop)
        client.start()
        self.assertEqual(client.get("/monolith/job/ps.0")[0], b"h:1")
      self.assertIsNone(client.exists("/monolith/job/ps.0"))

  def test_monolith_discovery_closes_on_an_error(self):
    conf = RunnerConfig(uuid="some_uuid", discovery_type=ServiceDiscoveryType.CONSUL)
    discovery = mock.Mock()
    with mock.patch.object(runner_utils, "get_discovery", return_value=discovery) as get:
      with self.assertRaises(KeyError), runner_utils.monolith_discovery(conf):
        raise KeyError
    get.assert_called_once_with(conf, "some_uuid")
    discovery.close.assert_called_once()

  def test_monolith_discovery_local(self):
    with runner_utils.monolith_discovery(RunnerConfig(is_local=True)) as discovery:
      self.assertIsNone(discovery)

  def test_copy_ckpt(self):
    _make_checkpoints(self._restore_dir)

    conf = RunnerConfig(
      is_local=True, restore_dir=self._restore_dir, model_dir=self._model_dir,
      restore_ckpt="model.ckpt-30",
    )  # fmt: skip
    state = tf.train.get_checkpoint_state(self._model_dir)

    self.assertTrue(tf.io.gfile.exists(os.path.join(self._model_dir, "monolith_checkpoint")))
    self.assertTrue(tf.io.gfile.exists(os.path.join(self._model_dir, "restore_ckpt")))
    restored = os.path.join(self._restore_dir, "model.ckpt-30")
    self.assertEqual(state.model_checkpoint_path, restored)
    self.assertEqual(list(state.all_model_checkpoint_paths), [restored])
    monolith_state = _read(
      os.path.join(self._model_dir, "monolith_checkpoint"), MonolithCheckpointState()
    )
    self.assertEqual(list(monolith_state.exempt_model_checkpoint_paths), [restored])
    self.assertEqual(FLAGS.restore_ckpt, "model.ckpt-30")

    RunnerConfig(
      server_type="worker", index=2, restore_dir=self._restore_dir, model_dir=self._model_dir,
      restore_ckpt="model.ckpt-30",
    )  # fmt: skip
    self.assertEqual(conf.restore_ckpt, "model.ckpt-30")

  def _copy(self, **kwargs):
    conf = {"server_type": "worker", "index": 0, "restore_dir": self._restore_dir}
    RunnerConfig(**{**conf, "model_dir": self._model_dir, **kwargs})
    path = os.path.join(self._model_dir, "checkpoint")
    return os.path.exists(path) and _read(path, CheckpointState()).model_checkpoint_path

  def test_copy_latest(self):
    _make_checkpoints(self._restore_dir)

    self.assertEqual(self._copy(), os.path.join(self._restore_dir, "model.ckpt-61"))

  def test_copy_of_an_unknown_checkpoint_is_an_error_of_every_process(self):
    _make_checkpoints(self._restore_dir)

    for role in ({}, {"index": 1}, {"server_type": "ps"}, {"is_local": True}):
      with self.assertRaisesRegex(
        ValueError,
        "restore_ckpt is model.ckpt-7, but restore_dir .*/restore_dir has "
        r"\['model.ckpt-61', 'model.ckpt-30', 'model.ckpt-0'\]",
      ):
        self._copy(restore_ckpt="model.ckpt-7", **role)
    self.assertFalse(os.path.exists(self._model_dir))

  def test_copy_does_not_touch_a_folder_with_checkpoints(self):
    _make_checkpoints(self._restore_dir)
    _make_checkpoints(self._model_dir, steps=(100,))

    self.assertEqual(self._copy(), "model.ckpt-100")
    self.assertEqual(os.listdir(self._model_dir), ["checkpoint"])

  def test_copy_that_is_asked_for_does_not_touch_a_folder_with_checkpoints(self):
    _make_checkpoints(self._restore_dir)
    conf = RunnerConfig(is_local=True, restore_dir=self._restore_dir, model_dir=self._model_dir)
    _make_checkpoints(self._model_dir, steps=(100,))

    conf._copy_ckpt_file()

    path = os.path.join(self._model_dir, "checkpoint")
    self.assertEqual(_read(path, CheckpointState()).model_checkpoint_path, "model.ckpt-100")

  def test_copy_merges_monolith_checkpoint(self):
    _make_checkpoints(self._restore_dir)
    os.makedirs(self._model_dir)
    kind = MonolithCheckpointState.MULTI_CUCKOO_HASH_MAP
    for folder, state in (
      (self._restore_dir, MonolithCheckpointState(
        exempt_model_checkpoint_paths=["theirs"], builtin_hash_table_type=kind)),
      (self._model_dir, MonolithCheckpointState(exempt_model_checkpoint_paths=["ours"])),
    ):  # fmt: skip
      with open(os.path.join(folder, "monolith_checkpoint"), "w") as f:
        f.write(text_format.MessageToString(state))

    latest = self._copy()

    state = _read(os.path.join(self._model_dir, "monolith_checkpoint"), MonolithCheckpointState())
    self.assertEqual(list(state.exempt_model_checkpoint_paths), ["ours", latest])
    self.assertEqual(state.builtin_hash_table_type, kind)

  def test_copy_from_a_relative_folder_is_absolute(self):
    _make_checkpoints(self._restore_dir)
    relative = os.path.relpath(self._restore_dir)

    self.assertEqual(
      self._copy(restore_dir=relative), os.path.join(self._restore_dir, "model.ckpt-61")
    )

  def test_copy_from_nothing_is_an_error_of_every_process(self):
    for role in ({}, {"index": 1}, {"server_type": "ps"}, {"is_local": True}):
      with self.assertRaisesRegex(ValueError, "restore_dir is .*, which has no checkpoint"):
        self._copy(**role)
    self.assertFalse(os.path.exists(self._model_dir))

  def test_copy_to_nowhere(self):
    _make_checkpoints(self._restore_dir)

    with self.assertRaisesRegex(ValueError, "restore_dir is .*, but model_dir is empty"):
      self._copy(model_dir="")

  def test_job_that_goes_on_does_not_need_what_it_came_from(self):
    _make_checkpoints(self._model_dir, steps=(100,))

    self.assertEqual(self._copy(), "model.ckpt-100")

  def test_others_wait_for_the_chief(self):
    _make_checkpoints(self._restore_dir)
    is_waiting = threading.Event()

    def poll(seconds):
      self.assertEqual(seconds, 30)
      is_waiting.set()
      chief.join(60)

    chief = threading.Thread(target=lambda: (is_waiting.wait(60), self._copy()))
    chief.start()
    with mock.patch.object(runner_utils.time, "sleep", poll):
      self._copy(index=1)
    self.assertTrue(is_waiting.is_set())

  def test_others_do_not_wait_for_ever(self):
    _make_checkpoints(self._restore_dir)
    for kwargs in ({"index": 1}, {"server_type": "ps"}):
      with self.assertRaisesRegex(TimeoutError, "monolith_checkpoint did not appear within 0 s"):
        self._copy(session_creation_timeout_secs=0, **kwargs)

  def test_fields_and_flags(self):
    names = [field.name for field in dataclasses.fields(RunnerConfig)]

    self.assertEqual(len(names), 131)
    self.assertEqual(
      [name for name in names if name not in FLAGS],
      ["profile_save_steps_interval", "reload_alias_map", "device_fn", "use_dataservice"],
    )
    self.assertEqual(FLAGS["discovery_type"].default, "consul")

  def test_flags_fill_defaults_only(self):
    FLAGS.num_ps = 5
    FLAGS.num_workers = 6
    FLAGS.discovery_type = "zk"
    FLAGS.dataset_use_dataservice = True

    conf = RunnerConfig(num_workers=7)

    self.assertEqual((conf.num_ps, conf.num_workers), (5, 7))
    self.assertEqual(conf.discovery_type, ServiceDiscoveryType.ZK)
    self.assertIs(conf.use_dataservice, True)

  def test_kafka_flags(self):
    conf = RunnerConfig(kafka_topics="a, b,", kafka_group_id="g", kafka_servers="s:1")

    self.assertEqual(conf.kafka_topics, ["a", "b"])
    self.assertEqual(
      (FLAGS.kafka_topics, FLAGS.kafka_group_id, FLAGS.kafka_servers), ("a,b", "g", "s:1")
    )

  def test_values_set_in_code_reach_what_reads_flags(self):
    FLAGS.data_type = "Example"

    RunnerConfig(feature_list="features.conf", sort_id=False, disable_native_metrics=False)

    self.assertEqual(
      (FLAGS.feature_list, FLAGS.sort_id, FLAGS.disable_native_metrics, FLAGS.data_type),
      ("features.conf", False, False, "Example"),
    )

  def test_index_from_mpi(self):
    kwargs = {"enable_gpu_training": True, "enable_partial_sync_training": True}
    with mock.patch.dict(os.environ, {"OMPI_COMM_WORLD_RANK": "3"}), \
        mock.patch.object(runner_utils, "add_mpi_exception_hook"):  # fmt: skip
      self.assertEqual(RunnerConfig(**kwargs).index, 3)
      self.assertEqual(RunnerConfig(index=None, **kwargs).index, 3)
      self.assertEqual(RunnerConfig(index=2, **kwargs).index, 2)
      self.assertEqual(RunnerConfig(server_type="ps", **kwargs).index, 0)
      self.assertEqual(RunnerConfig(enable_gpu_training=True).index, 0)

  def test_address_family(self):
    RunnerConfig(zk_watch_address_family="ipv6")
    with self.assertRaisesRegex(AssertionError, "'ipv5'"):
      RunnerConfig(zk_watch_address_family="ipv5")

  def test_unparsed_flags(self):
    for arguments, is_refused in ((["program", "--num_ps=3"], True), (["notebook"], False)):
      FLAGS.unparse_flags()
      try:
        with mock.patch.object(sys, "argv", arguments):
          if is_refused:
            with self.assertRaisesRegex(flags.UnparsedFlagAccessError, "--num_ps=3"):
              RunnerConfig()
          else:
            self.assertEqual(RunnerConfig().num_ps, 0)
      finally:
        FLAGS.mark_as_parsed()

  def test_full_sync(self):
    self.assertFalse(RunnerConfig().enable_full_sync_training)
    self.assertTrue(RunnerConfig(enable_sync_training=True).enable_full_sync_training)
    self.assertFalse(
      RunnerConfig(
        enable_sync_training=True, enable_partial_sync_training=True
      ).enable_full_sync_training
    )


class CheckRestoreTest(unittest.TestCase):
  def setUp(self):
    saved = flagsaver.save_flag_values()
    self.addCleanup(flagsaver.restore_flag_values, saved)
    self._model_dir = tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR"))

  def _check(self, **kwargs):
    RunnerConfig(model_dir=self._model_dir, **kwargs).check_restore(self._model_dir)

  def test_nothing_asked_for(self):
    self._check()

    self.assertEqual(os.listdir(self._model_dir), [])

  def test_checkpoint_is_chosen(self):
    _make_checkpoints(self._model_dir)

    self._check(restore_ckpt="model.ckpt-30")

    state = tf.train.get_checkpoint_state(self._model_dir)
    self.assertEqual(os.path.basename(state.model_checkpoint_path), "model.ckpt-30")

  def test_job_that_goes_on(self):
    _make_checkpoints(self._model_dir)
    self._check(restore_ckpt="model.ckpt-30")
    _make_checkpoints(self._model_dir, steps=(90, 61))

    self._check(restore_ckpt="/elsewhere/model.ckpt-30")

    state = tf.train.get_checkpoint_state(self._model_dir)
    self.assertEqual(os.path.basename(state.model_checkpoint_path), "model.ckpt-90")

  def test_folder_without_checkpoints(self):
    with self.assertRaisesRegex(ValueError, "restore_ckpt is model.ckpt-7, but .* no checkpoint"):
      self._check(restore_ckpt="model.ckpt-7")

  def test_unknown_checkpoint(self):
    _make_checkpoints(self._model_dir)

    for mode in (graph_estimator.ModeKeys.TRAIN, graph_estimator.ModeKeys.EVAL):
      FLAGS.mode = mode
      with self.assertRaisesRegex(
        ValueError, "restore_ckpt is model.ckpt-6, but the job would start from .*model.ckpt-61; "
      ):
        self._check(restore_ckpt="model.ckpt-6")

  def test_second_choice(self):
    _make_checkpoints(self._model_dir)
    self._check(restore_ckpt="model.ckpt-30")
    FLAGS.restore_ckpt = None

    with self.assertRaisesRegex(ValueError, "started from .*model.ckpt-30 already. Delete that"):
      self._check(restore_ckpt="model.ckpt-3")

  def test_choice_that_cannot_be_written(self):
    _make_checkpoints(self._model_dir)

    with mock.patch.object(
      runner_utils.file_io, "atomic_write_string_to_file", side_effect=OSError("the disk is full")
    ):
      with self.assertRaisesRegex(ValueError, "restore_ckpt is model.ckpt-30, but .*restore_ckpt"):
        self._check(restore_ckpt="model.ckpt-30")

  def test_folder_that_was_not_taken_over(self):
    conf = RunnerConfig(model_dir=self._model_dir)
    conf.restore_dir = "elsewhere"

    with self.assertRaisesRegex(ValueError, "restore_dir is elsewhere, .* no .*/checkpoint"):
      conf.check_restore(self._model_dir)


class GetCheckpointStateTest(unittest.TestCase):
  def setUp(self):
    saved = flagsaver.save_flag_values()
    self.addCleanup(flagsaver.restore_flag_values, saved)
    self._folder = tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR"))
    _make_checkpoints(self._folder)

  def _state(self):
    return tf.train.get_checkpoint_state(self._folder)

  def _path(self, name):
    return os.path.join(self._folder, name)

  def test_without_the_flag(self):
    state = self._state()

    self.assertEqual(state.model_checkpoint_path, self._path("model.ckpt-61"))
    self.assertEqual(os.listdir(self._folder), ["checkpoint"])

  def test_training_restores_once(self):
    FLAGS.restore_ckpt = "/elsewhere/model.ckpt-30"

    state = self._state()

    self.assertEqual(state.model_checkpoint_path, self._path("model.ckpt-30"))
    self.assertEqual(
      [os.path.basename(p) for p in state.all_model_checkpoint_paths],
      ["model.ckpt-61", "model.ckpt-0", "model.ckpt-30"],
    )
    written = _read(self._path("checkpoint"), CheckpointState())
    self.assertEqual(written, state)
    self.assertTrue(os.path.exists(self._path("restore_ckpt")))

    _make_checkpoints(self._folder, steps=(90, 61, 30))
    self.assertEqual(self._state().model_checkpoint_path, self._path("model.ckpt-90"))

  def test_evaluation_restores_always_and_writes_nothing(self):
    FLAGS.restore_ckpt = "model.ckpt-30"
    FLAGS.mode = graph_estimator.ModeKeys.EVAL
    with open(self._path("restore_ckpt"), "w"):
      pass

    for _ in range(2):
      self.assertEqual(self._state().model_checkpoint_path, self._path("model.ckpt-30"))
    self.assertEqual(
      _read(self._path("checkpoint"), CheckpointState()).model_checkpoint_path, "model.ckpt-61"
    )

  def test_unknown_checkpoint(self):
    FLAGS.restore_ckpt = "model.ckpt-7"

    with self.assertLogs("absl", "WARNING") as logs:
      self.assertEqual(self._state().model_checkpoint_path, self._path("model.ckpt-61"))
    self.assertIn("model.ckpt-7", logs.output[0])
    self.assertFalse(os.path.exists(self._path("restore_ckpt")))

  def test_other_file_name(self):
    FLAGS.restore_ckpt = "model.ckpt-30"
    os.rename(self._path("checkpoint"), self._path("other"))

    state = tf.train.get_checkpoint_state(self._folder, "other")

    self.assertEqual(state.model_checkpoint_path, self._path("model.ckpt-61"))
    self.assertIsNone(self._state())

  def test_unparsed_flags(self):
    FLAGS.restore_ckpt = "model.ckpt-30"
    FLAGS.unparse_flags()
    try:
      self.assertEqual(self._state().model_checkpoint_path, self._path("model.ckpt-61"))
    finally:
      FLAGS.mark_as_parsed()

  def test_all_of_tensorflow_is_reached(self):
    FLAGS.restore_ckpt = "model.ckpt-1"
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      v = tf.compat.v1.get_variable("v", initializer=0)
      saver = tf.compat.v1.train.Saver()
      session.run(tf.compat.v1.global_variables_initializer())
      for step in (1, 2):
        session.run(v.assign(step))
        saver.save(session, self._path("model.ckpt"), global_step=step)

    self.assertEqual(tf.train.latest_checkpoint(self._folder), self._path("model.ckpt-1"))
    with tf.Graph().as_default():
      v = tf.compat.v1.get_variable("v", initializer=0)
      scaffold = tf.compat.v1.train.Scaffold(saver=tf.compat.v1.train.Saver([v]))
      creator = tf.compat.v1.train.ChiefSessionCreator(scaffold, checkpoint_dir=self._folder)
      with tf.compat.v1.train.MonitoredSession(creator) as session:
        self.assertEqual(session.run(v), 1)

  def test_half_written_file_is_read_again(self):
    with open(self._path("checkpoint")) as f:
      full = f.read()
    for part in ("", 'model_checkpoint_path: "model.ck', 'all_model_checkpoint_paths: "a"'):
      with open(self._path("checkpoint"), "w") as f:
        f.write(part)

      sleeps = []

      def complete(seconds, sleeps=sleeps):
        sleeps.append(seconds)
        if len(sleeps) == 2:
          with open(self._path("checkpoint"), "w") as f:
            f.write(full)

      with mock.patch.object(runner_utils.time, "sleep", complete):
        self.assertEqual(self._state().model_checkpoint_path, self._path("model.ckpt-61"))
      self.assertEqual(len(sleeps), 2)
      self.assertGreater(sleeps[1], sleeps[0])

  def test_damaged_file(self):
    with open(self._path("checkpoint"), "w") as f:
      f.write("not a state")

    sleeps = []
    with mock.patch.object(runner_utils.time, "sleep", sleeps.append):
      with self.assertRaisesRegex(Exception, "^read ckpt error!$"):
        self._state()
    self.assertEqual(len(sleeps), 5)

  def test_no_folder(self):
    self.assertIsNone(tf.train.get_checkpoint_state(self._path("missing")))

  def test_hdfs_paths(self):
    state = CheckpointState(
      model_checkpoint_path="hdfs://h/m/model.ckpt-2",
      all_model_checkpoint_paths=["hdfs://h/m/model.ckpt-1", "hdfs://h/m/model.ckpt-2", "rel-3"],
    )
    with open(self._path("checkpoint"), "w") as f:
      f.write(text_format.MessageToString(state))

    got = self._state()

    self.assertEqual(got.model_checkpoint_path, "hdfs://h/m/model.ckpt-2")
    self.assertEqual(
      list(got.all_model_checkpoint_paths),
      ["hdfs://h/m/model.ckpt-1", "hdfs://h/m/model.ckpt-2", self._path("rel-3")],
    )

  def test_isabs(self):
    self.assertTrue(runner_utils.isabs("hdfs:/a"))
    self.assertTrue(runner_utils.isabs("/a"))
    self.assertFalse(runner_utils.isabs("a/b"))

  def test_loading_the_module_again_does_not_stack_the_patch(self):
    program = (
      "import importlib, os, threading\n"
      "import tensorflow as tf\n"
      "original = tf.train.get_checkpoint_state\n"
      "isabs = os.path.isabs\n"
      "from monolith.native_training import runner_utils\n"
      "importlib.reload(runner_utils)\n"
      "assert runner_utils.old_get_checkpoint_state is original\n"
      "assert tf.train.get_checkpoint_state is not original\n"
      "assert os.path.isabs is isabs\n"
      "assert threading.active_count() == 1, threading.enumerate()\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    self.assertEqual(result.returncode, 0, result.stderr)


if __name__ == "__main__":
  unittest.main()
