/* The instructions that CUDA C++ has no words for. A test replaces this file to run the rest on a
 * host. MX_SOFTWARE: for a card without the block-scaled product; 1: all of it is in words, 2: elements
 * are multiplied by the FP8 product of 8.9 and 9.0, whose registers hold them in the same places. */
#ifndef MX_PTX_H
#define MX_PTX_H

/* Sixteen bytes from global into shared memory, zeros unless `live`; done after `copies_left`. */
MX_FN void copy16(u32 shared, const void *from, bool live) {
    const int bytes = live ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(bytes)
                 : "memory");
}
MX_FN void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> MX_FN void copies_left() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
MX_FN u32 shared_address(const void *at) { return (u32)__cvta_generic_to_shared(at); }

/* Four 8 x 16-byte matrices; lane 8 i + r names row r of matrix i, lane (g, t) gets word t of row g. */
MX_FN void load_matrices(u32 (&r)[4], u32 shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared)
                 : "memory");
}
MX_FN void load_pair(u32 (&r)[2], u32 shared) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(shared) : "memory");
}
MX_FN u32 bf16_of(float x) {
    u16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
/* Two numbers of at most 448 as e4m3, `low` in the low byte. */
MX_FN u32 e4m3_of(float low, float high) {
    u16 y;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
    return y;
}
MX_FN u32 other_lane(u32 x, u32 mask) { return __shfl_xor_sync(~0u, x, mask); }

#ifdef MX_SOFTWARE

/* The operands of one product as its lanes hold them. Every lane asks for the same register. */
struct Operands {
    u32 words[8];
    MX_FN u32 of(int word, u32 lane) const { return __shfl_sync(~0u, words[word], lane); }
};
/* Four e2m1 bytes as e4m3. */
MX_FN u32 e4m3_of_e2m1(u32 four) {
    const u32 code = four >> 2 & 0x07070707, pairs = (code | code >> 4) & 0x00770077;
    return __byte_perm(0x3C383000, 0x4C484440, (pairs | pairs >> 8) & 0xFFFF) | (four & 0x20202020) << 2;
}
MX_FN void product_of_8_9(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(e4m3_of_e2m1(a[0])), "r"(e4m3_of_e2m1(a[1])), "r"(e4m3_of_e2m1(a[2])),
                   "r"(e4m3_of_e2m1(a[3])), "r"(b[0]), "r"(b[1]));
}
template <int BYTE>
MX_FN void product(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], u32 a_scales, u32 b_scale) {
    const Operands of{{a[0], a[1], a[2], a[3], b[0], b[1], a_scales, b_scale}};
    if (MX_SOFTWARE == 1) {
        software_product<BYTE>(d, of);
    } else {
        float part[4] = {0, 0, 0, 0};
        product_of_8_9(part, a, b);
        const double sums[4] = {part[0], part[1], part[2], part[3]};
        add_scaled<BYTE>(d, of, sums);
    }
}

#else

/* d += the 16 x 32 e2m1 of `a` times the 32 x 8 e4m3 of `b`, each scaled by 2^(byte - 127). */
template <int BYTE>
MX_FN void product(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], u32 a_scales, u32 b_scale) {
    asm volatile("mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col"
                 ".f32.e2m1.e4m3.f32.ue8m0 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3}, {%10}, {%12, 0}, {%11}, {0, 0};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(a_scales),
                   "r"(b_scale), "n"(BYTE));
}

#endif
#endif
