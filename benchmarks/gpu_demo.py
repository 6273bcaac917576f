"""Step time of the demo's ranking model with its dense part on a GPU, against the CPU alone.

  python benchmarks/gpu_demo.py [--batch_size 1024 8192] [--num_ratings 300000]

Runs the demo as a user does, one process after the other. Embedding tables are on the CPU either
way, and the dense part is small: the figure says what moving it costs, too. Needs a GPU.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent


def _run(batch_size: int, num_ratings: int, gpu: bool) -> tuple[float, str]:
  """Returns the median time of a step in seconds, and the AUC."""
  environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
  if gpu:
    environment["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
  else:
    environment["CUDA_VISIBLE_DEVICES"] = ""
  with tempfile.TemporaryDirectory() as folder:
    command = [
      *(sys.executable, "-m", "monolith.native_training.demo", f"--model_dir={folder}"),
      *(f"--batch_size={batch_size}", f"--num_ratings={num_ratings}", "--ffm_steps=1"),
      *("--epochs=4", f"--gpu={gpu}"),
    ]
    output = subprocess.run(
      command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout
  ranking = output[output.index("Ranking model") :]
  # The first line has the start in it.
  speeds = [float(text.replace(",", "")) for text in re.findall(r"([\d,]+) examples/s", ranking)]
  auc = re.search(r"Ranking: evaluation AUC ([\d.]+)", ranking)
  assert auc is not None, output
  return batch_size / statistics.median(speeds[1:] or speeds), auc.group(1)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--batch_size", type=int, nargs="+", default=[1024, 8192])
  parser.add_argument("--num_ratings", type=int, default=300_000)
  options = parser.parse_args()
  for batch_size in options.batch_size:
    times = {gpu: _run(batch_size, options.num_ratings, gpu) for gpu in (False, True)}
    (cpu_secs, cpu_auc), (gpu_secs, gpu_auc) = times[False], times[True]
    print(
      f"ranking demo, batch {batch_size:6d}: step {cpu_secs * 1e3:7.2f} ms on the CPU (AUC "
      f"{cpu_auc}), {gpu_secs * 1e3:7.2f} ms with the GPU (AUC {gpu_auc}): "
      f"{cpu_secs / gpu_secs:5.2f} x",
      flush=True,
    )
  return 0


if __name__ == "__main__":
  sys.exit(main())
