// Attention over depth on a CPU: one pass over the sources of a token, which stay in the CPU's cache.
//
// S sources [T, D] behind pointers, Q queries c [Q, D] (query times key weight), T tokens.
// A prior is the result of an earlier attention over other sources: its mixtures o_q [T, D] and log-sum-exp [Q, T]; it
// acts as one more source whose logit is that log-sum-exp. (Phase 2 of arXiv 2603.15031, algorithm 1.)
//
//   r_s = 1 / sqrt(mean(v_s^2) + eps)      (1 where keys are not normalised)
//   l_qs = scale r_s <v_s, c_q>            a_q = softmax over the sources and the prior
//   h_q = sum_s a_qs v_s + a_q o_q         lse_q = log sum exp
//
// Backward, from G_q = dL/dh_q and dlse, with u_qs = <G_q, v_s>:
//   dl_qs = a_qs (u_qs - <G_q, h_q> + dlse_q)
//   dv_s  = sum_q a_qs G_q + r_s scale sum_q dl_qs c_q - (r_s^2 / D) (sum_q dl_qs l_qs) v_s
//   dc_q  = sum_{t,s} scale dl_qs r_s v_s
//   do_q  = a_q G_q                        dprior_lse_q = <G_q, h_q> - sum_s a_qs u_qs - a_q <G_q, h_q> + a_q dlse_q
// The mixtures o_q are not needed: a_q <G_q, o_q> = <G_q, h_q> - sum_s a_qs u_qs.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace {

// Four or eight numbers at once; the compiler splits them where registers are smaller.
template <typename T> struct Lanes {
    static constexpr int64_t N = 32 / sizeof(T);
    typedef T V __attribute__((vector_size(32)));
};

template <typename T> typename Lanes<T>::V load(const T *p) {
    typename Lanes<T>::V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

template <typename T> void store(T *p, typename Lanes<T>::V v) { std::memcpy(p, &v, sizeof v); }

template <typename T> T total(typename Lanes<T>::V v) {
    for (int64_t half = Lanes<T>::N / 2; half; half /= 2)
        for (int64_t i = 0; i < half; ++i) v[i] += v[i + half];
    return v[0];
}

template <typename F> void over_tokens(int64_t tokens, int threads, F body) {
    threads = (int)std::max<int64_t>(1, std::min<int64_t>(threads, tokens));
    if (threads == 1) return body(0, (int64_t)0, tokens);
    std::vector<std::thread> pool;
    const int64_t share = (tokens + threads - 1) / threads;
    for (int k = 1; k < threads; ++k)
        pool.emplace_back(body, k, std::min(tokens, k * share), std::min(tokens, (k + 1) * share));
    body(0, (int64_t)0, std::min(tokens, share));
    for (auto &thread : pool) thread.join();
}

// <x, a> and <x, b> in one pass over x. `ahead`, if not null, is prefetched into the cache: a row is about a
// page, and hardware prefetching stops at the page's end.
template <typename T>
void two_dots(const T *x, const T *a, const T *b, int64_t n, const T *ahead, T &with_a, T &with_b) {
    constexpr int64_t N = Lanes<T>::N;
    typename Lanes<T>::V a0{}, a1{}, a2{}, a3{}, b0{}, b1{}, b2{}, b3{};
    int64_t i = 0;
    for (; i + 4 * N <= n; i += 4 * N) {
        if (ahead)
            for (int k = 0; k < 4; ++k) __builtin_prefetch(ahead + i + k * N, 0, 2);
        const auto x0 = load(x + i), x1 = load(x + i + N), x2 = load(x + i + 2 * N), x3 = load(x + i + 3 * N);
        a0 += x0 * load(a + i), a1 += x1 * load(a + i + N), a2 += x2 * load(a + i + 2 * N), a3 += x3 * load(a + i + 3 * N);
        b0 += x0 * load(b + i), b1 += x1 * load(b + i + N), b2 += x2 * load(b + i + 2 * N), b3 += x3 * load(b + i + 3 * N);
    }
    with_a = total<T>((a0 + a1) + (a2 + a3)), with_b = total<T>((b0 + b1) + (b2 + b3));
    for (; i < n; ++i) with_a += x[i] * a[i], with_b += x[i] * b[i];
}

template <typename T> T dot(const T *x, const T *a, int64_t n) {
    T one, same;
    two_dots<T>(x, a, a, n, nullptr, one, same);
    return one;
}

// 1 / sqrt(mean square + eps). If the square overflowed, the row is scaled down by a power of two first.
template <typename T> T inverse_rms(const T *v, int64_t n, T square, double eps) {
    if (std::isfinite(square)) return (T)(1 / std::sqrt((double)square / n + eps));
    const double down = std::ldexp(1.0, -3 * std::numeric_limits<T>::max_exponent / 4);
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += (v[i] * down) * (v[i] * down);
    return (T)(down / std::sqrt(sum / n + eps * down * down));
}

// Whether r^2 is near underflow.
template <typename T> bool tiny(T r) { return r < std::ldexp((T)1, std::numeric_limits<T>::min_exponent / 4); }

// Fresh memory is mapped page by page, which costs as much as writing it: use huge pages where available.
template <typename T> void expect_writes(T *p, int64_t n) {
#ifdef MADV_HUGEPAGE
    constexpr uintptr_t page = 1 << 21;
    const uintptr_t from = ((uintptr_t)p + page - 1) & ~(page - 1), to = (uintptr_t)(p + n) & ~(page - 1);
    if (from < to) madvise((void *)from, to - from, MADV_HUGEPAGE);
#endif
}

template <typename T>
void forward(int64_t tokens, int64_t D, int S, int Q, const T *const *v, const T *c, const T *const *prior,
             const T *prior_lse, double eps, double scale, int normalize, T *const *h, T *lse, T *rstd, T *weight,
             int threads) {
    constexpr int64_t N = Lanes<T>::N;
    for (int q = 0; q < Q; ++q) expect_writes(h[q], tokens * D);
    over_tokens(tokens, threads, [=](int, int64_t from, int64_t to) {
        std::vector<const T *> rows(S + 1);
        std::vector<T> mixing(S + 1);
        for (int64_t t = from; t < to; ++t) {
            for (int s = 0; s < S; ++s) {
                const T *x = v[s] + t * D;
                T square, product;
                two_dots(x, x, c, D, t + 1 < to ? x + D : nullptr, square, product);
                const T r = normalize ? inverse_rms(x, D, square, eps) : (T)1;
                rstd[t * S + s] = r;
                T *w = weight + t * Q * S + s;
                w[0] = (T)scale * (r * product);
                for (int q = 1; q + 1 < Q; q += 2) {
                    T one, other;
                    two_dots<T>(x, c + q * D, c + (q + 1) * D, D, nullptr, one, other);
                    w[q * S] = (T)scale * (r * one), w[(q + 1) * S] = (T)scale * (r * other);
                }
                if (Q % 2 == 0) w[(Q - 1) * S] = (T)scale * (r * dot(x, c + (Q - 1) * D, D));
                rows[s] = x;
            }
            for (int q = 0; q < Q; ++q) {
                T *w = weight + (t * Q + q) * S;
                T top = prior ? prior_lse[q * tokens + t] : -std::numeric_limits<T>::infinity();
                for (int s = 0; s < S; ++s) top = std::max(top, w[s]);
                T of_prior = prior ? std::exp(prior_lse[q * tokens + t] - top) : (T)0, sum = of_prior;
                for (int s = 0; s < S; ++s) sum += (w[s] = std::exp(w[s] - top));
                for (int s = 0; s < S; ++s) mixing[s] = (w[s] /= sum);
                lse[q * tokens + t] = top + std::log(sum);
                int parts = S;
                if (prior) rows[parts] = prior[q] + t * D, mixing[parts++] = of_prior / sum;
                T *out = h[q] + t * D;
                int64_t i = 0;
                for (; i + 4 * N <= D; i += 4 * N) {
                    typename Lanes<T>::V o0{}, o1{}, o2{}, o3{};
                    for (int s = 0; s < parts; ++s) {
                        const T *x = rows[s] + i, a = mixing[s];
                        o0 += a * load(x), o1 += a * load(x + N), o2 += a * load(x + 2 * N), o3 += a * load(x + 3 * N);
                    }
                    store(out + i, o0), store(out + i + N, o1), store(out + i + 2 * N, o2), store(out + i + 3 * N, o3);
                }
                for (; i < D; ++i) {
                    T sum_i = 0;
                    for (int s = 0; s < parts; ++s) sum_i += mixing[s] * rows[s][i];
                    out[i] = sum_i;
                }
            }
        }
    });
}

// Channels i … i + N (or one, in the tail) of all gradients of a token. W is a vector or a number.
template <typename T, typename W, typename Load, typename Store>
void spread(int64_t i, int64_t D, int S, int Q, const T *const *x, const T *const *g, const T *c, T *dc, T *const *d,
            const T *slope, const T *a, const T *pull, Load get, Store put) {
    if (Q == 1) {  // the gradient of the query stays in a register
        const W cq = get(c + i), gq = g[0] ? get(g[0] + i) : W{};
        W sum = get(dc + i);
        for (int s = 0; s < S; ++s) {
            const W xs = get(x[s] + i);
            put(d[s] + i, a[s] * gq + slope[s] * cq - pull[s] * xs);
            sum += slope[s] * xs;
        }
        put(dc + i, sum);
        return;
    }
    for (int s = 0; s < S; ++s) {
        const W xs = get(x[s] + i);
        W sum = -pull[s] * xs;
        for (int q = 0; q < Q; ++q) {
            sum += slope[q * S + s] * get(c + q * D + i);
            if (g[q]) sum += a[q * S + s] * get(g[q] + i);
            put(dc + q * D + i, get(dc + q * D + i) + slope[q * S + s] * xs);
        }
        put(d[s] + i, sum);
    }
}

// Adds the part of a logit with gradient l to the gradients of its query and of a source so long that r^2 underflows.
template <typename T>
void spread_far(int64_t D, const T *x, T r, T l, T product, const T *c, T *d, T *dc) {
    const T pull = l * (product * r) / (T)D;
    for (int64_t i = 0; i < D; ++i) {
        const T unit = r * x[i];
        d[i] += r * (l * c[i] - pull * unit);
        dc[i] += l * unit;
    }
}

template <typename T>
void backward(int64_t tokens, int64_t D, int S, int Q, const T *const *v, const T *c, const T *const *h, const T *prior_lse,
              double scale, int normalize, const T *rstd, const T *weight, const T *lse, const T *const *G,
              const T *const *dlse, T *const *dv, T *dc_parts, T *const *dprior, T *dprior_lse, int threads) {
    // G[q] and dlse[q] may be null (no gradient); dc_parts is [threads, Q, D], zeroed; dv is overwritten.
    constexpr int64_t N = Lanes<T>::N;
    typedef typename Lanes<T>::V V;
    for (int s = 0; s < S; ++s) expect_writes(dv[s], tokens * D);
    for (int q = 0; q < Q && dprior; ++q) expect_writes(dprior[q], tokens * D);
    over_tokens(tokens, threads, [=](int part, int64_t from, int64_t to) {
        std::vector<T> slope(Q * S), product(Q * S), pull(S), far(Q * S);
        std::vector<const T *> x(S), g(Q);
        std::vector<T *> d(S);
        T *dc = dc_parts + (int64_t)part * Q * D;
        for (int64_t t = from; t < to; ++t) {
            const T *r = rstd + t * S, *a = weight + t * Q * S;
            for (int q = 0; q < Q; ++q) g[q] = G[q] ? G[q] + t * D : nullptr;
            for (int s = 0; s < S; ++s) {
                x[s] = v[s] + t * D, d[s] = dv[s] + t * D, pull[s] = 0;
                for (int q = 0; q < Q; ++q) {
                    const T *ahead = q == 0 && t + 1 < to ? x[s] + D : nullptr;
                    two_dots(x[s], g[q] ? g[q] : c + q * D, c + q * D, D, ahead, slope[q * S + s], product[q * S + s]);
                }
            }
            for (int q = 0; q < Q; ++q) {
                const T dle = dlse[q] ? dlse[q][t] : (T)0;
                T used = 0;
                for (int s = 0; s < S; ++s) {
                    if (!g[q]) slope[q * S + s] = 0;
                    used += a[q * S + s] * slope[q * S + s];
                }
                const T grad_dot_h = prior_lse ? (g[q] ? dot(g[q], h[q] + t * D, D) : (T)0) : used;
                for (int s = 0; s < S; ++s) {
                    const T dl = a[q * S + s] * (slope[q * S + s] - grad_dot_h + dle);
                    if (tiny(r[s])) far[q * S + s] = (T)scale * dl;
                    slope[q * S + s] = tiny(r[s]) ? (T)0 : (T)scale * dl * r[s];
                    if (normalize) pull[s] += slope[q * S + s] * product[q * S + s] * (r[s] * r[s] / (T)D);
                }
                if (prior_lse) {
                    const T of_prior = std::exp(prior_lse[q * tokens + t] - lse[q * tokens + t]);
                    dprior_lse[q * tokens + t] = grad_dot_h - used - of_prior * grad_dot_h + of_prior * dle;
                    T *out = dprior[q] + t * D;
                    for (int64_t i = 0; i < D; ++i) out[i] = g[q] ? of_prior * g[q][i] : (T)0;
                }
            }
            int64_t i = 0;
            for (; i + N <= D; i += N)
                spread<T, V>(i, D, S, Q, x.data(), g.data(), c, dc, d.data(), slope.data(), a, pull.data(),
                             [](const T *p) { return load(p); }, [](T *p, V w) { store(p, w); });
            for (; i < D; ++i)
                spread<T, T>(i, D, S, Q, x.data(), g.data(), c, dc, d.data(), slope.data(), a, pull.data(),
                             [](const T *p) { return *p; }, [](T *p, T w) { *p = w; });
            for (int s = 0; s < S; ++s)
                for (int q = 0; q < Q && tiny(r[s]); ++q)
                    spread_far(D, x[s], r[s], far[q * S + s], product[q * S + s], c + q * D, d[s], dc + q * D);
        }
    });
}

}  // namespace

#define EXPORT(T, NAME)                                                                                               \
    extern "C" void attend_forward_##NAME(                                                                            \
        int64_t tokens, int64_t D, int S, int Q, const T *const *v, const T *c, const T *const *prior,                \
        const T *prior_lse, double eps, double scale, int normalize, T *const *h, T *lse, T *rstd, T *weight,         \
        int threads) {                                                                                                \
        forward<T>(tokens, D, S, Q, v, c, prior, prior_lse, eps, scale, normalize, h, lse, rstd, weight, threads);    \
    }                                                                                                                 \
    extern "C" void attend_backward_##NAME(                                                                           \
        int64_t tokens, int64_t D, int S, int Q, const T *const *v, const T *c, const T *const *h, const T *prior_lse,     \
        double scale, int normalize, const T *rstd, const T *weight, const T *lse, const T *const *G,                  \
        const T *const *dlse, T *const *dv, T *dc_parts, T *const *dprior, T *dprior_lse, int threads) {              \
        backward<T>(tokens, D, S, Q, v, c, h, prior_lse, scale, normalize, rstd, weight, lse, G, dlse, dv, dc_parts,  \
                    dprior, dprior_lse, threads);                                                                     \
    }

EXPORT(float, float32)
EXPORT(double, float64)
