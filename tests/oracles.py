"""Float64 references of the published formulas, written apart from the code.

Plain and slow on purpose: lists of whole vectors, one symbol one variable.
"""

import numpy as np


def weight(tokens, steps, staleness, kind, decay):
  """Quantity times quality times the decay."""
  damping = {
    "exponential": decay**staleness,
    "hyperbolic": 1 / (1 + (1 / decay - 1) * staleness),
    "none": 1,
  }
  return tokens**2 / steps * damping[kind]


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
