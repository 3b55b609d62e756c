/* Copies the keys and values of new tokens into their cache slots. */
#include "../cpu_common.h"

/* Strides in floats; `row` floats per token; slot -1 skips. 0, or 1 for a slot outside the cache,
 * which is found before anything is written. */
MI_EXPORT int mi_kv_write(const float *k, int64_t k_stride, const float *v, int64_t v_stride,
                          float *k_cache, float *v_cache, int64_t page_stride, int64_t token_stride,
                          int64_t pages, int64_t page, const int64_t *slots, int64_t rows,
                          int64_t row) {
    for (int64_t t = 0; t < rows; t++)
        if (slots[t] < -1 || slots[t] >= pages * page) return 1;
    for (int64_t t = 0; t < rows; t++) {
        if (slots[t] < 0) continue;
        const int64_t at = slots[t] / page * page_stride + slots[t] % page * token_stride;
        memcpy(k_cache + at, k + t * k_stride, (size_t)row * sizeof(float));
        memcpy(v_cache + at, v + t * v_stride, (size_t)row * sizeof(float));
    }
    return 0;
}
