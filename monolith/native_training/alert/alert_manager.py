"""Alerts on training. No alerting backend is shipped: there is no manager, and callers ask first.

manager = get_default_alert_manager()
if manager:
  manager.add_rules(proto)
"""

from __future__ import annotations

from absl import flags

flags.DEFINE_string("monolith_alert_proto", "", "The rules: an AlertProto in text format.")


def get_default_alert_manager() -> None:
  """Returns None: this library has no alert manager."""
  return None
