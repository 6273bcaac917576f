"""Goals for the speed of training, by cores and sizes, and whether a run reaches them."""

from __future__ import annotations

from collections.abc import Mapping

# Cores, features and batch -> role -> peer -> of its examples per second.
_RATIOS: dict[tuple[int, int, int], dict[str, dict[str, float]]] = {
  (2, 26, 4096): {"local": {"keras": 3.5, "tuned_keras": 2.2}},
  (2, 7, 512): {"local": {"keras": 1.5}},
  (16, 26, 4096): {"local": {"tuned_keras": 2.5}, "monolith_keras": {"tuned_keras": 2.0}},
}
# Reached with either.
_RATES = {(16, 26, 4096): {"local": 2.0e6}}
# Cores -> of local training's own examples per second on one core.
_SCALING = {16: 8.0}
# Servers and workers, beside local training on the same cores.
_SHARES = {"1+1": 0.8, "4+4": 0.7}


def judge(
  cores: int, features: int, batch: int, rates: Mapping[str, float], one_core: float | None
) -> list[str]:
  """Returns a line for each goal that what was measured can be held to.

  Args:
    cores: that all had.
    features: of an example.
    batch: examples of a batch.
    rates: role -> examples per second; a role may have more words after a comma.
    one_core: those of local training on one core, if they were measured in this run.
  """
  size = (cores, features, batch)
  lines = []
  for name, rate in rates.items():
    role = name.partition(",")[0]
    for peer, wanted in _RATIOS.get(size, {}).get(role, {}).items():
      if peer not in rates:
        continue
      enough = _RATES.get(size, {}).get(role)
      instead = "" if enough is None else f" or {enough:,.0f} examples/s"
      reached = rate >= wanted * rates[peer] or (enough is not None and rate >= enough)
      lines.append(
        f"{name}: {rate / rates[peer]:.2f} of {peer}, want {wanted}{instead}{_mark(reached)}"
      )
    if role == "local" and cores in _SCALING and one_core:
      wanted = _SCALING[cores]
      reached = rate >= wanted * one_core
      lines.append(f"{name}: {rate / one_core:.1f} of one core, want {wanted}{_mark(reached)}")
  return lines


def judge_job(job: str, share: float) -> str:
  """Returns what is wanted of a job of servers and workers, "" if nothing is.

  Args:
    job: "N+M" servers and workers.
    share: its examples per second beside those of local training.
  """
  wanted = _SHARES.get(job)
  return "" if wanted is None else f", want {wanted}{_mark(share >= wanted)}"


def _mark(reached: bool) -> str:
  return "" if reached else "  BELOW"
