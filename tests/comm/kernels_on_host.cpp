// kernels.cu as it is, on the host: a block is a set of threads, its barriers are theirs. One copy of
// this library is one rank with one block, because shared memory becomes static.
#include <pthread.h>
#include <sched.h>
#include <time.h>

#include <cmath>
#include <cstring>

#define __CUDACC__
#define MI_ON_HOST
#define __device__
#define __global__
#define __forceinline__ inline __attribute__((unused))
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)

struct Index {
    unsigned x;
};
static thread_local Index threadIdx;
static Index blockIdx = {0}, blockDim = {0}, gridDim = {1};
static pthread_barrier_t block_barrier, group_barrier[4], warp_barrier[64];
static unsigned long long votes;
static double lanes[64][32];

static inline void __syncthreads() { pthread_barrier_wait(&block_barrier); }
static inline int __syncthreads_or(int mine) {
    if (mine) __atomic_fetch_or(&votes, 1ull, __ATOMIC_SEQ_CST);
    __syncthreads();
    const int all = votes != 0;
    __syncthreads();
    votes = 0;
    return all;
}
static inline unsigned atomicAdd(unsigned *at, unsigned x) {
    return __atomic_fetch_add(at, x, __ATOMIC_SEQ_CST);
}
static inline void __nanosleep(unsigned) { sched_yield(); }
static inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
template <typename T> static inline T convert(const void *from) {
    T x;
    memcpy(&x, from, sizeof x);
    return x;
}
static inline float __int_as_float(int x) { return convert<float>(&x); }
static inline int __float_as_int(float x) { return convert<int>(&x); }
static inline double __longlong_as_double(long long x) { return convert<double>(&x); }
static inline long long __double_as_longlong(double x) { return convert<long long>(&x); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __ddiv_rn(double a, double b) { return a / b; }
static inline double __dsqrt_rn(double a) { return sqrt(a); }
template <typename T> static inline T __shfl_xor_sync(unsigned, T mine, int step) {
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    lanes[warp][lane] = (double)mine;
    pthread_barrier_wait(&warp_barrier[warp]);
    const T found = (T)lanes[warp][lane ^ step];
    pthread_barrier_wait(&warp_barrier[warp]);
    return found;
}

// What ptx.h has. 16-byte addresses are checked, as a GPU would.
typedef unsigned int u32;
typedef unsigned long long u64;
static int misaligned;
static inline void mi_put(u64 *at, u64 value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }
static inline u64 mi_get(const u64 *at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
static inline u64 mi_now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (u64)t.tv_sec * 1000000000ull + (u64)t.tv_nsec;
}
static inline void mi_relax(u32) { sched_yield(); }
struct Pack {
    u32 w[4];
};
static inline Pack load_pack(u64 at) {
    if (at & 15) misaligned = 1;
    return convert<Pack>((const void *)at);
}
static inline void store_pack(u64 at, Pack p) {
    if (at & 15) misaligned = 1;
    memcpy((void *)at, &p, 16);
}
static inline float half_to_float(unsigned short x) { return (float)convert<_Float16>(&x); }
static inline unsigned short float_to_half(float x) {
    const _Float16 y = (_Float16)x;
    return convert<unsigned short>(&y);
}
static inline u32 floats_to_bf16(float low, float high) {
    u32 found = 0;
    for (int i = 0; i < 2; i++) {
        const float x = i ? high : low;
        const u32 bits = convert<u32>(&x), whole = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        found |= (x != x ? 0x7fffu : whole) << 16 * i;
    }
    return found;
}
static inline bool is_nan(float a, float b) { return a != a || b != b; }
static inline void sync_group(u32 group) { pthread_barrier_wait(&group_barrier[group]); }
// What a test does when the first thread of a block waits for the launch before, or lets the next go.
typedef void (*Hook)();
static Hook hooks[2];
static int hooked[2];
static void once(int which) {
    int none = 0;
    if (!hooks[which]) return;
    if (__atomic_compare_exchange_n(&hooked[which], &none, 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        hooks[which]();
        __atomic_store_n(&hooked[which], 2, __ATOMIC_SEQ_CST);
    }
    while (__atomic_load_n(&hooked[which], __ATOMIC_SEQ_CST) != 2) sched_yield();
}
static inline void mi_grid_wait() { once(0); }
static inline void mi_grid_trigger() { once(1); }
extern "C" __attribute__((visibility("default"))) void set_hooks(Hook wait, Hook trigger) {
    hooks[0] = wait, hooks[1] = trigger;
}
static inline void now(u32 *) {}
static inline void now(float *) {}
static inline void prefetch(u64) {}
static inline u32 add_bf16(u32 a, u32 b) {
    float x[2];
    for (int i = 0; i < 2; i++) {
        const u32 p = a >> 16 * i << 16, q = b >> 16 * i << 16;
        x[i] = convert<float>(&p) + convert<float>(&q);
    }
    return floats_to_bf16(x[0], x[1]);
}
static inline float __frcp_rn(float a) { return 1.0f / a; }
// As wrong as a test asks for, in units of the last place.
static int units_off;
static inline float about_inverse_root(float x) {
    const float y = (float)(1.0 / sqrt((double)x));
    const u32 bits = convert<u32>(&y) + units_off;
    return convert<float>(&bits);
}
static inline u64 shared_at(const void *x) { return (u64)x; }
template <typename T> static inline void put_shared(u64 at, T x) { memcpy((void *)at, &x, sizeof x); }
template <typename T> static inline void get_shared(u64 at, T *x) { memcpy(x, (void *)at, sizeof *x); }
static inline void fence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

#include "../../metainfer/comm/kernels.cu"

static void (*const kernels[])(MiCall) = {mi_all_kernel, mi_part_kernel, mi_gather_kernel,
                                         mi_copy_kernel, mi_meet_kernel};

struct Task {
    const MiCall *call;
    unsigned index;
    int add;
};
static void *one(void *argument) {
    const Task *task = (const Task *)argument;
    threadIdx.x = task->index;
    if (task->add)
        mi_add(*task->call);
    else
        kernels[task->call->kind](*task->call);
    return 0;
}

extern "C" __attribute__((visibility("default"))) void set_units_off(int units) { units_off = units; }
// Floats from `first` on, `count` of them, that are common and whose inverse root is not what a root and a
// division give.
extern "C" __attribute__((visibility("default"))) u64 wrong_roots(u32 first, u32 count) {
    u64 wrong = 0;
    for (u32 i = 0; i < count; i++) {
        const u32 bits = first + i;
        const float x = convert<float>(&bits);
        if (is_common(x)) wrong += inverse_root_soon(x, about_inverse_root(x)) != inverse_root(x);
    }
    return wrong;
}
// The same of quotients by b: floats of each step, and every float beside a tie.
extern "C" __attribute__((visibility("default"))) u64 wrong_quotients(u32 b, u32 step) {
    u64 wrong = 0;
    const float inverse = __frcp_rn((float)b);
    for (u32 i = 0; i < 1u << 23; i += step) {
        const u32 bits = 0x3f800000u + i;
        const float x = convert<float>(&bits);
        wrong += quotient(x, (float)b, inverse) != x / (float)b;
        const double tie = (double)x + ldexp(1.0, -24); // halfway to the next quotient
        const float near = (float)(tie * b);
        for (int k = -2; k <= 2; k++) {
            const u32 beside = convert<u32>(&near) + k;
            const float y = convert<float>(&beside);
            wrong += quotient(y, (float)b, inverse) != y / (float)b;
        }
    }
    return wrong;
}
extern "C" __attribute__((visibility("default"))) int common(float x) { return is_common(x); }

// Block `block` of `grid`, with `threads`; 1 when an address was not aligned. Blocks of one call may
// run one after another: they wait only for the same block of their peers.
extern "C" __attribute__((visibility("default"))) int run_block(const MiCall *call, unsigned threads,
                                                                int add, unsigned block,
                                                                unsigned grid) {
    blockIdx.x = block;
    gridDim.x = grid;
    static pthread_t ids[512];
    static Task tasks[512];
    blockDim.x = threads;
    misaligned = 0;
    hooked[0] = hooked[1] = 0;
    pthread_barrier_init(&block_barrier, 0, threads);
    for (unsigned g = 0; g < threads / 256; g++) pthread_barrier_init(&group_barrier[g], 0, 256);
    for (unsigned w = 0; w < threads / 32; w++) pthread_barrier_init(&warp_barrier[w], 0, 32);
    for (unsigned i = 0; i < threads; i++) {
        tasks[i] = {call, i, add};
        pthread_create(&ids[i], 0, one, &tasks[i]);
    }
    for (unsigned i = 0; i < threads; i++) pthread_join(ids[i], 0);
    return misaligned;
}
