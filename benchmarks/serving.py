"""Speed of a model server on loopback, with tables and with a keras SavedModel in the same server.

  python benchmarks/serving.py [--requests 2000] [--clients 4] [--skip-servers]

Ten features with one id each out of 10,000, dimension 16, a tower of 64 and 1. Requests are made
beforehand and answers are not parsed, so that the client costs little; it shares the machine's
cores with the server nevertheless.

What the server adds to a bare session is measured with h2load of nghttp2 (Debian: nghttp2-client),
a client in C: the one in Python takes longer than the server does. What it adds has a line of its
own.

"per core": the server may use one core, and h2load asks from another one. The server's CPU time per
request is what the kernel counts for its process; it says more than requests per second where
others use the machine.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence

import graph_layers
import grpc
import numpy as np
import tensorflow as tf
from absl import flags
from tensorflow_serving.apis import predict_pb2

from monolith.native_training import graph_estimator

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))

from monolith.base_model import (  # noqa: E402
  AdagradOptimizer,
  EstimatorSpec,
  MonolithModel,
  get_sigmoid_loss_and_pred,
)
from monolith.estimator import Estimator, RunConfig  # noqa: E402
from monolith.serving import model_server  # noqa: E402
from monolith.serving.servable import Servable  # noqa: E402
from tests.serving import server_process  # noqa: E402

NAMES = [f"f{i}" for i in range(10)]
NUM_IDS = 10_000
DIM = 16
HIDDEN = 64
PREDICT = "/tensorflow.serving.PredictionService/Predict"
# Goals in ms: p99 at batch 1, and what the server may add to a bare session.
GOAL_P99, GOAL_OVERHEAD = 2.0, 0.3


class Model(MonolithModel):
  """The model with tables."""

  def input_fn(self, mode):
    rng = np.random.default_rng(1)
    size = 20_000
    data = {name: rng.integers(NUM_IDS, size=size) for name in NAMES}
    label = rng.integers(2, size=size).astype(np.float32)

    def to_features(ids, label):
      return {**{name: _to_ragged(ids[name]) for name in NAMES}, "label": label}

    return tf.data.Dataset.from_tensor_slices((data, label)).batch(1000).map(to_features)

  def model_fn(self, features, mode):
    for name in NAMES:
      self.create_embedding_feature_column(name)
    vectors = self.lookup_embedding_slice(NAMES, "vec", DIM, optimizer=AdagradOptimizer(0.1))
    hidden = graph_layers.dense(tf.concat(vectors, 1), HIDDEN, activation=tf.nn.relu)
    logits = graph_layers.dense(hidden, 1)[:, 0]
    label = features.get("label")
    loss, pred = get_sigmoid_loss_and_pred("p", logits, label, None, mode=mode)
    return EstimatorSpec(label, pred, "p", loss, tf.compat.v1.train.AdagradOptimizer(0.01))

  def serving_input_receiver_fn(self):
    inputs = {name: tf.compat.v1.placeholder(tf.int64, [None], name=name) for name in NAMES}
    features = {name: _to_ragged(ids) for name, ids in inputs.items()}
    return graph_estimator.ServingInputReceiver(features, inputs)


def _to_ragged(ids: tf.Tensor) -> tf.RaggedTensor:
  return tf.RaggedTensor.from_tensor(ids[:, None])


def export(folder: str, num_ps: int) -> None:
  """Trains a little and exports to `<folder>/exported_models`."""
  config = RunConfig(is_local=True, model_dir=folder, num_ps=num_ps).to_runner_config()
  config.model_name = "m"
  estimator = Estimator(Model(), config)
  estimator.train(steps=20)
  estimator.export_saved_model()


_KERAS = """
import sys
import tensorflow as tf
names, num_ids, dim, hidden = sys.argv[2].split(","), *map(int, sys.argv[3:6])
inputs = {name: tf.keras.Input([], dtype=tf.int64, name=name) for name in names}
vectors = [tf.keras.layers.Embedding(num_ids, dim)(x) for x in inputs.values()]
x = tf.keras.layers.Dense(hidden, "relu")(tf.keras.layers.Concatenate()(vectors))
tf.keras.Model(inputs, tf.keras.layers.Dense(1, "sigmoid")(x)).save(sys.argv[1] + "/1")
"""


def make_request(model: str, batch: int) -> bytes:
  """Returns a serialized request with random ids."""
  request = predict_pb2.PredictRequest()
  request.model_spec.name = model
  for name in NAMES:
    ids = np.random.default_rng(2).integers(NUM_IDS, size=batch)
    request.inputs[name].CopyFrom(tf.make_tensor_proto(ids, tf.int64))
  return request.SerializeToString()


def latencies(server: server_process.ServerProcess, request: bytes, count: int) -> list[float]:
  """Returns the seconds of requests made one after the other."""
  call = server.channel.unary_unary(PREDICT)
  seconds = []
  for _ in range(count + 50):
    start = time.perf_counter()
    call(request)
    seconds.append(time.perf_counter() - start)
  return seconds[50:]


def throughput(
  server: server_process.ServerProcess, request: bytes, count: int, clients: int
) -> float:
  """Returns requests per second of several clients at once."""

  def ask() -> None:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(server.address, options=options) as channel:
      call = channel.unary_unary(PREDICT)
      for _ in range(count // clients):
        call(request)

  threads = [threading.Thread(target=ask) for _ in range(clients)]
  start = time.perf_counter()
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  return count // clients * clients / (time.perf_counter() - start)


def show_per_core(folder: str, config: str, models: Sequence[str], requests: int) -> None:
  """Prints what a server on one core does when a client on another one asks."""
  cores = sorted(os.sched_getaffinity(0))
  if len(cores) < 2 or shutil.which("h2load") is None:
    print("per core: left out, it takes two cores and h2load")
    return
  os.sched_setaffinity(0, cores[:1])
  try:
    server = server_process.ServerProcess(f"--model_config_file={config}")
  finally:
    os.sched_setaffinity(0, cores)
  with server:
    server.wait_until_listening()
    for model in models:
      server.wait_until_available(model)
    for model in models:
      body = _write_body(folder, make_request(model, 1))
      _h2load(server, body, cores[1], 500, 1)
      _, seconds, _ = _h2load(server, body, cores[1], requests, 1)
      rate, _, cpu = _h2load(server, body, cores[1], 2 * requests, 4)
      show(f"{model}, batch 1, per core, client in C", seconds, rate)
      print(f"{'':<40} {1e6 * cpu:.0f} us of CPU time per request")


def _h2load(
  server: server_process.ServerProcess, body: str, core: int, count: int, clients: int
) -> tuple[float, list[float], float]:
  """Returns requests per second, the seconds of each, and the server's CPU seconds per request."""
  log = body + ".log"
  if os.path.exists(log):
    os.remove(log)
  before = _cpu_seconds(server.process.pid)
  answer = subprocess.run(
    ["taskset", "-c", str(core), "h2load", "-t", "1", "-n", str(count), "-c", str(clients)]
    + ["-H", "content-type: application/grpc", "-H", "te: trailers", "-d", body]
    + [f"--log-file={log}", f"http://{server.address}{PREDICT}"],
    check=True,
    capture_output=True,
    text=True,
  ).stdout
  cpu = (_cpu_seconds(server.process.pid) - before) / count
  if f"{count} 2xx" not in answer:
    raise RuntimeError(f"h2load says: {answer}")
  (rate,) = re.findall(r"([0-9.]+) req/s", answer)
  lines = pathlib.Path(log).read_text().splitlines()
  return float(rate), [int(line.split()[2]) * 1e-6 for line in lines], cpu


def _cpu_seconds(pid: int) -> float:
  fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
  return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def session_seconds(path: str, count: int) -> float:
  """Returns the median seconds of a bare session, batch 1."""
  servable = Servable(path)
  signature = servable.signature("")
  inputs = {name: np.array([3], np.int64) for name in NAMES}
  seconds = []
  for _ in range(count + 50):
    start = time.perf_counter()
    servable.run(signature, inputs)
    seconds.append(time.perf_counter() - start)
  servable.close()
  return statistics.median(seconds[50:])


def show(name: str, seconds: list[float], rate: float) -> tuple[float, float]:
  """Prints a line; returns p50 and p99 in ms."""
  p50, p99 = (float(np.percentile(seconds, p)) * 1e3 for p in (50, 99))
  print(f"{name:<40} p50 {p50:7.2f} ms   p99 {p99:7.2f} ms   {rate:9.0f} requests/s", flush=True)
  return p50, p99


def newest(base: str) -> str:
  """Returns the folder of the newest version."""
  return os.path.join(base, max(os.listdir(base), key=lambda n: int(n) if n.isdigit() else -1))


def measure(folder: str, requests: int, clients: int, with_servers: bool) -> None:
  """Prints all lines."""
  config = os.path.join(folder, "models.config")
  bases = {"m": f"{folder}/one/exported_models/entry", "keras": f"{folder}/keras"}
  _write_config(config, bases)
  with server_process.ServerProcess(f"--model_config_file={config}") as server:
    server.wait_until_listening()
    results = {}
    in_c: list[float] = []
    for model in bases:
      server.wait_until_available(model)
    for model in bases:
      single = make_request(model, 1)
      results[model] = show(
        f"{model}, batch 1",
        latencies(server, single, requests),
        throughput(server, single, requests, clients),
      )
      hundred = make_request(model, 100)
      seconds = latencies(server, hundred, requests // 4)
      rate = throughput(server, hundred, requests // 4, clients)
      show(f"{model}, batch 100", seconds, rate)
      print(f"{'':<40} {100 * rate:.0f} examples/s")
    if shutil.which("h2load"):
      body = _write_body(folder, make_request("m", 1))
      cores = sorted(os.sched_getaffinity(0))
      _h2load(server, body, cores[-1], 500, 1)
      rate, in_c, _ = _h2load(server, body, cores[-1], requests, 1)
      show("m, batch 1, client in C", in_c, rate)
  p50, p99 = results["m"]
  bare = session_seconds(newest(bases["m"]), requests) * 1e3
  _show_overhead(bare, p50, in_c)
  print(f"p99 {p99:.2f} ms, goal {GOAL_P99} ms{'' if p99 <= GOAL_P99 else '  MISSED'}")
  print(f"keras / ours, p50: {results['keras'][0] / p50:.2f}")
  show_per_core(folder, config, list(bases), requests)
  if with_servers:
    _measure_entry(folder, requests, clients)


def _show_overhead(bare: float, p50: float, in_c: list[float]) -> None:
  """Prints what is between a bare session and an answer; p50 is that of the client in Python."""
  print(f"bare session {bare:.3f} ms")
  if not in_c:
    print(f"server and client in Python add {p50 - bare:.3f} ms (their shares: install h2load)")
    return
  added = statistics.median(in_c) * 1e3 - bare
  verdict = f" (goal {GOAL_OVERHEAD} ms{'' if added <= GOAL_OVERHEAD else '  MISSED'})"
  print(f"the server adds {added:.3f} ms{verdict}, sockets and a client in C included")
  print(f"the client in Python adds {p50 - bare - added:.3f} ms to that")


def _write_body(folder: str, request: bytes) -> str:
  """Writes a request as h2load sends it; returns the file's name."""
  body = os.path.join(folder, "body")
  pathlib.Path(body).write_bytes(b"\0" + struct.pack(">I", len(request)) + request)
  return body


def _measure_entry(folder: str, requests: int, clients: int) -> None:
  exported = f"{folder}/two/exported_models"
  servers = []
  try:
    for i in range(2):
      flags_of_ps = (f"--model_name=ps_{i}", f"--model_base_path={exported}/ps_{i}")
      servers.append(server_process.ServerProcess(*flags_of_ps))
    addresses = ",".join(f"ps_{i}={server.address}" for i, server in enumerate(servers))
    entry = server_process.ServerProcess(
      "--model_name=m", f"--model_base_path={exported}/entry", f"--ps_address={addresses}"
    )
    servers.append(entry)
    for server, name in zip(servers, ("ps_0", "ps_1", "m")):
      server.wait_until_listening().wait_until_available(name)
    for batch in (1, 100):
      request = make_request("m", batch)
      count = requests // 2
      rate = throughput(entry, request, count, clients)
      show(f"entry -> 2 ps, batch {batch}", latencies(entry, request, count), rate)
      if batch > 1:
        print(f"{'':<40} {batch * rate:.0f} examples/s")
  finally:
    for server in servers:
      server.stop()


def _write_config(path: str, bases: dict[str, str]) -> None:
  models = "".join(
    f'config {{ name: "{name}" base_path: "{base}" model_platform: "tensorflow" }}'
    for name, base in bases.items()
  )
  pathlib.Path(path).write_text(f"model_config_list {{ {models} }}")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--requests", type=int, default=2000)
  parser.add_argument("--clients", type=int, default=4)
  parser.add_argument("--skip-servers", action="store_true", help="leave entry -> 2 ps out")
  arguments = parser.parse_args()
  try:
    model_server.find_binary()
  except FileNotFoundError as error:
    sys.exit(f"error: {error}")
  tf.compat.v1.disable_eager_execution()
  tf.get_logger().setLevel("ERROR")
  flags.FLAGS(sys.argv[:1])
  with tempfile.TemporaryDirectory() as folder:
    subprocess.run(
      [sys.executable, "-c", _KERAS, f"{folder}/keras", ",".join(NAMES)]
      + [str(NUM_IDS), str(DIM), str(HIDDEN)],
      check=True,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
    )
    export(f"{folder}/one", 0)
    if not arguments.skip_servers:
      export(f"{folder}/two", 2)
    measure(folder, arguments.requests, arguments.clients, not arguments.skip_servers)


if __name__ == "__main__":
  main()
