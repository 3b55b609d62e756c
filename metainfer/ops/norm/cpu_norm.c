/* RMS norm of rows in float32, alone or after a residual addition. The sum of squares is taken in
 * sixteen lanes and then pairwise: an order that depends on D alone. */
#include "../cpu_common.h"

typedef struct {
    const float *x, *residual, *weight;
    float *out, *total;
    int64_t rows, D, x_stride, residual_stride;
    float eps;
} problem;

static void norm_rows(void *context, int part, int parts) {
    const problem *p = context;
    const int64_t D = p->D, whole = D / 16 * 16;
    const int rest = (int)(D - whole);
    int64_t begin, end;
    mi_share(p->rows, part, parts, &begin, &end);
    for (int64_t t = begin; t < end; t++) {
        const float *x = p->x + t * p->x_stride;
        float *out = p->out + t * D;
        v16 squares = v_zero();
        if (p->residual) {
            const float *r = p->residual + t * p->residual_stride;
            float *total = p->total + t * D;
            for (int64_t d = 0; d < whole; d += 16) {
                const v16 sum = v_add(v_load(x + d), v_load(r + d));
                v_store(total + d, sum);
                squares = v_fma(sum, sum, squares);
            }
            if (rest) {
                const v16 sum = v_add(v_load_first(x + whole, rest), v_load_first(r + whole, rest));
                v_store_first(total + whole, sum, rest);
                squares = v_fma(sum, sum, squares);
            }
            x = total;
        } else {
            for (int64_t d = 0; d < whole; d += 16)
                squares = v_fma(v_load(x + d), v_load(x + d), squares);
            if (rest) {
                const v16 last = v_load_first(x + whole, rest);
                squares = v_fma(last, last, squares);
            }
        }
        const v16 scale = v_set1(1.0f / sqrtf(v_sum(squares) / (float)D + p->eps));
        for (int64_t d = 0; d < whole; d += 16)
            v_store(out + d, v_mul(v_mul(v_load(x + d), scale), v_load(p->weight + d)));
        if (rest)
            v_store_first(out + whole,
                          v_mul(v_mul(v_load_first(x + whole, rest), scale),
                                v_load_first(p->weight + whole, rest)),
                          rest);
    }
}

/* out [rows, D] = norm(x) * weight; with `residual`, total = x + residual is normed instead. */
MI_EXPORT void mi_rmsnorm(const float *x, int64_t x_stride, const float *residual,
                          int64_t residual_stride, const float *weight, float eps, int64_t rows,
                          int64_t D, float *out, float *total, int threads) {
    problem p = {x, residual, weight, out, total, rows, D, x_stride, residual_stride, eps};
    mi_parallel(norm_rows, &p, 4 * threads, rows * D >= 65536 ? threads : 1);
}
