/* One collective as phases over the slabs, written once for CUDA blocks and host threads.
 *
 * The includer gives the work that the threads of a block share: `mi_copy` one range, `mi_spread` one
 * range to several places, `mi_many` several ranges at once, `mi_sum` and the epilogue. The sum is
 * canonical: wide accumulation in rank order and one rounding, so no algorithm, size or number of
 * blocks changes a bit of it.
 */
#ifndef MI_COLLECTIVE_H
#define MI_COLLECTIVE_H

#include "slab.h"

/* Independent copies, entry step - 1 for the peer `step` further on; 0 bytes: none. Indices are
 * known to the compiler, so that it keeps them in registers. */
typedef struct {
    mi_u64 to[MI_TOP], from[MI_TOP], bytes[MI_TOP];
} MiCopies;

MI_FN void mi_copy(mi_u64 to, mi_u64 from, mi_u64 bytes);
MI_FN void mi_spread(const MiCopies *places);
MI_FN void mi_many(const MiCopies *copies);
MI_FN void mi_sum(const MiCall *call, mi_u64 to, const mi_u64 *from, mi_u64 count);
/* Sum, residual and norm of whole rows in one pass; 0 where that is not built and nothing was done. */
MI_FN int mi_fused(const MiCall *call, mi_u64 to, const mi_u64 *from, mi_u64 begin, mi_u64 end);
MI_FN void mi_epilogue(const MiCall *call, mi_u64 begin, mi_u64 end);

/* The rank `step` further on: every rank begins with another peer, so no port is everyone's first. */
MI_FN mi_u32 mi_peer(const MiCall *call, mi_u32 step) { return (call->rank + step) % mi_world(call); }

/* Offset in a shared slot of what is meant for rank `p`. */
MI_FN mi_u64 mi_part(const MiCall *call, mi_u32 p) {
    return call->shared && !call->same ? p * call->stride : 0;
}

/* What rank p is sent: its range of the input, into its slot or once into the shared one. */
MI_FN void mi_push(const MiCall *call, mi_u32 half) {
    MiCopies c;
    MI_UNROLL
    for (mi_u32 step = 1; step < MI_TOP; step++) {
        const mi_u32 p = mi_peer(call, step);
        mi_u64 begin, end;
        c.bytes[step - 1] = 0;
        if (step >= mi_world(call) || (call->shared && call->same && step > 1)) continue;
        mi_stripe(call->in_len[p], call->unit, &begin, &end);
        c.to[step - 1] = mi_slot(call, p, call->rank, half) + MI_SIDE + mi_part(call, p) +
                         begin * call->width;
        c.from[step - 1] = call->in + (call->in_begin[p] + begin) * call->width;
        c.bytes[step - 1] = (end - begin) * call->width;
    }
    if (call->same)
        mi_spread(&c);
    else
        mi_many(&c);
    if (!call->side || MI_BID) return;
    for (mi_u32 step = 1; step < (call->shared ? 2 : mi_world(call)); step++)
        mi_copy(mi_slot(call, mi_peer(call, step), call->rank, half), call->side_in,
                call->side * 4ull);
}

/* Where this rank's part of every rank lies, own first in place; for the sum of it. */
MI_FN void mi_sources(const MiCall *call, mi_u32 half, mi_u64 begin, mi_u64 *from) {
    const mi_u32 rank = call->rank;
    MI_UNROLL
    for (mi_u32 p = 0; p < MI_TOP; p++)
        from[p] = (p == rank ? call->in + call->in_begin[rank] * call->width
                             : mi_slot(call, rank, p, half) + MI_SIDE + mi_part(call, rank)) +
                  begin * call->width;
}

MI_FN void mi_sum_side(const MiCall *call, mi_u32 half) {
    int *out = (int *)call->side_out;
    for (mi_u32 i = MI_TID; i < call->side; i += MI_THREADS) {
        mi_u32 sum = 0;
        for (mi_u32 p = 0; p < mi_world(call); p++) {
            mi_u64 at = p == call->rank ? call->side_in : mi_slot(call, call->rank, p, half);
            sum += ((const volatile mi_u32 *)at)[i];
        }
        out[i] = (int)sum;
    }
}

/* Copy what every peer left at `offset` of its slot into its range of the output. */
MI_FN void mi_take(const MiCall *call, mi_u32 half, mi_u64 offset) {
    MiCopies c;
    MI_UNROLL
    for (mi_u32 step = 1; step < MI_TOP; step++) {
        const mi_u32 p = mi_peer(call, step);
        mi_u64 begin, end;
        c.bytes[step - 1] = 0;
        if (step >= mi_world(call)) continue;
        mi_stripe(call->out_len[p], call->unit, &begin, &end);
        c.to[step - 1] = call->out + (call->out_begin[p] + begin) * call->width;
        c.from[step - 1] =
            mi_slot(call, call->rank, p, half) + MI_SIDE + offset + begin * call->width;
        c.bytes[step - 1] = (end - begin) * call->width;
    }
    mi_many(&c);
}

/* Own part of a copy, when it is not there already. */
MI_FN void mi_keep(const MiCall *call) {
    const mi_u32 r = call->rank;
    mi_u64 begin, end;
    mi_stripe(call->out_len[r], call->unit, &begin, &end);
    const mi_u64 to = call->out + (call->out_begin[r] + begin) * call->width;
    const mi_u64 from = call->in + (call->in_begin[r] + begin) * call->width;
    if (begin < end && to != from) mi_copy(to, from, (end - begin) * call->width);
}

/* Sum this rank's part to `to` (one-shot, reduce-scatter, first half of two-shot). */
MI_FN void mi_reduce(const MiCall *call, mi_u32 half, mi_u64 to, mi_u64 begin, mi_u64 end) {
    mi_u64 from[MI_TOP];
    if (begin >= end) return;
    mi_sources(call, half, begin, from);
    mi_sum(call, to + begin * call->width, from, end - begin);
}

/* One-shot: everyone sums everything. With an epilogue, in one pass where that is built. */
MI_FN void mi_sum_all(const MiCall *call, mi_u32 half) {
    mi_u64 begin, end, from[MI_TOP];
    mi_stripe(call->in_len[call->rank], call->unit, &begin, &end);
    if (begin >= end) return;
    if (mi_hidden(call)) {
        mi_sources(call, half, 0, from);
        if (mi_fused(call, call->out, from, begin, end)) return;
    }
    mi_reduce(call, half, call->out, begin, end);
    if (mi_hidden(call)) {
        MI_SYNC();
        mi_epilogue(call, begin, end);
    }
}

/* Two-shot: the owner sums its part and gives it to all. */
MI_FN mi_u64 mi_sum_gather(const MiCall *call, mi_u64 calls, mi_u32 half) {
    const mi_u32 rank = call->rank;
    const mi_u64 to = call->out + call->out_begin[rank] * call->width;
    mi_u64 begin, end;
    mi_stripe(call->in_len[rank], call->unit, &begin, &end);
    mi_reduce(call, half, to, begin, end);
    MI_SYNC();
    MiCopies c;
    MI_UNROLL
    for (mi_u32 step = 1; step < MI_TOP; step++) {
        const int use = step < mi_world(call) && !(call->shared && step > 1);
        c.to[step - 1] = mi_slot(call, use ? mi_peer(call, step) : 0, rank, half) + MI_SIDE +
                         call->second + begin * call->width;
        c.from[step - 1] = to + begin * call->width;
        c.bytes[step - 1] = use ? (end - begin) * call->width : 0;
    }
    mi_spread(&c);
    mi_announce(call, calls, 1);
    const mi_u64 code = mi_hear(call, calls, 1);
    if (code != MI_OK) return code;
    mi_grid_trigger();
    mi_take(call, half, call->second);
    if (!mi_hidden(call)) return MI_OK;
    for (mi_u32 p = 0; p < mi_world(call); p++) {
        MI_SYNC(); /* what was taken is there, and the room of the sums of rows is free again */
        mi_stripe(call->out_len[p], call->unit, &begin, &end);
        mi_epilogue(call, call->out_begin[p] + begin, call->out_begin[p] + end);
    }
    return MI_OK;
}

/* The whole of one call for one block. A sum may be in place: a block pushes its stripe before it sums it.
 * The launch that follows may take room beside this one once all peers have been heard for the last time,
 * not before: a block that waits for a peer must not be what keeps that peer's block, of this stream or
 * another, from a place on its card. */
MI_FN mi_u64 mi_collective(const MiCall *call) {
    mi_grid_wait();
    const mi_u64 calls = mi_enter(call);
    const mi_u32 half = (mi_u32)(calls & 1);
    mi_take_turn(call, calls);
    mi_push(call, half);
    mi_announce(call, calls, 0);
    mi_pass_turn(call, calls);
    mi_arrive(call, calls);
    const mi_u64 code = mi_hear(call, calls, 0);
    if (code != MI_OK) return code;
    if (call->kind != MI_SUM_GATHER) mi_grid_trigger();
    if (call->side && MI_BID == 0) mi_sum_side(call, half);
    if (call->kind == MI_SUM_ALL) {
        mi_sum_all(call, half);
    } else if (call->kind == MI_SUM_PART) {
        mi_u64 begin, end;
        mi_stripe(call->in_len[call->rank], call->unit, &begin, &end);
        mi_reduce(call, half, call->out, begin, end);
    } else if (call->kind == MI_SUM_GATHER) {
        return mi_sum_gather(call, calls, half);
    } else if (call->kind == MI_COPY) {
        mi_keep(call);
        mi_take(call, half, mi_part(call, call->rank));
    }
    return MI_OK;
}

#endif
