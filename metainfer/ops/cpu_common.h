/* Sixteen float lanes on any CPU, and a parallel region, for the C kernels of the ops.
 *
 * `v16` is one AVX-512 register, or an array of the widest vectors that the compiler targets
 * (AVX: 2 x 8, SSE2/NEON: 4 x 4). Define MI_PORTABLE to take the second form on any CPU.
 * Both forms do the same operations in the same order; they differ where fused multiply-add does.
 */
#ifndef MI_CPU_COMMON_H
#define MI_CPU_COMMON_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MI_EXPORT __attribute__((visibility("default")))
#define MI_INLINE static inline __attribute__((always_inline, unused))
#if defined(__clang__)
#define MI_UNROLL _Pragma("unroll")
#else
#define MI_UNROLL _Pragma("GCC unroll 32")
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && \
    defined(__AVX512DQ__) && !defined(MI_PORTABLE)
#define MI_AVX512 1
#else
#define MI_AVX512 0
#endif

/* ---- threads ------------------------------------------------------------------------------ */

typedef void (*mi_task)(void *context, int part, int parts);
typedef void (*mi_runner)(mi_task task, void *context, int parts, int threads);

static mi_runner mi_pool;
/* Called once after loading: the pool that all libraries of the process share (kernels/pool.c). */
MI_EXPORT void mi_set_runner(mi_runner runner);
void mi_set_runner(mi_runner runner) { mi_pool = runner; }

/* task(context, i, parts) for each of `parts` parts, in any order, on at most `threads` threads. */
static inline void mi_parallel(mi_task task, void *context, int64_t parts, int threads) {
    if (threads > 1 && parts > 1 && mi_pool) mi_pool(task, context, (int)parts, threads);
    else task(context, 0, 1);
}

/* The part [*begin, *end) of `count` items that `part` of `parts` holds. */
MI_INLINE void mi_share(int64_t count, int part, int parts, int64_t *begin, int64_t *end) {
    *begin = count * part / parts;
    *end = count * (part + 1) / parts;
}

/* 64-byte aligned scratch that a thread keeps between calls; slot 0..3. NULL if out of memory. */
MI_INLINE void *mi_scratch(int slot, size_t bytes) {
    static __thread struct {
        void *memory;
        size_t bytes;
    } kept[4];
    if (kept[slot].bytes < bytes) {
        free(kept[slot].memory);
        kept[slot].bytes = 0;
        kept[slot].memory = NULL;
        if (posix_memalign(&kept[slot].memory, 64, bytes) != 0) return NULL;
        kept[slot].bytes = bytes;
    }
    return kept[slot].memory;
}

/* ---- sixteen lanes ------------------------------------------------------------------------ */

#if MI_AVX512
#include <immintrin.h>
typedef __m512 v16;
#define V16_REGISTERS 32
MI_INLINE v16 v_load(const float *p) { return _mm512_loadu_ps(p); }
MI_INLINE void v_store(float *p, v16 a) { _mm512_storeu_ps(p, a); }
MI_INLINE v16 v_set1(float a) { return _mm512_set1_ps(a); }
MI_INLINE v16 v_add(v16 a, v16 b) { return _mm512_add_ps(a, b); }
MI_INLINE v16 v_sub(v16 a, v16 b) { return _mm512_sub_ps(a, b); }
MI_INLINE v16 v_mul(v16 a, v16 b) { return _mm512_mul_ps(a, b); }
MI_INLINE v16 v_div(v16 a, v16 b) { return _mm512_div_ps(a, b); }
MI_INLINE v16 v_max(v16 a, v16 b) { return _mm512_max_ps(a, b); }
MI_INLINE v16 v_fma(v16 a, v16 b, v16 c) { return _mm512_fmadd_ps(a, b, c); }
MI_INLINE float v_sum(v16 a) { return _mm512_reduce_add_ps(a); }
MI_INLINE float v_most(v16 a) { return _mm512_reduce_max_ps(a); }
/* Sixteen float16 as float32, exact. */
MI_INLINE v16 v_load_half(const uint8_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
MI_INLINE v16 v_load_int8(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
/* exp for a <= 0, 0 below -87, NaN for NaN; within 1.1 ulp of the exact value. */
MI_INLINE v16 v_exp(v16 a) {
    __mmask16 alive = _mm512_cmp_ps_mask(a, v_set1(-87.0f), _CMP_NLT_UQ);
    v16 n = _mm512_roundscale_ps(v_mul(a, v_set1(1.44269504088896341f)), 8);
    v16 r = _mm512_fnmadd_ps(n, v_set1(0.693145751953125f), a);
    r = _mm512_fnmadd_ps(n, v_set1(1.42860682030941723212e-6f), r);
    v16 p = v_set1(1.9875691500e-4f);
    p = v_fma(p, r, v_set1(1.3981999507e-3f));
    p = v_fma(p, r, v_set1(8.3334519073e-3f));
    p = v_fma(p, r, v_set1(4.1665795894e-2f));
    p = v_fma(p, r, v_set1(1.6666665459e-1f));
    p = v_fma(p, r, v_set1(5.0000001201e-1f));
    p = v_fma(v_mul(p, r), r, r);
    p = v_add(p, v_set1(1.0f));
    return _mm512_maskz_scalef_ps(alive, p, n);
}
#else
#if defined(__AVX__)
#define V16_WIDTH 8
#else
#define V16_WIDTH 4
#endif
#if defined(__aarch64__)
#define V16_REGISTERS 8 /* 32 registers of 4 lanes */
#else
#define V16_REGISTERS (V16_WIDTH * 16 / 16) /* 16 registers of V16_WIDTH lanes */
#endif
#define V16_PARTS (16 / V16_WIDTH)
typedef float vn __attribute__((vector_size(4 * V16_WIDTH)));
typedef float vn_any __attribute__((vector_size(4 * V16_WIDTH), aligned(4), may_alias));
typedef int32_t vni __attribute__((vector_size(4 * V16_WIDTH)));
typedef struct {
    vn p[V16_PARTS];
} v16;
#define V16_EACH(result, expression)                       \
    v16 result;                                            \
    MI_UNROLL for (int i = 0; i < V16_PARTS; i++) {        \
        result.p[i] = (expression);                        \
    }
MI_INLINE v16 v_load(const float *p) {
    V16_EACH(r, *(const vn_any *)(p + i * V16_WIDTH));
    return r;
}
MI_INLINE void v_store(float *p, v16 a) {
    MI_UNROLL for (int i = 0; i < V16_PARTS; i++) *(vn_any *)(p + i * V16_WIDTH) = a.p[i];
}
MI_INLINE v16 v_set1(float a) {
    V16_EACH(r, (vn){0} + a);
    return r;
}
MI_INLINE v16 v_add(v16 a, v16 b) {
    V16_EACH(r, a.p[i] + b.p[i]);
    return r;
}
MI_INLINE v16 v_sub(v16 a, v16 b) {
    V16_EACH(r, a.p[i] - b.p[i]);
    return r;
}
MI_INLINE v16 v_mul(v16 a, v16 b) {
    V16_EACH(r, a.p[i] * b.p[i]);
    return r;
}
MI_INLINE v16 v_div(v16 a, v16 b) {
    V16_EACH(r, a.p[i] / b.p[i]);
    return r;
}
MI_INLINE vn vn_choose(vni mask, vn a, vn b) { return (vn)((mask & (vni)a) | (~mask & (vni)b)); }
MI_INLINE v16 v_max(v16 a, v16 b) {
    V16_EACH(r, vn_choose(a.p[i] > b.p[i], a.p[i], b.p[i]));
    return r;
}
MI_INLINE v16 v_fma(v16 a, v16 b, v16 c) {
    V16_EACH(r, a.p[i] * b.p[i] + c.p[i]);
    return r;
}
MI_INLINE float v_sum(v16 a) {
    float lanes[16];
    v_store(lanes, a);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}
MI_INLINE float v_most(v16 a) {
    float lanes[16];
    v_store(lanes, a);
    for (int i = 1; i < 16; i++) lanes[0] = lanes[i] > lanes[0] ? lanes[i] : lanes[0];
    return lanes[0];
}
typedef uint16_t vn_half __attribute__((vector_size(2 * V16_WIDTH)));
typedef int8_t vn_byte __attribute__((vector_size(V16_WIDTH)));
/* float16 -> float32, exact for every finite value, whatever the flush-denormal mode. */
MI_INLINE vn vn_from_half(vni h) {
    const vni magnitude = h & 0x7fff, sign = (h & 0x8000) << 16;
    const vn small = __builtin_convertvector(magnitude, vn) * 0x1p-24f;
    const vn normal = (vn)((magnitude << 13) + (112 << 23));
    return (vn)((vni)vn_choose(magnitude < 0x400, small, normal) | sign);
}
MI_INLINE v16 v_load_half(const uint8_t *p) {
    v16 r;
    MI_UNROLL for (int i = 0; i < V16_PARTS; i++) {
        vn_half h;
        memcpy(&h, p + 2 * i * V16_WIDTH, sizeof(h));
        r.p[i] = vn_from_half(__builtin_convertvector(h, vni));
    }
    return r;
}
MI_INLINE v16 v_load_int8(const uint8_t *p) {
    v16 r;
    MI_UNROLL for (int i = 0; i < V16_PARTS; i++) {
        vn_byte b;
        memcpy(&b, p + i * V16_WIDTH, sizeof(b));
        r.p[i] = __builtin_convertvector(__builtin_convertvector(b, vni), vn);
    }
    return r;
}
MI_INLINE vn vn_exp(vn a) {
    const vn zero = {0};
    const vn magic = zero + 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    vni alive = ~(a < zero - 87.0f);
    a = vn_choose(alive, a, zero);
    vn shifted = a * 1.44269504088896341f + magic;
    vn n = shifted - magic;
    vni power = ((vni)shifted - (vni)magic + 127) << 23;
    vn r = a - n * 0.693145751953125f;
    r = r - n * 1.42860682030941723212e-6f;
    vn p = zero + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * r) * r + r;
    p = p + 1.0f;
    return (vn)((vni)(p * (vn)power) & alive);
}
MI_INLINE v16 v_exp(v16 a) {
    V16_EACH(r, vn_exp(a.p[i]));
    return r;
}
#endif

MI_INLINE v16 v_zero(void) { return v_set1(0.0f); }

/* The first `count` (1..16) lanes to and from memory; lanes beyond are not touched, read as 0. */
MI_INLINE void v_store_first(float *p, v16 a, int count) {
    if (count >= 16) {
        v_store(p, a);
        return;
    }
    float lanes[16];
    v_store(lanes, a);
    memcpy(p, lanes, (size_t)count * sizeof(float));
}
MI_INLINE v16 v_load_first(const float *p, int count) {
    if (count >= 16) return v_load(p);
    float lanes[16] = {0};
    memcpy(lanes, p, (size_t)count * sizeof(float));
    return v_load(lanes);
}

#endif
