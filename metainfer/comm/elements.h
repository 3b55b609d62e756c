/* Element types of a sum: a pack of memory to wide values and back, one rounding, in the order of memory.
 * Sums and products are plain: the compiler may not fuse or reorder them. */
#ifndef MI_ELEMENTS_H
#define MI_ELEMENTS_H

__device__ __forceinline__ float bits_float(mi_u32 x) { return __int_as_float((int)x); }
__device__ __forceinline__ mi_u32 float_bits(float x) { return (mi_u32)__float_as_int(x); }

template <int Type> struct Element;

template <> struct Element<MI_BF16> {
    typedef float Wide;
    typedef mi_u16 Raw;
    static __device__ __forceinline__ float wide(mi_u16 x) { return bits_float((mi_u32)x << 16); }
    static __device__ __forceinline__ mi_u16 round(float x) {
        const mi_u32 u = float_bits(x);
        return x != x ? (mi_u16)0x7fc0 : (mi_u16)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
    }
};
template <> struct Element<MI_F16> {
    typedef float Wide;
    typedef mi_u16 Raw;
    static __device__ __forceinline__ float wide(mi_u16 x) { return half_to_float(x); }
    static __device__ __forceinline__ mi_u16 round(float x) {
        return x != x ? (mi_u16)0x7e00 : float_to_half(x);
    }
};
template <> struct Element<MI_F32> {
    typedef float Wide;
    typedef mi_u32 Raw;
    static __device__ __forceinline__ float wide(mi_u32 x) { return bits_float(x); }
    static __device__ __forceinline__ mi_u32 round(float x) {
        return x != x ? 0x7fc00000u : float_bits(x);
    }
};
template <> struct Element<MI_F64> {
    typedef double Wide;
    typedef mi_u64 Raw;
    static __device__ __forceinline__ double wide(mi_u64 x) {
        return __longlong_as_double((long long)x);
    }
    static __device__ __forceinline__ mi_u64 round(double x) {
        return x != x ? 0x7ff8000000000000ull : (mi_u64)__double_as_longlong(x);
    }
};
template <> struct Element<MI_I32> {
    typedef mi_u32 Wide;
    typedef mi_u32 Raw;
    static __device__ __forceinline__ mi_u32 wide(mi_u32 x) { return x; }
    static __device__ __forceinline__ mi_u32 round(mi_u32 x) { return x; }
};

__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double add(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ mi_u32 add(mi_u32 a, mi_u32 b) { return a + b; }
__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double mul(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ float inverse_root(float x) { return __frcp_rn(__fsqrt_rn(x)); }
__device__ __forceinline__ double inverse_root(double x) { return __ddiv_rn(1.0, __dsqrt_rn(x)); }
__device__ __forceinline__ float divide(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ double divide(double a, double b) { return __ddiv_rn(a, b); }

/* The same of floats in fewer steps that wait for each other, right where they are asked. */

/* a / b, rounded once. `inverse` is 1 / b, rounded; b is a whole number below 2^22, and a / b and what it
 * leaves are no denormals. The product is within two units of it; what that leaves is exact, and so
 * small that an error of the inverse moves the quotient by less than b's own distance from a tie. */
__device__ __forceinline__ float quotient(float a, float b, float inverse) {
    const float q = __fmul_rn(a, inverse);
    return __fmaf_rn(__fmaf_rn(-q, b, a), inverse, q);
}
/* Neither too small for what a division of it leaves, nor large, nor no number, nor just below a power of
 * four, whose root's inverse lies beside a tie. */
__device__ __forceinline__ bool is_common(float x) {
    return float_bits(x) - 0x1f800000u <= 0x52000000u && (float_bits(x) & 0xfffffeu) != 0x7ffffeu;
}
/* 1 / sqrt(x), the root rounded and its inverse too, for x that `is_common`. `y`: within six units of it;
 * tests try all. */
__device__ __forceinline__ float inverse_root_soon(float x, float y) {
    const float g = __fmul_rn(x, y), h = __fmul_rn(0.5f, y), off = __fmaf_rn(-g, h, 0.5f);
    const float about = __fmaf_rn(g, off, g), start = __fmaf_rn(y, off, y);
    const float root = __fmaf_rn(__fmaf_rn(-about, about, x), __fmaf_rn(h, off, h), about);
    const float left = __fmaf_rn(-root, start, 1.0f);
    return __fmaf_rn(__fmaf_rn(left, left, left), start, start);
}

template <int Type> struct Values {
    typedef typename Element<Type>::Raw Raw;
    typedef typename Element<Type>::Wide Wide;
    static const int N = 16 / sizeof(Raw);
    static __device__ __forceinline__ void unpack(const Pack &p, Wide *x) {
        union {
            Pack p;
            Raw r[N];
        } u;
        u.p = p;
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = Element<Type>::wide(u.r[i]);
    }
    // Rounded; in bfloat16 a NaN may have any sign and payload until it was `settled`.
    static __device__ __forceinline__ Pack rounded(const Wide *x) {
        union {
            Pack p;
            Raw r[N];
        } u;
#pragma unroll
        for (int i = 0; i < N; i++) u.r[i] = Element<Type>::round(x[i]);
        return u.p;
    }
    // Elements of two packs added wide and rounded, as `rounded`.
    static __device__ __forceinline__ Pack added(const Pack &a, const Pack &b) {
        Wide x[N], y[N];
        unpack(a, x);
        unpack(b, y);
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = add(x[i], y[i]);
        return rounded(x);
    }
    static __device__ __forceinline__ bool unsettled(const Wide *x) { return false; }
    static __device__ __forceinline__ void settle(Pack *p) {}
    static __device__ __forceinline__ Pack pack(const Wide *x) {
        Pack p = rounded(x);
        if (unsettled(x)) settle(&p);
        return p;
    }
};

// Half a word of bfloat16 is the upper half of a float.
template <>
__device__ __forceinline__ void Values<MI_BF16>::unpack(const Pack &p, float *x) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[2 * i] = bits_float(p.w[i] << 16);
        x[2 * i + 1] = bits_float(p.w[i] & 0xffff0000u);
    }
}
// bfloat16 has instructions for two elements, whose NaN is 0x7fff.
template <>
__device__ __forceinline__ Pack Values<MI_BF16>::rounded(const float *x) {
    Pack p;
#pragma unroll
    for (int i = 0; i < 4; i++) p.w[i] = floats_to_bf16(x[2 * i], x[2 * i + 1]);
    return p;
}
// One rounding to eight bits gives what rounding to 24 and then to eight does: 24 >= 2 * 8 + 2.
template <>
__device__ __forceinline__ Pack Values<MI_BF16>::added(const Pack &a, const Pack &b) {
    Pack p;
#pragma unroll
    for (int i = 0; i < 4; i++) p.w[i] = add_bf16(a.w[i], b.w[i]);
    return p;
}
template <> __device__ __forceinline__ bool Values<MI_BF16>::unsettled(const float *x) {
    bool nan = false;
#pragma unroll
    for (int i = 0; i < 8; i += 2) nan |= is_nan(x[i], x[i + 1]);
    return nan;
}
template <> __device__ __forceinline__ void Values<MI_BF16>::settle(Pack *p) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        // A half of 0x7fff, and no other, is 0x8000 with one more: a bit for each NaN.
        const mi_u32 nan = ((p->w[i] & 0x7fff7fffu) + 0x00010001u) >> 15 & 0x00010001u;
        p->w[i] ^= nan * 0x3fu; // 0x7fc0
    }
}

// The packs of every rank, summed in rank order, wide.
template <int Type>
__device__ __forceinline__ void wide_sum(const MiCall *call, const Pack *p,
                                         typename Element<Type>::Wide *total) {
    const int n = Values<Type>::N;
    Values<Type>::unpack(p[0], total);
#pragma unroll
    for (mi_u32 r = 1; r < MI_TOP; r++) {
        if (r >= mi_world(call)) break;
        typename Element<Type>::Wide next[n];
        Values<Type>::unpack(p[r], next);
#pragma unroll
        for (int i = 0; i < n; i++) total[i] = add(total[i], next[i]);
    }
}

// The same rounded; a NaN is not settled yet.
template <int Type>
__device__ __forceinline__ Pack add_packs(const MiCall *call, const Pack *p) {
    typename Element<Type>::Wide total[Values<Type>::N];
    if (MI_TOP == 2) return Values<Type>::added(p[0], p[1]);
    wide_sum<Type>(call, p, total);
    return Values<Type>::rounded(total);
}

#endif
