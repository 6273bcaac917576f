"""Lists of input files: date ranges of a folder, and patterns with `{DATE(..)}` and `{INT(..)}`."""

from __future__ import annotations

import datetime
import itertools
import os
import re

import tensorflow as tf
from absl import logging

_RANGE = re.compile(r"\{(DATE|INT)\((\d+),(\d+)\)\}")


def gen_patterns(
  input_path: str | None = None,
  start_date: str | None = None,
  start_hour: int | None = None,
  end_date: str | None = None,
  end_hour: int | None = None,
  is_hourly: bool = False,
  wildcard: str = "*",
) -> list[str]:
  """Returns one pattern per day, `path/YYYYMMDD/*`, or per hour, `path/YYYYMMDD/HH*`.

  Args:
    input_path: the folder.
    start_date: the first day, `YYYYMMDD`.
    start_hour: the first hour, if hourly.
    end_date: the day after the last one, by default today.
    end_hour: the hour after the last one, if hourly.
    is_hourly: one pattern per hour.
    wildcard: what follows the day or the hour.

  Returns:
    Patterns in the order of time, none without path or first day.
  """
  if not input_path or not start_date:
    return []
  begin = datetime.datetime.strptime(str(start_date), "%Y%m%d")
  if end_date:
    end = datetime.datetime.strptime(str(end_date), "%Y%m%d")
  else:
    end = datetime.datetime.combine(datetime.date.today(), datetime.time())
  if is_hourly:
    begin += datetime.timedelta(hours=int(start_hour or 0))
    end += datetime.timedelta(hours=int(end_hour or 0))
  step = datetime.timedelta(hours=1) if is_hourly else datetime.timedelta(days=1)
  patterns = []
  while begin < end:
    day = begin.strftime("%Y%m%d")
    name = begin.strftime("%H") + wildcard if is_hourly else wildcard
    patterns.append(os.path.join(input_path, day, name))
    begin += step
  return patterns


def _expand_range(kind: str, first: str, last: str) -> list[str]:
  if kind == "INT":
    return [str(number) for number in range(int(first), int(last) + 1)]
  if len(first) != len(last) or len(first) not in (8, 10):
    raise ValueError(f"DATE({first},{last}): want YYYYMMDD or YYYYMMDDHH, both alike")
  text_format = "%Y%m%d" if len(first) == 8 else "%Y%m%d%H"
  step = datetime.timedelta(days=1) if len(first) == 8 else datetime.timedelta(hours=1)
  date = datetime.datetime.strptime(first, text_format)
  end = datetime.datetime.strptime(last, text_format)
  dates = []
  while date <= end:
    dates.append(date.strftime(text_format))
    date += step
  return dates


def expand_pattern(pattern: str) -> list[str]:
  """Expands `{DATE(a,b)}` and `{INT(a,b)}`, both ends included, to all combinations."""
  pattern = "".join(pattern.split())
  pieces = _RANGE.split(pattern)
  # split() gives text, then kind, first and last of a range, then text again.
  ranges = [_expand_range(*pieces[i : i + 3]) for i in range(1, len(pieces), 4)]
  texts = pieces[::4]
  expanded = []
  for values in itertools.product(*ranges):
    parts = [texts[0]]
    for value, text in zip(values, texts[1:]):
      parts += [value, text]
    expanded.append("".join(parts))
  return expanded


def match_patterns(patterns: str) -> list[str]:
  """Expands a comma-free pattern and drops what matches no file.

  Raises:
    AssertionError: no pattern matches.
  """
  matching = []
  for pattern in expand_pattern(patterns):
    if tf.io.gfile.glob(pattern):
      matching.append(pattern)
    else:
      logging.warning("no file matches %s", pattern)
  assert matching, "no match files"
  return matching
