// cuda_experts.cu as it is, on the host: the threads of a block are coroutines that switch where a
// warp or the block meets, so the order is the same in every run. A warp goes on until it waits for
// the block, so that nothing but the block's barriers keeps warps together. A copy into shared memory
// happens as late as it may, when it is waited for, or at once. Shared memory begins as NaN.
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define MX_ON_HOST
#define MX_FN inline
#define MX_SHARED(name) u8 *name = block.shared
#define __global__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

constexpr int HOST_THREADS = 32 * MX_WARPS, STACK = 256 << 10;
struct Index {
    u32 x;
};
static Index threadIdx, blockIdx;

struct Meeting {
    int arrived = 0, turn = 0;
};
struct Copy {
    u32 to;
    const void *from; // 0: zeros
};
struct Thread {
    ucontext_t context;
    bool done;
    int awaited; // turn of the block's meeting that it waits for; -1: of none
    std::vector<std::vector<Copy>> groups;
};
static struct {
    alignas(128) u8 shared[128 << 10];
    Thread threads[HOST_THREADS];
    Meeting all, warps[MX_WARPS];
    u32 told[MX_WARPS][32][8]; // what the lanes of a warp tell each other
    ucontext_t home;
    int misplaced;
    u64 arrivals;
    bool back; // the last warp and lane first, and copies at once
} block;

static void meet(Meeting &meeting, int members) {
    const u32 me = threadIdx.x;
    const int turn = meeting.turn;
    ++block.arrivals;
    if (++meeting.arrived == members) {
        meeting.arrived = 0;
        ++meeting.turn;
    }
    block.threads[me].awaited = &meeting == &block.all ? turn : -1;
    while (meeting.turn == turn) swapcontext(&block.threads[me].context, &block.home);
    block.threads[me].awaited = -1;
}
static void __syncthreads() { meet(block.all, HOST_THREADS); }
static void meet_warp() { meet(block.warps[threadIdx.x / 32], 32); }
template <typename To, typename From> static To as(From x) {
    To y;
    static_assert(sizeof x == sizeof y, "bits of another type");
    memcpy(&y, &x, sizeof y);
    return y;
}
static float __int_as_float(int x) { return as<float>(x); }
static int __float_as_int(float x) { return as<int>(x); }
static double __longlong_as_double(long long x) { return as<double>(x); }
static u32 __byte_perm(u32 low, u32 high, u32 pick) {
    const u64 both = (u64)high << 32 | low;
    u32 out = 0;
    for (int i = 0; i < 4; ++i) out |= (u32)(both >> 8 * (pick >> 4 * i & 7) & 255) << 8 * i;
    return out;
}

// What cuda_ptx.h has.
static u32 shared_address(const void *at) { return (u32)((const u8 *)at - block.shared); }
static u8 *placed(u32 at, u32 size) {
    if (at % size || at + size > sizeof block.shared) block.misplaced = 1;
    return block.shared + at;
}
static void copy_now(const Copy &each) {
    u8 *to = placed(each.to, 16);
    if (each.from)
        memcpy(to, each.from, 16);
    else
        memset(to, 0, 16);
}
static void copy16(u32 to, const void *from, bool live) {
    auto &groups = block.threads[threadIdx.x].groups;
    if ((uintptr_t)from % 16) block.misplaced = 1;
    if (groups.empty()) groups.emplace_back();
    const Copy copy = {to, live ? from : nullptr};
    if (block.back)
        copy_now(copy);
    else
        groups.back().push_back(copy);
}
static void end_copies() {
    auto &groups = block.threads[threadIdx.x].groups;
    if (groups.empty()) groups.emplace_back();
    groups.emplace_back(); // open
}
template <int LEFT> static void copies_left() {
    auto &groups = block.threads[threadIdx.x].groups;
    while (groups.size() > LEFT + 1) { // the last one is open
        for (const Copy &each : groups.front()) copy_now(each);
        groups.erase(groups.begin());
    }
}
static void load_matrices(u32 (&r)[4], u32 at) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    block.told[warp][lane][0] = at;
    meet_warp();
    for (u32 i = lane / 8 * 8; i < lane; ++i) // eight rows are read at once, from eight places in turn
        if ((block.told[warp][i][0] ^ at) % 128 < 16) block.misplaced = 1;
    for (u32 i = 0; i < 4; ++i)
        memcpy(&r[i], placed(block.told[warp][8 * i + lane / 4][0], 16) + lane % 4 * 4, 4);
    meet_warp();
}
static void load_pair(u32 (&r)[2], u32 at) { memcpy(r, placed(at, 8), 8); }
static u32 other_lane(u32 x, u32 mask) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    block.told[warp][lane][0] = x;
    meet_warp();
    const u32 found = block.told[warp][lane ^ mask][0];
    meet_warp();
    return found;
}
static u32 bf16_of(float x) {
    if (x != x) return 0x7FC0;
    const u32 bits = as<u32>(x);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static u32 e4m3_byte(float x) {
    const u32 sign = std::signbit(x) ? 128 : 0;
    if (x != x) return sign | 127;
    const float size = std::fabs(x);
    if (size == 0) return sign;
    if (size > 464) return sign | 126;
    int power;
    std::frexp(size, &power); // size in [2^(power - 1), 2^power)
    const float step = std::ldexp(1.f, (power < -5 ? -5 : power) - 4);
    const int steps = (int)std::nearbyint(size / step); // 0 to 16 of this binade's
    return sign | (power < -5 ? steps : (power + 5) * 8 + steps);
}
static u32 e4m3_of(float low, float high) { return e4m3_byte(low) | e4m3_byte(high) << 8; }

#include "../../metainfer/ops/moe_experts/cuda_software.h"

struct Operands {
    u32 warp;
    u32 of(int word, u32 lane) const { return block.told[warp][lane][word]; }
};
template <int BYTE>
static void product(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], u32 a_scales, u32 b_scale) {
    const u32 warp = threadIdx.x / 32, words[8] = {a[0], a[1], a[2], a[3], b[0], b[1], a_scales, b_scale};
    memcpy(block.told[warp][threadIdx.x % 32], words, sizeof words);
    meet_warp();
    software_product<BYTE>(d, Operands{warp});
    meet_warp();
}

#include "../../metainfer/ops/moe_experts/cuda_experts.cu"

struct Rounding {
    const u8 *x;
    u8 *out, *scales;
    u64 stride;
    u32 rows, blocks;
};
static int which;
static const void *given;
static void body() {
    if (which == 0) {
        const Rounding &r = *(const Rounding *)given;
        mx_round(r.x, r.out, r.scales, r.stride, r.rows, r.blocks);
    } else if (which == 1) {
        mx_up(*(const Product *)given);
    } else {
        mx_down(*(const Product *)given);
    }
    block.threads[threadIdx.x].done = true;
    ++block.arrivals;
}

// The lanes of a warp, each until it waits, again and again; whether any got further.
static bool advance(u32 warp) {
    const u64 begun = block.arrivals;
    for (u64 before = begun - 1; before != block.arrivals;) {
        before = block.arrivals;
        for (u32 i = 0; i < 32; ++i) {
            threadIdx.x = warp * 32 + (block.back ? 31 - i : i);
            const Thread &thread = block.threads[threadIdx.x];
            if (!thread.done && thread.awaited != block.all.turn)
                swapcontext(&block.home, &block.threads[threadIdx.x].context);
        }
    }
    return block.arrivals != begun;
}

// Kernel 0 (mx_round), 1 (mx_up), 2 (mx_down), one block after another. 1: an access was not aligned,
// outside, or met another's bank; 2: threads wait for each other.
extern "C" __attribute__((visibility("default"))) int run(int kernel, const void *argument, u32 grid,
                                                          int back) {
    static std::vector<u8> stacks((size_t)HOST_THREADS * STACK);
    which = kernel, given = argument, block.back = back;
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
        memset(block.shared, 0xFF, sizeof block.shared);
        block.all = Meeting();
        for (auto &warp : block.warps) warp = Meeting();
        for (u32 i = 0; i < HOST_THREADS; ++i) {
            Thread &thread = block.threads[i];
            getcontext(&thread.context);
            thread.context.uc_stack.ss_sp = stacks.data() + (size_t)i * STACK;
            thread.context.uc_stack.ss_size = STACK;
            thread.context.uc_link = &block.home;
            thread.done = false;
            thread.awaited = -1;
            thread.groups.clear();
            makecontext(&thread.context, body, 0);
        }
        for (bool moved = true; moved;) {
            moved = false;
            for (u32 i = 0; i < MX_WARPS; ++i) moved |= advance(back ? MX_WARPS - 1 - i : i);
        }
        for (const Thread &thread : block.threads)
            if (!thread.done) return 2;
    }
    const int misplaced = block.misplaced;
    block.misplaced = 0;
    return misplaced;
}
