"""Turns discovered addresses into a TensorFlow cluster, and remembers the chosen servers.

A worker sees itself, the chief and the parameter servers; the other workers appear under fake
addresses, because TF_CONFIG wants the right number of them and no worker talks to another.

With redundant parameter servers the first ones to register win. The chief writes its choice to
`<model_dir>/ps_cluster_dir/<uuid>`, so that workers and later attempts use the same servers. The
file is replaced atomically: a reader sees the old list or the new one, never a part.
"""

import os
import time
from typing import Any, Optional

import tensorflow as tf
from absl import logging

from monolith.native_training import net_utils
from monolith.native_training.metric import cli
from monolith.native_training.service_discovery import ServiceDiscovery

_MCLI = cli.get_cli("monolith.containers")

_RETRY_SECS = 5


def emit_store(name: str, value: float, tagkv: Optional[dict[str, str]] = None) -> None:
  _MCLI.emit_store(name, value, tagkv)


def _cluster_query_failure_handler() -> None:
  """Waits before the next try; tests replace it."""
  time.sleep(_RETRY_SECS)


def generate_session_config(
  cluster_and_task: Optional[tuple[dict[str, list[str]], dict[str, Any]]] = None,
) -> tf.compat.v1.ConfigProto:
  """Returns the session configuration of one task of a cluster.

  Args:
    cluster_and_task: job name → addresses, and `{"type": job, "index": int}`; None for a session
      of this process alone.

  Returns:
    A configuration that hands the cluster to the servers and sees no other worker's devices.

  Raises:
    ValueError: if the task is not in the cluster.
  """
  if cluster_and_task is None:
    return tf.compat.v1.ConfigProto(allow_soft_placement=True)
  cluster, task = cluster_and_task
  job, index = task["type"], task["index"]
  if not 0 <= index < len(cluster.get(job, ())):
    raise ValueError(f"task {job}:{index} is not in the cluster {cluster}")

  device_filters = ["/job:ps", "/job:chief"]
  if job != "chief":
    device_filters.append(f"/job:{job}/task:{index}")
  config = tf.compat.v1.ConfigProto(
    cluster_def=tf.train.ClusterSpec(cluster).as_cluster_def(),
    device_filters=device_filters,
    allow_soft_placement=True,
    share_cluster_devices_in_session=True,
  )
  config.experimental.share_session_state_in_clusterspec_propagation = True
  # Grappler breaks on ragged inputs.
  config.graph_options.rewrite_options.disable_meta_optimizer = True
  return config


def get_training_cluster(
  discovery: ServiceDiscovery,
  worker_addr: str,
  index: int,
  num_redundant_ps: int,
  num_required_ps: int,
  num_workers: int,
  model_dir: str,
  uuid: Optional[str] = None,
  model_name: Optional[str] = None,
  cluster_type: str = "stable",
) -> tuple[dict[str, list[str]], dict[str, Any]]:
  """Waits until chief and parameter servers are known.

  Args:
    discovery: where they register.
    worker_addr: this worker's own address.
    index: this worker's index; 0 is the chief.
    num_redundant_ps: servers started beyond the required ones.
    num_required_ps: servers that training uses.
    num_workers: workers, the chief included.
    model_dir: where the chosen servers are remembered.
    uuid: the job's id.
    model_name: tag `deep_insight_name` of the metrics; None emits none.
    cluster_type: tag of the metrics.

  Returns:
    The cluster, and this task in it: `chief` 0, or `worker` with `index - 1`.

  Raises:
    ValueError: if `index` is not below `num_workers`.
    AssertionError: if the servers did not become known in time.
  """
  if not 0 <= index < num_workers:
    raise ValueError(f"index is {index}, want one of {num_workers} workers")
  ps_file = _get_ps_cluster_file_name(model_dir, uuid)
  # A sparse job list is not expressible in TF_CONFIG, hence placeholders for the other workers.
  workers = [f"0.0.0.0:{i}" for i in range(1, num_workers)]
  if index == 0:
    ps_addrs = []
    if num_redundant_ps:
      ps_addrs = _fetch_ps_cluster_from_file(ps_file, timeout=0, num_addrs=num_required_ps)
    if len(ps_addrs) != num_required_ps:
      ps_addrs = _query_ps_cluster(discovery, num_required_ps, model_name, cluster_type)
      if num_redundant_ps:
        _save_ps_cluster_to_file(ps_file, ps_addrs)
    chief_addr = worker_addr
    task = {"type": "chief", "index": 0}
  else:
    chief_addr = _query_chief_addr(discovery)
    workers[index - 1] = worker_addr
    if num_redundant_ps:
      ps_addrs = _fetch_ps_cluster_from_file(ps_file, num_addrs=num_required_ps)
    else:
      ps_addrs = _query_ps_cluster(discovery, num_required_ps, model_name, cluster_type)
    task = {"type": "worker", "index": index - 1}
  assert (
    len(ps_addrs) == num_required_ps
  ), f"got {len(ps_addrs)} parameter servers {ps_addrs}, want {num_required_ps}"
  return {"chief": [chief_addr], "worker": workers, "ps": ps_addrs}, task


def _query_chief_addr(discovery: ServiceDiscovery) -> str:
  while True:
    workers = discovery.query("worker")
    if 0 in workers:
      return workers[0]
    logging.info("The chief has not registered yet, found workers %s", sorted(workers))
    _cluster_query_failure_handler()


def _query_ps_cluster(
  discovery: ServiceDiscovery,
  num_required_ps: int,
  model_name: Optional[str] = None,
  cluster_type: str = "stable",
) -> list[str]:
  """Waits for enough servers; returns those of the lowest indices, in order."""
  while True:
    ps_addrs = discovery.query("ps")
    if model_name:
      num_left_ps = max(num_required_ps - len(ps_addrs), 0)
      tagkv = {"deep_insight_name": model_name, "cluster_type": cluster_type}
      emit_store("num_left_ps", num_left_ps, tagkv)
      emit_store("job_waiting", int(num_left_ps > 0), tagkv)
    logging.info("Found %d of %d parameter servers", len(ps_addrs), num_required_ps)
    if len(ps_addrs) >= num_required_ps:
      return [ps_addrs[i] for i in sorted(ps_addrs)][:num_required_ps]
    _cluster_query_failure_handler()


def _save_ps_cluster_to_file(file_name: str, ps_addrs: list[str]) -> None:
  """Replaces the list in one step; creates the folder where it is missing."""
  tf.io.gfile.makedirs(os.path.dirname(file_name))
  tmp_name = file_name + "-tmp"
  with tf.io.gfile.GFile(tmp_name, "w") as f:
    f.write(",".join(ps_addrs))
  tf.io.gfile.rename(tmp_name, file_name, overwrite=True)


def _fetch_ps_cluster_from_file(
  file_name: str, timeout: float = 1800, num_addrs: Optional[int] = None
) -> list[str]:
  """Reads the list, waiting for it to appear.

  Args:
    file_name: the file.
    timeout: how many seconds to keep trying; 0 reads once.
    num_addrs: how many addresses a complete list has, where that is known.

  Returns:
    The addresses, or an empty list when there was no complete one in time.
  """
  deadline = time.monotonic() + timeout
  while True:
    try:
      with tf.io.gfile.GFile(file_name) as f:
        ps_addrs = _parse_ps_addrs(f.read())
      if num_addrs is None or len(ps_addrs) == num_addrs:
        return ps_addrs
      logging.info("%s has %d addresses, want %d", file_name, len(ps_addrs), num_addrs)
    except tf.errors.OpError as e:
      logging.info("cannot read %s yet: %s", file_name, e.message)
    except ValueError as e:
      logging.warning("%s is not complete: %s", file_name, e)
    if time.monotonic() >= deadline:
      return []
    _cluster_query_failure_handler()


def _parse_ps_addrs(text: str) -> list[str]:
  """Splits at commas; a list that another tool left half written is a ValueError."""
  ps_addrs = text.strip().split(",")
  if not all(ps_addrs):
    raise ValueError(f"an address is empty in {text!r}")
  if any(":" in addr for addr in ps_addrs):
    for addr in ps_addrs:
      net_utils.split_host_and_port(addr)
  return ps_addrs


def _get_ps_cluster_file_name(model_dir: str, uuid: Optional[str]) -> str:
  return os.path.join(model_dir, "ps_cluster_dir", uuid or "ps_info")
