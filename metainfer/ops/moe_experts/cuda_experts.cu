/* The expert products on MXFP4 weights and e4m3 activations by the block-scaled instruction of 12.x.
 *
 * Both operands go to the matrix unit as they are stored: e2m1 with the checkpoint's scale of 32
 * channels, e4m3 with the recipe's scale of 128, which is a power of two and is given four times.
 * Weights are the left operand (16 rows a product), pairs of token and choice the right one (8).
 *
 * Activations lie in *parted* order: of eight channels first the even ones, then the odd ones. A word
 * of eight e2m1 channels then becomes two operand registers by a shift and a mask each, and thread t
 * of a row has channels 8 t .. 8 t + 7 of a group on both sides.
 *
 * MX_N weight rows by MX_M pairs are one block's tile; MX_STAGES blocks of 128 channels are in flight;
 * MX_WARPS warps, MX_ACROSS of them side by side over the pairs. */
#ifndef MX_ON_HOST
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define MX_FN __device__ __forceinline__
#define MX_SHARED(name) extern __shared__ __align__(128) u8 name[]
#endif

#include "cuda_software.h"
#ifndef MX_ON_HOST
#include "cuda_ptx.h"
#endif

constexpr int N = MX_N, M = MX_M, WARPS = MX_WARPS, ACROSS = MX_ACROSS, STAGES = MX_STAGES;
constexpr int THREADS = 32 * WARPS;
constexpr int ROWS = N / (WARPS / ACROSS), COLUMNS = M / ACROSS; /* of a warp */
constexpr int DOWN_TILES = ROWS / 16, SIDE_TILES = COLUMNS / 8;
constexpr int W_BYTES = N * 64, X_BYTES = M * 128, STAGE = W_BYTES + X_BYTES;
constexpr int W_COPIES = N * 4 / THREADS, X_CHUNKS = M * 8;
constexpr int X_COPIES = (X_CHUNKS + THREADS - 1) / THREADS;
constexpr bool FEW = M == 8; /* sums of a token's experts are added from float32 */
constexpr int OUT_BYTES = FEW ? 4 : 2;
static_assert(N % 256 == 0 && ROWS % 16 == 0 && COLUMNS % 8 == 0, "tiles are whole");
static_assert(N * 4 % THREADS == 0, "every thread copies as many weights");
static_assert(M * (N * OUT_BYTES + 16) <= STAGES * STAGE, "results fit where operands were");

struct Product {
    const u8 *x;        /* e4m3 [rows, K], parted */
    const u8 *x_scales; /* [rows, K / 128]: 2^(byte - 127) */
    const int *order;   /* pairs by expert */
    const int *table;   /* [blocks, 3]: expert, first place in `order`, count */
    const float *routes;
    const u8 *w;        /* e2m1 [experts * N, K / 2] */
    const u8 *w_scales; /* [experts * N, K / 32] */
    u8 *out;            /* up: e4m3 [pairs, F], parted; down: bf16 or float32 [pairs, D] */
    u8 *out_scales;     /* up: [pairs, F / 128] */
    float limit;
    u32 k, n, top;
};
struct __align__(16) Four {
    u32 w[4];
};

/* Weight row of an expert that row `r` of a tile is. Up: eight gate rows, then the same eight channels'
 * up rows, so that one thread has both. */
template <bool UP> MX_FN u32 weight_row(u32 r, u32 tile, u32 n) {
    if (!UP) return tile * N + r;
    return (r & 8 ? n / 2 : 0) + tile * (N / 2) + r / 16 * 8 + r % 8;
}
/* Where 16-byte chunk `c` of a weight row, of an activation row, is in its stage: rows that are read
 * together meet in no bank. */
MX_FN u32 w_place(u32 row, u32 c) { return row / 2 * 128 + (row % 2 * 4 + (c ^ (row / 2 & 3))) * 16; }
MX_FN u32 x_place(u32 m, u32 c) { return W_BYTES + m * 128 + (c / 2 ^ (m & 3)) * 32 + c % 2 * 16; }

/* The pair that lane `row` of eight has in tile `j` of its warp: warps side by side take turns, so
 * that few pairs are shared out. */
MX_FN u32 pair_of(u32 j, u32 row) { return (j * ACROSS + threadIdx.x / 32 % ACROSS) * 8 + row; }

/* Largest size of four numbers, as bits; then of all lanes. */
MX_FN u32 largest(const float (&v)[4]) {
    u32 most = 0;
    for (int i = 0; i < 4; ++i) {
        const u32 size = (u32)__float_as_int(v[i]) & 0x7FFFFFFF;
        most = size > most ? size : most;
    }
    for (u32 mask = 16; mask; mask /= 2) {
        const u32 other = other_lane(most, mask);
        most = other > most ? other : most;
    }
    return most;
}
/* A warp's 128 channels, four a lane, rounded by the recipe: the scale is 2^ceil(log2(amax / 448)),
 * amax at least 1e-4; what is not finite makes the scale NaN. */
MX_FN void round_block(const float (&v)[4], u8 *out, u8 *scale) {
    const u32 lane = threadIdx.x % 32;
    u32 most = largest(v);
    most = most > 0x38D1B717 ? most : 0x38D1B717;
    const u32 power = ((most + 0x1FFFFF) >> 23) - 8;
    const float inverse = __int_as_float((int)((254 - power) << 23));
    const u32 mine = e4m3_of(v[0] * inverse, v[1] * inverse) |
                     e4m3_of(v[2] * inverse, v[3] * inverse) << 16;
    const u32 other = other_lane(mine, 1);
    const u32 word = lane % 2 ? __byte_perm(other, mine, 0x7531) : __byte_perm(mine, other, 0x6420);
    ((u32 *)out)[lane] = word;
    if (lane == 0) *scale = most < 0x7F800000 ? (u8)power : 255;
}
MX_FN float bf16_low(u32 two) { return __int_as_float((int)(two << 16)); }
MX_FN float bf16_high(u32 two) { return __int_as_float((int)(two & 0xFFFF0000)); }
MX_FN void four_of(float (&v)[4], const void *from) {
    const u32 low = ((const u32 *)from)[0], high = ((const u32 *)from)[1];
    v[0] = bf16_low(low), v[1] = bf16_high(low), v[2] = bf16_low(high), v[3] = bf16_high(high);
}

/* What a thread copies, and the scales that it holds. */
template <bool UP> struct Sources {
    const u8 *w[W_COPIES], *x[X_COPIES];
    const u8 *w_scales[DOWN_TILES], *x_scales[SIDE_TILES];
    bool live[X_COPIES];

    static MX_FN Sources of(const Product &p, u32 tile, u32 expert, u32 first, u32 count) {
        Sources s;
        const u64 rows = (u64)expert * p.n;
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        for (int i = 0; i < W_COPIES; ++i) {
            const u32 chunk = i * THREADS + threadIdx.x;
            const u64 row = rows + weight_row<UP>(chunk / 4, tile, p.n);
            s.w[i] = p.w + row * (p.k / 2) + chunk % 4 * 16;
        }
        for (int i = 0; i < X_COPIES; ++i) {
            const u32 chunk = i * THREADS + threadIdx.x, m = chunk / 8;
            s.live[i] = m < count;
            s.x[i] = p.x + source(p, first, s.live[i] ? m : 0) * p.k + chunk % 8 * 16;
        }
        /* lanes 0 and 2 of a row's four hold its scales, 1 and 3 those of the row eight below */
        for (int i = 0; i < DOWN_TILES; ++i) {
            const u32 r = warp / ACROSS * ROWS + i * 16 + lane % 2 * 8 + lane / 4;
            s.w_scales[i] = p.w_scales + (rows + weight_row<UP>(r, tile, p.n)) * (p.k / 32);
        }
        for (int j = 0; j < SIDE_TILES; ++j) {
            const u32 m = pair_of(j, lane / 4);
            s.x_scales[j] = p.x_scales + source(p, first, m < count ? m : 0) * (p.k / 128);
        }
        return s;
    }
    /* Row of the activations of pair `m` of the block: its token, or its place. */
    static MX_FN u64 source(const Product &p, u32 first, u32 m) {
        return UP ? (u32)p.order[first + m] / p.top : first + m;
    }
    MX_FN void fetch(u32 stage, u32 block) const {
        for (int i = 0; i < W_COPIES; ++i) {
            const u32 chunk = i * THREADS + threadIdx.x;
            copy16(stage + w_place(chunk / 4, chunk % 4), w[i] + block * 64, true);
        }
        for (int i = 0; i < X_COPIES; ++i) {
            const u32 chunk = i * THREADS + threadIdx.x;
            if (X_CHUNKS % THREADS == 0 || chunk < X_CHUNKS)
                copy16(stage + x_place(chunk / 8, chunk % 8), x[i] + block * 128, live[i]);
        }
    }
    MX_FN void scales(u32 (&of_w)[DOWN_TILES], u32 (&of_x)[SIDE_TILES], u32 block) const {
        for (int i = 0; i < DOWN_TILES; ++i) of_w[i] = *(const u32 *)(w_scales[i] + block * 4);
        for (int j = 0; j < SIDE_TILES; ++j) of_x[j] = x_scales[j][block];
    }
};

typedef float Sums[DOWN_TILES][SIDE_TILES][4];

/* Group S of 32 channels: `packed` holds of each 16 rows the words of groups S & ~1 and S | 1. */
template <int S, int LIVE>
MX_FN void multiply_group(Sums &sums, const u32 (&packed)[DOWN_TILES][4], u32 stage,
                          const u32 (&of_w)[DOWN_TILES], const u32 (&of_x)[SIDE_TILES]) {
    const u32 lane = threadIdx.x % 32;
    u32 a[DOWN_TILES][4];
    for (int i = 0; i < DOWN_TILES; ++i)
        for (int half = 0; half < 2; ++half) {
            const u32 word = packed[i][S % 2 * 2 + half];
            a[i][half] = word << 2 & 0x3C3C3C3C;
            a[i][2 + half] = word >> 2 & 0x3C3C3C3C;
        }
    for (int j = 0; j < LIVE; ++j) {
        u32 b[2];
        load_pair(b, stage + x_place(pair_of(j, lane / 4), 2 * S) + lane % 4 * 8);
        for (int i = 0; i < DOWN_TILES; ++i) product<S>(sums[i][j], a[i], b, of_w[i], of_x[j]);
    }
}
MX_FN void load_words(u32 (&packed)[DOWN_TILES][4], u32 stage, u32 groups) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int i = 0; i < DOWN_TILES; ++i) {
        const u32 row = warp / ACROSS * ROWS + i * 16 + lane / 8 % 2 * 8 + lane % 8;
        load_matrices(packed[i], stage + w_place(row, groups + lane / 16));
    }
}
template <int LIVE>
MX_FN void multiply_block(Sums &sums, u32 stage, const u32 (&of_w)[DOWN_TILES],
                          const u32 (&of_x)[SIDE_TILES]) {
    u32 packed[DOWN_TILES][4];
    load_words(packed, stage, 0);
    multiply_group<0, LIVE>(sums, packed, stage, of_w, of_x);
    multiply_group<1, LIVE>(sums, packed, stage, of_w, of_x);
    load_words(packed, stage, 2);
    multiply_group<2, LIVE>(sums, packed, stage, of_w, of_x);
    multiply_group<3, LIVE>(sums, packed, stage, of_w, of_x);
}
/* All channels, with LIVE tiles of eight pairs a warp. */
template <bool UP, int LIVE> MX_FN void multiply(Sums &sums, const Sources<UP> &from, u32 ring, u32 blocks) {
    u32 of_w[DOWN_TILES], of_x[SIDE_TILES], next_w[DOWN_TILES], next_x[SIDE_TILES];
    for (u32 ahead = 0; ahead < STAGES - 1; ++ahead) {
        if (ahead < blocks) from.fetch(ring + ahead * STAGE, ahead);
        end_copies();
    }
    from.scales(next_w, next_x, 0);
    u32 stage = 0, filled = STAGES - 1;
    for (u32 block = 0; block < blocks; ++block) {
        copies_left<STAGES - 2>();
        __syncthreads(); /* this block is there for all, and the stage before it is free */
        if (block + STAGES - 1 < blocks) from.fetch(ring + filled * STAGE, block + STAGES - 1);
        end_copies();
        for (int i = 0; i < DOWN_TILES; ++i) of_w[i] = next_w[i];
        for (int j = 0; j < SIDE_TILES; ++j) of_x[j] = next_x[j];
        if (block + 1 < blocks) from.scales(next_w, next_x, block + 1);
        multiply_block<LIVE>(sums, ring + stage * STAGE, of_w, of_x);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        filled = filled + 1 == STAGES ? 0 : filled + 1;
    }
    copies_left<0>();
    __syncthreads(); /* results go where operands were */
}

/* Clamp, SwiGLU and routing weight in float32, rounded to bfloat16 as the published code does; then
 * each pair's 128 channels as the second product wants them. */
MX_FN void finish_up(const Product &p, const Sums &sums, u8 *shared, u32 tile, u32 first, u32 count) {
    constexpr u32 PITCH = N / 2 * 2 + 16;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int j = 0; j < SIDE_TILES; ++j)
        for (int side = 0; side < 2; ++side) {
            const u32 m = pair_of(j, lane % 4 * 2 + side);
            const float route = m < count ? p.routes[p.order[first + m]] : 0.f;
            for (int i = 0; i < DOWN_TILES; ++i) {
                float gate = sums[i][j][side], up = sums[i][j][2 + side];
                gate = gate > p.limit ? p.limit : gate; /* NaN stays */
                up = up > p.limit ? p.limit : up < -p.limit ? -p.limit : up;
                const float value = gate / (1.f + expf(-gate)) * up * route;
                const u32 channel = (warp / ACROSS * ROWS / 16 + i) * 8 + lane / 4;
                *(u16 *)(shared + m * PITCH + channel * 2) = (u16)bf16_of(value);
            }
        }
    __syncthreads();
    const u32 blocks = p.n / 256, part = N / 256;
    for (u32 at = warp; at < count * part; at += WARPS) {
        const u32 m = at / part, block = tile * part + at % part;
        float v[4];
        four_of(v, shared + m * PITCH + at % part * 256 + lane * 8);
        const u64 place = (u64)(first + m) * blocks + block;
        round_block(v, p.out + place * 128, p.out_scales + place);
    }
}
MX_FN void finish_down(const Product &p, const Sums &sums, u8 *shared, u32 tile, u32 first, u32 count) {
    constexpr u32 ROW = N * OUT_BYTES, PITCH = ROW + 16;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int j = 0; j < SIDE_TILES; ++j)
        for (int at = 0; at < 4; ++at) {
            const u32 m = pair_of(j, lane % 4 * 2 + at % 2);
            for (int i = 0; i < DOWN_TILES; ++i) {
                const u32 row = warp / ACROSS * ROWS + i * 16 + at / 2 * 8 + lane / 4;
                u8 *to = shared + m * PITCH + row * OUT_BYTES;
                if (FEW)
                    *(float *)to = sums[i][j][at];
                else
                    *(u16 *)to = (u16)bf16_of(sums[i][j][at]);
            }
        }
    __syncthreads();
    for (u32 m = warp; m < count; m += WARPS) {
        const u64 row = (u64)(u32)p.order[first + m] * p.n + tile * N;
        for (u32 i = lane; i < ROW / 16; i += 32)
            ((Four *)(p.out + row * OUT_BYTES))[i] = *(const Four *)(shared + m * PITCH + i * 16);
    }
}

/* Block: tile `blockIdx.x % tiles` of weight rows by a block of the table. */
template <bool UP> MX_FN void run_tile(const Product &p) {
    MX_SHARED(shared);
    const u32 tiles = p.n / N, tile = blockIdx.x % tiles;
    const int *entry = p.table + blockIdx.x / tiles * 3;
    const u32 count = entry[2];
    if (count == 0) return; /* past the last block */
    const u32 expert = entry[0], first = entry[1];
    const u32 ring = shared_address(shared), blocks = p.k / 128;
    const Sources<UP> from = Sources<UP>::of(p, tile, expert, first, count);
    Sums sums = {};
    if (SIDE_TILES > 1 && count <= M / 2)
        multiply<UP, (SIDE_TILES + 1) / 2>(sums, from, ring, blocks);
    else
        multiply<UP, SIDE_TILES>(sums, from, ring, blocks);
    if (UP)
        finish_up(p, sums, shared, tile, first, count);
    else
        finish_down(p, sums, shared, tile, first, count);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) mx_up(const Product p) { run_tile<true>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) mx_down(const Product p) { run_tile<false>(p); }

/* A warp a token and 128 channels: x bf16 [rows, K], `stride` numbers from row to row. */
extern "C" __global__ void __launch_bounds__(THREADS) mx_round(const u8 *x, u8 *out, u8 *scales, u64 stride,
                                                               u32 rows, u32 blocks) {
    const u32 at = blockIdx.x * WARPS + threadIdx.x / 32;
    if (at >= rows * blocks) return;
    float v[4];
    four_of(v, x + ((at / blocks) * stride + at % blocks * 128 + threadIdx.x % 32 * 4) * 2);
    round_block(v, out + (u64)at * 128, scales + at);
}
