// Products of patches: tiles of the sum over output positions of z z^T; patches z are not stored.
//
// Feature f = tap * channels + channel of a patch z at output o sees pixel
// o * stride + tap * dilation - begin of one channel, or zero outside the image. One to three spatial
// axes; missing axes come first and have one pixel and one tap.
//
//   x       images of any strides (in elements)
//   jobs    one for each block: the tile (row, column), in units of TILE features, of the product over the
//           positions [begin, end) of one grid
//   grids   boxes of output positions, counted image by image in row-major order
//   parts   (jobs, TILE, TILE): results of the jobs; moment.cu adds them in a fixed order
//
// A block computes one job; a thread loads one position of several features, then multiplies a part
// of the tile. Positions at or after `end`, pixels outside the image and features past the last count
// as zeros. No atomics: results do not depend on the order of blocks.
//
// Tensor cores cut the sum of a product to float32, toward zero, which gives an error that grows with
// the positions. For float32 accuracy, each product of 8 positions therefore starts at zero, and FP32
// units add it to the sums.
//
//   SPLIT   0: FP32 units; 3: tensor cores with each factor split in two TF32 numbers, which keeps
//           float32 accuracy; 1: plain TF32 (1e-3 for each factor)
//   ALIGNED 1 if channels are a multiple of TILE: all features of a tile have the same tap
#ifndef SPLIT
#define SPLIT 0
#endif
#ifndef ALIGNED
#define ALIGNED 0
#endif
#define TILE 64         // size of a tile
#define DEPTH 16        // positions in shared memory at a time
#define LD (TILE + 8)   // the rows that a warp reads are in different banks

#if SPLIT == 0
#define THREADS 256
#define MICRO (TILE / 16)
#else
#define WARP_ROWS (TILE / 2)  // two warps along the rows
#define WARP_COLUMNS 32
#define THREADS (2 * (TILE / WARP_COLUMNS) * 32)
#endif
#define STEP (THREADS / DEPTH)  // features between those that a thread loads
#define LOADS (TILE / STEP)

struct Job {
  int grid, row, column, begin, end;
};

#if SPLIT == 3
// To nearest, by two instructions; the conversion of the device takes four. NaN may become zero, but
// the remainder is NaN then.
__device__ __forceinline__ unsigned to_tf32(float value) {
  return (__float_as_uint(value) + 0x1000u) & 0xffffe000u;
}
#elif !defined(CUDA_ON_CPU)
__device__ __forceinline__ unsigned to_tf32(float value) {
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}
#endif

#ifndef CUDA_ON_CPU
__device__ __forceinline__ void mma_tf32(float* d, const unsigned* a, const unsigned* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void copy_async(float* to, const float* from, bool there) {
  unsigned place = (unsigned)__cvta_generic_to_shared(to);
  int bytes = there ? 4 : 0;  // the rest is filled with zeros
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(place), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <int PENDING> __device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
#endif

// Loads the features of a thread at one position.
struct Loader {
#if ALIGNED
  Feature first;
#else
  Feature features[LOADS];
#endif

  __device__ __forceinline__ void aim(int tile, const Images& g, const Taps& t,
                                      const Grid& grid) {
    int f = tile * TILE + threadIdx.x / DEPTH;
#if ALIGNED
    first = feature_at(f, g, t, grid);
#else
    #pragma unroll
    for (int i = 0; i < LOADS; ++i) features[i] = feature_at(f + i * STEP, g, t, grid);
#endif
  }

  __device__ __forceinline__ void load(const scalar* __restrict__ x, float (*to)[LD],
                                       const Position& p, const Images& g) const {
    float* column = &to[threadIdx.x % DEPTH][threadIdx.x / DEPTH];
#if ALIGNED
    long long place = seen(first, p, g);
#endif
    #pragma unroll
    for (int i = 0; i < LOADS; ++i) {
#if ALIGNED
      long long from = place < 0 ? -1 : place + i * STEP * g.channel_stride;
#else
      long long from = seen(features[i], p, g);
#endif
#if SPLIT && INPUT == 0
      copy_async(column + i * STEP, from < 0 ? x : x + from, from >= 0);
#else
      column[i * STEP] = from < 0 ? 0.0f : read(x + from);
#endif
    }
  }
};

#if SPLIT == 0

extern "C" __global__ void __launch_bounds__(THREADS)
patch_products(const scalar* __restrict__ x, const Job* __restrict__ jobs,
               const Grid* __restrict__ grids, float* __restrict__ parts, Images g, Taps t) {
  __shared__ float rows[DEPTH][LD], columns[DEPTH][LD];
  const Job job = jobs[blockIdx.x];
  const Grid grid = grids[job.grid];
  const int lane = threadIdx.x % DEPTH, r = threadIdx.x / 16 * MICRO, c = threadIdx.x % 16 * MICRO;
  Loader left, right;
  left.aim(job.row, g, t, grid);
  right.aim(job.column, g, t, grid);
  float sums[MICRO][MICRO] = {};
  for (int p = job.begin; p < job.end; p += DEPTH) {
    const Position position = position_at(p + lane, job.end, g, t, grid);
    left.load(x, rows, position, g);
    right.load(x, columns, position, g);
    __syncthreads();
    #pragma unroll
    for (int k = 0; k < DEPTH; ++k) {
      float a[MICRO], b[MICRO];
      #pragma unroll
      for (int i = 0; i < MICRO; ++i) {
        a[i] = rows[k][r + i];
        b[i] = columns[k][c + i];
      }
      #pragma unroll
      for (int i = 0; i < MICRO; ++i)
        #pragma unroll
        for (int j = 0; j < MICRO; ++j) sums[i][j] += a[i] * b[j];
    }
    __syncthreads();
  }
  float* part = parts + (long long)blockIdx.x * TILE * TILE;
  #pragma unroll
  for (int i = 0; i < MICRO; ++i)
    #pragma unroll
    for (int j = 0; j < MICRO; ++j) part[(r + i) * TILE + c + j] = sums[i][j];
}

#elif defined(CUDA_ON_CPU) || __CUDA_ARCH__ >= 800

// A warp computes WARP_ROWS x WARP_COLUMNS entries by 16 x 8 products over 8 positions. Of such a
// product, lane l has rows l/4 and l/4 + 8 of A, column l/4 of B, positions l%4 and l%4 + 4.
#define BLOCKS_M (WARP_ROWS / 16)
#define BLOCKS_N (WARP_COLUMNS / 8)

extern "C" __global__ void __launch_bounds__(THREADS)
patch_products(const scalar* __restrict__ x, const Job* __restrict__ jobs,
               const Grid* __restrict__ grids, float* __restrict__ parts, Images g, Taps t) {
  __shared__ float rows[2][DEPTH][LD], columns[2][DEPTH][LD];
  const Job job = jobs[blockIdx.x];
  const Grid grid = grids[job.grid];
  const int slot = threadIdx.x % DEPTH, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = warp % 2 * WARP_ROWS + lane / 4, column = warp / 2 * WARP_COLUMNS + lane / 4;
  Loader left, right;
  left.aim(job.row, g, t, grid);
  right.aim(job.column, g, t, grid);
  float sums[BLOCKS_M][BLOCKS_N][4] = {};
  // Two buffers: one is multiplied while the next positions are loaded into the other.
  Position position = position_at(job.begin + slot, job.end, g, t, grid);
  left.load(x, rows[0], position, g);
  right.load(x, columns[0], position, g);
  commit_copies();
  for (int p = job.begin, stage = 0; p < job.end; p += DEPTH, stage ^= 1) {
    if (p + DEPTH < job.end) {
      position = position_at(p + DEPTH + slot, job.end, g, t, grid);
      left.load(x, rows[stage ^ 1], position, g);
      right.load(x, columns[stage ^ 1], position, g);
      commit_copies();
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    __syncthreads();
    #pragma unroll
    for (int k = lane % 4; k < DEPTH; k += 8) {
      unsigned high_b[BLOCKS_N][2], low_b[BLOCKS_N][2];
      #pragma unroll
      for (int j = 0; j < BLOCKS_N; ++j)
        #pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float b = columns[stage][k + e * 4][column + j * 8];
          high_b[j][e] = to_tf32(b);
          // The unit ignores the last bits of a remainder.
          if (SPLIT == 3) low_b[j][e] = __float_as_uint(b - __uint_as_float(high_b[j][e]));
        }
      #pragma unroll
      for (int i = 0; i < BLOCKS_M; ++i) {
        unsigned high_a[4], low_a[4];
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float a = rows[stage][k + (e >> 1) * 4][row + i * 16 + (e & 1) * 8];
          high_a[e] = to_tf32(a);
          if (SPLIT == 3) low_a[e] = __float_as_uint(a - __uint_as_float(high_a[e]));
        }
        #pragma unroll
        for (int j = 0; j < BLOCKS_N; ++j) {
#if SPLIT == 1
          mma_tf32(sums[i][j], high_a, high_b[j]);
#else  // small products first; the product of both remainders is below rounding
          float sum[4] = {};
          mma_tf32(sum, low_a, high_b[j]);
          mma_tf32(sum, high_a, low_b[j]);
          mma_tf32(sum, high_a, high_b[j]);
          #pragma unroll
          for (int e = 0; e < 4; ++e) sums[i][j][e] += sum[e];
#endif
        }
      }
    }
    __syncthreads();
  }
  // Of the result, a lane has rows l/4 and l/4 + 8, columns 2 (l%4) and the next.
  float* part = parts + (long long)blockIdx.x * TILE * TILE;
  const int c = warp / 2 * WARP_COLUMNS + lane % 4 * 2;
  #pragma unroll
  for (int i = 0; i < BLOCKS_M; ++i)
    #pragma unroll
    for (int j = 0; j < BLOCKS_N; ++j)
      #pragma unroll
      for (int e = 0; e < 4; ++e)
        part[(row + i * 16 + (e >> 1) * 8) * TILE + c + j * 8 + (e & 1)] = sums[i][j][e];
}

#endif
