// Models of the PTX instructions that the kernels reach through wrappers: each wrapper calls its model here instead of
// its asm statement where CUDA_HOST is defined. Included by cuda_host.h.
#pragma once

namespace cuda_host {

// ---- cvt between float and 16 bits, rounding to nearest even; NaN becomes the canonical NaN, as the GPU makes it

inline float bf16_to_float(uint16_t bits) { return bits_as<float>(uint32_t(bits) << 16); }
inline uint16_t float_to_bf16(float v) {
    const uint32_t bits = bits_as<uint32_t>(v);
    if (std::isnan(v)) return 0x7fff;
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float f16_to_float(uint16_t bits) { return float(bits_as<_Float16>(bits)); }
inline uint16_t float_to_f16(float v) { return std::isnan(v) ? 0x7fff : bits_as<uint16_t>(_Float16(v)); }

// ---- mma.sync.aligned.m16n8k16.row.col.f32.T.T.f32: d[16x8] += a[16x16] * b[16x8]
//
// Fragments as the PTX manual lays them out, with g = lane / 4 and t = lane % 4: a[0] holds columns 2t, 2t + 1 of row g,
// a[1] the same of row g + 8, a[2] and a[3] those of columns + 8; b[0] holds rows 2t, 2t + 1 of column g, b[1] rows + 8;
// d[0], d[1] are columns 2t, 2t + 1 of row g, d[2], d[3] of row g + 8. The products are exact and are summed in float
// in the order of k; the GPU's order and rounding differ.

struct MmaArg { float* d; const unsigned *a, *b; Where where; };

template <float (*TO_FLOAT)(uint16_t)>
CUDA_HOST_UNCHECKED void mma_m16n8k16(float* d, const unsigned* a, const unsigned* b, CUDA_HOST_CALLER) {
    MmaArg arg{d, a, b, CUDA_HOST_WHERE};
    warp_collective(~0u, [](void** args, unsigned live) CUDA_HOST_LAMBDA {
        if (live != ~0u)
            fail(static_cast<MmaArg*>(args[__builtin_ctz(live)])->where, "mma needs all 32 lanes, got %08x", live);
        auto get = [](unsigned pair, int i) { return TO_FLOAT(uint16_t(pair >> 16 * i)); };
        float A[16][16], B[16][8];
        for (int lane = 0; lane < 32; ++lane) {
            auto* m = static_cast<MmaArg*>(args[lane]);
            const int g = lane / 4, t = lane % 4;
            for (int i = 0; i < 2; ++i) {
                A[g][2 * t + i] = get(m->a[0], i);
                A[g + 8][2 * t + i] = get(m->a[1], i);
                A[g][2 * t + 8 + i] = get(m->a[2], i);
                A[g + 8][2 * t + 8 + i] = get(m->a[3], i);
                B[2 * t + i][g] = get(m->b[0], i);
                B[2 * t + 8 + i][g] = get(m->b[1], i);
            }
        }
        for (int lane = 0; lane < 32; ++lane) {
            auto* m = static_cast<MmaArg*>(args[lane]);
            for (int i = 0; i < 4; ++i) {
                const int row = lane / 4 + (i >= 2 ? 8 : 0), column = 2 * (lane % 4) + i % 2;
                float sum = 0;
                for (int k = 0; k < 16; ++k) sum += A[row][k] * B[k][column];
                m->d[i] += sum;
            }
        }
    }, &arg, false, CUDA_HOST_WHERE);
}

// ---- ldmatrix.sync.aligned.m8n8.x4[.trans].shared.b16: lane i gives the address of row i % 8 of matrix i / 8

struct LdmatrixArg { unsigned* r; const void* row; Where where; };

template <bool TRANS> CUDA_HOST_UNCHECKED void ldmatrix_x4(unsigned* r, const void* row, CUDA_HOST_CALLER) {
    if (reinterpret_cast<uintptr_t>(row) % 16) fail(CUDA_HOST_WHERE, "ldmatrix row address is not 16-byte aligned");
    check_access(row, 16, Access::Read, __builtin_return_address(0));
    LdmatrixArg arg{r, row, CUDA_HOST_WHERE};
    warp_collective(~0u, [](void** args, unsigned live) CUDA_HOST_LAMBDA {
        if (live != ~0u)
            fail(static_cast<LdmatrixArg*>(args[__builtin_ctz(live)])->where, "ldmatrix needs all 32 lanes, got %08x",
                 live);
        uint16_t m[4][8][8];
        for (int lane = 0; lane < 32; ++lane)
            std::memcpy(m[lane / 8][lane % 8], static_cast<LdmatrixArg*>(args[lane])->row, 16);
        for (int lane = 0; lane < 32; ++lane)
            for (int j = 0; j < 4; ++j) {
                const int i = lane / 4, k = 2 * (lane % 4);
                const unsigned low = TRANS ? m[j][k][i] : m[j][i][k], high = TRANS ? m[j][k + 1][i] : m[j][i][k + 1];
                static_cast<LdmatrixArg*>(args[lane])->r[j] = low | high << 16;
            }
    }, &arg, false, CUDA_HOST_WHERE);
}

// ---- cp.async: `copied` bytes from global memory, then zeros up to `bytes`

void cp_async(void* shared, const void* global, int bytes, int copied, CUDA_HOST_CALLER);
void cp_async_commit();
void cp_async_wait(int pending_groups);

}  // namespace cuda_host
