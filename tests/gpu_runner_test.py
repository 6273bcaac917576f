"""Tests of `monolith.gpu_runner` on CPU: its modes, flags and, with Horovod, several ranks."""

import glob
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

import tensorflow as tf
from absl import app, flags
from absl.testing import flagsaver

from monolith import gpu_runner
from monolith.core import model_registry
from monolith.native_training import graph_estimator
from monolith.native_training.settings import rank_environment
from tests import rank_processes
from tests.gpu_runner_testing import LEARNING_RATE, LINEAR, RANKS, LinearTask
from tests.tpu_runner_testing import read_scalars

tf.compat.v1.disable_v2_behavior()

ROOT = pathlib.Path(__file__).absolute().parent.parent
_TIMEOUT_SECS = 300
_PARAMS = {
  "train_batch_size": 16,
  "eval_batch_size": 8,
  "accelerator": None,
  "num_replicas": 1,
  "hvd_rank": 0,
}


def _no_model_fn(features, labels, mode, params):
  raise NotImplementedError


class RunnerTestCase(unittest.TestCase):
  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.model_dir = os.path.join(folder.name, "model")
    self.eval_dir = os.path.join(self.model_dir, "eval")
    LinearTask.seen.clear()

  def _runner(self, mode="train", settings=None, **flag_values):
    flag_values.setdefault("model_dir", self.model_dir)
    flag_values.setdefault("save_checkpoints_steps", 3)
    with flagsaver.flagsaver(mode=mode, **flag_values):
      return gpu_runner.GPURunner(model_registry.GetParams(LINEAR).set(**(settings or {})))

  def _weight(self, step):
    return tf.train.load_variable(os.path.join(self.model_dir, f"model.ckpt-{step}"), "weight")


class ModesTest(RunnerTestCase):
  def test_train(self):
    self._runner().run()

    self.assertEqual(LinearTask.seen["model_train"], _PARAMS)
    self.assertEqual(LinearTask.seen["input_train"], _PARAMS)
    self.assertTrue(LinearTask.seen["created_eval"])
    self.assertNotIn("model_eval", LinearTask.seen)
    self.assertEqual(tf.train.load_variable(self.model_dir, "global_step"), 6)
    self.assertEqual(self._weight(6), 1 - 6 * LEARNING_RATE)
    self.assertTrue(os.path.exists(os.path.join(self.model_dir, "model.ckpt-3.index")))
    self.assertFalse(os.path.exists(self.eval_dir))

  def test_eval_at_the_step_of_the_checkpoint(self):
    self._runner().run()
    self._runner("eval").run()

    self.assertEqual(LinearTask.seen["model_eval"], _PARAMS)
    scalars = read_scalars(self.eval_dir)
    loss = 1 - 6 * LEARNING_RATE
    # By the estimator and by the runner, in files of their own.
    self.assertEqual(scalars["loss"], {6: [loss, loss]})
    self.assertEqual(scalars["rows"], {6: [8.0, 8.0]})
    self.assertEqual(scalars["global_step"], {6: [6.0]})
    self.assertEqual(len(glob.glob(os.path.join(self.eval_dir, "events.*.gpu_runner.*"))), 1)

  def test_eval_steps(self):
    self._runner().run()
    runner = self._runner("eval")
    with mock.patch.object(
      graph_estimator.Estimator, "evaluate", return_value={"loss": 1.0}
    ) as evaluate:
      runner.run()
    # 20 examples in batches of 8.
    self.assertEqual(evaluate.call_args.kwargs["steps"], 2)
    self.assertEqual(read_scalars(self.eval_dir), {"loss": {6: [1.0]}})

  def test_train_and_eval(self):
    with mock.patch.object(gpu_runner.time, "sleep") as sleep:
      self._runner("train_and_eval").run()
    sleep.assert_not_called()

    self.assertEqual(LinearTask.seen["model_train"], _PARAMS)
    self.assertEqual(LinearTask.seen["model_eval"], _PARAMS)
    scalars = read_scalars(self.eval_dir)
    # Rounds of 4 steps, the last one shorter.
    self.assertEqual(scalars["global_step"], {4: [4.0], 6: [6.0]})
    self.assertEqual(scalars["loss"][4], [1 - 4 * LEARNING_RATE] * 2)
    self.assertEqual(scalars["loss"][6], [1 - 6 * LEARNING_RATE] * 2)
    self.assertEqual(self._weight(6), 1 - 6 * LEARNING_RATE)

  def test_train_and_eval_needs_no_flag_for_checkpoints(self):
    self._runner("train_and_eval", save_checkpoints_steps=None).run()
    self.assertEqual(read_scalars(self.eval_dir)["global_step"], {4: [4.0], 6: [6.0]})

  def test_train_and_eval_goes_on(self):
    self._runner(settings={"train.max_steps": 3}).run()
    self._runner("train_and_eval", {"train.max_steps": 9}).run()
    self.assertEqual(read_scalars(self.eval_dir)["global_step"], {7: [7.0], 9: [9.0]})
    self.assertEqual(self._weight(9), 1 - 9 * LEARNING_RATE)

  def test_train_and_eval_of_what_is_trained(self):
    self._runner().run()
    self._runner("train_and_eval").run()
    self.assertFalse(os.path.exists(self.eval_dir))

  def test_train_and_eval_when_the_data_ends(self):
    # Every round is one pass, of fewer batches than steps.
    self._runner("train_and_eval", {"train_batches": 3, "train.max_steps": 8}).run()
    self.assertEqual(read_scalars(self.eval_dir)["global_step"], {3: [3.0], 6: [6.0], 8: [8.0]})

  def test_train_and_eval_without_data(self):
    runner = self._runner("train_and_eval", {"train_batches": 0})
    with self.assertLogs("absl", level="WARNING") as logs:
      runner.run()
    self.assertIn("Training did not get beyond step 0", str(logs.output))

  def test_no_checkpoint_without_the_flag(self):
    with self.assertLogs("absl", level="WARNING") as logs:
      self._runner(save_checkpoints_steps=None).run()
    self.assertIn("No checkpoint will be written", str(logs.output))
    self.assertIsNone(tf.train.latest_checkpoint(self.model_dir))

  def test_estimator(self):
    estimator = self._runner(settings={"accelerator": "tpu"}).create_estimator(_no_model_fn)
    self.assertIsInstance(estimator, graph_estimator.Estimator)
    self.assertEqual(estimator.params, {**_PARAMS, "accelerator": "tpu"})
    self.assertEqual(estimator.config.save_checkpoints_steps, 3)


class FlagsTest(RunnerTestCase):
  def test_attributes(self):
    runner = self._runner("eval")
    self.assertEqual(runner._model_dir, self.model_dir)
    self.assertEqual(runner._save_checkpoints_steps, 3)
    self.assertEqual(runner._mode, "eval")
    self.assertEqual(runner._task_param.train.max_steps, 6)
    own = self._runner(settings={"train.save_checkpoints_steps": 50})
    self.assertEqual(own._save_checkpoints_steps, 50)

  def test_defaults(self):
    want = {"task": None, "model_dir": None, "save_checkpoints_steps": None, "mode": "train"}
    self.assertEqual({name: flags.FLAGS[name].default for name in want}, want)
    with self.assertRaises(flags.IllegalFlagValueError):
      flags.FLAGS(["prog", "--mode=x"])

  def test_errors(self):
    for mode, settings, flag_values, error, message in (
      ("eval", {}, {"model_dir": None}, TypeError, "--mode=eval needs --model_dir"),
      ("eval", {"input.eval_examples": None}, {}, TypeError, "input.eval_examples of task"),
      ("eval", {"eval.per_replica_batch_size": None}, {}, TypeError, "eval.per_replica_batch_size"),
      ("eval", {"input.eval_examples": 7}, {}, ValueError, "is 7, fewer than one batch of 8"),
      ("train_and_eval", {"train.max_steps": None}, {}, TypeError, "train.max_steps of task"),
      ("train_and_eval", {"eval.steps_per_eval": 0}, {}, ValueError, "steps_per_eval is 0"),
      ("train", {}, {"save_checkpoints_steps": -1}, ValueError, "=-1 is negative"),
    ):
      with self.subTest(message), self.assertRaisesRegex(error, message):
        self._runner(mode, settings, **flag_values).run()
    self.assertNotIn("model_train", LinearTask.seen)

  def test_main(self):
    with flagsaver.flagsaver(task=None), self.assertRaisesRegex(app.UsageError, "--task"):
      gpu_runner.main(["prog"])
    with self.assertRaisesRegex(app.UsageError, "Unexpected arguments"):
      gpu_runner.main(["prog", "eval"])
    with flagsaver.flagsaver(task=LINEAR, model_dir=self.model_dir, save_checkpoints_steps=6):
      gpu_runner.main(["prog"])
    self.assertEqual(tf.train.load_variable(self.model_dir, "global_step"), 6)


class ImportTest(unittest.TestCase):
  def _run(self, code):
    process = subprocess.run(
      [sys.executable, "-c", code],
      env={**os.environ, "PYTHONPATH": str(ROOT)},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      check=False,
      timeout=_TIMEOUT_SECS,
    )
    self.assertEqual(process.returncode, 0, process.stdout)

  @unittest.skipUnless(hasattr(tf, "estimator"), "TPUEstimator ended with TensorFlow 2.15")
  def test_both_runners_in_either_order(self):
    for first, second in (("tpu_runner", "gpu_runner"), ("gpu_runner", "tpu_runner")):
      self._run(
        f"from monolith import {first}, {second}\n"
        "from absl import flags\n"
        "keys = {f.name for f in flags.FLAGS.get_key_flags_for_module"
        f"('monolith.{first}')}}\n"
        "assert {'task', 'model_dir', 'mode', 'save_checkpoints_steps'} <= keys, keys\n"
        "import sys\n"
        "assert not [n for n in sys.modules if n.split('.')[0] in ('horovod', 'mpi4py')]\n"
      )

  def test_without_the_libraries(self):
    self._run(
      "import inspect, sys\n"
      "sys.modules['horovod'] = sys.modules['mpi4py'] = None\n"
      "from monolith import _install, gpu_runner\n"
      "from monolith.gpu_runner import MPI, hvd\n"
      "inspect.getmembers(gpu_runner)\n"
      "assert inspect.ismodule(hvd) and not hasattr(hvd, '__path__')\n"
      "for use, text in ((lambda: hvd.size, _install.install_line('horovod')),\n"
      "                  (lambda: MPI.COMM_WORLD, 'pip install mpi4py')):\n"
      "  try:\n"
      "    use()\n"
      "  except ImportError as e:\n"
      "    assert text in str(e), e\n"
      "  else:\n"
      "    raise AssertionError(text)\n"
    )

  def test_patched_as_if_imported_at_module_level(self):
    with mock.patch.object(gpu_runner, "hvd") as hvd, mock.patch.object(gpu_runner, "MPI") as mpi:
      hvd.size.return_value, hvd.rank.return_value = 4, 3
      hvd.local_rank.return_value = 1
      with flagsaver.flagsaver(model_dir="/nowhere", save_checkpoints_steps=3):
        runner = gpu_runner.GPURunner(model_registry.GetParams(RANKS))
      estimator = runner.create_estimator(_no_model_fn)
      runner._barrier()
    mpi.COMM_WORLD.Barrier.assert_called_once_with()
    self.assertEqual(
      estimator.params,
      {**_PARAMS, "accelerator": "horovod", "num_replicas": 4, "hvd_rank": 3},
    )
    config = estimator.config
    self.assertEqual(config.model_dir, "/nowhere")
    self.assertIsNone(config.save_checkpoints_steps)
    self.assertIsNone(config.save_checkpoints_secs)
    session_config = config.session_config
    self.assertTrue(session_config.gpu_options.allow_growth)
    self.assertEqual(session_config.gpu_options.visible_device_list, "1")
    self.assertEqual(
      session_config.graph_options.optimizer_options.global_jit_level,
      tf.compat.v1.OptimizerOptions.ON_1,
    )

  def test_gpus_are_pinned_once(self):
    gpus = ["gpu_0", "gpu_1"]
    with mock.patch.object(tf.config, "list_physical_devices", return_value=gpus), \
        mock.patch.object(tf.config.experimental, "set_memory_growth") as growth, \
        mock.patch.object(tf.config, "set_visible_devices") as visible:  # fmt: skip
      gpu_runner._pin_gpu(1)
      visible.assert_called_once_with("gpu_1", "GPU")
      self.assertEqual([call.args for call in growth.call_args_list], [(g, True) for g in gpus])
      with self.assertRaisesRegex(ValueError, "local rank 2 has no GPU: there are 2"):
        gpu_runner._pin_gpu(2)


class HorovodTest(RunnerTestCase):
  """Two ranks as processes of this machine."""

  def setUp(self):
    super().setUp()
    rank_processes.require_engine(rank_environment.HOROVOD)

  def _run(self, mode):
    command = [
      "-m",
      "tests.gpu_runner_testing",
      f"--task={RANKS}",
      f"--model_dir={self.model_dir}",
      f"--mode={mode}",
      "--save_checkpoints_steps=3",
    ]
    with rank_processes.RankProcesses(2, command, rank_environment.HOROVOD) as ranks:
      self.assertEqual(ranks.wait(_TIMEOUT_SECS), [0, 0], ranks.report())
      return [ranks.output(rank) for rank in range(2)]

  def test_train_and_eval(self):
    outputs = self._run("train_and_eval")

    for rank, output in enumerate(outputs):
      params = {**_PARAMS, "accelerator": "horovod", "num_replicas": 2, "hvd_rank": rank}
      self.assertIn(f"model_train {params}", output)
    self.assertIn("model_eval None", outputs[1])
    scalars = read_scalars(self.eval_dir)
    self.assertEqual(scalars["global_step"], {4: [4.0], 6: [6.0]})
    # The start of the first rank, and the mean of the gradients 1 and 2 in every step.
    self.assertEqual(self._weight(6), 1 - 1.5 * 6 * LEARNING_RATE)
    self.assertEqual(scalars["loss"][6], [1 - 1.5 * 6 * LEARNING_RATE] * 2)
    # One rank writes summaries: two files of the same second would have one name.
    losses = read_scalars(self.model_dir)["loss"]
    self.assertTrue(all(len(values) == 1 for values in losses.values()), losses)

  def test_train_then_eval(self):
    self._run("train")
    self.assertEqual(self._weight(6), 1 - 1.5 * 6 * LEARNING_RATE)

    outputs = self._run("eval")
    self.assertIn("model_eval None", outputs[1])
    self.assertEqual(read_scalars(self.eval_dir)["global_step"], {6: [6.0]})


if __name__ == "__main__":
  unittest.main()
