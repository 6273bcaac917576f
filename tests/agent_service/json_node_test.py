"""Values of ZooKeeper nodes: what is written is read again, and what others wrote is checked."""

from __future__ import annotations

import dataclasses
import unittest

from monolith.agent_service.json_node import JsonNode


@dataclasses.dataclass
class _Node(JsonNode):
  address: str = ""
  port: int = 0
  archon: str | None = None


class JsonNodeTest(unittest.TestCase):
  def test_round_trip(self):
    node = _Node("[::1]:80", 7, "ä")

    self.assertEqual(_Node.deserialize(node.serialize()), node)

  def test_other_versions_write_more_or_less(self):
    self.assertEqual(_Node.from_json('{"port": 3, "new": [1]}'), _Node(port=3))
    self.assertEqual(_Node.from_json('{"archon": null}'), _Node())

  def test_what_is_no_node_is_named(self):
    for text, message in (
      ("[1]", r"'\[1\]' is no JSON object"),
      ('{"address": 5}', "address is 5, want str"),
      ('{"port": "80"}', "port is '80', want int"),
      ('{"address": null}', "address is None, want str"),
      ('{"archon": 1}', r"archon is 1, want str \| None"),
      ("{", "Expecting property name"),
    ):
      with self.assertRaisesRegex(ValueError, message):
        _Node.from_json(text)


if __name__ == "__main__":
  unittest.main()
