// Pairs of half-precision numbers: what pair_stage.cu, pair_products.cu and pair_rows.cu share.
//
// A number x of channel c becomes x 2^s(c) = high + low + error with two half-precision numbers. The
// exponent s(c) puts the largest magnitude of the channel into [2^14, 2^15). The error is at most 2^-22
// of x, or 2^-40 of the largest magnitude of the channel.
//
// With both numbers of a pair, a product is high high + high low + low high: three products of tensor
// cores with float32 accuracy. Tensor cores cut sums toward zero, which gives an error that grows with
// the positions. Each product of 16 positions therefore starts at zero, and FP32 units add it to the sums.
//
//   PRODUCTS  3; or 1: the high parts alone, which have 11 bits as TF32 numbers do
#ifndef PRODUCTS
#define PRODUCTS 3
#endif
#define PARTS (PRODUCTS == 3 ? 2 : 1)  // numbers of a pair that are multiplied

#define TILE 64  // features of a tile

typedef unsigned short half_bits;

// The exponent s of a channel, from the bits of its largest magnitude.
__device__ __forceinline__ int exponent_for(unsigned most) {
  return min(14 - ((int)(most >> 23) - 127), 126);
}
__device__ __forceinline__ float power_of_two(int exponent) {
  return __uint_as_float((unsigned)(exponent + 127) << 23);
}

#ifndef CUDA_ON_CPU
// Two numbers as half-precision numbers, to nearest; `low` is in the low bits.
__device__ __forceinline__ unsigned two_halves(float low, float high) {
  unsigned short parts[2];
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(parts[0]) : "f"(low));
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(parts[1]) : "f"(high));
  return parts[0] | (unsigned)parts[1] << 16;
}
#endif

// The low parts of two numbers with these high parts.
__device__ __forceinline__ unsigned two_rests(unsigned highs, float low, float high) {
  return two_halves(low - half_to_float((unsigned short)highs),
                    high - half_to_float((unsigned short)(highs >> 16)));
}

// An address in shared memory.
#ifndef CUDA_ON_CPU
typedef unsigned Place;
__device__ __forceinline__ Place place_of(void* shared) {
  return (Place)__cvta_generic_to_shared(shared);
}
#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ void mma_half(float* d, const unsigned* a, const unsigned* b,
                                         const float* c) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
}
#endif
#endif

#if defined(CUDA_ON_CPU) || __CUDA_ARCH__ >= 800
// sums <- sums + (16 x 8) product over 16 positions, small products first.
__device__ __forceinline__ void add_product(float* sums, const unsigned* high_a, const unsigned* low_a,
                                            const unsigned* high_b, const unsigned* low_b) {
  const float zero[4] = {};
  float sum[4];
#if PRODUCTS == 3
  mma_half(sum, low_a, high_b, zero);
  mma_half(sum, high_a, low_b, sum);
  mma_half(sum, high_a, high_b, sum);
#else
  mma_half(sum, high_a, high_b, zero);
#endif
  #pragma unroll
  for (int e = 0; e < 4; ++e) sums[e] += sum[e];
}

// Writes the results of a warp, blocks of 16 x 8, to a part: a lane has rows l/4 and l/4 + 8 of a block,
// columns 2 (l%4) and the next. `row` and `column` are the first ones of the warp; `rows` and `columns`
// are exponents of the tiles.
template <int M, int N>
__device__ __forceinline__ void write_products(float* part, const float (&sums)[M][N][4], int row,
                                               int column, const int* rows, const int* columns) {
  const int lane = threadIdx.x % 32;
  #pragma unroll
  for (int i = 0; i < M; ++i)
    #pragma unroll
    for (int j = 0; j < N; ++j)
      #pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = row + i * 16 + lane / 4 + (e >> 1) * 8;
        const int c = column + j * 8 + lane % 4 * 2 + (e & 1);
        // By two powers of two, because one may be out of range.
        const int back = -(rows[r] + columns[c]), half = back / 2;
        part[r * TILE + c] = sums[i][j][e] * power_of_two(half) * power_of_two(back - half);
      }
}
#endif
