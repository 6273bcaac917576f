"""Training steps on other numbers of cores, of other sizes, and where their time goes.

`train.py` starts it. A process on some of the cores has threads as if the machine had no others.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile

import train_goals
import train_process
from train_rounds import Process, write_data

_CHOICES = ("local", "monolith_keras", "keras", "tuned_keras")
_ROLES = ("local", "monolith_keras", "tuned_keras")


def add_arguments(parser: argparse.ArgumentParser) -> None:
  group = parser.add_argument_group("other numbers of cores, and where the time goes")
  group.add_argument(
    "--where", action="store_true", help="print where the time of a step goes, on all cores"
  )
  group.add_argument("--cores", type=int, nargs="+", help="how many cores to train on, in turn")
  group.add_argument("--roles", nargs="+", choices=_CHOICES, default=_ROLES)
  group.add_argument(
    "--in-flight", type=int, nargs="*", default=[], help="steps at the same time, of local training"
  )
  group.add_argument(
    "--jobs", nargs="*", default=[], metavar="N+M", help="jobs of N servers and M workers, too"
  )
  group.add_argument(
    "--steps-per-execution", type=int, default=1, help="steps between callbacks, of all Keras roles"
  )
  group.add_argument("--features", type=int, default=train_process.Data.features)
  group.add_argument("--batch", type=int, default=train_process.Data.batch)


def measure(args: argparse.Namespace) -> None:
  """Prints examples per second, and where the time goes if `args.where`."""
  available = sorted(os.sched_getaffinity(0))
  counts = args.cores or [len(available)]
  if max(counts) > len(available):
    raise ValueError(f"--cores has {max(counts)}, the machine has {len(available)}")
  with tempfile.TemporaryDirectory() as folder:
    data = train_process.Data(folder, args.features, args.batch)
    write_data(data)
    one_core = None
    for count in counts if args.cores or args.where else ():
      rates = _measure_on(available, count, data, args)
      if count == 1:
        one_core = rates.get("local")
      lines = train_goals.judge(count, data.features, data.batch, rates, one_core)
      if lines:
        print("\n".join(lines), flush=True)
    for job in args.jobs:
      _measure_job(job, ",".join(map(str, available[: max(counts)])), data, args)


def _measure_on(
  available: list[int], count: int, data: train_process.Data, args: argparse.Namespace
) -> dict[str, float]:
  """Prints examples per second of all roles, and returns them."""
  processes: list[Process] = []
  try:
    roles = [("local", number) for number in args.in_flight] + [(role, 1) for role in args.roles]
    for i, (role, in_flight) in enumerate(roles):
      # Those on few cores start beside each other.
      first = i * count if (i + 1) * count <= len(available) else 0
      cores = ",".join(map(str, available[first : first + count]))
      processes.append(
        Process(
          role,
          data,
          args.steps,
          cores,
          f"{role}_{in_flight}_{count}",
          in_flight,
          [f"--steps_per_execution={args.steps_per_execution}"],
        )
      )
    for process in processes:
      process.answer()
    rates, seconds = {}, {}
    for _ in range(args.rounds):
      for process in processes:
        process.run_round()
    for process in processes:
      seconds[process.role] = statistics.median(process.seconds)
      rates[process.role] = args.steps * data.batch / seconds[process.role]
    for process in processes:
      ratio = rates[process.role] / rates[processes[-1].role]
      print(
        f"{count:>2} cores, {data.features} features, batch {data.batch}: {process.role:<15}"
        f"{rates[process.role]:>11,.0f} examples/s, {ratio:.2f} of {processes[-1].role}; "
        f"{_usage(process, args.rounds * args.steps)}",
        flush=True,
      )
    if args.where:
      for process in processes:
        _print_parts(process, count, seconds[process.role], args.steps)
    return rates
  finally:
    for process in processes:
      process.stop()


def _measure_job(job: str, cores: str, data: train_process.Data, args: argparse.Namespace) -> None:
  """Prints the examples per second of all workers together, and of local training in turn."""
  num_ps, num_workers = map(int, job.split("+"))
  options = [f"--num_ps={num_ps}", f"--num_workers={num_workers}"]

  def start(role: str, index: int) -> Process:
    return Process(role, data, args.steps, cores, job, options=[f"--index={index}", *options])

  local = Process("local", data, args.steps, cores, f"local_{job}")
  processes = [local]
  try:
    processes += [start("ps", i) for i in range(num_ps)]
    workers = [start("worker", i) for i in range(num_workers)]
    processes += workers
    for process in (local, *workers):
      process.answer()
    seconds = []
    for _ in range(args.rounds):
      local.run_round()
      for worker in workers:
        worker.begin_round()
      seconds.append(max(float(worker.answer()) for worker in workers))
    alone = args.steps * data.batch / statistics.median(local.seconds)
    together = args.steps * data.batch * num_workers / statistics.median(seconds)
    print(
      f"{num_ps} servers, {num_workers} workers: {together:,.0f} examples/s, "
      f"{together / alone:.2f} of local training's {alone:,.0f}"
      f"{train_goals.judge_job(job, together / alone)}",
      flush=True,
    )
  finally:
    for process in processes:
      process.stop()


def _usage(process: Process, steps: int) -> str:
  used = process.usages[0]
  for usage in process.usages[1:]:
    used += usage
  kernel = used.kernel / max(used.cpu, 0.01)
  return (
    f"{used.cpu / sum(process.seconds):.1f} cores busy, {kernel:.0%} in the kernel, "
    f"{used.faults / steps:,.0f} page faults a step"
  )


def _print_parts(process: Process, count: int, seconds: float, steps: int) -> None:
  parts = process.run_traced(steps, count)
  print(
    f"\n{process.role} on {count} cores, a step of {1e3 * seconds / steps:.2f} ms, "
    f"{parts.step_ms:.2f} under the profiler, {parts.cores:.1f} threads running"
  )
  print("\n".join(parts.lines()), flush=True)
