"""Promise: whichever process of real-time training is killed, no action is lost, no request fails.

The demo with all its kills, which takes minutes: `make soak`.
"""

import os
import re
import subprocess
import sys
import unittest


@unittest.skipUnless(os.environ.get("MONOLITH_SOAK") == "1", "runs in `make soak`")
class RealtimeDemoTest(unittest.TestCase):
  def test_kills_lose_no_action_and_fail_no_request(self):
    done = subprocess.run(
      [sys.executable, "-m", "monolith.realtime.demo", "--seconds=20"],
      capture_output=True, text=True, timeout=1800,
    )  # fmt: skip

    # How fast it was is for the reader of the table; a busy machine fails no test.
    lines = dict(re.findall(r"^(\w.*?)  +.*?(ok|MISSED)$", done.stdout, re.MULTILINE))
    for promise in (
      "actions lost",
      "requests that failed",
      "replicas bit-equal to training",
      "AUC, fresh against never synced",
    ):
      self.assertEqual(lines.get(promise), "ok", done.stdout + done.stderr)


if __name__ == "__main__":
  unittest.main()
