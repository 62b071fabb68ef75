// Products of rows for groups of channels; patches are read from images and not stored.
//
//   x       images (n, groups * channels, *shape) of any strides; a row has the features
//           tap * channels + channel of its group and, with `ones`, a one after them
//   y       if SQUARE, images (n, groups * columns, *outputs) of any strides; otherwise x
//   parts   (pieces, groups, rows, columns): partial results of the pieces
//
//   SQUARE 0   sum over images and positions of z z^T; columns are rows, tiles above the diagonal
//              are left out; pieces are runs of positions, counted image by image
//   SQUARE 1   sum over images of (sum over positions of z y^T)^2, entry by entry; pieces are runs
//              of images
//   SIDE       size of a tile: 16 for groups of few features (depthwise filters), else 64
//
// A block of 256 threads computes one tile of one group for one piece: grid (groups * tiles, pieces).
// A thread loads one position of several features, then multiplies a part of the tile. Positions past
// the last, pixels outside the image and features past the last count as zeros. No atomics: add_parts
// of averages.cu adds the pieces in a fixed order.
#ifndef SQUARE
#define SQUARE 0
#endif
#ifndef SIDE
#define SIDE 64
#endif
#define MICRO (SIDE / 16)
#define DEPTH (1024 / SIDE)     // positions in shared memory at a time: each thread loads four numbers
#define LD (SIDE + 1)           // threads that write one feature of different positions: all banks
#define STEP (256 / DEPTH)      // features between those that a thread loads
#define LOADS (SIDE / STEP)

// Features of one operand that a thread loads.
struct Loader {
  Feature features[LOADS];
  int first, one;

  __device__ __forceinline__ void aim(int tile, int group, int count, int one_after, const Images& g,
                                      const Taps& t, const Grid& grid) {
    first = tile * SIDE + threadIdx.x / DEPTH;
    one = one_after ? count : -1;
    #pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int f = first + i * STEP;
      features[i] = feature_at(f, g, t, grid);
      features[i].offset += (long long)group * g.channels * g.channel_stride;
      if (f >= count) features[i].pixels[0] = NOWHERE;
    }
  }

  __device__ __forceinline__ void load(const scalar* __restrict__ x, float (*to)[LD],
                                       const Position& p, const Images& g) const {
    #pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const long long from = seen(features[i], p, g);
      float found = from < 0 ? 0.0f : read(x + from);
      if (first + i * STEP == one && p.counts) found = 1.0f;
      to[threadIdx.x % DEPTH][threadIdx.x / DEPTH + i * STEP] = found;
    }
  }
};

// sums += product of both operands over DEPTH positions.
__device__ __forceinline__ void multiply(float (*sums)[MICRO], float (*left)[LD], float (*right)[LD]) {
  const int r = threadIdx.x / 16, c = threadIdx.x % 16;
  #pragma unroll 8
  for (int k = 0; k < DEPTH; ++k) {
    float a[MICRO], b[MICRO];
    #pragma unroll
    for (int i = 0; i < MICRO; ++i) {
      a[i] = left[k][r + 16 * i];
      b[i] = right[k][c + 16 * i];
    }
    #pragma unroll
    for (int i = 0; i < MICRO; ++i)
      #pragma unroll
      for (int j = 0; j < MICRO; ++j) sums[i][j] += a[i] * b[j];
  }
}

extern "C" __global__ void __launch_bounds__(256, 2)
group_products(const scalar* __restrict__ x, const scalar* __restrict__ y, float* __restrict__ parts,
               Images g, Images h, Taps t, Taps plain, Grid grid, Work work) {
  __shared__ float left_rows[DEPTH][LD], right_rows[DEPTH][LD];
  const int row_tiles = (work.rows + SIDE - 1) / SIDE, lane = threadIdx.x % DEPTH;
#if SQUARE
  const int column_tiles = (work.columns + SIDE - 1) / SIDE, tiles = row_tiles * column_tiles;
  const int group = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const int row = tile / column_tiles, column = tile % column_tiles;
#else
  const int tiles = row_tiles * (row_tiles + 1) / 2, group = blockIdx.x / tiles;
  int row = 0, column = blockIdx.x % tiles;
  while (column > row) column -= ++row;
#endif
  Loader left, right;
  left.aim(row, group, work.rows - work.ones, work.ones, g, t, grid);
#if SQUARE
  right.aim(column, group, work.columns, 0, h, plain, Grid{{0, 0, 0}, {1, 1, 1}});
#else
  right.aim(column, group, work.rows - work.ones, work.ones, g, t, grid);
#endif
  const long long begin = blockIdx.y * work.length;
  const long long end = begin + work.length < work.units ? begin + work.length : work.units;
  float totals[MICRO][MICRO] = {};
#if SQUARE
  const int positions = grid.outputs[0] * grid.outputs[1] * grid.outputs[2];
  for (long long image = begin; image < end; ++image) {
    float sums[MICRO][MICRO] = {};
    for (int p = 0; p < positions; p += DEPTH) {
      const Position here = position_at(p + lane, positions, g, t, grid);
      const Position there = position_at(p + lane, positions, h, plain, grid);
      left.load(x + image * g.image_stride, left_rows, here, g);
      right.load(y + image * h.image_stride, right_rows, there, h);
      __syncthreads();
      multiply(sums, left_rows, right_rows);
      __syncthreads();
    }
    #pragma unroll
    for (int i = 0; i < MICRO; ++i)
      #pragma unroll
      for (int j = 0; j < MICRO; ++j) totals[i][j] += sums[i][j] * sums[i][j];
  }
#else
  for (long long p = begin; p < end; p += DEPTH) {
    const Position here = position_at((int)p + lane, (int)end, g, t, grid);
    left.load(x, left_rows, here, g);
    right.load(x, right_rows, here, g);
    __syncthreads();
    multiply(totals, left_rows, right_rows);
    __syncthreads();
  }
#endif
  float* part = parts + (blockIdx.y * (long long)work.groups + group) * work.rows * work.columns;
  #pragma unroll
  for (int i = 0; i < MICRO; ++i)
    #pragma unroll
    for (int j = 0; j < MICRO; ++j) {
      const int r = row * SIDE + threadIdx.x / 16 + 16 * i;
      const int c = column * SIDE + threadIdx.x % 16 + 16 * j;
      if (r < work.rows && c < work.columns) part[(long long)r * work.columns + c] = totals[i][j];
    }
}
