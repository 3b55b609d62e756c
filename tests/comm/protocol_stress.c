/* The protocol under threads, delays and a wrapping counter: protocol_stress WORLD BLOCKS CALLS SEED
 * FIRST SHARED [SKIP]. Every rank is BLOCKS threads that start each call together, as the blocks of a
 * kernel do. Ops and sizes follow from SEED and the call, inputs from rank, call and place, so that
 * every thread can check what it finds. With SKIP, rank 1 leaves out that call and all must fail.
 * Built with the thread sanitizer by the test. Prints calls done; status 1: a wrong element, 2: a code.
 */
#include "../../metainfer/comm/shm_cpu.c"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define SLOT 4096
#define LIMIT 512

static mi_u32 world, blocks, shared;
static mi_u64 total, seed, first, skip;
static mi_u64 slabs[MI_WORLD];
static MiCall made[MI_WORLD];
static mi_u32 *in[MI_WORLD], *out[MI_WORLD], side_in[MI_WORLD][4], side_out[MI_WORLD][4];
static pthread_barrier_t meet[MI_WORLD];
static int wrong, failed;
static mi_u64 done[MI_WORLD];

static mi_u64 mix(mi_u64 x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}
static mi_u32 value(mi_u32 rank, mi_u64 call, mi_u64 i) {
    return (mi_u32)mix(rank * 1000003ull + call * 7919 + i);
}

/* Same on all ranks: kind, elements and root of a call. */
static void draw(mi_u64 call, mi_u32 *kind, mi_u64 *count, mi_u32 *root) {
    const mi_u64 x = mix(seed ^ call * 31);
    static const mi_u32 kinds[] = {MI_SUM_ALL, MI_SUM_GATHER, MI_COPY};
    *kind = kinds[x % 3];
    *count = x / 3 % LIMIT;
    *root = (mi_u32)(x >> 40) % world;
}

static int in_place(mi_u64 call, mi_u32 kind) { return kind == MI_SUM_ALL && mix(seed * 3 + call) % 2; }

static void prepare(mi_u32 rank, mi_u64 call) {
    MiCall *c = &made[rank];
    mi_u32 kind, root;
    mi_u64 n;
    draw(call, &kind, &n, &root);
    memset(c, 0, sizeof *c);
    memcpy(c->slab, slabs, sizeof slabs);
    c->in = (mi_u64)in[rank];
    c->out = (mi_u64)out[rank];
    c->error = slabs[rank] + MI_AT_ERROR;
    c->state = slabs[rank] + MI_AT_CALLS;
    c->rank = rank;
    c->world = world;
    c->kind = kind;
    c->type = MI_I32;
    c->width = 4;
    c->shared = shared;
    c->same = kind != MI_SUM_GATHER;
    c->slot_bytes = SLOT;
    c->second = SLOT / 2;
    c->budget_ns = skip ? 300000000ull : 60000000000ull;
    c->plan = mix(kind * 1000 + n) & 0xffffff;
    c->side = 4;
    c->lag = (mi_u32)(call % 5);
    if (in_place(call, kind)) c->out = c->in;
    c->side_in = (mi_u64)side_in[rank];
    c->side_out = (mi_u64)side_out[rank];
    const mi_u64 part = (n + world * 4 - 1) / (world * 4) * 4;
    c->stride = part * 4;
    c->stripe = ((kind == MI_SUM_GATHER ? part : n) + 4 * blocks - 1) / (4 * blocks) * 4;
    for (mi_u32 p = 0; p < world; p++) {
        const mi_u64 a = p * part < n ? p * part : n, b = (p + 1) * part < n ? (p + 1) * part : n;
        c->in_len[p] = kind == MI_SUM_ALL ? n : kind == MI_SUM_GATHER ? b - a : rank == root ? n : 0;
        c->in_begin[p] = c->out_begin[p] = kind == MI_SUM_GATHER ? a : 0;
        c->out_len[p] = kind == MI_SUM_GATHER ? b - a : kind == MI_COPY && p == root ? n : 0;
    }
    for (mi_u64 i = 0; i < n; i++) in[rank][i] = value(rank, call, i);
    memset(out[rank], 0xee, LIMIT * 4);
    for (mi_u32 i = 0; i < 4; i++) side_in[rank][i] = value(rank, call, 9000 + i);
}

static void check(mi_u32 rank, mi_u64 call) {
    mi_u32 kind, root;
    mi_u64 n;
    draw(call, &kind, &n, &root);
    const mi_u32 *found = in_place(call, kind) ? in[rank] : out[rank];
    for (mi_u64 i = 0; i < n + 4; i++) {
        const int beside = i >= n;
        const mi_u64 at = beside ? 9000 + i - n : i;
        mi_u32 want = 0;
        for (mi_u32 p = 0; p < world; p++) want += value(p, call, at);
        if (!beside && kind == MI_COPY) want = value(root, call, at);
        if ((beside ? side_out[rank][i - n] : found[i]) != want)
            __atomic_store_n(&wrong, 1, __ATOMIC_RELAXED);
    }
}

static void *block(void *argument) {
    const mi_u32 rank = (mi_u32)((size_t)argument / blocks), b = (mi_u32)((size_t)argument % blocks);
    mi_u64 state = mix(seed + (size_t)argument * 77);
    for (mi_u64 call = 0; call < total; call++) {
        if (skip && rank == 1 && call == skip) return 0;
        if (b == 0) prepare(rank, call);
        pthread_barrier_wait(&meet[rank]);
        state = mix(state);
        if (state % 16 == 0) {
            struct timespec t = {0, (long)(state >> 32) % 50000};
            nanosleep(&t, 0);
        }
        const mi_u64 code = mi_run(&made[rank], b, blocks);
        if (code != MI_OK) __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
        pthread_barrier_wait(&meet[rank]);
        if (__atomic_load_n(&failed, __ATOMIC_RELAXED) || __atomic_load_n(&wrong, __ATOMIC_RELAXED)) {
            /* Others may still be in this call: let their waits end. */
            for (mi_u32 p = 0; p < world; p++) mi_abort(slabs[p], 1ull << 63);
            return 0;
        }
        if (b == 0) {
            check(rank, call);
            done[rank] = call + 1;
        }
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 7) return 3;
    world = (mi_u32)atoi(argv[1]);
    blocks = (mi_u32)atoi(argv[2]);
    total = strtoull(argv[3], 0, 0);
    seed = strtoull(argv[4], 0, 0);
    first = strtoull(argv[5], 0, 0);
    shared = (mi_u32)atoi(argv[6]);
    skip = argc > 7 ? strtoull(argv[7], 0, 0) : 0;
    for (mi_u32 r = 0; r < world; r++) {
        slabs[r] = (mi_u64)aligned_alloc(4096, MI_HEAD + 2 * MI_WORLD * (MI_SIDE + SLOT) + 4096);
        in[r] = malloc(LIMIT * 4);
        out[r] = malloc(LIMIT * 4);
        mi_clear(slabs[r], first);
        pthread_barrier_init(&meet[r], 0, blocks);
    }
    pthread_t threads[MI_WORLD * MI_BLOCKS];
    for (size_t i = 0; i < world * blocks; i++) pthread_create(&threads[i], 0, block, (void *)i);
    for (size_t i = 0; i < world * blocks; i++) pthread_join(threads[i], 0);
    mi_u64 least = total, codes = 0;
    for (mi_u32 r = 0; r < world; r++) {
        if (!(skip && r == 1) && done[r] < least) least = done[r];
        codes += ((MiError *)(slabs[r] + MI_AT_ERROR))->code != MI_OK;
    }
    printf("%llu %llu\n", (unsigned long long)least, (unsigned long long)codes);
    return wrong ? 1 : failed ? 2 : 0;
}
