// Attention over depth on a CPU: one pass over the sources of a token, which stay in its cache.
//
// S sources [T, D] behind pointers, Q queries c [Q, D] (query times key weight), T tokens.
// A prior is the result of an earlier attention over other sources: its mixtures o_q [T, D] and log-sum-exp [Q, T]; it
// takes part as one more source whose logit is that log-sum-exp. (Phase 2 of arXiv 2603.15031, algorithm 1.)
//
//   r_s = 1 / sqrt(mean(v_s^2) + eps)      (1 where keys are not normalised)
//   l_qs = scale r_s <v_s, c_q>            a_q = softmax over the sources and the prior
//   h_q = sum_s a_qs v_s + a_q o_q         lse_q = log sum exp
//
// Backward, from G_q = dL/dh_q and dlse, with u_qs = <G_q, v_s>:
//   dl_qs = a_qs (u_qs - <G_q, h_q> + dlse_q)
//   dv_s  = sum_q a_qs G_q + r_s scale sum_q dl_qs c_q - (r_s^2 / D) (sum_q dl_qs l_qs) v_s
//   dc_q  = sum_{t,s} scale dl_qs r_s v_s
//   do_q  = a_q G_q                        dprior_lse_q = <G_q, h_q> - sum_s a_qs u_qs - a_q (<G_q, h_q> - dlse_q)
// The mixtures o_q are not needed: a_q <G_q, o_q> = <G_q, h_q> - sum_s a_qs u_qs.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <thread>
#include <vector>

namespace {

constexpr int64_t CHUNK = 4;

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

template <typename T> T dot(const T *a, const T *b, int64_t n) {
    T sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
    return sum;
}

template <typename T> void add_scaled(T *out, const T *x, T w, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] += w * x[i];
}

// 1 / sqrt(mean square + eps), also where the square would overflow or vanish in the type.
template <typename T> T inverse_rms(const T *v, int64_t n, double eps) {
    const T square = dot(v, v, n);
    if (square < std::numeric_limits<T>::max() / 4) return (T)(1 / std::sqrt((double)square / n + eps));
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += (double)v[i] * v[i];
    return (T)(1 / std::sqrt(sum / n + eps));
}

template <typename T>
void forward(int64_t tokens, int64_t D, int S, int Q, const T *const *v, const T *c, const T *const *prior,
             const T *prior_lse, double eps, double scale, int normalize, T *const *h, T *lse, T *rstd, T *weight,
             int threads) {
    over_tokens(tokens, threads, [=](int, int64_t from, int64_t to) {
        // A few tokens of a source in a row: one row alone is a page, and prefetching stops at its end.
        for (int64_t begin = from; begin < to; begin += CHUNK) {
            const int64_t end = std::min(to, begin + CHUNK);
            for (int s = 0; s < S; ++s)
                for (int64_t t = begin; t < end; ++t) {
                    const T *x = v[s] + t * D;
                    const T r = normalize ? inverse_rms(x, D, eps) : (T)1;
                    rstd[t * S + s] = r;
                    for (int q = 0; q < Q; ++q) weight[(t * Q + q) * S + s] = (T)scale * (r * dot(x, c + q * D, D));
                }
            for (int64_t t = begin; t < end; ++t)
                for (int q = 0; q < Q; ++q) {
                    T *w = weight + (t * Q + q) * S;
                    T top = prior ? prior_lse[q * tokens + t] : -std::numeric_limits<T>::infinity();
                    for (int s = 0; s < S; ++s) top = std::max(top, w[s]);
                    T own = prior ? std::exp(prior_lse[q * tokens + t] - top) : (T)0, sum = own;
                    for (int s = 0; s < S; ++s) sum += (w[s] = std::exp(w[s] - top));
                    for (int s = 0; s < S; ++s) w[s] /= sum;
                    lse[q * tokens + t] = top + std::log(sum);
                    T *out = h[q] + t * D;
                    const T *first = prior ? prior[q] + t * D : v[0] + t * D;
                    const T w0 = prior ? own / sum : w[0];
                    for (int64_t i = 0; i < D; ++i) out[i] = w0 * first[i];
                    for (int s = prior ? 0 : 1; s < S; ++s) add_scaled(out, v[s] + t * D, w[s], D);
                }
        }
    });
}

template <typename T>
void backward(int64_t tokens, int64_t D, int S, int Q, const T *const *v, const T *c, const T *const *h, const T *prior_lse,
              double scale, int normalize, const T *rstd, const T *weight, const T *lse, const T *const *G,
              const T *const *dlse, T *const *dv, T *dc_parts, T *const *dprior, T *dprior_lse, int threads) {
    // G[q] and dlse[q] may be null where no gradient arrives; dc_parts is [threads, Q, D] and zero; dv is written, not added to.
    over_tokens(tokens, threads, [=](int part, int64_t from, int64_t to) {
        std::vector<T> dl(Q * S), gh(Q);
        T *dc = dc_parts + (int64_t)part * Q * D;
        for (int64_t t = from; t < to; ++t) {
            const T *r = rstd + t * S, *a = weight + t * Q * S;
            for (int q = 0; q < Q; ++q) {
                const T *g = G[q] ? G[q] + t * D : nullptr;
                const T dle = dlse[q] ? dlse[q][t] : (T)0;
                T used = 0;
                for (int s = 0; s < S; ++s) {
                    dl[q * S + s] = g ? dot(g, v[s] + t * D, D) : (T)0;
                    used += a[q * S + s] * dl[q * S + s];
                }
                gh[q] = prior_lse ? (g ? dot(g, h[q] + t * D, D) : (T)0) : used;
                for (int s = 0; s < S; ++s) dl[q * S + s] = a[q * S + s] * (dl[q * S + s] - gh[q] + dle);
                if (prior_lse) {
                    const T own = std::exp(prior_lse[q * tokens + t] - lse[q * tokens + t]);
                    dprior_lse[q * tokens + t] = gh[q] - used - own * (gh[q] - dle);
                    T *d = dprior[q] + t * D;
                    for (int64_t i = 0; i < D; ++i) d[i] = g ? own * g[i] : (T)0;
                }
            }
            for (int s = 0; s < S; ++s) {
                const T *x = v[s] + t * D;
                T *d = dv[s] + t * D;
                T pull = 0;
                for (int q = 0; q < Q; ++q) {
                    const T slope = (T)scale * dl[q * S + s] * r[s];
                    pull += normalize ? slope * dot(x, c + q * D, D) : (T)0;
                    add_scaled(dc + q * D, x, slope, D);
                }
                pull *= normalize ? r[s] * r[s] / (T)D : (T)0;
                for (int64_t i = 0; i < D; ++i) d[i] = -pull * x[i];
                for (int q = 0; q < Q; ++q) {
                    const T slope = (T)scale * dl[q * S + s] * r[s], w = a[q * S + s];
                    const T *cq = c + q * D;
                    if (G[q]) {
                        const T *g = G[q] + t * D;
                        for (int64_t i = 0; i < D; ++i) d[i] += w * g[i] + slope * cq[i];
                    } else {
                        add_scaled(d, cq, slope, D);
                    }
                }
            }
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
