/* Epilogue of a sum: residual += y, RMSNorm of it; the order of `exact.py`. */
#ifndef MI_ROWS_H
#define MI_ROWS_H

#define LANES 256u
#define GROUP 8u

// BESIDE packs of every rank are loaded together, as many as registers allow, and computed without a
// branch between them; what is not there is computed too, and not kept.
#define BESIDE (MI_TOP > 4 ? 1 : 2)

// One row after another of 2-byte elements, at most four packs per lane, everything in registers. What
// does not wait for peers is there before they are: `kept` (the residual) and this rank's own packs, the
// first in `part`; and, before the launch before has ended, where this lane's first pack lies; the others
// follow at known distances. `packs`: of this lane; bytes to this row (`row`), to the end of the last, from
// one to the next (`step`); `inverse`: of the row's length, rounded; `put`, `get`: as `sum_lanes` has them.
struct MiRows {
    Pack kept[4], weight[4], part[BESIDE][MI_TOP];
    mi_u64 from[MI_TOP], to, residual, normed, weights, put, get;
    mi_u32 own, lane, group, packs, row, end, step;
    float hidden, inverse;
};

// Sum over the 256 lanes of a group of threads: halves are added pairwise. Every warp adds all of them, so
// that the group meets once; rows take turns with the room, for one of it may still be read. `put`, `get`:
// the place of this lane there, and of the first whose number in its warp is this one's.
#define TURN (2 * 8 * LANES) // bytes of one turn: two groups of lanes, 8 bytes each
__device__ __forceinline__ mi_u64 room_of(mi_u32 group) {
    __shared__ double room[2][2][LANES];
    return shared_at(room) + group * 8 * LANES;
}
template <typename Wide>
__device__ __forceinline__ Wide sum_lanes(Wide mine, mi_u64 put, mi_u64 get, mi_u32 group) {
    put_shared(put, mine);
    sync_group(group);
    // 256 -> 128 -> 64 -> 32, each lane the same additions as a tree over all lanes.
    Wide a[8];
#pragma unroll
    for (mi_u32 k = 0; k < 8; k++) get_shared(get + k * 32 * (mi_u32)sizeof(Wide), &a[k]);
#pragma unroll
    for (mi_u32 half = 4; half; half /= 2)
#pragma unroll
        for (mi_u32 k = 0; k < half; k++) a[k] = add(a[k], a[k + half]);
    mine = a[0];
#pragma unroll
    for (int step = 16; step; step /= 2)
        mine = add(mine, __shfl_xor_sync(0xffffffffu, mine, step));
    return mine;
}

template <typename Wide>
__device__ __forceinline__ Wide scale_of(const MiCall *call, Wide squares) {
    return inverse_root(add(divide(squares, (Wide)call->hidden), (Wide)call->eps));
}

// The same, sooner, where nothing comes near the ends of what a float holds.
__device__ __forceinline__ float scale_soon(const MiCall *call, const MiRows *r, float squares) {
    const float shifted = add(quotient(squares, r->hidden, r->inverse), call->eps);
    const float soon = inverse_root_soon(shifted, about_inverse_root(shifted));
    return is_common(shifted) ? soon : scale_of(call, squares);
}

#define PACK_STEP (LANES * 16u)

// Whether p is this rank and its packs are there early, which takes registers; said so that the compiler
// does not take the one for the other as an index, nor asks for the constant when it is waited for.
__device__ __forceinline__ bool is_own(const MiCall *call, const MiRows *r, mi_u32 p) {
    return MI_TOP <= 4 && mi_type(call) == MI_BF16 && (r->own & 1u << p) != 0;
}

// What is there of the next row before its peers are.
__device__ __forceinline__ void load_row(const MiCall *call, MiRows *r) {
#pragma unroll
    for (mi_u32 k = 0; k < 4; k++)
        if (k < r->packs) r->kept[k] = load_pack(r->residual + k * PACK_STEP);
#pragma unroll
    for (mi_u32 k = 0; k < BESIDE; k++)
#pragma unroll
        for (mi_u32 p = 0; p < MI_TOP; p++)
            if (k < r->packs && is_own(call, r, p))
                r->part[k][p] = load_pack(r->from[p] + k * PACK_STEP);
}

// Whether the rows of this block can be done so, as far as addresses say that the call has; nothing is read.
__device__ __forceinline__ int plan_rows(const MiCall *call, mi_u32 begin, mi_u32 end, MiRows *r) {
    const mi_u32 packs = call->hidden / GROUP;
    mi_u32 lane = MI_TID % LANES, group = MI_TID / LANES;
    const mi_u64 all = (call->out + begin * 2ull) | (call->residual + begin * 2ull) |
                       (call->normed + begin * 2ull) | call->weight;
    if (call->hidden % GROUP || packs > 4 * LANES || (all & 15)) return 0;
    r->row = group * call->hidden * 2;
    r->end = (end - begin) * 2;
    r->step = MI_THREADS / LANES * call->hidden * 2;
    r->packs = r->row < r->end && lane < packs ? (packs - lane + LANES - 1) / LANES : 0;
    const mi_u64 at = begin * 2ull + r->row + lane * 16;
    r->to = call->out + at;
    r->residual = call->residual + at;
    r->normed = call->normed + at;
    r->weights = call->weight + lane * 16;
    r->put = room_of(group) + lane * 4;
    r->get = room_of(group) + lane % 32 * 4;
    r->hidden = (float)call->hidden;
    r->inverse = __frcp_rn(r->hidden);
    r->own = lane << 8 | 1u << call->rank;
    MI_NOW(r->to);
    MI_NOW(r->residual);
    MI_NOW(r->normed);
    MI_NOW(r->weights);
    MI_NOW(r->put);
    MI_NOW(r->get);
    now(&r->row);
    now(&r->step);
    now(&r->packs);
    now(&r->own);
    now(&r->hidden);
    now(&r->inverse);
    now(&lane);
    now(&group);
    r->lane = lane, r->group = group;
    return 1;
}

__device__ __forceinline__ int start_rows(const MiCall *call, const mi_u64 *from, MiRows *r) {
    mi_u64 all = 0;
#pragma unroll
    for (mi_u32 p = 0; p < MI_TOP; p++)
        if (p < mi_world(call)) all |= from[p];
    if (all & 15) return 0;
#pragma unroll
    for (mi_u32 p = 0; p < MI_TOP; p++) {
        r->from[p] = from[p] + r->row + r->lane * 16;
        MI_NOW(r->from[p]);
    }
    load_row(call, r);
    return 1;
}

// The NaNs of this lane's packs of a row are given the payload that they are to have.
template <int Type> __device__ __forceinline__ void settle_row(mi_u64 at, mi_u32 packs) {
#pragma unroll 1
    for (mi_u32 k = 0; k < packs; k++) {
        Pack p = load_pack(at + k * PACK_STEP);
        Values<Type>::settle(&p);
        store_pack(at + k * PACK_STEP, p);
    }
}

template <int Type> __device__ __forceinline__ void finish_rows(const MiCall *call, MiRows *r) {
    typedef Values<Type> V;
    for (mi_u32 turn = 0; r->row < r->end; turn++) {
        float square = 0;
#pragma unroll
        for (mi_u32 some = 0; some < 4; some += BESIDE) {
            if (some >= r->packs) break;
#pragma unroll
            for (mi_u32 k = 0; k < BESIDE; k++)
#pragma unroll
                for (mi_u32 p = 0; p < MI_TOP; p++)
                    if (p < mi_world(call) && some + k < r->packs && (some || !is_own(call, r, p)))
                        r->part[k][p] = load_pack(r->from[p] + (some + k) * PACK_STEP);
#pragma unroll
            for (mi_u32 k = 0; k < 4; k++) // behind what is waited for
                if (!some && k < r->packs) r->weight[k] = load_pack(r->weights + k * PACK_STEP);
#pragma unroll
            for (mi_u32 k = some; k < some + BESIDE; k++) {
                const Pack y = add_packs<Type>(call, r->part[k - some]), sum = V::added(y, r->kept[k]);
                float x[GROUP], more = square;
                V::unpack(sum, x);
#pragma unroll
                for (int i = 0; i < (int)GROUP; i++)
                    more = k || i ? add(more, mul(x[i], x[i])) : mul(x[i], x[i]);
                now(&more);
                if (k < r->packs) {
                    square = more;
                    store_pack(r->to + k * PACK_STEP, y);
                    store_pack(r->residual + k * PACK_STEP, sum);
                }
                r->kept[k] = sum;
            }
        }
        const float scale = scale_soon(call, r, sum_lanes(square, r->put, r->get, r->group));
        bool nan = false;
#pragma unroll
        for (mi_u32 k = 0; k < 4; k++) {
            if (k >= r->packs) break;
            float x[GROUP], w[GROUP];
            V::unpack(r->kept[k], x);
#pragma unroll
            for (int i = 0; i < 4; i++) now(&r->weight[k].w[i]); // or it is unpacked before peers' packs
            V::unpack(r->weight[k], w);
#pragma unroll
            for (int i = 0; i < (int)GROUP; i++) x[i] = mul(mul(x[i], scale), w[i]);
            nan |= V::unsettled(x);
            store_pack(r->normed + k * PACK_STEP, V::rounded(x));
        }
        if (nan) { // where the sum has one, all of its row is none
            if (square != square) {
                settle_row<Type>(r->to, r->packs);
                settle_row<Type>(r->residual, r->packs);
            }
            settle_row<Type>(r->normed, r->packs);
        }
        r->row += r->step;
        if (r->row >= r->end) return;
        r->to += r->step, r->residual += r->step, r->normed += r->step;
#pragma unroll
        for (mi_u32 p = 0; p < MI_TOP; p++) r->from[p] += r->step;
        const mi_u64 other = turn & 1 ? 0ull - TURN : TURN;
        r->put += other, r->get += other;
        load_row(call, r);
    }
}

// Any type, width and alignment, from the reduced output; also what two-shot ends with.
template <int Type>
__device__ __forceinline__ void rows(const MiCall *call, mi_u64 begin, mi_u64 end) {
    typedef typename Element<Type>::Raw Raw;
    typedef typename Element<Type>::Wide Wide;
    typedef Element<Type> E;
    const mi_u32 lane = MI_TID % LANES, group = MI_TID / LANES;
    const volatile Raw *y = (const volatile Raw *)call->out;
    const Raw *weight = (const Raw *)call->weight;
    Raw *residual = (Raw *)call->residual, *normed = (Raw *)call->normed;
    mi_u32 turn = 0;
    for (mi_u64 row = begin + group * (mi_u64)call->hidden; row < end;
         row += MI_THREADS / LANES * (mi_u64)call->hidden) {
        Wide square = 0;
        for (mi_u32 j = lane * GROUP; j < call->hidden; j += LANES * GROUP)
            for (mi_u32 i = j; i < j + GROUP && i < call->hidden; i++) {
                const Raw sum = E::round(add(E::wide(y[row + i]), E::wide(residual[row + i])));
                residual[row + i] = sum;
                square = add(square, mul(E::wide(sum), E::wide(sum)));
            }
        const mi_u64 room = room_of(group) + (turn++ & 1) * TURN;
        const mi_u64 put = room + lane * (mi_u32)sizeof(Wide);
        const mi_u64 get = room + lane % 32 * (mi_u32)sizeof(Wide);
        const Wide scale = scale_of(call, sum_lanes(square, put, get, group));
        for (mi_u32 j = lane * GROUP; j < call->hidden; j += LANES * GROUP)
            for (mi_u32 i = j; i < j + GROUP && i < call->hidden; i++)
                normed[row + i] =
                    E::round(mul(mul(E::wide(residual[row + i]), scale), E::wide(weight[i])));
    }
}

#endif
