/* Collectives between processes (or threads) of one host: the slab protocol on shared memory.
 *
 * A sum runs over blocks of the message that fit into the first cache, in rank order, wide, with one
 * rounding; a NaN in the result is the one quiet NaN of its type, because processors differ in which
 * payload they keep.
 */
#include "slab.h"

typedef struct {
    int none;
} MiRows;

#include "collective.h"

#include <math.h>

#define EXPORT __attribute__((visibility("default")))
#define CHUNK 2048

MI_FN void mi_copy(mi_u64 to, mi_u64 from, mi_u32 bytes) {
    memcpy((void *)to, (const void *)from, bytes);
}
MI_FN void mi_ahead(const MiCall *call) { (void)call; }
MI_FN void mi_many(const MiCopies *copies) {
    for (mi_u32 i = 0; i < MI_WORLD - 1; i++)
        if (copies->bytes[i]) mi_copy(copies->to[i], copies->from[i], copies->bytes[i]);
}
MI_FN void mi_spread(const mi_u64 *to, mi_u32 places, mi_u64 from, mi_u32 bytes) {
    for (mi_u32 i = 0; bytes && i < places; i++) mi_copy(to[i], from, bytes);
}
MI_FN int mi_plan_rows(const MiCall *call, mi_u32 begin, mi_u32 end, MiRows *rows) {
    (void)call, (void)begin, (void)end, (void)rows;
    return 0; /* the cache makes a second pass cheap */
}
MI_FN int mi_start_rows(const MiCall *call, const mi_u64 *from, MiRows *rows) {
    (void)call, (void)from, (void)rows;
    return 0;
}
MI_FN void mi_finish_rows(const MiCall *call, MiRows *rows) { (void)call, (void)rows; }

static inline float bf16_wide(mi_u16 x) {
    union { mi_u32 u; float f; } v = {(mi_u32)x << 16};
    return v.f;
}
static inline mi_u16 bf16_round(float x) {
    union { float f; mi_u32 u; } v = {x};
    if (x != x) return 0x7fc0;
    return (mi_u16)((v.u + 0x7fffu + (v.u >> 16 & 1)) >> 16);
}
static inline float f16_wide(mi_u16 x) {
    union { mi_u16 u; _Float16 f; } v = {x};
    return (float)v.f;
}
static inline mi_u16 f16_round(float x) {
    union { _Float16 f; mi_u16 u; } v;
    if (x != x) return 0x7e00;
    v.f = (_Float16)x;
    return v.u;
}
static inline float f32_wide(float x) { return x; }
static inline float f32_round(float x) {
    union { mi_u32 u; float f; } v = {0x7fc00000u};
    return x != x ? v.f : x;
}
static inline double f64_wide(double x) { return x; }
static inline double f64_round(double x) {
    union { mi_u64 u; double f; } v = {0x7ff8000000000000ull};
    return x != x ? v.f : x;
}
static inline mi_u32 i32_wide(mi_u32 x) { return x; } /* unsigned: overflow wraps, as on a GPU */
static inline mi_u32 i32_round(mi_u32 x) { return x; }

#define SUM(name, element, wide)                                                                   \
    static void sum_##name(element *to, const mi_u64 *from, mi_u32 world, mi_u64 count) {          \
        wide total[CHUNK];                                                                         \
        for (mi_u64 at = 0; at < count; at += CHUNK) {                                             \
            const mi_u64 n = count - at < CHUNK ? count - at : CHUNK;                              \
            const element *first = (const element *)from[0] + at;                                  \
            for (mi_u64 i = 0; i < n; i++) total[i] = name##_wide(first[i]);                       \
            for (mi_u32 p = 1; p < world; p++) {                                                   \
                const element *next = (const element *)from[p] + at;                               \
                for (mi_u64 i = 0; i < n; i++) total[i] += name##_wide(next[i]);                   \
            }                                                                                      \
            for (mi_u64 i = 0; i < n; i++) to[at + i] = name##_round(total[i]);                    \
        }                                                                                          \
    }
SUM(bf16, mi_u16, float)
SUM(f16, mi_u16, float)
SUM(f32, float, float)
SUM(f64, double, double)
SUM(i32, mi_u32, mi_u32)

MI_FN void mi_sum(const MiCall *call, mi_u64 to, const mi_u64 *from, mi_u32 count) {
    switch (call->type) {
    case MI_BF16: sum_bf16((mi_u16 *)to, from, call->world, count); break;
    case MI_F16: sum_f16((mi_u16 *)to, from, call->world, count); break;
    case MI_F32: sum_f32((float *)to, from, call->world, count); break;
    case MI_F64: sum_f64((double *)to, from, call->world, count); break;
    case MI_I32: sum_i32((mi_u32 *)to, from, call->world, count); break;
    default: break;
    }
}

/* residual += y, rounded; RMSNorm of it. Mean of squares: 256 lanes, lane l takes groups of eight
 * elements l, l + 256, ... one after another, then lanes are added pairwise, halving their number:
 * the order of the CUDA kernel. Products and sums are rounded one by one (no fused multiply-add). */
#define LANES 256
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off")
#define EPILOGUE(name, element, wide, root)                                                        \
    static void rows_##name(const MiCall *call, mi_u64 begin, mi_u64 end) {                        \
        const mi_u64 hidden = call->hidden;                                                        \
        const element *y = (const element *)call->out, *w = (const element *)call->weight;         \
        element *residual = (element *)call->residual, *normed = (element *)call->normed;          \
        for (mi_u64 row = begin; row < end; row += hidden) {                                       \
            wide lane[LANES] = {0};                                                                \
            for (mi_u64 i = 0; i < hidden; i++) {                                                  \
                const mi_u64 at = row + i;                                                         \
                residual[at] = name##_round(name##_wide(y[at]) + name##_wide(residual[at]));       \
                const wide x = name##_wide(residual[at]), square = x * x;                          \
                lane[i / 8 % LANES] += square;                                                     \
            }                                                                                      \
            for (int step = LANES / 2; step; step /= 2)                                            \
                for (int l = 0; l < step; l++) lane[l] += lane[l + step];                          \
            const wide mean = lane[0] / (wide)hidden;                                              \
            const wide scale = (wide)1 / root(mean + (wide)call->eps);                             \
            for (mi_u64 i = 0; i < hidden; i++) {                                                  \
                const wide x = name##_wide(residual[row + i]) * scale;                             \
                normed[row + i] = name##_round(x * name##_wide(w[i]));                             \
            }                                                                                      \
        }                                                                                          \
    }
EPILOGUE(bf16, mi_u16, float, sqrtf)
EPILOGUE(f16, mi_u16, float, sqrtf)
EPILOGUE(f32, float, float, sqrtf)
EPILOGUE(f64, double, double, sqrt)
#pragma GCC pop_options

MI_FN void mi_epilogue(const MiCall *call, mi_u64 begin, mi_u64 end) {
    switch (call->type) {
    case MI_BF16: rows_bf16(call, begin, end); break;
    case MI_F16: rows_f16(call, begin, end); break;
    case MI_F32: rows_f32(call, begin, end); break;
    case MI_F64: rows_f64(call, begin, end); break;
    default: break;
    }
}

/* One call of block `block` of `grid`; its code. */
EXPORT mi_u64 mi_run(const MiCall *call, mi_u32 block, mi_u32 grid);
mi_u64 mi_run(const MiCall *call, mi_u32 block, mi_u32 grid) {
    mi_host_block = block;
    mi_host_grid = grid;
    return mi_collective(call, call->kind);
}

/* A slab of `bytes` becomes one that has made `calls` calls. */
EXPORT void mi_clear(mi_u64 slab, mi_u64 calls);
void mi_clear(mi_u64 slab, mi_u64 calls) {
    memset((void *)slab, 0, MI_HEAD);
    *mi_word(slab, MI_AT_CALLS) = calls;
    for (mi_u64 at = MI_HEADER; at < MI_HEAD; at += MI_FLAG_STEP)
        *mi_word(slab, at) = calls & MI_GENERATION;
}

/* Set a rank's abort word, unless it is set. */
EXPORT void mi_abort(mi_u64 slab, mi_u64 word);
void mi_abort(mi_u64 slab, mi_u64 word) {
    if (mi_get(mi_word(slab, MI_AT_ABORT)) == 0) mi_put(mi_word(slab, MI_AT_ABORT), word);
}

/* Numbers of the layout, in the order of `layout.CHECKED`. */
EXPORT void mi_layout(mi_u64 *out);
void mi_layout(mi_u64 *out) {
    const mi_u64 all[] = {MI_WORLD,    MI_PHASES,  MI_BLOCKS,     MI_HEADER,     MI_FLAG_STEP,
                          MI_SIDE,     MI_AT_PID,  MI_AT_CALLS,   MI_AT_ABORT,   MI_AT_BEAT,
                          MI_AT_ERROR, MI_AT_CAUSE, MI_CAUSE, sizeof(MiCall), sizeof(MiError)};
    memcpy(out, all, sizeof all);
}
