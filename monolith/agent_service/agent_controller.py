"""Declares exported models, and publishes them to layouts.

agent_controller --cmd decl --bzid demo --export_base /exports/m
agent_controller --cmd pub --bzid demo --layout mixed --model_name 'm:ps_*'
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from kazoo.exceptions import KazooException
from kazoo.handlers.threading import KazooTimeoutError

from monolith.agent_service import backends, serving_protos

_REMOTE_PREDICT = "TfServingRemotePredict"


def find_model_name(export_base: str) -> str | None:
  """Returns the model's name that the newest entry graph calls its servers by.

  Args:
    export_base: the folder with the exported sub graphs.

  Returns:
    The part before the colon of `model_name` of its remote predict nodes; `None` without any.

  Raises:
    FileNotFoundError: there is no version of an entry.
    ValueError: it is no SavedModel, or calls servers of several models.
  """
  from google.protobuf import message
  from tensorflow.core.protobuf import saved_model_pb2

  folder = os.path.join(export_base, "entry")
  versions = [int(v) for v in os.listdir(folder) if v.isascii() and v.isdigit()]
  if not versions:
    raise FileNotFoundError(f"{folder} has no version")
  path = os.path.join(folder, str(max(versions)), "saved_model.pb")
  with open(path, "rb") as file:
    try:
      saved_model = saved_model_pb2.SavedModel.FromString(file.read())
    except message.DecodeError as error:
      raise ValueError(f"{path} is no SavedModel: {error}") from error
  found = {
    node.attr["model_name"].s.decode().partition(":")[0]
    for node in _nodes(saved_model)
    if node.op == _REMOTE_PREDICT
  }
  if len(found) > 1:
    raise ValueError(f"{path} calls servers of several models: {sorted(found)}")
  return found.pop() if found else None


def declare_saved_model(
  backend: backends.ZKBackend,
  export_base: str,
  model_name: str | None = None,
  overwrite: bool = False,
  arch: str = "entry_ps",
) -> str:
  """Declares every sub graph of an export.

  Args:
    backend: where to declare them.
    export_base: the folder with a folder per sub graph.
    model_name: the model's name; that of the entry graph by default.
    overwrite: whether to replace what is declared.
    arch: `entry_ps`, an entry that calls parameter servers.

  Returns:
    The model's name.

  Raises:
    ValueError: the name is not known, or not the graph's; a sub graph is declared already; another
      `arch`. Nothing is declared then.
    OSError: the export cannot be read.
  """
  if arch != "entry_ps":
    raise ValueError(f"arch is {arch!r}, want entry_ps")
  in_graph = find_model_name(export_base)
  if model_name is None and in_graph is None:
    raise ValueError(f"the entry of {export_base} calls no server, so give --model_name")
  if model_name is not None and in_graph not in (None, model_name):
    raise ValueError(f"model_name is {model_name!r}, but the entry calls servers of {in_graph!r}")
  name = str(model_name or in_graph)
  sub_graphs = sorted(
    entry.name for entry in os.scandir(export_base) if entry.is_dir(follow_symlinks=True)
  )
  declared = {model.sub_graph for model in backend.list_saved_models(name)}
  if not overwrite and declared.intersection(sub_graphs):
    raise ValueError(f"{name} has {sorted(declared)} already, say --overwrite=1 to replace them")
  for sub_graph in sub_graphs:
    config = backends.SavedModelDeployConfig(
      os.path.abspath(os.path.join(export_base, sub_graph)), "latest"
    )
    backend.decl_saved_model(backends.SavedModel(name, sub_graph), config, overwrite)
  return name


def map_model_to_layout(
  backend: backends.ZKBackend, model_pattern: str, layout_path: str, action: str
) -> list[backends.SavedModel]:
  """Publishes sub graphs to a layout, or takes them from it.

  Args:
    backend: where models are declared.
    model_pattern: `<model>:<glob of sub graphs>`; all sub graphs without a colon.
    layout_path: the layout's node.
    action: `pub` or `unpub`.

  Returns:
    The sub graphs.

  Raises:
    ValueError: no sub graph matches, or another action.
  """
  model_name, _, pattern = model_pattern.partition(":")
  pattern = pattern or "*"
  if action == "pub":
    known = [model.sub_graph for model in backend.list_saved_models(model_name)]
  elif action == "unpub":
    # A published sub graph may no longer be declared.
    published = [name.rpartition(":") for name in backend.list_layout(layout_path)]
    known = [sub_graph for name, _, sub_graph in published if name == model_name]
  else:
    raise ValueError(f"action is {action!r}, want pub or unpub")
  chosen = [
    backends.SavedModel(model_name, sub_graph)
    for sub_graph in known
    if fnmatch.fnmatchcase(sub_graph, pattern)
  ]
  if not chosen:
    raise ValueError(f"{model_pattern!r} matches none of {known} of model {model_name!r}")
  for saved_model in chosen:
    if action == "pub":
      backend.add_to_layout(layout_path, saved_model)
    else:
      backend.remove_from_layout(layout_path, saved_model)
  return chosen


def make_parser() -> argparse.ArgumentParser:
  """Returns the parser of the command line."""
  parser = argparse.ArgumentParser(
    prog="agent_controller",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument("--cmd", required=True, choices=["decl", "pub", "unpub", "bzid_info"])
  parser.add_argument("--bzid", default="test", help="business the models belong to")
  parser.add_argument("--zk_servers", help="comma-joined addresses of ZooKeeper")
  parser.add_argument("--export_base", help="decl: folder with a folder per sub graph")
  parser.add_argument("--model_name", help="decl: the model; pub, unpub: <model>:<glob>")
  parser.add_argument("--layout", help="pub, unpub: the layout, absolute or below its business")
  parser.add_argument("--overwrite", type=int, choices=[0, 1], default=0, help="decl: replace")
  parser.add_argument("--arch", default="entry_ps", help="decl: entry_ps")
  return parser


def run(options: argparse.Namespace, backend: backends.ZKBackend) -> Any:
  """Runs one command with a started backend, and returns what to print as JSON.

  Raises:
    ValueError, OSError: as `declare_saved_model` and `map_model_to_layout`.
  """
  if options.cmd == "bzid_info":
    return backend.bzid_info()
  if options.cmd == "decl":
    if not options.export_base:
      raise ValueError("decl needs --export_base")
    name = declare_saved_model(
      backend, options.export_base, options.model_name, bool(options.overwrite), options.arch
    )
    return [str(model) for model in backend.list_saved_models(name)]
  if not options.model_name or not options.layout:
    raise ValueError(f"{options.cmd} needs --model_name and --layout")
  layout = options.layout
  path = layout if layout.startswith("/") else f"/{options.bzid}/layouts/{layout}"
  return [str(m) for m in map_model_to_layout(backend, options.model_name, path, options.cmd)]


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit status."""
  options = make_parser().parse_args(argv)
  serving_protos.load_without_tensorflow()
  try:
    with backends.connect(options.bzid, options.zk_servers) as backend:
      print(json.dumps(run(options, backend), indent=2))
  except (ValueError, OSError, KazooException, KazooTimeoutError) as error:
    print(f"agent_controller: {error!r}", file=sys.stderr)
    return 1
  return 0


def _nodes(saved_model: Any) -> Iterator[Any]:
  for meta_graph in saved_model.meta_graphs:
    yield from meta_graph.graph_def.node
    for function in meta_graph.graph_def.library.function:
      yield from function.node_def


if __name__ == "__main__":
  sys.exit(main())
