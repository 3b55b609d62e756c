/* mma.m16n8k32 of kind mxf8f6f4 with a scale of 2^(byte - 127) for 32 channels, e2m1 times e4m3, in
 * words: places of elements and scales in a warp's registers are those of the PTX manual ("matrix
 * fragments for mma.m16n8k32", "block scaling"). It adds the 32 products exactly and rounds once, to
 * the sum; how wide the instruction adds is not documented. */
#ifndef MX_SOFTWARE_H
#define MX_SOFTWARE_H

/* Twice an e2m1 number; it stands in bits 2 to 5 of its byte. */
MX_FN int twice_e2m1(u32 byte) {
    const u32 code = byte >> 2 & 7;
    const int size = code < 2 ? code : (2 | (code & 1)) << (code >> 1) >> 1;
    return byte >> 5 & 1 ? -size : size;
}
/* 2^9 times an e4m3 number; NaN is the caller's. */
MX_FN int e4m3_of_512(u32 byte) {
    const u32 exponent = byte >> 3 & 15, digits = byte & 7;
    const int size = exponent ? (8 | digits) << (exponent - 1) : digits;
    return byte & 128 ? -size : size;
}

/* `Operands::of(word, lane)`: a lane's a[0..3], b[0..1], scales of a, of b. Lane (g, t) holds of d the
 * rows g and g + 8, columns 2 t and 2 t + 1. Byte BYTE of lane (g, 0) scales row g of a, that of
 * (g, 1) row g + 8; byte 0 of lane (g, 0) scales column g of b. */
template <int BYTE, class Operands>
MX_FN void add_scaled(float (&d)[4], const Operands &of, const double (&sums)[4]) {
    const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const u32 rows[2] = {of.of(6, 4 * g) >> 8 * BYTE & 255, of.of(6, 4 * g + 1) >> 8 * BYTE & 255};
    const u32 columns[2] = {of.of(7, 8 * t) & 255, of.of(7, 8 * t + 4) & 255};
    for (u32 at = 0; at < 4; ++at) {
        const u32 row = rows[at / 2], column = columns[at % 2];
        const double scale = __longlong_as_double((long long)(row + column + 1023 - 254) << 52);
        const float sum = (float)(d[at] + sums[at] * scale);
        d[at] = row == 255 || column == 255 ? __int_as_float(0x7FC00000) : sum;
    }
}
template <int BYTE, class Operands> MX_FN void software_product(float (&d)[4], const Operands &of) {
    const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    long long sums[4] = {0, 0, 0, 0}; /* 2^10 times the sum */
    bool wrong[4] = {false, false, false, false};
    for (u32 u = 0; u < 4; ++u) {
        for (u32 half = 0; half < 2; ++half) {
            const u32 rows[2] = {of.of(2 * half, 4 * g + u), of.of(2 * half + 1, 4 * g + u)};
            const u32 columns[2] = {of.of(4 + half, 8 * t + u), of.of(4 + half, 8 * t + 4 + u)};
            for (u32 i = 0; i < 4; ++i)
                for (u32 at = 0; at < 4; ++at) {
                    const u32 a = rows[at / 2] >> 8 * i & 255, b = columns[at % 2] >> 8 * i & 255;
                    sums[at] += (long long)twice_e2m1(a) * e4m3_of_512(b);
                    wrong[at] |= (b & 127) == 127;
                }
        }
    }
    double exact[4];
    for (u32 at = 0; at < 4; ++at)
        exact[at] = wrong[at] ? __longlong_as_double(0x7FF8ll << 48) : (double)sums[at] / 1024;
    add_scaled<BYTE>(d, of, exact);
}

#endif
