/* One collective as phases over the slabs, written once for CUDA blocks and host threads.
 *
 * The includer gives the work that the threads of a block share: `mi_copy` one range, `mi_spread` one
 * range to several places, `mi_many` several ranges at once, `mi_sum` and the epilogue; and MiRows, what
 * the epilogue keeps while peers are waited for. The sum is
 * canonical: wide accumulation in rank order and one rounding, so no algorithm, size or number of
 * blocks changes a bit of it.
 */
#ifndef MI_COLLECTIVE_H
#define MI_COLLECTIVE_H

#include "slab.h"

/* Independent copies, entry step - 1 for the peer `step` further on; 0 bytes: none. Indices are
 * known to the compiler, so that it keeps them in registers. */
typedef struct {
    mi_u64 to[MI_TOP], from[MI_TOP];
    mi_u32 bytes[MI_TOP];
} MiCopies;

/* What may be done before the launch before has ended. */
MI_FN void mi_ahead(const MiCall *call);
MI_FN void mi_copy(mi_u64 to, mi_u64 from, mi_u32 bytes);
/* To the first `places` of `to`. */
MI_FN void mi_spread(const mi_u64 *to, mi_u32 places, mi_u64 from, mi_u32 bytes);
MI_FN void mi_many(const MiCopies *copies);
MI_FN void mi_sum(const MiCall *call, mi_u64 to, const mi_u64 *from, mi_u32 count);
/* Sum, residual and norm of whole rows in one pass: what is known of the call alone, before the launch before
 * has ended; what does not wait for peers; the rest. 0 where that is not built and nothing was done. */
MI_FN int mi_plan_rows(const MiCall *call, mi_u32 begin, mi_u32 end, MiRows *rows);
MI_FN int mi_start_rows(const MiCall *call, const mi_u64 *from, MiRows *rows);
MI_FN void mi_finish_rows(const MiCall *call, MiRows *rows);
MI_FN void mi_epilogue(const MiCall *call, mi_u64 begin, mi_u64 end);

/* The rank `step` further on: every rank begins with another peer, so no port is everyone's first. */
MI_FN mi_u32 mi_peer(const MiCall *call, mi_u32 step) { return (call->rank + step) % mi_world(call); }

/* Whether every peer gets the same range: known of a sum before the call is. */
MI_FN mi_u32 mi_same(const MiCall *call, mi_u32 kind) {
    return kind == MI_SUM_ALL || (kind != MI_SUM_PART && kind != MI_SUM_GATHER && call->same);
}

/* Offset in a shared slot of what is meant for rank `p`. */
MI_FN mi_u64 mi_part(const MiCall *call, mi_u32 kind, mi_u32 p) {
    return call->shared && !mi_same(call, kind) ? p * call->stride : 0;
}

/* What is for all ranks: `bytes` at `from`, to `offset` of each one's slot or once of the shared one. */
MI_FN void mi_give(const MiCall *call, mi_u32 half, mi_u64 offset, mi_u64 from, mi_u32 bytes) {
    const mi_u32 places = call->shared ? 1 : mi_world(call) - 1;
    mi_u64 to[MI_TOP];
    MI_UNROLL
    for (mi_u32 step = 1; step < MI_TOP; step++)
        to[step - 1] = mi_slot(call, step <= places ? mi_peer(call, step) : 0, call->rank, half) +
                       MI_SIDE + offset;
    mi_spread(to, places, from, bytes);
}

/* What each rank is sent of its own: its range of the input. */
MI_FN void mi_deal(const MiCall *call, mi_u32 kind, mi_u32 half) {
    MiCopies c;
    MI_UNROLL
    for (mi_u32 step = 1; step < MI_TOP; step++) {
        const mi_u32 p = mi_peer(call, step);
        mi_u32 begin, end;
        c.bytes[step - 1] = 0;
        if (step >= mi_world(call)) continue;
        mi_stripe(call, call->in_len[p], &begin, &end);
        c.to[step - 1] = mi_slot(call, p, call->rank, half) + MI_SIDE + mi_part(call, kind, p) +
                         (mi_u64)begin * call->width;
        c.from[step - 1] = call->in + (call->in_begin[p] + begin) * call->width;
        c.bytes[step - 1] = (end - begin) * call->width;
    }
    mi_many(&c);
}

MI_FN void mi_push(const MiCall *call, mi_u32 kind, mi_u32 half) {
    if (mi_same(call, kind)) {
        mi_u32 begin, end;
        mi_stripe(call, call->in_len[call->rank], &begin, &end);
        mi_give(call, half, (mi_u64)begin * call->width,
                call->in + (call->in_begin[call->rank] + begin) * call->width,
                (end - begin) * call->width);
    } else {
        mi_deal(call, kind, half);
    }
    if (!call->side || MI_BID) return;
    mi_give(call, half, 0ull - MI_SIDE, call->side_in, call->side * 4);
}

/* Where this rank's part of every rank lies from `begin` on, its own in place; for the sum of it. In the
 * first half of slots: which half it is, a call knows late. */
MI_FN void mi_sources(const MiCall *call, mi_u32 kind, mi_u32 begin, mi_u64 *from) {
    const mi_u32 rank = call->rank;
    MI_UNROLL
    for (mi_u32 p = 0; p < MI_TOP; p++) {
        from[p] = (p == rank ? call->in + call->in_begin[rank] * call->width
                             : mi_slot(call, rank, p, 0) + MI_SIDE + mi_part(call, kind, rank)) +
                  (mi_u64)begin * call->width;
        MI_NOW(from[p]);
    }
}

/* The same in `half`. */
MI_FN void mi_in_half(const MiCall *call, mi_u32 half, mi_u64 *from) {
    const mi_u64 further = half ? mi_slot(call, 0, 0, 1) - mi_slot(call, 0, 0, 0) : 0;
    MI_UNROLL
    for (mi_u32 p = 0; p < MI_TOP; p++)
        if (p != call->rank) from[p] += further;
}

MI_FN void mi_sum_side(const MiCall *call, mi_u32 half) {
    int *out = (int *)call->side_out;
    for (mi_u32 i = MI_TID; i < call->side; i += MI_THREADS) {
        mi_u32 sum = 0, part[MI_TOP];
        MI_UNROLL
        for (mi_u32 p = 0; p < MI_TOP; p++) { /* all on their way, then added */
            const mi_u64 at = p == call->rank ? call->side_in : mi_slot(call, call->rank, p, half);
            part[p] = p < mi_world(call) ? ((const volatile mi_u32 *)at)[i] : 0;
        }
        MI_UNROLL
        for (mi_u32 p = 0; p < MI_TOP; p++) sum += part[p];
        out[i] = (int)sum;
    }
}

/* Copy what every peer left at `offset` of its slot into its range of the output. */
MI_FN void mi_take(const MiCall *call, mi_u32 half, mi_u64 offset) {
    MiCopies c;
    MI_UNROLL
    for (mi_u32 step = 1; step < MI_TOP; step++) {
        const mi_u32 p = mi_peer(call, step);
        mi_u32 begin, end;
        c.bytes[step - 1] = 0;
        if (step >= mi_world(call)) continue;
        mi_stripe(call, call->out_len[p], &begin, &end);
        c.to[step - 1] = call->out + (call->out_begin[p] + begin) * call->width;
        c.from[step - 1] =
            mi_slot(call, call->rank, p, half) + MI_SIDE + offset + (mi_u64)begin * call->width;
        c.bytes[step - 1] = (end - begin) * call->width;
    }
    mi_many(&c);
}

/* Own part of a copy, when it is not there already. */
MI_FN void mi_keep(const MiCall *call) {
    const mi_u32 r = call->rank;
    mi_u32 begin, end;
    mi_stripe(call, call->out_len[r], &begin, &end);
    const mi_u64 to = call->out + (call->out_begin[r] + begin) * call->width;
    const mi_u64 from = call->in + (call->in_begin[r] + begin) * call->width;
    if (begin < end && to != from) mi_copy(to, from, (end - begin) * call->width);
}

/* One-shot: everyone sums everything. */
MI_FN void mi_sum_all(const MiCall *call, const mi_u64 *from, mi_u32 begin, mi_u32 end) {
    mi_sum(call, call->out + (mi_u64)begin * call->width, from, end - begin);
    if (mi_hidden(call)) {
        MI_SYNC();
        mi_epilogue(call, begin, end);
    }
}

/* Two-shot: the owner sums its part and gives it to all. */
MI_FN mi_u64 mi_sum_gather(const MiCall *call, mi_u64 calls, const mi_u64 *from, mi_u32 begin,
                           mi_u32 end) {
    const mi_u32 half = (mi_u32)(calls & 1);
    const mi_u64 to = call->out + call->out_begin[call->rank] * call->width;
    if (begin < end) mi_sum(call, to + (mi_u64)begin * call->width, from, end - begin);
    MI_SYNC();
    const mi_u64 at = (mi_u64)begin * call->width;
    mi_give(call, half, call->second + at, to + at, (end - begin) * call->width);
    mi_announce(call, calls, 1);
    const mi_u64 code = mi_hear(call, calls, 1);
    if (code != MI_OK) return code;
    mi_grid_trigger();
    mi_take(call, half, call->second);
    if (!mi_hidden(call)) return MI_OK;
    for (mi_u32 p = 0; p < mi_world(call); p++) {
        MI_SYNC(); /* what was taken is there, and the room of the sums of rows is free again */
        mi_stripe(call, call->out_len[p], &begin, &end);
        mi_epilogue(call, call->out_begin[p] + begin, call->out_begin[p] + end);
    }
    return MI_OK;
}

/* The whole of one call of `kind` for one block. A sum may be in place: a block pushes its stripe before it sums it.
 * The launch that follows may take room beside this one once all peers have been heard for the last time,
 * not before: a block that waits for a peer must not be what keeps that peer's block, of this stream or
 * another, from a place on its card. */
MI_FN mi_u64 mi_collective(const MiCall *call, mi_u32 kind) {
    const mi_u32 sums = kind != MI_COPY && kind != MI_NOTHING;
    mi_ahead(call);
    mi_u32 begin, end; /* what the call says itself is worked out while the launch before still runs */
    mi_u64 from[MI_TOP];
    MiRows rows;
    mi_stripe(call, call->in_len[call->rank], &begin, &end);
    if (sums) mi_sources(call, kind, begin, from);
    int fused = kind == MI_SUM_ALL && mi_hidden(call) && begin < end &&
                mi_plan_rows(call, begin, end, &rows);
    mi_grid_wait();
    const mi_u64 calls = mi_enter(call);
    const mi_u32 half = (mi_u32)(calls & 1);
    mi_take_turn(call, calls);
    mi_push(call, kind, half);
    mi_pass_turn(call, calls);
    mi_announce(call, calls, 0);
    mi_arrive(call, calls);
    if (sums) mi_in_half(call, half, from);
    if (fused) fused = mi_start_rows(call, from, &rows);
    const mi_u64 code = mi_hear(call, calls, 0);
    if (code != MI_OK) return code;
    if (kind != MI_SUM_GATHER) mi_grid_trigger();
    if (call->side && MI_BID == 0) mi_sum_side(call, half);
    if (kind == MI_SUM_GATHER) return mi_sum_gather(call, calls, from, begin, end);
    if (kind == MI_COPY) {
        mi_keep(call);
        mi_take(call, half, mi_part(call, kind, call->rank));
    } else if (sums && begin < end) {
        if (fused)
            mi_finish_rows(call, &rows);
        else if (kind == MI_SUM_ALL)
            mi_sum_all(call, from, begin, end);
        else
            mi_sum(call, call->out + (mi_u64)begin * call->width, from, end - begin);
    }
    return MI_OK;
}

#endif
