"""Names the kinds of serving processes."""

from __future__ import annotations

import enum


class DeployType(str, enum.Enum):
  """Names the part of a model that a serving process hosts; equal to its string in any case.

  Raises:
    AssertionError: another string is given.
  """

  PS = "ps"
  ENTRY = "entry"
  DENSE = "dense"
  MIXED = "mixed"
  UNIFIED = "unified"

  @classmethod
  def _missing_(cls, value: object) -> DeployType:
    for kind in cls:
      if isinstance(value, str) and value.lower() == kind.value:
        return kind
    raise AssertionError(f"deploy_type is {value!r}, want one of {[k.value for k in cls]}")

  def __eq__(self, other: object) -> bool:
    return isinstance(other, str) and str(other).lower() == self.value

  def __ne__(self, other: object) -> bool:
    return not self == other

  def __hash__(self) -> int:
    return hash(self.value)

  def __str__(self) -> str:
    return self.value

  def compat_server_type(self, server_type: str | None = None) -> str:
    """Returns the kind of server that is meant in a process of this type.

    Args:
      server_type: `ps`, `entry` or `dense`; needed only where one process has several.

    Raises:
      RuntimeError: the process has several and none is given.
      AssertionError: the process hosts another kind.
    """
    if self is DeployType.MIXED:
      if server_type is None:
        raise RuntimeError("a mixed process has several servers: say which one is meant")
      return str(server_type).lower()
    assert (
      server_type is None or self == server_type
    ), f"server_type is {server_type!r}, but the process hosts {self.value!r}"
    return self.value
