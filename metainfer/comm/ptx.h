/* The instructions that CUDA C++ has no words for. A test replaces this file to run the rest on a
 * host. */
#ifndef MI_PTX_H
#define MI_PTX_H

MI_FN void mi_put(mi_u64 *at, mi_u64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
MI_FN mi_u64 mi_get(const mi_u64 *at) {
    mi_u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}
MI_FN mi_u64 mi_now(void) {
    mi_u64 value;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
    return value;
}
MI_FN void mi_relax(mi_u32 tries) {
    if (tries > 64) __nanosleep(tries > 1024 ? 500 : 20);
}

/* A launch may begin while the kernel it follows still runs, from sm_90 on. Wait for the end of that one,
 * and of all before it: nothing they wrote may be read, and nothing written, before this. */
MI_FN void mi_grid_wait(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/* The launch that follows may begin once every block has come here. */
MI_FN void mi_grid_trigger(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Sixteen bytes. Loads are relaxed at system scope: a peer may have written them. */
typedef struct {
    mi_u32 w[4];
} Pack;

MI_FN Pack load_pack(mi_u64 at) {
    Pack p;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(p.w[0]), "=r"(p.w[1]), "=r"(p.w[2]), "=r"(p.w[3])
                 : "l"(at));
    return p;
}
MI_FN void store_pack(mi_u64 at, Pack p) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(p.w[0]), "r"(p.w[1]),
                 "r"(p.w[2]), "r"(p.w[3])
                 : "memory");
}
/* Computed here, not elsewhere. */
MI_FN void now(mi_u32 *x) { asm volatile("" : "+r"(*x)); }
MI_FN void now(float *x) { asm volatile("" : "+f"(*x)); }
MI_FN void prefetch(mi_u64 at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
MI_FN float half_to_float(mi_u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
MI_FN mi_u16 float_to_half(float x) {
    mi_u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
/* Two floats as bfloat16, nearest even, `low` first in memory; a NaN is 0x7fff. */
MI_FN mi_u32 floats_to_bf16(float low, float high) {
    mi_u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
/* Two elements of bfloat16 each, added and rounded once, nearest even; a NaN is 0x7fff. */
MI_FN mi_u32 add_bf16(mi_u32 a, mi_u32 b) {
    mi_u32 y;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(0x3f803f80u), "r"(b)); /* times one */
    return y;
}
/* 1 / sqrt(x) to 2^-22.9, says the PTX manual, for x that is no denormal. */
MI_FN float about_inverse_root(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
/* Whether one of two floats is no number. */
MI_FN bool is_nan(float a, float b) {
    mi_u32 y;
    asm("{ .reg .pred p; setp.nan.f32 p, %1, %2; selp.u32 %0, 1, 0, p; }" : "=r"(y) : "f"(a), "f"(b));
    return y != 0;
}
/* The 256 threads of a group meet; barrier 0 is the block's. */
MI_FN void sync_group(mi_u32 group) {
    asm volatile("bar.sync %0, 256;" ::"r"(group + 1) : "memory");
}
/* Memory that the block shares, by an address that is worked out where there is time. */
MI_FN mi_u64 shared_at(const void *x) { return __cvta_generic_to_shared(x); }
MI_FN void put_shared(mi_u64 at, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"l"(at), "f"(x) : "memory");
}
MI_FN void put_shared(mi_u64 at, double x) {
    asm volatile("st.shared.f64 [%0], %1;" ::"l"(at), "d"(x) : "memory");
}
MI_FN void get_shared(mi_u64 at, float *x) {
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(*x) : "l"(at) : "memory");
}
MI_FN void get_shared(mi_u64 at, double *x) {
    asm volatile("ld.shared.f64 %0, [%1];" : "=d"(*x) : "l"(at) : "memory");
}
MI_FN void fence_system(void) { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

#endif
