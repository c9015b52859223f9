"""mHC-lite, token by token in plain loops.

Axes: x is [..., D]; a token is one row of x.reshape(N, D). The state of a token is a list of m streams H[j], each [D].
H_pre and H_post are [m]; H_res is [m, m], indexed [new stream i, old stream j]; rho is [m!].

    H = m copies of v_0
    u = norm(vec(H))                                   vec(H) [mD], stream after stream
    z = P u                                            rows of P: pre (m), post (m), res (m!), in this order
    H_pre  = sigmoid(a_pre z_pre + b_pre)
    H_post = 2 sigmoid(a_post z_post + b_post)
    rho    = softmax(a_res z_res + b_res)
    H_res  = sum_r rho_r Pi_r                          Pi_r[i, pi_r(i)] = 1; pi_r in lexicographic order
    h_l = sum_j H_pre[j] H[j]                          l >= 2;  h_1 = H[0] = v_0, without the part pre
    H[i] <- sum_j H_res[i, j] H[j] + H_post[i] v_l
    h_{L+1} = sum_j r[j] H[j]                          r: 1/m (mean), 1 (sum), sigmoid(a (P u) + b) (learned)

    M_{i->l} = H_pre,l^T  H_res,l-1 ... H_res,i+1  H_post,i

with ones in the place of H_post,0 and r in the place of H_pre,L+1. transition="identity": H_res = I, no rows of res.
"""

import itertools
import math

import torch


def _norm(v: torch.Tensor, eps: float) -> torch.Tensor:
    """v / sqrt(mean(v^2) + eps) of one vector."""
    return v / torch.sqrt((v * v).mean() + eps)


def _permutation_matrices(m: int, like: torch.Tensor) -> list[torch.Tensor]:
    """Pi_r for r = 0 ... m! - 1, with Pi_r[i, pi_r(i)] = 1."""
    matrices = []
    for pi in itertools.permutations(range(m)):  # lexicographic, since range(m) ascends
        entries = [[1.0 if j == pi[i] else 0.0 for j in range(m)] for i in range(m)]
        matrices.append(torch.tensor(entries, dtype=like.dtype, device=like.device))
    return matrices


def _parts(
    H: list[torch.Tensor], params: dict[str, torch.Tensor], owner: str, sizes: list[tuple[str, int]], norm_eps: float
) -> dict[str, torch.Tensor]:
    """a_part z_part + b_part for each (part, number of rows), in the order of the rows of P."""
    P, b, a = params[f"{owner}.projection"], params[f"{owner}.bias"], params[f"{owner}.scale"]
    total = sum(size for _, size in sizes)
    assert (P.shape[0], b.shape[0], a.shape[0]) == (total, total, len(sizes)), (owner, sizes)
    u = _norm(torch.cat(H), norm_eps)
    z = P @ u
    parts = {}
    start = 0
    for index, (part, size) in enumerate(sizes):
        rows = slice(start, start + size)
        parts[part] = a[index] * z[rows] + b[rows]
        start += size
    return parts


def _run(
    x: torch.Tensor,
    sublayers: list,
    params: dict[str, torch.Tensor],
    streams: int,
    transition: str,
    readout: str,
    norm_eps: float,
) -> tuple[list[torch.Tensor], list[list], list[list], list[list]]:
    """The reads h_1 ... h_{L+1}, and the coefficients read[l][n], write[l][n], carry[l][n] of sublayer l and token n.

    read[1] and write[0] stand for the reads and writes without coefficients: one-hot at stream 0, and ones.
    """
    if transition not in ("full", "identity"):
        raise ValueError(transition)
    if readout not in ("mean", "sum", "learned"):
        raise ValueError(readout)
    m, L, D = streams, len(sublayers), x.shape[-1]
    N = math.prod(x.shape[:-1])
    tokens = x.reshape(N, D)
    Pi = _permutation_matrices(m, x)
    eye = torch.eye(m, dtype=x.dtype, device=x.device)
    ones = torch.ones(m, dtype=x.dtype, device=x.device)

    H = [[tokens[n] for _ in range(m)] for n in range(N)]
    h = []
    read = [[None] * N for _ in range(L + 2)]
    write = [[None] * N for _ in range(L + 1)]
    carry = [[None] * N for _ in range(L + 1)]
    for n in range(N):
        write[0][n] = ones

    for ell in range(1, L + 2):
        h_l = []
        for n in range(N):
            if ell == 1:
                read[ell][n] = eye[0]
            elif ell == L + 1 and readout == "mean":
                read[ell][n] = ones / m
            elif ell == L + 1 and readout == "sum":
                read[ell][n] = ones
            elif ell == L + 1:
                read[ell][n] = torch.sigmoid(_parts(H[n], params, "out", [("pre", m)], norm_eps)["pre"])

            if ell <= L:
                sizes = [("post", m)]
                if ell > 1:
                    sizes = [("pre", m), *sizes]
                if transition == "full":
                    sizes = [*sizes, ("res", math.factorial(m))]
                part = _parts(H[n], params, f"mixers.{ell - 1}", sizes, norm_eps)
                if ell > 1:
                    read[ell][n] = torch.sigmoid(part["pre"])  # H_pre
                write[ell][n] = 2 * torch.sigmoid(part["post"])  # H_post
                carry[ell][n] = eye  # transition="identity": without the part res
                if transition == "full":
                    rho = torch.softmax(part["res"], dim=0)
                    carry[ell][n] = sum(rho[r] * Pi[r] for r in range(len(Pi)))  # H_res = sum_r rho_r Pi_r

            if ell == 1:
                h_l.append(H[n][0])  # h_1 = H[0]
            else:
                h_l.append(sum(read[ell][n][j] * H[n][j] for j in range(m)))  # h_l = sum_j H_pre[j] H[j]
        h.append(torch.stack(h_l).reshape(x.shape) if N else x)

        if ell <= L:
            v_l = sublayers[ell - 1](h[-1]).reshape(N, D)
            for n in range(N):
                H_post, H_res = write[ell][n], carry[ell][n]
                # H[i] <- sum_j H_res[i, j] H[j] + H_post[i] v_l
                H[n] = [sum(H_res[i, j] * H[n][j] for j in range(m)) + H_post[i] * v_l[n] for i in range(m)]
    return h, read, write, carry


def inputs(
    x: torch.Tensor,
    sublayers: list,
    params: dict[str, torch.Tensor],
    *,
    streams: int = 4,
    readout: str = "mean",
    transition: str = "full",
    start: str = "prenorm",
    output_scale: float | None = None,
    norm_eps: float = 1e-6,
) -> list[torch.Tensor]:
    """[h_1, ..., h_{L+1}], each shaped like x. (`start` and `output_scale` decide only where parameters start.)"""
    h, _, _, _ = _run(x, sublayers, params, streams, transition, readout, norm_eps)
    return h


def matrix(
    x: torch.Tensor,
    sublayers: list,
    params: dict[str, torch.Tensor],
    *,
    streams: int = 4,
    readout: str = "mean",
    transition: str = "full",
    start: str = "prenorm",
    output_scale: float | None = None,
    norm_eps: float = 1e-6,
) -> torch.Tensor:
    """M [..., L+1, L+1] from the ordered products. (`start` and `output_scale` decide only where parameters start.)"""
    _, read, write, carry = _run(x, sublayers, params, streams, transition, readout, norm_eps)
    L, N = len(sublayers), math.prod(x.shape[:-1])
    shape = (*x.shape[:-1], L + 1, L + 1)
    eye = torch.eye(streams, dtype=x.dtype, device=x.device)
    M = []
    for n in range(N):
        for ell in range(1, L + 2):
            for i in range(L + 1):
                if i >= ell:
                    M.append(x.new_zeros(()))
                    continue
                product = eye
                for j in range(i + 1, ell):
                    product = carry[j][n] @ product  # H_res,l-1 ... H_res,i+1
                M.append((read[ell][n] * (product @ write[i][n])).sum())  # H_pre,l^T product H_post,i
    return torch.stack(M).reshape(shape) if N else x.new_zeros(shape)
