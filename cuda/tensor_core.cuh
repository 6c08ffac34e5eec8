// Tensor-core products and the copies that feed them, for sm_80 and later: inline PTX on the GPU, the emulator's models
// on the CPU.

#pragma once
#include "common.cuh"

// d[16x8] += a[16x16] * b[16x8] with float sums; fragments as mma.sync.aligned.m16n8k16 lays them out.
template <typename T> DEVICE void mma_16816(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]);

#ifdef CUDA_HOST

template <> DEVICE void mma_16816<half>(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    cuda_host::mma_m16n8k16<cuda_host::f16_to_float>(d, a, b);
}
template <> DEVICE void mma_16816<bfloat16>(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    cuda_host::mma_m16n8k16<cuda_host::bf16_to_float>(d, a, b);
}
DEVICE void ldmatrix_x4(u32 (&r)[4], const void* row) { cuda_host::ldmatrix_x4<false>(r, row); }
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], const void* row) { cuda_host::ldmatrix_x4<true>(r, row); }
DEVICE void cp_async16(void* shared, const void* global, bool is_valid) {
    cuda_host::cp_async(shared, global, 16, is_valid ? 16 : 0);
}
DEVICE void cp_async_commit() { cuda_host::cp_async_commit(); }
template <int PENDING> DEVICE void cp_async_wait() { cuda_host::cp_async_wait(PENDING); }

#else

#define MMA_16816(TYPE)                                                          \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "  \
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"         \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
template <> DEVICE void mma_16816<half>(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) { MMA_16816("f16"); }
template <> DEVICE void mma_16816<bfloat16>(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) { MMA_16816("bf16"); }

// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
DEVICE void ldmatrix_x4(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(u32(__cvta_generic_to_shared(row)))
                 : "memory");
}
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(u32(__cvta_generic_to_shared(row)))
                 : "memory");
}

// Copies 16 bytes from global to shared memory, or writes zeros; done once its group is waited for.
DEVICE void cp_async16(void* shared, const void* global, bool is_valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(u32(__cvta_generic_to_shared(shared))), "l"(global), "r"(is_valid ? 16 : 0)
                 : "memory");
}
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

#endif
