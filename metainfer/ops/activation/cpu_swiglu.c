/* silu(gate) * up in float32: sigmoid from exp of a non-positive argument, so nothing overflows. */
#include "../cpu_common.h"

typedef struct {
    const float *x;
    float *out;
    int64_t rows, F, stride;
} problem;

/* g / (1 + exp(-g)) * u, as g * exp(min(g, 0)) / (1 + exp(-|g|)) * u */
MI_INLINE v16 gated(v16 g, v16 u) {
    const v16 minus = v_sub(v_zero(), g);
    const v16 below = v_sub(v_zero(), v_max(minus, v_zero()));        /* min(g, 0) */
    const v16 away = v_sub(v_zero(), v_max(g, minus));                /* -|g| */
    const v16 sigmoid = v_div(v_exp(below), v_add(v_set1(1.0f), v_exp(away)));
    return v_mul(v_mul(g, sigmoid), u);
}

static void swiglu_rows(void *context, int part, int parts) {
    const problem *p = context;
    const int64_t F = p->F, whole = F / 16 * 16;
    const int rest = (int)(F - whole);
    int64_t begin, end;
    mi_share(p->rows, part, parts, &begin, &end);
    for (int64_t t = begin; t < end; t++) {
        const float *gate = p->x + t * p->stride, *up = gate + F;
        float *out = p->out + t * F;
        for (int64_t f = 0; f < whole; f += 16)
            v_store(out + f, gated(v_load(gate + f), v_load(up + f)));
        if (rest)
            v_store_first(
                out + whole,
                gated(v_load_first(gate + whole, rest), v_load_first(up + whole, rest)), rest);
    }
}

/* out [rows, F] from x [rows, 2F]: gate then up. */
MI_EXPORT void mi_swiglu(const float *x, int64_t stride, int64_t rows, int64_t F, float *out,
                         int threads) {
    problem p = {x, out, rows, F, stride};
    mi_parallel(swiglu_rows, &p, 4 * threads, rows * F >= 16384 ? threads : 1);
}
