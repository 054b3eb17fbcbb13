"""Float64 references of the published formulas, written apart from the code.

Plain and slow on purpose: lists of whole vectors, one symbol one variable.
"""

import numpy as np
import scipy.stats


def weight(tokens, steps, staleness, kind, decay):
  """Quantity times quality times the decay."""
  damping = {
    "exponential": decay**staleness,
    "hyperbolic": 1 / (1 + (1 / decay - 1) * staleness),
    "none": 1,
  }
  return tokens**2 / steps * damping[kind]


def merge(vectors, weights, method):
  """The formulas as the papers have them; weights are whole numbers."""
  vectors = [np.asarray(v, np.float64).ravel() for v in vectors]
  shares = np.asarray(weights, np.float64) / sum(weights)
  mean = sum(w * v for w, v in zip(shares, vectors, strict=True))
  if method == "mean":
    return mean
  if method == "rda":
    norms = [np.linalg.norm(v) for v in vectors]
    units = [v / n if n else v for v, n in zip(vectors, norms, strict=True)]
    direction = sum(w * u for w, u in zip(shares, units, strict=True))
    length = np.linalg.norm(direction)
    return mean if length < 1e-3 else shares @ norms * direction / length
  # A whole weight is as many islands; four of each, so that none is cut.
  many = np.repeat(vectors, 4 * np.array(weights, int), axis=0)
  if method == "median":
    return np.median(many, axis=0)
  assert method == "trimmed_mean"
  return scipy.stats.trim_mean(many, 0.25)


def clipped(vectors, times):
  """What is longer than so many times the median (but 0) is shortened to it."""
  norms = [np.linalg.norm(v) for v in vectors]
  longest = times * np.median([n for n in norms if n] or [1.0])
  return [
    v * longest / n if n > longest else v
    for v, n in zip(vectors, norms, strict=True)
  ]


def outer_steps(kind, gradients, *, rate, mu=0.0, n=1, c=0.0):
  """Yields theta after every outer step from zero.

  Delayed Nesterov is algorithm 3 of Asynchronous Local-SGD, arXiv 2401.09135.
  """
  theta = buffer = total = np.zeros(np.shape(gradients[0]))
  for t, g in enumerate(np.asarray(gradients, np.float64), start=1):
    if kind == "sgd":
      step = g
    elif kind == "nesterov":
      buffer = mu * buffer + g
      step = g + mu * buffer
    elif kind == "heavy_ball":
      buffer = mu * buffer + g
      step = buffer
    elif kind == "ema":
      buffer = mu * buffer + (1 - mu) * g
      step = buffer
    else:
      assert kind == "delayed_nesterov"
      total = total + g
      if t % n:
        step = c * mu * buffer + g / n
      else:
        buffer, total = mu * buffer + total / n, 0 * total
        step = (1 - c * n + c) * mu * buffer + g / n
    theta = theta - rate * step
    yield theta
