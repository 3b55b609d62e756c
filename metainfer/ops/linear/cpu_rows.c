/* y = x W^T + b in float32 with W left in GGUF's 4- and 8-bit blocks.
 *
 * Packing "tiles of 16 rows": a tile holds 16 rows of W; block after block of 32 columns:
 *   16 float16 scales d, for Q4_1 16 float16 minima m, then
 *   Q4: 4 x 16 words, word (w, row) holding columns 8w..8w+7 of the block, low nibble first;
 *   Q8: 32 x 16 int8, column by column.
 * Rows beyond N are zero.
 *
 * Weights are decoded to exactly the float32 that GGUF defines (d*q is exact, one rounding for +m).
 * Every output is ((chunk 0) + chunk 1) + ... + bias, a chunk being a chain of fused multiply-adds
 * over 64 columns in ascending order (short chains: the error of BLAS or less). All paths below
 * keep that order, so a row's result depends neither on the number of rows in x nor on threads.
 *
 *   T <= STREAM_MAX: decode in registers, multiply with up to T_STEP rows of x at once.
 *   T larger: decode a panel of 16 NR rows x 512 columns into cache, then a register-blocked GEMM.
 */
#include "../cpu_common.h"

enum { Q4_0 = 0, Q4_1 = 1, Q8_0 = 2 };
enum { TILE = 16, BLOCK = 32, CHUNK = 64, PANEL = 512 };

#if V16_REGISTERS >= 32
enum { T_STEP = 8, MR = 14, NR = 2, STREAM_MAX = 16 };
#elif V16_REGISTERS >= 8
enum { T_STEP = 4, MR = 6, NR = 1, STREAM_MAX = 4 };
#else
enum { T_STEP = 2, MR = 3, NR = 1, STREAM_MAX = 2 };
#endif
enum {
    X_STRIDE = PANEL + 16, /* floats; not a multiple of 4 KiB, so rows fall into different sets */
    T_BLOCK = MR * 15      /* rows of x kept in the second-level cache */
};

MI_INLINE int block_bytes(int scheme) {
    return scheme == Q8_0 ? 32 + 512 : scheme == Q4_1 ? 64 + 256 : 32 + 256;
}

typedef struct {
    int64_t scheme, tiles, rows, first; /* tiles of 16 rows; first output column */
    const uint8_t *data;
} segment;

typedef struct {
    const float *x;
    int64_t T, ldx, K;
    const segment *segments;
    int64_t count;
    const float *bias; /* [N] or NULL */
    float *y;
    int64_t ldy;
    uint64_t call; /* tells one call's x from another's */
    int failed;
} problem;

/* ---- decoding ----------------------------------------------------------------------------- */

#if MI_AVX512
typedef __m512i nibbles;
MI_INLINE nibbles load_nibbles(const uint8_t *p) { return _mm512_loadu_si512(p); }
/* The value of each lane's lowest nibble; drops it. `permute` looks at 4 bits only. */
MI_INLINE v16 take_nibble(nibbles *q, v16 table) {
    v16 value = _mm512_permutexvar_ps(*q, table);
    *q = _mm512_srli_epi32(*q, 4);
    return value;
}
MI_INLINE v16 nibble_table(int scheme) {
    const v16 table =
        _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return scheme == Q4_0 ? v_sub(table, v_set1(8.0f)) : table;
}
#else
typedef struct {
    vni p[V16_PARTS];
} nibbles;
typedef int32_t vni_any __attribute__((vector_size(4 * V16_WIDTH), aligned(4), may_alias));
MI_INLINE nibbles load_nibbles(const uint8_t *p) {
    nibbles r;
    MI_UNROLL for (int i = 0; i < V16_PARTS; i++)
        r.p[i] = *(const vni_any *)(p + 4 * i * V16_WIDTH);
    return r;
}
MI_INLINE v16 take_nibble(nibbles *q, v16 zero) {
    v16 r;
    MI_UNROLL for (int i = 0; i < V16_PARTS; i++) {
        r.p[i] = __builtin_convertvector(q->p[i] & 15, vn) - zero.p[i];
        q->p[i] >>= 4;
    }
    return r;
}
MI_INLINE v16 nibble_table(int scheme) { return v_set1(scheme == Q4_0 ? 8.0f : 0.0f); }
#endif

MI_INLINE v16 scaled(int scheme, v16 q, v16 d, v16 m) {
    return scheme == Q4_1 ? v_fma(q, d, m) : v_mul(q, d);
}

/* One tile's columns [k0, k0 + columns) as float32, written at panel[k * stride + lane]. */
MI_INLINE void decode_panel(int scheme, const uint8_t *block, int64_t columns, float *panel,
                            int64_t stride) {
    const v16 table = nibble_table(scheme);
    for (int64_t k = 0; k < columns; k += BLOCK, block += block_bytes(scheme)) {
        const v16 d = v_load_half(block);
        const v16 m = scheme == Q4_1 ? v_load_half(block + 32) : d;
        const uint8_t *codes = block + (scheme == Q4_1 ? 64 : 32);
        if (scheme == Q8_0) {
            for (int i = 0; i < BLOCK; i++, panel += stride)
                v_store(panel, scaled(scheme, v_load_int8(codes + 16 * i), d, m));
        } else {
            for (int w = 0; w < 4; w++) {
                nibbles q = load_nibbles(codes + 64 * w);
                MI_UNROLL for (int i = 0; i < 8; i++, panel += stride)
                    v_store(panel, scaled(scheme, take_nibble(&q, table), d, m));
            }
        }
    }
}

/* ---- small T: one read of the weights, decoded in registers -------------------------------- */

/* Adds a chunk of `blocks` blocks: R neighbouring tiles by T rows of x, x[t * X_STRIDE + k]. */
MI_INLINE void stream_chunk(const int scheme, const int R, const int T, const uint8_t *tile,
                            int64_t tile_bytes, int64_t blocks, const float *x, v16 *sum) {
    const v16 table = nibble_table(scheme);
    MI_UNROLL for (int i = 0; i < R * T; i++) sum[i] = v_zero();
    for (int64_t b = 0; b < blocks; b++, tile += block_bytes(scheme), x += BLOCK) {
        v16 d[4], m[4];
        const uint8_t *codes = tile + (scheme == Q4_1 ? 64 : 32);
        MI_UNROLL for (int r = 0; r < R; r++) {
            d[r] = v_load_half(tile + r * tile_bytes);
            m[r] = scheme == Q4_1 ? v_load_half(tile + r * tile_bytes + 32) : d[r];
        }
        for (int w = 0; w < 4; w++) {
            nibbles q[4];
            if (scheme != Q8_0)
                MI_UNROLL for (int r = 0; r < R; r++)
                    q[r] = load_nibbles(codes + r * tile_bytes + 64 * w);
            MI_UNROLL for (int i = 0; i < 8; i++) {
                v16 value[4];
                MI_UNROLL for (int r = 0; r < R; r++) {
                    const uint8_t *bytes = codes + r * tile_bytes + 16 * (8 * w + i);
                    value[r] = scheme == Q8_0 ? v_load_int8(bytes) : take_nibble(&q[r], table);
                    value[r] = scaled(scheme, value[r], d[r], m[r]);
                }
                MI_UNROLL for (int t = 0; t < T; t++) {
                    const v16 xt = v_set1(x[t * X_STRIDE + 8 * w + i]);
                    MI_UNROLL for (int r = 0; r < R; r++)
                        sum[t * R + r] = v_fma(value[r], xt, sum[t * R + r]);
                }
            }
        }
    }
}

/* R tiles by T rows over all of K. `x` is [panel][T_all][X_STRIDE]. */
MI_INLINE void stream_tiles(const int scheme, const int R, const int T, const problem *p,
                            const segment *s, int64_t tile, const float *x, int64_t t0) {
    const int64_t bytes = p->K / BLOCK * block_bytes(scheme);
    const uint8_t *data = s->data + tile * bytes;
    v16 total[32];
    MI_UNROLL for (int i = 0; i < R * T; i++) total[i] = v_zero();
    for (int64_t k = 0; k < p->K; k += CHUNK) {
        const int64_t columns = p->K - k < CHUNK ? p->K - k : CHUNK;
        const float *from = x + (k / PANEL * p->T + t0) * X_STRIDE + k % PANEL;
        v16 sum[32];
        stream_chunk(scheme, R, T, data, bytes, columns / BLOCK, from, sum);
        MI_UNROLL for (int i = 0; i < R * T; i++) total[i] = v_add(total[i], sum[i]);
        data += columns / BLOCK * block_bytes(scheme);
    }
    MI_UNROLL for (int r = 0; r < R; r++) {
        const int64_t row = (tile + r) * TILE;
        const int lanes = s->rows - row < TILE ? (int)(s->rows - row) : TILE;
        const int64_t column = s->first + row;
        MI_UNROLL for (int t = 0; t < T; t++) {
            v16 value = total[t * R + r];
            if (p->bias) value = v_add(value, v_load_first(p->bias + column, lanes));
            v_store_first(p->y + (t0 + t) * p->ldy + column, value, lanes);
        }
    }
}

typedef void (*stream_kernel)(const problem *, const segment *, int64_t, const float *, int64_t);

#define STREAM(S, R, T)                                                                       \
    static __attribute__((noinline)) void stream_##S##_##R##_##T(                             \
        const problem *p, const segment *s, int64_t tile, const float *x, int64_t t0) {       \
        stream_tiles(S, R, T, p, s, tile, x, t0);                                             \
    }
#define STREAM_SCHEMES(R, T) STREAM(Q4_0, R, T) STREAM(Q4_1, R, T) STREAM(Q8_0, R, T)
#define NAMES(R, T) {stream_Q4_0_##R##_##T, stream_Q4_1_##R##_##T, stream_Q8_0_##R##_##T}

STREAM_SCHEMES(1, 1) STREAM_SCHEMES(1, 2)
#if V16_REGISTERS >= 32
STREAM_SCHEMES(1, 3) STREAM_SCHEMES(1, 4) STREAM_SCHEMES(1, 5) STREAM_SCHEMES(1, 6)
STREAM_SCHEMES(1, 7) STREAM_SCHEMES(1, 8) STREAM_SCHEMES(4, 1) STREAM_SCHEMES(4, 2)
STREAM_SCHEMES(2, 3) STREAM_SCHEMES(2, 4) STREAM_SCHEMES(2, 5) STREAM_SCHEMES(2, 6)
STREAM_SCHEMES(2, 7) STREAM_SCHEMES(2, 8)
static const int wide_tiles[T_STEP] = {4, 4, 2, 2, 2, 2, 2, 2};
static const stream_kernel wide[T_STEP][3] = {NAMES(4, 1), NAMES(4, 2), NAMES(2, 3), NAMES(2, 4),
                                              NAMES(2, 5), NAMES(2, 6), NAMES(2, 7), NAMES(2, 8)};
static const stream_kernel narrow[T_STEP][3] = {NAMES(1, 1), NAMES(1, 2), NAMES(1, 3), NAMES(1, 4),
                                                NAMES(1, 5), NAMES(1, 6), NAMES(1, 7), NAMES(1, 8)};
#elif V16_REGISTERS >= 8
STREAM_SCHEMES(1, 3) STREAM_SCHEMES(1, 4) STREAM_SCHEMES(2, 1) STREAM_SCHEMES(2, 2)
static const int wide_tiles[T_STEP] = {2, 2, 1, 1};
static const stream_kernel wide[T_STEP][3] = {NAMES(2, 1), NAMES(2, 2), NAMES(1, 3), NAMES(1, 4)};
static const stream_kernel narrow[T_STEP][3] = {NAMES(1, 1), NAMES(1, 2), NAMES(1, 3), NAMES(1, 4)};
#else
static const int wide_tiles[T_STEP] = {1, 1};
static const stream_kernel wide[T_STEP][3] = {NAMES(1, 1), NAMES(1, 2)};
static const stream_kernel narrow[T_STEP][3] = {NAMES(1, 1), NAMES(1, 2)};
#endif

/* Copies x[0..T) columns [k, k + columns) to rows of X_STRIDE floats. */
MI_INLINE void gather_x(const problem *p, int64_t t0, int64_t T, int64_t k, int64_t columns,
                        float *to) {
    for (int64_t t = 0; t < T; t++)
        memcpy(to + t * X_STRIDE, p->x + (t0 + t) * p->ldx + k, (size_t)columns * sizeof(float));
}

static void stream_task(void *context, int part, int parts) {
    problem *p = context;
    const int64_t panels = (p->K + PANEL - 1) / PANEL;
    float *x = mi_scratch(0, (size_t)(panels * p->T * X_STRIDE) * sizeof(float));
    if (!x) {
        p->failed = 1;
        return;
    }
    static __thread uint64_t gathered; /* the call whose x this thread's scratch holds */
    for (int64_t c = 0; c < panels && gathered != p->call; c++) {
        const int64_t left = p->K - c * PANEL;
        gather_x(p, 0, p->T, c * PANEL, left < PANEL ? left : PANEL, x + c * p->T * X_STRIDE);
    }
    gathered = p->call;
    int64_t tiles = 0, begin, end, base = 0;
    for (int64_t i = 0; i < p->count; i++) tiles += p->segments[i].tiles;
    mi_share(tiles, part, parts, &begin, &end);
    const int64_t steps = (p->T + T_STEP - 1) / T_STEP;
    for (int64_t i = 0; i < p->count; base += p->segments[i].tiles, i++) {
        const segment *s = &p->segments[i];
        int64_t tile = begin > base ? begin - base : 0;
        const int64_t stop = end - base < s->tiles ? end - base : s->tiles;
        while (tile < stop) {
            const int most = wide_tiles[(p->T + steps - 1) / steps - 1];
            const int take = stop - tile >= most ? most : 1;
            for (int64_t j = 0; j < steps; j++) {
                int64_t t0, t1;
                mi_share(p->T, (int)j, (int)steps, &t0, &t1);
                const int rows = (int)(t1 - t0);
                if (take == wide_tiles[rows - 1]) {
                    wide[rows - 1][s->scheme](p, s, tile, x, t0);
                } else {
                    for (int r = 0; r < take; r++)
                        narrow[rows - 1][s->scheme](p, s, tile + r, x, t0);
                }
            }
            tile += take;
        }
    }
}

/* ---- large T: panels and a register-blocked GEMM ------------------------------------------- */

/* rows x (NR * 16) outputs over one panel; `add`: y holds the sum of the panels before. */
MI_INLINE void gemm_rows(const int rows, const float *x, const float *panel, int64_t columns,
                         float *y, int64_t ldy, const int *lanes, int add, const float *bias) {
    float total[MR * NR * TILE]; /* in memory: the registers hold a chunk */
    for (int t = 0; t < rows; t++)
        for (int r = 0; r < NR; r++)
            v_store(total + (t * NR + r) * TILE,
                    add && lanes[r] ? v_load_first(y + t * ldy + r * TILE, lanes[r]) : v_zero());
    for (int64_t k0 = 0; k0 < columns; k0 += CHUNK) {
        const int64_t stop = columns - k0 < CHUNK ? columns : k0 + CHUNK;
        v16 sum[MR * NR];
        MI_UNROLL for (int i = 0; i < rows * NR; i++) sum[i] = v_zero();
        for (int64_t k = k0; k < stop; k++) {
            v16 w[NR];
            MI_UNROLL for (int r = 0; r < NR; r++) w[r] = v_load(panel + (k * NR + r) * TILE);
            MI_UNROLL for (int t = 0; t < rows; t++) {
                const v16 xt = v_set1(x[t * X_STRIDE + k]);
                MI_UNROLL for (int r = 0; r < NR; r++)
                    sum[t * NR + r] = v_fma(w[r], xt, sum[t * NR + r]);
            }
        }
        MI_UNROLL for (int i = 0; i < rows * NR; i++)
            v_store(total + i * TILE, v_add(v_load(total + i * TILE), sum[i]));
    }
    for (int r = 0; r < NR && lanes[r]; r++) {
        const v16 b = bias ? v_load_first(bias + r * TILE, lanes[r]) : v_zero();
        for (int t = 0; t < rows; t++) {
            const v16 value = v_load(total + (t * NR + r) * TILE);
            v_store_first(y + t * ldy + r * TILE, bias ? v_add(value, b) : value, lanes[r]);
        }
    }
}

typedef void (*gemm_kernel)(const float *, const float *, int64_t, float *, int64_t, const int *,
                            int, const float *);
#define GEMM(ROWS)                                                                               \
    static __attribute__((noinline)) void gemm_##ROWS(                                           \
        const float *x, const float *panel, int64_t columns, float *y, int64_t ldy,              \
        const int *lanes, int add, const float *bias) {                                          \
        gemm_rows(ROWS, x, panel, columns, y, ldy, lanes, add, bias);                            \
    }
GEMM(1) GEMM(2) GEMM(3)
#if V16_REGISTERS >= 8
GEMM(4) GEMM(5) GEMM(6)
#endif
#if V16_REGISTERS >= 32
GEMM(7) GEMM(8) GEMM(9) GEMM(10) GEMM(11) GEMM(12) GEMM(13) GEMM(14)
#endif
static const gemm_kernel gemms[MR] = {
    gemm_1, gemm_2, gemm_3,
#if V16_REGISTERS >= 8
    gemm_4, gemm_5, gemm_6,
#endif
#if V16_REGISTERS >= 32
    gemm_7, gemm_8, gemm_9, gemm_10, gemm_11, gemm_12, gemm_13, gemm_14,
#endif
};

static void decode_tile(int64_t scheme, const uint8_t *data, int64_t columns, float *panel,
                        int64_t stride) {
    if (scheme == Q4_0) decode_panel(Q4_0, data, columns, panel, stride);
    else if (scheme == Q4_1) decode_panel(Q4_1, data, columns, panel, stride);
    else decode_panel(Q8_0, data, columns, panel, stride);
}

/* One group of NR tiles of a segment against rows [t0, t1) of x, one panel. */
static void gemm_group(const problem *p, const segment *s, int64_t group, int64_t t0, int64_t t1,
                       int64_t k, int64_t columns, const float *x, float *panel) {
    const int64_t row = group * NR * TILE;
    int lanes[NR];
    for (int r = 0; r < NR; r++) {
        const int64_t left = s->rows - row - r * TILE;
        lanes[r] = left >= TILE ? TILE : left > 0 ? (int)left : 0;
        const int64_t block = (group * NR + r) * (p->K / BLOCK) + k / BLOCK;
        if (lanes[r])
            decode_tile(s->scheme, s->data + block * block_bytes((int)s->scheme), columns,
                        panel + r * TILE, NR * TILE);
        else
            for (int64_t i = 0; i < columns; i++) v_store(panel + (i * NR + r) * TILE, v_zero());
    }
    const int last = k + columns == p->K;
    const float *bias = last && p->bias ? p->bias + s->first + row : NULL;
    const int steps = (int)((t1 - t0 + MR - 1) / MR);
    for (int j = 0; j < steps; j++) { /* even steps: 16 rows are 8 + 8, not 14 + 2 */
        int64_t from, to;
        mi_share(t1 - t0, j, steps, &from, &to);
        gemms[to - from - 1](x + from * X_STRIDE, panel, columns,
                             p->y + (t0 + from) * p->ldy + s->first + row, p->ldy, lanes, k > 0,
                             bias);
    }
}

static void gemm_task(void *context, int part, int parts) {
    problem *p = context;
    float *x = mi_scratch(2, (size_t)T_BLOCK * X_STRIDE * sizeof(float));
    float *panel = mi_scratch(1, (size_t)PANEL * NR * TILE * sizeof(float));
    if (!x || !panel) {
        p->failed = 1;
        return;
    }
    int64_t groups = 0, begin, end;
    for (int64_t i = 0; i < p->count; i++) groups += (p->segments[i].tiles + NR - 1) / NR;
    const int64_t t_blocks = (p->T + T_BLOCK - 1) / T_BLOCK;
    const int64_t t_size = ((p->T + t_blocks - 1) / t_blocks + MR - 1) / MR * MR;
    mi_share(groups * t_blocks, part, parts, &begin, &end);
    for (int64_t tb = begin / groups; tb < t_blocks && tb * groups < end; tb++) {
        const int64_t t0 = tb * t_size < p->T ? tb * t_size : p->T;
        const int64_t t1 = t0 + t_size < p->T ? t0 + t_size : p->T;
        if (t0 == t1) continue;
        const int64_t first = begin > tb * groups ? begin - tb * groups : 0;
        const int64_t stop = end - tb * groups < groups ? end - tb * groups : groups;
        for (int64_t k = 0; k < p->K; k += PANEL) {
            const int64_t columns = p->K - k < PANEL ? p->K - k : PANEL;
            gather_x(p, t0, t1 - t0, k, columns, x);
            int64_t base = 0;
            for (int64_t i = 0; i < p->count; i++) {
                const segment *s = &p->segments[i];
                const int64_t here = (s->tiles + NR - 1) / NR;
                for (int64_t g = first > base ? first - base : 0; g < here && base + g < stop; g++)
                    gemm_group(p, s, g, t0, t1, k, columns, x, panel);
                base += here;
            }
        }
    }
}

/* ---- what Python calls --------------------------------------------------------------------- */

/* y [T, N] = x [T, K] W^T + bias. ldx, ldy in floats. 0, or 1 when memory ran out. */
MI_EXPORT int mi_linear(const float *x, int64_t T, int64_t ldx, int64_t K, const segment *segments,
                        int64_t count, const float *bias, float *y, int64_t ldy, int threads) {
    static uint64_t calls;
    problem p = {x, T, ldx, K, segments, count, bias, y, ldy, 0, 0};
    p.call = __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
    if (T <= STREAM_MAX) mi_parallel(stream_task, &p, 4 * threads, threads);
    else mi_parallel(gemm_task, &p, 2 * threads, threads);
    return p.failed;
}

/* Repacks `rows` GGUF rows of K columns into tiles of 16 rows. */
MI_EXPORT void mi_pack(const uint8_t *raw, int64_t rows, int64_t K, int scheme, uint8_t *packed) {
    const int64_t blocks = K / BLOCK, raw_block = scheme == Q8_0 ? 34 : scheme == Q4_1 ? 20 : 18;
    const int head = scheme == Q4_1 ? 64 : 32, bytes = block_bytes(scheme);
    memset(packed, 0, (size_t)((rows + TILE - 1) / TILE * blocks * bytes));
    for (int64_t n = 0; n < rows; n++) {
        const int lane = (int)(n % TILE);
        for (int64_t b = 0; b < blocks; b++) {
            const uint8_t *from = raw + (n * blocks + b) * raw_block;
            uint8_t *to = packed + (n / TILE * blocks + b) * bytes;
            memcpy(to + 2 * lane, from, 2);
            if (scheme == Q4_1) memcpy(to + 32 + 2 * lane, from + 2, 2);
            const uint8_t *codes = from + (scheme == Q4_1 ? 4 : 2);
            if (scheme == Q8_0) {
                for (int k = 0; k < BLOCK; k++) to[head + 16 * k + lane] = codes[k];
                continue;
            }
            for (int k = 0; k < BLOCK; k += 2) { /* a byte of the word: two neighbouring columns */
                const int low = k < 16 ? codes[k] & 15 : codes[k - 16] >> 4;
                const int high = k < 16 ? codes[k + 1] & 15 : codes[k - 15] >> 4;
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the packing assumes a little-endian CPU"
#endif
                to[head + 64 * (k / 8) + 4 * lane + k % 8 / 2] = (uint8_t)(low | high << 4);
            }
        }
    }
}

typedef struct {
    const int64_t *ids;
    int64_t count, K;
    const segment *s;
    float *out;
} lookup;

static void embed_task(void *context, int part, int parts) {
    const lookup *e = context;
    const int scheme = (int)e->s->scheme, bytes = block_bytes(scheme);
    int64_t begin, end;
    mi_share(e->count, part, parts, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        const int64_t id = e->ids[i], lane = id % TILE;
        const uint8_t *block = e->s->data + id / TILE * (e->K / BLOCK) * bytes;
        float *out = e->out + i * e->K;
        for (int64_t k = 0; k < e->K; k += BLOCK, block += bytes) {
            float column[TILE];
            v_store(column, v_load_half(block));
            const float d = column[lane];
            v_store(column, v_load_half(block + (scheme == Q4_1 ? 32 : 0)));
            const float m = column[lane];
            const uint8_t *codes = block + (scheme == Q4_1 ? 64 : 32);
            for (int j = 0; j < BLOCK; j++) {
                if (scheme == Q8_0) {
                    out[k + j] = (float)(int8_t)codes[16 * j + lane] * d;
                    continue;
                }
                const int byte = codes[64 * (j / 8) + 4 * lane + j % 8 / 2];
                const float q = (float)(j & 1 ? byte >> 4 : byte & 15);
                out[k + j] = scheme == Q4_1 ? q * d + m : (q - 8.0f) * d;
            }
        }
    }
}

/* out [count, K] = rows `ids` of a packed matrix of one segment; ids are in range. */
MI_EXPORT void mi_embed(const int64_t *ids, int64_t count, int64_t K, const segment *s, float *out,
                        int threads) {
    lookup e = {ids, count, K, s, out};
    mi_parallel(embed_task, &e, 2 * threads, count * K >= 65536 ? threads : 1);
}
