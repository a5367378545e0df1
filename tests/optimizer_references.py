"""Optimizers in NumPy, one parameter after the other, as their papers have them.

They share nothing with the library: each keeps plain arrays and is written with explicit loops.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Arrays = dict[str, np.ndarray]
GradAt = Callable[[Arrays], Arrays]


class Reference:
    """`step` changes the parameters in place; `eval_params` are what evaluation uses."""

    def __init__(self, **numbers):
        self.h, self.t, self.s = numbers, 0, {}

    def slot(self, name: str, like: np.ndarray, key: str) -> np.ndarray:
        return self.s.setdefault((key, name), np.zeros_like(like))

    def step(self, params: Arrays, grads: Arrays, grad_at: GradAt) -> None:
        self.t += 1
        for n in params:
            params[n] = self.one(n, params[n], grads[n])

    def one(self, n: str, p: np.ndarray, g: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def eval_params(self, params: Arrays) -> Arrays:
        return params

    def moments(self, n: str, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Bias-corrected m̂ and v̂."""
        b1, b2 = self.h["betas"]
        m, v = self.slot(n, g, "m"), self.slot(n, g, "v")
        m[...] = b1 * m + (1 - b1) * g
        v[...] = b2 * v + (1 - b2) * g**2
        return m / (1 - b1**self.t), v / (1 - b2**self.t)


class AdaBelief(Reference):
    def one(self, n, p, g):
        (b1, b2), eps, lr = self.h["betas"], self.h["eps"], self.h["lr"]
        m, s = self.slot(n, p, "m"), self.slot(n, p, "s")
        m[...] = b1 * m + (1 - b1) * g
        s[...] = b2 * s + (1 - b2) * (g - m) ** 2 + eps
        m_hat, s_hat = m / (1 - b1**self.t), s / (1 - b2**self.t)
        return p - lr * self.h["wd"] * p - lr * m_hat / (np.sqrt(s_hat) + eps)


class LaProp(Reference):
    def one(self, n, p, g):
        (b1, b2), eps, lr = self.h["betas"], self.h["eps"], self.h["lr"]
        m, v = self.slot(n, p, "m"), self.slot(n, p, "v")
        v[...] = b2 * v + (1 - b2) * g**2
        m[...] = b1 * m + (1 - b1) * g / (np.sqrt(v / (1 - b2**self.t)) + eps)
        return p - lr * self.h["wd"] * p - lr * m / (1 - b1**self.t)


class AdEMAMix(Reference):
    def one(self, n, p, g):
        b1, b2, b3 = self.h["betas"]
        alpha, t, warmup = self.h["alpha"], self.t, self.h["warmup"]
        if warmup is not None and t < warmup:
            alpha *= t / warmup
            start, end = np.log(b1), np.log(b3)
            b3 = np.exp(start * end / ((1 - t / warmup) * end + t / warmup * start))
        m, slow, v = (self.slot(n, g, key) for key in ("m", "slow", "v"))
        m[...] = b1 * m + (1 - b1) * g
        slow[...] = b3 * slow + (1 - b3) * g
        v[...] = b2 * v + (1 - b2) * g**2
        root = np.sqrt(v / (1 - b2**t)) + self.h["eps"]
        step = (m / (1 - b1**t) + alpha * slow) / root
        return p - self.h["lr"] * (step + self.h["wd"] * p)


class Shampoo(Reference):
    """Roots by eigenvalues."""

    def one(self, n, p, g):
        p = p * (1 - self.h["lr"] * self.h["wd"])
        axes = [axis for axis in range(p.ndim) if p.shape[axis] <= self.h["most"]]
        step = g
        for axis in axes:
            rows = np.moveaxis(g, axis, 0).reshape(p.shape[axis], -1)
            total = self.s.setdefault(("h", n, axis), np.zeros((len(rows), len(rows))))
            total += rows @ rows.T
            values, vectors = np.linalg.eigh(
                total + self.h["eps"] * np.linalg.norm(total) * np.eye(len(rows))
            )
            root = vectors * values ** (-1 / (2 * len(axes))) @ vectors.T
            step = np.moveaxis(np.tensordot(root, step, (1, axis)), 0, axis)
        if self.h["momentum"]:
            buffer = self.slot(n, p, "m")
            step = buffer[...] = self.h["momentum"] * buffer + step
        return p - self.h["lr"] * step


class SOAP(Reference):
    """Eigenvectors by one orthogonal iteration a step, from the identity."""

    def one(self, n, p, g):
        (b1, b2), beta = self.h["betas"], self.h["shampoo_beta"]
        axes = [axis for axis in range(p.ndim) if p.shape[axis] <= self.h["most"]]
        axes = axes if p.ndim > 1 else []
        m, v, turned = self.slot(n, g, "m"), self.slot(n, g, "v"), g
        m[...] = b1 * m + (1 - b1) * g
        for axis in axes:
            size = p.shape[axis]
            rows = np.moveaxis(g, axis, 0).reshape(size, -1)
            total = self.s.setdefault(("h", n, axis), np.zeros((size, size)))
            total[...] = beta * total + (1 - beta) * rows @ rows.T
            basis = self.s.setdefault(("q", n, axis), np.eye(size))
            order = np.argsort(-np.diag(basis.T @ total @ basis), kind="stable")
            basis[...] = basis[:, order]
            basis[...] = np.linalg.qr(total @ basis + 1e-6 * np.linalg.norm(total) * basis)[0]
            v[...] = np.take(v, order, axis)
            turned = self.along(turned, basis.T, axis)
        v[...] = b2 * v + (1 - b2) * turned**2
        step = m
        for axis in axes:
            step = self.along(step, self.s["q", n, axis].T, axis)
        corrections = (1 - b1**self.t, 1 - b2**self.t) if self.h["corrects"] else (1, 1)
        step = step / corrections[0] / (np.sqrt(v / corrections[1]) + self.h["eps"])
        for axis in axes:
            step = self.along(step, self.s["q", n, axis], axis)
        return p - self.h["lr"] * (step + self.h["wd"] * p)

    def along(self, x, matrix, axis):
        return np.moveaxis(np.tensordot(matrix, x, (1, axis)), 0, axis)


class Lion(Reference):
    def one(self, n, p, g):
        (b1, b2), lr = self.h["betas"], self.h["lr"]
        m = self.slot(n, p, "m")
        update = np.sign(b1 * m + (1 - b1) * g)
        m[...] = b2 * m + (1 - b2) * g
        return p - lr * (update + self.h["wd"] * p)


class AdamP(Reference):
    def one(self, n, p, g):
        lr, eps, wd = self.h["lr"], self.h["eps"], self.h["wd"]
        m_hat, v_hat = self.moments(n, g)
        step = m_hat / (np.sqrt(v_hat) + eps)
        if self.h["nesterov"]:
            b1 = self.h["betas"][0]
            ahead = b1 * m_hat * (1 - b1**self.t) + (1 - b1) * g
            step = ahead / (1 - b1**self.t) / (np.sqrt(v_hat) + eps)
        if p.ndim > 1:
            step, ratio = self.projected(p, g, step)
            wd = wd * ratio
        return p * (1 - lr * wd) - lr * step

    def projected(self, p, g, step):
        for rows in (p.shape[0], 1):
            w, d, u = (a.reshape(rows, -1) for a in (p, g, step))
            lengths = np.linalg.norm(w, axis=1) * np.linalg.norm(d, axis=1)
            cosines = np.abs((w * d).sum(1)) / np.maximum(lengths, self.h["eps"])
            if cosines.max() < self.h["delta"] / np.sqrt(w.shape[1]):
                self.projections = getattr(self, "projections", 0) + 1
                unit = w / (np.linalg.norm(w, axis=1, keepdims=True) + self.h["eps"])
                flat = u - unit * (unit * u).sum(1, keepdims=True)
                return flat.reshape(p.shape), self.h["wd_ratio"]
        return step, 1.0


class LAMB(Reference):
    def one(self, n, p, g):
        m_hat, v_hat = self.moments(n, g)
        u = m_hat / (np.sqrt(v_hat) + self.h["eps"]) + self.h["wd"] * p
        a, b = np.linalg.norm(p), np.linalg.norm(u)
        ratio = a / b if a > 0 and b > 0 else 1.0
        return p - self.h["lr"] * ratio * u


class LARS(Reference):
    def one(self, n, p, g):
        wd = self.h["wd"]
        a, b = np.linalg.norm(p), np.linalg.norm(g)
        local = self.h["trust"] * a / (b + wd * a) if a > 0 and b > 0 else 1.0
        v = self.slot(n, p, "v")
        v[...] = self.h["momentum"] * v + self.h["lr"] * local * (g + wd * p)
        return p - v


class ScheduleFree(Reference):
    """With x, y and z kept apart, as in the paper."""

    def step(self, params, grads, grad_at):
        (beta, b2), lr, k = self.h["betas"], self.h["lr"], self.t
        self.t += 1
        if k < self.h["warmup"]:
            lr = lr * (k + 1) / self.h["warmup"]
        self.top = max(getattr(self, "top", 0.0), lr)
        weight = (k + 1) ** self.h["r"] * self.top ** self.h["power"]
        self.total = getattr(self, "total", 0.0) + weight
        c = weight / self.total
        for n, y in params.items():
            z = self.s.setdefault(("z", n), y.copy())
            x = self.s.setdefault(("x", n), y.copy())
            v = self.slot(n, y, "v")
            v[...] = b2 * v + (1 - b2) * grads[n] ** 2
            step = grads[n] / (np.sqrt(v / (1 - b2**self.t)) + self.h["eps"]) + self.h["wd"] * y
            z -= lr * step
            x[...] = (1 - c) * x + c * z
            params[n] = (1 - beta) * z + beta * x

    def eval_params(self, params):
        return {n: self.s["x", n] for n in params}


class Prodigy(Reference):
    def step(self, params, grads, grad_at):
        (b1, b2), gamma = self.h["betas"], self.h["lr"]
        root = np.sqrt(b2)
        d = self.s.setdefault("d", self.h["d0"])
        r = root * self.s.setdefault("r", 0.0)
        size = 0.0
        for n, p in params.items():
            g, start = grads[n], self.s.setdefault(("start", n), p.copy())
            m, v, s = (self.slot(n, p, k) for k in ("m", "v", "s"))
            m[...] = b1 * m + (1 - b1) * d * g
            v[...] = b2 * v + (1 - b2) * d**2 * g**2
            r += (1 - root) * gamma * d**2 * float((g * (start - p)).sum())
            s[...] = root * s + (1 - root) * gamma * d**2 * g
            size += np.abs(s).sum()
            p = p * (1 - gamma * d * self.h["wd"])
            params[n] = p - gamma * d * m / (np.sqrt(v) + d * self.h["eps"])
        self.s["r"], self.s["d"] = r, max(d, r / size)


class Lookahead(Reference):
    """Around gradient descent."""

    def step(self, params, grads, grad_at):
        self.t += 1
        for n, p in params.items():
            slow = self.s.setdefault(n, p.copy())
            params[n] = p - self.h["lr"] * grads[n]
            if self.t % self.h["k"] == 0:
                slow += self.h["alpha"] * (params[n] - slow)
                params[n] = slow.copy()

    def eval_params(self, params):
        return {n: self.s[n] for n in params}


class SAM(Reference):
    """Around gradient descent with momentum."""

    def step(self, params, grads, grad_at):
        weights = {n: np.abs(p) if self.h["adaptive"] else 1.0 for n, p in params.items()}
        norm = np.sqrt(sum(((weights[n] * g) ** 2).sum() for n, g in grads.items()))
        scale = self.h["rho"] / (norm + 1e-12)
        there = grad_at({n: p + weights[n] ** 2 * grads[n] * scale for n, p in params.items()})
        for n, p in params.items():
            v = self.slot(n, p, "v")
            v[...] = self.h["momentum"] * v + there[n]
            params[n] = p - self.h["lr"] * v


class Sophia(Reference):
    """`hessian` gives the estimate of the diagonal at some parameters in step t, from 0."""

    def __init__(self, hessian, **numbers):
        super().__init__(**numbers)
        self.hessian = hessian

    def step(self, params, grads, grad_at):
        (b1, b2), lr = self.h["betas"], self.h["lr"]
        is_turn = self.t % self.h["interval"] == 0
        estimate = self.hessian(params, self.t)
        self.t += 1
        for n, p in params.items():
            m, h = self.slot(n, p, "m"), self.slot(n, p, "h")
            m[...] = b1 * m + (1 - b1) * grads[n]
            if is_turn:
                h[...] = b2 * h + (1 - b2) * estimate[n]
            p = p - lr * self.h["wd"] * p
            step = np.clip(m / np.maximum(self.h["rho"] * h, self.h["eps"]), -1, 1)
            params[n] = p - lr * step


class GaLore(Reference):
    """The subspace by NumPy's QR decomposition, signs made those of Gram–Schmidt."""

    def one(self, n, p, g):
        lr, rank = self.h["lr"], self.h["rank"]
        if p.ndim != 2 or min(p.shape) <= rank:
            m_hat, v_hat = self.moments(n, g)
            return p - lr * self.h["wd"] * p - lr * m_hat / (np.sqrt(v_hat) + self.h["eps"])
        is_tall = p.shape[0] > p.shape[1]
        short = g.T if is_tall else g
        if (self.t - 1) % self.h["interval"] == 0:
            self.s["basis", n] = self.refreshed(short, self.s.get(("basis", n)), rank)
        basis = self.s["basis", n]
        m_hat, v_hat = self.moments(n, basis.T @ short)
        step = self.h["scale"] * basis @ (m_hat / (np.sqrt(v_hat) + self.h["eps"]))
        return p - lr * self.h["wd"] * p - lr * (step.T if is_tall else step)

    def refreshed(self, g, basis, rank):
        if basis is None:
            place, wave = np.arange(len(g))[:, None] + 0.5, np.arange(1, rank + 1)
            basis = np.sqrt(2 / len(g)) * np.cos(np.pi * place * wave / len(g))
        for _ in range(self.h["iterations"]):
            image = g @ g.T @ basis
            size = np.linalg.norm(image)
            q, triangle = np.linalg.qr((image / size if size else image) + 1e-6 * basis)
            basis = q * np.sign(np.diag(triangle))
        return basis
