"""Runs what `docs/serving.md` and `deploy/` say: commands, flags, manifests."""

import json
import pathlib
import re
import shlex
import unittest

import yaml

from monolith.serving import predict, remote_servers
from tests.serving import server_process

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_SERVER = "monolith.serving.model_server"
# https://docs.docker.com/reference/dockerfile, those that we use.
_INSTRUCTIONS = {
  "FROM", "RUN", "WORKDIR", "COPY", "USER", "EXPOSE", "ENV", "ENTRYPOINT", "CMD",
}  # fmt: skip


def _commands():
  text = (_ROOT / "docs/serving.md").read_text()
  for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
    yield from (shlex.split(line) for line in block.splitlines())


def _ps_addresses(flags):
  """Yields what `--ps_address` names, by name of the model."""
  for flag in flags:
    name, _, value = flag.partition("=")
    if name == "--ps_address":
      yield remote_servers.parse_addresses(value)


class DocumentsTest(unittest.TestCase):
  def test_commands_have_flags_that_exist(self):
    servers = [command for command in _commands() if _SERVER in command]
    self.assertGreaterEqual(len(servers), 3)
    for command in servers:
      flags = command[command.index(_SERVER) + 1 :]
      self.assertEqual(server_process.refusal_of(flags), "")
      for servers in _ps_addresses(flags):
        self.assertEqual(set(servers), {"ps_0", "ps_1"})
    scorers = [command for command in _commands() if command[0] == "monolith_predict"]
    self.assertGreaterEqual(len(scorers), 2)
    for command in scorers:
      predict._parse(command[1:])
    for command in _commands():
      if command[0] == "curl":
        json.loads(command[command.index("-d") + 1])

  def test_flags_in_the_table_exist(self):
    text = (_ROOT / "docs/serving.md").read_text()
    known = set(re.findall(r"^  (--\w+)$", server_process.run("--help")[1], re.MULTILINE))
    table = text.partition("## The server")[2].partition("`--help`")[0]
    named = set(re.findall(r"`(--\w+)", table))
    self.assertGreater(len(named), 12)
    self.assertEqual(named - known, set())

  def test_dockerfile(self):
    lines = (_ROOT / "deploy/serving.Dockerfile").read_text().splitlines()
    instructions = [line.split(None, 1) for line in lines if line and not line.startswith("#")]
    self.assertEqual(instructions[0][0], "FROM")
    for name, rest in instructions:
      self.assertIn(name, _INSTRUCTIONS)
      if name in ("ENTRYPOINT", "CMD"):
        words = json.loads(rest)
        self.assertTrue(all(isinstance(word, str) for word in words))
    entry, command = (
      json.loads(rest) for name, rest in instructions if name in ("ENTRYPOINT", "CMD")
    )
    flags = (entry + command)[entry.index(_SERVER) + 1 :]
    self.assertEqual(server_process.refusal_of(flags), "")

  def test_manifests(self):
    seen = set()
    for path in sorted((_ROOT / "deploy/kubernetes").glob("*.yaml")):
      documents = list(yaml.safe_load_all(path.read_text()))
      labels = []
      for document in documents:
        self.assertLessEqual({"apiVersion", "kind", "metadata"}, set(document), path)
        seen.add(document["kind"])
        if document["kind"] in ("Deployment", "StatefulSet"):
          template = document["spec"]["template"]
          labels.append(template["metadata"]["labels"])
          self.assertEqual(document["spec"]["selector"]["matchLabels"], labels[-1])
          self._check_pod(template["spec"])
      for document in documents:
        if document["kind"] == "Service":
          self.assertIn(document["spec"]["selector"], labels)
    self.assertEqual(seen, {"ConfigMap", "Deployment", "Service", "StatefulSet"})

  def _check_pod(self, pod):
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in pod["containers"]:
      self.assertEqual(server_process.refusal_of(container["args"]), "")
      for servers in _ps_addresses(container["args"]):
        self.assertEqual({name: len(found) for name, found in servers.items()},
                         {"ps_0": 2, "ps_1": 2})  # fmt: skip
      ports = {port["containerPort"] for port in container["ports"]}
      for probe in ("readinessProbe", "livenessProbe"):
        target = container[probe].get("grpc") or container[probe]["tcpSocket"]
        self.assertIn(target["port"], ports)
      self.assertLessEqual({mount["name"] for mount in container["volumeMounts"]}, volumes)


if __name__ == "__main__":
  unittest.main()
