// Products of patches on FP32 units: tiles of the sum over output positions of z z^T; patches z are not
// stored. Devices with tensor cores for them multiply pairs instead (pair_products.cu).
//
// Feature f = tap * channels + channel of a patch z at output o sees pixel
// o * stride + tap * dilation - begin of one channel, or zero outside the image. One to three spatial
// axes; missing axes come first and have one pixel and one tap.
//
//   layers  images of several layers, of any strides (in elements)
//   jobs    one for each block: the product of one row of tiles with one column
//   grids   boxes of output positions, counted image by image in row-major order
//   parts   (products, TILE, TILE); moment.cu adds them in a fixed order
//
// A block computes one job; a thread loads one position of several features, then multiplies a part
// of the tile. Positions at or after `end`, pixels outside the image and features past the last count
// as zeros. No atomics: results do not depend on the order of blocks.
//
//   ALIGNED 1 if channels are a multiple of TILE: all features of a tile have the same tap
#ifndef ALIGNED
#define ALIGNED 0
#endif
#define TILE 64         // size of a tile
#define DEPTH 16        // positions in shared memory at a time
#define LD (TILE + 8)   // the rows that a warp reads are in different banks

#define THREADS 256
#define MICRO (TILE / 16)
#define STEP (THREADS / DEPTH)  // features between those that a thread loads
#define LOADS (TILE / STEP)

struct UnitLayer {
  const void* x;
  Images images;
  Taps taps;
};

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

  __device__ __forceinline__ void load(const scalar* x, float (*to)[LD],
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
      column[i * STEP] = from < 0 ? 0.0f : read(x + from);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
patch_products(const UnitLayer* __restrict__ layers, const Job* __restrict__ jobs,
               const Grid* __restrict__ grids, float* __restrict__ parts) {
  __shared__ float rows[DEPTH][LD], columns[DEPTH][LD];
  const Job job = jobs[blockIdx.x];
  const Grid grid = grids[job.grid];
  __shared__ UnitLayer layer;  // in registers it would take half of them
  if (threadIdx.x < sizeof(layer) / 4)
    ((int*)&layer)[threadIdx.x] = ((const int*)(layers + job.layer))[threadIdx.x];
  __syncthreads();
  const Images& g = layer.images;
  const Taps& t = layer.taps;
  const scalar* x = (const scalar*)layer.x;
  const int lane = threadIdx.x % DEPTH, r = threadIdx.x / 16 * MICRO, c = threadIdx.x % 16 * MICRO;
  Loader left, right;
  left.aim(job.tiles[0], g, t, grid);
  right.aim(job.tiles[2], g, t, grid);
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
  float* part = parts + (long long)job.parts[0] * TILE * TILE;
  #pragma unroll
  for (int i = 0; i < MICRO; ++i)
    #pragma unroll
    for (int j = 0; j < MICRO; ++j) part[(r + i) * TILE + c + j] = sums[i][j];
}
