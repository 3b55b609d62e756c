// One rank alone on a device: what stands in for what its peers bring, the bytes that its link would
// carry, and their time, in one launch. What stands in is defined in `backends/emulated.py`. Grid of
// any size whose blocks of at most 512 threads are all resident.
#include "slab.h"
#include "elements.h"

enum { MI_STAYS, MI_PARTS, MI_IDS, MI_NOISY, MI_TIMES };

// `form`: what `out` becomes. MI_PARTS: `world` times `rows` rows of `width` units of `unit` bytes,
// those of peer p turned by p `turn` units. MI_IDS: `world` times `rows` rows of `width` int32, the last
// `numbers` of a row of peer p `experts` p / `world` further on, modulo `experts`. MI_NOISY: `width`
// elements of `type`, with as many of `noise` added, which has `period` of them. MI_TIMES: `width`
// int32, times `world`.
//
// `down` and `up`: bytes that go to pinned host memory and come from it, over and over through `room`
// bytes of `host` and of `scratch`. A call lasts `ns` from its own beginning on, or from what `begun`
// points to; with `mark` it leaves its beginning there and neither waits nor counts. `counts`: calls,
// their ns, calls that took longer by what they do, by how many ns; `seen`: the same for the host.
typedef struct {
    mi_u64 given, out, noise, period, rows, width, turn, unit, type, form, world, experts, numbers;
    mi_u64 host, scratch, room, down, up, begun, mark, ns, ticket, counts, seen;
} MiAlone;

// 32 bits: a message has fewer elements, and GPUs divide 64 bits slowly.
#define MI_EACH(i, count)                                                                            \
    for (mi_u32 i = MI_BID * MI_THREADS + MI_TID; i < (mi_u32)(count); i += MI_GRID * MI_THREADS)

template <typename Unit> MI_FN Unit fetch(const Unit *at) { return *at; }
MI_FN Pack fetch(const Pack *at) { return load_pack((mi_u64)at); }
template <typename Unit> MI_FN void put(Unit *at, Unit x) { *at = x; }
MI_FN void put(Pack *at, Pack x) { store_pack((mi_u64)at, x); }

template <typename Unit> MI_FN void parts(const MiAlone &call) {
    const Unit *const given = (const Unit *)call.given;
    Unit *const out = (Unit *)call.out;
    const mi_u32 width = (mi_u32)call.width, rows = (mi_u32)call.rows;
    MI_EACH(i, call.world * rows * width) {
        const mi_u32 row = i / width, peer = row / rows;
        mi_u32 at = i % width + peer * (mi_u32)call.turn;
        if (at >= width) at -= width;
        put(out + i, fetch(given + ((mi_u64)(row - peer * rows) * width + at)));
    }
}

MI_FN void ids(const MiAlone &call) {
    const mi_u32 width = (mi_u32)call.width, size = (mi_u32)call.rows * width;
    const mi_u32 world = (mi_u32)call.world, experts = (mi_u32)call.experts;
    MI_EACH(i, world * size) {
        const mi_u32 peer = i / size, at = i - peer * size;
        const mi_u32 x = ((const mi_u32 *)call.given)[at];
        const bool moves = at % width >= width - (mi_u32)call.numbers;
        ((mi_u32 *)call.out)[i] = moves ? (x + peer * experts / world) % experts : x;
    }
}

template <int Type> MI_FN void noisy(const MiAlone &call) {
    typedef typename Element<Type>::Raw Raw;
    typedef typename Element<Type>::Wide Wide;
    const int n = Values<Type>::N;
    const mi_u32 packs = ((call.given | call.out) & 15) ? 0 : (mi_u32)call.width / n;
    const mi_u32 period = (mi_u32)call.period, turn = period / n;
    MI_EACH(i, packs) {
        Wide x[n], y[n];
        Values<Type>::unpack(load_pack(call.given + i * 16ull), x);
        Values<Type>::unpack(load_pack(call.noise + i % turn * 16ull), y);
#pragma unroll
        for (int k = 0; k < n; k++) x[k] = add(x[k], y[k]);
        store_pack(call.out + i * 16ull, Values<Type>::pack(x));
    }
    const Raw *const given = (const Raw *)call.given, *const noise = (const Raw *)call.noise;
    MI_EACH(j, call.width - packs * n) {
        const mi_u32 i = packs * n + j;
        const Wide x = Element<Type>::wide(given[i]), y = Element<Type>::wide(noise[i % period]);
        ((Raw *)call.out)[i] = Element<Type>::round(add(x, y));
    }
}

MI_FN void stand_in(const MiAlone &call) {
    if (call.form == MI_PARTS) {
        if (call.unit == 16) parts<Pack>(call);
        if (call.unit == 8) parts<mi_u64>(call);
        if (call.unit == 4) parts<mi_u32>(call);
        if (call.unit == 2) parts<mi_u16>(call);
        if (call.unit == 1) parts<mi_u8>(call);
    } else if (call.form == MI_IDS) {
        ids(call);
    } else if (call.form == MI_NOISY) {
        if (call.type == MI_BF16) noisy<MI_BF16>(call);
        if (call.type == MI_F16) noisy<MI_F16>(call);
        if (call.type == MI_F32) noisy<MI_F32>(call);
        if (call.type == MI_F64) noisy<MI_F64>(call);
    } else if (call.form == MI_TIMES) {
        MI_EACH(i, call.width)
        ((mi_u32 *)call.out)[i] = ((const mi_u32 *)call.given)[i] * (mi_u32)call.world;
    }
}

// Packs over the link, some of a thread at once.
#define IN_FLIGHT 4
MI_FN void move(mi_u64 to, mi_u64 from, mi_u32 room, mi_u32 packs) {
    const mi_u32 step = MI_GRID * MI_THREADS;
    for (mi_u32 i = MI_BID * MI_THREADS + MI_TID; i < packs; i += IN_FLIGHT * step) {
        Pack p[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            if (i + k * step < packs) p[k] = load_pack(from + (i + k * step) % room * 16ull);
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            if (i + k * step < packs) store_pack(to + (i + k * step) % room * 16ull, p[k]);
    }
}

// By the block that has done its part last, before it waits: so counting costs a call nothing.
MI_FN void count(const MiAlone &call, mi_u64 took) {
    volatile mi_u64 *const counts = (volatile mi_u64 *)call.counts;
    volatile mi_u64 *const seen = (volatile mi_u64 *)call.seen;
    const bool late = took > call.ns;
    const mi_u64 more[4] = {1, late ? took : call.ns, late, late ? took - call.ns : 0};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const mi_u64 now = counts[i] + more[i];
        counts[i] = now;
        seen[i] = now;
    }
}

extern "C" __global__ void __launch_bounds__(512, 1) mi_alone(const __grid_constant__ MiAlone call) {
    const mi_u64 began = mi_now(), begin = call.begun ? *(const volatile mi_u64 *)call.begun : began;
    if (call.mark && MI_TID == 0 && MI_BID == 0) *(volatile mi_u64 *)call.mark = began;
    const mi_u32 room = (mi_u32)(call.room / 16);
    move(call.host, call.scratch, room, (mi_u32)((call.down + 15) / 16));
    move(call.scratch, call.host, room, (mi_u32)((call.up + 15) / 16));
    stand_in(call);
    __syncthreads();
    if (call.mark || MI_TID != 0) return;
    const mi_u64 took = mi_now() - begin;
    if (atomicAdd((mi_u32 *)call.ticket, 1u) == MI_GRID - 1) {
        *(volatile mi_u32 *)call.ticket = 0;
        count(call, took);
    }
    while (mi_now() - begin < call.ns) mi_relax(65);
}
