"""Runs an agent: `python -m monolith.agent_service.agent --conf agent.conf`."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from absl import logging

from monolith.agent_service import serving_protos
from monolith.agent_service.agent_base import AgentBase
from monolith.agent_service.agent_service import LOOPBACK
from monolith.agent_service.agent_v1 import AgentV1
from monolith.agent_service.agent_v3 import AgentV3
from monolith.agent_service.utils import AgentConfig

_POLL_SECS = 0.5
_PORTS = tuple(["PORT", *(f"PORT{i}" for i in range(2, 11))])


def make_parser() -> argparse.ArgumentParser:
  """Returns the parser of the command line."""
  parser = argparse.ArgumentParser(prog="agent", description=__doc__, allow_abbrev=False)
  parser.add_argument("--conf", required=True, help="the configuration file")
  parser.add_argument("--tfs_log", help="file for the output of servers; this output by default")
  parser.add_argument("--host", help="address of this host for others; found by default")
  parser.add_argument("--agent_host", default=LOOPBACK, help="where the agent's service listens")
  parser.add_argument("--dense_index", type=int, help="which of several dense services this is")
  return parser


def make_agent(config: AgentConfig, options: argparse.Namespace) -> AgentBase:
  """Returns the agent of a configuration's version."""
  kind = AgentV3 if config.agent_version == 3 else AgentV1
  return kind(config, options.tfs_log, options.host, options.agent_host)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs until SIGTERM or SIGINT, or until a server ends; returns the exit status."""
  options = make_parser().parse_args(argv)
  try:
    config = AgentConfig.from_file(options.conf)
  except (OSError, ValueError, AssertionError) as error:
    print(f"agent: {options.conf}: {error}", file=sys.stderr)
    return 2
  several = config.deploy_type == "dense" and config.dense_alone and config.dense_service_num > 1
  if several and options.dense_index is None:
    return _run_several(config, list(sys.argv[1:] if argv is None else argv))
  if options.dense_index is not None and config.replica_id != -1:
    config.replica_id = (config.replica_id or 0) * config.dense_service_num + options.dense_index
  serving_protos.load_without_tensorflow()
  try:
    agent = make_agent(config, options)
  except ValueError as error:
    print(f"agent: {options.conf}: {error}", file=sys.stderr)
    return 2
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: agent.request_stop())
  try:
    agent.start()
    agent.wait_for_termination()
  except Exception as error:
    logging.error("The agent ends: %s", error)
    agent.stop()
    return 1
  return 0


def _run_several(config: AgentConfig, argv: list[str]) -> int:
  """Runs an agent per dense service; when one ends, all do."""
  agents = []
  for i in range(config.dense_service_num):
    # The ports of the environment are those of the first.
    environment = {k: v for k, v in os.environ.items() if i == 0 or k not in _PORTS}
    command = [sys.executable, "-m", "monolith.agent_service.agent", *argv, f"--dense_index={i}"]
    agents.append(subprocess.Popen(command, env=environment))
  stopping = False

  def stop(*_: object) -> None:
    nonlocal stopping
    stopping = True

  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, stop)
  while not stopping and all(agent.poll() is None for agent in agents):
    time.sleep(_POLL_SECS)
  for agent in agents:
    if agent.poll() is None:
      agent.terminate()
  statuses = [agent.wait() for agent in agents]
  return 0 if stopping else max(1, *statuses)


if __name__ == "__main__":
  sys.exit(main())
