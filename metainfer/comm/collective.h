/* One collective as phases over the slabs, written once for CUDA blocks and host threads.
 *
 * The includer gives `mi_copy(to, from, bytes)` and `mi_sum(call, to, from[], begin, end)`; both
 * share the work among the threads of a block. The sum is canonical: wide accumulation in rank order
 * and one rounding, so no algorithm, size or number of blocks changes a bit of it.
 */
#ifndef MI_COLLECTIVE_H
#define MI_COLLECTIVE_H

#include "slab.h"

MI_FN void mi_copy(mi_u64 to, mi_u64 from, mi_u64 bytes);
MI_FN void mi_sum(const MiCall *call, mi_u64 to, const mi_u64 *from, mi_u64 count);
MI_FN void mi_epilogue(const MiCall *call, mi_u64 begin, mi_u64 end);

/* What rank p is sent: its range of the input, into its slot or once into the shared one. */
MI_FN void mi_push(const MiCall *call, mi_u32 half) {
    const mi_u32 world = call->world, rank = call->rank;
    for (mi_u32 step = 1; step < world; step++) {
        const mi_u32 p = (rank + step) % world; /* rotated: no port is everyone's first */
        const mi_u64 slot = mi_slot(call, p, rank, half);
        if (call->side && !(call->shared && step > 1) && MI_BID == 0)
            mi_copy(slot, call->side_in, call->side * 4ull);
        if (call->shared && call->same && step > 1) break;
        mi_u64 begin, end;
        mi_stripe(call->in_len[p], call->unit, &begin, &end);
        if (begin >= end) continue;
        const mi_u64 part = call->shared && !call->same ? p * call->stride : 0;
        mi_copy(slot + MI_SIDE + part + begin * call->width,
                call->in + (call->in_begin[p] + begin) * call->width, (end - begin) * call->width);
    }
}

/* out[begin .. end) = sum over ranks; the own part is read where it is. Ranges of this block. */
MI_FN void mi_sum_stripe(const MiCall *call, mi_u32 half, mi_u64 to, mi_u64 begin, mi_u64 end) {
    mi_u64 from[MI_WORLD];
    const mi_u32 rank = call->rank;
    const mi_u64 part = call->shared && !call->same ? rank * call->stride : 0;
    if (begin >= end) return;
    for (mi_u32 p = 0; p < call->world; p++)
        from[p] = (p == rank ? call->in + call->in_begin[rank] * call->width
                             : mi_slot(call, rank, p, half) + MI_SIDE + part) +
                  begin * call->width;
    mi_sum(call, to + begin * call->width, from, end - begin);
}

MI_FN void mi_sum_side(const MiCall *call, mi_u32 half) {
    int *out = (int *)call->side_out;
    for (mi_u32 i = MI_TID; i < call->side; i += MI_THREADS) {
        mi_u32 sum = 0;
        for (mi_u32 p = 0; p < call->world; p++) {
            mi_u64 at = p == call->rank ? call->side_in : mi_slot(call, call->rank, p, half);
            sum += ((const volatile mi_u32 *)at)[i];
        }
        out[i] = (int)sum;
    }
}

/* Copy what every peer left at `offset` of its slot into its range of the output. */
MI_FN void mi_take(const MiCall *call, mi_u32 half, mi_u64 offset) {
    for (mi_u32 step = 1; step < call->world; step++) {
        const mi_u32 p = (call->rank + step) % call->world;
        mi_u64 begin, end;
        mi_stripe(call->out_len[p], call->unit, &begin, &end);
        if (begin >= end) continue;
        const mi_u64 part =
            call->kind == MI_COPY && call->shared && !call->same ? call->rank * call->stride : 0;
        mi_copy(call->out + (call->out_begin[p] + begin) * call->width,
                mi_slot(call, call->rank, p, half) + MI_SIDE + offset + part + begin * call->width,
                (end - begin) * call->width);
    }
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

MI_FN void mi_finish_rows(const MiCall *call) {
    if (!call->hidden) return;
    MI_SYNC();
    if (call->kind == MI_SUM_ALL) {
        mi_u64 begin, end;
        mi_stripe(call->in_len[call->rank], call->unit, &begin, &end);
        mi_epilogue(call, begin, end);
        return;
    }
    for (mi_u32 p = 0; p < call->world; p++) {
        mi_u64 begin, end;
        mi_stripe(call->out_len[p], call->unit, &begin, &end);
        mi_epilogue(call, call->out_begin[p] + begin, call->out_begin[p] + end);
    }
}

/* The whole of one call for one block. */
MI_FN mi_u64 mi_collective(const MiCall *call) {
    const mi_u64 calls = mi_enter(call);
    const mi_u32 half = (mi_u32)(calls & 1), rank = call->rank;
    mi_u64 begin, end, code;
    mi_push(call, half);
    code = mi_meet(call, calls, 0);
    if (code != MI_OK) return code;
    if (call->side && MI_BID == 0) mi_sum_side(call, half);
    switch (call->kind) {
    case MI_SUM_ALL:
        mi_stripe(call->in_len[rank], call->unit, &begin, &end);
        mi_sum_stripe(call, half, call->out, begin, end);
        break;
    case MI_SUM_PART:
        mi_stripe(call->in_len[rank], call->unit, &begin, &end);
        mi_sum_stripe(call, half, call->out, begin, end);
        break;
    case MI_SUM_GATHER: {
        const mi_u64 to = call->out + call->out_begin[rank] * call->width;
        mi_stripe(call->in_len[rank], call->unit, &begin, &end);
        mi_sum_stripe(call, half, to, begin, end);
        MI_SYNC();
        for (mi_u32 step = 1; step < call->world && begin < end; step++) {
            const mi_u32 p = (rank + step) % call->world;
            mi_copy(mi_slot(call, p, rank, half) + MI_SIDE + call->second + begin * call->width,
                    to + begin * call->width, (end - begin) * call->width);
            if (call->shared) break;
        }
        code = mi_meet(call, calls, 1);
        if (code != MI_OK) return code;
        mi_take(call, half, call->second);
        break;
    }
    case MI_COPY:
        mi_keep(call);
        mi_take(call, half, 0);
        break;
    default: break;
    }
    mi_finish_rows(call);
    return MI_OK;
}

#endif
