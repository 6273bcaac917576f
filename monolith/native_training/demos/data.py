"""Ratings for the demo: generated ones with a planted structure, or MovieLens files.

A dataset is a folder with `train.ratings` and `eval.ratings`, files of fixed-length records:

    user, movie, occupation of the user, three genres of the movie, label: seven int64, -1 for none

The planted structure is: a movie's quality, a user's mood, and how much each occupation likes each
genre. They give the probability that a user likes a movie, and so also the best AUC that any model
can reach on the evaluation set.
"""

from __future__ import annotations

import csv
import json
import os
from typing import NamedTuple

import numpy as np

from monolith.native_training.metric.window_auc import compute_auc

__all__ = [
  "NUM_FIELDS",
  "NUM_GENRES_PER_MOVIE",
  "RECORD_BYTES",
  "RatingsInfo",
  "compute_auc",
  "generate",
  "load",
  "read_labels",
  "read_movielens",
]

NUM_FIELDS = 7
RECORD_BYTES = NUM_FIELDS * 8
NUM_GENRES_PER_MOVIE = 3

_NUM_OCCUPATIONS = 12
_NUM_GENRES = 10
_EVAL_SHARE = 0.1
_LIKED = 4.0
_INFO_FILE = "info.json"


class RatingsInfo(NamedTuple):
  """Describes a dataset.

  Attributes:
    folder: where its files are.
    num_train: ratings to train on.
    num_eval: ratings to evaluate on.
    best_auc: what the planted structure allows on these; `None` for real data.
  """

  folder: str
  num_train: int
  num_eval: int
  best_auc: float | None

  @property
  def train_file(self) -> str:
    return os.path.join(self.folder, "train.ratings")

  @property
  def eval_file(self) -> str:
    return os.path.join(self.folder, "eval.ratings")


def generate(
  folder: str, num_ratings: int, num_users: int = 3000, num_movies: int = 2000, seed: int = 17
) -> RatingsInfo:
  """Generates a dataset, unless the folder holds just that one already.

  Args:
    folder: created if missing.
    num_ratings: in total, of which a tenth is for evaluation.
    num_users: who rate.
    num_movies: that are rated, some far more often than others.
    seed: the same one gives the same data.
  """
  key = {"ratings": num_ratings, "users": num_users, "movies": num_movies, "seed": seed}
  known = _read_info(folder, key)
  if known is not None:
    return known
  rng = np.random.default_rng(seed)
  occupation_of_user = rng.integers(_NUM_OCCUPATIONS, size=num_users)
  genres_of_movie = np.stack(
    [rng.permutation(_NUM_GENRES)[:NUM_GENRES_PER_MOVIE] for _ in range(num_movies)]
  )
  genres_of_movie[rng.random(num_movies) < 0.5, 2] = -1
  genres_of_movie[rng.random(num_movies) < 0.3, 1:] = -1
  mood_of_user = rng.normal(0, 0.5, num_users)
  quality_of_movie = rng.normal(0, 0.7, num_movies)
  taste = rng.normal(0, 1.0, (_NUM_OCCUPATIONS, _NUM_GENRES + 1))
  taste[:, _NUM_GENRES] = 0  # for the genres that a movie does not have

  popularity = 1.0 / np.arange(10, num_movies + 10) ** 0.6
  users = rng.integers(num_users, size=num_ratings)
  movies = rng.choice(num_movies, size=num_ratings, p=popularity / popularity.sum())
  occupations, genres = occupation_of_user[users], genres_of_movie[movies]
  logits = mood_of_user[users] + quality_of_movie[movies]
  logits += taste[occupations[:, None], genres].sum(axis=1)
  probabilities = 1.0 / (1.0 + np.exp(-logits))
  labels = (rng.random(num_ratings) < probabilities).astype(np.int64)
  records = np.column_stack([users, movies, occupations, genres, labels]).astype("<i8")
  num_eval = int(num_ratings * _EVAL_SHARE)
  best_auc = compute_auc(labels[:num_eval], probabilities[:num_eval])
  return _write(folder, key, records, num_eval, best_auc)


def read_movielens(path: str, folder: str, seed: int = 17) -> RatingsInfo:
  """Makes a dataset of a MovieLens file; a rating of 4 and above means liked.

  Args:
    path: a `u.data` file (tab-separated), `ratings.dat` (`::`), or `ratings.csv` with a header.
    folder: where the dataset goes.
    seed: decides on the order.

  Raises:
    ValueError: a line is not `user, movie, rating, ...`, or there are not two of them.
  """
  key = {"path": os.path.abspath(path), "mtime": os.path.getmtime(path), "seed": seed}
  known = _read_info(folder, key)
  if known is not None:
    return known
  rows = []
  with open(path, newline="") as f:
    first = f.readline()
    f.seek(0)
    delimiter = "\t" if "\t" in first else ","
    lines = (line.replace("::", ",") for line in f)
    for number, fields in enumerate(csv.reader(lines, delimiter=delimiter), 1):
      if not fields or (number == 1 and not fields[0].strip().isdigit()):
        continue
      try:
        rows.append((int(fields[0]), int(fields[1]), float(fields[2]) >= _LIKED))
      except (IndexError, ValueError):
        raise ValueError(
          f"line {number} of {path} is {fields}, want user, movie and rating"
        ) from None
  if len(rows) < 2:
    raise ValueError(f"{path} has {len(rows)} ratings, want one to train on and one to evaluate")
  ratings = np.array(rows, "<i8")
  nothing = np.full((len(rows), 1 + NUM_GENRES_PER_MOVIE), -1, "<i8")
  records = np.column_stack([ratings[:, :2], nothing, ratings[:, 2]])
  records = records[np.random.default_rng(seed).permutation(len(records))]
  return _write(folder, key, records, max(1, int(len(records) * _EVAL_SHARE)), None)


def read_labels(info: RatingsInfo) -> np.ndarray:
  """Returns the labels of the evaluation set."""
  return np.fromfile(info.eval_file, "<i8").reshape(-1, NUM_FIELDS)[:, -1]


def load(folder: str) -> RatingsInfo:
  """Returns a dataset that was made before."""
  with open(os.path.join(folder, _INFO_FILE)) as f:
    info = json.load(f)
  return RatingsInfo(folder, info["num_train"], info["num_eval"], info["best_auc"])


def _read_info(folder: str, key: dict) -> RatingsInfo | None:
  path = os.path.join(folder, _INFO_FILE)
  if not os.path.exists(path):
    return None
  with open(path) as f:
    return load(folder) if json.load(f)["key"] == key else None


def _write(
  folder: str, key: dict, records: np.ndarray, num_eval: int, best_auc: float | None
) -> RatingsInfo:
  os.makedirs(folder, exist_ok=True)
  info = RatingsInfo(folder, len(records) - num_eval, num_eval, best_auc)
  np.ascontiguousarray(records[:num_eval]).tofile(info.eval_file)
  np.ascontiguousarray(records[num_eval:]).tofile(info.train_file)
  with open(os.path.join(folder, _INFO_FILE), "w") as f:
    json.dump({"key": key, **{k: v for k, v in info._asdict().items() if k != "folder"}}, f)
  return info
