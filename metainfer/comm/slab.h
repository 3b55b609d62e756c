/* The slab protocol, one source for CUDA kernels and for host threads. C11 and CUDA C++; no headers
 * of torch or of the C++ library.
 *
 * Every rank owns one slab; peers write into it and it is read only by its owner, or (`shared`) the
 * owner writes and all read. Synchronisation is a release store of a 64-bit flag into the peer's
 * slab and acquire loads of one's own: no atomics across the bus, no polling across it. A flag is
 * plan id (24 bits) and generation (40 bits); the generation of call c is c + 1. A peer is at most
 * one call ahead, so a flag counts as seen at the wanted generation or the next one, and at no other:
 * a stale flag of an unused block can only be mistaken after exactly 2^40 calls.
 *
 * Why two halves are enough: call c + 2 writes the half of call c, and no rank gets there before
 * every peer has posted the flag of call c + 1, which it does after it has read all of call c. Every
 * collective, a broadcast too, therefore posts to and waits for all peers in phase 0.
 *
 * `layout.py` holds the same numbers; `mi_layout` below lets it compare them.
 */
#ifndef MI_SLAB_H
#define MI_SLAB_H

#ifdef __CUDACC__
typedef unsigned int mi_u32;
typedef unsigned long long mi_u64;
typedef unsigned short mi_u16;
typedef unsigned char mi_u8;
#define MI_FN static __device__ __forceinline__
#else
#include <stdint.h>
#include <string.h>
typedef uint32_t mi_u32;
typedef uint64_t mi_u64;
typedef uint16_t mi_u16;
typedef uint8_t mi_u8;
#define MI_FN static inline __attribute__((unused))
#endif

#define MI_WORLD 8
#define MI_PHASES 2 /* meetings of a call */
#define MI_BLOCKS 16
#define MI_FLAG_STEP 128
#define MI_HEADER 4096
#define MI_FLAGS (MI_PHASES * MI_BLOCKS * MI_WORLD * MI_FLAG_STEP)
#define MI_HEAD (MI_HEADER + MI_FLAGS)
#define MI_SIDE 256
#define MI_GENERATION ((1ull << 40) - 1)

/* Offsets in the header page; each word that peers or the host write has a line of its own. */
#define MI_AT_MAGIC 0
#define MI_AT_PID 64
#define MI_AT_CALLS 128
#define MI_ARRIVED_AFTER 128
#define MI_PUSHED_AFTER 64 /* two counters, by parity of the call: blocks that have pushed */
#define MI_AT_ABORT 384
#define MI_AT_BEAT 512
#define MI_AT_ERROR 640
#define MI_AT_CAUSE 1024 /* text, MI_CAUSE bytes: why this rank gave up */
#define MI_CAUSE 1024

enum { MI_OK, MI_TIMEOUT, MI_ABORTED, MI_MISMATCH, MI_DIED, MI_LEFT, MI_RAISED };
enum { MI_SUM_ALL, MI_SUM_PART, MI_SUM_GATHER, MI_COPY, MI_NOTHING };
enum { MI_BF16, MI_F16, MI_F32, MI_F64, MI_I32, MI_BYTES };

/* What went wrong; `code` is written last. */
typedef struct {
    mi_u64 code, phase, peer, wanted, seen, plan, waited_ns, block;
} MiError;

/* One call of one rank. Addresses are as this rank sees them; counts are in elements. Rank p gets
 * in[in_begin[p] .. + in_len[p]); out[out_begin[p] .. + out_len[p]) comes from rank p, or is summed
 * by it. `stripe`: elements of a block. `same`: every peer gets the same range. `stride`: bytes
 * between the parts of different peers in a shared slot. `second`: byte offset in a slot of what
 * phase 1 carries. `state`: the call counter, with the arrivals MI_ARRIVED_AFTER further on, in
 * memory that this rank's processor counts in. `lag`: groups of blocks push one after another, so
 * that one group reads while the next writes and both directions of a link are busy; 0: all at once. */
typedef struct {
    mi_u64 slab[MI_WORLD];
    mi_u64 in_begin[MI_WORLD], in_len[MI_WORLD], out_begin[MI_WORLD], out_len[MI_WORLD];
    mi_u64 in, out, side_in, side_out, residual, weight, normed, error, state;
    mi_u64 slot_bytes, stride, second, stripe, budget_ns, plan;
    mi_u32 rank, world, kind, type, width, shared, same, dry, side, hidden;
    float eps;
    mi_u32 lag;
} MiCall;

#ifdef __CUDACC__

#ifndef MI_ON_HOST /* a test gives these itself */
#include "ptx.h"
#endif
#define MI_SYNC() __syncthreads()
#define MI_TID ((mi_u32)threadIdx.x)
#define MI_THREADS ((mi_u32)blockDim.x)
#define MI_BID ((mi_u32)blockIdx.x)
#define MI_GRID ((mi_u32)gridDim.x)
#define MI_UNROLL _Pragma("unroll")
#define MI_NOW(x) asm volatile("" : "+l"(x)) /* computed here, not where it is used */
#define MI_LOOK 255u /* polls between looks at the clock and the abort word, less one */

#else

#include <sched.h>
#include <time.h>

MI_FN void mi_put(mi_u64 *at, mi_u64 value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }
MI_FN mi_u64 mi_get(const mi_u64 *at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
MI_FN mi_u64 mi_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (mi_u64)t.tv_sec * 1000000000ull + (mi_u64)t.tv_nsec;
}
MI_FN void mi_grid_wait(void) {} /* calls of a thread follow each other */
MI_FN void mi_grid_trigger(void) {}
/* Give the core away soon: there may be fewer cores than ranks. */
MI_FN void mi_relax(mi_u32 tries) {
    if (tries < 32) return;
    if (tries < 4096) {
        sched_yield();
        return;
    }
    struct timespec t = {0, 50000};
    nanosleep(&t, 0);
}
/* One host thread is a whole block; its index and the grid are thread-local. */
static __thread mi_u32 mi_host_block, mi_host_grid = 1;
#define MI_SYNC() ((void)0)
#define MI_TID 0u
#define MI_THREADS 1u
#define MI_BID mi_host_block
#define MI_GRID mi_host_grid
#define MI_UNROLL
#define MI_NOW(x) ((void)0)
#define MI_LOOK 63u

#endif

/* A build for one world, type or without epilogues (MI_N, MI_TYPE, MI_PLAIN) knows its loops' length. */
#ifdef MI_N
#define MI_TOP MI_N
MI_FN mi_u32 mi_world(const MiCall *call) { return (void)call, MI_N; }
#else
#define MI_TOP MI_WORLD
MI_FN mi_u32 mi_world(const MiCall *call) { return call->world; }
#endif
#ifdef MI_TYPE
MI_FN mi_u32 mi_type(const MiCall *call) { return (void)call, MI_TYPE; }
#else
MI_FN mi_u32 mi_type(const MiCall *call) { return call->type; }
#endif
#ifdef MI_PLAIN
MI_FN mi_u32 mi_hidden(const MiCall *call) { return (void)call, 0; }
#else
MI_FN mi_u32 mi_hidden(const MiCall *call) { return call->hidden; }
#endif

MI_FN mi_u64 *mi_word(mi_u64 slab, mi_u64 offset) { return (mi_u64 *)(slab + offset); }

MI_FN mi_u64 *mi_flag(mi_u64 slab, mi_u32 phase, mi_u32 block, mi_u32 peer) {
    return mi_word(slab,
                   MI_HEADER + (mi_u64)((phase * MI_BLOCKS + block) * MI_WORLD + peer) * MI_FLAG_STEP);
}

/* The slot of `half` in which rank `to` finds what rank `from` wrote. */
MI_FN mi_u64 mi_slot(const MiCall *call, mi_u32 to, mi_u32 from, mi_u32 half) {
    const mi_u32 size = MI_SIDE + (mi_u32)call->slot_bytes; /* a product of 32 bits is one instruction */
    if (call->shared) return call->slab[from] + MI_HEAD + (mi_u64)half * size;
    return call->slab[to] + MI_HEAD + (mi_u64)(half * mi_world(call) + from) * size;
}

/* The part of `len` elements that this block works on. 32 bits: a call carries less than 2^32 bytes. */
MI_FN void mi_stripe(const MiCall *call, mi_u64 len, mi_u32 *begin, mi_u32 *end) {
    const mi_u32 n = (mi_u32)len, step = (mi_u32)call->stripe, a = MI_BID * step;
    *begin = a < n ? a : n;
    *end = n - *begin < step ? n : *begin + step;
}

#define MI_PUSHED(call, calls) ((mi_u32 *)mi_word((call)->state, MI_PUSHED_AFTER + ((calls)&1) * 32))

/* The call counter. On a GPU every thread reads it, so that the load of the input need not wait. */
MI_FN mi_u64 mi_enter(const MiCall *call) {
    mi_u64 *const counter = mi_word(call->state, 0);
#ifdef __CUDACC__
    return *(volatile mi_u64 *)counter;
#else
    return __atomic_load_n(counter, __ATOMIC_ACQUIRE);
#endif
}

/* All threads of this block have read the counter; the last block to say so moves it on. */
MI_FN void mi_arrive(const MiCall *call, mi_u64 calls) {
    mi_u64 *const counter = mi_word(call->state, 0);
    mi_u32 *const arrived = (mi_u32 *)mi_word(call->state, MI_ARRIVED_AFTER);
    if (call->dry || MI_TID != MI_THREADS - 1) return; /* not one of those that wait for a flag */
#ifdef __CUDACC__
    /* No fence: every thread went on from the counter's value to addresses before they met. */
    if (MI_GRID > 1 && atomicAdd(arrived, 1u) != MI_GRID - 1) return;
    *(volatile mi_u32 *)arrived = 0;
    *(volatile mi_u32 *)MI_PUSHED(call, calls + 1) = 0;
    *(volatile mi_u64 *)counter = calls + 1;
#else
    if (__atomic_add_fetch(arrived, 1u, __ATOMIC_ACQ_REL) != MI_GRID) return;
    __atomic_store_n(arrived, 0u, __ATOMIC_RELAXED);
    __atomic_store_n(MI_PUSHED(call, calls + 1), 0u, __ATOMIC_RELAXED);
    __atomic_store_n(counter, calls + 1, __ATOMIC_RELEASE);
#endif
}

/* Wait until the groups of blocks before this one have pushed. They push without waiting for anyone
 * outside this call, so this ends. */
MI_FN void mi_take_turn(const MiCall *call, mi_u64 calls) {
    if (call->lag < 2 || MI_GRID < call->lag || call->dry) return;
    const mi_u32 before = MI_BID * call->lag / MI_GRID * MI_GRID / call->lag;
    if (MI_TID == 0 && before) {
#ifdef __CUDACC__
        while (*(volatile mi_u32 *)MI_PUSHED(call, calls) < before) __nanosleep(20);
#else
        while (__atomic_load_n(MI_PUSHED(call, calls), __ATOMIC_ACQUIRE) < before) sched_yield();
#endif
    }
    MI_SYNC();
}

/* This block's payload is under way: the next group may go. It does so while flags still wait for what is
 * before them to arrive, so the way down is never idle. */
MI_FN void mi_pass_turn(const MiCall *call, mi_u64 calls) {
    if (call->lag < 2 || MI_GRID < call->lag || call->dry) return;
    MI_SYNC();
    if (MI_TID == MI_THREADS - 1) {
#ifdef __CUDACC__
        atomicAdd(MI_PUSHED(call, calls), 1u);
#else
        __atomic_add_fetch(MI_PUSHED(call, calls), 1u, __ATOMIC_ACQ_REL);
#endif
    }
}

/* Write down what happened and tell every peer; a later call sees the word and leaves at once. */
MI_FN void mi_fail(const MiCall *call, mi_u64 code, mi_u32 phase, mi_u32 peer, mi_u64 wanted,
                   mi_u64 seen, mi_u64 waited) {
    MiError *error = (MiError *)call->error;
    if (mi_get(&error->code) == MI_OK) {
        error->phase = phase;
        error->peer = peer;
        error->wanted = wanted;
        error->seen = seen;
        error->plan = call->plan;
        error->waited_ns = waited;
        error->block = MI_BID;
        mi_put(&error->code, code);
    }
    if (code == MI_ABORTED) return; /* whoever set the word told the others */
    const mi_u64 word = code << 32 | call->rank << 8 | peer | 1ull << 63;
    for (mi_u32 p = 0; p < mi_world(call); p++) {
        mi_u64 *at = mi_word(call->slab[p], MI_AT_ABORT);
        if (mi_get(at) == 0) mi_put(at, word); /* the first cause stands */
    }
}

/* Wait for one peer's flag; its code, MI_OK when it is there. */
MI_FN mi_u64 mi_wait_for(const MiCall *call, mi_u64 calls, mi_u32 phase, mi_u32 peer) {
    const mi_u64 own = call->slab[call->rank], wanted = (calls + 1) & MI_GENERATION;
    const mi_u64 *at = mi_flag(own, phase, MI_BID, peer);
    mi_u64 start = 0;
    for (mi_u32 tries = 0;; tries++) {
        const mi_u64 flag = mi_get(at), seen = flag & MI_GENERATION;
        if (seen == wanted) {
            if (flag >> 40 == call->plan) return MI_OK;
            mi_fail(call, MI_MISMATCH, phase, peer, wanted, flag, 0);
            return MI_MISMATCH;
        }
        if (seen == ((wanted + 1) & MI_GENERATION)) return MI_OK;
        if ((tries & MI_LOOK) == MI_LOOK) {
            const mi_u64 now = mi_now();
            if (start == 0) start = now;
            if (mi_get(mi_word(own, MI_AT_ABORT)) != 0) {
                mi_fail(call, MI_ABORTED, phase, peer, wanted, flag, now - start);
                return MI_ABORTED;
            }
#ifndef __CUDACC__ /* a GPU does not look across the bus; its host does */
            if (mi_get(mi_word(call->slab[peer], MI_AT_BEAT)) == ~0ull && mi_get(at) == flag) {
                mi_fail(call, MI_LEFT, phase, peer, wanted, flag, now - start);
                return MI_LEFT;
            }
#endif
            if (now - start > call->budget_ns) {
                mi_fail(call, MI_TIMEOUT, phase, peer, wanted, flag, now - start);
                return MI_TIMEOUT;
            }
        }
        mi_relax(tries);
    }
}

/* The code of a thread of this block that has one, for all of them; they meet. */
MI_FN mi_u64 mi_any(mi_u64 code) {
#ifdef __CUDACC__
    return (mi_u64)__syncthreads_or((int)code);
#else
    return code;
#endif
}

/* Payload of this phase is written by all threads of the block: tell every peer. */
MI_FN void mi_announce(const MiCall *call, mi_u64 calls, mi_u32 phase) {
    const mi_u64 flag = call->plan << 40 | ((calls + 1) & MI_GENERATION);
    if (call->dry) return;
    MI_SYNC();
    for (mi_u32 p = MI_TID; p < mi_world(call); p += MI_THREADS)
        if (p != call->rank) mi_put(mi_flag(call->slab[p], phase, MI_BID, call->rank), flag);
}

/* Wait for everyone who announces this phase. */
MI_FN mi_u64 mi_hear(const MiCall *call, mi_u64 calls, mi_u32 phase) {
    mi_u64 code = MI_OK;
    if (call->dry) return MI_OK;
    for (mi_u32 p = MI_TID; p < mi_world(call); p += MI_THREADS)
        if (p != call->rank && code == MI_OK) code = mi_wait_for(call, calls, phase, p);
    return mi_any(code);
}

#endif
