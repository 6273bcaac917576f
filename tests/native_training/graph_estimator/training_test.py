"""`train_and_evaluate` in one process, and in the roles of a cluster, each a process of its own."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

import tensorflow as tf
from absl.testing import absltest

from monolith.native_training import graph_estimator
from tests import free_ports
from tests.native_training.graph_estimator import role_process

tf.compat.v1.disable_eager_execution()

_TIMEOUT = 300


class _Exporter:
  """Notes what it is called with, as those of `tf.estimator` are."""

  name = "notes"

  def __init__(self):
    self.calls = []

  def export(self, estimator, export_path, checkpoint_path, eval_result, is_the_final_export):
    step = int(eval_result["global_step"])
    self.calls.append((os.path.basename(checkpoint_path), step, is_the_final_export))
    return export_path


class TrainingTestCase(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.model_dir = pathlib.Path(tempfile.mkdtemp(dir=os.environ["TEST_TMPDIR"]), "model")

  def environment_of(self, task_type, cluster):
    task = {"type": task_type, "index": 0}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}

  def create(self):
    config = graph_estimator.RunConfig(save_checkpoints_steps=10)
    return graph_estimator.Estimator(role_process.model_fn, str(self.model_dir), config)


class AloneTest(TrainingTestCase):
  def _run(self, throttle_secs, max_steps=25):
    exporter = _Exporter()
    metrics, exports = graph_estimator.train_and_evaluate(
      self.create(),
      graph_estimator.TrainSpec(role_process.input_fn, max_steps=max_steps),
      graph_estimator.EvalSpec(
        role_process.eval_input_fn, exporters=exporter, throttle_secs=throttle_secs
      ),
    )
    return metrics, exports, exporter.calls

  def test_checkpoints_are_evaluated_as_they_are_written(self):
    metrics, exports, calls = self._run(throttle_secs=0)

    self.assertEqual((metrics["global_step"], metrics["loss"]), (25, 25.0))
    self.assertEqual(exports, [str(self.model_dir / "export/notes")])
    self.assertEqual(
      calls,
      [("model.ckpt-10", 10, False), ("model.ckpt-20", 20, False), ("model.ckpt-25", 25, True)],
    )

  def test_last_one_alone_if_they_come_too_often(self):
    _, _, calls = self._run(throttle_secs=3600)

    self.assertEqual(calls, [("model.ckpt-25", 25, True)])

  def test_nothing_is_left_to_do(self):
    self._run(throttle_secs=0)

    self.assertEqual(self._run(throttle_secs=0), (None, [], []))

  def test_numbers_are_checked(self):
    with self.assertRaisesRegex(ValueError, "max_steps is 0"):
      graph_estimator.TrainSpec(role_process.input_fn, max_steps=0)
    with self.assertRaisesRegex(ValueError, "steps is 0"):
      graph_estimator.EvalSpec(role_process.input_fn, steps=0)
    with self.assertRaisesRegex(ValueError, "throttle_secs is -1"):
      graph_estimator.EvalSpec(role_process.input_fn, throttle_secs=-1)


class EvaluatorTest(TrainingTestCase):
  def _evaluate(self, eval_input_fn):
    with mock.patch.dict(os.environ, self.environment_of("evaluator", {"chief": ["localhost:1"]})):
      evaluator = self.create()
    return graph_estimator.train_and_evaluate(
      evaluator,
      graph_estimator.TrainSpec(role_process.input_fn, max_steps=20),
      graph_estimator.EvalSpec(eval_input_fn, start_delay_secs=0, throttle_secs=0),
    )

  def test_a_checkpoint_that_is_deleted_meanwhile_is_passed_over(self):
    trainer = self.create()
    trainer.train(role_process.input_fn, max_steps=10)

    def eval_input_fn():
      if not (self.model_dir / "model.ckpt-20.index").exists():
        with tf.Graph().as_default():
          trainer.train(role_process.input_fn, max_steps=20)
        for path in self.model_dir.glob("model.ckpt-10.*"):
          path.unlink()
      return role_process.eval_input_fn()

    with self.assertLogs("absl", "WARNING") as logs:
      metrics, _ = self._evaluate(eval_input_fn)

    self.assertEqual(metrics["global_step"], 20)
    self.assertIn("model.ckpt-10 was deleted while it was evaluated", "".join(logs.output))

  def test_other_errors_end_it(self):
    self.create().train(role_process.input_fn, max_steps=10)

    def eval_input_fn():
      raise ValueError("no such data")

    with self.assertRaisesRegex(ValueError, "no such data"):
      self._evaluate(eval_input_fn)


class RolesTest(TrainingTestCase):
  def test_server_and_evaluator_do_not_train(self):
    cluster = {"chief": ["localhost:1"], "ps": ["localhost:2"]}
    for role in ("ps", "evaluator"):
      with mock.patch.dict(os.environ, self.environment_of(role, cluster)):
        estimator = self.create()
      with self.assertRaisesRegex(ValueError, f"is a '{role}'.* call train_and_evaluate"):
        estimator.train(role_process.input_fn, max_steps=1)

  def test_a_master_evaluates_what_it_trains_on_servers(self):
    processes, logs = self._start(("ps", "master"), ("ps", "master"))

    code = processes["master"].wait(_TIMEOUT)
    logs["master"].seek(0)
    text = logs["master"].read()
    self.assertEqual(code, 0, text[-4000:])
    metrics = json.loads(text.splitlines()[-1].removesuffix(" []"))
    self.assertEqual(metrics, {"global_step": role_process.MAX_STEPS, "loss": 20.0})

  def _start(self, cluster_roles, roles):
    cluster = {role: [f"localhost:{free_ports.get_free_port()}"] for role in cluster_roles}
    processes, logs = {}, {}
    for role in roles:
      logs[role] = open(self.model_dir.parent / f"{role}.log", "w+")
      self.addCleanup(logs[role].close)
      processes[role] = subprocess.Popen(
        [sys.executable, "-m", role_process.__name__, str(self.model_dir)],
        env={**os.environ, **self.environment_of(role, cluster)},
        stdout=logs[role],
        stderr=subprocess.STDOUT,
      )
      self.addCleanup(processes[role].wait)
      self.addCleanup(processes[role].kill)
    return processes, logs

  def test_each_process_has_its_part(self):
    processes, logs = self._start(("chief", "worker", "ps"), ("ps", "chief", "worker", "evaluator"))

    printed = {}
    for role in ("chief", "worker", "evaluator"):
      code = processes[role].wait(_TIMEOUT)
      logs[role].seek(0)
      text = logs[role].read()
      self.assertEqual(code, 0, f"{role}: {text[-4000:]}")
      printed[role] = text.splitlines()[-1]

    self.assertIsNone(processes["ps"].poll())  # Serves until it is ended.
    self.assertEqual(printed["chief"], "{} []")
    self.assertEqual(printed["worker"], "{} []")
    metrics = json.loads(printed["evaluator"].removesuffix(" []"))
    self.assertGreaterEqual(metrics["global_step"], role_process.MAX_STEPS)
    # The weight lives on the server, and both train it; one may be between its two updates.
    self.assertAlmostEqual(metrics["loss"], metrics["global_step"], delta=2)
    for role in ("chief", "worker"):
      steps = int((self.model_dir.parent / f"steps_of_{role}").read_text())
      self.assertGreater(steps, 0)
      self.assertLess(steps, role_process.MAX_STEPS if role == "chief" else float("inf"))


if __name__ == "__main__":
  absltest.main()
