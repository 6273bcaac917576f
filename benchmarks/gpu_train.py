"""A whole training step on a GPU: ours through the driver and in PyTorch, FBGEMM, and Keras.

  python benchmarks/gpu_train.py [--batch_size 4096 16384 65536] [--systems driver torch fbgemm]
  python benchmarks/gpu_train.py --torch_python python3.12 --tensorflow_python .venv/bin/python

26 features with ids of a Zipf law over 4M each, dimension 64, one id in each, and a dense tower of
512, 256 and 1, as in `gpu_train_process.py`. All processes live at the same time and train in turn,
a round each. What this machine lacks (PyTorch, FBGEMM, TensorFlow, a GPU for it) is left out with a
line that says so.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

import gpu_train_data

FOLDER = pathlib.Path(__file__).resolve().parent
# Role -> what it is, and which Python has it.
SYSTEMS = {
  "driver": ("Monolith, TensorFlow driver, 26 tables", "tensorflow"),
  "driver_ahead": ("the same, looking up a step ahead", "tensorflow"),
  "keras": ("tf.keras, 26 Embedding(4M, 64)", "tensorflow"),
  "torch": ("Monolith, PyTorch, 26 tables", "torch"),
  "torch_one": ("Monolith, PyTorch, one table", "torch"),
  "fbgemm": ("FBGEMM, exact Adagrad, 26 tables", "torch"),
  "dense": ("PyTorch, the dense tower alone", "torch"),
}


class Process:
  """A child that trains in rounds."""

  def __init__(self, role: str, python: str, folder: str, arguments: list[str]):
    self.role = role
    self.seconds: list[float] = []
    self.problem = ""
    self._log = open(os.path.join(folder, f"{role}.log"), "w+")
    self._process = subprocess.Popen(
      [python, FOLDER / "gpu_train_process.py", role, folder, *arguments],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=self._log,
      text=True,
    )

  def answer(self) -> str | None:
    """Returns what the child says next; `None` where it has ended, and `problem` says why."""
    assert self._process.stdout is not None
    line = self._process.stdout.readline()
    if line:
      return line.strip()
    self._log.seek(0)
    lines = [text for text in self._log.read().splitlines() if text.strip()]
    self.problem = lines[-1] if lines else f"ended with status {self._process.wait()}"
    return None

  def run_round(self) -> None:
    """Trains one round."""
    assert self._process.stdin is not None
    print("", file=self._process.stdin, flush=True)
    said = self.answer()
    if said is not None:
      self.seconds.append(float(said))

  def stop(self) -> None:
    self._process.kill()
    self._process.wait()
    self._log.close()


def measure(options: argparse.Namespace, batch_size: int) -> dict[str, float]:
  """Returns the median seconds of a step of each system that ran."""
  pythons = {"torch": options.torch_python, "tensorflow": options.tensorflow_python}
  running: list[Process] = []
  arguments = [f"--batch_size={batch_size}", f"--steps={options.steps}"]
  with tempfile.TemporaryDirectory() as folder:
    gpu_train_data.write(folder, batch_size)
    try:
      for role in options.systems:
        library = SYSTEMS[role][1]
        graphed = ["--graph_dense"] if options.graph_dense and library == "torch" else []
        running.append(Process(role, pythons[library], folder, [*arguments, *graphed]))
      for process in running:
        process.answer()
      for _ in range(options.rounds):
        for process in running:
          if not process.problem:
            process.run_round()
    finally:
      for process in running:
        process.stop()
  for process in running:
    if process.problem:
      print(f"{process.role} is left out: {process.problem}", flush=True)
    else:
      rounds = [1e3 * seconds / options.steps for seconds in process.seconds]
      print(
        f"batches of {batch_size:,}: {process.role:<12} {statistics.median(rounds):6.2f} ms "
        f"a step, {min(rounds):.2f} to {max(rounds):.2f} in {len(rounds)} rounds",
        flush=True,
      )
  return {
    process.role: statistics.median(process.seconds) / options.steps
    for process in running
    if process.seconds and not process.problem
  }


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--batch_size", type=int, nargs="+", default=[4096, 16384, 65536])
  parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
  parser.add_argument("--rounds", type=int, default=9)
  parser.add_argument("--steps", type=int, default=20, help="of a round")
  parser.add_argument(
    "--graph_dense",
    action="store_true",
    help="capture dense layers and loss by torch.cuda.make_graphed_callables, for all in PyTorch",
  )
  parser.add_argument("--torch_python", default=sys.executable, help="a Python with PyTorch")
  parser.add_argument("--tensorflow_python", default=sys.executable, help="one with TensorFlow")
  options = parser.parse_args()
  steps = {size: measure(options, size) for size in options.batch_size}
  print(f"{'ms of a step, batches of':<42}" + "".join(f"{size:>10,}" for size in steps))
  for role in options.systems:
    cells = [steps[size].get(role) for size in steps]
    texts = ["-" if cell is None else f"{1e3 * cell:.2f}" for cell in cells]
    print(f"{SYSTEMS[role][0]:<42}" + "".join(f"{text:>10}" for text in texts))
  for ours, theirs in (
    ("driver", "keras"),
    ("torch", "fbgemm"),
    ("torch_one", "fbgemm"),
    ("dense", "fbgemm"),
  ):
    both = [(steps[size].get(ours), steps[size].get(theirs)) for size in steps]
    if any(None not in pair for pair in both):
      texts = ["-" if None in pair else f"{pair[1] / pair[0]:.2f}" for pair in both]
      print(f"{f'{ours}: times as fast as {theirs}':<42}" + "".join(f"{t:>10}" for t in texts))
  return 0 if any(steps.values()) else 1


if __name__ == "__main__":
  sys.exit(main())
