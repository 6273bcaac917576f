"""Arithmetic and conditions in configuration files and layout filters, without running code."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

_MAX_LENGTH = 1000
_BINARY = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
  ast.FloorDiv: operator.floordiv,
  ast.Mod: operator.mod,
}
_UNARY: dict[type, Callable[[Any], Any]] = {
  ast.UAdd: operator.pos,
  ast.USub: operator.neg,
  ast.Not: operator.not_,
}
_COMPARE = {
  ast.Eq: operator.eq,
  ast.NotEq: operator.ne,
  ast.Lt: operator.lt,
  ast.LtE: operator.le,
  ast.Gt: operator.gt,
  ast.GtE: operator.ge,
}


def evaluate(text: str, names: Mapping[str, float] | None = None) -> float | bool:
  """Returns the value of an expression of numbers.

  It may use `+ - * / // %`, comparisons, `and`, `or`, `not`, parentheses and the given names. There
  are no calls, attributes, strings or powers: the text may come from anybody.

  Args:
    text: the expression, such as `i % 3 == 0` or `60 * 1000`.
    names: values by name.

  Raises:
    ValueError: it is not such an expression, or cannot be computed.
  """
  if len(text) > _MAX_LENGTH:
    raise ValueError(f"the expression has {len(text)} characters, want at most {_MAX_LENGTH}")
  try:
    tree = ast.parse(text.strip(), mode="eval")
    return _value(tree.body, names or {})
  except _NotAllowedError as error:
    raise ValueError(f"{text!r} is no arithmetic or comparison: {error}") from None
  except (SyntaxError, RecursionError, MemoryError, ArithmeticError, ValueError) as error:
    raise ValueError(f"cannot compute {text!r}: {error}") from None


class _NotAllowedError(Exception):
  pass


def _value(node: ast.AST, names: Mapping[str, float]) -> Any:
  if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
    return node.value
  if isinstance(node, ast.Name):
    if node.id not in names:
      raise _NotAllowedError(f"{node.id!r} is not one of the names {sorted(names)}")
    return names[node.id]
  if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
    return _BINARY[type(node.op)](_value(node.left, names), _value(node.right, names))
  if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
    return _UNARY[type(node.op)](_value(node.operand, names))
  if isinstance(node, ast.BoolOp):
    # As in Python, what follows a decided condition is not computed.
    for operand in node.values:
      value = _value(operand, names)
      if bool(value) == isinstance(node.op, ast.Or):
        return value
    return value
  if isinstance(node, ast.Compare) and all(type(op) in _COMPARE for op in node.ops):
    left = _value(node.left, names)
    for op, operand in zip(node.ops, node.comparators):
      right = _value(operand, names)
      if not _COMPARE[type(op)](left, right):
        return False
      left = right
    return True
  raise _NotAllowedError(f"{type(node).__name__} is not allowed")
