/* Paged attention in float32: softmax(q k^T * scale) v over the pages of each sequence.
 *
 * Keys are taken in blocks of 64 and splits of 256 that start at multiples of absolute position.
 * For one (query, head):
 *   score   chains of fused multiply-adds over 16 columns of the head, summed ascending;
 *   block   online softmax: running maximum, sum and weighted values within the split;
 *   split   the splits' (maximum, sum, values) merged in ascending order.
 * Nothing else enters, so a query's result depends neither on the queries and sequences beside it,
 * nor on how a prompt was cut into chunks, nor on the number of threads or the page size.
 *
 * A task is (sequence, kv head, block of queries); the query heads of a group share its keys and
 * values. With few tasks of few rows (decode), a task is one split and the merge comes after.
 */
#include "../cpu_common.h"

enum { KEYS = 64, SPLIT = 256, ROWS = 96, SPLIT_ROWS = 32, MAX_D = 256 };
#if V16_REGISTERS >= 32
enum { MR = 6, NR = 4 };
#elif V16_REGISTERS >= 8
enum { MR = 6, NR = 1 };
#else
enum { MR = 3, NR = 1 };
#endif

enum { OK = 0, NO_MEMORY = 1, BAD_LENGTHS = 2, BAD_PAGE = 3 };

typedef struct {
    int32_t sequence, head, queries, partial; /* partial: index of its first row, or -1 */
    int64_t first;                            /* first query, counted in the sequence */
    int64_t split_begin, split_end;           /* splits to do */
} task;

typedef struct {
    const float *q, *k, *v;
    float *out;
    const int32_t *table, *query_start, *context;
    int64_t q_stride, out_stride, page_stride, token_stride, head_stride, table_stride;
    int64_t pages, page, group, D, window; /* window 0: none */
    float scale;
    task *tasks;
    int64_t count, next;
    float *partials; /* [row][D + 2]: values, maximum, sum */
    int error;
} problem;

/* ---- register-blocked products ------------------------------------------------------------ */

/* s[t * KEYS + 16 r] = sum over d of q[t * D + d] * kt[d * KEYS + 16 r]; rows x (16 n) */
MI_INLINE void scores_tile(const int rows, const int n, const float *q, const float *kt, int64_t D,
                           float *s) {
    v16 total[MR * 4];
    MI_UNROLL for (int i = 0; i < rows * n; i++) total[i] = v_zero();
    for (int64_t d0 = 0; d0 < D; d0 += 16) {
        v16 sum[MR * 4];
        MI_UNROLL for (int i = 0; i < rows * n; i++) sum[i] = v_zero();
        for (int64_t d = d0; d < d0 + 16; d++) {
            v16 b[4];
            MI_UNROLL for (int r = 0; r < n; r++) b[r] = v_load(kt + d * KEYS + 16 * r);
            MI_UNROLL for (int t = 0; t < rows; t++) {
                const v16 a = v_set1(q[t * D + d]);
                MI_UNROLL for (int r = 0; r < n; r++)
                    sum[t * n + r] = v_fma(a, b[r], sum[t * n + r]);
            }
        }
        MI_UNROLL for (int i = 0; i < rows * n; i++) total[i] = v_add(total[i], sum[i]);
    }
    MI_UNROLL for (int t = 0; t < rows; t++)
        MI_UNROLL for (int r = 0; r < n; r++) v_store(s + t * KEYS + 16 * r, total[t * n + r]);
}

/* o[t * D + 16 r] = o * alpha[t] + sum over j in [begin, end) of p[t * KEYS + j] * v[j][16 r]) */
MI_INLINE void values_tile(const int rows, const int n, const float *p, const float *const *v,
                           int64_t column, int begin, int end, const float *alpha, int64_t D,
                           float *o) {
    v16 sum[MR * 4];
    MI_UNROLL for (int i = 0; i < rows * n; i++) sum[i] = v_zero();
    for (int j = begin; j < end; j++) {
        v16 b[4];
        MI_UNROLL for (int r = 0; r < n; r++) b[r] = v_load(v[j] + column + 16 * r);
        MI_UNROLL for (int t = 0; t < rows; t++) {
            const v16 a = v_set1(p[t * KEYS + j]);
            MI_UNROLL for (int r = 0; r < n; r++) sum[t * n + r] = v_fma(a, b[r], sum[t * n + r]);
        }
    }
    MI_UNROLL for (int t = 0; t < rows; t++)
        MI_UNROLL for (int r = 0; r < n; r++) {
            float *to = o + t * D + 16 * r;
            v_store(to, v_fma(v_load(to), v_set1(alpha[t]), sum[t * n + r]));
        }
}

#define TILES(ROWS_)                                                                            \
    static __attribute__((noinline)) void scores_##ROWS_(const float *q, const float *kt,       \
                                                         int64_t D, float *s) {                 \
        for (int c = 0; c < KEYS; c += 16 * NR) scores_tile(ROWS_, NR, q, kt + c, D, s + c);    \
    }                                                                                           \
    static __attribute__((noinline)) void values_##ROWS_(                                       \
        const float *p, const float *const *v, int begin, int end, const float *alpha,          \
        int64_t D, float *o) {                                                                  \
        int64_t c = 0;                                                                          \
        for (; c + 16 * NR <= D; c += 16 * NR)                                                  \
            values_tile(ROWS_, NR, p, v, c, begin, end, alpha, D, o + c);                       \
        for (; c < D; c += 16) values_tile(ROWS_, 1, p, v, c, begin, end, alpha, D, o + c);     \
    }
TILES(1) TILES(2) TILES(3)
#if V16_REGISTERS >= 8
TILES(4) TILES(5) TILES(6)
#endif
typedef void (*scores_kernel)(const float *, const float *, int64_t, float *);
typedef void (*values_kernel)(const float *, const float *const *, int, int, const float *,
                              int64_t, float *);
static const scores_kernel scores[MR] = {
    scores_1, scores_2, scores_3,
#if V16_REGISTERS >= 8
    scores_4, scores_5, scores_6,
#endif
};
static const values_kernel values[MR] = {
    values_1, values_2, values_3,
#if V16_REGISTERS >= 8
    values_4, values_5, values_6,
#endif
};

/* kt[d * KEYS + j] = k[j][d] for 16 keys and 16 columns. */
MI_INLINE void transpose_16(const float *const *k, int64_t d, float *kt) {
#if MI_AVX512
    __m512 a[16], b[16];
    MI_UNROLL for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_ps(k[i] + d);
    MI_UNROLL for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
    MI_UNROLL for (int i = 0; i < 16; i += 4) {
        MI_UNROLL for (int c = 0; c < 2; c++) {
            const __m512d x = _mm512_castps_pd(b[i + c]), y = _mm512_castps_pd(b[i + c + 2]);
            a[i + 2 * c] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
            a[i + 2 * c + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
        }
    }
    MI_UNROLL for (int c = 0; c < 4; c++) {
        const __m512 x = _mm512_shuffle_f32x4(a[c], a[4 + c], 0x44);
        const __m512 y = _mm512_shuffle_f32x4(a[c], a[4 + c], 0xee);
        const __m512 z = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0x44);
        const __m512 w = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0xee);
        _mm512_store_ps(kt + c * KEYS, _mm512_shuffle_f32x4(x, z, 0x88));
        _mm512_store_ps(kt + (4 + c) * KEYS, _mm512_shuffle_f32x4(x, z, 0xdd));
        _mm512_store_ps(kt + (8 + c) * KEYS, _mm512_shuffle_f32x4(y, w, 0x88));
        _mm512_store_ps(kt + (12 + c) * KEYS, _mm512_shuffle_f32x4(y, w, 0xdd));
    }
#else
    for (int j = 0; j < 16; j++)
        for (int c = 0; c < 16; c++) kt[c * KEYS + j] = k[j][d + c];
#endif
}

/* ---- one task ------------------------------------------------------------------------------ */

typedef struct {
    float *q, *o, *s, *kt, *total; /* [rows][D], [rows][D], [rows][KEYS], [D][KEYS], [rows][D] */
    float *most, *sum, *alpha, *total_most, *total_sum; /* [rows] each */
} scratch;

static int take_scratch(int64_t D, scratch *w) {
    const size_t rows = ROWS, floats = rows * (size_t)D * 3 + (rows + (size_t)D) * KEYS + rows * 5;
    float *memory = mi_scratch(0, floats * sizeof(float));
    if (!memory) return 0;
    w->q = memory;
    w->o = w->q + rows * (size_t)D;
    w->total = w->o + rows * (size_t)D;
    w->s = w->total + rows * (size_t)D;
    w->kt = w->s + rows * KEYS;
    w->most = w->kt + (size_t)D * KEYS;
    w->sum = w->most + rows;
    w->alpha = w->sum + rows;
    w->total_most = w->alpha + rows;
    w->total_sum = w->total_most + rows;
    return 1;
}

/* Addresses of the keys and values at positions base + [begin, end); zeros elsewhere. */
static int find_keys(const problem *p, int64_t sequence, int64_t head, int64_t base, int begin,
                     int end, const float **k, const float **v) {
    static const float zeros[MAX_D];
    for (int j = 0; j < KEYS; j++) k[j] = v[j] = zeros;
    for (int j = begin; j < end;) {
        const int64_t slot = (base + j) % p->page;
        const int64_t page = p->table[sequence * p->table_stride + (base + j) / p->page];
        if (page < 0 || page >= p->pages) return 0;
        int64_t at = page * p->page_stride + slot * p->token_stride + head * p->head_stride;
        for (int64_t i = slot; i < p->page && j < end; i++, j++, at += p->token_stride) {
            k[j] = p->k + at;
            v[j] = p->v + at;
        }
    }
    return 1;
}

/* Asks for the keys and values at positions [from, to), which the next block will read: pages lie
 * anywhere, so the hardware does not guess them. */
static void prefetch(const problem *p, int64_t sequence, int64_t head, int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) {
        const int64_t page = p->table[sequence * p->table_stride + i / p->page];
        if (page < 0 || page >= p->pages) return;
        const int64_t at =
            page * p->page_stride + i % p->page * p->token_stride + head * p->head_stride;
        for (int64_t d = 0; d < p->D; d += 16) {
            __builtin_prefetch(p->k + at + d, 0, 2);
            __builtin_prefetch(p->v + at + d, 0, 2);
        }
    }
}

/* The first position that a query at `position` sees. */
MI_INLINE int64_t first_seen(const problem *p, int64_t position) {
    return p->window && position >= p->window ? position - p->window + 1 : 0;
}

MI_INLINE int in_block(int64_t key) { return key < 0 ? 0 : key > KEYS ? KEYS : (int)key; }

/* Scores of one row -> weights; updates its maximum and sum. Lanes outside [low, high) weigh 0. */
MI_INLINE void soften(float *s, int low, int high, float *most, float *sum, float *alpha) {
    for (int j = 0; j < low; j++) s[j] = -INFINITY;
    for (int j = high; j < KEYS; j++) s[j] = -INFINITY;
    v16 x[KEYS / 16];
    MI_UNROLL for (int i = 0; i < KEYS / 16; i++) x[i] = v_load(s + 16 * i);
    const float top = v_most(v_max(v_max(x[0], x[1]), v_max(x[2], x[3])));
    const float now = top > *most ? top : *most;
    MI_UNROLL for (int i = 0; i < KEYS / 16; i++) {
        x[i] = v_exp(v_sub(x[i], v_set1(now)));
        v_store(s + 16 * i, x[i]);
    }
    const float added = v_sum(v_add(v_add(x[0], x[1]), v_add(x[2], x[3])));
    float scale[16];
    v_store(scale, v_exp(v_set1(*most - now)));
    *alpha = scale[0];
    *sum = *sum * scale[0] + added;
    *most = now;
}

static int do_block(const problem *p, const task *t, const scratch *w, int64_t base,
                    int64_t position) {
    const float *k[KEYS], *v[KEYS];
    const int64_t D = p->D, rows = t->queries * p->group;
    const int64_t last = position + t->queries - 1; /* of the task's last query */
    const int64_t start = first_seen(p, position);
    const int begin = in_block(start - base), end = in_block(last + 1 - base);
    if (!find_keys(p, t->sequence, t->head, base, begin, end, k, v)) return 0;
    if (rows <= SPLIT_ROWS) { /* few rows: bound by memory */
        const int64_t next = base + 2 * KEYS < last + 1 ? base + 2 * KEYS : last + 1;
        prefetch(p, t->sequence, t->head, base + KEYS, next);
    }
    for (int64_t d = 0; d < D; d += 16)
        for (int j = 0; j < KEYS; j += 16) transpose_16(k + j, d, w->kt + d * KEYS + j);
    const int steps = (int)((rows + MR - 1) / MR);
    for (int i = 0; i < steps; i++) {
        int64_t from, to;
        mi_share(rows, i, steps, &from, &to);
        scores[to - from - 1](w->q + from * D, w->kt, D, w->s + from * KEYS);
        for (int64_t r = from; r < to; r++) {
            const int64_t here = position + r / p->group;
            const int low = in_block(first_seen(p, here) - base);
            const int high = in_block(here + 1 - base);
            if (low < high) {
                soften(w->s + r * KEYS, low, high, &w->most[r], &w->sum[r], &w->alpha[r]);
            } else {
                memset(w->s + r * KEYS, 0, KEYS * sizeof(float));
                w->alpha[r] = 1.0f;
            }
        }
        values[to - from - 1](w->s + from * KEYS, v, begin, end, w->alpha + from, D,
                              w->o + from * D);
    }
    return 1;
}

/* Adds (o, most, sum) of one split to the running total of a row. */
MI_INLINE void merge(int64_t D, const float *o, float most, float sum, float *total,
                     float *total_most, float *total_sum) {
    if (sum == 0.0f) return; /* the row has no key in this split */
    const float now = most > *total_most ? most : *total_most;
    float scales[16] = {*total_most - now, most - now};
    v_store(scales, v_exp(v_load(scales)));
    for (int64_t d = 0; d < D; d += 16)
        v_store(total + d, v_fma(v_load(o + d), v_set1(scales[1]),
                                 v_mul(v_load(total + d), v_set1(scales[0]))));
    *total_sum = *total_sum * scales[0] + sum * scales[1];
    *total_most = now;
}

/* A row with no key at all (an empty window) gives zeros. */
MI_INLINE void finish(const problem *p, const float *total, float sum, int64_t row, int64_t head) {
    float *to = p->out + row * p->out_stride + head * p->D;
    const v16 scale = v_set1(sum == 0.0f ? 0.0f : 1.0f / sum);
    for (int64_t d = 0; d < p->D; d += 16) v_store(to + d, v_mul(v_load(total + d), scale));
}

static int do_task(const problem *p, const task *t, const scratch *w) {
    const int64_t D = p->D, rows = t->queries * p->group, s = t->sequence;
    const int64_t row0 = p->query_start[s] + t->first;
    const int64_t position = p->context[s] - (p->query_start[s + 1] - p->query_start[s]) + t->first;
    const int64_t last = position + t->queries - 1;
    const int64_t start = first_seen(p, position);
    for (int64_t r = 0; r < rows; r++) {
        const float *from = p->q + (row0 + r / p->group) * p->q_stride +
                            (t->head * p->group + r % p->group) * D;
        for (int64_t d = 0; d < D; d += 16)
            v_store(w->q + r * D + d, v_mul(v_load(from + d), v_set1(p->scale)));
        w->total_most[r] = -INFINITY;
        w->total_sum[r] = 0.0f;
    }
    memset(w->total, 0, (size_t)(rows * D) * sizeof(float));
    for (int64_t split = t->split_begin; split < t->split_end; split++) {
        for (int64_t r = 0; r < rows; r++) {
            w->most[r] = -INFINITY;
            w->sum[r] = 0.0f;
        }
        memset(w->o, 0, (size_t)(rows * D) * sizeof(float));
        for (int64_t base = split * SPLIT; base < (split + 1) * SPLIT && base <= last; base += KEYS)
            if (base + KEYS > start && !do_block(p, t, w, base, position)) return 0;
        for (int64_t r = 0; r < rows; r++) {
            if (t->partial >= 0) {
                float *to = p->partials + (t->partial + r) * (D + 2); /* such a task is one split */
                memcpy(to, w->o + r * D, (size_t)D * sizeof(float));
                to[D] = w->most[r];
                to[D + 1] = w->sum[r];
            } else {
                merge(D, w->o + r * D, w->most[r], w->sum[r], w->total + r * D, &w->total_most[r],
                      &w->total_sum[r]);
            }
        }
    }
    if (t->partial >= 0) return 1;
    for (int64_t r = 0; r < rows; r++)
        finish(p, w->total + r * D, w->total_sum[r], row0 + r / p->group,
               t->head * p->group + r % p->group);
    return 1;
}

/* Each part takes tasks until none is left. */
static void run_tasks(void *context, int part, int parts) {
    (void)part, (void)parts;
    problem *p = context;
    scratch w;
    if (!take_scratch(p->D, &w)) {
        p->error = NO_MEMORY;
        return;
    }
    for (;;) {
        const int64_t i = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED);
        if (i >= p->count) return;
        if (!do_task(p, &p->tasks[i], &w)) p->error = BAD_PAGE;
    }
}

/* Merges the splits of `count` tasks that belong to one (sequence, head, block of queries). */
static void merge_splits(const problem *p, const task *t, int64_t count) {
    const int64_t D = p->D, rows = t->queries * p->group;
    const int64_t row0 = p->query_start[t->sequence] + t->first;
    for (int64_t r = 0; r < rows; r++) {
        float total[MAX_D] = {0}, most = -INFINITY, sum = 0.0f;
        for (int64_t i = 0; i < count; i++) {
            const float *from = p->partials + (t[i].partial + r) * (D + 2);
            merge(D, from, from[D], from[D + 1], total, &most, &sum);
        }
        finish(p, total, sum, row0 + r / p->group, t->head * p->group + r % p->group);
    }
}

/* ---- what Python calls --------------------------------------------------------------------- */

/* Lists the tasks into p->tasks (NULL: only counts them). `rows`: rows of partials needed. */
static int64_t list_tasks(const problem *p, int64_t S, int64_t heads, int64_t block, int by_split,
                          int64_t *rows) {
    int64_t n = 0;
    *rows = 0;
    for (int64_t s = 0; s < S; s++) {
        const int64_t queries = p->query_start[s + 1] - p->query_start[s];
        for (int64_t b = (queries + block - 1) / block - 1; b >= 0; b--) { /* longest first */
            const int64_t first = b * block;
            const int64_t many = queries - first < block ? queries - first : block;
            const int64_t position = p->context[s] - queries + first;
            const int64_t start = first_seen(p, position);
            const int64_t begin = start / SPLIT, end = (position + many - 1) / SPLIT + 1;
            for (int64_t h = 0; h < heads; h++)
                for (int64_t i = begin; i < end; i += by_split ? 1 : end - begin) {
                    task t = {(int32_t)s, (int32_t)h, (int32_t)many, -1, first, i, end};
                    if (by_split) {
                        t.split_end = i + 1;
                        t.partial = (int32_t)*rows;
                        *rows += many * p->group;
                    }
                    if (p->tasks) p->tasks[n] = t;
                    n++;
                }
        }
    }
    return n;
}

/* Strides in floats. `table` [S][table_stride]. Returns 0 or one of the codes above. */
MI_EXPORT int mi_attn(const float *q, int64_t q_stride, const float *k, const float *v,
                      int64_t page_stride, int64_t token_stride, int64_t head_stride,
                      int64_t pages, int64_t page, const int32_t *table, int64_t table_stride,
                      const int32_t *query_start, const int32_t *context, int64_t S, int64_t Hq,
                      int64_t Hkv, int64_t D, float scale, int64_t window, float *out,
                      int64_t out_stride, int threads) {
    problem p = {q, k, v, out, table, query_start, context, q_stride, out_stride, page_stride,
                 token_stride, head_stride, table_stride, pages, page, Hq / Hkv, D, window, scale,
                 NULL, 0, 0, NULL, 0};
    int64_t longest = 0, rows, queries = ROWS / p.group;
    for (int64_t s = 0; s < S; s++) {
        const int64_t n = query_start[s + 1] - query_start[s];
        if (n < 0 || (n > 0 && (context[s] < n || context[s] > table_stride * page)))
            return BAD_LENGTHS;
        longest = n > longest ? n : longest;
    }
    if (!longest) return OK;
    while (queries > 8 && list_tasks(&p, S, Hkv, queries, 0, &rows) < 3 * threads) queries /= 2;
    p.count = list_tasks(&p, S, Hkv, queries, 0, &rows);
    const int by_split = threads > 1 && p.count < 4 * threads && longest * p.group <= SPLIT_ROWS;
    if (by_split) p.count = list_tasks(&p, S, Hkv, queries, 1, &rows);
    p.tasks = malloc((size_t)p.count * sizeof(task));
    p.partials = by_split ? malloc((size_t)(rows * (D + 2)) * sizeof(float)) : NULL;
    if (!p.tasks || (by_split && !p.partials)) {
        p.error = NO_MEMORY;
    } else {
        list_tasks(&p, S, Hkv, queries, by_split, &rows);
        mi_parallel(run_tasks, &p, threads < p.count ? threads : p.count, threads);
        for (int64_t i = 0, n; by_split && !p.error && i < p.count; i += n) {
            for (n = 1; i + n < p.count && p.tasks[i + n].sequence == p.tasks[i].sequence &&
                        p.tasks[i + n].head == p.tasks[i].head &&
                        p.tasks[i + n].first == p.tasks[i].first;)
                n++;
            merge_splits(&p, p.tasks + i, n);
        }
    }
    free(p.tasks);
    free(p.partials);
    return p.error;
}

/* The exponential that the softmax uses, on `count` (a multiple of 16) numbers; for its test. */
MI_EXPORT void mi_exp(const float *x, float *y, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) v_store(y + i, v_exp(v_load(x + i)));
}
