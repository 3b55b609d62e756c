// Collectives as CUDA kernels on the slab protocol. No headers but ours: built to a cubin by nvcc or
// NVRTC and loaded through the driver (`loader.py`), once per world, element type and with or without
// epilogue (MI_N, MI_TYPE, MI_PLAIN). Grid at most 16 blocks of at most 512 threads, all resident.
//
// Payload moves in 16-byte packs where addresses allow. Loads of what a peer wrote are relaxed at
// system scope, so no stale line of a first-level cache is used; flags carry the order (`slab.h`).
#include "slab.h"

#include "elements.h"
#include "rows.h"

#include "collective.h"

// Packs of each rank that a thread has in flight: what host memory gives is bytes in flight over about
// 1.5 us, and one pack of a thread fills no link. Sixteen in all, so that registers do: four blocks of
// 512 threads then take as fast as sixteen.
#define DEEP (MI_TOP > 4 ? 1 : 16 / MI_TOP)
#define COPIED 8 // by a thread that only moves

__device__ __forceinline__ mi_u8 load_byte(mi_u64 at) { return *(const volatile mi_u8 *)at; }

// ---- copies ------------------------------------------------------------------------------------

// Bytes that are no whole pack, or all where addresses are odd.
MI_FN void copy_bytes(mi_u64 to, mi_u64 from, mi_u32 begin, mi_u32 bytes) {
    for (mi_u32 i = begin + MI_TID; i < bytes; i += MI_THREADS)
        *(mi_u8 *)(to + i) = load_byte(from + i);
}

MI_FN void mi_copy(mi_u64 to, mi_u64 from, mi_u32 bytes) {
    mi_u32 packed = 0;
    if (((to | from) & 15) == 0) {
        packed = bytes & ~15u;
        mi_u32 i = MI_TID * 16;
        const mi_u32 step = MI_THREADS * 16;
        for (; i + (COPIED - 1) * step < packed; i += COPIED * step) {
            Pack p[COPIED];
#pragma unroll
            for (int k = 0; k < COPIED; k++) p[k] = load_pack(from + i + k * step);
#pragma unroll
            for (int k = 0; k < COPIED; k++) store_pack(to + i + k * step, p[k]);
        }
        for (; i < packed; i += step) store_pack(to + i, load_pack(from + i));
    }
    copy_bytes(to, from, packed, bytes);
}

MI_FN void mi_spread(const mi_u64 *to, mi_u32 places, mi_u64 from, mi_u32 bytes) {
    mi_u64 all = from;
    mi_u32 packed = 0;
    MI_UNROLL
    for (mi_u32 i = 0; i < MI_TOP - 1; i++)
        if (i < places) all |= to[i];
    if ((all & 15) == 0) {
        packed = bytes & ~15u;
        mi_u32 at = MI_TID * 16;
        const mi_u32 step = MI_THREADS * 16;
        for (; at + (DEEP - 1) * step < packed; at += DEEP * step) {
            Pack p[DEEP];
            MI_UNROLL
            for (mi_u32 k = 0; k < DEEP; k++) p[k] = load_pack(from + at + k * step);
            MI_UNROLL
            for (mi_u32 i = 0; i < MI_TOP - 1; i++) {
                if (i >= places) break;
                MI_UNROLL
                for (mi_u32 k = 0; k < DEEP; k++) store_pack(to[i] + at + k * step, p[k]);
            }
        }
        for (; at < packed; at += step) {
            const Pack p = load_pack(from + at);
            MI_UNROLL
            for (mi_u32 i = 0; i < MI_TOP - 1; i++)
                if (i < places) store_pack(to[i] + at, p);
        }
    }
    if (packed == bytes) return;
    MI_UNROLL
    for (mi_u32 i = 0; i < MI_TOP - 1; i++)
        if (i < places) copy_bytes(to[i], from, packed, bytes);
}

// A pack of each copy in turn is in flight: a small message costs one latency, not one per peer.
MI_FN void mi_many(const MiCopies *copies) {
    if (MI_TOP == 2) return mi_copy(copies->to[0], copies->from[0], copies->bytes[0]);
    mi_u32 longest = 0, whole[MI_TOP];
    bool rest = false;
    MI_UNROLL
    for (mi_u32 i = 0; i < MI_TOP - 1; i++) {
        const bool even = ((copies->to[i] | copies->from[i]) & 15) == 0;
        whole[i] = copies->bytes[i] && even ? copies->bytes[i] & ~15u : 0;
        if (whole[i] > longest) longest = whole[i];
        rest |= whole[i] != copies->bytes[i];
    }
    for (mi_u32 at = MI_TID * 16; at < longest; at += MI_THREADS * 16) {
        Pack p[MI_TOP];
        MI_UNROLL
        for (mi_u32 i = 0; i < MI_TOP - 1; i++)
            if (at < whole[i]) p[i] = load_pack(copies->from[i] + at);
        MI_UNROLL
        for (mi_u32 i = 0; i < MI_TOP - 1; i++)
            if (at < whole[i]) store_pack(copies->to[i] + at, p[i]);
    }
    if (!rest) return;
    MI_UNROLL
    for (mi_u32 i = 0; i < MI_TOP - 1; i++)
        if (copies->bytes[i]) copy_bytes(copies->to[i], copies->from[i], whole[i], copies->bytes[i]);
}

// ---- sums --------------------------------------------------------------------------------------

// The pack at `offset` of every rank; all loads are in flight together.
__device__ __forceinline__ void load_packs(const MiCall *call, const mi_u64 *from, mi_u32 offset,
                                           Pack *p) {
#pragma unroll
    for (mi_u32 r = 0; r < MI_TOP; r++)
        if (r < mi_world(call)) p[r] = load_pack(from[r] + offset);
}

template <int Type>
__device__ __forceinline__ void sum(const MiCall *call, mi_u64 to, const mi_u64 *from,
                                    mi_u32 count) {
    typedef typename Element<Type>::Raw Raw;
    typedef typename Element<Type>::Wide Wide;
    const mi_u32 n = Values<Type>::N;
    mi_u32 packed = 0;
    mi_u64 all = to;
#pragma unroll
    for (mi_u32 r = 0; r < MI_TOP; r++)
        if (r < mi_world(call)) all |= from[r];
    if ((all & 15) == 0) {
        packed = count / n * n;
        const mi_u32 bytes = packed * sizeof(Raw), step = MI_THREADS * 16;
        mi_u32 at = MI_TID * 16;
        Pack p[DEEP][MI_TOP];
        Wide total[n];
        for (; at + (DEEP - 1) * step < bytes; at += DEEP * step) {
#pragma unroll
            for (int k = 0; k < DEEP; k++) load_packs(call, from, at + k * step, p[k]);
#pragma unroll
            for (int k = 0; k < DEEP; k++) {
                wide_sum<Type>(call, p[k], total);
                store_pack(to + at + k * step, Values<Type>::pack(total));
            }
        }
        for (; at < bytes; at += step) {
            load_packs(call, from, at, p[0]);
            wide_sum<Type>(call, p[0], total);
            store_pack(to + at, Values<Type>::pack(total));
        }
    }
    for (mi_u32 at = packed + MI_TID; at < count; at += MI_THREADS) {
        Wide total = Element<Type>::wide(((const volatile Raw *)from[0])[at]);
#pragma unroll
        for (mi_u32 r = 1; r < MI_TOP; r++)
            if (r < mi_world(call))
                total = add(total, Element<Type>::wide(((const volatile Raw *)from[r])[at]));
        ((Raw *)to)[at] = Element<Type>::round(total);
    }
}

#define BY_TYPE(step)                                                                              \
    switch (mi_type(call)) {                                                                       \
    case MI_BF16: step(MI_BF16); break;                                                            \
    case MI_F16: step(MI_F16); break;                                                              \
    case MI_F32: step(MI_F32); break;                                                              \
    case MI_F64: step(MI_F64); break;                                                              \
    default: break;                                                                                \
    }

MI_FN void mi_sum(const MiCall *call, mi_u64 to, const mi_u64 *from, mi_u32 count) {
#define STEP(type) sum<type>(call, to, from, count)
    BY_TYPE(STEP)
#undef STEP
    if (mi_type(call) == MI_I32) sum<MI_I32>(call, to, from, count);
}
// Weights are constants: they may be on their way while the launch before still runs.
MI_FN void mi_ahead(const MiCall *call) {
    for (mi_u32 at = MI_TID * 128; at < mi_hidden(call) * call->width; at += MI_THREADS * 128)
        prefetch(call->weight + at);
}
MI_FN int mi_plan_rows(const MiCall *call, mi_u32 begin, mi_u32 end, MiRows *rows) {
    if (mi_type(call) != MI_BF16 && mi_type(call) != MI_F16) return 0;
    return plan_rows(call, begin, end, rows);
}
MI_FN int mi_start_rows(const MiCall *call, const mi_u64 *from, MiRows *rows) {
    return start_rows(call, from, rows);
}
MI_FN void mi_finish_rows(const MiCall *call, MiRows *rows) {
    if (mi_type(call) == MI_BF16) finish_rows<MI_BF16>(call, rows);
    if (mi_type(call) == MI_F16) finish_rows<MI_F16>(call, rows);
}
MI_FN void mi_epilogue(const MiCall *call, mi_u64 begin, mi_u64 end) {
#define STEP(type) rows<type>(call, begin, end)
    BY_TYPE(STEP)
#undef STEP
}

// One kernel for each kind, so that a call fetches no instructions but its own. Names: `layout.KERNELS`.
#define KERNEL(name, kind)                                                                         \
    extern "C" __global__ void __launch_bounds__(512, 1) name(const __grid_constant__ MiCall call) { \
        mi_collective(&call, kind);                                                                \
    }
KERNEL(mi_all_kernel, MI_SUM_ALL)
KERNEL(mi_part_kernel, MI_SUM_PART)
KERNEL(mi_gather_kernel, MI_SUM_GATHER)
KERNEL(mi_copy_kernel, MI_COPY)
KERNEL(mi_meet_kernel, MI_NOTHING)

// ---- copy-engine schedules: a flag in the stream's order, a wait for one, a sum of pieces ---------

extern "C" __global__ void mi_post(mi_u64 *at, mi_u64 value) {
    fence_system(); // the copies before it in the stream
    mi_put(at, value);
}

// Wait until *at has reached `value` on the circle of 64 bits; gives up as a collective does.
extern "C" __global__ void mi_await(const mi_u64 *at, mi_u64 value, const mi_u64 *abort,
                                    MiError *error, mi_u64 budget_ns, mi_u64 peer) {
    const mi_u64 start = mi_now();
    for (mi_u32 tries = 0; (long long)(mi_get(at) - value) < 0; tries++) {
        if ((tries & MI_LOOK) == MI_LOOK) {
            const mi_u64 waited = mi_now() - start;
            const mi_u64 code = mi_get(abort) ? MI_ABORTED : waited > budget_ns ? MI_TIMEOUT : 0;
            if (code) {
                error->peer = peer;
                error->wanted = value;
                error->waited_ns = waited;
                mi_put(&error->code, code);
                return;
            }
        }
        mi_relax(tries);
    }
}

// call.out = sum over ranks of call.slab[r], in_len[0] elements, rank order; grid of any size.
extern "C" __global__ void __launch_bounds__(512, 1) mi_add(const __grid_constant__ MiCall call) {
    mi_u32 begin, end;
    mi_u64 from[MI_TOP];
    mi_stripe(&call, call.in_len[0], &begin, &end);
    if (begin >= end) return;
#pragma unroll
    for (int r = 0; r < MI_TOP; r++) from[r] = call.slab[r] + (mi_u64)begin * call.width;
    mi_sum(&call, call.out + (mi_u64)begin * call.width, from, end - begin);
}

// A slab that has made `calls` calls.
extern "C" __global__ void mi_clear(mi_u64 slab, mi_u64 state, mi_u64 calls) {
    for (mi_u64 at = MI_TID * 8ull; at < MI_HEAD; at += MI_THREADS * 8ull) {
        const bool flag = at >= MI_HEADER && at % MI_FLAG_STEP == 0;
        *mi_word(slab, at) = flag ? calls & MI_GENERATION : 0;
    }
    __syncthreads();
    if (MI_TID == 0) {
        *mi_word(state, 0) = calls;
        *mi_word(state, MI_ARRIVED_AFTER) = 0;
    }
}
