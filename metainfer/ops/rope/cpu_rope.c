/* Rotary position embedding of q and k in one pass, float32, out of place. */
#include "../cpu_common.h"

typedef struct {
    const float *q, *k, *cos_sin;
    const int64_t *positions;
    float *q_out, *k_out;
    int64_t rows, Hq, Hkv, D, R, q_stride, k_stride, length;
    int interleaved, error;
} problem;

MI_INLINE void rotate(const float *restrict x, float *restrict out, const float *restrict angle,
                      int64_t heads, int64_t D, int64_t R, int interleaved) {
    const int64_t half = R / 2;
    const float *cos = angle, *sin = angle + half;
    for (int64_t h = 0; h < heads; h++, x += D, out += D) {
        if (interleaved) {
            for (int64_t i = 0; i < half; i++) {
                const float a = x[2 * i], b = x[2 * i + 1];
                out[2 * i] = a * cos[i] - b * sin[i];
                out[2 * i + 1] = b * cos[i] + a * sin[i];
            }
        } else {
            for (int64_t i = 0; i < half; i++) {
                const float a = x[i], b = x[half + i];
                out[i] = a * cos[i] - b * sin[i];
                out[half + i] = b * cos[i] + a * sin[i];
            }
        }
        for (int64_t i = R; i < D; i++) out[i] = x[i];
    }
}

static void rope_rows(void *context, int part, int parts) {
    problem *p = context;
    int64_t begin, end;
    mi_share(p->rows, part, parts, &begin, &end);
    for (int64_t t = begin; t < end; t++) {
        const int64_t position = p->positions[t];
        if (position < 0 || position >= p->length) {
            p->error = 1;
            return;
        }
        const float *angle = p->cos_sin + position * p->R;
        rotate(p->q + t * p->q_stride, p->q_out + t * p->Hq * p->D, angle, p->Hq, p->D, p->R,
               p->interleaved);
        rotate(p->k + t * p->k_stride, p->k_out + t * p->Hkv * p->D, angle, p->Hkv, p->D, p->R,
               p->interleaved);
    }
}

/* 0, or 1 when a position lies outside the table of `length` rows. */
MI_EXPORT int mi_rope(const float *q, int64_t q_stride, const float *k, int64_t k_stride,
                      const int64_t *positions, const float *cos_sin, int64_t length, int64_t R,
                      int64_t rows, int64_t Hq, int64_t Hkv, int64_t D, int interleaved,
                      float *q_out, float *k_out, int threads) {
    problem p = {q, k, cos_sin, positions, q_out, k_out, rows, Hq, Hkv, D, R, q_stride, k_stride,
                 length, interleaved, 0};
    mi_parallel(rope_rows, &p, 4 * threads, rows * (Hq + Hkv) * D >= 65536 ? threads : 1);
    return p.error;
}
