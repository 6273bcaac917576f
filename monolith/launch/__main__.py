"""`python -m monolith.launch`: starts the processes of a training run, and watches them."""

from __future__ import annotations

import argparse
import os
import pathlib
import shlex
import shutil
import sys
import tempfile

from monolith.launch import placement, supervisor

_EPILOG = """
Each process gets its TF_CONFIG in the environment, which monolith.keras.train reads. Where a
program takes flags instead, {server_type}, {index}, {num_ps}, {num_workers} and {tf_config} in its
arguments stand for the process's own:

  python -m monolith.launch --num_ps 2 --num_workers 4 train.py \\
      --discovery_type=PRIMUS --tf_config={tf_config} --server_type={server_type} --index={index}

Under srun, and in an Indexed Job of Kubernetes with MONOLITH_SERVICE set, the same command in each
task or pod starts the one process that this one is.
"""


def make_parser() -> argparse.ArgumentParser:
  """Returns the parser of the command line."""
  parser = argparse.ArgumentParser(
    prog="python -m monolith.launch",
    description="Starts a training run of several processes and watches them.",
    epilog=_EPILOG,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("--num_ps", type=int, default=1, help="parameter servers (1)")
  parser.add_argument(
    "--num_workers", type=int, default=1, help="workers, the chief among them (1)"
  )
  parser.add_argument("--hosts", default="", help="comma-separated hosts to start them on by ssh")
  parser.add_argument(
    "--port",
    type=int,
    default=2222,
    help="on several hosts: where the first process of each listens; the others count up (2222)",
  )
  parser.add_argument(
    "--ssh",
    default=shlex.join(supervisor.SSH),
    help=f"the command for --hosts ({shlex.join(supervisor.SSH)}); another one needs limits, too",
  )
  parser.add_argument("--log_dir", default="", help="where logs go (a new temporary folder)")
  parser.add_argument(
    "--max_restarts",
    type=int,
    default=3,
    help="how often a process that fails is started again within an hour (3)",
  )
  parser.add_argument(
    "--grace_seconds",
    type=float,
    default=60,
    help="how long the others may take to end after the chief, and the chief after a signal (60)",
  )
  parser.add_argument(
    "--follow", action="store_true", help="show what all processes print, not a line of progress"
  )
  parser.add_argument("-m", dest="module", action="store_true", help="the program is a module")
  parser.add_argument("program", nargs=argparse.REMAINDER, help="a script and its arguments")
  return parser


def main(arguments: list[str] | None = None) -> int:
  """Runs a job.

  Args:
    arguments: the command line, by default this process's.

  Returns:
    The job's status.
  """
  parser = make_parser()
  given = parser.parse_args(arguments)
  if not given.program:
    parser.error("there is no program to start: name a script, or -m and a module")
  if given.max_restarts < 0 or not given.grace_seconds >= 0:
    parser.error("--max_restarts and --grace_seconds must not be negative")
  if not given.module and not given.hosts and not os.path.isfile(given.program[0]):
    parser.error(f"there is no script {given.program[0]!r}")
  try:
    job, own = _place(given)
    ssh = tuple(shlex.split(given.ssh))
  except ValueError as error:
    parser.error(str(error))
  if given.hosts and not (ssh and shutil.which(ssh[0])):
    parser.error(f"--ssh is {given.ssh!r}, want a program that is installed here")
  log_dir = given.log_dir or tempfile.mkdtemp(prefix="monolith_launch_")
  try:
    os.makedirs(log_dir, exist_ok=True)
  except OSError as error:
    parser.error(f"--log_dir is {log_dir!r}, which cannot be made: {error.strerror}")
  options = supervisor.Options(
    program=(sys.executable, *(["-m"] if given.module else []), *given.program),
    log_dir=pathlib.Path(log_dir),
    ssh=ssh,
    max_restarts=given.max_restarts,
    grace_seconds=given.grace_seconds,
    follow=given.follow,
  )
  print(
    f"[launch] {len(own)} of {len(job.tasks)} processes here, logs in {log_dir}", file=sys.stderr
  )
  return supervisor.Supervisor(job, own, options).run()


def _place(given: argparse.Namespace) -> tuple[placement.Job, tuple[placement.Task, ...]]:
  """Returns the job and the tasks of it that are started here."""
  if given.hosts:
    hosts = [host.strip() for host in given.hosts.split(",")]
    job = placement.on_hosts(hosts, given.num_ps, given.num_workers, given.port)
    return job, job.tasks
  found = placement.own_task(os.environ, given.num_ps, given.num_workers, given.port)
  if found:
    return found[0], (found[1],)
  job = placement.on_this_machine(given.num_ps, given.num_workers)
  return job, job.tasks


if __name__ == "__main__":
  sys.exit(main())
