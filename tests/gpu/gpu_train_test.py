"""`benchmarks/gpu_train_process.py`: what can be tried without a GPU."""

import pathlib
import subprocess
import sys
import unittest

_BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


class GpuTrainTest(unittest.TestCase):
  def test_keras_has_an_optimizer_that_steps_rows_alone(self):
    program = (
      "import gpu_train_process\n"
      "try:\n  tf = gpu_train_process.import_with_keras_2()\n"
      "except RuntimeError as error:\n  print(error)\n"
      "else:\n  print(type(tf.keras.optimizers.legacy.Adagrad(0.1)).__name__)\n"
    )
    done = subprocess.run(
      [sys.executable, "-c", program], cwd=_BENCHMARKS, capture_output=True, text=True
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertRegex(done.stdout, "^Adagrad$|pip install tf_keras")


if __name__ == "__main__":
  unittest.main()
